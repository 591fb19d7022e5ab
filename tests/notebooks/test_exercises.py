"""Each exercise, without a kernel: the reference passes, every mistake fails with its own hint, a stub with none."""

import inspect
from functools import partial
from itertools import combinations

import pytest

from decodelab.arithmetic import cost
from decodelab.arithmetic.catalog import UnknownName
from decodelab.teaching import exercises
from decodelab.teaching.exercises import EXERCISES

ALL = pytest.mark.parametrize("exercise", EXERCISES.values(), ids=EXERCISES)
MISTAKES = [(exercise, mistake) for exercise in EXERCISES.values() for mistake in exercise.mistakes]
EACH_MISTAKE = pytest.mark.parametrize(
    ("exercise", "mistake"), MISTAKES, ids=[f"{e.name}-{m.wrong.__name__.strip('_')}" for e, m in MISTAKES]
)


def learners(source: str, name: str):
    """The function `name` of some source, as a learner's notebook would hold it."""
    namespace = {"__name__": "__main__", "cost": cost}
    exec(source, namespace)
    return namespace[name]


def mistake_source(exercise, mistake) -> str:
    """A mistake as source that a learner's notebook can hold."""
    helper = inspect.getsource(exercises._terms) if "_terms" in inspect.getsource(mistake.wrong) else ""
    return f"{helper}\n\n{inspect.getsource(mistake.wrong)}\n\n{exercise.name} = {mistake.wrong.__name__}"


def right_answer(exercise):
    return lambda *arguments, **keywords: exercise.reference(*arguments, **keywords)


@ALL
def test_b101_the_reference_passes_on_every_case(exercise, capsys):
    exercises.check(exercise.name, right_answer(exercise))
    assert capsys.readouterr().out == f"{exercise.name}: correct ({len(exercise.cases())} cases)\n"


@ALL
def test_cases_are_the_same_each_time_and_named_apart(exercise):
    assert exercise.cases() == exercise.cases()
    labels = [case.label for case in exercise.cases()]
    assert len(set(labels)) == len(labels) >= 10


@ALL
def test_cases_are_called_as_the_reference_is(exercise):
    signature = inspect.signature(exercise.reference)
    for case in exercise.cases():
        assert set(signature.bind(*case.arguments, **case.keywords).arguments) == set(signature.parameters)


@ALL
def test_b101_every_mistake_differs_from_the_reference_and_from_the_others(exercise):
    named = [("reference", exercise.reference), *((m.wrong.__name__, m.wrong) for m in exercise.mistakes)]
    values = {name: exercise.values(function) for name, function in named}
    assert len(exercise.mistakes) >= 3
    assert len({mistake.hint for mistake in exercise.mistakes}) == len(exercise.mistakes)
    for one, other in combinations(values, 2):
        assert not all(map(exercises._same, values[one], values[other])), f"{one} and {other} give the same values"


@EACH_MISTAKE
def test_b101_b062_every_mistake_fails_with_its_own_hint(exercise, mistake):
    answer = learners(mistake_source(exercise, mistake), exercise.name)
    with pytest.raises(AssertionError) as error:
        exercises.check(exercise.name, answer)
    assert str(error.value) == f"{exercise.name}: {mistake.hint}"
    assert error.value._render_traceback_() == [f"AssertionError: {error.value}"]


def test_b062_the_cases_of_kv_bytes_hold_the_published_shapes():
    values = {case.label: case.call(cost.kv_bytes_per_token) for case in EXERCISES["kv_bytes_per_token"].cases()}
    assert values["gpt2, dtype_bytes=2"] == 36_864
    assert values["Llama-3.1-8B, dtype_bytes=2"] == 131_072
    assert values["Llama-2-7B, dtype_bytes=2"] == 524_288


def test_the_cases_of_step_time_are_bound_by_each_term_in_turn():
    terms = [exercises._terms(*case.arguments, **case.keywords) for case in EXERCISES["step_time"].cases()]
    weights, products, reads, scores, overhead = zip(*terms, strict=True)
    for longer, shorter in [(weights, products), (products, weights), (reads, scores), (scores, reads)]:
        assert any(a > 1.1 * b for a, b in zip(longer, shorter, strict=True))
    assert min(overhead) == 0 < max(overhead)


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
    for answer in (exercise.reference, partial(exercise.reference), exercise.mistakes[0].wrong):
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
        (
            lambda config, *, dtype_bytes: 1234567,
            "your answer is 1,234,567, the right value 36,864 (gpt2, dtype_bytes=2)",
        ),
        (
            lambda config, *, dtype_bytes: float("nan"),
            "your answer is nan, the right value 36,864 (gpt2, dtype_bytes=2)",
        ),
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
    exercises.check(
        "kv_bytes_per_token",
        lambda config, *, dtype_bytes: dtype_bytes * 2.0 * config.head_dim * config.n_kv_heads * config.n_layers,
    )


@ALL
def test_hint_and_reveal(exercise, capsys):
    exercises.hint(exercise.name)
    said = capsys.readouterr().out
    assert all(f"- {mistake.hint}\n" in said for mistake in exercise.mistakes)
    exercises.reveal(exercise.name)
    assert f"def {exercise.name}(" in capsys.readouterr().out


def test_an_unknown_exercise_names_the_known():
    with pytest.raises(UnknownName, match="no exercise 'kv_bytes'; there are: kv_bytes_per_token, step_time"):
        exercises.check("kv_bytes", broken)
