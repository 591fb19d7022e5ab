"""What a lab calls under each exercise: `check(name, answer)`, `hint(name)`, `reveal(name)`.

The exercises themselves, one object each, are in labs/exercises.py.
"""

import inspect
import math
import os
import runpy
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from functools import cache
from io import StringIO
from numbers import Real

from decodelab.arithmetic import catalog

LIST = "labs.exercises"
"""The module of the exercises' own functions, named after its file in the clone."""

RELATIVE_TOLERANCE = 1e-6
"""How far an answer may be from the reference: room for another order of float operations, not for another formula."""

NOT_ATTEMPTED = "not attempted yet"


@dataclass(frozen=True)
class Case:
    """One call that an answer must get right."""

    label: str
    arguments: tuple = ()
    keywords: dict = field(default_factory=dict)

    def call(self, function: Callable) -> float:
        """The function's value here."""
        return function(*self.arguments, **self.keywords)


@dataclass(frozen=True)
class Mistake:
    """What to say to a wrong function, and the function."""

    hint: str
    wrong: Callable


@dataclass(frozen=True)
class Exercise:
    """A function to write, in one place: the lab's text, the tests and `check` all read it here."""

    statement: str
    reference: Callable
    cases: Callable[[], list[Case]]  # the same list at each call
    mistakes: tuple[Mistake, ...]
    minutes: int
    difficulty: int  # 1 to 3
    importance: int  # 1 to 3
    behind: Callable  # where `reference` gets its number: itself, or the function whose result has several

    @property
    def name(self) -> str:
        return self.reference.__name__

    @property
    def marks(self) -> str:
        """The line under the exercise's title: minutes, difficulty, importance.

        >>> load()["kv_bytes_per_token"].marks
        '6 min · ●●○ · matters ●●●'
        """
        difficulty, importance = ("●" * count + "○" * (3 - count) for count in (self.difficulty, self.importance))
        return f"{self.minutes} min · {difficulty} · matters {importance}"

    def values(self, function: Callable) -> list[float]:
        """The function's value on each case."""
        return [case.call(function) for case in self.cases()]


@cache
def load() -> dict[str, Exercise]:
    """Every exercise of the labs by name, in the order of the labs. Raises: FileNotFoundError without labs/exercises.py."""
    return runpy.run_path(str(catalog.course_file("labs/exercises.py")), run_name=LIST)["EXERCISES"]


def check(name: str, answer: Callable) -> None:
    """Print `name: correct (n cases)`, or `name: not attempted yet` for an untouched stub.

    Inside nbgrader's own runs, which set NBGRADER_EXECUTION, an untouched stub raises like a wrong answer.
    Raises: AssertionError of one line: the hint of the mistake the answer makes, else its value beside the right one.
    """
    problem = _problem(_exercise(name), answer)
    if problem and (problem != NOT_ATTEMPTED or "NBGRADER_EXECUTION" in os.environ):
        error = AssertionError(f"{name}: {problem}")
        error._render_traceback_ = lambda: [f"AssertionError: {error}"]  # a notebook shows this line and no frames
        raise error
    print(f"{name}: {problem or f'correct ({len(_exercise(name).cases())} cases)'}")


def hint(name: str) -> None:
    """Print what people get wrong here, one line a mistake."""
    print(f"{name}: {len(_exercise(name).mistakes)} mistakes seen before")
    for mistake in _exercise(name).mistakes:
        print(f"- {mistake.hint}")


def reveal(name: str) -> None:
    """Print the library's own function: the answer, and where it lives."""
    exercise = _exercise(name)
    for function in dict.fromkeys((exercise.reference, exercise.behind)):
        print(f"# {function.__module__}.{function.__name__}\n{inspect.getsource(function)}")


def _exercise(name: str) -> Exercise:
    if name not in load():
        raise catalog.UnknownName(f"no exercise {name!r}; there are: {', '.join(load())}")
    return load()[name]


def _problem(exercise: Exercise, answer: Callable) -> str | None:
    """What is wrong with the answer, in one line; None where nothing is."""
    if not callable(answer):
        return f"this is of type {type(answer).__name__}; write a function"
    if _is_ours(answer):
        return "this is the library's own; write yours"
    cases = exercise.cases()
    given = [_outcome(case, answer) for case in cases]
    if all(outcome == NOT_ATTEMPTED for outcome in given):
        return NOT_ATTEMPTED
    for case, outcome in zip(cases, given, strict=True):
        if isinstance(outcome, str):
            return f"{outcome} ({case.label})"
    return _difference(exercise, given)


def _is_ours(answer: Callable) -> bool:
    """Whether the answer, or the function inside a functools.partial of it, comes from this library or its list."""
    module = getattr(getattr(answer, "func", answer), "__module__", None) or ""
    return module == LIST or module.partition(".")[0] == __name__.partition(".")[0]


def _outcome(case: Case, answer: Callable) -> float | str:
    """The answer's number on this case, or one line on why there is none. What the answer prints is dropped."""
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            value = case.call(answer)
        if isinstance(value, bool) or not isinstance(value, Real):
            return f"returned {type(value).__name__}; return one number"
        return float(value)
    except NotImplementedError:
        return NOT_ATTEMPTED
    except (Exception, SystemExit) as error:
        reason = str(error).strip().splitlines()
        return f"{type(error).__name__}: {reason[0]}" if reason else type(error).__name__


def _same(given: float, right: float) -> bool:
    return math.isclose(given, right, rel_tol=RELATIVE_TOLERANCE)


def _difference(exercise: Exercise, given: list[float]) -> str | None:
    """The hint of the mistake these values make, else the first wrong value beside the right one; None if all agree."""
    right = exercise.values(exercise.reference)
    if all(map(_same, given, right)):
        return None
    for mistake in exercise.mistakes:
        if all(map(_same, given, exercise.values(mistake.wrong))):
            return mistake.hint
    case, wrong, value = next(row for row in zip(exercise.cases(), given, right, strict=True) if not _same(*row[1:]))
    return f"your answer is {wrong:,.8g}, the right value {value:,.8g} ({case.label})"
