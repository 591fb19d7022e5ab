"""`python course.py bench`: this library beside others, as ratios taken in one run, and README's picture.

    python course.py bench --peers llama_cpp=PYTHON vllm=PYTHON     one Python that has the peer, for each
    python course.py bench --quick | --only 8k                      fewer cases (a regular expression on their names)
    python course.py bench --json | --record FILE                   one document on stdout, or in a file
    python course.py bench --readme FILE                            README's table from such a document
    python course.py bench --picture                                data/runs/growth.json and growth.png again

Each library runs in a process of its own (peers/NAME.py) on the same weights, threads and lengths, the output matrix and
the choice of the token included. They take turns, one computing at a time, so that the machine's drift falls on all, and
medians are compared: a ratio is our tokens/s over theirs. Run it with nothing else running.
"""

import argparse
import json
import os
import queue
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import model_files
from decodelab.arithmetic import catalog, cost
from decodelab.arithmetic.records import summarise
from decodelab.arithmetic.units import format_bandwidth, format_seconds, significant
from decodelab.decoder import weights
from decodelab.measuring import experiments, machine

ROOT = Path(__file__).resolve().parents[2]
RUNS = ROOT / "data" / "runs"
PEERS = Path(__file__).resolve().parent / "peers"
TITLES = {"ours": "ours", "llama_cpp": "llama.cpp", "vllm": "vLLM", "transformers": "transformers"}
DTYPES = {"f32": "float32", "bf16": "bfloat16"}
PAUSE_S = 0.2  # between two turns: Intel's OpenMP lets waiting threads spin for that long, GNU's for less
MARKS = ("<!-- bench: written by `python course.py bench --readme FILE` -->", "<!-- bench: end -->")


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


# --- what is measured ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pass to time: a decode step of `batch` sequences with `context` tokens each, or a prefill of `context` tokens."""

    shape: str
    format: str  # f32, bf16, int8
    kind: str = "decode"
    batch: int = 1
    context: int = 128

    @property
    def name(self) -> str:
        """As in the document's keys: f32, f32_8k, batch8_bf16, prefill_f32, gpt2_f32."""
        before = "prefill_" * (self.kind == "prefill") + "gpt2_" * (self.shape == "gpt2") + f"batch{self.batch}_" * (self.batch > 1)
        return before + self.format + f"_{self.context // 1000}k" * (self.context >= 1000)

    @property
    def tokens(self) -> int:
        """Tokens one pass reads."""
        return self.batch * (self.context if self.kind == "prefill" else 1)

    @property
    def title(self) -> str:
        what = f"prefill of {self.context}" if self.kind == "prefill" else f"batch {self.batch}, {self.context:,} tokens"
        return f"{'GPT-2 124M' if self.shape == 'gpt2' else 'SmolLM2-135M'} {self.format}, {what}"


def all_cases(*, quick: bool = False) -> list[Case]:
    """Every case, those of one model and format together and contexts in rising order: a peer loads and fills once."""
    found = []
    for format in ("f32", "bf16", "int8"):
        smollm2 = {"shape": "smollm2-135m", "format": format}
        found.append(Case(**smollm2))
        if not quick and format != "int8":
            found += [Case(**smollm2, batch=batch) for batch in (2, 4, 8, 16, 32)]
            found += [Case(**smollm2, kind="prefill", context=512)]
            found += [Case(**smollm2, context=context) for context in (1000, 4000, 8000)]
    return found + [Case(shape="gpt2", format=format) for format in ("f32", "bf16")]


class Files:
    """The weights of both models in a scratch folder, each form written when it is first asked for."""

    def __init__(self, folder: Path):
        self.folder = folder

    def path(self, case: Case, *, reads: str) -> str:
        """The Hugging Face folder, or the GGUF file in the case's format."""
        place = self.folder / (case.shape if reads == "folder" else f"{case.shape}-{case.format}.gguf")
        if not place.exists():
            say(f"writing {place.name}")
            config, draft = catalog.model(case.shape), place.with_name(f"{place.name}.new")
            options = {"dtype": "float32", "path": "eager"}
            model = weights.random(config, **options) if case.shape == "gpt2" else weights.load(case.shape, **options)
            model_files.write_folder(model, draft) if reads == "folder" else model_files.write_gguf(model, draft, format=case.format)
            draft.replace(place)
        return str(place)


# --- one process per library --------------------------------------------------------------------------------------


class PeerError(Exception):
    """What a peer could not do, in one line."""


class Worker:
    """A peer in its own process, asked in JSON lines. Once it dies, prints junk or is silent too long, it stays `failed`."""

    def __init__(self, name: str, command: Sequence[str | Path], *, threads: int):
        self.name, self.failed, self.about = name, "", {}
        self.log, self.lines = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace"), queue.Queue()
        setting = {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
        try:
            self.process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log,
                                            encoding="utf-8", env={**os.environ, **setting})  # fmt: skip
        except OSError as error:
            self.process, self.failed = None, one_line(f"does not start: {error}")
            return
        threading.Thread(target=self._listen, daemon=True).start()
        try:
            self.about = self.ask("hello", limit_s=120)
        except PeerError as error:
            self.failed = self.failed or str(error)

    def _listen(self) -> None:
        for line in self.process.stdout:
            self.lines.put(line)
        self.lines.put("")

    def ask(self, command: str, *, limit_s: float = 400, **details: object) -> dict:
        """Its answer. Raises: PeerError where it says no, and where it gives none: then it has `failed`."""
        if self.failed:
            raise PeerError(self.failed)
        try:
            self.process.stdin.write(json.dumps({"command": command, **details}) + "\n")
            self.process.stdin.flush()
            line = self.lines.get(timeout=limit_s)
            answer = dict(json.loads(line).items())
        except queue.Empty:
            self._fail(f"no answer to {command} within {limit_s:g} s")
        except (OSError, ValueError, AttributeError):
            self._fail(f"ended at {command}" if self.lines.empty() and not line else f"printed {line.strip()[:80]!r} instead of an answer")
        if not answer.get("ok"):
            raise PeerError(one_line(answer.get("note") or f"refused {command}"))
        return answer

    def _fail(self, reason: str) -> None:
        self.close()
        self.log.seek(0)
        last = [line for line in self.log.read().splitlines() if line.strip()][-1:]
        self.failed = one_line(": ".join([reason, *last]))
        raise PeerError(self.failed)

    def close(self) -> None:
        """Ends the process."""
        if self.process:
            self.process.kill()
            self.process.wait()

    def summary(self) -> dict:
        """What the document says about this peer."""
        return {"failed": self.failed} if self.failed else {key: self.about[key] for key in ("version", "settings")}


def one_line(text: str) -> str:
    """At most 300 characters, folders of this machine left out."""
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+", "", " ".join(text.split()))[:300]


# --- measuring ----------------------------------------------------------------------------------------------------


def measure(case: Case, workers: Sequence[Worker], files: Files, *, rounds: int, seconds: float) -> list[dict]:
    """A row for each worker and variant that can do the case: turns of `seconds` each, one worker at a time, `rounds` times."""
    rows, turns = [], []
    for worker in (worker for worker in workers if not worker.failed and case.format in worker.about["formats"]):
        row = {"case": case.name, "worker": worker.name, "variant": "", **asdict(case), "note": ""}
        asked = asdict(case) | {"vocab": catalog.model(case.shape).vocab_size, "weights": files.path(case, reads=worker.about["reads"])}
        try:
            ready = worker.ask("prepare", case=asked)
        except PeerError as error:
            rows.append(row | {"note": str(error)})
            continue
        for name, first in ready["first_call_s"].items():
            rows.append(
                row | {"variant": name, "first_call_s": first, "tokens": ready["tokens"][name], "path": ready.get("path", "")} | work(case, ready)
            )
            turns.append((worker, rows[-1], []))
    for _ in range(rounds):
        for worker, row, times in (turn for turn in turns if not turn[1]["note"]):
            time.sleep(PAUSE_S)
            try:
                times += worker.ask("step", variant=row["variant"], seconds=seconds, warmup=int(case.kind == "decode"))["seconds"]
            except PeerError as error:  # it is not asked again
                row["note"] = str(error)
    for _, row, times in (turn for turn in turns if not turn[1]["note"]):
        taken = summarise(times)
        row |= {"n": taken.n, "median_s": taken.median_s, "p95_s": taken.p95_s, "tokens_per_s": case.tokens / taken.median_s}
    return compare_tokens(rows) if case.kind == "prefill" else rows


def work(case: Case, ready: dict) -> dict:
    """Bytes and FLOPs of one step, in the peer's own formats of weights and KV."""
    formats = {"weight_bytes_per_value": ready["weight_bytes"], "kv_bytes_per_value": ready["kv_bytes"]}
    moved = cost.pass_work(catalog.model(case.shape), new_tokens=case.tokens // case.batch, context=case.context, batch=case.batch, **formats)
    return {**formats, **asdict(moved)}


def compare_tokens(rows: list[dict]) -> list[dict]:
    """Notes where a peer reads the same prompt and chooses another token: other weights, or a near tie."""
    ours = next((row["tokens"] for row in rows if row["worker"] == "ours" and "tokens" in row), None)
    for row in rows:
        if ours is not None and row.get("tokens", ours) != ours:
            row["note"] = f"{row['note']} its greedy token differs from ours".strip()
    return rows


# --- arithmetic ---------------------------------------------------------------------------------------------------


def best(rows: Sequence[dict], case: str, worker: str) -> dict | None:
    """The fastest variant of a worker in a case, None where it was not measured."""
    found = [row for row in rows if row["case"] == case and row["worker"] == worker and "median_s" in row]
    return min(found, key=lambda row: row["median_s"], default=None)


def figures(rows: Sequence[dict], *, read_bytes_per_s: float, gemm_flops_per_s: dict[str, float]) -> dict[str, dict[str, float]]:
    """Our tokens/s over theirs, and what we reach of the machine, by case; only what was measured. Adds `mbu` or `mfu` to the rows."""
    names = list(dict.fromkeys(row["case"] for row in rows))
    found: dict[str, dict[str, float]] = {"ratios": {}, "mbu": {}, "mfu": {}, "batch8_over_floor": {}, "kv_read_fraction": {}}
    for row in (row for row in rows if "median_s" in row):
        if row["kind"] == "decode":
            row["mbu"] = row["bytes"] / row["median_s"] / read_bytes_per_s
        elif row["format"] in gemm_flops_per_s:
            row["mfu"] = row["flops"] / row["median_s"] / gemm_flops_per_s[row["format"]]
    for name in names:
        if not (ours := best(rows, name, "ours")):
            continue
        found["mbu"] |= {name: ours["mbu"]} if "mbu" in ours else {}
        found["mfu"] |= {name: ours["mfu"]} if "mfu" in ours else {}
        for peer in dict.fromkeys(row["worker"] for row in rows if row["worker"] != "ours"):
            if theirs := best(rows, name, peer):
                found["ratios"][f"{name}_vs_{peer}" + "_q8_0" * (peer == "llama_cpp" and name == "int8")] = theirs["median_s"] / ours["median_s"]
    for format, rate in gemm_flops_per_s.items():
        if step := best(rows, f"batch8_{format}", "ours"):
            moved = cost.weight_bytes_per_step(catalog.model(step["shape"]), dtype_bytes=step["weight_bytes_per_value"], batch=8)
            found["batch8_over_floor"][format] = step["median_s"] / max(moved / read_bytes_per_s, step["flops"] / rate)
        short, long = best(rows, format, "ours"), best(rows, f"{format}_8k", "ours")
        if short and long and (longer := long["median_s"] - short["median_s"]) > 0:
            found["kv_read_fraction"][format] = (long["bytes"] - short["bytes"]) / longer / read_bytes_per_s
    return found


# --- the document -------------------------------------------------------------------------------------------------


@contextmanager
def started(peers: dict[str, str], *, threads: int):
    """The workers, ours first; all are ended on the way out."""
    workers = []
    try:
        for name, python in peers.items():
            workers.append(Worker(name, [python, PEERS / f"{name}.py"], threads=threads))
            say(f"{name}: {workers[-1].failed or workers[-1].about['version']}")
        yield workers
    finally:
        for worker in workers:
            worker.close()


def bench(cases: Sequence[Case], peers: dict[str, str], *, scratch: Path, rounds: int, seconds: float, command: str = "") -> dict:
    """Measures all cases; the document of `--json`. `command` made it."""
    threads, here = machine.use_threads(), asdict(machine.describe())
    formats = [format for format in DTYPES if any(case.format == format for case in cases)]
    rows, reads, products = [], [], {format: [] for format in formats}

    def roofs() -> None:
        time.sleep(PAUSE_S)
        reads.append(machine.read_bandwidth(budget_s=1.5))
        for format, rates in products.items():
            rates.append(machine.gemm_rate(DTYPES[format], path="fast", budget_s=1))

    roofs()
    with started({"ours": sys.executable, **peers}, threads=threads) as workers:
        for number, case in enumerate(cases, 1):
            say(f"{number}/{len(cases)} {case.title}")
            rows += measure(case, workers, Files(scratch), rounds=rounds, seconds=seconds)
            if number in (len(cases) // 2, len(cases)):
                roofs()
        about = {worker.name: worker.summary() for worker in workers}
    gemm = {format: max(rates) for format, rates in products.items()}
    absent = {name: {"absent": f"give --peers {name}=PYTHON"} for name in TITLES if name not in about}
    return {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": command, "machine": here, "threads": threads,
            "read_bytes_per_s": reads, "gemm_flops_per_s": gemm, "peers": about | absent,
            **figures(rows, read_bytes_per_s=max(reads), gemm_flops_per_s=gemm), "rows": rows}  # fmt: skip


def table(document: dict) -> str:
    """The document as a Markdown table: a line for each case, a column for each peer that was measured."""
    peers = [name for name in TITLES if name != "ours" and any(row["worker"] == name and "median_s" in row for row in document["rows"])]
    head = ["", "ours", "tokens/s", "of the roof", *(f"× {TITLES[name]}" for name in peers)]
    lines = [head, ["---"] * len(head)]
    for name in dict.fromkeys(row["case"] for row in document["rows"]):
        if ours := best(document["rows"], name, "ours"):
            case = Case(**{key: ours[key] for key in Case.__dataclass_fields__})
            theirs = [document["ratios"].get(f"{name}_vs_{peer}", document["ratios"].get(f"{name}_vs_{peer}_q8_0")) for peer in peers]
            lines.append([case.title, format_seconds(ours["median_s"]), significant(ours["tokens_per_s"], 3),
                          f"{ours.get('mbu', ours.get('mfu', float('nan'))):.2f}", *("" if ratio is None else f"{ratio:.2f}" for ratio in theirs)])  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def report(document: dict) -> str:
    """Date, machine and what was compared, in a few lines, then the table."""
    known = [f"{TITLES.get(name, name)} {about['version']}" if "version" in about else f"{TITLES.get(name, name)} {'failed' if 'failed' in about else 'absent'}"
             for name, about in document["peers"].items() if name != "ours"]  # fmt: skip
    here = document["machine"]
    return (
        f"Measured {document['date'][:10]} on {here['processor']}, {document['threads']} threads, {format_bandwidth(min(document['read_bytes_per_s']))} to {format_bandwidth(max(document['read_bytes_per_s']))} read "
        f"bandwidth, PyTorch {here['torch']}, with `{document['command']}`. Beside it: {', '.join(known)}.\n\n{table(document)}\n\n"
        "A ratio above 1 says that we are faster: our tokens/s over theirs, medians of turns taken one after the other. The roof is the read bandwidth "
        "of the same run, in prefill its matrix product. llama.cpp: the better of flash attention on and off, KV in f16; its 8 bits are Q8_0. "
        "vLLM: its engine in process, bf16."
    )


def write_readme(document: dict, readme: Path = ROOT / "README.md") -> None:
    """Puts the report between README's two marks. Raises: SystemExit where they are not there."""
    before, *rest = re.split(f"{re.escape(MARKS[0])}.*?{re.escape(MARKS[1])}", (text := readme.read_text(encoding="utf-8")), flags=re.S)
    if len(rest) != 1:
        raise SystemExit(f"{readme.name} needs the lines {MARKS[0]} and {MARKS[1]} once; it has {text.count(MARKS[0])} and {text.count(MARKS[1])}")
    readme.write_text(f"{before}{MARKS[0]}\n{report(document)}\n{MARKS[1]}{rest[0]}", encoding="utf-8", newline="\n")


def picture() -> dict:
    """Measures t(n) of the GPT-2 shape and rewrites the record and the picture that README shows."""
    from decodelab.teaching import plots

    card = machine.card("float32", path="eager", remeasure=True, say=say)
    result = experiments.growth(catalog.model("gpt2"), card, contexts=(128, 1024, 2048, 4096, 6144, 8192), rounds=20, budget_s=40)
    RUNS.mkdir(parents=True, exist_ok=True)
    (RUNS / "growth.json").write_text(json.dumps(result.to_json(), indent=1) + "\n", encoding="utf-8")
    fig, ax = plots.axes()
    plots.growth(result, ax=ax, title="Each token costs more than the last: GPT-2 124M, float32, batch 1")
    fig.savefig(RUNS / "growth.png", dpi=110, metadata={"Software": None})
    return {"a_error": result.a_s.error, "b_error": result.b_s_per_token.error, "r2": result.r2}


def peer_pythons(given: Sequence[str]) -> dict[str, str]:
    """NAME=PYTHON pairs by name; transformers is in this Python unless another is named. Raises: SystemExit."""
    found = {"transformers": sys.executable} if find_spec("transformers") else {}
    for pair in given:
        name, _, python = pair.partition("=")
        name = name.replace(".", "_").replace("-", "_")
        if not python or not (PEERS / f"{name}.py").is_file() or name in ("ours", "worker"):
            raise SystemExit(f"--peers {pair}: write NAME=PYTHON, where NAME is one of {', '.join(list(TITLES)[1:])}")
        found[name] = python
    return found


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--peers", nargs="*", default=[], metavar="NAME=PYTHON", help="llama_cpp, vllm, transformers and a Python that has each")
    arguments.add_argument("--json", action="store_true", help="one JSON document on stdout")
    arguments.add_argument("--record", type=Path, metavar="FILE", help="write the document")
    arguments.add_argument("--readme", type=Path, metavar="FILE", help="rewrite README's table from a document; measures nothing")
    arguments.add_argument("--quick", action="store_true", help="batch 1, short context only")
    arguments.add_argument("--only", default="", metavar="PATTERN", help="cases whose name matches: ^f32$, 8k, batch, prefill, gpt2")
    arguments.add_argument("--rounds", type=int, default=5, help="turns per library and case (5)")
    arguments.add_argument("--seconds", type=float, default=0.3, help="seconds per turn (0.3)")
    arguments.add_argument("--scratch", type=Path, metavar="DIR", help="keep the written weights (3 GB) here and use them again")
    arguments.add_argument("--picture", action="store_true", help="rewrite README's picture and its record instead")
    options = arguments.parse_args()
    if options.picture:
        return print(json.dumps(picture(), indent=1))
    if options.readme:
        return write_readme(json.loads(options.readme.read_text(encoding="utf-8")))
    cases = [case for case in all_cases(quick=options.quick) if re.search(options.only, case.name)]
    cases = [case for case in cases if case.format != "bf16" or machine.has_bfloat16()]
    with tempfile.TemporaryDirectory() as folder:
        scratch = options.scratch or Path(folder)
        scratch.mkdir(parents=True, exist_ok=True)
        command = re.sub(r"(\w)=\S+", r"\1=PYTHON", f"python course.py bench {shlex.join(sys.argv[1:])}")
        document = bench(
            cases, peer_pythons(options.peers), scratch=scratch, rounds=options.rounds, seconds=options.seconds, command=one_line(command)
        )
    if options.record:
        options.record.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document, indent=1) if options.json else report(document))


if __name__ == "__main__":
    main()
