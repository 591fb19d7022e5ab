"""One run of the load client as a document, measured now or kept for the course: shown alike, and labelled."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass

from decodelab.arithmetic import catalog, units
from decodelab.arithmetic.records import html_table
from decodelab.serving import endpoint

SERVER = "DECODELAB_SERVER"
SHOWN = {"time to first token": "ttft", "inter-token latency": "itl", "time per output token": "tpot", "whole request": "total"}


@dataclass(frozen=True)
class ServedRun:
    """`values` as `decodelab serve-check` writes them; `label` says whether it was measured now or recorded, and where."""

    values: dict
    label: str

    def mean_s(self, quantity: str) -> float | None:
        """The client's mean of ttft, itl, tpot or total, in seconds."""
        return (self.values["summary"].get(quantity) or {}).get("mean_s")

    def server_s(self, quantity: str) -> float | None:
        """The server's own mean of the same, sum / count over the run; None where it has no such metric."""
        return self.values["server"].get(quantity, {}).get("mean")

    def token_s(self, request: int = 0) -> list[float]:
        """When each event of one request came, in seconds from the start of the run. Raises: KeyError where the run was kept without."""
        return self.values["requests"][request]["token_s"]

    def rows(self) -> list[tuple[str, ...]]:
        """(name, median, 99th percentile, mean, samples, the server's mean) of each latency that was measured."""
        found = [(name, self.values["summary"][key], self.server_s(key)) for name, key in SHOWN.items() if self.values["summary"].get(key)]
        return [(name, *(units.format_seconds(spread[part]) for part in ("p50_s", "p99_s", "mean_s")), str(spread["n"]),
                 units.format_seconds(server) if server else "-") for name, spread, server in found]  # fmt: skip

    def __repr__(self) -> str:
        return "\n".join([self.label, *(f"{row[0]:<24}" + "".join(f"{cell:>12}" for cell in row[1:]) for row in self.rows())])

    def _repr_html_(self) -> str:
        return html_table(("", "p50", "p99", "mean", "n", "server's mean"), self.rows(), caption=self.label)


def kept(file: str, number: int = 0) -> ServedRun:
    """One run of a file in data/runs/. Raises: FileNotFoundError, IndexError."""
    values = json.loads((catalog.data_dir() / "runs" / file).read_text(encoding="utf-8"))["runs"][number]
    return ServedRun(values, f"RECORDED {values['measured_at'][:10]}, not measured now: {values['note']}; {values['arguments']}")


def at_hand(url: str = "", *, otherwise: ServedRun, say: Callable[[str], None] = print, **load) -> ServedRun:  # noqa: ANN003
    """Measures the server at `url`, or at DECODELAB_SERVER; with neither, `otherwise`. `load` goes to `endpoint.check`. Raises: ValueError."""
    address = url.strip() or os.environ.get(SERVER, "").strip()
    if not address:
        return otherwise
    result = endpoint.check(address, say=say, **load)
    say(str(result))
    return ServedRun(result.to_json(), f"MEASURED NOW: {result.model} at {result.host}")
