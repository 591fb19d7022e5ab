"""Figures. Measured is dots, predicted is a line, the floor is dashed, and the machine stands in small print.

Every function draws on the `ax` it is given. Colours are petroff10's, which stay apart for colour-blind readers and in grey.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from io import BytesIO
from itertools import accumulate
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator

from decodelab.arithmetic import units
from decodelab.arithmetic.cost import Constants, Growth, PassWork
from decodelab.arithmetic.latency import RequestRecord
from decodelab.arithmetic.planning import Turn
from decodelab.arithmetic.records import Card, Run
from decodelab.arithmetic.workload import LengthLaw

MEASURED, PREDICTED, FLOOR, OTHER = "#3f90da", "#bd1f01", "#717581", "#832db6"
STYLE = {"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 12, "axes.titleweight": "bold", "axes.titlelocation": "left",
         "axes.labelsize": 11, "legend.frameon": False, "figure.facecolor": "white", "savefig.facecolor": "white", "figure.dpi": 100}  # fmt: skip
SIZE = (8.0, 4.4)
FEW_POINTS = 12


@cache
def use_style() -> None:
    """Sets the course's style for this kernel, once, and loads the notebook's backend first."""
    plt.switch_backend(plt.get_backend())
    plt.style.use(["petroff10", STYLE])


def axes(*, columns: int = 1, size: tuple[float, float] = SIZE) -> tuple[Figure, Any]:
    """A figure in the course's style and its axes: one, or an array of `columns`."""
    use_style()
    figure, ax = plt.subplots(1, columns, figsize=size, layout="constrained")
    figure.get_layout_engine().set(wspace=0.05)  # a panel's y-label stands clear of its neighbour
    return figure, ax


class Canvas:
    """A figure that a widget redraws: no pyplot, no layout search, so that a slider's picture is there at once."""

    def __init__(
        self, *, size: tuple[float, float] = (7.6, 3.4), margins: tuple[float, float, float, float] = (0.2, 0.97, 0.17, 0.88), panels: int = 1
    ):
        use_style()
        self.figure = Figure(figsize=size)
        self.panels = [self.figure.add_subplot(panels, 1, number + 1) for number in range(panels)]
        self.ax = self.panels[0]
        left, right, bottom, top = margins
        self.figure.subplots_adjust(left=left, right=right, bottom=bottom, top=top, hspace=0.5)

    def clear(self) -> Axes:
        """The first axes, all of them emptied."""
        for panel in self.panels:
            panel.clear()
        return self.ax

    def say(self, text: str) -> None:
        """A sentence in place of a picture that would mean nothing."""
        self.clear()
        for panel in self.panels:
            panel.set_axis_off()
        self.ax.text(0.5, 0.5, text, ha="center", va="center", wrap=True, fontsize=11, transform=self.ax.transAxes)

    def png(self) -> bytes:
        buffer = BytesIO()
        self.figure.savefig(buffer, format="png", dpi=100)
        return buffer.getvalue()


def small_print(ax: Axes, text: str) -> None:
    """The machine, under the axes."""
    ax.annotate(
        text, (0, 0), (0, -44), xycoords="axes fraction", textcoords="offset points", fontsize=8, color=FLOOR, va="top", annotation_clip=False
    )


def _step_axes(ax: Axes, title: str) -> None:
    ax.set(title=title, xlabel="tokens in cache", ylabel="milliseconds per token")
    ax.set_ylim(bottom=0)
    ax.legend(loc="best")


def growth(result: Any, *, ax: Axes, title: str = "") -> None:
    """t(n) of a GrowthResult: medians as dots, the prediction and the floor as lines."""
    ends = (0, result.contexts[-1])
    for name, style, color in (("predicted", "-", PREDICTED), ("floor", "--", FLOOR)):
        line = Growth(a_s=getattr(result.a_s, name), b_s_per_token=getattr(result.b_s_per_token, name))
        ax.plot(ends, [1e3 * line(n) for n in ends], style, color=color, label=name)
    ax.plot(
        result.contexts,
        [1e3 * step.median_s for step in result.steps],
        "o",
        color=MEASURED,
        label=f"measured, median of {min(s.n for s in result.steps)}",
    )
    _step_axes(ax, title or f"Each token costs more than the last: {result.model}, batch {result.batch}")
    small_print(ax, result.card.title())


def timeline(run: Run, *, predicted: Growth, floor: Growth, ax: Axes, title: str = "") -> None:
    """A request token by token: each decode step a dot, its running median a line of the same colour, prefill apart."""
    decode = run.steps[1:]
    contexts, taken = [step.context for step in decode], [1e3 * step.seconds for step in decode]
    ax.plot(contexts, taken, ".", color=MEASURED, markersize=4, alpha=0.45, label=f"measured, {len(decode)} decode steps")
    ax.plot(contexts, running_median(taken), color=MEASURED, linewidth=1.5, label="measured, running median")
    ax.plot(contexts, [1e3 * predicted(n) for n in contexts], color=PREDICTED, label="predicted from this machine's card")
    ax.plot(contexts, [1e3 * floor(n) for n in contexts], "--", color=FLOOR, label="floor: read roof, no overhead")
    _step_axes(ax, title or f"{run.model}: {run.prompt_tokens} tokens in, {run.output_tokens} out, one at a time")
    ax.set_ylim(0, 1.25 * max(sorted(taken)[int(0.98 * (len(taken) - 1))], 1e3 * predicted(contexts[-1])))
    small_print(ax, f"{run.machine.processor}, {run.machine.threads} threads, {run.dtype}, {run.path} path. Steps above the axis are not drawn.")


def running_median(values: Sequence[float], width: int = 31) -> list[float]:
    """The median of the `width` values around each one."""
    half = width // 2
    windows = (sorted(values[max(0, i - half) : i + half + 1]) for i in range(len(values)))
    return [window[len(window) // 2] for window in windows]


def phases(rows: Sequence[tuple[str, float, float]], *, ax: Axes, title: str = "Where the request's time goes") -> None:
    """Horizontal bars of (label, prefill seconds, decode seconds), with both numbers in text."""
    labels = [label for label, _, _ in rows]
    prefills, decodes = [row[1] for row in rows], [row[2] for row in rows]
    ax.barh(labels, prefills, color=OTHER, label="prefill")
    ax.barh(labels, decodes, left=prefills, color=MEASURED, label="decode")
    for y, (_, prefill, decode) in enumerate(rows):
        text = f" {units.format_seconds(prefill)} + {units.format_seconds(decode)}"
        ax.text(prefill + decode, y, text, va="center", fontsize=10)
    ax.set(title=title, xlabel="seconds (prefill + decode)")
    ax.set_xlim(0, 1.3 * max(p + d for p, d in zip(prefills, decodes, strict=True)))
    ax.invert_yaxis()
    ax.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2)


def roofline(card: Card, *, points: Sequence[tuple[str, float, float]] = (), ax: Axes, title: str = "This machine's roofline") -> None:
    """FLOP/s against FLOPs per byte: the two roofs of the card, and points (label, FLOPs per byte, FLOP/s)."""
    ridge = card.ridge_flops_per_byte()
    xs = [0.1, ridge, max([100 * ridge, *(1.5 * x for _, x, _ in points)])]
    ax.loglog(
        xs, [min(x * card.read_bytes_per_s, card.gemm_flops_per_s) / 1e9 for x in xs], "--", color=FLOOR, label="roofs: memory, then arithmetic"
    )
    ax.axvline(ridge, color=FLOOR, linewidth=0.8, linestyle=":")
    ax.annotate(f"ridge\n{ridge:.1f} FLOP/B", (ridge, ax.get_ylim()[0]), (4, 6), textcoords="offset points", fontsize=9, color=FLOOR)
    for (label, x, y), color, marker in zip(points, (MEASURED, PREDICTED, OTHER, "#ffa90e", "#a96b59", "#b9ac70"), "osD^vP", strict=False):
        ax.plot(x, y / 1e9, marker, color=color, markersize=9, label=f"{label}: {units.format_flop_rate(y)}")
    ax.set(title=title, xlabel="arithmetic intensity (FLOPs per byte)", ylabel="GFLOP/s")
    ax.legend(loc="lower right", fontsize=9)
    small_print(ax, card.title())


def _plain_log(*axes: Axis, steps: Sequence[int] = (1,)) -> None:
    """Ticks of a log axis as plain numbers; few of them, since they are most of a picture's cost."""
    for axis in axes:
        axis.set_major_locator(LogLocator(subs=steps))
        axis.set_major_formatter(lambda value, _: f"{value:,g}" if value < 1e6 else f"{value:g}")
        axis.set_minor_locator(NullLocator())


def integral(line: Growth, *, prompt: int, output: int, ax: Axes, title: str = "A request's decode time is the area under t(n)") -> None:
    """t(n) over a request's decode steps: the area of the constant part, and above it that of the growing cache."""
    ends, steps = (prompt + 1, prompt + output - 1), output - 1
    tops, base = [1e3 * line(n) for n in ends], 1e3 * line.a_s
    grown = steps * line.b_s_per_token * sum(ends) / 2
    constant = f"a: {units.format_seconds(line.a_s)} in each of {steps:,} steps = {units.format_seconds(steps * line.a_s)}"
    growing = f"b·n: the cache, in all steps together {units.format_seconds(grown)}"
    ax.fill_between(ends, (base, base), color=MEASURED, alpha=0.5, label=constant)
    ax.fill_between(ends, (base, base), tops, color=PREDICTED, alpha=0.7, label=growing)
    ax.plot(ends, tops, color=PREDICTED)
    ax.set(title=title, xlabel="tokens in cache", ylabel="milliseconds per token", xlim=(0, ends[1]), ylim=(0, 1.35 * tops[1]))
    ax.legend(loc="upper left")


def ratios(laws: Sequence[LengthLaw], *, ax: Axes, title: str = "Output / input of real requests: 100:1 is a tail") -> None:
    """Each trace's ratio: p5 to p95 as a bar, the median a dot, the largest request a cross; 1:1 and 100:1 as lines."""
    for y, law in enumerate(laws):
        middle = law.quantiles["p5"], law.quantiles["p95"]
        ax.plot(middle, [y, y], color=FLOOR, linewidth=6, solid_capstyle="butt", alpha=0.5, label="p5 to p95" if not y else None)
        ax.plot(law.quantiles["p50"], y, "o", color=MEASURED, markersize=9, label="median" if not y else None)
        ax.plot(law.max, y, "x", color=OTHER, markersize=9, label="largest request" if not y else None)
    for ratio, style in ((1, ":"), (100, "--")):
        ax.axvline(ratio, color=PREDICTED, linestyle=style, label=f"{ratio}:1")
    ax.set(title=title, xlabel="output tokens per input token", xscale="log")
    ax.set_yticks(range(len(laws)), [law.trace for law in laws])
    ax.invert_yaxis()
    _plain_log(ax.xaxis)
    ax.legend(loc="upper center", bbox_to_anchor=(0.3, -0.22), ncols=5, fontsize=9)


def turns(kept: Sequence[Turn], again: Sequence[Turn], *, ax: Axes, title: str = "History read again overtakes the writing") -> None:
    """Seconds of each turn: its decode, and its prefill with the cache kept and with the history read again."""
    numbers = range(1, len(again) + 1)
    ax.plot(numbers, [turn.decode_s for turn in again], color=MEASURED, linewidth=2.5, label="decode")
    ax.plot(numbers, [turn.prefill_s for turn in again], color=OTHER, linewidth=2.5, label="prefill, history read again")
    ax.plot(numbers, [turn.prefill_s for turn in kept], "--", color=OTHER, label="prefill, cache kept")
    ax.set(title=title, xlabel="turn", ylabel="seconds", ylim=(0, None))
    ax.legend()


def compared(cases: Sequence[Any], *, ax: Axes, name: str = "", color: str = MEASURED, marker: str = "o") -> None:
    """Passes of a sweep against their tokens: measured dots, predicted line, floor dashed."""
    xs = [case.tokens * case.batch for case in cases]
    ax.loglog(xs, [1e3 * case.measured.median_s for case in cases], marker, color=color, markersize=8, label=f"measured{name}")
    ax.loglog(xs, [1e3 * case.predicted_s for case in cases], color=color if name else PREDICTED, label=f"predicted{name}")
    ax.loglog(xs, [1e3 * case.floor_s for case in cases], "--", color=FLOOR, linewidth=1, label=f"floor{name}")
    ax.set(xlabel="tokens in the pass", ylabel="milliseconds per pass")
    _plain_log(ax.yaxis, steps=(1, 2, 5))
    ax.set_xticks(xs, [f"{x:,}" for x in xs])
    ax.minorticks_off()
    ax.legend(fontsize=9)


def held(runs: Sequence[tuple[str, Run]], *, token_bytes: int, ax: Axes, title: str = "KV held: early and flat, or a late ramp") -> None:
    """The cache of each request over its own time, from its start to its end."""
    for (label, run), color, style in zip(runs, (MEASURED, PREDICTED, OTHER), ("-", "--", ":"), strict=False):
        clock = [sum(step.seconds for step in run.steps[: i + 1]) for i in range(run.output_tokens)]
        held_mb = [step.context * token_bytes / 1e6 for step in run.steps]
        ax.plot([0, *clock], [held_mb[0], *held_mb], style, color=color, linewidth=2, label=label)
        ax.plot(clock[-1], held_mb[-1], "o", color=color)
    ax.set(title=title, xlabel="seconds since the request began", ylabel="MB of K and V", ylim=(0, None), xlim=(0, None))
    ax.legend()
    first = runs[0][1]
    small_print(ax, f"{first.machine.processor}, {first.machine.threads} threads, {first.dtype}. The dot is where the timing ended.")


def plane(shares: Sequence[Sequence[float]], *, prompts: Sequence[int], outputs: Sequence[int], points: Sequence[tuple[str, float, float]] = (), ax: Axes,
          title: str = "Decode share of a request") -> None:  # fmt: skip
    """A map of decode share over prompt and output, its 50 % line, and points (label, prompt, output). White: too long."""
    picture = ax.contourf(prompts, outputs, shares, levels=[level / 20 for level in range(21)], cmap="cividis")
    drawn = [share for row in shares for share in row if share == share]
    if drawn and min(drawn) < 0.5 < max(drawn):
        ax.contour(prompts, outputs, shares, levels=[0.5], colors="white", linewidths=2)
    for label, prompt, output in points:
        ax.plot(prompt, output, "o", color="white", markeredgecolor="black", markersize=8)
        box = {"facecolor": "white", "alpha": 0.85, "edgecolor": "none", "pad": 1.5}
        ax.annotate(label, (prompt, output), (7, 4), textcoords="offset points", fontsize=9, bbox=box)
    ax.set(title=title, xscale="log", yscale="log", xlabel="prompt, tokens read", ylabel="output, tokens written")
    _plain_log(ax.xaxis, ax.yaxis)
    if not getattr(ax, "decode_bar", None):
        label = "decode share (line: one half; white: too long)"
        ax.decode_bar = ax.figure.colorbar(picture, ax=ax, label=label, ticks=[0, 0.25, 0.5, 0.75, 1])


def frontier(curves: Sequence[tuple[str, str, Sequence[tuple[int, float]]]], *, chosen: tuple[int, float], ax: Axes, title: str) -> None:
    """Tokens/s of all sequences against milliseconds per token of each: (label, line style, (batch, step seconds))."""
    for (label, style, points), color in zip(curves, (PREDICTED, FLOOR), strict=False):
        ax.plot([1e3 * step for _, step in points], [batch / step for batch, step in points], style, color=color, marker=".", label=label)
    for batch, step in curves[0][2][::2]:
        ax.annotate(f"{batch}", (1e3 * step, batch / step), (0, -14), textcoords="offset points", fontsize=8, color=PREDICTED)
    ax.plot(1e3 * chosen[1], chosen[0] / chosen[1], "D", color=OTHER, markersize=10, label=f"batch {chosen[0]}")
    ax.set(title=title, xlabel="milliseconds per token, for each sequence", ylabel="tokens/s, all sequences", xscale="log", yscale="log")
    _plain_log(ax.xaxis, ax.yaxis, steps=(1, 2, 5))
    ax.legend(loc="lower right", fontsize=9)


def published(result: Mapping, *, ax: Axes, title: str = "Each published decode speed, predicted without itself") -> None:
    """Every row of `published.validate`, by hardware class, around the line of equality; a band of 20 % either way."""
    rows = result["predictions"]
    ends = (min(row["published_tokens_per_s"] for row in rows), max(row["published_tokens_per_s"] for row in rows))
    colors = (OTHER, "#a96b59", MEASURED, "#ffa90e", PREDICTED, FLOOR)
    for hw_class, color, marker in zip(sorted({row["hw_class"] for row in rows}), colors, "^Dosvx", strict=False):
        of = [row for row in rows if row["hw_class"] == hw_class]
        ax.plot([row["published_tokens_per_s"] for row in of], [row["predicted_tokens_per_s"] for row in of], marker, color=color, markersize=5, alpha=0.7,
                markerfacecolor="none", label=f"{hw_class}, {len(of)} rows")  # fmt: skip
    ax.plot(ends, ends, color="black", linewidth=1)
    ax.fill_between(ends, [0.8 * end for end in ends], [1.2 * end for end in ends], color=FLOOR, alpha=0.2, label="within 20 %")
    ax.set(title=title, xlabel="published, tokens per second", ylabel="predicted, tokens per second", xscale="log", yscale="log")
    _plain_log(ax.xaxis, ax.yaxis)
    ax.legend(fontsize=9)


def predictions(history: Sequence[Any], *, ax: Axes, title: str = "How far off: your predictions across the course") -> None:
    """|predicted / measured - 1| of each scored prediction in the order made; a sentence where there is none."""
    scored = [outcome for outcome in history if outcome.error_fraction is not None]
    if not scored:
        ax.set_axis_off()
        text = "No scored prediction yet. Enter a number in a Predict box before you run its result,\nthen run this cell again."
        ax.text(0.5, 0.5, text, ha="center", va="center")
        return
    errors = [max(abs(outcome.error_fraction), 1e-3) for outcome in scored]
    ax.semilogy(range(1, len(scored) + 1), errors, "o", color=MEASURED, label="your error (0.1 % or less is drawn at 0.1 %)")
    ax.semilogy(range(1, len(scored) + 1), running_median(errors, 9), color=PREDICTED, label="running median of 9")
    ax.axhline(0.2, linestyle="--", color=FLOOR, label="20 %")
    ax.set_xticks(range(1, len(scored) + 1), [outcome.key for outcome in scored], rotation=60, ha="right", fontsize=8)
    ax.set_yticks([0.001, 0.01, 0.1, 1, 10, 100], ["0.1 %", "1 %", "10 %", "100 %", "10 times", "100 times"])
    ax.set(title=title, ylabel="error against the result")
    ax.legend(fontsize=9)


def roofs(constants: Constants, *, points: Sequence[tuple[str, float, float]], ax: Axes, title: str) -> None:
    """FLOP/s against FLOPs per byte on fixed axes, so that roofs and points (label, FLOPs per byte, FLOP/s) move."""
    ridge = constants.flops_per_s / constants.weight_bytes_per_s
    xs = [0.1, ridge, 1e5]
    ax.loglog(xs, [min(x * constants.weight_bytes_per_s, constants.flops_per_s) for x in xs], "--", color=FLOOR)
    ax.axvline(ridge, color=FLOOR, linewidth=0.8, linestyle=":")
    ax.text(ridge, 1.3e8, f" ridge {ridge:,.1f} FLOP/B", fontsize=9, color=FLOOR)
    for (label, x, y), color, marker, drop in zip(points, (PREDICTED, MEASURED), "sD", (10, -18), strict=True):
        ax.plot(x, y, marker, color=color, markersize=10)
        side, offset = ("right", -4) if x > 1e3 else ("left", 4)  # the text stays inside the axes
        ax.annotate(f"{label}: {units.format_flop_rate(y)}", (x, y), (offset, drop), textcoords="offset points", fontsize=10, ha=side)
    ax.set(title=title, xlabel="arithmetic intensity (FLOPs per byte)", ylabel="FLOP per second")
    _decades(ax, (0.1, 1, 10, 100, 1e3, 1e4, 1e5), (1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14, 1e15, 1e16),
             names=("0.1 G", "1 G", "10 G", "100 G", "1 T", "10 T", "100 T", "1,000 T", "10,000 T"))  # fmt: skip


def _decades(ax: Axes, xs: Sequence[float], ys: Sequence[float], *, names: Sequence[str] = ()) -> None:
    """Fixed ticks in plain text: a slider redraws them in half the time that powers of ten take."""
    ax.minorticks_off()
    ax.set_xticks(xs, [f"{x:,g}" for x in xs])
    ax.set_yticks(ys, names or [f"{y:,g}" for y in ys])
    ax.set(xlim=(xs[0], xs[-1]), ylim=(ys[0], ys[-1]))


def work(series: Sequence[tuple[str, Sequence[PassWork]]], *, ax: Sequence[Axes]) -> None:
    """Two panels, FLOPs and bytes, summed over the first n passes of each series (label, one PassWork per token)."""
    for panel, field, scale, name in zip(ax, ("flops", "bytes"), (1e12, 1e9), ("TFLOP", "GB read"), strict=True):
        for (label, passes), color, style, width in zip(series, (PREDICTED, MEASURED), ("--", "-"), (4, 1.5), strict=True):
            total = list(accumulate(getattr(one, field) / scale for one in passes))
            panel.plot(range(1, len(total) + 1), total, style, color=color, linewidth=width, label=f"{label}: {total[-1]:,.3g} {name}")
        panel.set(title=f"{name}, counted", xlabel="tokens in all", ylabel=f"{name}, sum over all passes", xlim=(0, None), ylim=(0, None))
        panel.legend(fontsize=9, loc="upper left")


def passes(result: Any, *, ax: Axes, title: str = "One pass: reading everything again, or only the newest token") -> None:
    """A PassesResult against the context: passes over all tokens and passes over one, measured dots and predicted lines."""
    for cached, color, marker, label in ((False, PREDICTED, "s", "all tokens again"), (True, MEASURED, "o", "newest token, with cache")):
        kept = [one for one in result.passes if (one.new_tokens < one.context) == cached]
        contexts = [one.context for one in kept]
        ax.plot(contexts, [1e3 * one.taken.median_s for one in kept], marker, color=color, markersize=8, label=f"{label}, measured")
        ax.plot(contexts, [1e3 * one.predicted_s for one in kept], color=color, linewidth=1, label=f"{label}, predicted")
    ax.set(title=title, xlabel="tokens in the context", ylabel="milliseconds per pass", xlim=(0, None), ylim=(0, None))
    ax.legend(fontsize=9)
    small_print(ax, result.card.title())


def bars(rows: Sequence[tuple[str, float]], *, ax: Axes, title: str, form: Callable[[float], str], xlabel: str,
         marks: Sequence[tuple[str, float]] = ()) -> None:  # fmt: skip
    """Horizontal bars of (label, value), each value in text behind its bar; `marks` are values to compare them with."""
    ax.barh([label for label, _ in rows], [value for _, value in rows], color=MEASURED)
    for y, (_, value) in enumerate(rows):
        ax.text(value, y, f" {form(value)}", va="center", fontsize=10)
    ax.set(title=title, xlabel=xlabel, xlim=(0, 1.25 * max(value for _, value in [*rows, *marks])))
    ax.invert_yaxis()
    for (label, value), style in zip(marks, (":", "--"), strict=False):
        ax.axvline(value, color=PREDICTED, linestyle=style, label=f"{label}: {form(value)}")
    if marks:
        ax.legend(fontsize=9, loc="center", bbox_to_anchor=(0.64, 0.5))


def cache_size(curves: Sequence[tuple[str, Sequence[float]]], *, contexts: Sequence[int], weights: float, chosen: tuple[int, float], ax: Axes,
               title: str) -> None:  # fmt: skip
    """KV bytes of one sequence against its length, (label, bytes) per curve, beside the weights; one length is marked."""
    for (label, held), color, style in zip(curves, (PREDICTED, FLOOR), ("-", ":"), strict=False):
        ax.loglog(contexts, [value / 2**30 for value in held], style, color=color, linewidth=2, label=label)
    ax.axhline(weights / 2**30, color="black", linestyle="--", linewidth=1, label=f"weights: {units.format_capacity(weights)}")
    ax.plot(chosen[0], chosen[1] / 2**30, "o", color=MEASURED, markersize=10)
    ax.set(title=title, xlabel="tokens in cache", ylabel="GiB of K and V, one sequence")
    _decades(ax, (100, 1e3, 1e4, 1e5), (1e-3, 0.01, 0.1, 1, 10, 100, 1e3))
    ax.set_xlim(100, 2e5)
    ax.legend(fontsize=9, loc="upper left")


def memory(weights: float, each: float, count: int, *, total: float, reserved_fraction: float = 0.1, ax: Axes, title: str) -> None:
    """One bar of a memory: the weights, the K and V of `count` sequences, what is free, and what the engine keeps."""
    kept, start = total * reserved_fraction, 0.0
    parts = [("weights", weights, OTHER), (f"K and V of {count:,} sequences", count * each, MEASURED),
             ("free", total - kept - weights - count * each, "#e8e8e8"), ("kept for the engine", kept, FLOOR)]  # fmt: skip
    for label, size, color in parts:
        ax.barh([0], [size / 2**30], left=start / 2**30, color=color, label=f"{label}: {units.format_capacity(size)}", edgecolor="white")
        start += size
    for number in range(1, count if count <= 64 else 0):
        ax.axvline((weights + number * each) / 2**30, 0.14, 0.86, color="white", linewidth=1)
    ax.set(title=title, xlabel="GiB of memory", yticks=[], xlim=(0, total / 2**30), ylim=(-0.55, 0.55))
    ax.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, -0.3), ncols=2)


def step_bandwidth(result: Any, *, ax: Axes, reads: Sequence[float] = (), title: str = "A step must be large before memory sets its time") -> None:
    """Read bandwidth of the one-sequence steps of a SaturationResult, and of `reads` of as many bytes, the last-level cache shaded."""
    single = [point for point in result.points if point.batch == 1]
    sizes = [point.bytes_per_step / 1e6 for point in single]
    if cached := result.card.machine.last_level_cache_bytes:
        ax.axvspan(0.7 * sizes[0], cached / 1e6, color="#e8e8e8", label="in the last-level cache")
    ax.semilogx(sizes, [p.bytes_per_step / p.predicted_s / 1e9 for p in single], color=PREDICTED, label="predicted")
    ax.axhline(result.roof_bytes_per_s / 1e9, linestyle="--", color=FLOOR, label="read roof")
    ax.plot(sizes, [point.read_bytes_per_s / 1e9 for point in single], "o", color=MEASURED, label="measured")
    if reads:
        ax.plot(sizes, [rate / 1e9 for rate in reads], "s", color=OTHER, label="reading alone, measured")
    ax.set(title=title, xlabel="MB moved per step", ylabel="GB/s read", xlim=(0.7 * sizes[0], 1.4 * sizes[-1]))
    ax.set_ylim(0, 1.4 * max([result.roof_bytes_per_s, *reads, *(p.read_bytes_per_s for p in single)]) / 1e9)
    ax.set_xticks(sizes, [units.significant(size, 2) for size in sizes])
    ax.minorticks_off()
    ax.legend(fontsize=9, ncols=2, loc="upper right")
    small_print(ax, result.card.title())


def batch_rates(result: Any, *, ax: Sequence[Axes]) -> None:
    """Up to three panels of a SaturationResult against the batch: tokens/s, GB/s, GFLOP/s; the ridge marked, the roofs dashed."""
    points = [point for point in result.points if point.model == result.points[-1].model]
    batches = [point.batch for point in points]
    rows = (("tokens per second", "batch", 1.0, None), ("GB/s read", "bytes_per_step", 1e9, result.roof_bytes_per_s),
            ("GFLOP/s", "flops_per_step", 1e9, result.card.gemm_flops_per_s))  # fmt: skip
    for panel, (name, field, scale, roof) in zip(ax, rows, strict=False):
        panel.semilogx(batches, [getattr(p, field) / p.predicted_s / scale for p in points], color=PREDICTED, label="predicted")
        panel.plot(batches, [getattr(p, field) / p.step_s / scale for p in points], "o", color=MEASURED, label="measured")
        if roof:
            panel.axhline(roof / scale, linestyle="--", color=FLOOR, label="roof")
        panel.axvline(result.ridge_batch, linestyle=":", color="black", label=f"ridge: batch {result.ridge_batch:.1f}")
        panel.set(title=f"{name}, by batch", xlabel="sequences per step", ylabel=name, ylim=(0, None))
        panel.set_xticks(batches, batches)
        panel.minorticks_off()
    ax[len(ax) // 2].legend(fontsize=9)
    small_print(ax[0], result.card.title())


def ledger(table: Any, *, ax: Axes, title: str = "What each technique does to a quantity: predicted and measured") -> None:
    """after / before of each entry on a log axis, passes that stay the same left out; "same" is shaded, a cross is a class that was not predicted."""
    entries = [entry for entry in table.entries if (entry.quantity, entry.claimed) != ("passes", "same")]
    ax.axvspan(0.9, 1.1, color="#e8e8e8", label="same: within 10 %")
    for label, wanted, marker, color in (("found, as claimed", True, "o", MEASURED), ("found, another class", False, "X", OTHER)):
        kept = [
            (max(0.01, entry.change.factor), y)
            for y, entry in enumerate(entries)
            if entry.agrees == wanted and entry.change.factor == entry.change.factor
        ]
        if kept:
            ax.plot(*zip(*kept, strict=True), marker, color=color, markersize=8, label=label)
    formula = [(max(0.01, entry.change.predicted), y) for y, entry in enumerate(entries) if entry.change.predicted is not None]
    if formula:
        ax.plot(*zip(*formula, strict=True), "|", color=PREDICTED, markersize=16, markeredgewidth=2, label="the formula's factor")
    ax.set(title=title, xlabel="after / before (0.01 stands for less, too)", xscale="log")
    ax.set_yticks(range(len(entries)), [f"{entry.technique}: {entry.quantity}" for entry in entries])
    ax.invert_yaxis()
    _plain_log(ax.xaxis)
    ax.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.3, 0), borderaxespad=7, ncols=2)  # below the small print, whatever the height
    small_print(ax, table.caption)


def rows_over_time(records: Sequence[RequestRecord]) -> list[tuple[int, float, float]]:
    """(row, first token, end) of each request, in the order of their first tokens; each takes the first row that is free."""
    free_from: list[float] = []
    placed = []
    for one in sorted((one for one in records if one.token_s), key=lambda one: one.token_s[0]):
        row = next((row for row, until in enumerate(free_from) if until <= one.token_s[0]), len(free_from))
        free_from[row : row + 1] = [one.end_s]
        placed.append((row, one.token_s[0], one.end_s))
    return placed


def occupied(records: Sequence[RequestRecord], *, rows: int, ax: Axes, title: str) -> None:
    """The batch over time: each request a bar in its row, from its first token to its end. White is a row that writes nothing."""
    placed = rows_over_time(records)
    rows = max(rows, *(row + 1 for row, _, _ in placed))  # a preempted request keeps its row while it waits
    bars = [[(start, row + 1), (end, row + 1)] for row, start, end in placed]
    width = 0.8 * ax.get_position().height * ax.figure.get_figheight() * 72 / rows
    ax.add_collection(LineCollection(bars, linewidths=width, colors=[(MEASURED, OTHER, "#ffa90e")[i % 3] for i in range(len(bars))], capstyle="butt"))
    ax.set(title=title, xlabel="seconds", ylabel="row of the batch", xlim=(0, max(end for _, _, end in placed)), ylim=(rows + 0.6, 0.4))


def curves(series: Mapping[str, tuple[Sequence[float], Sequence[float]]], *, ax: Axes, title: str, labels: tuple[str, str], log: str = "",
           limit: tuple[str, float] | None = None) -> None:  # fmt: skip
    """A line for each label -> (xs, ys), with markers where its points are few; axes named in `log` are logarithmic, a `limit` (label, y) is dashed."""
    few = all(len(xs) <= FEW_POINTS for xs, _ in series.values())
    looks = zip((MEASURED, PREDICTED, OTHER, "#ffa90e", FLOOR), "osD^v", ("-", "-", "--", ":", "-."), strict=True)
    for (label, (xs, ys)), (color, marker, style) in zip(series.items(), looks, strict=False):
        ax.plot(xs, ys, style, marker=marker if few else "", color=color, linewidth=2, label=label)
    if limit:
        ax.axhline(limit[1], linestyle="--", color="black", linewidth=1, label=limit[0])
    ax.set(title=title, xlabel=labels[0], ylabel=labels[1])
    for name in log:
        ax.set(**{f"{name}scale": "log"})
        _plain_log(getattr(ax, f"{name}axis"), steps=(1, 3))
    if few:
        ax.set_xticks(xs, [f"{x:,g}" for x in xs])
    if "y" not in log:
        ax.set_ylim(0, None)
    ax.legend(fontsize=9)


def speedups(rows: Sequence[tuple[str, float, float]], *, ax: Axes, title: str, caption: str = "") -> None:
    """(label, predicted, measured) speed-ups, one a line: measured is a dot, predicted a bar across it; left of the line at 1 it loses."""
    places = range(len(rows))
    ax.axvline(1, color="black", linewidth=1, linestyle="--", label="no gain")
    ax.plot([measured for _, _, measured in rows], places, "o", color=MEASURED, markersize=8, label="measured")
    ax.plot([predicted for _, predicted, _ in rows], places, "|", color=PREDICTED, markersize=16, markeredgewidth=2, label="predicted")
    ax.set(title=title, xlabel="speed-up", xlim=(0, 1.1 * max(1.2, *(max(pair) for _, *pair in rows))))
    ax.set_yticks(places, [label for label, *_ in rows])
    ax.invert_yaxis()
    ax.legend(fontsize=9, loc="upper center", bbox_to_anchor=(0.5, 0), borderaxespad=7, ncols=3)  # below: dots may lie anywhere
    small_print(ax, caption)


def round_prices(groups: Mapping[str, Sequence[tuple[float, float]]], *, ax: Axes, title: str) -> None:
    """(tokens per round, speed-up) of each result, by group; the lines say how many plain steps a round cost."""
    far = 1.1 * max(tokens for points in groups.values() for tokens, _ in points)
    for steps in (1, 1.25, 1.5, 2):
        ax.plot((0, far), (0, far / steps), color=FLOOR, linewidth=1, linestyle=":")
        ax.text(far, far / steps, f" {steps:g} steps" if steps > 1 else " a round costs 1 step", fontsize=9, color=FLOOR, va="center")
    looks = zip((OTHER, PREDICTED, "#ffa90e", FLOOR, MEASURED), "sD^vo", strict=True)
    for (label, points), (color, marker) in zip(groups.items(), looks, strict=False):
        ax.plot(*zip(*points, strict=True), marker, color=color, markersize=7, label=label)
    ax.axhline(1, color="black", linewidth=1, linestyle="--")
    ax.set(title=title, xlabel="tokens per round", ylabel="speed-up", xlim=(0, far), ylim=(0, None))
    ax.legend(fontsize=9, loc="upper left")


def against_formula(series: Mapping[str, tuple[Sequence[float], Sequence[float], Sequence[float]]], *, ax: Axes, title: str, labels: tuple[str, str],
                    limit: tuple[str, float] | None = None) -> None:  # fmt: skip
    """Label -> (xs, published, formula): what others measured as dots, what the formula says as a line of the same colour; a `limit` is dashed."""
    for (label, (xs, dots, line)), color, marker in zip(series.items(), (MEASURED, PREDICTED, OTHER), "osD", strict=False):
        ax.plot(xs, dots, marker, color=color, markersize=8, label=f"{label}, published")
        ax.plot(xs[: len(line)], line, "-", color=color, linewidth=2, label=f"{label}, formula" if line else None)
    if limit:
        ax.axhline(limit[1], linestyle="--", color="black", linewidth=1, label=limit[0])
    ax.set(title=title, xlabel=labels[0], ylabel=labels[1], ylim=(0, None))
    ax.set_xticks(xs, [f"{x:g}" for x in xs])
    ax.legend(fontsize=9)


def budgets(points: Sequence[tuple[int, float, tuple[float, float]]], *, lengths: Sequence[int], ax: Axes, title: str, caption: str = "") -> None:
    """(budget, share right, its 95 % interval) as dots, and as a line the share of traces of these `lengths` that end within each budget."""
    ordered, far = sorted(lengths), 1.02 * points[-1][0]
    xs = [0, *(length for length in ordered if length <= far), far]
    ended = [100 * bisect_right(ordered, x) / len(ordered) for x in xs]
    ax.step(xs, ended, where="post", color=PREDICTED, label="traces that end within it")
    low, high = ([100 * abs(share - ends[side]) for _, share, ends in points] for side in (0, 1))
    ax.errorbar([budget for budget, *_ in points], [100 * share for _, share, _ in points], (low, high), fmt="o", color=MEASURED, markersize=8, capsize=4,
                label="right answers, measured, 95 %")  # fmt: skip
    ax.set(title=title, xlabel="budget, tokens of trace", ylabel="% of problems", xlim=(0, far), ylim=(0, 104))
    ax.legend(loc="lower right")
    small_print(ax, caption)
