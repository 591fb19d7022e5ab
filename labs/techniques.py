"""The rows of the ledger: each technique, what it is said to cut, and how to measure that on this machine.

`decodelab.measuring.ledger` reads this file. A row claims a class for each quantity it speaks of, "cut", "same" or "worse",
and its `measure(budget_s, card)` returns one Change, before and after, for exactly those quantities. Shapes and contexts are
those at which the technique matters; `loses` says where it does not. To add a row, see CONTRIBUTING.md.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, lru_cache
from itertools import count
from statistics import median

import torch
from torch import Tensor, nn

from decodelab.arithmetic import catalog, cost, engines, workload
from decodelab.arithmetic.catalog import ModelConfig, Workload
from decodelab.arithmetic.cost import Growth, kv_bytes_per_token
from decodelab.arithmetic.records import Card, Line, fit_line
from decodelab.arithmetic.speculation import expected_tokens
from decodelab.arithmetic.workload import Arrival
from decodelab.decoder import kernels, weights
from decodelab.decoder.cache import KVCache
from decodelab.decoder.generate import decode_step, prefill
from decodelab.decoder.model import Attention, Decoder, Pass, rotate, visible_keys
from decodelab.decoder.sampling import sample
from decodelab.decoder.speculative import (
    Drafter,
    DraftModel,
    PromptLookup,
    acceptance_by_place,
    speculate,
)
from decodelab.decoder.tokenizer import load_tokenizer
from decodelab.measuring import machine
from decodelab.measuring.clock import interleaved
from decodelab.measuring.experiments import step_calls, warm_weights
from decodelab.measuring.ledger import Change, Technique
from decodelab.serving.scheduler import Limits, pages_for, slots_needed
from decodelab.serving.simulator import Simulation, simulate, simulate_pools

CONTEXTS = (8, 2048)  # the first so short that a step there is a itself
ROUNDS = 15
PAGE = 16  # tokens

# Variants that a row switches on.


class Concatenating(KVCache):
    """Builds and keeps a longer K and V for every token; at each length the one before is freed once the new one is there.

    The plain tensors stay as well, so that a row can go back to a shorter context.
    """

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        whole = super().append(layer, k, v)
        longer = tuple(torch.cat((part[:, :, : self.length], new), 2) for part, new in zip(whole, (k, v), strict=True))
        vars(self).setdefault("kept", {})[layer, self.length] = longer
        return longer


class StaticRead(KVCache):
    """Reads every allocated slot and hides the empty ones, as a graph of one fixed size does."""

    positions = property(lambda self: torch.arange(self.slots, device=self.keys[0].device).expand(self.batch, -1), lambda self, _: None)

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        super().append(layer, k, v)
        return self.keys[layer], self.values[layer]

    def place(self, positions: Tensor, *, slots: int | None = None) -> Tensor:
        return self.positions[:, :slots]

    def open(self, multiple: int) -> int:
        return super().open(self.slots)


class Expanded(KVCache):
    """Copies each K and V once per query head before attention."""

    def __init__(self, config: ModelConfig, **options: object):
        super().__init__(config, **options)
        self.group = config.n_heads // config.n_kv_heads

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(part.repeat_interleave(self.group, 1) for part in super().append(layer, k, v))


class NaiveAttention(Attention):
    """Multi-head attention as the textbook writes it: all scores in memory, then the softmax, then the sum."""

    def forward(self, x: Tensor, *, cache: KVCache, layer: int, shared: Pass) -> Tensor:
        q, k, v = (self._heads(part(x)) for part in (self.q, self.k, self.v))
        keys, values = cache.append(layer, rotate(k, shared), v)
        scores = rotate(q, shared) @ keys.transpose(-1, -2) / math.sqrt(self.head_dim)  # (B, N, T, S)
        if shared.causal:
            places = torch.arange(len(x[0]), device=x.device)
            scores = scores.masked_fill(~visible_keys(places, places), -math.inf)
        return self.out((scores.softmax(-1) @ values).transpose(1, 2).flatten(2))


# Shapes and models.


def shape(card: Card, *, kv_heads: int = 8, cached: float = 8) -> ModelConfig:
    """A probe 512 wide with 8 heads, so deep that its float32 weights are `cached` times the last-level cache, up to 48 layers.

    Under a short DECODELAB_BUDGET_S it has a quarter of that: the rows run, but their factors mean little.
    """
    held = (cached if machine.budget(60) > 10 else cached / 4) * (card.machine.last_level_cache_bytes or 2**25)
    layer = cost.weight_bytes_per_step(machine.probe_config(hidden=512, n_layers=1, vocab_size=1), dtype_bytes=4)
    layers = min(48, max(4, math.ceil(held / layer)))
    return replace(machine.probe_config(hidden=512, n_layers=layers, max_context=2 * CONTEXTS[1]), n_kv_heads=kv_heads)


def tiny(*, hidden: int = 64) -> ModelConfig:
    """Eight layers of next to no bytes: what takes time is to ask for the work."""
    return machine.probe_config(hidden=hidden, n_layers=8, vocab_size=64)


@lru_cache(maxsize=12)
def decoder(config: ModelConfig, device: str, dtype: str = "float32", path: str = "eager") -> Decoder:
    """A model with random weights, kept for the next row that asks for it."""
    model = weights.random(config, device=device, dtype=dtype, path=path, say=lambda _: None)
    warm_weights(model)
    return model


def eager_card(card: Card) -> Card:
    """The card of the eager path, for rows that are measured there."""
    return card if card.path == "eager" else machine.fresh_card(card.dtype, device=card.machine.device, path="eager")


def on(card: Card, config: ModelConfig, dtype: str = "float32", path: str | None = None) -> Decoder:
    """The model on the card's device and, unless another is named, its path."""
    return decoder(config, card.machine.device, dtype, path or card.path)


# Measuring.


def times(calls: Sequence[Callable[[], object]], card: Card, budget_s: float, *, rounds: int = ROUNDS, warmup: int = 2) -> list[float]:
    """Median seconds of each call, taken in turn."""
    return [median(taken) for taken in interleaved(calls, rounds=rounds, budget_s=budget_s, device=card.machine.device, warmup=warmup)]


def lines(sides: Sequence[tuple[Decoder, KVCache]], card: Card, budget_s: float, *, contexts: tuple[int, int] = CONTEXTS) -> list[Line]:
    """t(n) = intercept + slope * n of each (model, cache), from steps at both contexts taken in turn."""
    calls = [call for model, held in sides for call in step_calls(model, held, contexts)]
    taken = times(calls, card, budget_s)
    return [fit_line(contexts, taken[2 * side : 2 * side + 2]) for side in range(len(sides))]


def growth(config: ModelConfig, card: Card, *, weights_at: float = 4, kv_at: float = 4, batch: int = 1) -> Growth:
    """The formula's a and b on this card."""
    return cost.growth(config, card.constants(config), batch=batch, weight_bytes_per_value=weights_at, kv_bytes_per_value=kv_at)


TOKENS = 4  # written while passes are counted


def write(model: Decoder, held: KVCache) -> None:
    """A prompt of three tokens and TOKENS tokens after it, in each row of the cache."""
    held.reset()
    logits = prefill(model, [[1, 2, 3]] * held.batch, cache=held)
    for _ in range(TOKENS - 1):
        logits = decode_step(model, sample(logits), cache=held)


def passes(*writes: tuple[Decoder, Callable[[], object]]) -> Change:
    """Forward passes, one after the other, per token of one sequence, counted while two (model, write) write TOKENS tokens."""
    counted = []
    for model, call in writes:
        seen: list[int] = []
        hook = model.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        call()
        hook.remove()
        counted.append(len(seen) / TOKENS)
    return Change(*counted, predicted=1, how="counted")


def same_passes(*sides: tuple[Decoder, KVCache]) -> Change:
    """The passes of two (model, cache) that write in the same way."""
    return passes(*((model, lambda model=model, held=held: write(model, held)) for model, held in sides))


def stored_bytes(model: Decoder, *, context: int, batch: int = 1) -> int:
    """Bytes of the tensors that hold the weights, and of K and V of `batch` sequences."""
    held = [*model.parameters(), *model.buffers()]
    return sum(part.numel() * part.element_size() for part in held) + batch * context * model.new_cache(max_len=1).bytes_per_token


def capacity(before: Decoder, after: Decoder, *, formats: tuple[float, float] = (4, 4), batch: int = 1) -> Change:
    """What must fit in memory at the longer context; `formats`: bytes per value of the weights and of K and V afterwards."""

    def formula(model: Decoder, weights_at: float, kv_at: float, rows: int) -> float:
        return cost.parameters(model.config) * weights_at + rows * cost.kv_bytes(model.config, context=CONTEXTS[1], dtype_bytes=kv_at)

    return Change(stored_bytes(before, context=CONTEXTS[1]), stored_bytes(after, context=CONTEXTS[1], batch=batch),
                  predicted=formula(after, *formats, batch) / formula(before, 4, 4, 1), how="counted")  # fmt: skip


def between(before: Line, after: Line, predicted: dict[str, float | None]) -> dict[str, Change]:
    """The changes of a and b that `predicted` names."""
    pairs = {"a": (before.intercept, after.intercept), "b": (before.slope, after.slope)}
    return {name: Change(*pairs[name], predicted=factor) for name, factor in predicted.items()}


# The rows' measurements.


def cache_off(budget_s: float, card: Card) -> dict[str, Change]:
    model, contexts = on(card, shape(card, cached=2), path="eager"), (64, 256)
    held = model.new_cache(max_len=CONTEXTS[1])
    ids = [i % model.config.vocab_size for i in range(contexts[1])]

    def read_again(tokens: int) -> None:
        held.length = 0
        sample(prefill(model, [ids[:tokens]], cache=held)).tolist()

    taken = times([lambda n=n: read_again(n) for n in contexts], card, budget_s / 2, rounds=5, warmup=1)
    [kept] = lines([(model, held)], card, budget_s / 2)
    constants = eager_card(card).constants(model.config)
    work = [Workload(prompt_tokens=n, output_tokens=1, weight_bytes_per_value=4, kv_bytes_per_value=4) for n in contexts]
    again = [cost.prefill_time(model.config, constants, one) for one in work]
    b_s = cost.growth(model.config, constants, weight_bytes_per_value=4, kv_bytes_per_value=4).b_s_per_token
    stored = stored_bytes(model, context=CONTEXTS[1])
    formula = cost.parameters(model.config) * 4
    return {"b": Change(kept.slope, fit_line(contexts, taken).slope, predicted=fit_line(contexts, again).slope / b_s),
            "passes": passes((model, lambda: write(model, held)), (model, lambda: [read_again(3 + i) for i in range(TOKENS)])),
            "capacity": Change(stored, stored_bytes(model, context=0), how="counted",
                               predicted=formula / (formula + cost.kv_bytes(model.config, context=CONTEXTS[1], dtype_bytes=4)))}  # fmt: skip


def concatenating(budget_s: float, card: Card) -> dict[str, Change]:
    model, known = on(card, shape(card), path="eager"), eager_card(card)
    sides = [(model, kind(model.config, max_len=CONTEXTS[1], device=model.device)) for kind in (KVCache, Concatenating)]
    copied = 1 + 2 * known.constants(model.config).kv_bytes_per_s / known.copy_bytes_per_s
    return {**between(*lines(sides, card, budget_s), {"a": 1, "b": copied}), "passes": same_passes(*sides)}


def static_read(budget_s: float, card: Card) -> dict[str, Change]:
    model = on(card, shape(card))
    sides = [(model, kind(model.config, max_len=CONTEXTS[1], device=model.device)) for kind in (KVCache, StaticRead)]
    line = growth(model.config, card)
    return {**between(*lines(sides, card, budget_s), {"a": line(CONTEXTS[1]) / line.a_s, "b": 0}), "passes": same_passes(*sides)}


def expanded(budget_s: float, card: Card) -> dict[str, Change]:
    model, known = on(card, shape(card, kv_heads=2), path="eager"), eager_card(card)
    sides = [(model, kind(model.config, max_len=CONTEXTS[1], device=model.device)) for kind in (KVCache, Expanded)]
    group = model.config.n_heads // model.config.n_kv_heads
    copying, reading = (1 + group) / known.copy_bytes_per_s, group / known.kv_read_bytes_per_s
    factor = (copying + reading) * known.kv_read_grouped_bytes_per_s
    return {**between(*lines(sides, card, budget_s), {"a": 1, "b": factor}), "passes": same_passes(*sides)}


def compiled(budget_s: float, card: Card) -> dict[str, Change]:
    known, config = eager_card(card), shape(card)
    slow, quick = growth(config, known).a_s, growth(config, card).a_s
    calls_s = known.constants(tiny()).overhead_s(tiny()), card.constants(tiny()).overhead_s(tiny())
    if card.path == "eager":  # nothing compiles here: what the read roof would allow
        floor = cost.growth(config, card.floor(), weight_bytes_per_value=4).a_s
        return {"a": Change(slow, floor, how="computed: nothing compiles here"), "overhead": Change(calls_s[0], 0, how="computed: nothing compiles here"),
                "passes": Change(1, 1, how="computed: nothing compiles here")}  # fmt: skip
    models = [on(card, one, path=path) for one in (config, tiny()) for path in ("eager", "fast")]
    calls = [step_calls(model, model.new_cache(max_len=CONTEXTS[0]), CONTEXTS[:1])[0] for model in models]
    taken = times(calls, card, budget_s)
    return {"a": Change(taken[0], taken[1], predicted=quick / slow), "overhead": Change(taken[2], taken[3], predicted=calls_s[1] / calls_s[0]),
            "passes": same_passes(*((model, model.new_cache(max_len=8)) for model in models[:2]))}  # fmt: skip


fresh_width = count(2)  # a width that this process has not compiled for yet, also when the row is run again


def no_warm_up(budget_s: float, card: Card) -> dict[str, Change]:
    model = weights.random(tiny(hidden=64 * next(fresh_width)), device=card.machine.device, dtype="float32", path="eager")
    [step] = step_calls(model, model.new_cache(max_len=CONTEXTS[0]), CONTEXTS[:1])
    began = time.perf_counter()
    if card.path == "fast":
        kernels.attach(model, say=lambda _: None)
    step()
    first_s = time.perf_counter() - began
    return {"first": Change(times([step], card, budget_s)[0], first_s)}


def no_synchronise(budget_s: float, card: Card) -> dict[str, Change]:
    if card.machine.device == "cuda":
        model = on(card, shape(card))
        [step] = step_calls(model, model.new_cache(max_len=CONTEXTS[0]), CONTEXTS[:1])
        [whole] = times([step], card, budget_s / 2)
        ids, held = torch.zeros((1, 1), dtype=torch.long, device="cuda"), model.new_cache(max_len=CONTEXTS[1])
        with torch.inference_mode():
            model(ids, cache=held)  # what a new cache needs first: its graph is recorded
        held.length = 0
        torch.cuda.synchronize()
        began = time.perf_counter()
        with torch.inference_mode():
            for _ in range(16):
                model(ids, cache=held)  # asks for a step and does not wait
        return {"a": Change(whole, (time.perf_counter() - began) / 16)}
    record = catalog.data_dir() / "runs" / "no_synchronise.json"
    if record.is_file():
        kept = json.loads(record.read_text(encoding="utf-8"))
        return {"a": Change(kept["synchronised_s"], kept["asked_s"], how=f"recorded: {kept['machine']}")}
    llama, h200 = catalog.model("llama-3.1-8b"), catalog.hardware("h200-sxm")
    constants = engines.engine_for(h200).constants(h200)
    asked_s = constants.overhead_s(llama)
    return {"a": Change(cost.growth(llama, constants).a_s, asked_s, how=f"computed, not measured: {llama.name} on {h200.name}")}


def sdpa_prefill(budget_s: float, card: Card) -> dict[str, Change]:
    config = machine.probe_config(hidden=128, n_layers=4, vocab_size=256, max_context=1024)
    calls = []
    for attention in (NaiveAttention, Attention):
        model = weights.random(config, device=card.machine.device, dtype="float32", path="eager")
        held = with_attention(model, attention).new_cache(max_len=1024)
        calls.append(lambda model=model, held=held: (held.reset(), prefill(model, [[1] * 1024], cache=held)))
    return {"first": Change(*times(calls, card, budget_s, rounds=9))}


def with_attention(model: Decoder, kind: type[Attention]) -> Decoder:
    """The model, its attention of another class with the same weights."""
    for block in model.blocks:
        block.attention.__class__ = kind
    return model


def sdpa_decode(budget_s: float, card: Card) -> dict[str, Change]:
    config = replace(shape(card, cached=2), head_dim=128)  # what both can read at full speed
    models = [with_attention(weights.random(config, device=card.machine.device, dtype="float32", path="eager"), kind)
              for kind in (NaiveAttention, Attention)]  # fmt: skip
    sides = [(model, model.new_cache(max_len=CONTEXTS[1])) for model in models]
    return {**between(*lines(sides, card, budget_s), {"b": 1}), "passes": same_passes(*sides)}


def format_of(dtype: str) -> Callable[[float, Card], dict[str, Change]]:
    """The measurement of a model in another format."""

    def measure(budget_s: float, card: Card) -> dict[str, Change]:
        models = [on(card, shape(card), dtype=one) for one in ("float32", dtype)]
        sides = [(model, model.new_cache(max_len=CONTEXTS[1])) for model in models]
        weights_at, kv_at = models[1].formats.values()
        was, now = growth(models[0].config, card), growth(models[0].config, card, weights_at=weights_at, kv_at=kv_at)
        predicted = {"a": now.a_s / was.a_s, "b": now.b_s_per_token / was.b_s_per_token}
        return {**between(*lines(sides, card, budget_s), predicted), "capacity": capacity(*models, formats=(weights_at, kv_at)),
                "passes": same_passes(*sides)}  # fmt: skip

    return measure


def kv_in_8_bits(budget_s: float, card: Card) -> dict[str, Change]:
    config = shape(card)
    was, now = growth(config, card), growth(config, card, kv_at=1)
    stored = [cost.parameters(config) * 4 + cost.kv_bytes(config, context=CONTEXTS[1], dtype_bytes=size) for size in (4, 1)]
    pairs = {"a": (was.a_s, now.a_s), "b": (was.b_s_per_token, now.b_s_per_token), "capacity": stored}
    return {name: Change(*pair, predicted=pair[1] / pair[0], how="computed: by bytes") for name, pair in pairs.items()}


def fewer_kv_heads(budget_s: float, card: Card) -> dict[str, Change]:
    models, known = [on(card, shape(card, kv_heads=heads), path="eager") for heads in (8, 2)], eager_card(card)
    sides = [(model, model.new_cache(max_len=CONTEXTS[1])) for model in models]
    was, now = (growth(model.config, known) for model in models)
    return {**between(*lines(sides, card, budget_s), {"b": now.b_s_per_token / was.b_s_per_token}), "capacity": capacity(*models),
            "passes": same_passes(*sides)}  # fmt: skip


def batched(budget_s: float, card: Card, *, rows: int = 4) -> dict[str, Change]:
    model, contexts, known = on(card, shape(card, cached=2), path="eager"), (8, 4096), eager_card(card)
    sides = [(model, model.new_cache(max_len=contexts[1], batch=batch)) for batch in (1, rows)]
    alone, together = lines(sides, card, budget_s, contexts=contexts)
    was, now = growth(model.config, known), growth(model.config, known, batch=rows)
    return {"a": Change(alone.intercept, together.intercept / rows, predicted=now.a_s / rows / was.a_s),
            "b": Change(alone.slope, together.slope / rows, predicted=now.b_s_per_token / rows / was.b_s_per_token),
            "capacity": capacity(model, model, batch=rows), "passes": same_passes(*sides)}  # fmt: skip


@cache
def one_layer_over_and_over(config: ModelConfig, device: str, path: str) -> Decoder:
    """A model of which every layer is the first: the same calls and the same arithmetic, but few bytes."""
    model = weights.random(replace(config, n_layers=1), device=device, dtype="float32", path="eager")
    model.config, model.blocks = config, nn.ModuleList([model.blocks[0]] * config.n_layers)
    if path == "fast":
        kernels.attach(model, say=lambda _: None)
    return model


def in_the_cache(budget_s: float, card: Card) -> dict[str, Change]:
    config = shape(card)
    models = on(card, config), one_layer_over_and_over(config, card.machine.device, card.path)
    calls = [step_calls(model, model.new_cache(max_len=CONTEXTS[0]), CONTEXTS[:1])[0] for model in models]
    return {"a": Change(*times(calls, card, budget_s), predicted=1)}


def launch_bound(budget_s: float, card: Card) -> dict[str, Change]:
    known, configs = eager_card(card), [tiny(hidden=64), tiny(hidden=32)]
    models = [on(card, config, path="eager") for config in configs]
    calls = [step_calls(model, model.new_cache(max_len=CONTEXTS[0]), CONTEXTS[:1])[0] for model in models]
    was, now = (growth(config, known).a_s for config in configs)
    return {"a": Change(*times(calls, card, budget_s, rounds=60), predicted=now / was)}


def paged(budget_s: float, card: Card) -> dict[str, Change]:
    config = shape(card)
    model, kv = on(card, config), kv_bytes_per_token(config, dtype_bytes=4)
    held, pool = model.new_cache(max_len=CONTEXTS[1]), model.new_pool(pages=CONTEXTS[1] // PAGE + 1, page_tokens=PAGE)
    for tensor in (*pool.keys, *pool.values):
        tensor.normal_()
    token, table = torch.zeros(1, dtype=torch.long, device=model.device), list(range(pool.pages))
    steps = [lambda context=context: sample(decode_step(model, token, cache=pool.rows([table], [context]))).tolist() for context in CONTEXTS]
    taken = times([*step_calls(model, held, CONTEXTS), *steps], card, budget_s)
    lengths = workload.lengths("reasoning", 200, seed=1, max_context=32_768)
    need = [slots_needed(prompt_tokens=prompt, max_tokens=output) for prompt, output in lengths]
    reserved, pages = 32_768 * kv * len(need), sum(pages_for(slots, page_tokens=PAGE) for slots in need) * PAGE * kv
    return {**between(fit_line(CONTEXTS, taken[:2]), fit_line(CONTEXTS, taken[2:]), {"a": 1.0, "b": 1.0}),
            "capacity": Change(reserved, pages, predicted=pages / reserved, how="counted")}  # fmt: skip


def served(config: ModelConfig, card: Card, arrivals: Sequence[Arrival], *, pools: bool = False, **limits: object) -> Simulation:
    """A trace on the virtual clock, with this machine's card; with `pools` a second machine like it prefills."""
    room = Limits(**{"pages": 10**6, "max_sequences": 8, "token_budget": 4 * CONTEXTS[1], **limits})
    known = {"config": config, "constants": card.constants(config), "limits": room, **card.formats}
    if not pools:
        return simulate(arrivals, fused=False, **known)
    return simulate_pools(arrivals, fused=False, prefill_devices=1, decode_devices=1, transfer_bytes_per_s=10e9, **known)


def computed(before: float, after: float) -> Change:
    """What the scheduler on a virtual clock gives; lab 08 measures it."""
    return Change(before, after, predicted=after / before, how="computed: simulated")


def drafted(target: Decoder, prompt: Sequence[int], draft: Drafter, *, tokens: int, k: int = 4) -> dict[str, Change]:
    """Passes of the target per token behind the prefill, one without drafts; the formula's factor is 1 / tokens per round at this acceptance."""
    rounds = list(speculate(target, prompt, max_tokens=tokens, draft=draft, k=k))[1:]
    first, behind = acceptance_by_place(rounds)
    expected = sum(expected_tokens(behind, each.proposed, first=first) for each in rounds) / len(rounds)
    return {"passes": Change(1, len(rounds) / sum(each.emitted for each in rounds), predicted=1 / expected, how="counted")}


def draft_of_one_layer(budget_s: float, card: Card) -> dict[str, Change]:
    target, small = (weights.load(name, device=card.machine.device, dtype="float32", path="eager") for name in ("reasoner", "reasoner-draft"))
    words = load_tokenizer("reasoner")
    return drafted(target, words.encode("C301="), DraftModel(small), tokens=128)


def prompt_lookup(budget_s: float, card: Card) -> dict[str, Change]:
    model = on(card, replace(tiny(), tied_embeddings=True), path="eager")
    return drafted(model, [1, 2, 3], PromptLookup(), tokens=56)


def continuous(budget_s: float, card: Card) -> dict[str, Change]:
    arrivals = workload.workload("reasoning", 64, rate_per_s=1e6, seed=1, scale=8, max_context=CONTEXTS[1])
    was, now = (served(shape(card), card, arrivals, static=static).summary for static in (True, False))
    return {"token": computed(1 / was.decode_tokens_per_s, 1 / now.decode_tokens_per_s)}


STREAM = (Arrival(at_s=0, prompt_tokens=8, output_tokens=100), Arrival(at_s=0.001, prompt_tokens=CONTEXTS[1], output_tokens=2))
"""Somebody's answer is being written when a long prompt arrives."""


def chunked(budget_s: float, card: Card) -> dict[str, Change]:
    was, now = (served(shape(card), card, STREAM, chunk=chunk).records for chunk in (None, 64))
    return {"gap": computed(max(was[0].itl_s), max(now[0].itl_s)), "first": computed(was[1].ttft_s, now[1].ttft_s)}


def elsewhere(budget_s: float, card: Card) -> dict[str, Change]:
    config = shape(card)
    was, now = (served(config, card, STREAM, pools=pools).records for pools in (False, True))
    weights_bytes = 4 * cost.parameters(config)
    return {"gap": computed(max(was[0].itl_s), max(now[0].itl_s)), "capacity": Change(weights_bytes, 2 * weights_bytes, predicted=2, how="counted")}


# fmt: off
_ALL = (
    ("KV cache off", {"b": "worse", "passes": "same", "capacity": "cut"}, cache_off,
        "Each token reads the whole text again: arithmetic for every token instead of two rows read back.",
        "Nowhere but in memory, and for a text of a few tokens."),
    ("concatenating cache", {"a": "same", "b": "worse", "passes": "same"}, concatenating,
        "Every step reads all K and V, writes them somewhere else and reads them there.",
        "It always loses; in a short text the copies are small and nobody sees it."),
    ("full static read", {"a": "worse", "b": "cut", "passes": "same"}, static_read,
        "Every step reads every slot that was allocated: the growth is gone because each step pays for the longest.",
        "Everywhere before the end of the context; at the last token it reads what the others read."),
    ("grouped heads expanded", {"a": "same", "b": "worse", "passes": "same"}, expanded,
        "K and V are copied once per query head before they are read: the bytes that grouping saved come back.",
        "It always loses; with as many KV heads as query heads it is one copy."),
    ("compiled instead of eager", {"a": "cut", "overhead": "cut", "passes": "same"}, compiled,
        "Fewer calls, and a product of one row that reads at the machine's rate.",
        "In prefill, where the products are large and already fast; and once, when it compiles."),
    ("SDPA instead of naive, 1,024 tokens", {"first": "cut"}, sdpa_prefill,
        "The scores of all pairs are never written to memory.",
        "With short prompts or wide models, where attention is a small part of the pass."),
    ("SDPA instead of naive, one query", {"b": "same", "passes": "same"}, sdpa_decode,
        "One query has one row of scores: nothing to save. Both read all K and V once.",
        "Here: it is the same step."),
    ("bf16 instead of f32", {"a": "cut", "b": "cut", "capacity": "cut", "passes": "same"}, format_of("bfloat16"),
        "Half the bytes, of weights and of K and V.",
        "In a small model, where bytes do not set the time; on a processor that has to widen it first, in large batches."),
    ("int8 weights", {"a": "cut", "b": "same", "capacity": "cut", "passes": "same"}, format_of("int8"),
        "A quarter of the weight bytes; K and V stay as they are.",
        "In long contexts and large batches, where K and V or arithmetic set the time; on the eager path, which widens each matrix in memory."),
    ("8-bit K and V", {"a": "same", "b": "cut", "capacity": "cut"}, kv_in_8_bits,
        "A quarter of the float32 bytes of K and V; the weights stay as they are.",
        "In short contexts there is little to save; and it must be undone at every read, which bytes do not show."),
    ("2 KV heads instead of 8", {"b": "cut", "capacity": "cut", "passes": "same"}, fewer_kv_heads,
        "Four query heads read one K and V.",
        "It is another model: trained so, not switched on. In short contexts the step hardly changes."),
    ("4 sequences in a step", {"a": "cut", "b": "same", "capacity": "worse", "passes": "same"}, batched,
        "Per token: the weights are read once for four, K and V once for each.",
        "Each sequence waits longer for its token; beyond the ridge arithmetic sets the time; in long contexts K and V do."),
    ("weights that fit the last-level cache", {"a": "cut"}, in_the_cache,
        "The same calls and the same arithmetic, but the bytes come from the cache. The formula does not know it.",
        "It is a measuring mistake, not a technique: no model that matters fits."),
    ("launch-bound: a quarter of the bytes", {"a": "same"}, launch_bound,
        "A tiny model waits for its calls, not for its bytes.",
        "Here. In a model of size the same cut is a cut."),
    ("warm-up left out", {"first": "worse"}, no_warm_up,
        "The first step compiles, allocates and touches memory for the first time.",
        "It is a measuring mistake: an average over few steps carries it along."),
    ("pages instead of max_len slots", {"a": "same", "b": "same", "capacity": "cut"}, paged,
        "A page is taken when it is needed, not when the request arrives. A step still reads each cached token once.",
        "Where no kernel reads pages in place: eager PyTorch copies them first. This decoder's compiled loop does more arithmetic per page, which fast memory shows in b."),
    ("a draft of one layer for a target of ten", {"passes": "cut"}, draft_of_one_layer,
        "One pass of the target reads four drafts and its own last token, and keeps what it would have written itself.",
        "Where drafts are often wrong or dear, and in batches at the ridge: then a pass over five tokens costs more than a step, and the time per token rises."),
    ("prompt lookup, on a text that repeats itself", {"passes": "cut"}, prompt_lookup,
        "What followed the last time is drafted again, for nothing, and one pass checks four tokens of it.",
        "In text that says something new: every wrong copy makes a pass wider and brings nothing."),
    ("continuous instead of static batching", {"token": "cut"}, continuous,
        "A request that ends gives its place to the next one at once; a static batch computes padding until its longest has ended.",
        "With one sequence at a time, or with answers of equal length, there is no padding to save."),
    ("prompts in chunks", {"gap": "cut", "first": "worse"}, chunked,
        "The streams decode between two chunks of somebody's prompt, so nobody waits for the whole of it.",
        "At 1:100 there is next to no prompt to cut up. Small chunks read the weights again and again."),
    ("prompts on another machine", {"gap": "cut", "capacity": "worse"}, elsewhere,
        "Prefill and decode do not wait for each other; K and V move once.",
        "Every decode step is as long as before. At 1:100 the machine that prefills stands idle, and it holds the weights again."),
    ("synchronise left out", {"a": "cut"}, no_synchronise,
        "The clock stops when the work has been asked for, not when it is done: the step looks shorter and is not.",
        "It is a measuring mistake, and only on a GPU; a CPU has done the work when the call returns."),
)
# fmt: on

TECHNIQUES = {name: Technique(name=name, claims=claims, why=why, loses=loses, measure=measure) for name, claims, measure, why, loses in _ALL}
"""Every row by name, in the order of the lab."""
