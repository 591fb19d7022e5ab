"""The card: every constant of the formula, measured on this machine and on buffers that are not the model.

`matvec`, `kv_read` and the probe decoders run the same operations as the decoder, eager or compiled, on random data at
shapes of their own, so no timing of a predicted model enters its prediction.
"""

import json
import math
import os
import platform
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import psutil
import torch
import torch.nn.functional as F

from decodelab.arithmetic.catalog import ModelConfig, dtype_bytes, slug
from decodelab.arithmetic.cost import weight_bytes_per_step
from decodelab.arithmetic.records import Card, Machine, fit_line, home
from decodelab.decoder.cache import CHUNK
from decodelab.decoder.generate import decode_step
from decodelab.decoder.kernels import Rows, attend_chunks, chosen_path, compiled, product
from decodelab.decoder.memory import together
from decodelab.decoder.model import Decoder
from decodelab.decoder.sampling import sample
from decodelab.decoder.weights import check_device, check_dtype
from decodelab.decoder.weights import random as random_decoder
from decodelab.measuring.clock import interleaved

CARD_BUDGET_S = 16.0
ROUNDS = 400  # at most; the budget ends a measurement before that
PROBE_ROWS = 8


def budget(seconds: float) -> float:
    """The budget of an experiment: `seconds`, or DECODELAB_BUDGET_S where that is set and shorter. Raises: ValueError unless above 0."""
    asked = os.environ.get("DECODELAB_BUDGET_S") or "inf"
    if not seconds > 0 or not re.fullmatch(r"inf|\d*\.?\d+", asked) or not float(asked) > 0:
        raise ValueError(f"the budget is {seconds} s and DECODELAB_BUDGET_S {asked!r}; both must be seconds above 0")
    return min(seconds, float(asked))


def usable_threads(affinity: int, *, quota_cpus: float | None = None) -> int:
    """Threads worth using: the CPUs this process may run on, or a container's quota if that is less, rounded down.

    >>> usable_threads(96, quota_cpus=7.65), usable_threads(4), usable_threads(96, quota_cpus=0.5)
    (7, 4, 1)
    """
    return max(1, min(affinity, math.floor(quota_cpus) if quota_cpus else affinity))


def container_quota(root: Path = Path("/sys/fs/cgroup")) -> float | None:
    """CPUs a Linux control group grants (version 2, then 1); None where there is no limit."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            quota, period = " ".join((root / file).read_text() for file in files).split()
            return float(quota) / float(period) if quota not in ("max", "-1") else None
        except (OSError, ValueError):
            continue
    return None


def use_threads() -> int:
    """Sets torch to the usable threads (OMP_NUM_THREADS wins where set) and returns their number."""
    process = psutil.Process()
    affinity = len(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else psutil.cpu_count(logical=False) or os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(asked) if asked.isdecimal() and int(asked) else usable_threads(affinity, quota_cpus=container_quota())
    if torch.get_num_threads() != threads:
        torch.set_num_threads(threads)
    return threads


def describe(device: str = "cpu") -> Machine:
    """This machine as every record names it."""
    processor = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _processor_name()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return Machine(processor=processor, threads=use_threads(), torch=torch.__version__, device=torch.device(device).type,
                   system=f"{platform.system()} {platform.machine()}", memory_bytes=psutil.virtual_memory().total,
                   last_level_cache_bytes=last_level_cache_bytes(device), load=load)  # fmt: skip


def _processor_name() -> str:
    if sys.platform.startswith("linux"):
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
    return _sysctl("machdep.cpu.brand_string") or platform.processor() or platform.machine()


def _sysctl(name: str) -> str:
    """A macOS system value, "" elsewhere."""
    if sys.platform != "darwin":
        return ""
    return subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False).stdout.strip()


def last_level_cache_bytes(device: str = "cpu") -> int | None:
    """Size of the last cache before memory; None where the system does not say."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).L2_cache_size
    sizes = [int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]]
             for text in (file.read_text().strip() for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")) if text[-1:] in "KM"]  # fmt: skip
    return max(sizes, default=None) or int(_sysctl("hw.perflevel0.l2cachesize") or _sysctl("hw.l3cachesize") or 0) or None


def has_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 natively, so that loading in bf16 halves the bytes and the time."""
    if sys.platform.startswith("linux"):
        flags = Path("/proc/cpuinfo").read_text(errors="replace")
        return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))
    return _sysctl("hw.optional.arm.FEAT_BF16") == "1"


# --- the card on disk ---------------------------------------------------------------------------------------------


def card(
    dtype: str = "float32", *, device: str = "cpu", path: str = "auto", remeasure: bool = False, say: Callable[[str], None] = lambda _: None
) -> Card:
    """This machine's card of one dtype and one path: read from disk if measured before on the same processor, torch and threads.

    Measuring takes about 30 s with nothing else running. `say` receives one line per constant as it is measured.
    """
    check_dtype(dtype, check_device(device))
    path = chosen_path(path, device=device, say=say)
    file = card_file(describe(device), dtype, path)
    if not remeasure and file.is_file():
        try:
            return Card.from_json(json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError, KeyError):
            say(f"the card in {file.name} cannot be read; measuring it again")
    measured = measure_card(dtype, device=device, path=path, say=say)
    draft = file.with_name(f"{file.stem}.{os.getpid()}.{threading.get_ident()}.new")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(measured.to_json(), indent=1), encoding="utf-8")
        draft.replace(file)
    except OSError as fault:
        say(f"the card is not kept ({fault}); set DECODELAB_HOME to a folder that can be written")
    return measured


def card_file(machine: Machine, dtype: str, path: str) -> Path:
    """One file per processor, torch, threads, device, dtype and path; a card of a shortened budget is another one."""
    short = f" {budget(CARD_BUDGET_S):g}s" if budget(CARD_BUDGET_S) < CARD_BUDGET_S else ""
    return home() / "cards" / (slug(f"{machine.processor} {machine.torch} {machine.threads}t {machine.device} {dtype} {path}{short}") + ".json")


def fresh_card(dtype: str = "float32", *, device: str = "cpu", path: str = "auto", say: Callable[[str], None] = lambda _: None) -> Card:
    """The card, measured again where a rate is more than a third off today: other work then or now, another clock or host."""
    path = chosen_path(path, device=device, say=say)
    kept = card_file(describe(device), dtype, path).is_file()
    known, share = card(dtype, device=device, path=path, say=say), budget(2.0) / 8
    if not kept:
        return known
    now = {
        "read_bytes_per_s": read_bandwidth(device=device, budget_s=share),
        "matvec_bytes_per_s": matvec_bandwidth(dtype, device=device, path=path, budget_s=share),
        "kv_read_grouped_bytes_per_s": kv_bandwidth(dtype, device=device, path=path, queries_per_head=3, budget_s=share),
    }
    for name, rate in now.items():
        if not 2 / 3 < rate / getattr(known, name) < 3 / 2:
            say(f"{name} is {rate / 1e9:.1f} GB/s now and {getattr(known, name) / 1e9:.1f} on the card: measuring the card again")
            return card(dtype, device=device, path=path, remeasure=True, say=say)
    return known


# --- measuring ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def measure_card(dtype: str = "float32", *, device: str = "cpu", path: str = "auto", budget_s: float | None = None,
                 say: Callable[[str], None] = lambda _: None) -> Card:  # fmt: skip
    """Measures every constant on random buffers larger than the last-level cache; medians, roofs the best of their reads."""
    began, machine, path = time.perf_counter(), describe(device), chosen_path(path, device=device, say=say)
    share = budget(CARD_BUDGET_S if budget_s is None else budget_s) / 9
    values: dict[str, float] = {}

    def note(name: str, value: float) -> float:
        values[name] = value
        say(f"{name} {value:.4g}")
        return value

    where = {"device": device, "path": path}
    note("read_bytes_per_s", read_bandwidth(device=device, budget_s=share))
    note("copy_bytes_per_s", copy_bandwidth(device=device, budget_s=share))
    matvec = note("matvec_bytes_per_s", matvec_bandwidth(dtype, **where, budget_s=share))
    rows = note("matvec_rows_bytes_per_s", matvec_bandwidth(dtype, **where, rows=PROBE_ROWS, budget_s=share))
    note("kv_read_bytes_per_s", kv_bandwidth(dtype, **where, queries_per_head=1, budget_s=share))
    note("kv_read_grouped_bytes_per_s", kv_bandwidth(dtype, **where, queries_per_head=3, budget_s=share))
    note("gemm_flops_per_s", gemm_rate(dtype, **where, budget_s=share))
    found = overheads(dtype, **where, matvec_bytes_per_s=matvec, matvec_rows_bytes_per_s=rows, budget_s=2 * share)
    for name, value in zip(("step_overhead_s", "layer_overhead_s", "layer_overhead_rows_s", "per_row_s"), found, strict=True):
        note(name, value)
    return Card(machine=machine, dtype=dtype, path=path, measured_at=datetime.now(UTC).isoformat(timespec="seconds"),
                seconds=time.perf_counter() - began, **values)  # fmt: skip


def _cold_bytes(device: str) -> int:
    """Bytes that cannot stay in the last-level cache: four times its size, at least 128 MB and at most 1 GB."""
    return min(10**9, max(128 * 10**6, 4 * (last_level_cache_bytes(device) or 32 * 2**20)))


def read_bandwidth(*, device: str = "cpu", budget_s: float, size_bytes: int | None = None) -> float:
    """Read roof in bytes per second: a sum over 1 GB (caches help well past four times their size) or `size_bytes`; best run, as in STREAM."""
    buffer = _buffer(size_bytes or 10**9, device)
    seconds = interleaved([buffer.sum], rounds=ROUNDS, budget_s=budget_s, device=device)[0]
    return buffer.numel() * 4 / min(seconds)


def copy_bandwidth(*, device: str = "cpu", budget_s: float) -> float:
    """Copy roof in bytes per second, counted as read + written, the best of its runs."""
    source, target = _buffer(500 * 2**20, device), _buffer(500 * 2**20, device)
    seconds = interleaved([lambda: target.copy_(source)], rounds=ROUNDS, budget_s=budget_s, device=device)[0]
    return copy_traffic(source.numel() * 4) / min(seconds)


def copy_traffic(copied_bytes: int) -> int:
    """Bytes a copy moves: each is read once and written once.

    >>> copy_traffic(2**30) / 1e-3 / 1e9
    2147.483648
    """
    return 2 * copied_bytes


@torch.inference_mode()
def matvec_bandwidth(dtype: str, *, device: str = "cpu", path: str = "eager", rows: int = 1, budget_s: float) -> float:
    """BW_w in bytes per second: one row, or several, through cold matrices in a small decoder's proportions (attention, FFN, output).

    On the fast path the products of a layer are compiled together, as a block's are. Width 704: no catalogue shape has it,
    and a CPU's product slows down as rows get shorter, so it lies between the lab's shapes, 576 and 768.
    """
    width = 704
    shapes = [(width, width)] * 4 + [(4 * width, width)] * 2 + [(width, 4 * width)]
    layers = max(2, math.ceil(_cold_bytes(device) / (16 * width * width * dtype_bytes(dtype))))
    groups = [[_matrix(shape, dtype, device) for shape in shapes] for _ in range(layers)] + [[_matrix((32 * width, width), dtype, device)]]
    block = iter(together([matrix.weight for group in groups for matrix in group], device=device))  # as a model's weights lie
    groups = [[matrix._replace(weight=next(block)) for matrix in group] for group in groups]
    inputs = {size: _random((rows, size), dtype, device) for size in (width, 4 * width)}
    multiply = _compiled(_products, path)

    def stream() -> None:
        for group in groups:
            multiply([inputs[matrix.weight.shape[1]] for matrix in group], group)

    seconds = interleaved([stream], rounds=ROUNDS, budget_s=budget_s, device=device, warmup=2)[0]
    return sum(matrix.weight.nbytes for group in groups for matrix in group) / median(seconds)


def _products(rows: list[torch.Tensor], matrices: list[Rows]) -> list[torch.Tensor]:
    return [product(x, matrix) for x, matrix in zip(rows, matrices, strict=True)]


def _compiled(function: Callable, path: str) -> Callable:
    """The function as the path runs it."""
    return compiled(function) if path == "fast" else function


@torch.inference_mode()
def kv_bandwidth(dtype: str, *, device: str = "cpu", path: str = "eager", queries_per_head: int, budget_s: float) -> float:
    """BW_kv in bytes per second: one new token's attention over cold caches of 4096 tokens, heads of 64.

    One query per KV head (MHA, 12 heads), or three (GQA, 3 KV heads): fewer, shared heads split worse over threads.
    """
    heads, tokens, head_dim = (12 if queries_per_head == 1 else 3), 4096, 64
    shape, query = (1, heads, tokens + CHUNK, head_dim), _random((1, heads, queries_per_head, head_dim), dtype, device)
    layers = math.ceil(_cold_bytes(device) / (2 * heads * tokens * head_dim * query.itemsize))
    caches = [together([_random(shape, dtype, device), _random(shape, dtype, device)], device=device) for _ in range(layers)]
    bias = torch.zeros((1, tokens // CHUNK, CHUNK), device=device)
    chunks = _compiled(attend_chunks, path)

    def attend_all() -> None:
        for keys, values in caches:
            if path == "fast":
                chunks(query, keys, values, bias)
            else:
                F.scaled_dot_product_attention(query, keys[:, :, :tokens], values[:, :, :tokens])

    seconds = interleaved([attend_all], rounds=ROUNDS, budget_s=budget_s, device=device, warmup=2)[0]
    return len(caches) * 2 * heads * tokens * head_dim * query.itemsize / median(seconds)


@torch.inference_mode()
def gemm_rate(dtype: str, *, device: str = "cpu", path: str = "eager", budget_s: float) -> float:
    """Peak in FLOP/s: a product of 512 rows with a 4096 x 1024 matrix (4096 rows on a GPU), random data."""
    rows, out, width = (4096, 8192, 4096) if torch.device(device).type == "cuda" else (512, 4096, 1024)
    x, matrix = _random((rows, width), dtype, device), _matrix((out, width), dtype, device)
    call = (lambda: product(x, matrix)) if path == "fast" or dtype == "int8" else (lambda: F.linear(x, matrix.weight))
    seconds = interleaved([call], rounds=ROUNDS, budget_s=budget_s, device=device)[0]
    return 2 * rows * out * width / median(seconds)


def probe_config(*, hidden: int, n_layers: int, vocab_size: int = 1024, max_context: int = 64) -> ModelConfig:
    """A Llama-shaped decoder that is in no catalogue: heads of 64, FFN 2.75 times the width."""
    heads = max(1, hidden // 64)
    return ModelConfig(name=f"probe-{hidden}x{n_layers}", n_layers=n_layers, hidden=hidden, intermediate=hidden * 11 // 4, n_heads=heads,
                       n_kv_heads=heads, head_dim=hidden // heads, vocab_size=vocab_size, max_context=max_context, attention="MHA")  # fmt: skip


def overheads(dtype: str, *, device: str = "cpu", path: str = "eager", matvec_bytes_per_s: float, matvec_rows_bytes_per_s: float,
              budget_s: float) -> tuple[float, float, float, float]:  # fmt: skip
    """(fixed, per layer, per layer of a step of several rows, per row) seconds of a step beyond streaming its weights at BW_w.

    Probe decoders of two depths give a line in the depth: with one row, and with eight rows in pages, as an engine batches them.
    """
    size = dtype_bytes(dtype)
    layer_bytes = weight_bytes_per_step(probe_config(hidden=512, n_layers=1, vocab_size=1), dtype_bytes=size)
    shallow = min(48, max(4, math.ceil(1.5 * (last_level_cache_bytes(device) or 32 * 2**20) / layer_bytes)))
    configs = [probe_config(hidden=512, n_layers=depth) for depth in (shallow, 3 * shallow)]
    probes = [random_decoder(config, seed=7, device=device, dtype=dtype, path=path, say=lambda _: None) for config in configs]
    steps = [_probe_step(probe, batch=batch) for batch in (1, PROBE_ROWS) for probe in probes]
    taken = [median(seconds) for seconds in interleaved(steps, rounds=ROUNDS, budget_s=budget_s, device=device, warmup=2)]
    read, depths = [weight_bytes_per_step(config, dtype_bytes=size) for config in configs], [config.n_layers for config in configs]
    one = fit_line(depths, [taken[side] - read[side] / matvec_bytes_per_s for side in (0, 1)])
    several = fit_line(depths, [taken[2 + side] - read[side] / matvec_rows_bytes_per_s for side in (0, 1)])
    fixed_s = max(0.0, one.intercept)
    return fixed_s, max(0.0, one.slope), max(0.0, several.slope), max(0.0, (several.intercept - fixed_s) / PROBE_ROWS)


def _probe_step(probe: Decoder, *, batch: int) -> Callable[[], None]:
    """One decode step of a probe with four cached tokens, as `generate` or, with several rows, an engine runs it: pass, sample, token on the host."""
    cache, pool = probe.new_cache(max_len=8), probe.new_pool(pages=2 * batch)
    cache.fill_random(4)
    tokens, tables = torch.arange(batch, device=probe.device), [[2 * row, 2 * row + 1] for row in range(batch)]

    def step() -> None:
        cache.crop(4)
        sample(decode_step(probe, tokens, cache=cache if batch == 1 else pool.rows(tables, [4] * batch))).tolist()

    return step


def _buffer(size_bytes: int, device: str) -> torch.Tensor:
    """A float32 buffer of random numbers, in the kind of memory that models and caches lie in."""
    return together([torch.randn(2**18).expand(max(1, size_bytes // 2**20), -1)], device=device)[0].view(-1)


def _random(shape: tuple[int, ...], dtype: str, device: str) -> torch.Tensor:
    """Random normal activations or KV: constant data draws less power and lets a chip clock higher than real work does."""
    return torch.randn(shape, device=device).to(check_dtype(dtype, device))


def _matrix(shape: tuple[int, int], dtype: str, device: str) -> Rows:
    """A random matrix as a product takes it; int8 with a scale per row."""
    if dtype != "int8":
        return Rows(_random(shape, dtype, device), None, None)
    return Rows(torch.randint(-127, 128, shape, dtype=torch.int8, device=device), None, torch.rand(shape[0], device=device))
