"""The sweeps the labs run. Each takes `budget_s`, says how far it got, and puts the prediction beside the measurement."""

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import numpy as np
import torch
from torch import Tensor, nn

from decodelab.arithmetic import cost, planning, units
from decodelab.arithmetic.catalog import ModelConfig, Workload
from decodelab.arithmetic.records import Card, Run, Summary, fit_line, html_table, summarise, utilisation
from decodelab.decoder.cache import CHUNK, KVCache
from decodelab.decoder.generate import decode_step, generate, prefill
from decodelab.decoder.kernels import attention_step, compiled, mlp_step
from decodelab.decoder.model import Decoder, Pass, attend, rotate
from decodelab.decoder.sampling import sample
from decodelab.decoder.weights import random as random_decoder
from decodelab.measuring import machine
from decodelab.measuring.clock import interleaved, measure, split_step

MIN_STEPS = 15


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One constant three ways: the floor (read roof, no overhead), the card's prediction, the measurement."""

    floor: float
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """predicted / measured - 1, a fraction."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True, kw_only=True)
class GrowthResult:
    """t(n) measured at several contexts, its fitted line a + b*n beside the floor's and the prediction's."""

    model: str
    card: Card
    batch: int
    contexts: tuple[int, ...]
    steps: tuple[Summary, ...]  # one per context
    a_s: Compared
    b_s_per_token: Compared
    r2: float
    crossover_tokens: float

    def to_json(self) -> dict:
        return asdict(self)


def growth_contexts(contexts: Sequence[int], *, batch: int) -> tuple[int, ...]:
    """The contexts in order. Raises: ValueError for fewer than two different ones, one below 2, or a batch below 1."""
    if len(set(contexts)) < 2 or min(contexts) < 2 or batch < 1:
        raise ValueError(
            f"growth needs at least two different contexts of 2 or more tokens and a batch of 1 or more; got {list(contexts)}, batch {batch}"
        )
    return tuple(sorted(set(contexts)))


def require_card(model: Decoder, card: Card) -> None:
    """Raises ValueError where the card was measured on another path or device, or in other formats than the model's."""
    if (model.path, model.device.type, model.formats) != (card.path, card.machine.device, card.formats):
        raise ValueError(f"the card is of the {card.path} path in {card.dtype}, the model runs {model.path} with {model.formats}; "
                         f"take machine.card(..., path={model.path!r}) in the model's dtype")  # fmt: skip


def _quiet(_: str) -> None:
    """Where a line of progress would only disturb."""


def warm_weights(model: Decoder) -> None:
    """Touches every weight once, so that the first timed step does not pay for pages the system has not mapped yet."""
    for parameter in model.parameters():
        parameter.sum()


def step_calls(model: Decoder, cache: KVCache, contexts: Sequence[int]) -> list[Callable[[], None]]:
    """One decode step at each context, as `generate` runs it: pass, greedy sample, token on the host.

    `cache` is filled to its end once with random K and V; a step only moves `length`, so contexts can be taken in turn.
    """
    cache.fill_random(cache.max_len)
    tokens = torch.arange(cache.batch, device=model.device) % model.config.vocab_size

    def step(context: int) -> None:
        cache.length = context - 1  # the slots are all filled; the step writes the last of its `context` tokens
        sample(decode_step(model, tokens, cache=cache)).tolist()

    return [lambda context=context: step(context) for context in contexts]


def growth(config: ModelConfig, card: Card, *, contexts: Sequence[int] = (128, 1024, 4096, 8192), batch: int = 1, rounds: int = MIN_STEPS,
           budget_s: float = 20.0, model: Decoder | None = None) -> GrowthResult:  # fmt: skip
    """Measures t(n) at `contexts`, interleaved, and fits a line through the medians.

    Random weights unless `model` is given; positions are extended to the longest context. At least one full round is
    run whatever the budget, and `steps[].n` says how many were.
    Raises: ValueError with fewer than two contexts or one below 2.
    """
    contexts = growth_contexts(contexts, batch=batch)
    if model is not None:
        require_card(model, card)
        config = model.config
    else:
        config = replace(config, max_context=max(config.max_context, contexts[-1]))
        model = random_decoder(config, device=card.machine.device, dtype=card.dtype, path=card.path, say=_quiet)
    warm_weights(model)
    cache = model.new_cache(max_len=contexts[-1], batch=batch)
    taken = interleaved(step_calls(model, cache, contexts), rounds=rounds, budget_s=machine.budget(budget_s), device=card.machine.device, warmup=2)
    steps = tuple(summarise(seconds) for seconds in taken)
    line = fit_line(contexts, [step.median_s for step in steps])
    formats = {"batch": batch, **model.formats}
    floor, predicted = cost.growth(config, card.floor(), **formats), cost.growth(config, card.constants(config), **formats)
    return GrowthResult(model=config.name, card=card, batch=batch, contexts=contexts, steps=steps, r2=line.r2,
                        a_s=Compared(floor=floor.a_s, predicted=predicted.a_s, measured=line.intercept),
                        b_s_per_token=Compared(floor=floor.b_s_per_token, predicted=predicted.b_s_per_token, measured=line.slope),
                        crossover_tokens=cost.crossover_tokens(config, **formats))  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SaturationPoint:
    """One kind of decode step: what it must move and compute, how long it took, and the two rates that follow."""

    model: str
    batch: int
    bytes_per_step: int
    flops_per_step: int
    step_s: float
    n: int
    read_bytes_per_s: float
    flops_per_s: float
    predicted_s: float  # from the card


@dataclass(frozen=True, kw_only=True)
class SaturationResult:
    """Read bandwidth reached against bytes per step (batch 1) and against batch, beside the roof re-read at the end."""

    card: Card
    points: tuple[SaturationPoint, ...]
    roof_bytes_per_s: float
    ridge_batch: float

    def to_json(self) -> dict:
        return asdict(self)


def saturation(card: Card, *, widths: Sequence[int] = (128, 256, 512, 768, 1024), batches: Sequence[int] = (1, 2, 4, 8, 16, 32), context: int = 32,
               budget_s: float = 20.0) -> SaturationResult:  # fmt: skip
    """Decode steps of probe decoders from a few MB (cache and overhead) to several hundred (memory), then of the largest by batch.

    The bytes of a step are its weights plus the cached K and V of every row. Shapes come from `machine.probe_config`.
    """
    budget_s, device = machine.budget(budget_s), card.machine.device
    probes = [machine.probe_config(hidden=width, n_layers=max(4, width // 64), vocab_size=8 * width) for width in widths]
    points: list[SaturationPoint] = []
    for config in probes[:-1]:
        points += _saturation_points(config, card, batches=(1,), context=context, budget_s=budget_s / (2 * len(probes)))
    points += _saturation_points(probes[-1], card, batches=tuple(batches), context=context, budget_s=budget_s / 2)
    roof = max(card.read_bytes_per_s, machine.read_bandwidth(device=device, budget_s=budget_s / 10))
    ridge = planning.ridge_batch(probes[-1], card.floor(), weight_bytes_per_value=card.formats["weight_bytes_per_value"])
    return SaturationResult(card=card, points=tuple(points), roof_bytes_per_s=roof, ridge_batch=ridge)


def _saturation_points(config: ModelConfig, card: Card, *, batches: Sequence[int], context: int, budget_s: float,
                       model: Decoder | None = None) -> list[SaturationPoint]:  # fmt: skip
    model = model or random_decoder(config, device=card.machine.device, dtype=card.dtype, path=card.path, say=_quiet)
    calls = [step_calls(model, model.new_cache(max_len=context, batch=batch), [context])[0] for batch in batches]
    taken = interleaved(calls, rounds=40, budget_s=budget_s, device=card.machine.device, warmup=2)
    points = []
    for batch, seconds in zip(batches, taken, strict=True):
        step_s = median(seconds)
        moved = cost.pass_work(config, new_tokens=1, context=context, batch=batch, **model.formats).bytes
        flops = cost.weight_flops(config, tokens=batch, logit_rows=batch)
        predicted_s = cost.step_time(config, card.constants(config), context=context, batch=batch, **model.formats)
        points.append(SaturationPoint(model=config.name, batch=batch, bytes_per_step=moved, flops_per_step=flops, step_s=step_s, n=len(seconds),
                                      read_bytes_per_s=moved / step_s, flops_per_s=flops / step_s, predicted_s=predicted_s))  # fmt: skip
    return points


def request(model: Decoder, prompt: Sequence[int], *, new_tokens: int, card: Card, budget_s: float = 60.0) -> Run:
    """One greedy request of exactly `new_tokens`, end tokens ignored, every token timed after a warm-up.

    `budget_s` cuts it short on a slow or busy machine, and the run's note says after how many tokens.
    """
    require_card(model, card)
    return measure(lambda: generate(model, prompt, max_tokens=new_tokens), model=model.config.name, machine=card.machine, dtype=card.dtype,
                   path=card.path, prompt_tokens=len(prompt), budget_s=machine.budget(budget_s))  # fmt: skip


def where_the_time_goes(model: Decoder, *, context: int = 64, rounds: int = 10) -> dict[str, float]:
    """Seconds of one decode step in attention, MLP and head, the rest, and the step; what measuring adds is `overhead`.

    An eager step is split by hooks. A compiled one has nothing to hook: its parts are compiled alone and run at equal
    shapes, less the time of as many empty calls.
    """
    cache = model.new_cache(max_len=context)
    step = step_calls(model, cache, [context])[0]
    if model.fast is not None:
        return _split_fast(model, cache, step, rounds)
    parts = {"attention": [b.attention for b in model.blocks], "mlp": [b.mlp for b in model.blocks], "head": [model.head]}
    return split_step(step, parts, rounds=rounds, device=model.device)


@torch.inference_mode()
def _split_fast(model: Decoder, cache: KVCache, step: Callable[[], None], rounds: int) -> dict[str, float]:
    fast, ids, slot = model.fast, torch.zeros(1, dtype=torch.long, device=model.device), torch.full((1,), cache.max_len - 1, device=model.device)
    x, shared = fast.inputs(ids, slot, cache, slot, fast.ticks[: cache.open(CHUNK)])
    attention, mlp, empty_call = map(compiled, (attention_step, mlp_step, torch.neg))
    layers, eps = list(zip(fast.blocks, cache.keys, cache.values, strict=True)), fast.eps
    calls = {
        "attention": lambda: [attention(x, w[0], keys, values, shared, eps) for w, keys, values in layers],
        "mlp": lambda: [mlp(x, w[1], eps) for w, _, _ in layers],
        "head": lambda: fast.last(x, fast.norm, fast.head, eps),
        "empty": lambda: [empty_call(x) for _ in layers],
        "step": step,
    }
    taken = interleaved(list(calls.values()), rounds=rounds, budget_s=machine.budget(20.0), device=model.device, warmup=2)
    split = dict(zip(calls, map(median, taken), strict=True))
    empty, bare = split.pop("empty"), split["step"]
    split |= {"attention": split["attention"] - empty, "mlp": split["mlp"] - empty}
    return {**split, "rest": 2 * bare - sum(split.values()), "bare": bare, "overhead": 2 * empty}


@dataclass(frozen=True, kw_only=True)
class TimedPass:
    """One pass of `new_tokens` tokens that ends at `context`: counted, predicted from the card, timed."""

    new_tokens: int
    context: int
    work: cost.PassWork
    predicted_s: float
    taken: Summary

    @property
    def flops_per_s(self) -> float:
        return self.work.flops / self.taken.median_s


@dataclass(frozen=True, kw_only=True)
class PassesResult:
    """Passes of one model, each against both roofs: the card's GEMM rate, and the read roof re-measured beside them."""

    model: str
    card: Card
    passes: tuple[TimedPass, ...]
    roof_bytes_per_s: float
    note: str = ""

    def rows(self) -> list[tuple[str, ...]]:
        """One row per pass: what it is, FLOPs, bytes, their ratio, predicted and measured time, MFU, MBU."""
        return [(f"{p.new_tokens:,} of {p.context:,}", units.format_flops(p.work.flops), units.format_bytes(p.work.bytes, 3),
                 units.significant(p.work.intensity, 3), units.format_seconds(p.predicted_s), units.format_seconds(p.taken.median_s),
                 utilisation(p.work.flops, p.taken.median_s, self.card.gemm_flops_per_s, what="FLOPs")[1],
                 utilisation(p.work.bytes, p.taken.median_s, self.roof_bytes_per_s)[1]) for p in self.passes]  # fmt: skip

    def _repr_html_(self) -> str:
        head = ("new tokens of context", "FLOPs", "bytes read", "FLOP/B", "predicted", "measured, median", "MFU", "MBU")
        caption = f"{self.model}, {self.card.title()}. {self.note} MFU: {cost.ATTENTION_CONVENTION}."
        return html_table(head, self.rows(), caption=caption)

    def __str__(self) -> str:
        return "\n".join([" | ".join(row) for row in self.rows()] + [f"MFU: {cost.ATTENTION_CONVENTION}.", self.note]).strip()

    __repr__ = __str__


def passes(model: Decoder, card: Card, *, shapes: Sequence[tuple[int, int]], rounds: int = 9, warmup: int = 1,
           budget_s: float = 15.0) -> PassesResult:  # fmt: skip
    """Times passes of `shapes`, pairs (new tokens, context they end at): (128, 128) is a prefill, (1, 129) a decode step.

    What stands before the new tokens is random K and V. Of the shapes, in order, those are run whose predicted time
    fits the budget, the first four in any case; the note names the rest.
    """
    require_card(model, card)
    seconds, config = machine.budget(budget_s), model.config
    predicted = [_pass_seconds(config, card, new, context) for new, context in shapes]
    fit = max(4, sum(sum(predicted[: i + 1]) * (warmup + 1) <= seconds for i in range(len(shapes))))
    cache = model.new_cache(max_len=max(context for _, context in shapes))
    warm_weights(model)
    cache.fill_random(cache.max_len)
    calls = [lambda new=new, context=context: _pass(model, cache, new, context) for new, context in shapes[:fit]]
    taken = interleaved(calls, rounds=rounds, budget_s=seconds, device=model.device, warmup=warmup)
    done = [TimedPass(new_tokens=new, context=context, predicted_s=predicted_s, taken=summarise(times),
                      work=cost.pass_work(config, new_tokens=new, context=context, **model.formats))
            for (new, context), predicted_s, times in zip(shapes, predicted, taken, strict=False)]  # fmt: skip
    roof = max(card.read_bytes_per_s, machine.read_bandwidth(device=card.machine.device, budget_s=seconds / 10))
    left_out = ", ".join(f"{new:,} of {context:,}" for new, context in shapes[fit:])
    note = f"The budget of {seconds:g} s left out {left_out}." if left_out else ""
    return PassesResult(model=config.name, card=card, passes=tuple(done), roof_bytes_per_s=roof, note=note)


def _pass(model: Decoder, cache: KVCache, new_tokens: int, context: int) -> None:
    """One pass as `generate` runs it: the tokens, greedy sample, token on the host."""
    cache.length = context - new_tokens
    sample(prefill(model, [[i % model.config.vocab_size for i in range(new_tokens)]], cache=cache)).tolist()


def _pass_seconds(config: ModelConfig, card: Card, new_tokens: int, context: int) -> float:
    """The formula's time of a pass on this card."""
    work = Workload(prompt_tokens=new_tokens, output_tokens=1, **card.formats)
    return cost.prefill_time(config, card.constants(config), work, cached=context - new_tokens)


def summed_passes(result: PassesResult, *, tokens: int) -> tuple[float, float]:
    """(seconds with the cache, without it) of `tokens` tokens one by one: computed between the timed passes, not measured.

    Straight lines join the timed lengths; outside them the nearest holds. At one token the two kinds are the same pass.
    """
    timed = [{p.context: p.taken.median_s for p in result.passes if (p.new_tokens < p.context) == cached} for cached in (True, False)]
    timed[1] = {1: timed[0][min(timed[0])], **timed[1]}
    with_cache, without = (float(np.interp(range(1, tokens + 1), sorted(one), [one[n] for n in sorted(one)]).sum()) for one in timed)
    return with_cache, without


@dataclass
class Entry:
    """A tensor in the ledger: the source line that used it, its shape, how often, and the bytes of all its uses."""

    line: int
    tensor: str
    shape: tuple[int, ...]
    times: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class Ledger:
    """Runs a decode step's operations one by one and enters the weights and the K and V that each reads or writes.

    Not entered: activations (`activation_bytes` counts what the operations return), the token id, rotary angles.
    """

    def __init__(self, model: Decoder, cache: KVCache):
        self.cache, self.entries, self.activation_bytes = cache, {}, 0
        self.names = {module: re.sub(r"\d+", "·", name) for name, module in model.named_modules()}
        angles = (cache.length * model.inverse_wavelengths).repeat(2)  # (H,)
        self.shared = Pass(angles.cos().to(model.dtype), angles.sin().to(model.dtype), None, False)

    def read(self, part: nn.Module, x: Tensor) -> Tensor:
        """part(x); enters each of its tensors, of an embedding only the rows looked up."""
        for name, tensor in part.named_parameters():
            shape = (x.numel(), tensor.shape[1]) if isinstance(part, nn.Embedding) else tuple(tensor.shape)
            self._enter(f"{self.names[part]}.{name}", shape, read=math.prod(shape) * tensor.element_size())
        return self._made(part(x))

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Splits k and v into heads, turns k to its position, writes both behind the cache; returns all K and V."""
        k, v = rotate(self._heads(k), self.shared), self._heads(v)  # (B, K, 1, H)
        for name, new in (("K, appended", k), ("V, appended", v)):
            self._enter(name, tuple(new.shape), written=new.nbytes)
        return self.cache.append(layer, k, v)  # (B, K, S, H)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of the new token over all of the cache, its own K and V included: (B, 1, D)."""
        for name, kept in (("K, all", keys), ("V, all", values)):
            self._enter(name, tuple(kept.shape), read=kept.numel() * kept.element_size())
        mixed = attend(rotate(self._heads(q), self.shared), keys, values)  # (B, N, 1, H)
        return self._made(mixed.transpose(1, 2).flatten(2))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.cache.keys[0].shape[-1])).transpose(1, 2)  # (B, heads, 1, H)

    def _made(self, x: Tensor) -> Tensor:
        self.activation_bytes += x.nbytes
        return x

    def _enter(self, tensor: str, shape: tuple[int, ...], *, read: int = 0, written: int = 0) -> None:
        line = sys._getframe(2).f_lineno  # the line of the cell that asked for it
        entry = self.entries.setdefault((line, tensor), Entry(line, tensor, shape))
        entry.times, entry.read_bytes, entry.written_bytes = entry.times + 1, entry.read_bytes + read, entry.written_bytes + written

    @property
    def read_bytes(self) -> int:
        return sum(entry.read_bytes for entry in self.entries.values())

    @property
    def written_bytes(self) -> int:
        return sum(entry.written_bytes for entry in self.entries.values())

    def rows(self) -> list[tuple[str, ...]]:
        """(line, tensor, shape, times, bytes read, bytes written) for each tensor, and the sum."""
        used = [(f"{e.line}", e.tensor, f"{e.shape}", f"{e.times}", f"{e.read_bytes:,}", f"{e.written_bytes:,}") for e in self.entries.values()]
        return [*used, ("", "sum", "", "", f"{self.read_bytes:,}", f"{self.written_bytes:,}")]

    def __repr__(self) -> str:
        return "\n".join("{:>4}  {:<34}{:<16}{:>3}{:>14}{:>9}".format(*row) for row in self.rows())

    def _repr_html_(self) -> str:
        return html_table(("line", "tensor", "shape", "times", "bytes read", "bytes written"), self.rows())


@dataclass(frozen=True, kw_only=True)
class Case:
    """One pass of `batch` sequences of `tokens` each: what was measured, and the formula's two answers in seconds."""

    tokens: int
    batch: int
    measured: Summary
    predicted_s: float
    floor_s: float


def prefill_sweep(model: Decoder, card: Card, *, lengths: Sequence[int] = (128, 512, 2048), part: int = 128, rounds: int = 3,
                  budget_s: float = 25.0) -> tuple[list[Case], list[Case]]:  # fmt: skip
    """Prefill of each length as one prompt, and of as many tokens cut into prompts of `part` that do not see each other.

    Both do the same linear work; what the first takes longer is the quadratic part. Lengths whose two passes do not fit
    in the budget, as predicted from the card, are left out from the longest down; the first is always there.
    Raises: ValueError where a length is not a multiple of `part`.
    """
    if uneven := [length for length in lengths if length < part or length % part]:
        raise ValueError(f"lengths {uneven} cannot be cut into prompts of {part}; give multiples of {part}")
    require_card(model, card)
    budget_s, cases, spent = machine.budget(budget_s), [], 0.0
    for length in sorted(set(lengths)):
        pair = [Workload(prompt_tokens=tokens, output_tokens=1, batch=length // tokens, **model.formats) for tokens in (length, part)]
        predicted = [cost.prefill_time(model.config, card.constants(model.config), work) for work in pair]
        spent += sum(predicted)
        if spent > budget_s and cases:
            break
        cases += zip(pair, predicted, strict=True)
    calls = [_prefill_call(model, work) for work, _ in cases]
    calls[0]()  # the warm-up: a long prefill is too dear to throw away
    taken = interleaved(calls, rounds=rounds, budget_s=budget_s / 2, device=card.machine.device, warmup=0)
    done = [Case(tokens=work.prompt_tokens, batch=work.batch, measured=summarise(seconds), predicted_s=predicted,
                 floor_s=cost.prefill_time(model.config, card.floor(), work)) for (work, predicted), seconds in zip(cases, taken, strict=True)]  # fmt: skip
    return done[::2], done[1::2]


def _prefill_call(model: Decoder, work: Workload) -> Callable[[], object]:
    """A prefill of random ids, the same memory each time."""
    cache = model.new_cache(max_len=work.prompt_tokens, batch=work.batch)
    prompts = torch.randint(model.config.vocab_size, (work.batch, work.prompt_tokens), generator=torch.Generator().manual_seed(4)).tolist()

    def call() -> None:
        cache.reset()
        sample(prefill(model, prompts, cache=cache)).tolist()

    return call


def batch_sweep(model: Decoder, card: Card, *, batches: Sequence[int] = (1, 2, 4, 8, 16, 32), context: int = 128,
                budget_s: float = 15.0) -> SaturationResult:  # fmt: skip
    """The second half of `saturation` on a given model: a decode step at each batch, `context` tokens in every row."""
    require_card(model, card)
    points = _saturation_points(model.config, card, batches=batches, context=context, budget_s=machine.budget(budget_s), model=model)
    ridge = planning.ridge_batch(model.config, card.floor(), weight_bytes_per_value=model.formats["weight_bytes_per_value"])
    return SaturationResult(card=card, points=tuple(points), roof_bytes_per_s=card.read_bytes_per_s, ridge_batch=ridge)
