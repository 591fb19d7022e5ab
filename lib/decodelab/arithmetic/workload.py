"""Length laws: how many tokens requests really read and write, as quantiles of traces and datasets (data/workloads.csv)."""

from dataclasses import dataclass

from decodelab.arithmetic.catalog import read_table

QUANTILES = ("p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99")


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
