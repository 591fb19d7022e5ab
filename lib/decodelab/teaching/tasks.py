"""Three tasks whose answers are right or wrong by computation, written out as the tiny reasoner is trained to think.

A text is prompt, trace, ANSWER, answer, END. Numbers are written least significant digit first, as carries run; counts
and sums are written in subscripts, so that no space is needed between two numbers. One character is one token.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

START, END, ANSWER = "<start>", "<end>", "<answer>"
DIGITS, SMALL, ITEMS = "0123456789", "₀₁₂₃₄₅₆₇₈₉", "abcdefgh"
VOCABULARY = (START, END, ANSWER, *DIGITS, *SMALL, *"CMS*=+:x ", *ITEMS)
"""The tokens of target and draft; a token's id is its place."""

HELD_OUT = 8  # one problem in so many is never trained on
LONGEST_SEARCH = 400  # tokens of trace; a longer one is drawn again


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One question with its full trace and its answer. The prompt carries no START: the tokenizer adds it."""

    task: str
    prompt: str
    trace: str
    answer: str

    @property
    def held_out(self) -> bool:
        """Whether training leaves this problem out: decided by its prompt alone."""
        return zlib.crc32(self.prompt.encode()) % HELD_OUT == 0

    def text(self, *, cut: int | None = None) -> list[str]:
        """Tokens of the whole text; with `cut`, of one that thinks only so many tokens before it answers."""
        return [START, *self.prompt, *self.trace[:cut], ANSWER, *self.answer, END]


@dataclass(frozen=True, kw_only=True)
class Task:
    """A kind of problem: what is asked, what was trained, how one is drawn and how an answer is checked."""

    name: str
    question: str
    trained: str
    draw: Callable[[Random], Problem]
    is_right: Callable[[str, str], bool]  # prompt, answer
    in_range: Callable[[str], bool]  # whether problems such as this prompt were trained


def digits(number: int) -> str:
    """Decimal digits, least significant first.

    >>> digits(27)
    '72'
    """
    return str(number)[::-1]


def small(number: int) -> str:
    """The same in subscripts.

    >>> small(27)
    '₇₂'
    """
    return digits(number).translate(str.maketrans(DIGITS, SMALL))


def number(text: str) -> int | None:
    """The number that `digits` or `small` wrote; None where the text is none.

    >>> number("72"), number("₇₂"), number("7x")
    (27, 27, None)
    """
    plain = text.translate(str.maketrans(SMALL, DIGITS))
    return int(plain[::-1]) if plain and set(plain) <= set(DIGITS) else None


def collatz(start: int) -> Problem:
    """How many steps lead from `start` to 1: halve what is even, else take 3n + 1. Each number is followed by its count.

    >>> collatz(6).trace
    '3₁01₂5₃61₄8₅4₆2₇1₈'
    """
    n, steps, trace = _whole("start", start, 1), 0, []
    while n > 1:
        n, steps = n // 2 if n % 2 == 0 else 3 * n + 1, steps + 1
        trace.append(digits(n) + small(steps))
    return Problem(task="collatz", prompt=f"C{digits(start)}=", trace="".join(trace), answer=small(steps))


def multiplication(a: int, b: int) -> Problem:
    """a * b by the school's method: for each digit of b, the shifted product and the sum so far.

    >>> multiplication(12, 34).trace
    '+84=84+063=804'
    """
    total, trace = 0, []
    for place, digit in enumerate(digits(_whole("b", b, 1))):
        part = _whole("a", a, 1) * int(digit)
        total += part * 10**place
        trace.append(f"+{'0' * place}{digits(part)}={digits(total)}")
    return Problem(task="multiplication", prompt=f"M{digits(a)}*{digits(b)}=", trace="".join(trace), answer=digits(total))


def search(items: Sequence[int], goal: int) -> Problem:
    """Which items add up to `goal`: depth first in their order, back from every dead end. Each set is followed by its sum.

    A set that reaches the goal ends the search; one that exceeds it, or has no item left to add, is marked x.
    The answer of the trace is the first set found; any set with that sum is right. Raises: ValueError where there is none.

    >>> search([3, 5, 2], 7).trace
    'a₃ ab₈xac₅xb₅ bc₇'
    """
    if not 1 <= len(items) <= len(ITEMS) or not all(1 <= item <= 9 for item in items):
        raise ValueError(f"items are {list(items)}; they must be 1 to {len(ITEMS)} numbers from 1 to 9")
    trace, chosen = [], [0]
    while chosen:
        total = sum(items[at] for at in chosen)
        name = "".join(ITEMS[at] for at in chosen)
        trace.append(name + small(total))
        if total == goal:
            return Problem(task="search", prompt=f"S{''.join(map(str, items))}:{digits(goal)}=", trace="".join(trace), answer=name)
        dead = total > goal or chosen[-1] == len(items) - 1
        trace.append("x" if dead else " ")
        if not dead:
            chosen.append(chosen[-1] + 1)
            continue
        last = chosen.pop()
        while chosen and last == len(items) - 1:
            last = chosen.pop()
        if last < len(items) - 1:
            chosen.append(last + 1)
    raise ValueError(f"no choice of {list(items)} adds up to {goal}")


def _whole(name: str, value: int, least: int) -> int:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{name} is {value!r} and must be a whole number of at least {least}")
    return value


# Drawing problems, and checking what came back.


def _draw_collatz(rng: Random) -> Problem:
    return collatz(rng.randrange(2, 10_000))


def _draw_multiplication(rng: Random) -> Problem:
    return multiplication(rng.randrange(1, 1000), rng.randrange(1, 1000))


def _draw_search(rng: Random) -> Problem:
    while True:
        items = [rng.randrange(1, 10) for _ in range(rng.randrange(5, len(ITEMS) + 1))]
        problem = search(items, sum(item for item in items if rng.random() < 0.5) or items[0])
        if len(problem.trace) <= LONGEST_SEARCH:
            return problem


def _numbers(prompt: str, letter: str, between: str, *, count: int) -> list[int]:
    """The numbers in a prompt of one task. Raises: ValueError where it is none."""
    body = prompt.removeprefix(letter).removesuffix("=")
    found = [number(part) for part in body.split(between)] if prompt == f"{letter}{body}=" else []
    if None in found or len(found) != count:
        raise ValueError(f"{prompt!r} is no prompt of this task; make one with tasks.draw or with the task's own function")
    return found


def _right_collatz(prompt: str, answer: str) -> bool:
    return answer == collatz(*_numbers(prompt, "C", " ", count=1)).answer


def _right_multiplication(prompt: str, answer: str) -> bool:
    a, b = _numbers(prompt, "M", "*", count=2)
    return answer == digits(a * b)


def _right_search(prompt: str, answer: str) -> bool:
    items, goal = _items(prompt), _numbers(prompt, "S", ":", count=2)[1]
    places = [ITEMS.find(letter) for letter in answer]
    chosen = [items[at] for at in places if 0 <= at < len(items)]
    return bool(places) and len(chosen) == len(set(places)) == len(places) and sum(chosen) == goal


def _items(prompt: str) -> list[int]:
    _numbers(prompt, "S", ":", count=2)
    return [int(item) for item in prompt[1 : prompt.index(":")]]


TASKS = {
    task.name: task
    for task in (
        Task(name="collatz", question="how many steps lead to 1", trained="starts from 2 to 9,999", draw=_draw_collatz, is_right=_right_collatz,
             in_range=lambda prompt: 2 <= _numbers(prompt, "C", " ", count=1)[0] < 10_000),
        Task(name="multiplication", question="the product", trained="factors from 1 to 999", draw=_draw_multiplication,
             is_right=_right_multiplication, in_range=lambda prompt: all(1 <= n < 1000 for n in _numbers(prompt, "M", "*", count=2))),
        Task(name="search", question="which items add up to the goal", trained="5 to 8 items from 1 to 9, traces of up to 400 tokens",
             draw=_draw_search, is_right=_right_search, in_range=lambda prompt: 5 <= len(_items(prompt)) <= len(ITEMS)),
    )
}  # fmt: skip


def held_out_problems(name: str, count: int, *, seed: int) -> list[Problem]:
    """`count` different problems of one task, none of them trained on. Raises: ValueError for an unknown task, or where there are not so many."""
    if name not in TASKS:
        raise ValueError(f"no task is called {name!r}; there are: {', '.join(TASKS)}")
    rng, found = Random(seed), {}
    for _ in range(1000 * count):
        problem = TASKS[name].draw(rng)
        found |= {problem.prompt: problem} if problem.held_out else {}
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"{count} held-out problems of {name} were asked and {len(found)} found; ask for fewer")
