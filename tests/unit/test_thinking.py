"""Budgets of thought: where a trace is cut, what is read and counted, and that a batch changes nothing."""

import math
import re
from collections import Counter
from dataclasses import replace
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from decodelab.arithmetic import cost, units
from decodelab.arithmetic.catalog import ModelConfig
from decodelab.decoder import weights
from decodelab.decoder.cache import ContextError
from decodelab.decoder.generate import generate
from decodelab.decoder.model import Decoder
from decodelab.decoder.sampling import Sampling
from decodelab.decoder.tokenizer import load_tokenizer
from decodelab.measuring import thinking
from decodelab.teaching import plots, tasks, widgets
from decodelab.teaching.tasks import ANSWER, END, START, TASKS, VOCABULARY

SHAPE = ModelConfig(name="tiny-reasoner", n_layers=2, hidden=32, intermediate=48, n_heads=4, n_kv_heads=2, head_dim=8, vocab_size=len(VOCABULARY),
                    max_context=128, tied_embeddings=True)  # fmt: skip
OPENS, ENDS = VOCABULARY.index(ANSWER), VOCABULARY.index(END)


class Letters:
    """The reasoner's vocabulary without a file."""

    end_ids = (ENDS,)

    def encode(self, text, *, start=True):
        return [VOCABULARY.index(token) for token in [START] * start + re.findall(r"<\w+>|.", text)]

    def decode(self, ids, *, skip_special):
        assert not skip_special
        return "".join(VOCABULARY[token] for token in ids)


class Scripted(Decoder):
    """Writes the letter of its prompt's length until position LAST, then answers with how many positions it had read, and ends.

    A prompt of n tokens has the trace that begins at position n and ends with LAST[n], so that each row has its own length.
    """

    LAST = {4: 9, 5: 30, 6: 6, 7: 1000, 8: 20}

    def forward(self, ids, *, cache, positions=None, last=None, every_row=False):
        start = cache.next_positions()[:, None] + torch.arange(ids.shape[1])
        super().forward(ids, cache=cache, positions=positions, last=last)
        at = torch.full((len(ids),), ids.shape[1] - 1) if last is None else last
        logits = torch.zeros(len(ids), len(VOCABULARY))
        for row, column in enumerate(at.tolist()):
            logits[row, VOCABULARY.index(self.next(VOCABULARY[ids[row, column]], int(start[row, column])))] = 1
        return logits

    def next(self, token, position):
        if token == "=":
            token = tasks.ITEMS[position + 1 - 4]  # position + 1 is the prompt's length
        if token in tasks.ITEMS:
            return ANSWER if position >= self.LAST[tasks.ITEMS.index(token) + 4] else token
        return tasks.small(position % 10) if token == ANSWER else END


def scripted():
    model = Scripted(replace(SHAPE, n_layers=1))
    for parameter in model.parameters():
        parameter.normal_(0, 0.02, generator=torch.Generator().manual_seed(0))
    return model.requires_grad_(False)


PROBLEMS = [SimpleNamespace(task="length", prompt="C" + "1" * n + "=") for n in (3, 1, 2, 5, 4)]  # 6, 4, 5, 8 and 7 tokens
CHECKS = {"length": SimpleNamespace(is_right=lambda prompt, answer: answer == "₁", in_range=lambda prompt: len(prompt) < 7)}


def run(budgets, *, problems=PROBLEMS, model=None, **how):
    return thinking.curve(model or scripted(), Letters(), problems, tasks=CHECKS, budgets=budgets, **how)


# ---- where a trace is cut ----------------------------------------------------------------------------------------------


def test_a_trace_ends_by_itself_or_exactly_at_its_budget():
    """Row by row: 6 tokens of prompt end at position 6 (1 token), 4 at 9 (6), 5 at 30 (26), 8 at 20 (13), 7 never."""
    [thought] = run([10])
    assert [len(answer.trace) for answer in thought.answers] == [answer.trace_tokens for answer in thought.answers] == [1, 6, 10, 10, 10]
    assert [answer.forced for answer in thought.answers] == [False, False, True, True, True]
    assert [answer.trace[0] for answer in thought.answers] == list("cabed")
    assert [answer.answer for answer in thought.answers] == ["₇", "₀", "₅", "₈", "₇"]  # the position of ANSWER
    assert all(answer.answer_tokens == 3 for answer in thought.answers)
    assert [answer.prompt_tokens for answer in thought.answers] == [6, 4, 5, 8, 7]
    assert [answer.in_range for answer in thought.answers] == [True, True, True, False, True]


@pytest.mark.parametrize("budget, forced, answer", [(12, True, "₀"), (13, False, "₁"), (14, False, "₁")])
def test_a_trace_as_long_as_the_budget_was_not_forced(budget, forced, answer):
    one = run([budget])[0].answers[3]
    assert (one.trace_tokens, one.forced, one.answer, one.right) == (min(13, budget), forced, answer, not forced)


def test_a_curve_is_what_each_budget_gives_alone():
    """Answers, and rows of every step: the shared steps are those that the budget takes by itself."""
    for thought in run([30, 1, 6, 7, 10]):
        [alone] = run([thought.budget])
        untimed = [[replace(answer, first_answer_s=0, total_s=0) for answer in each.answers] for each in (thought, alone)]
        assert untimed[0] == untimed[1]
        assert [step.rows for step in thought.steps] == [step.rows for step in alone.steps]
        assert (thought.weight_bytes, thought.kv_bytes) == (alone.weight_bytes, alone.kv_bytes)
    assert [thought.budget for thought in run([30, 1, 30, 6])] == [1, 6, 30]


def test_an_answer_has_its_limit_and_without_an_end_it_is_not_right(monkeypatch):
    monkeypatch.setattr(Scripted, "next", lambda self, token, position: "₁")
    [thought] = run([4])
    assert {(answer.answer_tokens, answer.answer) for answer in thought.answers} == {(thinking.ANSWER_TOKENS, "₁" * (thinking.ANSWER_TOKENS - 1))}
    monkeypatch.setitem(CHECKS, "length", SimpleNamespace(is_right=lambda *_: True, in_range=lambda _: True))
    assert run([4])[0].right == 0


def test_a_model_that_ends_without_an_answer_is_wrong(monkeypatch):
    monkeypatch.setattr(Scripted, "next", lambda self, token, position: END)
    monkeypatch.setitem(CHECKS, "length", SimpleNamespace(is_right=lambda *_: True, in_range=lambda _: True))
    [thought] = run([4])
    assert {(one.trace, one.answer, one.tokens, one.right, one.first_answer_s) for one in thought.answers} == {("", "", 1, False, None)}
    assert thought.steps == () and thought.kv_bytes == 0 and thought.per_right(1.0) == math.inf


# ---- a batch changes nothing ---------------------------------------------------------------------------------------------


def random_reasoner():
    model = weights.random(SHAPE, path="eager")
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(12)
    return model


def one_by_one(model, prompt, budget):
    """(trace, answer) by plain generation: up to the budget, then, where the trace has not ended, from the token put in its place."""
    ids = Letters().encode(prompt)
    out = [step.token for step in generate(model, ids, max_tokens=budget + 1, eos=[OPENS, ENDS])]
    if out[-1] != ENDS:
        out[-1] = OPENS
        out += [step.token for step in generate(model, [*ids, *out], max_tokens=thinking.ANSWER_TOKENS - 1, eos=[ENDS])]
    trace, _, answer = Letters().decode(out, skip_special=False).removesuffix(END).partition(ANSWER)
    return trace, answer


def test_rows_of_a_batch_say_what_each_says_alone():
    model, rng = random_reasoner(), Random(1)
    problems = [task.draw(rng) for _ in range(8) for task in TASKS.values()]
    for thought in thinking.curve(model, Letters(), problems, tasks=TASKS, budgets=[1, 9, 40]):
        assert [(one.trace, one.answer) for one in thought.answers] == [one_by_one(model, problem.prompt, thought.budget) for problem in problems]
    assert len({one.trace_tokens for one in thought.answers}) > 3, "rows that leave at different times"


def test_rows_that_stay_keep_their_cache():
    model = random_reasoner()
    cache = model.new_cache(max_len=6, batch=5)
    cache.fill_random(4, generator=torch.Generator().manual_seed(2))
    cache.place(torch.tensor([[4], [7], [5], [9], [6]]))
    before = [(keys[:, :, :4].clone(), values[:, :, :4].clone()) for keys, values in zip(cache.keys, cache.values, strict=True)]
    rows = range(5)
    for stay, order in (([1, 2, 4], [4, 1, 2]), ([0, 2], [0, 2])):
        rows = [rows[at] for at in order]
        assert thinking.keep_rows(cache, stay) == order and cache.batch == len(order)
        for layer, (keys, values) in enumerate(before):
            assert torch.equal(cache.keys[layer][:, :, :4], keys[rows]) and torch.equal(cache.values[layer][:, :, :4], values[rows])
        assert cache.positions[:, 4].tolist() == [[4, 7, 5, 9, 6][row] for row in rows]


def test_sampled_traces_repeat_with_the_generator():
    model, hot = random_reasoner(), {"sampling": Sampling(temperature=3.0), "tasks": TASKS, "budget": 12}
    problems = [TASKS["collatz"].draw(Random(3))] * 6
    first, again, other = (thinking.think(model, Letters(), problems, generator=torch.Generator().manual_seed(seed), **hot) for seed in (0, 0, 1))
    said = [[answer.trace for answer in thought.answers] for thought in (first, again, other)]
    assert said[0] == said[1] != said[2] and len(set(said[0])) > 1


# ---- what is counted -------------------------------------------------------------------------------------------------


def test_steps_rows_and_bytes_by_hand():
    """Budget 6: rows write 1, 6, 6, 6, 6 tokens of trace and 3 of answer: 4 and 9 in all, so 3 and 8 steps."""
    model = scripted()
    [thought] = run([6], model=model)
    assert thought.tokens == [4, 9, 9, 9, 9]
    assert [step.rows for step in thought.steps] == [5, 5, 5, 4, 4, 4, 4, 4]
    contexts = [range(7, 10), *(range(prompt + 1, prompt + 9) for prompt in (4, 5, 8, 7))]
    assert thought.kv_bytes == cost.kv_bytes_per_token(model.config, dtype_bytes=4) * sum(map(sum, contexts))
    assert thought.weight_bytes == sum(cost.weight_bytes_per_step(model.config, dtype_bytes=4, batch=rows) for rows in [5] * 3 + [4] * 5)


def test_seconds_add_up():
    [thought] = run([30])
    seconds = [step.seconds for step in thought.steps]
    assert thought.decode_s == sum(seconds) and min(seconds) > 0 and thought.prefill_s > 0
    for answer in thought.answers:
        assert answer.first_answer_s == pytest.approx(thought.prefill_s + sum(seconds[: answer.trace_tokens + 1]))
        assert answer.total_s == pytest.approx(thought.prefill_s + sum(seconds[: answer.tokens - 1]))
        assert thought.prefill_s < answer.first_answer_s < answer.total_s


def test_the_cost_of_a_right_answer_pays_for_the_wrong_ones():
    [thought] = run([13])  # only the trace of 13 tokens opens its answer at a position that ends in 1
    assert thought.right == 1 and thought.accuracy == 0.2 and thought.per_right(10.0) == 10.0
    assert re.match(r"budget 13: 1 of 5 right, 20\.0% \(95 %: 3\.6% to 62\.4%\); tokens: mean 12, median 16; 15 steps", repr(thought))


def test_wilson_against_the_equation_it_solves():
    """The ends are the shares from which the found one is 1.96 standard errors away."""
    for right, n in ((0, 10), (3, 10), (95, 100), (200, 200), (1, 1)):
        for end in thinking.wilson(right, n):
            assert (right / n - end) ** 2 == pytest.approx(1.96**2 * end * (1 - end) / n, abs=1e-12)
        low, high = thinking.wilson(right, n)
        assert 0 <= low <= right / n <= high <= 1


def answers(text):
    shown = run([1], problems=PROBLEMS[:1])[0].answers[0]
    return [replace(shown, answer=letter, right=letter == "b") for letter in text]


def test_a_vote_takes_the_most_frequent_answer_and_on_a_tie_the_first():
    assert [one.answer for one in thinking.vote(answers("abbcab"), voters=3)] == ["b", "c"]
    assert sum(one.right for one in thinking.vote(answers("abbbaa"), voters=3)) == 1
    assert [one.answer for one in thinking.vote(answers("abc"), voters=1)] == list("abc")
    ballots = ["".join(Random(seed).choices("abc", k=5)) for seed in range(40)]
    for winner, ballot in zip(thinking.vote(answers("".join(ballots)), voters=5), ballots, strict=True):
        assert Counter(ballot)[winner.answer] == max(Counter(ballot).values())
    for voters in (0, 2):
        with pytest.raises(ValueError, match=f"3 answers are no whole number of votes of {voters}"):
            thinking.vote(answers("abc"), voters=voters)


# ---- the lesson's figure and slider ------------------------------------------------------------------------------------


def test_the_figure_sets_right_answers_beside_the_law_of_lengths():
    """Four traces: two of them end within 20 tokens, three within 100."""
    _, ax = plots.axes()
    plots.budgets([(20, 0.5, (0.4, 0.7)), (100, 0.75, (0.6, 0.8))], lengths=[90, 5, 20, 300], ax=ax, title="t", caption="c")
    law, dots = ax.get_lines()[:2]
    assert dict(zip(law.get_xdata(), law.get_ydata(), strict=True)) == {0: 0, 5: 25, 20: 50, 90: 75, 102: 75}
    assert dots.get_xydata().tolist() == [[20, 50], [100, 75]]
    [bars] = ax.collections
    assert np.allclose([bar[:, 1] for bar in bars.get_segments()], [[40, 70], [60, 80]])


def test_the_slider_shows_what_was_measured_at_its_budget():
    thoughts = run([6, 13, 30])
    explorer = widgets.budget_explorer(thoughts[1:], dollars_per_million_out=10.0)
    assert explorer.sliders["budget"].options == (13, 30) and explorer.sliders["budget"].value == 30
    shown = explorer.picture.value
    explorer.sliders["budget"].value = 13
    assert explorer.picture.value != shown
    assert explorer.text.startswith("budget 13: 1 of 5 right, 20.0 %\na right answer costs 61.0 tokens · ")
    assert explorer.text.endswith("0.0610 cents at 10 dollars per million output tokens")
    assert f"{units.format_bytes(thoughts[1].weight_bytes + thoughts[1].kv_bytes, 3)} read" in explorer.text


# ---- energy ------------------------------------------------------------------------------------------------------------


def counter(folder, name, value):
    (folder / name).mkdir(exist_ok=True)
    (folder / name / "energy_uj").write_text(f"{value}\n")
    (folder / name / "max_energy_range_uj").write_text("1000\n")


def test_joules_come_from_the_packages_counters_and_survive_their_wrap(tmp_path, monkeypatch):
    """Each pass uses 20 and 30 microjoules; one counter starts again on the way."""
    standing, step = {"intel-rapl:0": 930, "intel-rapl:1": 5, "intel-rapl:0:0": 0}, Scripted.forward  # the third is a part of the first
    for name, value in standing.items():
        counter(tmp_path, name, value)
    found = thinking.energy_counters(tmp_path)
    assert {file.parent.name: most for file, most in found.items()} == {"intel-rapl:0": 1000, "intel-rapl:1": 1000}
    monkeypatch.setattr(thinking, "energy_counters", lambda: found)

    def working(*args, **named):
        for name, used in (("intel-rapl:0", 20), ("intel-rapl:1", 30)):
            standing[name] += used
            counter(tmp_path, name, standing[name] % 1000)
        return step(*args, **named)

    monkeypatch.setattr(Scripted, "forward", working)
    [thought] = run([1])
    assert standing["intel-rapl:0"] > 1000
    assert {step.joules for step in thought.steps} == {50e-6} and thought.joules == pytest.approx(len(thought.steps) * 50e-6)


def test_without_counters_there_are_no_joules(tmp_path, monkeypatch):
    assert thinking.energy_counters(tmp_path) == thinking.energy_counters(tmp_path / "none") == {}
    counter(tmp_path, "intel-rapl:0", 1)
    (tmp_path / "intel-rapl:0" / "max_energy_range_uj").unlink()
    assert thinking.energy_counters(tmp_path) == {}
    monkeypatch.setattr(thinking, "energy_counters", dict)
    assert run([1])[0].joules is None


# ---- bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, -5, 2.5])
def test_a_budget_below_one_token_is_refused(budget):
    with pytest.raises(ValueError, match=rf"budget is {budget}; it must be at least 1 token of trace, a whole number"):
        run([6, budget])


def test_a_budget_beyond_the_context_is_refused_before_anything_runs(monkeypatch):
    """128 positions, a prompt of 8 and 12 tokens of answer, of which the last is never read: 109 are left."""
    monkeypatch.setattr(Scripted, "forward", lambda *_, **__: pytest.fail("ran"))
    with pytest.raises(ContextError, match=r"a budget of 110 tokens after a prompt of 8 .* has 128 positions .* Give at most 109\."):
        run([3, 110])


def test_the_longest_budget_that_fits_runs(monkeypatch):
    monkeypatch.setattr(Scripted, "next", lambda self, token, position: "a")
    assert run([109])[0].tokens == [109 + thinking.ANSWER_TOKENS] * 5


def test_other_bad_input_is_named():
    with pytest.raises(ValueError, match=r"no task is called 'sums'; there are: length"):
        run([1], problems=[*PROBLEMS, SimpleNamespace(task="sums", prompt="C1=")])
    for budgets, problems in (([], PROBLEMS), ([1], [])):
        with pytest.raises(ValueError, match="measure nothing"):
            run(budgets, problems=problems)
    compiled = scripted()
    compiled.fast = object()
    with pytest.raises(ValueError, match=r'runs the fast path.* load it with path="eager"'):
        run([1], model=compiled)


# ---- the trained model ---------------------------------------------------------------------------------------------------


def test_the_reasoner_thinks_to_the_end_and_a_cut_trace_costs_it_the_answer():
    """Held-out starts whose traces end within 120 tokens: right with the whole trace, mostly wrong with a tenth of it."""
    model, tokenizer, rng = weights.load("reasoner", dtype="float32", path="eager"), load_tokenizer("reasoner"), Random(0)
    problems = []
    while len(problems) < 12:
        problem = TASKS["collatz"].draw(rng)
        problems += [problem] if problem.held_out and 40 < len(problem.trace) <= 120 else []
    short, full = thinking.curve(model, tokenizer, problems, tasks=TASKS, budgets=[8, 120])
    assert full.right >= 11 and not any(answer.forced for answer in full.answers if answer.right)
    assert all(answer.trace == problem.trace for answer, problem in zip(full.answers, problems, strict=True) if answer.right)
    assert all(answer.forced and answer.tokens < 8 + thinking.ANSWER_TOKENS + 1 for answer in short.answers) and short.right <= 4
