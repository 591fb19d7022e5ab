"""Clocks: the performance counter on a CPU, CUDA events on a GPU. A clock knows no model; it times what it is given."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from math import inf
from statistics import median
from typing import TypeVar

import torch
from torch import nn

from decodelab.arithmetic.records import CLOCK_TICKS, Machine, Run, StepRecord

T = TypeVar("T")


class Timer:
    """Times the region between `start` and `stop`; `seconds` waits for the region's own end, on the GPU too.

    with Timer("cpu") as region: ...
    region.seconds
    """

    def __init__(self, device: str | torch.device = "cpu"):
        self.cuda = torch.device(device).type == "cuda"
        self.began: float | torch.cuda.Event | None = None
        self.ended: float | torch.cuda.Event | None = None

    def start(self) -> "Timer":
        self.began, self.ended = self._now(), None
        return self

    def stop(self) -> "Timer":
        self.ended = self._now()
        return self

    __enter__ = start

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def seconds(self) -> float:
        """Raises: RuntimeError before the region has ended."""
        if self.began is None or self.ended is None:
            raise RuntimeError("this timer has not been stopped: leave its `with` block before reading seconds")
        if not self.cuda:
            return self.ended - self.began
        self.ended.synchronize()  # an event's time cannot be read before the GPU has reached it
        return self.began.elapsed_time(self.ended) / 1e3  # milliseconds

    def _now(self) -> "float | torch.cuda.Event":
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def timed(items: Iterable[T], *, device: str | torch.device = "cpu") -> Iterator[tuple[T, float]]:
    """Wraps an iterator: each item with the seconds it took to produce."""
    iterator = iter(items)
    while True:
        timer = Timer(device).start()
        try:
            item = next(iterator)
        except StopIteration:
            return
        yield item, timer.stop().seconds


def time_call(call: Callable[[], object], *, device: str | torch.device = "cpu", tick_s: float | None = None) -> float:
    """Seconds of one call. A call shorter than 100 clock ticks is repeated until the region is long enough."""
    tick_s = time.get_clock_info("perf_counter").resolution if tick_s is None else tick_s
    repeats = 1
    while True:
        with Timer(device) as region:
            for _ in range(repeats):
                call()
        if region.seconds >= CLOCK_TICKS * tick_s or repeats >= 2**20:
            return region.seconds / repeats
        repeats *= 4


def interleaved(
    calls: Sequence[Callable[[], object]], *, rounds: int, budget_s: float, device: str | torch.device = "cpu", warmup: int = 1
) -> list[list[float]]:
    """Seconds of each call, one list per call: taken in turn, so that drift of the machine falls on all alike.

    `warmup` rounds are run and thrown away; after the first full round the budget may end the measurement early.
    """
    for _ in range(warmup):
        deque((call() for call in calls), maxlen=0)
    seconds: list[list[float]] = [[] for _ in calls]
    began = time.perf_counter()
    for _ in range(max(1, rounds)):
        for taken, call in zip(seconds, calls, strict=True):
            taken.append(time_call(call, device=device))
        if time.perf_counter() - began > budget_s:
            break
    return seconds


def measure(start: Callable[[], Iterator], *, model: str, machine: Machine, dtype: str, path: str, prompt_tokens: int, batch: int = 1,
            warmup_steps: int = 3, budget_s: float = inf) -> Run:  # fmt: skip
    """Times each step of `start()`, an iterator as `generate` returns, after a warm-up on an iterator of its own.

    The warm-up runs the prefill and at least two decode steps at the same shapes, and is thrown away. The first step
    that ends past `budget_s` is the last; the run's note then says so.
    """
    warm, began, steps = max(3, warmup_steps), time.perf_counter(), []
    deque(islice(start(), warm), maxlen=0)
    note = ""
    for step, seconds in timed(start(), device=machine.device):
        steps.append(StepRecord(phase=step.phase, context=step.context, seconds=seconds, token=step.token))
        if time.perf_counter() - began > budget_s and step.finish is None:
            note = f"The budget of {budget_s:g} s ended it after {len(steps)} tokens."
            break
    return Run(
        model=model,
        machine=machine,
        dtype=dtype,
        path=path,
        batch=batch,
        prompt_tokens=prompt_tokens,
        warmup_steps=warm,
        steps=tuple(steps),
        note=note,
    )


@contextmanager
def watch(parts: dict[str, Sequence[nn.Module]], *, device: str | torch.device = "cpu") -> Iterator[dict[str, list[Timer]]]:
    """Hooks that time every call of the given modules while the block runs; removed on exit, also after an error."""
    timers: dict[str, list[Timer]] = {name: [] for name in parts}
    handles = []
    for name, modules in parts.items():
        for module in modules:
            handles.append(module.register_forward_pre_hook(lambda *_, name=name: timers[name].append(Timer(device).start())))
            handles.append(module.register_forward_hook(lambda *_, name=name: timers[name][-1].stop() and None))
    try:
        yield timers
    finally:
        for handle in handles:
            handle.remove()


def split_step(
    step: Callable[[], object], parts: dict[str, Sequence[nn.Module]], *, rounds: int = 10, device: str | torch.device = "cpu"
) -> dict[str, float]:
    """Median seconds of one eager step by part, plus `rest`, the hooked `step`, the `bare` step and the hooks' `overhead`.

    Bare and hooked steps alternate. The hooks split an eager step only: a compiled block has no parts to hook.
    """
    bare, hooked, by_part = [], [], {name: [] for name in parts}
    for round_number in range(rounds + 1):  # the first round warms up
        with Timer(device) as whole:
            step()
        with watch(parts, device=device) as timers, Timer(device) as watched:
            step()
        if round_number:
            bare.append(whole.seconds)
            hooked.append(watched.seconds)
            for name, calls in timers.items():
                by_part[name].append(sum(call.seconds for call in calls))
    split = {name: median(seconds) for name, seconds in by_part.items()}
    return {
        **split,
        "rest": median(hooked) - sum(split.values()),
        "step": median(hooked),
        "bare": median(bare),
        "overhead": median(hooked) - median(bare),
    }
