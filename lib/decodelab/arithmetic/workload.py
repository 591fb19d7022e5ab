"""Workloads: how many tokens requests read and write, as quantiles of traces (data/workloads.csv), when they arrive, and trace files."""

import csv
import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from math import isfinite
from pathlib import Path
from statistics import NormalDist

import numpy as np

from decodelab.arithmetic.catalog import read_table

QUANTILES = ("p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99")
KINDS = ("chat", "code", "json", "agent", "reasoning")
TRACES = {"chat": "Azure LLM inference 2023 conversation", "code": "Azure LLM inference 2023 code", "agent": "Mooncake toolagent",
          "reasoning": "ServeGen reason/deepseek-r1"}  # fmt: skip
COLUMNS = {"at_s": ("arrival_s", "timestamp"), "prompt_tokens": ("prompt_tokens", "contexttokens", "input_length", "request tokens"),
           "output_tokens": ("output_tokens", "generatedtokens", "output_length", "response tokens")}  # fmt: skip
"""Column names that a trace is known by, in lower case: ours, Azure's, Mooncake's, BurstGPT's."""
PER_SECOND = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}


@dataclass(frozen=True, kw_only=True)
class LengthLaw:
    """One quantity of one trace: `field` is input or output in tokens, or their ratio. Absent where no source gives it."""

    trace: str
    kind: str
    field: str
    unit: str
    n: int | None
    quantiles: dict[str, float]  # "p50" -> value
    mean: float | None
    max: float | None
    source: str
    notes: str

    def share_above(self, value: float) -> tuple[float, float]:
        """(at least, at most) the share of requests above `value`, as far as the published quantiles and maximum tell."""
        points = [(1 - float(name[1:]) / 100, found) for name, found in self.quantiles.items()]
        points += [(0.0, self.max)] if self.max is not None else []
        at_most = min((round(above, 2) for above, found in points if found <= value), default=1.0)
        at_least = max((round(above, 2) for above, found in points if found > value), default=0.0)
        return at_least, at_most


def _law(row: dict[str, str]) -> LengthLaw:
    found = {name: float(row[name]) for name in QUANTILES if row[name]}
    mean, most = (float(row[name]) if row[name] else None for name in ("mean", "max"))
    return LengthLaw(**{name: row[name] for name in ("trace", "kind", "field", "unit", "source", "notes")}, quantiles=found, mean=mean, max=most,
                     n=int(row["n"]) if row["n"] else None)  # fmt: skip


def length_laws(*, trace: str = "", field: str = "", kind: str = "") -> list[LengthLaw]:
    """The laws whose trace, field and kind contain these texts, in the order of the table. Taught in: lessons/03.

    >>> [law.quantiles["p50"] for law in length_laws(trace="deepseek-r1", field="output") if law.unit == "tokens"]
    [792.0]
    """
    laws = (_law(row) for row in read_table("workloads.csv"))
    return [law for law in laws if trace in law.trace and field in law.field and kind in law.kind]


# ---- draws -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """One request of a workload. `at_s` is a deadline, counted from the start of the run: send at start + at_s, never a gap after the last one."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


def laws(kind: str) -> tuple[LengthLaw, LengthLaw]:
    """(input, output) in tokens of one kind of work. The two that no source gives in full say in `notes` what is assumed.

    Raises: ValueError where `kind` is not one of KINDS. Source: data/workloads.csv.
    """
    if kind not in KINDS:
        raise ValueError(f"no workload is called {kind!r}; there are: {', '.join(KINDS)}")
    if kind == "json":
        return _assumed_json("input", median=300, factor=2), _assumed_json("output", median=10_000, factor=4)
    pair = _pair(TRACES[kind])
    return tuple(map(_spread_like, pair, _pair("Mooncake conversation"))) if kind == "agent" else pair


def _pair(trace: str) -> tuple[LengthLaw, LengthLaw]:
    found = {law.field: law for law in length_laws(trace=trace) if law.unit == "tokens"}
    return found["input"], found["output"]


def _spread_like(law: LengthLaw, other: LengthLaw) -> LengthLaw:
    """A law of which only the mean is published, with the other's quantiles scaled to that mean."""
    factor = law.mean / other.mean
    notes = f"assumption: the mean is published, the spread is that of {other.trace}, scaled to it"
    return replace(law, quantiles={name: value * factor for name, value in other.quantiles.items()}, max=other.max * factor, notes=notes)


def _assumed_json(field: str, *, median: float, factor: float) -> LengthLaw:
    return LengthLaw(trace="long JSON", kind="assumption", field=field, unit="tokens", n=None, mean=None, max=None, source="none",
                     quantiles={"p1": median / factor, "p50": median, "p99": median * factor},
                     notes="assumption: no length law is published; 200 records of 50 tokens, four times fewer or more")  # fmt: skip


def _tokens_at(law: LengthLaw, normal: np.ndarray) -> np.ndarray:
    """The published quantiles at these normal scores: log tokens linear between them, the largest of n at 1 - 1/n, flat beyond."""
    points = [(float(name[1:]) / 100, value) for name, value in law.quantiles.items()]
    points += [(1 - 1 / law.n, law.max)] if law.n and law.max else []
    scores = [NormalDist().inv_cdf(share) for share, _ in points]
    return np.exp(np.interp(normal, scores, np.log([value for _, value in points])))


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not (isfinite(value) and value > 0):
            raise ValueError(f"{name} is {value!r}; it must be a number above 0")


def _generator(seed: int, *, stream: int) -> np.random.Generator:
    """Lengths and arrivals draw from different streams of one seed, so that neither tells anything of the other."""
    if seed < 0:
        raise ValueError(f"seed is {seed}; it must be a whole number of at least 0")
    return np.random.default_rng([seed, stream])


def lengths(kind: str, n: int, *, seed: int, max_context: int | None = None, scale: float = 1.0) -> list[tuple[int, int]]:
    """n pairs of (input, output) tokens, each at least 1, drawn independently: no source gives them jointly.

    `scale` divides both: a laptop's version of the law. Then input + output - 1 is kept within `max_context` by cutting the
    output, then the prompt; `cut_share` tells how many. Same seed, same draws; give each process a seed of its own.
    """
    _positive(n=n, scale=scale)
    scores = _generator(seed, stream=0).standard_normal((n, 2))
    read, written = (np.maximum(1, np.rint(_tokens_at(law, scores[:, side]) / scale)).astype(int) for side, law in enumerate(laws(kind)))
    if max_context is not None:
        _positive(max_context=max_context)
        read = np.minimum(read, max_context)
        written = np.minimum(written, max_context + 1 - read)
    return list(zip(read.tolist(), written.tolist(), strict=True))


def cut_share(kind: str, n: int, *, seed: int, max_context: int, scale: float = 1.0) -> float:
    """The share of these same requests that `max_context` shortens."""
    whole, cut = (lengths(kind, n, seed=seed, max_context=limit, scale=scale) for limit in (None, max_context))
    return sum(before != after for before, after in zip(whole, cut, strict=True)) / n


def uniform(n: int, *, rate_per_s: float) -> list[float]:
    """Arrival i at i / rate, from the start of the run: no error adds up.

    >>> uniform(200, rate_per_s=200)[-1]
    0.995
    """
    _positive(n=n, rate_per_s=rate_per_s)
    return [i / rate_per_s for i in range(n)]


def poisson(n: int, *, rate_per_s: float, seed: int) -> list[float]:
    """Arrival times in seconds whose gaps are exponential: users that know nothing of each other. The first comes after one gap."""
    return bursty(n, rate_per_s=rate_per_s, burstiness=1.0, seed=seed)


def bursty(n: int, *, rate_per_s: float, burstiness: float, seed: int) -> list[float]:
    """Arrival times in seconds with gamma gaps of mean 1 / rate and coefficient of variation `burstiness`; 1 is Poisson."""
    _positive(n=n, rate_per_s=rate_per_s, burstiness=burstiness)
    shape = burstiness**-2
    return np.cumsum(_generator(seed, stream=1).standard_gamma(shape, n) / shape / rate_per_s).tolist()


def workload(
    kind: str, n: int, *, rate_per_s: float, seed: int, burstiness: float = 1.0, max_context: int | None = None, scale: float = 1.0
) -> list[Arrival]:
    """n requests of `lengths` at the times of `bursty`, or of `uniform` where `burstiness` is 0."""
    drawn = lengths(kind, n, seed=seed, max_context=max_context, scale=scale)
    times = bursty(n, rate_per_s=rate_per_s, burstiness=burstiness, seed=seed) if burstiness else uniform(n, rate_per_s=rate_per_s)
    return [Arrival(at_s=at_s, prompt_tokens=read, output_tokens=written) for at_s, (read, written) in zip(times, drawn, strict=True)]


# ---- trace files -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Arrivals of a file, and how it was understood: the unit of its times, field -> column, and what was moved or left out."""

    arrivals: list[Arrival]
    unit: str
    columns: dict[str, str]
    note: str


def write_trace(path: str | Path, arrivals: Sequence[Arrival]) -> None:
    """The arrivals as CSV; `read_trace` gives them back as they are."""
    with Path(path).open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["arrival_s", "prompt_tokens", "output_tokens"])
        rows.writerows((arrival.at_s, arrival.prompt_tokens, arrival.output_tokens) for arrival in arrivals)


def read_trace(path: str | Path, *, rate: float = 1.0, unit: str | None = None, columns: Mapping[str, str] | None = None) -> Trace:
    """The arrivals of a CSV or JSONL trace, in order of time; `rate=2` halves the gaps.

    Columns are known by COLUMNS or named by `columns`, such as {"at_s": "t"}. One unit holds for the whole column: `unit` (s, ms, us, ns),
    else its name's ending (`_ms`), else as the values show (epoch, ISO 8601), else Mooncake's ms, else s. Times count from the first
    arrival, except those of `arrival_s` that are not epoch. Requests of 0 output tokens (BurstGPT's failures) are left out and counted in `note`.
    Raises: ValueError naming file, line, what is wrong and what is expected. Source: each trace's README.
    """
    _positive(rate=rate)
    try:
        return _trace(*_parsed(Path(path).read_text(encoding="utf-8-sig"), columns or {}), unit=unit, rate=rate)
    except UnicodeDecodeError:
        raise ValueError(f"{Path(path).name} is not UTF-8 text; unpack or convert it first") from None
    except (ValueError, csv.Error) as fault:
        raise ValueError(f"{Path(path).name} {fault}") from None


def _parsed(text: str, named: Mapping[str, str]) -> tuple[list[tuple[int, str, float, int, int]], dict[str, str]]:
    """((line, kind of time, time, input, output) of each row, field -> column)."""
    parsed, columns = [], {}
    for line, cells in _rows(text):
        columns = columns or _columns(list(cells), named)
        try:
            parsed.append((line, *_row(cells, columns)))
        except ValueError as fault:
            raise ValueError(f"line {line}: {fault}") from None
        if parsed[-1][1] != parsed[0][1]:
            raise ValueError(f"line {line}: a time in {parsed[-1][1]}, where the first row has {parsed[0][1]}; one column takes one unit")
    return parsed, columns


def _rows(text: str) -> Iterator[tuple[int, dict]]:
    """(line number, cells by column) of each row that is not blank."""
    if text.lstrip().startswith("{"):
        yield from ((number, _object(line, number)) for number, line in enumerate(text.split("\n"), start=1) if line.strip())
        return
    lines = csv.reader(io.StringIO(text))
    filled = filter(None, lines)
    header = [name.strip() for name in next(filled, [])]
    for line in filled:
        if len(line) != len(set(header)):
            raise ValueError(f"line {lines.line_num} has {len(line)} cells and the header {len(set(header))} different columns: numbers take no "
                             "thousands separators, text with commas takes quotes")  # fmt: skip
        yield lines.line_num, dict(zip(header, line, strict=True))


def _object(line: str, number: int) -> dict:
    try:
        if isinstance(cells := json.loads(line), dict):
            return cells
        fault = line[:40]
    except ValueError as broken:
        fault = broken
    raise ValueError(f"line {number} is not a JSON object ({fault}); each line of a JSONL trace is one")


def _columns(header: list[str], named: Mapping[str, str]) -> dict[str, str]:
    """field -> column, each found exactly once."""
    if unknown := sorted(set(named) - set(COLUMNS)):
        raise ValueError(f"was to be read with columns for {', '.join(unknown)}; the fields are {', '.join(COLUMNS)}")
    found = {}
    for field, names in COLUMNS.items():
        matches = [column for column in header if (column == named[field] if field in named else column.casefold() in names)]
        if len(matches) != 1:
            raise ValueError(f"has {len(matches) or 'no'} columns for {field} ({named.get(field) or ' or '.join(names)}); its columns are: "
                             f"{', '.join(header)}. Name the right one: columns={{{field!r}: ...}}")  # fmt: skip
        found[field] = matches[0]
    return found


def _row(cells: Mapping[str, object], columns: Mapping[str, str]) -> tuple[str, float, int, int]:
    """(kind of time, time, input, output)."""
    if missing := [column for column in columns.values() if column not in cells]:
        raise ValueError(f"no {missing[0]}; this row has: {', '.join(cells)}")
    at, *counts = (str(cells[column]).strip() for column in columns.values())
    for column, text in zip(list(columns.values())[1:], counts, strict=True):
        if not re.fullmatch(r"\d+(\.0*)?", text):
            raise ValueError(f"{column} is {text[:40]!r}; tokens are a whole number of at least 0, without sign or thousands separators")
    read, written = (int(text.split(".")[0]) for text in counts)
    if written and not read:
        raise ValueError(f"{columns['prompt_tokens']} is 0; a request that is answered reads at least 1 token")
    return *_time(at, columns["at_s"]), read, written


def _time(text: str, column: str) -> tuple[str, float]:
    """("numbers", its value) or ("ISO 8601", microseconds since 1970); without an offset a time is read as UTC."""
    if re.fullmatch(r"(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", text, re.IGNORECASE) and isfinite(float(text)):
        return "numbers", float(text)
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{column} is {text[:40]!r}; a time is a finite number of at least 0, without thousands separators, or ISO 8601") from None
    kind = "ISO 8601" if at.tzinfo else "ISO 8601 without offset"
    return kind, (at.replace(tzinfo=at.tzinfo or UTC) - datetime(1970, 1, 1, tzinfo=UTC)) / timedelta(microseconds=1)


def _unit(times: Sequence[float], columns: Mapping[str, str]) -> str:
    """The unit of a column of numbers: by its name, or epoch where all of them are times between 2001 and 2286."""
    if named := re.search(r"_(s|ms|us|ns)$", columns["at_s"].casefold()):
        return named[1]
    for unit, per_second in PER_SECOND.items():
        if 1e9 * per_second <= min(times) and max(times) < 1e10 * per_second:
            return f"epoch {unit}"
    return "ms" if columns["prompt_tokens"].casefold() == "input_length" else "s"


def _trace(parsed: list[tuple[int, str, float, int, int]], columns: dict[str, str], *, unit: str | None, rate: float) -> Trace:
    kept = [row for row in parsed if row[4]]
    if not kept:
        raise ValueError(f"has {len(parsed)} rows, none that asks for output; a trace is CSV with a header, or one JSON object per line")
    kind, times = kept[0][1], [row[2] for row in kept]
    if unit and (kind != "numbers" or unit.removeprefix("epoch ") not in PER_SECOND):
        raise ValueError(f"has times in {kind}, read with unit={unit!r}; numbers take s, ms, us or ns, ISO 8601 takes none")
    unit = unit or (_unit(times, columns) if kind == "numbers" else kind)
    per_second, first, last = PER_SECOND.get(unit.removeprefix("epoch "), 1e6), min(times), max(times)
    if last >= 1e10 * per_second or last - first >= 1e9 * per_second:
        raise ValueError(f"line {kept[times.index(last)][0]}: {columns['at_s']} is {last:.0f}, in {unit} after the year 2286 or 30 years after the "
                         "first arrival; one column takes one unit: correct the row, or give unit=")  # fmt: skip
    start = 0.0 if columns["at_s"].casefold() == "arrival_s" and last < 1e9 * per_second else first
    arrivals = [Arrival(at_s=(row[2] - start) / per_second / rate, prompt_tokens=row[3], output_tokens=row[4]) for row in kept]
    notes = [f"{len(parsed) - len(kept):,} of {len(parsed):,} requests left out: 0 output tokens"] if len(kept) < len(parsed) else []
    notes += ["rows were not in order of time and were sorted"] if times != sorted(times) else []
    return Trace(arrivals=sorted(arrivals, key=lambda arrival: arrival.at_s), unit=unit, columns=columns, note="; ".join(notes))
