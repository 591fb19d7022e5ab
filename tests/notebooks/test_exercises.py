"""Each exercise, without a kernel: the reference passes, every mistake fails with its own hint, a stub with none."""

import inspect
import subprocess
import sys
from functools import partial
from itertools import combinations
from types import FunctionType

import pytest

from decodelab.arithmetic import catalog, cost, planning
from decodelab.arithmetic.catalog import UnknownName
from decodelab.teaching import exercises

EXERCISES = exercises.load()
ALL = pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
MISTAKES = [(exercise, number) for exercise in EXERCISES.values() for number in range(len(exercise.mistakes))]
EACH_MISTAKE = pytest.mark.parametrize(("exercise", "number"), MISTAKES, ids=[f"{e.name}-{number}" for e, number in MISTAKES])


def learners(function):
    """The same function as if a learner's notebook had defined it."""
    theirs = {**function.__globals__, "__name__": "__main__"}
    own = FunctionType(function.__code__, theirs, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


def right_answer(exercise):
    return lambda *arguments, **keywords: exercise.reference(*arguments, **keywords)


@ALL
def test_b101_the_reference_passes_on_every_case(exercise, capsys):
    exercises.check(exercise.name, right_answer(exercise))
    assert capsys.readouterr().out == f"{exercise.name}: correct ({len(exercise.cases())} cases)\n"


@ALL
def test_cases_are_the_same_each_time_and_named_apart(exercise):
    once, again = ([(case.label, case.arguments, case.keywords) for case in exercise.cases()] for _ in range(2))
    assert once == again
    labels = [case.label for case in exercise.cases()]
    assert len(set(labels)) == len(labels) >= 10


@ALL
def test_cases_are_called_as_the_reference_is(exercise):
    signature = inspect.signature(exercise.reference)
    for case in exercise.cases():
        assert set(signature.bind(*case.arguments, **case.keywords).arguments) == set(signature.parameters)


@ALL
def test_b101_every_mistake_differs_from_the_reference_and_from_the_others(exercise):
    values = {"the reference": exercise.values(exercise.reference)}
    values |= {mistake.hint: exercise.values(mistake.wrong) for mistake in exercise.mistakes}
    assert len(exercise.mistakes) >= 3
    assert len({mistake.hint for mistake in exercise.mistakes}) == len(exercise.mistakes)
    for one, other in combinations(values, 2):
        assert not all(map(exercises._same, values[one], values[other])), f"same values: {one!r} and {other!r}"


@EACH_MISTAKE
def test_b101_b062_every_mistake_fails_with_its_own_hint(exercise, number):
    mistake = exercise.mistakes[number]
    with pytest.raises(AssertionError) as error:
        exercises.check(exercise.name, learners(mistake.wrong))
    assert str(error.value) == f"{exercise.name}: {mistake.hint}"
    assert error.value._render_traceback_() == [f"AssertionError: {error.value}"]


def test_b062_the_cases_of_kv_bytes_hold_the_published_shapes():
    values = {case.label: case.call(cost.kv_bytes_per_token) for case in EXERCISES["kv_bytes_per_token"].cases()}
    assert values["gpt2, dtype_bytes=2"] == 36_864
    assert values["Llama-3.1-8B, dtype_bytes=2"] == 131_072
    assert values["Llama-2-7B, dtype_bytes=2"] == 524_288


def test_there_are_enough_exercises_and_each_says_what_it_asks():
    assert len(EXERCISES) >= 16
    for exercise in EXERCISES.values():
        head = f"Write `{exercise.name}({', '.join(_signature(exercise.reference))})`"
        assert exercise.statement.startswith(head), exercise.name
        assert 1 <= exercise.difficulty <= 3 and 1 <= exercise.importance <= 3 and 3 <= exercise.minutes <= 15


def _signature(function) -> list[str]:
    """Parameter names as `def` writes them, keyword-only ones behind a star."""
    names, parameters = [], inspect.signature(function).parameters.values()
    for parameter in parameters:
        if parameter.kind == parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
    return names


# One value of each reference worked by hand, so that a reference cannot drift together with its mistakes.
BY_HAND = {
    "weight_bytes_per_step": (("llama-3.1-8b",), {"dtype_bytes": 2, "batch": 1}, 15_009_857_536),
    "kv_bytes": (("gpt-oss-20b",), {"context": 1000, "dtype_bytes": 2}, 2 * 2 * 8 * 64 * (12 * 1000 + 12 * 128)),
    "crossover_tokens": (("gpt2",), {"batch": 1, "weight_bytes_per_value": 4, "kv_bytes_per_value": 4}, 494_619_648 / 73_728),
    "weight_flops": (("gpt2",), {"tokens": 1, "logit_rows": 1}, 247_064_064),
    "expected_experts": (("mixtral-8x7b",), {"tokens": 2}, 8 * (1 - 0.75**2)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_references_give_the_values_worked_by_hand(name):
    """B062, B069, B071: the catalogue's named shapes."""
    (model,), keywords, value = BY_HAND[name]
    assert EXERCISES[name].reference(catalog.model(model), **keywords) == pytest.approx(value, rel=1e-9)


def test_b070_prefill_sees_half_of_its_square_and_decode_all_of_its_context():
    pairs = EXERCISES["visible_pairs"].reference
    assert pairs(new_tokens=1024, context=1024, window=0) == 524_800
    assert pairs(new_tokens=1, context=1024, window=0) == 1024


def test_a_and_b_make_the_step_and_its_sum_the_answer():
    """t(n) = a + b*n is step_time, and decode_s its sum over prompt + 1 ... prompt + output - 1."""
    config, machine = catalog.model("llama-3.1-8b"), cost.floor_constants(catalog.hardware("h200-sxm"))
    a = EXERCISES["intercept_s"].reference(config, machine, batch=1, weight_bytes_per_value=2)
    b = EXERCISES["slope_s_per_token"].reference(config, machine, batch=1, kv_bytes_per_value=2)
    assert a + 4096 * b == pytest.approx(cost.step_time(config, machine, context=4096))
    total = sum(cost.step_time(config, machine, context=n) for n in range(101, 150))
    assert EXERCISES["decode_s"].reference(config, machine, prompt=100, output=50) == pytest.approx(total)


def test_one_formula_for_the_ridge():
    """The exercise takes a card; lessons and sweeps take its floor and the bytes of its format."""
    found, sizes = EXERCISES["ridge_batch"], {"float32": 4, "bfloat16": 2}
    cases = [case.arguments for case in found.cases()]
    assert {card.dtype for _, card in cases} == set(sizes)
    for config, card in cases:
        assert found.reference(config, card) == planning.ridge_batch(config, card.floor(), weight_bytes_per_value=sizes[card.dtype])


def test_the_cases_of_step_time_are_bound_by_each_term_in_turn():
    terms = [EXERCISES["step_time"].cases.__globals__["_terms"](*case.arguments, **case.keywords) for case in EXERCISES["step_time"].cases()]
    weights, products, reads, scores, overhead = zip(*terms, strict=True)
    for longer, shorter in [(weights, products), (products, weights), (reads, scores), (scores, reads)]:
        assert any(a > 1.1 * b for a, b in zip(longer, shorter, strict=True))
    assert min(overhead) == 0 < max(overhead)


def test_the_list_is_read_on_first_use_and_needs_no_torch():
    """What a browser edition could load: of the library, arithmetic, serving (its scheduler) and teaching alone."""
    ask = """import sys
from decodelab.teaching import exercises
print(exercises.load.cache_info().currsize, len(exercises.load()), exercises.load.cache_info().currsize)
print(sorted({name.split(".")[1] for name in sys.modules if name.startswith("decodelab.")}), "torch" in sys.modules)"""
    said = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    assert said.stdout.splitlines() == [f"0 {len(EXERCISES)} 1", "['arithmetic', 'serving', 'teaching'] False"], said.stderr


@ALL
def test_an_untouched_stub_prints_and_raises_nothing(exercise, monkeypatch, capsys):
    monkeypatch.delenv("NBGRADER_EXECUTION", raising=False)

    def stub(*arguments, **keywords):
        raise NotImplementedError()

    exercises.check(exercise.name, stub)
    assert capsys.readouterr().out == f"{exercise.name}: not attempted yet\n"
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    with pytest.raises(AssertionError, match=f"^{exercise.name}: not attempted yet$"):
        exercises.check(exercise.name, stub)


@ALL
def test_the_librarys_own_function_is_refused(exercise):
    for answer in (exercise.reference, partial(exercise.reference), partial(exercise.mistakes[0].wrong)):
        with pytest.raises(AssertionError, match="this is the library's own; write yours$"):
            exercises.check(exercise.name, answer)


def broken(config, *, dtype_bytes):
    return 1 / 0


def lines(config, *, dtype_bytes):
    raise ValueError("first line\nsecond line")


def half_done(config, *, dtype_bytes):
    if config.name == "Qwen3-4B":
        raise NotImplementedError
    return cost.kv_bytes_per_token(config, dtype_bytes=dtype_bytes)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (broken, "ZeroDivisionError: division by zero (gpt2, dtype_bytes=2)"),
        (lines, "ValueError: first line (gpt2, dtype_bytes=2)"),
        (half_done, "not attempted yet (Qwen3-4B, dtype_bytes=1)"),
        (lambda config, *, dtype_bytes: None, "returned NoneType; return one number (gpt2, dtype_bytes=2)"),
        (lambda config, *, dtype_bytes: "36864", "returned str; return one number (gpt2, dtype_bytes=2)"),
        (lambda config, *, dtype_bytes: [36864], "returned list; return one number (gpt2, dtype_bytes=2)"),
        (lambda config, *, dtype_bytes: True, "returned bool; return one number (gpt2, dtype_bytes=2)"),
        (lambda config, *, dtype_bytes: exit(), "SystemExit"),
        (lambda config, *, dtype_bytes: 10**400, "OverflowError: int too large to convert to float"),
        (lambda config: 1, "TypeError: "),
        (36_864, "this is of type int; write a function"),
        (lambda config, *, dtype_bytes: 1234567, "your answer is 1,234,567, the right value 36,864 (gpt2, dtype_bytes=2)"),
        (lambda config, *, dtype_bytes: float("nan"), "your answer is nan, the right value 36,864 (gpt2, dtype_bytes=2)"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_every_other_answer_fails_in_one_line(answer, message):
    with pytest.raises(AssertionError) as error:
        exercises.check("kv_bytes_per_token", answer)
    assert str(error.value).startswith(f"kv_bytes_per_token: {message}")
    assert "\n" not in str(error.value)


def test_what_an_answer_prints_does_not_reach_the_verdict(capsys):
    def chatty(config, *, dtype_bytes):
        print("debug")
        return cost.kv_bytes_per_token(config, dtype_bytes=dtype_bytes)

    exercises.check("kv_bytes_per_token", chatty)
    assert capsys.readouterr().out == "kv_bytes_per_token: correct (12 cases)\n"


def test_an_answer_in_floats_or_in_another_order_is_right():
    exercises.check("kv_bytes_per_token", lambda config, *, dtype_bytes: dtype_bytes * 2.0 * config.head_dim * config.n_kv_heads * config.n_layers)


@ALL
def test_hint_and_reveal(exercise, capsys):
    exercises.hint(exercise.name)
    said = capsys.readouterr().out
    assert all(f"- {mistake.hint}\n" in said for mistake in exercise.mistakes)
    exercises.reveal(exercise.name)
    shown = capsys.readouterr().out
    assert f"def {exercise.name}(" in shown and f"def {exercise.behind.__name__}(" in shown


def test_an_unknown_exercise_names_the_known():
    with pytest.raises(UnknownName, match="no exercise 'kv'; there are: kv_bytes_per_token, step_time, weight_bytes"):
        exercises.check("kv", broken)
