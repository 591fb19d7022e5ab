"""The fast path on a GPU: the same logits, one graph for each bucket, nothing that waits inside a step.

Every test that can runs on the CPU too, where a graph is a plain call; the others say in one line that they need a GPU.
"""

import gc
import time
import weakref
from contextlib import contextmanager, nullcontext

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gpu
from decodelab.decoder import kernels
from decodelab.decoder.generate import decode_step, generate, prefill
from decodelab.measuring.clock import Timer
from pairs import LLAMA, apart, build, pair
from tiny import ids

NEEDS_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA GPU here")]
CUDA = pytest.param("cuda", marks=NEEDS_GPU)
DEVICES = pytest.mark.parametrize("device", ["cpu", CUDA])
TOLERANCE = {("cpu", "float32"): 1e-5, ("cuda", "float32"): 1e-4, ("cuda", "bfloat16"): 5e-2, ("cuda", "int8"): 5e-2}  # int8 computes in bfloat16
needs_compiler = pytest.mark.skipif(kernels.no_compiler("cpu") is not None, reason=f"nothing compiles here: {kernels.no_compiler('cpu')}")
pytestmark = needs_compiler


def step(model, token, cache):
    return decode_step(model, torch.tensor([token], device=model.device), cache=cache)


@pytest.fixture
def graphs(monkeypatch):
    """A function: the (fast, eager) pair of a device, stepping by graphs over buckets of 64 tokens."""

    def make(device, dtype="float32"):
        fast, eager = pair(LLAMA, dtype, device)
        monkeypatch.setattr(fast.fast, "graphs", True)
        monkeypatch.setattr(fast.fast, "bucket", 64)
        return fast, eager

    return make


def formats():
    """(device, dtype), marked where they need a GPU."""
    return [pytest.param(*case, marks=NEEDS_GPU if case[0] == "cuda" else []) for case in TOLERANCE]


@pytest.mark.parametrize(("device", "dtype"), formats())
def test_logits_across_buckets(graphs, device, dtype):
    """1 ... 150 tokens at batch 1 and 3: fast by graphs against eager, one graph for each bucket of 64 and the cache's end."""
    fast, eager = graphs(device, dtype)
    for batch in (1, 3):
        caches = [model.new_cache(max_len=150, batch=batch) for model in (fast, eager)]
        for model, cache in zip((fast, eager), caches, strict=True):
            prefill(model, [ids(1, seed=row) for row in range(batch)], cache=cache)
        for number in range(149):
            new = torch.tensor([(number * 7 + row) % 64 for row in range(batch)], device=device)
            ours, expected = (decode_step(model, new, cache=cache) for model, cache in zip((fast, eager), caches, strict=True))
            assert apart(ours, expected) < TOLERANCE[device, dtype], (batch, number)
        assert sorted(slots for _, slots in caches[0].graphs) == [64, 128, 160]
        assert all((graph.graph is not None) == (device == "cuda") for graph in caches[0].graphs.values())


@DEVICES
def test_a_graph_stays_right_after_crop_reset_and_copy(graphs, device):
    """It replays on the cache's own memory; a copy records its own."""
    fast, eager = graphs(device)
    cache = fast.new_cache(max_len=60)
    text = ids(10)
    prefill(fast, [text], cache=cache)
    step(fast, 3, cache)
    cache.crop(5)
    twin = cache.copy()
    for held, token in ((cache, 7), (twin, 9), (cache, 8)):
        ours = step(fast, token, held)
        expected = prefill(eager, [text[:5] + ([7, 8] if token == 8 else [token])], cache=eager.new_cache(max_len=8))
        assert apart(ours, expected) < TOLERANCE[device, "float32"]
    cache.reset()
    prefill(fast, [text[:4]], cache=cache)
    assert apart(step(fast, 1, cache), prefill(eager, [[*text[:4], 1]], cache=eager.new_cache(max_len=5))) < TOLERANCE[device, "float32"]
    assert len(cache.graphs) == len(twin.graphs) == 1


@DEVICES
def test_text_by_graphs_is_the_eager_text(graphs, device):
    fast, eager = graphs(device)
    for seed in (1, 2):
        ours, theirs = ([s.token for s in generate(model, ids(50, seed=seed), max_tokens=40)] for model in (fast, eager))
        assert ours == theirs


# --- nothing waits ------------------------------------------------------------------------------------------------


class Waits(TorchDispatchMode):
    """Raises at an operation for which the host would have to wait for the device: reading a value, or a size that depends on values."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique_dim", "_unique2"):
            raise AssertionError(f"{func} waits for the device")
        return func(*args, **(kwargs or {}))


@contextmanager
def watched(device):
    """On a GPU, CUDA's own check; on a CPU, every operation of the step is looked at."""
    if device == "cpu":
        with Waits():
            yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@DEVICES
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("by_graph", [True, False])
def test_nothing_in_a_step_waits_for_the_device(graphs, device, batch, by_graph, monkeypatch):
    """After a warm-up; the only wait of a token is the one that reads it. On the CPU the functions run as they are written."""
    fast, _ = graphs(device)
    monkeypatch.setattr(fast.fast, "graphs", by_graph)
    cache = fast.new_cache(max_len=60, batch=batch)
    prefill(fast, [ids(5)] * batch, cache=cache)
    new = torch.arange(batch, device=device)
    decode_step(fast, new, cache=cache)
    if device == "cpu":
        monkeypatch.setattr(fast.fast, "some", kernels.blocks_step)
        monkeypatch.setattr(fast.fast, "last", kernels.head_step)
        cache.graphs.clear()
    with watched(device):
        logits = [decode_step(fast, new, cache=cache) for _ in range(3)]
    assert all(bool(part.isfinite().all()) for part in logits)
    with pytest.raises((AssertionError, RuntimeError)), watched(device):
        int(logits[0].argmax())  # what the check is made to find


@pytest.mark.parametrize("device", [CUDA])
def test_the_event_clock_agrees_with_the_wall_clock(device):
    """The same work by CUDA's events and by the host's clock with a wait on both sides; without the wait the host sees far less."""
    x = torch.randn(4096, 4096, device=device)
    x @ x
    torch.cuda.synchronize()
    began = time.perf_counter()
    with Timer(device) as region:
        for _ in range(50):
            x @ x
    asked = time.perf_counter() - began
    torch.cuda.synchronize()
    whole = time.perf_counter() - began
    assert asked < region.seconds <= whole * 1.05
    assert whole < region.seconds * 1.5


@pytest.mark.parametrize("device", [CUDA])
def test_a_step_is_one_launch_and_a_few_copies(device):
    """Eager asks for every kernel; a graph is asked for once, beside the column, the inputs and the logits."""
    fast, eager = pair(LLAMA, "bfloat16", device)
    counts = []
    for model in (fast, eager):
        cache = model.new_cache(max_len=600)
        prefill(model, [ids(5)], cache=cache)
        step(model, 1, cache)
        counts.append(gpu.launches(lambda model=model, cache=cache: step(model, 2, cache)))
    assert counts[0] <= 8 < 40 < counts[1], counts


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", [CUDA])
def test_a_cache_with_graphs_is_freed_when_it_is_dropped(device):
    """At once, without the garbage collector: a cache of 32k tokens that waits for it is gigabytes."""
    fast = pair(LLAMA, "float32", device)[0]
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    gc.disable()
    try:
        cache = fast.new_cache(max_len=2000)
        prefill(fast, [ids(5)], cache=cache)
        step(fast, 1, cache)
        dead = weakref.ref(cache)
        assert len(cache.graphs) == 1 and torch.cuda.memory_allocated() > before + cache.allocated_bytes // 2
        del cache
        assert dead() is None
    finally:
        gc.enable()
    assert torch.cuda.memory_allocated() <= before + 2**20


@DEVICES
def test_a_model_is_freed_when_it_and_its_caches_are_dropped(device):
    """Graphs hold the model whose weights they read; with the cache they let it go."""
    model = build(LLAMA, "float32", path="fast", device=device)
    model.fast.graphs = True
    cache = model.new_cache(max_len=40)
    prefill(model, [ids(5)], cache=cache)
    step(model, 1, cache)
    dead = weakref.ref(model)
    del model, cache
    gc.collect()
    assert dead() is None


def test_what_a_recording_does_in_order(monkeypatch):
    """With CUDA's calls written down instead of made: a step on a side stream, a step recorded there, waits around both; then replays."""
    done = []

    class Noted:
        """Stands in for a tensor on a GPU, or for a stream."""

        device = torch.device("cuda", 0)

        def clone(self):
            done.append("clone")
            return self

        def copy_(self, _):
            done.append("copy")

        def wait_stream(self, _):
            done.append("wait")

        def replay(self):
            done.append("replay")

    @contextmanager
    def recording(graph, *, stream):
        done.append("begin")
        yield
        done.append("end")

    for name, fake in (("Stream", lambda device: Noted()), ("current_stream", lambda device: Noted()), ("stream", lambda stream: nullcontext()),
                       ("CUDAGraph", Noted), ("graph", recording)):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, fake)

    def made(ids, slot):
        done.append("step")
        return Noted()

    graph = kernels.Graph(made, Noted(), Noted())
    assert done == ["clone", "clone", "wait", "step", "begin", "step", "end", "wait"]
    done.clear()
    graph(Noted(), Noted())
    assert done == ["copy", "copy", "replay", "clone"]
    assert made not in vars(graph).values()  # it holds the cache, which holds the graph
