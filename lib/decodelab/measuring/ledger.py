"""The ledger: for each technique the class of every quantity it touches, predicted and measured, side by side.

The rows themselves, one object each, are in labs/techniques.py. A class is "cut" (at least 10 % less), "same" (within
10 %) or "worse" (at least 10 % more), of seconds, of passes, or for capacity of bytes.
"""

import runpy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import nan

from decodelab.arithmetic import catalog, units
from decodelab.arithmetic.records import Card, html_table
from decodelab.measuring import machine

QUANTITIES: dict[str, Callable[[float], str]] = {
    "a": units.format_seconds,  # the constant part of a step
    "b": units.format_seconds,  # what one more cached token adds to it
    "overhead": units.format_seconds,  # of a step whose bytes are next to nothing
    "passes": lambda value: units.significant(value, 3),  # dependent passes per token
    "capacity": units.format_capacity,  # bytes that must fit in memory
    "first": units.format_seconds,  # prefill, or the first step
    "gap": units.format_seconds,  # the longest wait between two tokens of one stream
    "token": units.format_seconds,  # of the machine, per token that any sequence wrote
}
MARGIN = 0.1


def class_of(factor: float) -> str:
    """The class of after / before; the margin itself belongs to "cut" and "worse". "unclear" where noise gave a negative slope.

    >>> class_of(0.9), class_of(0.901), class_of(1.099), class_of(1.1)
    ('cut', 'same', 'same', 'worse')
    """
    if not factor >= -MARGIN:  # nan too: noise is larger than what was measured
        return "unclear"
    return "cut" if factor <= 1 - MARGIN + 1e-9 else "worse" if factor >= 1 + MARGIN - 1e-9 else "same"


@dataclass(frozen=True)
class Change:
    """A quantity before and after, in seconds, bytes or passes, with the factor the formula gives, where it gives one."""

    before: float
    after: float
    predicted: float | None = None
    how: str = "measured"  # or "counted", "recorded: ...", "computed: ..."

    @property
    def factor(self) -> float:
        """after / before; nan where noise has left nothing above zero to compare with."""
        return self.after / self.before if self.before > 0 else nan


@dataclass(frozen=True, kw_only=True)
class Technique:
    """One row: the class it claims for each quantity it touches, why, where it loses, and how both sides are measured."""

    name: str
    claims: Mapping[str, str]
    why: str
    loses: str
    measure: Callable[[float, Card], dict[str, Change]]  # (budget_s, card) -> a Change for each claimed quantity


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One quantity of one row: the class guessed ("" without a guess), the class claimed, and what came out."""

    technique: str
    quantity: str
    guess: str
    claimed: str
    change: Change

    @property
    def measured(self) -> str:
        return class_of(self.change.factor)

    @property
    def agrees(self) -> bool:
        return self.measured == self.claimed

    def cells(self) -> tuple[str, ...]:
        """The texts under HEADER."""
        form, change = QUANTITIES[self.quantity], self.change
        guess = f"{self.guess}, {'right' if self.guess == self.measured else 'wrong'}" if self.guess else "none"
        predicted, found = ("" if one is None else units.significant(one, 2) for one in (change.predicted, change.factor))
        seen = predicted, f"{form(change.before)} → {form(change.after)}", found, self.measured
        return self.technique, self.quantity, guess, self.claimed, *seen, "yes" if self.agrees else "no", change.how


HEADER = ("technique", "of", "your guess", "predicted", "factor", "before → after", "factor", "found", "agrees", "how")


@dataclass(frozen=True)
class Table:
    """The ledger as far as it is filled. Tables add up."""

    entries: tuple[Entry, ...]
    caption: str = ""

    def __add__(self, other: "Table") -> "Table":
        return Table(self.entries + other.entries, self.caption)

    def __getitem__(self, key: tuple[str, str]) -> Entry:
        """The entry of (technique, quantity). Raises: KeyError."""
        return {(entry.technique, entry.quantity): entry for entry in self.entries}[key]

    def score(self) -> tuple[int, int]:
        """(guesses that are right, guesses)."""
        given = [entry for entry in self.entries if entry.guess]
        return sum(entry.guess == entry.measured for entry in given), len(given)

    def __str__(self) -> str:
        return "\n".join(" | ".join(entry.cells()) for entry in self.entries)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(HEADER, [entry.cells() for entry in self.entries], caption=self.caption)


@cache
def load() -> dict[str, Technique]:
    """Every row by name, in the order of the lab. Raises: FileNotFoundError without labs/techniques.py."""
    return runpy.run_path(str(catalog.course_file("labs/techniques.py")), run_name="labs.techniques")["TECHNIQUES"]


def run(names: Iterable[str], card: Card, *, guesses: Mapping[str, Mapping[str, str]] | None = None, budget_s: float = 12.0) -> Table:
    """Measures these rows, `budget_s` shared out evenly, beside the learner's `guesses`: name -> quantity -> class.

    Raises: UnknownName for a row that is not there.
    """
    rows, guesses = [_row(name) for name in names], guesses or {}
    if card.dtype != "float32":
        raise ValueError(f"the ledger's rows compare with float32 and this card is of {card.dtype}; take machine.fresh_card('float32')")
    share, entries = machine.budget(budget_s) / max(1, len(rows)), []
    for row in rows:
        changes, mine = row.measure(share, card), guesses.get(row.name, {})
        entries += [Entry(technique=row.name, quantity=quantity, guess=str(mine.get(quantity) or "").strip().lower(), claimed=claimed, change=changes[quantity])
                    for quantity, claimed in row.claims.items()]  # fmt: skip
    return Table(tuple(entries), f"{card.machine.processor}, {card.machine.threads} threads, float32; each row says how it was measured")


def _row(name: str) -> Technique:
    if name not in load():
        raise catalog.UnknownName(f"no technique {name!r} in the ledger; there are: {', '.join(load())}")
    return load()[name]
