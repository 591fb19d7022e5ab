"""`python tests/benchmarks/gpu.py`: what the decoder reaches on an NVIDIA GPU, in one run of under 8 minutes.

    python tests/benchmarks/gpu.py                        a table, and records in data/runs/: gpu.json, no_synchronise.json
    python tests/benchmarks/gpu.py --device cpu --tiny    the same code on small shapes, to see that it runs; --out keeps its records

Random weights of the catalog's shapes: bytes and FLOPs do not depend on values. A step is what `generate` does: pass, greedy
choice, token on the host. MBU is bytes over time over the read bandwidth of the same run, MFU the same for FLOPs and the
rate of a large product. Nothing else should use the GPU.
"""

import argparse
import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch

from decodelab.arithmetic import catalog, cost
from decodelab.arithmetic.catalog import ModelConfig
from decodelab.arithmetic.records import finite, fit_line, summarise
from decodelab.arithmetic.units import format_bandwidth, format_flop_rate, format_seconds, significant
from decodelab.decoder import weights
from decodelab.decoder.cache import KVCache
from decodelab.decoder.generate import decode_step, prefill
from decodelab.decoder.model import Decoder
from decodelab.decoder.sampling import sample
from decodelab.measuring import machine
from decodelab.measuring.clock import Timer, interleaved
from decodelab.measuring.experiments import step_calls

RUNS = Path(__file__).resolve().parents[2] / "data" / "runs"
LAUNCHES = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch")
ROUNDS = 40  # at most; a section's share of the budget ends it before that


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The shapes of a run. `dtype` is what everything but the int8 rows computes in."""

    large: ModelConfig
    small: ModelConfig
    dtype: str
    context: int
    contexts: tuple[int, ...]
    batches: tuple[int, ...]
    batch_context: int
    prompts: tuple[int, ...]


def full_plan() -> Plan:
    """A model whose weights are far larger than any cache, and one so small that asking for a step takes longer than the step."""
    return Plan(large=catalog.model("llama-3.1-8b"), small=catalog.model("smollm2-135m"), dtype="bfloat16", context=512,
                contexts=(128, 2048, 8192, 16_384, 32_768), batches=(1, 2, 4, 8, 16, 32, 64), batch_context=512, prompts=(512, 2048, 8192))  # fmt: skip


def tiny_plan() -> Plan:
    """Shapes that a CPU runs in seconds."""
    shape = ModelConfig(name="tiny", n_layers=2, hidden=32, intermediate=48, n_heads=6, n_kv_heads=2, head_dim=8, vocab_size=64, max_context=512,
                        tied_embeddings=True)  # fmt: skip
    return Plan(large=shape, small=shape, dtype="float32", context=64, contexts=(32, 128, 300), batches=(1, 2, 4), batch_context=32,
                prompts=(32, 64))  # fmt: skip


class Bench:
    """One run: its plan, its device, its clock, and the rows it has made."""

    def __init__(self, plan: Plan, *, device: str, budget_s: float):
        self.plan, self.device, self.budget_s = plan, device, machine.budget(budget_s)
        self.began, self.rows, self.left_out = time.perf_counter(), [], {}
        share = self.budget_s / 60
        self.read = machine.read_bandwidth(device=device, budget_s=share)
        self.copy = machine.copy_bandwidth(device=device, budget_s=share)
        self.gemm = machine.gemm_rate(plan.dtype, device=device, budget_s=share)

    @property
    def left_s(self) -> float:
        return self.budget_s - (time.perf_counter() - self.began)

    @contextmanager
    def model(self, config: ModelConfig, dtype: str, *, path: str = "auto"):
        """A random model, and the GPU's memory back when it is done with."""
        model = weights.random(config, device=self.device, dtype=dtype, path=path, say=say)
        try:
            yield model
        finally:
            del model
            gc.collect()
            if self.device != "cpu":
                torch.cuda.empty_cache()

    def section(self, name: str, measure: Callable[[], None]) -> None:
        """Runs it, unless the time is up or the memory too small; then the document says so."""
        if self.left_s <= 0 and self.rows:
            self.left_out[name] = f"the budget of {self.budget_s:g} s was spent"
            return
        say(f"{name} ({self.left_s:.0f} s left)")
        try:
            measure()
        except (weights.LoadError, torch.OutOfMemoryError) as fault:
            self.left_out[name] = str(fault).splitlines()[0]

    def take(self, section: str, model: Decoder, dtype: str, calls: dict[tuple[int, int, int, str], Callable[[], object]]) -> list[dict]:
        """Times calls, (batch, new tokens, context, path) -> what to call, in turn, and adds a row for each."""
        share = max(1e-3, min(20.0, self.left_s / 8))
        taken = interleaved(list(calls.values()), rounds=ROUNDS, budget_s=share, device=self.device, warmup=2)
        rows = []
        for (batch, new, context, path), seconds in zip(calls, taken, strict=True):
            step, work = summarise(seconds), cost.pass_work(model.config, new_tokens=new, context=context, batch=batch, **model.formats)
            rows.append({"section": section, "model": model.config.name, "dtype": dtype, "path": path, "batch": batch, "new_tokens": new,
                         "context": context, "n": step.n, "median_s": step.median_s, "p95_s": step.p95_s, "tokens_per_s": batch * new / step.median_s,
                         **asdict(work), "mbu": work.bytes / step.median_s / self.read, "mfu": work.flops / step.median_s / self.gemm})  # fmt: skip
        self.rows += rows
        return rows


def say(line: str) -> None:
    """Progress, on stderr."""
    print(line, file=sys.stderr, flush=True)


def path_of(model: Decoder) -> str:
    """How its decode steps run: "graph", "fast" or "eager"."""
    return "graph" if model.fast is not None and model.fast.graphs else model.path


def decode_calls(model: Decoder, cache: KVCache, contexts: Sequence[int]) -> dict:
    """A step at each context, by what it is."""
    return {(cache.batch, 1, context, path_of(model)): call for context, call in zip(contexts, step_calls(model, cache, contexts), strict=True)}


# --- the sections -------------------------------------------------------------------------------------------------


def growth(bench: Bench, model: Decoder, dtype: str) -> dict:
    """t(n) at batch 1 and its line; `kv_read_fraction`: the bytes that the longest context adds, over the time it adds, over the roof."""
    contexts = bench.plan.contexts
    cache = model.new_cache(max_len=contexts[-1])
    rows = bench.take(f"growth, {dtype}", model, dtype, decode_calls(model, cache, contexts))
    line = fit_line(contexts, [row["median_s"] for row in rows])
    longer, added = rows[-1]["median_s"] - rows[0]["median_s"], rows[-1]["bytes"] - rows[0]["bytes"]
    floor = cost.growth(
        model.config, cost.Constants(weight_bytes_per_s=bench.read, kv_bytes_per_s=bench.read, flops_per_s=bench.gemm), **model.formats
    )
    return {"a_s": line.intercept, "b_s_per_token": line.slope, "r2": line.r2, "floor_a_s": floor.a_s, "floor_b_s_per_token": floor.b_s_per_token,
            "kv_read_fraction": added / longer / bench.read if longer > 0 else None}  # fmt: skip


def batches(bench: Bench, model: Decoder, dtype: str) -> None:
    """A step at each batch, the same context in every row."""
    calls = {}
    for batch in bench.plan.batches:
        cache = model.new_cache(max_len=bench.plan.batch_context, batch=batch)
        calls |= decode_calls(model, cache, [bench.plan.batch_context])
    bench.take("batch sweep", model, dtype, calls)


def prefills(bench: Bench, model: Decoder, dtype: str) -> None:
    """One prompt of each length into the same memory. Passes of many tokens run the eager block."""
    cache = model.new_cache(max_len=bench.plan.prompts[-1])

    def read(tokens: int) -> None:
        cache.reset()
        sample(prefill(model, [[i % model.config.vocab_size for i in range(tokens)]], cache=cache)).tolist()

    bench.take("prefill", model, dtype, {(1, tokens, tokens, "eager"): lambda tokens=tokens: read(tokens) for tokens in bench.plan.prompts})


def missing_synchronise(bench: Bench, model: Decoder, dtype: str) -> dict:
    """The seconds that a clock on the host shows for a step that it asks for and does not wait for, beside those of one that it does."""
    context = bench.plan.context
    cache, ids = model.new_cache(max_len=context), torch.zeros(1, dtype=torch.long, device=model.device)
    cache.fill_random(context)
    wait = torch.cuda.synchronize if bench.device != "cpu" else lambda: None
    asked, whole, events = [], [], []
    for number in range(23):
        cache.length = context - 1
        wait()
        began = time.perf_counter()
        with Timer(bench.device) as region:
            decode_step(model, ids, cache=cache)
        seconds = time.perf_counter() - began
        wait()
        if number > 2:  # the first ones record graphs
            asked.append(seconds), whole.append(time.perf_counter() - began), events.append(region.seconds)
    here = machine.describe(bench.device)
    return {"machine": f"{here.processor}, torch {here.torch}", "model": model.config.name, "dtype": dtype, "path": path_of(model), "context": context,
            "asked_s": median(asked), "synchronised_s": median(whole), "events_s": median(events), "n": len(asked),
            "measured_at": datetime.now(UTC).isoformat(timespec="seconds")}  # fmt: skip


def launch_bound(bench: Bench, config: ModelConfig, dtype: str) -> dict | None:
    """A small model's step eager, compiled, and recorded as a graph: the bytes are the same, what asks for them is not."""
    counts = {}
    with bench.model(config, dtype, path="eager") as eager, bench.model(config, dtype) as fast:
        calls = decode_calls(eager, eager.new_cache(max_len=bench.plan.context), [bench.plan.context])
        if fast.fast is not None:
            [step] = step_calls(fast, fast.new_cache(max_len=bench.plan.context), [bench.plan.context])
            for path, graphs in (("fast", False), ("graph", True)):
                calls[1, 1, bench.plan.context, path] = lambda graphs=graphs: (setattr(fast.fast, "graphs", graphs), step())
        bench.take("launch-bound", eager, dtype, calls)
        if bench.device != "cpu":
            counts = {path: launches(call) for (*_, path), call in calls.items()}
    return counts or None


def launches(step: Callable[[], object]) -> int:
    """Kernels and graphs that the host asks the GPU for in one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        torch.cuda.synchronize()
    seen = Counter(event.name for event in profile.events())
    return sum(seen[name] for name in LAUNCHES)


# --- the document -------------------------------------------------------------------------------------------------


def run(plan: Plan, *, device: str, budget_s: float, command: str = "") -> dict:
    """Every section, the longest model first while the time is fresh; the document that gpu.json keeps."""
    began, here = time.perf_counter(), machine.describe(device)
    bench, grown, found = Bench(plan, device=device, budget_s=budget_s), {}, {}

    def large(dtype: str) -> None:
        with bench.model(plan.large, dtype) as model:
            name = "batch 1"
            bench.take(f"{name}, {dtype}", model, dtype, decode_calls(model, model.new_cache(max_len=plan.context), [plan.context]))
            bench.section(f"growth, {dtype}", lambda: grown.update({dtype: growth(bench, model, dtype)}))
            if dtype == plan.dtype:
                bench.section("missing synchronise", lambda: found.update(missing=missing_synchronise(bench, model, dtype)))
                bench.section("prefill", lambda: prefills(bench, model, dtype))
                bench.section("batch sweep", lambda: batches(bench, model, dtype))

    for dtype in (plan.dtype, "int8"):
        bench.section(f"{plan.large.name}, {dtype}", lambda dtype=dtype: large(dtype))
    bench.section("launch-bound", lambda: found.update(launches=launch_bound(bench, plan.small, plan.dtype)))
    return finite({"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": command, "machine": asdict(here), "budget_s": bench.budget_s,
                   "seconds": time.perf_counter() - began, "read_bytes_per_s": bench.read, "copy_bytes_per_s": bench.copy,
                   "gemm_flops_per_s": {plan.dtype: bench.gemm}, "growth": grown, "missing_synchronise": found.get("missing"),
                   "launches": found.get("launches"), "left_out": bench.left_out, "rows": bench.rows})  # fmt: skip


def report(document: dict) -> str:
    """The document as a Markdown table under a line on the machine, with what was left out."""
    here, (dtype, gemm) = document["machine"], next(iter(document["gemm_flops_per_s"].items()))
    lines = [f"{here['processor']}, torch {here['torch']}, {document['date'][:10]}: read {format_bandwidth(document['read_bytes_per_s'])}, "
             f"{dtype} product {format_flop_rate(gemm)}; {document['seconds']:.0f} s.", ""]  # fmt: skip
    head = ("", "model", "dtype", "path", "batch", "tokens", "context", "median", "tokens/s", "MBU", "MFU")
    lines += [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in document["rows"]:
        cells = (row["section"], row["model"], row["dtype"], row["path"], row["batch"], row["new_tokens"], f"{row['context']:,}",
                 format_seconds(row["median_s"]), significant(row["tokens_per_s"], 3), f"{row['mbu']:.2f}", f"{row['mfu']:.2f}")  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    for dtype, line in document["growth"].items():
        lines.append(f"growth, {dtype}: a {format_seconds(line['a_s'])} (floor {format_seconds(line['floor_a_s'])}), b {line['b_s_per_token'] * 1e9:.3g} "
                     f"ns/token (floor {line['floor_b_s_per_token'] * 1e9:.3g})")  # fmt: skip
    if missing := document["missing_synchronise"]:
        lines.append(f"one step, {missing['path']}: asked for in {format_seconds(missing['asked_s'])}, done in {format_seconds(missing['synchronised_s'])}, "
                     f"{format_seconds(missing['events_s'])} by CUDA's events")  # fmt: skip
    lines += [f"launches a step, {path}: {count:,}" for path, count in (document["launches"] or {}).items()]
    return "\n".join(lines + [f"left out: {name}: {why}" for name, why in document["left_out"].items()])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--tiny", action="store_true", help="small shapes")
    parser.add_argument("--budget", type=float, default=400, metavar="SECONDS", help="of measuring; loading and compiling count too (400)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where the records go: data/runs, or nowhere with --tiny")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        say("gpu.py: PyTorch sees no NVIDIA GPU here; run it where there is one, or with --device cpu --tiny to see that it runs.")
        return 2
    if options.device == "cpu" and not options.tiny:
        say("gpu.py: an 8B model takes too long on a CPU; add --tiny.")
        return 2
    command = " ".join(["python tests/benchmarks/gpu.py", *(f"--device {options.device}",) * (options.device == "cpu"), *("--tiny",) * options.tiny])
    plan = tiny_plan() if options.tiny else full_plan()
    document = run(plan, device=options.device, budget_s=options.budget, command=command)
    out = options.out or (None if options.tiny else RUNS)
    for name, record in (("gpu", document), ("no_synchronise", document["missing_synchronise"])):
        if out and record:
            out.mkdir(parents=True, exist_ok=True)
            (out / f"{name}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(report(document))
    return 0


if __name__ == "__main__":
    sys.exit(main())
