"""Engine classes: how far published engines stay from a datasheet. Fitted constants, one row of data/engines.csv a class."""

from dataclasses import dataclass
from math import inf

from decodelab.arithmetic.catalog import Hardware, read_table
from decodelab.arithmetic.cost import Constants
from decodelab.arithmetic.published import engine_class


@dataclass(frozen=True, kw_only=True)
class Engine:
    """One class of engine: fractions of the datasheet reached, and overheads in seconds. `source` says which rows it is fitted to."""

    name: str
    step_overhead_s: float
    layer_overhead_s: float
    per_row_s: float
    weight_bandwidth_fraction: float
    kv_bandwidth_fraction: float
    compute_fraction: float
    source: str

    def constants(self, hardware: Hardware, *, dtype: str = "bfloat16") -> Constants:
        """The formula's constants for this class of engine on `hardware`."""
        bandwidth, peak = hardware.bandwidth_bytes_per_s, hardware.flops_per_s(dtype)
        return Constants(weight_bytes_per_s=self.weight_bandwidth_fraction * bandwidth, kv_bytes_per_s=self.kv_bandwidth_fraction * bandwidth,
                         flops_per_s=self.compute_fraction * peak if peak else inf, step_overhead_s=self.step_overhead_s,
                         layer_overhead_s=self.layer_overhead_s, per_row_s=self.per_row_s)  # fmt: skip


def engines() -> dict[str, Engine]:
    """Every engine class by name; a class without published prefill rows takes the datacenter's compute fraction."""
    rows = {row["engine_class"]: row for row in read_table("engines.csv")}
    numbers = [name for name, kind in Engine.__annotations__.items() if kind is float]
    return {name: Engine(name=name, source=row["source"], **{number: float(row[number] or rows["datacenter"][number]) for number in numbers})
            for name, row in rows.items()}  # fmt: skip


def engine_for(hardware: Hardware) -> Engine:
    """The class of engine that published results on this kind of hardware come from."""
    return engines()[engine_class(hardware)]
