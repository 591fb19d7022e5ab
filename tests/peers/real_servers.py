"""Real servers on loopback: their start and end, and whether the client agrees with what they count."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from decodelab import cli
from decodelab.arithmetic import catalog
from decodelab.measuring import machine

HERE = Path(__file__).resolve().parent
RUNS = HERE.parents[1] / "data" / "runs"
READY_S = 300


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def serving(script: str, peers: Path, venv: str, *mode: str, log: Path) -> Iterator[str]:
    """The address of a server that is ready; it and all it started are ended afterwards."""
    port = free_port()
    command = ["bash", str(HERE / script), "serve", str(peers / venv), str(peers / "smollm2"), str(port), *mode]
    with log.open("wb") as lines, subprocess.Popen(command, stdout=lines, stderr=subprocess.STDOUT, start_new_session=True) as process:
        try:
            wait_for_model(process, port, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            started = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
            for number in (signal.SIGTERM, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=20)
                psutil.wait_procs([psutil.Process(pid) for pid in started if psutil.pid_exists(pid)], timeout=10)
            assert not [pid for pid in started if psutil.pid_exists(pid)], "a server outlived its test"


def wait_for_model(process: subprocess.Popen, port: int, log: Path) -> None:
    """Until the server lists its model. Raises: RuntimeError with the end of its log."""
    for _ in range(READY_S):
        if process.poll() is not None:
            break
        with suppress(OSError, ValueError):  # not there yet
            if json.loads(fetch(f"http://127.0.0.1:{port}/v1/models"))["data"]:
                return
        time.sleep(1)
    raise RuntimeError("the server is not ready:\n" + log.read_text(errors="replace")[-2000:])


def serve_check(url: str, *arguments: str, server: str, folder: Path) -> dict:
    """Runs `decodelab serve-check` and returns its record, each event's time and its arguments included."""
    record, here = folder / "run.json", machine.describe("cpu")
    note = f"{server}, SmolLM2-135M, on {here.processor}, {here.threads} CPUs"
    assert cli.main(["serve-check", url, *arguments, "--note", note, "--record", str(record)]) == 0
    return {"arguments": " ".join(arguments), **json.loads(record.read_text(encoding="utf-8"))}


def names_are_served(engine: str, page: str) -> None:
    """Every name of this engine in data/server_metrics.csv that says it was tested is on the page."""
    wanted = [row["metric"] for row in catalog.read_table("server_metrics.csv") if row["engine"] == engine and row["tested"] == "yes"]
    lines = [line.split("{")[0].split(" ")[0].removesuffix("_count") for line in page.splitlines()]
    assert wanted and [name for name in wanted if name not in lines] == []


def fetch(url: str) -> str:
    """A page, past any proxy."""
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=5) as reply:
        return reply.read().decode()


def keep(name: str, runs: list[dict]) -> None:
    """Writes the runs to data/runs where DECODELAB_PEERS_RECORD asks for it."""
    if os.environ.get("DECODELAB_PEERS_RECORD"):
        lines = ",\n".join(json.dumps(run) for run in runs)
        (RUNS / name).write_text(f'{{"runs": [\n{lines}\n]}}\n', encoding="utf-8")


def agrees(run: dict) -> None:
    """Mean ITL within 5 %, mean TTFT within 10 % or 10 ms, of sum / count of the server's own histograms, over the same requests."""
    assert run["valid"], run["faults"]
    itl, ttft = run["agreement"]["itl"], run["agreement"]["ttft"]
    print(f"\n{run['note']}, {run['arguments']}: ITL {itl['client_s'] * 1e3:.2f} here, {itl['server_s'] * 1e3:.2f} ms there; "
          f"TTFT {ttft['client_s'] * 1e3:.1f} here, {ttft['server_s'] * 1e3:.1f} ms there")  # fmt: skip
    assert ttft["client_n"] == ttft["server_n"] == len(run["requests"])
    assert itl["client_n"] == itl["server_n"] == sum(request["output_tokens"] - 1 for request in run["requests"])
    assert itl["client_s"] == pytest.approx(itl["server_s"], rel=0.05)
    assert ttft["client_s"] == pytest.approx(ttft["server_s"], rel=0.10, abs=0.010)
