"""The reasoner's three tasks: traces against an independent computation, answers checked, ranges and the split."""

import itertools
from random import Random

import nbformat
import pytest

import course
from decodelab.teaching import tasks
from decodelab.teaching.tasks import DIGITS, ITEMS, SMALL, TASKS, VOCABULARY

DRAWS = 300
EACH = pytest.mark.parametrize("name", TASKS)


def drawn(name, count=DRAWS, *, seed=0):
    rng = Random(seed)
    return [TASKS[name].draw(rng) for _ in range(count)]


# ---- numbers and texts -----------------------------------------------------------------------------------------------


def test_numbers_are_written_backwards_and_read_back():
    for value in (0, 7, 10, 27, 100, 9_663, 1_000_000):
        assert tasks.digits(value) == "".join(reversed(str(value)))
        assert tasks.number(tasks.digits(value)) == tasks.number(tasks.small(value)) == value
        assert set(tasks.small(value)) <= set(SMALL)
    for text in ("", "a", "1 2", "-1", "1.5", "<answer>"):
        assert tasks.number(text) is None


def test_every_token_of_every_text_is_in_the_vocabulary_once():
    assert len(set(VOCABULARY)) == len(VOCABULARY) == 40
    for problem in itertools.chain.from_iterable(drawn(name) for name in TASKS):
        assert set(problem.text()) <= set(VOCABULARY)


def test_a_text_is_start_prompt_trace_answer_end_and_a_cut_shortens_the_trace_alone():
    problem = tasks.collatz(6)
    assert "".join(problem.text()) == "<start>C6=3₁01₂5₃61₄8₅4₆2₇1₈<answer>₈<end>"
    assert "".join(problem.text(cut=5)) == "<start>C6=3₁01₂<answer>₈<end>"
    assert "".join(problem.text(cut=0)) == "<start>C6=<answer>₈<end>"


# ---- traces against an independent computation -------------------------------------------------------------------------


def test_collatz_by_hand():
    assert tasks.collatz(1).trace == "" and tasks.collatz(1).answer == tasks.small(0)
    assert tasks.collatz(8) == tasks.Problem(task="collatz", prompt="C8=", trace="4₁2₂1₃", answer="₃")
    assert tasks.collatz(27).answer == tasks.small(111) and tasks.collatz(9_663).answer == tasks.small(184)  # OEIS A006577


def split(trace):
    """(number, count) pairs of a Collatz trace, read off by their digits."""
    groups = ["".join(group) for _, group in itertools.groupby(trace, key=lambda letter: letter in DIGITS)]
    return [(tasks.number(n), tasks.number(count)) for n, count in zip(groups[::2], groups[1::2], strict=True)]


def test_every_line_of_a_collatz_trace_follows_from_the_one_before():
    for problem in drawn("collatz"):
        n, pairs = tasks.number(problem.prompt[1:-1]), split(problem.trace)
        assert [count for _, count in pairs] == list(range(1, len(pairs) + 1)) and pairs[-1][0] == 1
        for before, (after, _) in zip([n, *(value for value, _ in pairs)], pairs, strict=False):
            assert after == (3 * before + 1 if before % 2 else before / 2)
        assert tasks.number(problem.answer) == len(pairs)


def test_multiplication_by_hand():
    assert tasks.multiplication(12, 34) == tasks.Problem(task="multiplication", prompt="M21*43=", trace="+84=84+063=804", answer="804")
    assert tasks.multiplication(7, 100).trace == "+0=0+00=0+007=007"  # partial products of 0 keep their shift


def test_every_sum_of_a_multiplication_is_the_product_so_far():
    for problem in drawn("multiplication"):
        a, b = (tasks.number(part) for part in problem.prompt[1:-1].split("*"))
        total, lines = 0, problem.trace.split("+")[1:]
        assert len(lines) == len(str(b))
        for place, line in enumerate(lines):
            part, so_far = line.split("=")
            total += (digit := b // 10**place % 10) * a * 10**place
            assert part == "0" * place + str(digit * a)[::-1] and tasks.number(so_far) == total
        assert tasks.number(problem.answer) == total == a * b


def test_search_by_hand():
    assert tasks.search([3, 5, 2], 7).prompt == "S352:7=" and tasks.search([3, 5, 2], 7).answer == "bc"
    assert tasks.search([4], 4).trace == "a₄"
    assert tasks.search([9, 1], 1).trace == "a₉xb₁"
    with pytest.raises(ValueError, match=r"no choice of \[2, 4\] adds up to 5"):
        tasks.search([2, 4], 5)


def depth_first(items, goal):
    """Every set in the order of a depth-first search, up to the first that reaches the goal: recursive, where the library keeps a stack."""
    visited = []

    def visit(chosen, at):
        for item in range(at, len(items)):
            now = [*chosen, item]
            visited.append(now)
            total = sum(items[i] for i in now)
            if total == goal or (total < goal and visit(now, item + 1)):
                return True
        return False

    assert visit([], 0)
    return visited


def test_a_search_visits_what_a_recursive_one_visits_and_marks_its_dead_ends():
    for problem in drawn("search"):
        items, goal = (problem.prompt[1:-1].split(":")[0], tasks.number(problem.prompt[1:-1].split(":")[1]))
        items, text = [int(item) for item in items], ""
        visited = depth_first(items, goal)
        for chosen in visited:
            total = sum(items[i] for i in chosen)
            mark = "" if total == goal else "x" if total > goal or chosen[-1] == len(items) - 1 else " "
            text += "".join(ITEMS[i] for i in chosen) + tasks.small(total) + mark
        assert problem.trace == text and problem.answer == "".join(ITEMS[i] for i in visited[-1])


# ---- answers ---------------------------------------------------------------------------------------------------------


@EACH
def test_a_problems_own_answer_is_right_and_any_other_number_is_not(name):
    for problem in drawn(name, 100):
        right = TASKS[name].is_right
        assert right(problem.prompt, problem.answer)
        for wrong in ("", "<answer>", "+", "9" * 7, problem.answer + problem.answer[-1], "₀" + problem.answer, problem.prompt, "h₁"):
            assert not right(problem.prompt, wrong), (problem, wrong)


def test_an_answer_in_the_wrong_writing_is_wrong():
    assert not TASKS["collatz"].is_right("C72=", "111") and TASKS["collatz"].is_right("C72=", "₁₁₁")
    assert not TASKS["collatz"].is_right("C72=", "₁₁₂")
    assert not TASKS["multiplication"].is_right("M21*43=", "408") and TASKS["multiplication"].is_right("M21*43=", "804")


def test_every_set_with_the_right_sum_is_right_and_no_other():
    for problem in drawn("search", 40):
        items, goal = problem.prompt[1:-1].split(":")
        goal = tasks.number(goal)
        for size in range(1, len(items) + 1):
            for chosen in itertools.combinations(range(len(items)), size):
                answer, fits = "".join(ITEMS[i] for i in chosen), sum(int(items[i]) for i in chosen) == goal
                assert TASKS["search"].is_right(problem.prompt, answer) == fits
                assert TASKS["search"].is_right(problem.prompt, answer[::-1]) == fits, "the order of the items does not matter"


def test_an_item_counts_once_and_must_be_there():
    assert TASKS["search"].is_right("S352:7=", "bc")
    for wrong in ("bcbc", "bcc", "bch", "bc ", "bc₇", "ab", "Bc"):
        assert not TASKS["search"].is_right("S352:7=", wrong)
    assert not TASKS["search"].is_right("S22:6=", "aab")


# ---- what was trained ------------------------------------------------------------------------------------------------


@EACH
def test_what_is_drawn_is_in_range_and_repeats_with_the_seed(name):
    assert all(problem.task == name and TASKS[name].in_range(problem.prompt) for problem in drawn(name))
    assert drawn(name, 20, seed=4) == drawn(name, 20, seed=4) != drawn(name, 20, seed=5)


def test_the_ends_of_the_trained_ranges():
    for start, inside in ((1, False), (2, True), (9_999, True), (10_000, False)):
        assert TASKS["collatz"].in_range(tasks.collatz(start).prompt) == inside
    for a, b, inside in ((1, 1, True), (999, 999, True), (1_000, 1, False), (1, 1_000, False)):
        assert TASKS["multiplication"].in_range(tasks.multiplication(a, b).prompt) == inside
    for count, inside in ((4, False), (5, True), (8, True)):
        assert TASKS["search"].in_range(tasks.search([1] * count, 2).prompt) == inside


def test_traces_have_very_different_lengths_and_a_search_its_limit():
    lengths = {name: sorted(len(problem.trace) for problem in drawn(name, 600)) for name in TASKS}
    assert lengths["collatz"][300] > 8 * lengths["multiplication"][300]
    assert lengths["search"][-1] <= tasks.LONGEST_SEARCH and lengths["search"][-1] > 5 * lengths["search"][300]
    prompts = [1 + len(problem.prompt) for problem in drawn("collatz", 600)]
    assert lengths["collatz"][300] > 40 * sorted(prompts)[300]


@EACH
def test_one_problem_in_eight_is_held_out_by_its_prompt_alone(name):
    problems = {problem.prompt: problem for problem in drawn(name, 3_000)}.values()
    assert 0.1 < sum(problem.held_out for problem in problems) / len(problems) < 0.15  # 0.125, four standard errors
    for problem in itertools.islice(problems, 200):
        assert problem.held_out == tasks.Problem(task="another", prompt=problem.prompt, trace="", answer="").held_out


def test_the_split_never_moves():
    """The weights were trained on the rest: another rule would hold out problems that they have seen."""
    assert [start for start in range(2, 200) if tasks.collatz(start).held_out][:6] == FIRST_HELD_OUT


FIRST_HELD_OUT = [9, 14, 21, 29, 32, 43]


def test_held_out_problems_are_different_and_repeat_with_the_seed():
    found = tasks.held_out_problems("search", 30, seed=2)
    assert len({problem.prompt for problem in found}) == 30 and all(problem.held_out for problem in found)
    assert found == tasks.held_out_problems("search", 30, seed=2) != tasks.held_out_problems("search", 30, seed=3)
    with pytest.raises(ValueError, match=r"no task is called 'sums'; there are: collatz, multiplication, search"):
        tasks.held_out_problems("sums", 3, seed=0)


def test_more_held_out_problems_than_there_are_is_an_error(monkeypatch):
    some = iter(itertools.cycle([tasks.collatz(start) for start in FIRST_HELD_OUT]))
    monkeypatch.setitem(TASKS, "collatz", tasks.Task(**{**vars(TASKS["collatz"]), "draw": lambda rng: next(some)}))
    assert len(tasks.held_out_problems("collatz", 6, seed=0)) == 6
    with pytest.raises(ValueError, match="7 held-out problems of collatz were asked and 6 found; ask for fewer"):
        tasks.held_out_problems("collatz", 7, seed=0)


# ---- what lesson 10 says of the law of lengths ---------------------------------------------------------------------------


def test_the_numbers_in_the_prose_of_lesson_10():
    """Its example read aloud, the two short walks, how wide the law is, and where it is thinner."""
    [path] = course.ROOT.glob("lessons/10_*.ipynb")
    prose = "\n".join(cell.source for cell in nbformat.read(str(path), as_version=4).cells)
    walk = split(tasks.collatz(416).trace)
    assert "`C614=` asks for 416" in prose and "`802₁` is the number 208 after 1 step, `61₀₁` is 16 after 10" in prose
    assert tasks.collatz(416).held_out and (walk[0], walk[9]) == ((208, 1), (16, 10))
    assert "208 after one step, 104 after two, " + ", ".join(str(n) for n, _ in walk[2:-1]) + ", and 1 after fourteen" in prose and len(walk) == 14
    assert "9 takes 61 tokens, 8 takes 6" in prose and (len(tasks.collatz(9).trace), len(tasks.collatz(8).trace)) == (61, 6)
    lengths = [len(problem.trace) for start in range(2, 10_000) if (problem := tasks.collatz(start)).held_out]
    assert "thinner, about 400 to 500 tokens" in prose
    before, thin, after = (sum(least < length <= least + 100 for length in lengths) for least in (300, 400, 500))
    assert thin < 0.75 * min(before, after)
    assert "prompts 4 to 7 tokens" in prose and {1 + len(tasks.collatz(start).prompt) for start in (2, 10, 100, 1_000, 9_999)} == {4, 5, 6, 7}


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [0, -3, 2.5, "27"])
def test_a_number_that_is_none_is_refused(wrong):
    with pytest.raises(ValueError, match="whole number of at least 1"):
        tasks.collatz(wrong)
    for pair in ((wrong, 3), (3, wrong)):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            tasks.multiplication(*pair)


@pytest.mark.parametrize("items", [[], [1] * 9, [0, 1], [10], [3, -1]])
def test_items_that_no_letter_names_are_refused(items):
    with pytest.raises(ValueError, match="1 to 8 numbers from 1 to 9"):
        tasks.search(items, 3)


@pytest.mark.parametrize("name, prompt", [("collatz", "C72"), ("collatz", "72="), ("collatz", "Cx="), ("collatz", "M1*2="), ("collatz", ""),
                                          ("multiplication", "M21="), ("multiplication", "M1*2*3="), ("multiplication", "C72="),
                                          ("search", "S352="), ("search", "C72="), ("search", "S3x2:7=")])  # fmt: skip
def test_a_prompt_of_another_task_is_refused_in_one_line(name, prompt):
    for check in (lambda: TASKS[name].is_right(prompt, "₁"), lambda: TASKS[name].in_range(prompt)):
        with pytest.raises(ValueError, match="is no prompt of this task; make one with"):
            check()
