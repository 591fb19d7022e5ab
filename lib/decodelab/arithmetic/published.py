"""The cost model against published decode speeds: fit its constants on other rows, predict each row, report the error.

    step_s = layers*l0 + weight_bytes/(f_w*BW) + kv_bytes/(f_kv*BW) + batch*c1 [+ layers*l1 when split by tensor]

BW is the datasheet figure, times the devices that stream at once: all when split by tensor, one when split by layer.
A group is (hardware_name, else hardware; framework). A row is predicted from the other rows of its group, pulled
towards what other groups say; a constant the group cannot show (its batch never varies, say) comes from those.
The second figure, "other machines' constants", uses other groups only.
`python -m decodelab.arithmetic.published` rewrites data/engines.csv.
"""

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from decodelab.arithmetic import catalog, cost

COLUMNS = """id source hardware hardware_name spec_bandwidth_gb_s hw_class n_devices framework model weight_format
    weight_bits batch prompt_len output_len tokens_per_s tokens_per_s_is kind includes_prefill notes""".split()
FITTED_KINDS = ("decode_b1", "decode_batched", "decode_batched_moe")
SMALLEST_GROUP = 3
LONGEST_FREE_PREFILL = 16  # tokens: a prompt this short costs one step, and that step yields a token
MATRIX_BITS = {"awq": 16.0, "gpt": 16.0, "exl": 6.0}  # of the output matrix, by the first letters of the format

START = np.array([31e-6, 1 / 0.8, 1 / 0.6, 20e-6, 9e-6])  # l0, 1/f_w, 1/f_kv, c1, l1: the unit of the fitted numbers
START_WIDTH = np.array([2.0, 0.4, 0.9, 1.5, 1.0])  # how far the pooled fit may go from START, in units of START
GROUP_WIDTH = np.array([1.0, 0.25, 1.0, 1.0, 1.0])  # how far a group may go from the pooled fit, as a fraction of it
POOL_SPREAD, POOL_ROWS = 0.10, 100  # relative scatter of the pool; the rows it counts for
GROUP_SPREAD = 0.05  # relative scatter inside a group
SAME_CLASS, SAME_FAMILY, UNLIKE = 10, 4, 0.3  # weight of like groups in the pool; of each unlike trait in a group


class MalformedRows(ValueError):
    """A table that cannot be read in full; the message lists every bad line with its reason."""


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """One published decode speed. `features` are the seconds of its step per unit of START."""

    id: str
    content: tuple[str, ...]  # what tells one measurement from another: every cell but id, source and notes
    kind: str
    group: tuple[str, str]
    hw_class: str
    traits: tuple[str, str, str]  # weight format, table, device count
    tokens_per_s: float
    step_s: float
    left_out: str  # why the formula does not apply to it, from its description alone; "" if it does
    features: np.ndarray | None


def _number(raw: Mapping[str, str], column: str, *, unknown: float | None = None) -> float:
    """The cell as a number above 0; `unknown` where it is blank, or a length that was not published in tokens."""
    text = raw[column].strip()
    if unknown is not None and (not text or column.endswith("_len") and re.fullmatch(r"0|short|\d+-\d+ uniform", text)):
        return unknown
    if not re.fullmatch(r"\d*\.?\d+(e[+-]?\d+)?", text, re.IGNORECASE) or not 0 < float(text) < np.inf:
        raise ValueError(f"{column} is {raw[column]!r}; it must be a number above 0")
    return float(text)


def _bits(text: str) -> tuple[float, ...]:
    """Bits per weight, block scales included: one number, (experts, rest), or none where not published."""
    match = re.fullmatch(r"(\d+\.?\d*)|experts (\d+\.?\d*) / rest (\d+\.?\d*)|", text.strip())
    found = tuple(float(part) for part in match.groups() if part) if match else (0.0,)
    if not all(0 < value <= 64 for value in found):
        raise ValueError(f"weight_bits is {text!r}; give bits per weight, or 'experts A / rest B'")
    return found


def _weight_bytes(config: catalog.ModelConfig, *, weight_format: str, bits: tuple[float, ...], batch: float) -> float:
    """Bytes of weights one step reads; experts, or all but the output matrix, at bits[0]."""
    values = cost.weight_bytes_per_step(config, dtype_bytes=1, batch=batch)
    if len(bits) == 2:
        layer = cost.layer_parameters(config, layer=config.dense_layers)
        per_expert = (config.n_layers - config.dense_layers) * (layer.expert_matrices + layer.expert_vectors)
        first, other_bits = cost.expected_experts(config, tokens=batch) * per_expert, bits[1]
    else:
        first = values - config.vocab_size * config.hidden
        other_bits = MATRIX_BITS.get(weight_format[:3], bits[0])
    return (first * bits[0] + (values - first) * other_bits) / 8


def _left_out(raw: Mapping[str, str], *, prompt: float) -> str:
    if raw["kind"] not in FITTED_KINDS:
        return f"kind {raw['kind']} is not for fitting"
    if raw["includes_prefill"].strip() not in ("", "no") and prompt > LONGEST_FREE_PREFILL:
        return "the rate includes a long prefill"
    try:
        catalog.model(raw["model"])
    except catalog.UnknownName:
        return "model not in data/models.csv"
    missing = [column for column in ("weight_bits", "spec_bandwidth_gb_s", "batch") if not raw[column].strip()]
    return f"{', '.join(missing)} not published" if missing else ""


def _parse(raw: Mapping[str, str]) -> PublishedRow:
    """A row of text as numbers. Raises ValueError with the first thing wrong in it."""
    if None in raw or any(raw.get(column) is None for column in COLUMNS):
        raise ValueError("more or fewer fields than the header")
    blank = [name for name in ("id", "framework", "kind") if not raw[name].strip()]
    if blank or not (raw["hardware_name"] or raw["hardware"]).strip():
        raise ValueError(f"{', '.join(blank) or 'hardware'} is blank")
    if raw["tokens_per_s_is"] not in ("request", "total"):
        raise ValueError(f"tokens_per_s_is is {raw['tokens_per_s_is']!r}; it must be 'request' or 'total'")
    if not re.fullmatch(r"[1-9]\d*", raw["n_devices"].strip()):
        raise ValueError(f"n_devices is {raw['n_devices']!r}; it must be a whole number from 1")
    rate, batch, bits = _number(raw, "tokens_per_s"), _number(raw, "batch", unknown=0), _bits(raw["weight_bits"])
    prompt, output = _number(raw, "prompt_len", unknown=0), _number(raw, "output_len", unknown=128)
    bandwidth, left_out, features = _number(raw, "spec_bandwidth_gb_s", unknown=0), _left_out(raw, prompt=prompt), None
    if not left_out:
        config, streams = catalog.model(raw["model"]), 1 if "layer split" in raw["notes"] else int(raw["n_devices"])
        weights = _weight_bytes(config, weight_format=raw["weight_format"], bits=bits, batch=batch)
        kv = batch * cost.kv_bytes(config, context=round(prompt + output / 2))
        read_s = [moved / (bandwidth * 1e9 * streams) for moved in (weights, kv)]
        features = START * (config.n_layers, *read_s, batch, config.n_layers * (streams > 1))
    group, batched = (raw["hardware_name"] or raw["hardware"], raw["framework"]), raw["tokens_per_s_is"] == "total"
    content = tuple(raw[column].strip() for column in COLUMNS if column not in ("id", "source", "notes"))
    return PublishedRow(id=raw["id"], content=content, kind=raw["kind"], group=group, hw_class=raw["hw_class"],
                        traits=(raw["weight_format"], raw["source"], raw["n_devices"]), tokens_per_s=rate,
                        step_s=(batch if batched else 1) / rate, left_out=left_out, features=features)  # fmt: skip


def _parse_all(raws: Iterable[tuple[int, Mapping[str, str]]], *, name: str) -> list[PublishedRow]:
    """Every row, or none of them."""
    rows, bad = [], []
    for line, raw in raws:
        try:
            rows.append(_parse(raw))
            if rows[-1].id in {row.id for row in rows[:-1]}:
                raise ValueError(f"id {rows[-1].id} is there twice")
        except ValueError as error:
            bad.append(f"line {line}: {error}")
    if bad or not rows:
        raise MalformedRows(f"{name}: {'; '.join(bad) or 'no rows'}. Nothing was read: correct the table, run again")
    return rows


def read_rows(path: str | Path) -> list[PublishedRow]:
    """Every row of a table with the columns of data/measured_decode.csv, or nothing.

    Raises: MalformedRows, with line number and reason of each bad line.
    """
    name, reader = Path(path).name, None
    try:
        with Path(path).open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.DictReader(lines, strict=True)
            if missing := [column for column in COLUMNS if column not in (reader.fieldnames or ())]:
                raise MalformedRows(f"{name}: line 1: no column {', '.join(missing)}; see data/measured_decode.csv")
            return _parse_all(((reader.line_num, raw) for raw in reader), name=name)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        line = f"line {reader.line_num}: " if reader else ""
        raise MalformedRows(f"{name}: {line}{getattr(error, 'strerror', None) or error}. Nothing was read") from None


def _rows(table: str | Path | Sequence[Mapping[str, str]]) -> list[PublishedRow]:
    """Rows of a file, or of text in memory; the first row in memory counts as line 2, after a header."""
    return read_rows(table) if isinstance(table, (str, Path)) else _parse_all(enumerate(table, 2), name="rows")


def fit(rows: Sequence[PublishedRow], weights: Sequence[float], *, prior: np.ndarray, width: np.ndarray, spread: float) -> np.ndarray:
    """Constants in units of START: least squared relative errors plus squared distance to the prior, none negative.

    An error beyond 1.5 spreads (a broken build, an eager run) counts by its size, not by its square.
    """
    ratios = np.array([row.features / row.step_s for row in rows]).reshape(-1, len(prior))
    trust = np.ones(len(rows))
    for _ in range(20):
        scaled = ratios * (np.asarray(weights) * trust)[:, None] / spread**2
        curvature, pull = scaled.T @ ratios + np.diag(width**-2.0), scaled.sum(axis=0) + prior / width**2
        free = np.ones(len(prior), bool)
        for _ in prior:  # drop what turns negative
            constants = np.zeros(len(prior))
            constants[free] = np.linalg.solve(curvature[np.ix_(free, free)], pull[free])
            free &= constants > 0
        trust = np.minimum(1, 1.5 * spread / np.maximum(np.abs(ratios @ constants - 1), 1e-12))
    return constants


def fit_others(groups: Mapping[tuple, Sequence[PublishedRow]], *, like: PublishedRow) -> np.ndarray:
    """Constants that all groups but that of `like` support; those of its hardware class or framework weigh more."""
    rows = [row for group, members in groups.items() if group != like.group for row in members]
    related = [(row.hw_class == like.hw_class, row.group[1].split()[0] == like.group[1].split()[0]) for row in rows]
    weights = np.array([SAME_CLASS**hardware * SAME_FAMILY**engine for hardware, engine in related], float)
    weights *= POOL_ROWS / max(weights.sum(), 1)
    return fit(rows, weights, prior=np.ones(len(START)), width=START_WIDTH, spread=POOL_SPREAD)


def fit_group(members: Sequence[PublishedRow], *, prior: np.ndarray, like: PublishedRow | None = None) -> np.ndarray:
    """Constants of a group near `prior`; for `like`, without that row, and rows that differ in a trait weigh less."""
    rows = [row for row in members if like is None or row.content != like.content]
    unlike = [sum(a != b for a, b in zip(row.traits, (like or row).traits, strict=True)) for row in rows]
    width = np.maximum(GROUP_WIDTH * prior, 0.05)
    return fit(rows, [UNLIKE**count for count in unlike], prior=prior, width=width, spread=GROUP_SPREAD)


def _usable_groups(rows: Iterable[PublishedRow]) -> dict[tuple[str, str], list[PublishedRow]]:
    groups = defaultdict(list)
    for row in rows:
        if not row.left_out:
            groups[row.group].append(row)
    return {group: members for group, members in groups.items() if len(members) >= SMALLEST_GROUP}


def _predict(row: PublishedRow, groups: Mapping, pooled: dict) -> dict:
    """One row of the report; `pooled` remembers each group's fit on the others."""
    if row.group not in pooled:
        pooled[row.group] = fit_others(groups, like=row)
    own = fit_group(groups[row.group], prior=pooled[row.group], like=row)
    speeds = [float(row.tokens_per_s * row.step_s / (row.features @ c)) for c in (own, pooled[row.group])]
    errors = [abs(speed / row.tokens_per_s - 1) for speed in speeds]
    return {"id": row.id, "kind": row.kind, "group": list(row.group), "hw_class": row.hw_class,
            "published_tokens_per_s": row.tokens_per_s, "predicted_tokens_per_s": speeds[0], "error": errors[0],
            "other_machines_tokens_per_s": speeds[1], "other_machines_error": errors[1]}  # fmt: skip


def _summary(predictions: Sequence[dict], error: str) -> dict[str, dict]:
    errors = {kind: [p[error] for p in predictions if p["kind"] == kind] for kind in FITTED_KINDS}
    by_kind = {kind: e for kind, e in errors.items() if e}
    return {k: {"n": len(e), "median": float(np.median(e)), "p90": float(np.quantile(e, 0.9))} for k, e in by_kind.items()}


def validate(rows: str | Path | Sequence[Mapping] | None = None, *, shipped: Sequence[Mapping] | None = None) -> dict:
    """Errors |predicted / published tokens_per_s - 1| of the cost model, as fractions, by kind of row.

    Without `rows` each shipped row is predicted with itself left out. With `rows` (a file, or rows of text) the fit is
    on the shipped rows and `rows` are predicted; those of unknown groups go under `unfitted`. `shipped` replaces
    data/measured_decode.csv. No row enters its own prediction, and no row of its group enters `other_machines`.
    Raises: MalformedRows. Taught in: lessons/05.
    """
    known = _rows(catalog.data_dir() / "measured_decode.csv" if shipped is None else shipped)
    asked = known if rows is None else _rows(rows)
    groups, pooled, predictions, left_out, unfitted = _usable_groups(known), {}, [], [], []
    for row in asked:
        entry = {"id": row.id, "kind": row.kind, "group": list(row.group)}
        if not row.left_out and row.group in groups:
            predictions.append(_predict(row, groups, pooled))
        elif rows is not None and not row.left_out:
            unfitted.append(entry)
        else:
            left_out.append(entry | {"reason": row.left_out or f"fewer than {SMALLEST_GROUP} usable rows in its group"})
    reasons = dict(Counter(row["reason"] for row in left_out))
    return {"by_kind": _summary(predictions, "error"), "other_machines": _summary(predictions, "other_machines_error"),
            "rows_by_kind": dict(Counter(row.kind for row in asked)), "predictions": predictions, "unfitted": unfitted,
            "left_out": {"n": len(left_out), "by_reason": reasons, "rows": left_out}}  # fmt: skip


def table(result: Mapping) -> str:
    """What `validate` returned, as lines of text: errors by kind, then the rows that were not used and why."""
    lines = [f"{'kind':<20}{'rows used':>12}{'median':>9}{'p90':>9}{'other machines':>16}{'p90':>9}"]
    for kind, own in result["by_kind"].items():
        other, used = result["other_machines"][kind], f"{own['n']} of {result['rows_by_kind'][kind]}"
        numbers = f"{own['median']:>9.1%}{own['p90']:>9.1%}{other['median']:>16.1%}{other['p90']:>9.1%}"
        lines.append(f"{kind:<20}{used:>12}{numbers}")
    lines += [f"left out, {n} rows: {reason}" for reason, n in result["left_out"]["by_reason"].items()]
    lines += [f"unfitted, {row['id']}: too few rows of {' / '.join(row['group'])}" for row in result["unfitted"]]
    return "\n".join(lines)


@dataclass(frozen=True, kw_only=True)
class SpeculationRow:
    """One published result of speculative decoding. None where the source gives no plain number."""

    method: str
    target: str
    draft: str
    task: str
    temperature: str
    framework: str
    source: str
    batch: float | None
    k: float | None
    acceptance: float | None
    tokens: float | None  # per pass of the target, as counted; a number that was worked out from the acceptance is left out
    speedup: float | None

    @property
    def round_steps(self) -> float | None:
        """What a round cost, in plain steps: tokens per round over speed-up."""
        return self.tokens / self.speedup if self.tokens and self.speedup else None


def speculation_rows() -> list[SpeculationRow]:
    """Every row of data/spec_decode.csv. Taught in: lessons/07."""

    def plain(text: str) -> float | None:
        return float(text) if re.fullmatch(r"\d*\.?\d+", text) else None

    names = {"k": "gamma", "acceptance": "alpha", "tokens": "accept_length", "batch": "batch", "speedup": "speedup"}
    return [SpeculationRow(**{name: raw[name] for name in ("method", "target", "draft", "task", "temperature", "framework", "source")},
                           **{name: None if name == "tokens" and "computed here" in raw["notes"] else plain(raw[column])
                              for name, column in names.items()}) for raw in catalog.read_table("spec_decode.csv")]  # fmt: skip


ENGINES = {  # engine_class: Hardware.kind, hw_class, its decode rows (framework or source), its prefill rows
    "datacenter": ("gpu", "NVIDIA datacenter", "silybench", "H100 SXM vLLM"),
    "consumer": ("gpu", "NVIDIA consumer/workstation", "llama.cpp CUDA", "RTX"),
    "unified": ("soc", "NVIDIA unified/edge", "llama.cpp CUDA", "DGX"),
    "apple": ("soc", "Apple", "discussion 4167", "llama.cpp Metal"),
    "cpu": ("cpu", "CPU", "", "CPU"),
}


def engine_class(hardware: catalog.Hardware) -> str:
    """The row of data/engines.csv for `hardware`; what no row covers takes the nearest kind: Instinct, Gaudi and TPUs "datacenter"."""
    if hardware.kind in ("cpu", "soc"):
        return "cpu" if hardware.kind == "cpu" else "apple" if hardware.vendor == "Apple" else "unified"
    return "consumer" if re.search(r"\bRT?X\b", hardware.name) else "datacenter"


def engine_rows() -> list[dict[str, str]]:
    """data/engines.csv refitted: each class on its single-device rows, near what the other groups say.

    KV is never taken to stream faster than weights. compute_fraction: median published 16-bit MFU, prompts from 512.
    """
    groups, out = _usable_groups(read_rows(catalog.data_dir() / "measured_decode.csv")), []
    for name, (kind, hw_class, decode, prefill) in ENGINES.items():
        like = [row for members in groups.values() for row in members if row.hw_class == hw_class]
        rows = [row for row in like if row.traits[2] == "1" and decode in f"{row.group[1]} {row.traits[1]}"]
        fitted = START * fit_group(rows, prior=fit_others(groups, like=rows[0]))
        prefills = [row for row in catalog.read_table("measured_prefill.csv") if row["mfu"] and "16" in row["dtype"]]
        prefills = [row for row in prefills if prefill in f"{row['hardware']} {row['framework']}"]
        mfu = [float(row["mfu"]) for row in prefills if int(row["prompt_len"]) >= 512]
        weights, kv = min(1, 1 / fitted[1]), min(1, 1 / fitted[1], 1 / fitted[2])
        origin = f"{len(rows)} rows of measured_decode.csv ({hw_class}, {decode or 'all'})"
        out.append({"engine_class": name, "kind": kind, "step_overhead_s": "0", "layer_overhead_s": f"{fitted[0]:.3g}",
                    "per_row_s": f"{fitted[3]:.3g}", "weight_bandwidth_fraction": f"{weights:.3g}",
                    "kv_bandwidth_fraction": f"{kv:.3g}", "compute_fraction": f"{np.median(mfu):.3g}" if mfu else "",
                    "source": f"{origin}; {len(mfu)} of measured_prefill.csv"})  # fmt: skip
    return out


if __name__ == "__main__":
    with (catalog.data_dir() / "engines.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list((refitted := engine_rows())[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(refitted)
