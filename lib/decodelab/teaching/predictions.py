"""Predict first: a box that takes a number, and a table that puts it beside the floor, the formula and the measurement.

Nothing here blocks or raises: a result shown without a prediction is logged as such, and a prediction entered after the
result is not scored. The log is predictions.jsonl in ~/.decodelab (DECODELAB_HOME overrides).
"""

import html
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from math import inf, isfinite
from pathlib import Path

import ipywidgets

from decodelab.arithmetic.records import finite, home, html_table
from decodelab.arithmetic.units import significant

_asked: dict[str, tuple[str, float | None]] = {}  # this kernel's open questions: key -> (unit, the number entered)
_shown: set[str] = set()  # results already on screen: later predictions do not count

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "%": 0.01, "": 1.0, "tokens": 1.0, "tokens/s": 1.0, "B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9,
         "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "GB/s": 1e9, "TB/s": 1e12, "TB": 1e12, "FLOP/B": 1.0, "x": 1.0, "sequences": 1.0, "$": 1.0}  # fmt: skip
_KIND = {"s": "time", "ms": "time", "us": "time", "µs": "time", "B": "bytes", "kB": "bytes", "MB": "bytes", "GB": "bytes", "KiB": "bytes",
         "MiB": "bytes", "GiB": "bytes", "TB": "bytes", "GB/s": "bandwidth", "TB/s": "bandwidth"}  # fmt: skip


SPELLINGS = {"seconds": "s", "sec": "s", "second": "s", "μs": "µs", "percent": "%", "×": "x", "times": "x", "token": "tokens"}


class NotANumber(ValueError):
    """A prediction that cannot be read; the message is the friendly line shown under the box."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One line of the log: what was predicted and what came out, in `unit`. `error_fraction` is None without a scored prediction."""

    key: str
    unit: str
    entered: float | None
    floor: float | None
    formula: float | None
    measured: float
    error_fraction: float | None
    at: str
    how: str = "measured"  # or "computed", where the question is about a machine that is not here


def log_file() -> Path:
    """Where predictions are kept."""
    return home() / "predictions.jsonl"


def read_number(text: str, unit: str) -> float:
    """The number in `text`, converted to `unit` where another unit of the same kind is written behind it.

    Raises: NotANumber, with a friendly line.

    >>> read_number("1,200 ms", "s"), read_number("12 %", "%"), read_number("3e-3", "s")
    (1.2, 12.0, 0.003)
    """
    match = re.fullmatch(r"\s*([-+]?(?:\d{1,3}(?:,\d{3})+|[\d_]+)?\.?\d*(?:[eE][-+]?\d+)?)\s*([^\d\s.,]*)\s*", text.strip().removeprefix("$"))
    try:
        value, written = float(match[1].replace(",", "").replace("_", "")), SPELLINGS.get(match[2], match[2]) or unit
    except (TypeError, ValueError):
        value = inf
    if not isfinite(value):
        raise NotANumber(f"{text.strip()[:40]!r} is not a number. Type one number, in {unit or 'plain units'}, such as 12.5.")
    if value < 0:
        raise NotANumber(f"{value:g} is below zero, and this quantity cannot be. Give a positive number in {unit or 'plain units'}.")
    if written == unit:
        return value
    if written not in UNITS or _KIND.get(written, written) != _KIND.get(unit, unit):
        raise NotANumber(
            f"the unit here is {unit or 'a plain number'}, and {written[:12]!r} is another kind. Give the number in {unit or 'plain units'}."
        )
    return value * UNITS[written] / UNITS[unit]


def ask(key: str, question: str, *, unit: str) -> ipywidgets.Widget:
    """A box for one number in `unit`. Enter it before you run the result's cell; leaving it empty is allowed."""
    _asked[key] = (unit, None)
    box = ipywidgets.Text(placeholder=f"a number in {unit}" if unit else "a number", continuous_update=False, layout=ipywidgets.Layout(width="12em"))
    answer = ipywidgets.HTML("<i>No prediction yet.</i>")
    box.observe(_receiver(key, unit, answer), names="value")
    label = ipywidgets.HTML(f"<b>Predict.</b> {html.escape(question)}")
    return ipywidgets.VBox([label, ipywidgets.HBox([box, ipywidgets.HTML(html.escape(unit)), answer])])


def _receiver(key: str, unit: str, answer: ipywidgets.HTML) -> Callable[[dict], None]:
    def receive(change: dict) -> None:
        try:
            answer.value = f"<span>{html.escape(enter(key, change['new'], unit=unit))}</span>"
        except NotANumber as fault:
            answer.value = f"<span>{html.escape(str(fault))}</span>"

    return receive


def enter(key: str, text: str, *, unit: str) -> str:
    """Takes a prediction as text and says what was understood.

    Raises: NotANumber.
    """
    value = read_number(text, unit)
    if key in _shown:
        return f"{significant(value, 4)} {unit}: noted, not scored, because the result is already on screen."
    _asked[key] = (unit, value)
    return f"You predict {significant(value, 4)} {unit}."


class Comparison:
    """The table under a result: your number, the floor, the formula and the measurement, in one unit."""

    def __init__(self, outcome: Outcome):
        self.outcome = outcome

    def rows(self) -> list[tuple[str, str, str]]:
        o = self.outcome
        shown = [("your prediction", o.entered), ("floor", o.floor), ("formula", o.formula), (o.how, o.measured)]
        return [(name, "none" if value is None else f"{significant(value, 4)} {o.unit}", _off(value, o.measured)) for name, value in shown
                if value is not None or name == "your prediction"]  # fmt: skip

    def __str__(self) -> str:
        return "\n".join(f"{name:<18}{value:>16}  {off}" for name, value, off in self.rows())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(("", "value", f"against {self.outcome.how}"), self.rows())


def _off(value: float | None, measured: float) -> str:
    if value is None or value == measured or not measured:
        return ""
    return f"{100 * (value / measured - 1):+.1f} %"


def result(key: str, *, measured: float, floor: float | None = None, formula: float | None = None, unit: str | None = None,
           how: str = "measured") -> Comparison:  # fmt: skip
    """Shows the prediction entered for `key` beside the floor, the formula and the measurement, and logs the line.

    All numbers are in `unit`, the unit asked for if not given; `how` says "computed" where nothing was measured. Never raises: a key that was not asked logs no prediction.
    """
    asked_unit, entered = _asked.get(key, (unit or "", None))
    error = None if entered is None or not measured or not isfinite(measured) else entered / measured - 1
    outcome = Outcome(key=key, unit=unit or asked_unit, entered=entered, floor=floor, formula=formula, measured=measured, error_fraction=error,
                      at=datetime.now(UTC).isoformat(timespec="seconds"), how=how)  # fmt: skip
    _shown.add(key)
    _log(outcome)
    return Comparison(outcome)


def _log(outcome: Outcome) -> None:
    try:
        log_file().parent.mkdir(parents=True, exist_ok=True)
        with log_file().open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(finite(asdict(outcome))) + "\n")
    except OSError:  # a read-only home costs the log, not the lesson
        pass


def history() -> list[Outcome]:
    """Every logged outcome, oldest first; lines that cannot be read are passed over."""
    outcomes = []
    for line in log_file().read_text(encoding="utf-8").splitlines() if log_file().is_file() else ():
        try:
            outcomes.append(Outcome(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return outcomes
