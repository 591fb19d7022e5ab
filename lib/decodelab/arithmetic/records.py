"""What was measured: the machine's card, timed steps, their summaries, JSON lines on disk. No torch here.

TTFT, ITL, TPOT and MBU are defined once, below.
"""

import html
import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from math import ceil, isfinite
from pathlib import Path
from statistics import median

from decodelab.arithmetic import units
from decodelab.arithmetic.catalog import ModelConfig, dtype_bytes
from decodelab.arithmetic.cost import Constants

CLOCK_TICKS = 100
"""A timed region shorter than this many clock ticks is repeated, not trusted."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a number was measured."""

    processor: str
    threads: int
    torch: str
    device: str  # "cpu" or "cuda"
    system: str
    memory_bytes: int
    last_level_cache_bytes: int | None
    load: float | None  # one-minute load average before measuring; None where the system has none


@dataclass(frozen=True, kw_only=True)
class Card:
    """The formula's constants, measured on one machine, for one dtype, one path and one device. Rates per second."""

    machine: Machine
    dtype: str
    path: str
    read_bytes_per_s: float  # the roof: summing a buffer far larger than the caches
    copy_bytes_per_s: float  # read + written bytes
    matvec_bytes_per_s: float  # BW_w
    matvec_rows_bytes_per_s: float  # BW_w of several rows at once, which go through another product than one
    kv_read_bytes_per_s: float  # BW_kv, one query per KV head (MHA)
    kv_read_grouped_bytes_per_s: float  # BW_kv, several queries per KV head (GQA): other work per byte, fewer heads to share out
    gemm_flops_per_s: float  # peak
    step_overhead_s: float  # c0 = step_overhead_s + n_layers * layer_overhead_s
    layer_overhead_s: float
    layer_overhead_rows_s: float  # in place of layer_overhead_s where a step has several rows
    per_row_s: float  # c1
    measured_at: str
    seconds: float  # how long the measurement took

    @property
    def formats(self) -> dict[str, float]:
        """Bytes per value of matrices and of KV, as the functions of `cost` take them; int8 keeps KV in the device's default."""
        kv = ("float32" if self.machine.device == "cpu" else "bfloat16") if self.dtype == "int8" else self.dtype
        return {"weight_bytes_per_value": dtype_bytes(self.dtype), "kv_bytes_per_value": dtype_bytes(kv)}

    def constants(self, config: ModelConfig) -> Constants:
        """The prediction: this machine's measured constants for a model of this kind of attention."""
        grouped = config.n_heads > config.n_kv_heads
        kv_bytes_per_s = self.kv_read_grouped_bytes_per_s if grouped else self.kv_read_bytes_per_s
        return Constants(weight_bytes_per_s=self.matvec_bytes_per_s, weight_rows_bytes_per_s=self.matvec_rows_bytes_per_s,
                         kv_bytes_per_s=kv_bytes_per_s, flops_per_s=self.gemm_flops_per_s, step_overhead_s=self.step_overhead_s, layer_overhead_s=self.layer_overhead_s,
                         layer_overhead_rows_s=self.layer_overhead_rows_s, per_row_s=self.per_row_s)  # fmt: skip

    def floor(self) -> Constants:
        """The floor: every byte at the read bandwidth, every FLOP at the GEMM rate, no overhead."""
        return Constants(weight_bytes_per_s=self.read_bytes_per_s, kv_bytes_per_s=self.read_bytes_per_s, flops_per_s=self.gemm_flops_per_s)

    def ridge_flops_per_byte(self) -> float:
        """Intensity at which arithmetic takes as long as reading: GEMM rate / read bandwidth."""
        return self.gemm_flops_per_s / self.read_bytes_per_s

    def rows(self) -> list[tuple[str, str, str]]:
        """(name in the formula, field, value with unit), the order in which the course explains them."""
        return [
            ("read roof", "read_bytes_per_s", units.format_bandwidth(self.read_bytes_per_s)),
            ("copy, read + written", "copy_bytes_per_s", units.format_bandwidth(self.copy_bytes_per_s)),
            ("BW_w", "matvec_bytes_per_s", units.format_bandwidth(self.matvec_bytes_per_s)),
            ("BW_w, several rows", "matvec_rows_bytes_per_s", units.format_bandwidth(self.matvec_rows_bytes_per_s)),
            ("BW_kv, MHA", "kv_read_bytes_per_s", units.format_bandwidth(self.kv_read_bytes_per_s)),
            ("BW_kv, GQA", "kv_read_grouped_bytes_per_s", units.format_bandwidth(self.kv_read_grouped_bytes_per_s)),
            ("peak", "gemm_flops_per_s", units.format_flop_rate(self.gemm_flops_per_s)),
            ("c0, fixed part", "step_overhead_s", units.format_seconds(self.step_overhead_s)),
            ("c0, per layer", "layer_overhead_s", units.format_seconds(self.layer_overhead_s)),
            ("c0, per layer, several", "layer_overhead_rows_s", units.format_seconds(self.layer_overhead_rows_s)),
            ("c1, per row", "per_row_s", units.format_seconds(self.per_row_s)),
        ]

    def title(self) -> str:
        """Machine, dtype and path in one line, the small print of every figure."""
        return f"{self.machine.processor}, {self.machine.threads} threads, {self.dtype}, {self.path} path, torch {self.machine.torch}"

    def __str__(self) -> str:
        return "\n".join([self.title(), *(f"  {name:<22}{value:>14}   {field}" for name, field, value in self.rows())])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(("in the formula", "field", "measured"), self.rows(), caption=self.title())

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict) -> "Card":
        """Raises: ValueError naming the fields that are missing, unknown, or no rate or time."""
        _require_fields(cls, values)
        for name, value in values.items():
            if name.endswith("_s") and not (
                isinstance(value, (int, float)) and isfinite(value) and (value > 0 or not name.endswith("per_s") and value == 0)
            ):
                raise ValueError(f"{name} is {value!r} on the card")
        return cls(**{**values, "machine": Machine(**values["machine"])})


def home() -> Path:
    """Where cards, predictions and records are kept: DECODELAB_HOME, else ~/.decodelab."""
    return Path(os.environ.get("DECODELAB_HOME") or Path.home() / ".decodelab")


def finite(value: object) -> object:
    """`value` with every number that JSON cannot write (inf, nan) as None, through dictionaries and lists."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def text_table(header: Sequence[str], rows: Iterable[Sequence[object]], *, pad: Callable[[str, int], str] = str.ljust) -> str:
    """A table in plain text, its columns as wide as their longest cell."""
    lines = [tuple(map(str, row)) for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(pad, row, widths)).rstrip() for row in lines)


def html_table(header: Sequence[str], rows: Iterable[Sequence[str]], *, caption: str = "") -> str:
    """A plain HTML table; every text escaped."""
    head = "".join(f"<th style='text-align:left'>{html.escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td style='text-align:left'>{html.escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption style='text-align:left'>{html.escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Durations reduced: count, median, 95th percentile, in seconds; the warm-up left out is kept apart."""

    n: int
    median_s: float
    p95_s: float
    first_s: float | None  # the first warm-up call, reported, never averaged

    def __str__(self) -> str:
        return f"{units.format_seconds(self.median_s)} median, {units.format_seconds(self.p95_s)} p95, n={self.n}"


def summarise(durations_s: Sequence[float], *, warmup: int = 0) -> Summary:
    """Median and p95 of `durations_s` without the first `warmup` ones, which include compilation and allocation.

    Raises: ValueError where nothing is left.

    >>> summarise([2.0] + [0.02] * 9, warmup=1).median_s
    0.02
    """
    kept = sorted(durations_s[warmup:])
    if not kept:
        raise ValueError(f"{len(durations_s)} durations minus {warmup} of warm-up leave nothing to summarise; time more steps")
    p95 = kept[max(0, ceil(0.95 * len(kept)) - 1)]
    return Summary(n=len(kept), median_s=median(kept), p95_s=p95, first_s=durations_s[0] if warmup else None)


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One timed pass: prefill (context = prompt) or a decode step (context = tokens in cache, the new one included)."""

    phase: str  # "prefill" or "decode"
    context: int
    seconds: float
    token: int | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A timed request: where, what and each step. The definitions of the field's latency words are its properties."""

    model: str
    machine: Machine
    dtype: str
    path: str
    batch: int
    prompt_tokens: int
    warmup_steps: int  # passes run first and thrown away
    steps: tuple[StepRecord, ...]
    note: str = ""

    @property
    def output_tokens(self) -> int:
        return len(self.steps)

    @property
    def ttft_s(self) -> float:
        """Time to first token: the prefill."""
        return self.steps[0].seconds

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: seconds between each token and the one before it."""
        return [step.seconds for step in self.steps[1:]]

    @property
    def decode_s(self) -> float:
        return sum(self.itl_s)

    @property
    def total_s(self) -> float:
        return self.ttft_s + self.decode_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token: (end - first token) / (n - 1); None for a single token."""
        return self.decode_s / (self.output_tokens - 1) if self.output_tokens > 1 else None

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Decode throughput of the batch; the first token belongs to prefill and is not counted."""
        return self.batch * (self.output_tokens - 1) / self.decode_s if self.output_tokens > 1 else None

    @property
    def decode_share(self) -> float:
        """decode_s / total_s."""
        return self.decode_s / self.total_s

    @property
    def free_prefill_saves_fraction(self) -> float:
        """ttft_s / total_s: what a prefill that costs nothing would save."""
        return self.ttft_s / self.total_s


def write_run(run: Run, path: Path) -> None:
    """Appends the run as one JSON line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(run)) + "\n")


def read_runs(path: Path) -> list[Run]:
    """The runs of a JSON-lines file.

    Raises: ValueError naming the file, the line and the fault.
    """
    runs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            values = json.loads(line)
            _require_fields(Run, values)
            steps = tuple(StepRecord(**step) for step in values["steps"])
            runs.append(Run(**{**values, "machine": Machine(**values["machine"]), "steps": steps}))
        except (TypeError, ValueError) as fault:
            raise ValueError(f"{path.name} line {number} is not a run: {fault}") from None
    return runs


def _require_fields(kind: type, values: dict) -> None:
    wanted = {field.name for field in fields(kind)}
    optional = {field.name for field in fields(kind) if field.default is not MISSING}
    if missing := sorted(wanted - optional - set(values)) or sorted(set(values) - wanted):
        raise ValueError(f"{kind.__name__} with wrong fields: {', '.join(missing)}")


def utilisation(amount: float, seconds: float, rate: float, *, what: str = "bytes") -> tuple[float, str]:
    """(fraction, verdict) of `amount` done in `seconds` against `rate` per second: MBU for bytes, MFU for FLOPs.

    Up to 1.05 the roof's own spread explains it; above, the roof is stale or the count is wrong. Never clamped.

    >>> utilisation(2 * 4096**3, 0.03e-3, 990e12, what="FLOPs")[1]
    'impossible: 4.63 of the roof; the roof is stale, the FLOPs are miscounted, or the clock stopped early'
    """
    if seconds <= 0 or rate <= 0:
        raise ValueError(f"{amount:g} {what} in {seconds:g} s against {rate:g} per second: time and rate must be above 0")
    fraction = amount / seconds / rate
    if fraction > 1.05:
        return fraction, f"impossible: {fraction:.2f} of the roof; the roof is stale, the {what} are miscounted, or the clock stopped early"
    return fraction, f"{fraction:.2f} of the roof" + (" (within the roof's own spread of 5 %)" if fraction > 1 else "")


@dataclass(frozen=True, kw_only=True)
class Line:
    """A least-squares line and how much of the variance it explains."""

    intercept: float
    slope: float
    r2: float


def fit_line(xs: Sequence[float], ys: Sequence[float]) -> Line:
    """Least squares of y = intercept + slope * x. One total cannot be split into a fixed part and a rate.

    Raises: ValueError with fewer than two different x.

    >>> line = fit_line([1000, 3000], [100 * 2**20 + 1000 * 46080, 100 * 2**20 + 3000 * 46080])
    >>> line.slope, line.intercept / 2**20
    (46080.0, 100.0)
    """
    if len(xs) != len(ys) or len(set(xs)) < 2:
        raise ValueError(f"a line needs at least two different x values with one y each; got x={list(xs)}")
    n, mean_x, mean_y = len(xs), sum(xs) / len(xs), sum(ys) / len(ys)
    sxx = sum((x - mean_x) ** 2 for x in xs)
    slope = sum((xs[i] - mean_x) * (ys[i] - mean_y) for i in range(n)) / sxx
    left = sum((ys[i] - mean_y - slope * (xs[i] - mean_x)) ** 2 for i in range(n))
    spread = sum((y - mean_y) ** 2 for y in ys)
    return Line(intercept=mean_y - slope * mean_x, slope=slope, r2=1 - left / spread if spread else 1.0)
