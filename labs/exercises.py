"""The exercises of the labs: for each the library's own function as reference, its cases, and the mistakes people make.

`decodelab.teaching.exercises` reads this file when an exercise is first checked. A mistake is a function somebody plausibly
writes, unlike the reference and unlike the other mistakes on some case, with the hint that answers it. One line each: the
arguments are those of the reference, `k` its keywords.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import fields, replace

from decodelab.arithmetic import catalog, cost, planning, speculation
from decodelab.arithmetic.catalog import ModelConfig, Workload
from decodelab.arithmetic.cost import Constants
from decodelab.arithmetic.latency import RequestRecord, percentiles, summarise_requests
from decodelab.arithmetic.records import Card, utilisation
from decodelab.arithmetic.workload import Arrival
from decodelab.serving import scheduler, simulator
from decodelab.teaching.exercises import Case, Exercise, Mistake


def intercept_s(config: ModelConfig, constants: Constants, *, batch: int, weight_bytes_per_value: float) -> float:
    """a of t(n) = a + b*n: seconds of a step that finds nothing in the cache."""
    return cost.growth(config, constants, batch=batch, weight_bytes_per_value=weight_bytes_per_value).a_s


def slope_s_per_token(config: ModelConfig, constants: Constants, *, batch: int, kv_bytes_per_value: float) -> float:
    """b of t(n) = a + b*n: seconds that one more cached token in each sequence adds to a step."""
    return cost.growth(config, constants, batch=batch, kv_bytes_per_value=kv_bytes_per_value).b_s_per_token


def decode_s(config: ModelConfig, constants: Constants, *, prompt: int, output: int) -> float:
    """Seconds of all decode steps of one request."""
    return cost.request_time(config, constants, Workload(prompt_tokens=prompt, output_tokens=output)).decode_s


def ridge_batch(config: ModelConfig, card: Card) -> float:
    """The batch at which a step's weight FLOPs take as long as reading its weights at the roof; KV left out."""
    return planning.ridge_batch(config, card.floor(), weight_bytes_per_value=catalog.dtype_bytes(card.dtype))


def split_step_s(config: ModelConfig, constants: Constants, *, devices: int, context: int, exchange_s: float) -> float:
    """Seconds of a step of one sequence with every matrix cut over `devices`."""
    return planning.tensor_split_step(config, constants, devices=devices, context=context, exchange_s=exchange_s)


def answer_dollars(config: ModelConfig, constants: Constants, *, prompt: int, reasoning: int, answer: int, batch: int,
                   dollars_per_hour: float) -> float:  # fmt: skip
    """Dollars of one answer whose reasoning is hidden, one of `batch` that share the device."""
    work = {"prompt": prompt, "reasoning": reasoning, "answer": answer, "batch": batch}
    return planning.answer_cost(config, constants, dollars_per_hour=dollars_per_hour, watts=0, **work).dollars


def int8_step_s(config: ModelConfig, constants: Constants, *, context: int, kv_bytes_per_value: float) -> float:
    """Seconds of a decode step of one sequence with int8 matrices; K and V keep their format, the scales are left out."""
    return cost.step_time(config, constants, context=context, weight_bytes_per_value=1, kv_bytes_per_value=kv_bytes_per_value)


def step_factor(config: ModelConfig, constants: Constants, *, context: int, a_factor: float, b_factor: float) -> float:
    """after / before of a step's seconds when a technique multiplies a and b of t(n) = a + b*n."""
    line = cost.growth(config, constants)
    return cost.Growth(a_s=a_factor * line.a_s, b_s_per_token=b_factor * line.b_s_per_token)(context) / line(context)


def expanded_kv_bytes(config: ModelConfig, *, context: int, dtype_bytes: float) -> float:
    """Bytes of K and V a step moves when they are copied to every query head first: read, copies written, copies read."""
    return (1 + 2 * config.n_heads // config.n_kv_heads) * cost.kv_bytes(config, context=context, dtype_bytes=dtype_bytes)


def kept_drafts(drafts: Sequence[int], *, p: Sequence[Sequence[float]], q: Sequence[Sequence[float]], uniforms: Sequence[float]) -> int:
    """How many drafts a round keeps; decoder/speculative.verify is the same rule on tensors."""
    for kept, (draft, of_p, of_q, uniform) in enumerate(zip(drafts, p, q, uniforms, strict=True)):
        if uniform * of_q[draft] >= of_p[draft]:
            return kept
    return len(drafts)


def replacement(token: int, *, p: Sequence[float], q: Sequence[float]) -> float:
    """The probability that `token` takes the place of a rejected draft; decoder/speculative.residual has all of them."""
    return max(0.0, p[token] - q[token]) / (1 - speculation.overlap(p, q))


def tokens_per_round(acceptance: float, k: int) -> float:
    """Tokens that a round of `k` drafts writes on average, each tested draft kept with the same probability."""
    return speculation.expected_tokens(acceptance, k)


def break_even(k: int, *, draft_cost: float, pass_cost: float) -> float:
    """The acceptance at which a round of `k` drafts gains nothing and loses nothing; both costs in steps of the target."""
    return speculation.RoundPrice(k=k, step_s=1.0, draft_s=k * draft_cost, verify_s=pass_cost).break_even


def drafts_to_ask(acceptance: float, *, draft_s: float, pass_s: Sequence[float]) -> int:
    """The K of the largest speed-up, 0 where none gains. `pass_s[k]` is a pass of k + 1 tokens, `pass_s[0]` the plain step."""
    prices = [speculation.RoundPrice(k=k, step_s=pass_s[0], draft_s=k * draft_s, verify_s=seconds) for k, seconds in enumerate(pass_s)]
    best = speculation.best_k(prices, acceptance)
    return best.k if best else 0


def admitted(queue: Sequence[tuple[int, int]], *, free_pages: int, page_tokens: int, reserve: scheduler.Reserve) -> int:
    """How many requests from the head of the queue start now, each (tokens so far, tokens it may still write). Nobody overtakes."""
    for started, (tokens, left) in enumerate(queue):
        if not scheduler.admits(free_pages=free_pages, tokens=tokens, max_tokens_left=left, page_tokens=page_tokens, reserve=reserve):
            return started
        slots = tokens if reserve == "prompt" else scheduler.slots_needed(prompt_tokens=tokens, max_tokens=left)
        free_pages -= scheduler.pages_for(slots, page_tokens=page_tokens)
    return len(queue)


def unused_bytes(contexts: Sequence[int], *, page_tokens: int, token_bytes: int) -> int:
    """Bytes of K and V that are reserved and hold no token, for sequences of these contexts."""
    return sum(scheduler.pages_for(held, page_tokens=page_tokens) * page_tokens - held for held in contexts) * token_bytes


def static_occupancy(outputs: Sequence[int], *, batch: int) -> float:
    """Sequences that write a token in a mean decode step, when batches of `batch` are served one after the other, each to its last token."""
    batches = [[output - 1 for output in outputs[start : start + batch]] for start in range(0, len(outputs), batch)]
    return sum(map(sum, batches)) / sum(map(max, batches))


def tpot_s(token_s: Sequence[float], *, output_tokens: int) -> float:
    """Time per output token of one answer from the times of its events, which may bring several tokens each."""
    record = RequestRecord(id="", scheduled_s=0.0, sent_s=0.0, prompt_tokens=1, asked_tokens=output_tokens, output_tokens=output_tokens, token_s=tuple(token_s))
    return record.tpot_s


def felt_ttft_s(records: Sequence[RequestRecord]) -> float:
    """Mean time to first token of the completed requests, as their users felt it: from the schedule."""
    return summarise_requests(records).ttft.mean_s


def roof_share(config: ModelConfig, *, tokens_per_s: float, batch: int, context: int, bandwidth_bytes_per_s: float) -> float:
    """The share of a memory's bandwidth that a rate of decoded tokens needs; weights and cache in 16 bits. Above 1: impossible."""
    moved = cost.weight_bytes_per_step(config, batch=batch) + batch * cost.kv_bytes(config, context=context)
    return utilisation(moved, batch / tokens_per_s, bandwidth_bytes_per_s)[0]


def _random_shape(rng: random.Random) -> ModelConfig:
    """A decoder with grouped heads whose head_dim is seldom hidden / n_heads; its name tells the shape."""
    layers, hidden, head_dim = rng.randint(2, 40), 64 * rng.randint(4, 64), rng.choice((32, 64, 96, 128))
    kv_heads, group = rng.choice((1, 2, 4, 8)), rng.choice((1, 2, 3, 4))
    return ModelConfig(name=f"{layers} layers, hidden {hidden}, {group * kv_heads}/{kv_heads} heads of {head_dim}", n_layers=layers, hidden=hidden,
                       intermediate=4 * hidden, n_heads=group * kv_heads, n_kv_heads=kv_heads, head_dim=head_dim,
                       vocab_size=1000 * rng.randint(1, 150), max_context=8192, tied_embeddings=rng.random() < 0.5)  # fmt: skip


def _random_rates(rng: random.Random) -> dict[str, float]:
    """A machine between a slow CPU and a fast accelerator, its ridge anywhere from 1 to 30 FLOP per byte."""
    bandwidth = 10 ** rng.uniform(9, 12)
    return {"weight_bytes_per_s": bandwidth, "kv_bytes_per_s": bandwidth * rng.uniform(0.3, 1), "flops_per_s": bandwidth * rng.uniform(1, 30),
            "step_overhead_s": rng.uniform(1e-4, 1e-2), "layer_overhead_s": rng.uniform(1e-5, 1e-3), "per_row_s": rng.uniform(1e-5, 1e-3)}  # fmt: skip


def _random_card(rng: random.Random) -> Card:
    """A card with every rate different from the others."""
    rates, dtype = {item.name: 10 ** rng.uniform(9, 12) for item in fields(Card)}, rng.choice(("float32", "bfloat16"))
    return Card(**{**rates, "dtype": dtype, "path": "eager", "gemm_flops_per_s": rates["read_bytes_per_s"] * rng.uniform(1, 30)})


def _cases(rows: Sequence[tuple], names: Sequence[str] = ()) -> list[Case]:
    """One case a row: leading objects are positional, the rest are the values of the keywords `names`. Models and counts are told in its label."""
    cases = []
    for row in rows:
        split = len(row) - len(names)
        keywords = dict(zip(names, row[split:], strict=True))
        told = [getattr(part, "name", str(part)) for part in row[:split] if isinstance(part, ModelConfig | int | tuple)]
        cases.append(Case(", ".join([*told, *(f"{key}={value}" for key, value in keywords.items())]), row[:split], keywords))
    return cases


def _drawn(seed: int, models: Sequence[str], *, constants: bool = False, random_shapes: int = 6, **choices: Sequence) -> Callable[[], list[Case]]:
    """Named models, then random shapes, each with one value drawn for every keyword, and random constants where asked."""

    def draw() -> list[Case]:
        rng = random.Random(seed)
        shapes = [catalog.model(name) for name in models] + [_random_shape(rng) for _ in range(random_shapes)]
        rows = [(shape, *([Constants(**_random_rates(rng))] if constants else []), *map(rng.choice, choices.values())) for shape in shapes]
        return _cases(rows, tuple(choices))

    return draw


def _kv_cases() -> list[Case]:
    """Named models with equal, grouped and explicit head sizes, then random shapes, in several cache formats."""
    named = {"gpt2": 2, "smollm2-135m": 4, "llama-2-7b": 2, "llama-3.1-8b": 2, "qwen3-4b": 1, "llama-3.1-70b": 0.5625}
    return _cases([(catalog.model(name), size) for name, size in named.items()], ["dtype_bytes"]) + _drawn(1, (), dtype_bytes=(4, 2, 1))()


_NAMED_STEPS = (  # model, machine, context, batch, bytes per value of weights, of K and V; what bounds it
    ("gpt2", "cores", 1024, 1, 4, 4),  # weights
    ("smollm2-135m", "cores", 8000, 1, 4, 2),  # weights and KV reads alike
    ("smollm2-135m", "cores", 100, 64, 4, 4),  # arithmetic
    ("llama-3.1-70b", "cores", 2048, 1, 1, 1),  # attention by arithmetic: 8 query heads on each 1-byte KV head
    ("llama-3.1-8b", "h200", 4096, 1, 2, 2),  # weights
    ("llama-3.1-8b", "h200", 512, 512, 2, 2),  # arithmetic, beyond the ridge
    ("qwen3-4b", "h200", 32768, 16, 0.5625, 1),  # KV reads
)


def _step_cases() -> list[Case]:
    """Steps bound by weights, by KV reads and by arithmetic, with and without overhead, then random ones."""
    rng = random.Random(2)
    rates = {"weight_bytes_per_s": 30e9, "kv_bytes_per_s": 11e9, "flops_per_s": 96e9}
    cores = Constants(**rates, step_overhead_s=1e-3, layer_overhead_s=5e-5, per_row_s=2e-4)
    machines = {"cores": cores, "h200": cost.floor_constants(catalog.hardware("h200-sxm"))}
    rows = [(catalog.model(name), machines[machine], *step) for name, machine, *step in _NAMED_STEPS]
    for _ in range(6):
        step = (rng.randint(1, 8192), rng.choice((1, 4, 16, 64)), rng.choice((4, 2, 1)), rng.choice((4, 2, 1)))
        rows.append((_random_shape(rng), Constants(**_random_rates(rng)), *step))
    return _cases(rows, ("context", "batch", "weight_bytes_per_value", "kv_bytes_per_value"))


def _pair_cases() -> list[Case]:
    """Prefill, one decode step, a chunk in the middle; without a window, inside it, across its edge, beyond it."""
    rng = random.Random(3)
    rows = [(1024, 1024, 0), (9, 16, 0), (1, 1024, 0), (100, 8000, 0), (512, 512, 128), (1, 4096, 1024), (300, 1200, 1024)]
    for _ in range(6):
        context = rng.randint(2, 4096)
        rows.append((rng.randint(2, context), context, rng.choice((0, 512, 1024))))
    return _cases(rows, ("new_tokens", "context", "window"))


def _pass_cases() -> list[Case]:
    """A decode step, batched steps, a prefill, a chunk behind a cached prefix."""
    rng = random.Random(4)
    rows = [(catalog.model("gpt2"), 1, 1024, 1, 4), (catalog.model("smollm2-135m"), 512, 512, 1, 4),
            (catalog.model("llama-3.1-8b"), 1, 4096, 64, 2), (catalog.model("llama-3.1-70b"), 256, 8192, 4, 1)]  # fmt: skip
    for _ in range(8):
        context = rng.randint(2, 8192)
        rows.append((_random_shape(rng), rng.choice((1, context)), context, rng.choice((1, 4, 16)), rng.choice((4, 2, 1))))
    return _cases(rows, ("new_tokens", "context", "batch", "dtype_bytes"))


def _random_odds(rng: random.Random, tokens: int) -> tuple[float, ...]:
    """A distribution over a few tokens, in hundredths, now and then with a token that is never said."""
    cuts = sorted(rng.randint(0, 100) for _ in range(tokens - 1))
    return tuple((high - low) / 100 for low, high in zip((0, *cuts), (*cuts, 100), strict=True))


P, Q = (0.6, 0.3, 0.1), (0.3, 0.4, 0.3)
"""The lesson's target and draft."""


def _draft_cases() -> list[Case]:
    """The lesson's p and q, rounds kept whole, up to the first and to the middle, a draft the target never says, then random rounds."""
    rng = random.Random(51)
    rows = [((0,), [P], [Q], (0.99,)), ((1, 0), [P, P], [Q, Q], (0.7, 0.5)), ((2, 0), [P, P], [Q, Q], (0.4, 0.2)), ((0, 2, 1), [P, Q, P], [Q, P, P], (0.9, 0.9, 0.9)),
            ((1,), [(1.0, 0.0)], [(0.5, 0.5)], (0.0,)), ((1, 1), [(0.2, 0.8), (0.7, 0.3)], [(0.0, 1.0), (0.0, 1.0)], (0.6, 0.25))]  # fmt: skip
    for _ in range(10):
        tokens, k = rng.randint(2, 5), rng.randint(1, 5)
        p, q = ([_random_odds(rng, tokens) for _ in range(k)] for _ in range(2))
        rows.append((tuple(rng.choices(range(tokens), each)[0] for each in q), p, q, tuple(rng.random() for _ in range(k))))
    cases = []
    for drafts, p, q, uniforms in rows:
        of_p, of_q = (", ".join(f"{each[draft]:g}" for each, draft in zip(row, drafts, strict=True)) for row in (p, q))
        label = f"drafts {', '.join(map(str, drafts))} with p {of_p}, q {of_q}, uniforms {', '.join(f'{u:.3g}' for u in uniforms)}"
        cases.append(Case(label, (drafts,), {"p": p, "q": q, "uniforms": uniforms}))
    return cases


def _replacement_cases() -> list[Case]:
    """Each token of the lesson's p and q, a greedy draft, then random pairs."""
    rng = random.Random(52)
    rows = [(token, P, Q) for token in range(3)] + [(0, Q, P), (0, (0.5, 0.2, 0.3), (0.0, 1.0, 0.0)), (2, (0.5, 0.2, 0.3), (0.0, 1.0, 0.0))]
    for _ in range(8):
        tokens = rng.randint(3, 5)
        p, q = _random_odds(rng, tokens), _random_odds(rng, tokens)
        rows.append((max(range(tokens), key=lambda at, p=p, q=q: p[at] - q[at]), p, q))
    return _cases(rows, ["p", "q"])


def _round_cases() -> list[Case]:
    """(acceptance, k), with nothing drafted, nothing kept and everything kept among them."""
    pairs = [(a, k) for a in (0.3, 0.7, 0.95) for k in (1, 2, 4, 8)] + [(0.0, 4), (1.0, 4), (0.7, 0)]
    return [Case(f"acceptance={a:g}, k={k}", (a, k)) for a, k in pairs]


def _even_cases() -> list[Case]:
    """Rounds that cost more than a step and less than k + 1 of them."""
    rng = random.Random(54)
    rows = [(4, 0.1, 1.0), (4, 0.1, 1.5), (1, 0.1, 1.2), (8, 0.1, 1.2), (2, 0.5, 1.4), (4, 0.0, 1.3)]
    for _ in range(8):
        k = rng.randint(2, 10)
        rows.append((k, round(rng.uniform(0.01, 0.5), 2), round(rng.uniform(1, 1.8), 2)))
    return _cases(rows, ["draft_cost", "pass_cost"])


def _machine_cases() -> list[Case]:
    """Measured-looking milliseconds: flat passes and steep ones, cheap drafts and dear ones, good guesses and bad."""
    rng, cases = random.Random(55), []
    for number in range(16):
        step, slope, cost_of_draft = rng.uniform(1e-3, 4e-2), (0.0, 0.02, 0.1, 0.4)[number % 4], (0.02, 0.1, 0.3, 0.9)[number // 4]
        pass_s = tuple(round(step * (1 + slope * k), 6) for k in range(10))
        draft_s, acceptance = round(cost_of_draft * step, 6), (0.5, 0.8, 0.9, 0.97, 0.65)[number % 5]
        label = f"acceptance={acceptance:g}, a draft {1e3 * draft_s:.3g} ms, passes {1e3 * pass_s[0]:.3g} to {1e3 * pass_s[-1]:.3g} ms"
        cases.append(Case(label, (acceptance,), {"draft_s": draft_s, "pass_s": pass_s}))
    return cases


def _queue_cases() -> list[Case]:
    """Queues that a large request blocks, that fill the pool to its last page, that fit whole; then random ones."""
    rng = random.Random(41)
    rows = [(((17, 4), (16, 8)), 3, 16, "prompt"), (((100, 900), (5, 5)), 6, 16, "prompt"), (((100, 900), (5, 5)), 63, 16, "full"),
            (((16, 17), (16, 17), (1, 1)), 4, 16, "full"), (((8, 8),), 0, 16, "prompt"), (((8, 8),), 1, 16, "full")]  # fmt: skip
    for number in range(10):
        queue = tuple((rng.randint(1, 400), rng.randint(1, 800)) for _ in range(8))
        rows.append((queue, rng.randint(30, 160), rng.choice((8, 16)), ("prompt", "full")[number % 2]))
    return _cases(rows, ("free_pages", "page_tokens", "reserve"))


def _token_cases(seed: int, most: int, each: int, **choices: Sequence) -> Callable[[], list[Case]]:
    """Twelve tuples of `each` counts from 2 to `most`, with one value drawn for every keyword."""

    def draw() -> list[Case]:
        rng = random.Random(seed)
        counts = [tuple(rng.randint(2, most) for _ in range(each)) for _ in range(12)]
        return _cases([(one, *map(rng.choice, choices.values())) for one in counts], tuple(choices))

    return draw


def _arrival_cases() -> list[Case]:
    """Short answers beside long ones, with short and long prompts."""
    rng = random.Random(46)
    drawn = [[(rng.choice((10, 100, 1000)), rng.choice((20, 200, 2000))) for _ in range(4)] for _ in range(12)]
    arrivals = [[Arrival(at_s=0.0, prompt_tokens=read, output_tokens=written) for read, written in one] for one in drawn]
    return [Case(f"(in, out): {told}", (each,)) for told, each in zip(drawn, arrivals, strict=True)]


def _event_cases() -> list[Case]:
    """Streams with one token an event, with several, and of one long pause."""
    rng = random.Random(47)
    rows = [((0.05, 0.09, 0.13, 0.17), 4), ((0.05, 0.25), 6), ((0.4, 0.41, 0.42, 1.42), 4)]
    for _ in range(9):
        events = rng.randint(2, 8)
        times = sorted(round(rng.uniform(0.02, 3), 3) for _ in range(events))
        rows.append((tuple(times), events * rng.choice((1, 2, 5))))
    return _cases(rows, ["output_tokens"])


def _record_cases() -> list[Case]:
    """Runs of an open loop: requests sent late, answers after hidden reasoning, one that failed and one that was cut in each."""
    rng, cases = random.Random(48), []
    for number in range(12):
        records = []
        for one in range(6):
            scheduled = round(0.2 * one, 3)
            sent = round(scheduled + rng.choice((0, 0.5, 2.0)), 3)
            first = round(sent + rng.uniform(0.02, 0.4), 3)
            times = tuple(round(first + 0.03 * step, 3) for step in range(rng.randint(3, 9)))
            finish = ("length", "stop", "error", "cancelled", "length", "stop")[one]
            records.append(RequestRecord(id=str(one), scheduled_s=scheduled, sent_s=sent, prompt_tokens=20, asked_tokens=9, output_tokens=len(times),
                                         token_s=times, first_answer_s=times[2] if one % 2 else None, end_s=times[-1] + 0.01, finish=finish))  # fmt: skip
        cases.append(Case(f"run {number} of 6 requests", (records,)))
    return cases


def _steps_weighted(held: Callable[[int, int], float], weight: Callable[[int], float] = lambda output: output - 1) -> Callable:
    """A mean context of other parts: what a request of `read` and `written` tokens holds, and what it weighs."""
    return lambda arrivals: sum(weight(one.output_tokens) * held(one.prompt_tokens, one.output_tokens) for one in arrivals) / sum(
        weight(one.output_tokens) for one in arrivals)  # fmt: skip


def _started(need: Callable[[int, int, str, int], float], *, gives: bool = True, overtakes: bool = False, last: bool = True) -> Callable:
    """Requests admitted by another rule: what one needs of `free`, whether it is taken away, who may pass, whether the last page may go."""

    def count(queue, *, free_pages, page_tokens, reserve):
        started, free = 0, free_pages
        for tokens, left in queue:
            asked = need(tokens, left, reserve, page_tokens)
            if asked <= free if last else asked < free:
                started, free = started + 1, free - gives * asked
            elif not overtakes:
                break
        return started

    return count


def _kept(keeps: Callable[[float, float, float], bool], *, to_the_first: bool = True) -> Callable:
    """Drafts kept by another rule of (p, q, uniform number) of one draft; also behind a rejected one where asked."""

    def count(drafts, *, p, q, uniforms):
        kept = [keeps(*row) for row in zip(*([odds[at] for odds, at in zip(each, drafts, strict=True)] for each in (p, q)), uniforms, strict=True)]
        return [*kept, False].index(False) if to_the_first else sum(kept)

    return count


def _replaced(left: Callable[[float, float], float], total: Callable[[list[float], float], float] = lambda left, kept: sum(left)) -> Callable:
    """A replacement drawn from other leftovers of (p, q), divided by another total of them and of the share kept."""
    return lambda token, *, p, q: left(p[token], q[token]) / total([left(*pair) for pair in zip(p, q, strict=True)], speculation.overlap(p, q))


def _even(steps: Callable[[int, float, float], float]) -> Callable:
    """A break-even of a round that takes another number of steps, given (k, draft cost, pass cost); at most all k + 1 tokens."""
    return lambda k, *, draft_cost, pass_cost: speculation.acceptance_for(min(k + 1, steps(k, draft_cost, pass_cost)), k)


def _asked(gain: Callable[[float, int, float, Sequence[float]], float], *, least: int = 0) -> Callable:
    """The K with the largest gain of (acceptance, k, draft seconds, pass seconds), from `least` on."""
    return lambda acceptance, *, draft_s, pass_s: max(range(least, len(pass_s)), key=lambda k: gain(acceptance, k, draft_s, pass_s))


def _pages_needed(tokens: int, left: int, reserve: str, page_tokens: int) -> int:
    return scheduler.pages_for(tokens if reserve == "prompt" else tokens + left - 1, page_tokens=page_tokens)


def _mean_over(value: Callable, *, every: bool = False) -> Callable:
    """The mean of `value` over the completed records, or over every one that has a token."""
    return lambda records: sum(map(value, kept := [one for one in records if every or one.complete])) / len(kept)


def _share(passes: Callable[[float, int], float], moved: Callable[[float, float, int], float]) -> Callable:
    """A share of the roof from other parts: passes a second of (rate, batch), bytes of (weights, KV of one sequence, batch)."""
    return lambda m, *, tokens_per_s, batch, context, bandwidth_bytes_per_s: passes(tokens_per_s, batch) * moved(
        cost.weight_bytes_per_step(m, batch=batch), cost.kv_bytes(m, context=context), batch) / bandwidth_bytes_per_s  # fmt: skip


def _terms(config, constants, *, context=0, batch, weight_bytes_per_value=2, kv_bytes_per_value=2):
    """Seconds of: reading the weights, their arithmetic, reading K and V, attention's arithmetic, overhead."""
    weight_bytes = cost.weight_bytes_per_step(config, dtype_bytes=weight_bytes_per_value, batch=batch)
    kv_bytes = batch * cost.kv_bytes(config, context=context, dtype_bytes=kv_bytes_per_value)
    products = cost.weight_flops(config, tokens=batch, logit_rows=batch) / constants.flops_per_s
    scores = batch * cost.attention_flops(config, new_tokens=1, context=context) / constants.flops_per_s
    overhead = constants.overhead_s(config, batch=batch)
    return weight_bytes / constants.weight_bytes_per_s, products, kv_bytes / constants.kv_bytes_per_s, scores, overhead


def _step(rule: Callable[..., float], **fixed: int) -> Callable:
    """A step time made of the terms by another rule: W weights, F their FLOPs, R reads, S scores, c overhead, n batch."""
    return lambda config, constants, **k: rule(*_terms(config, constants, **fixed, **k), k["batch"])


def _head_width(width: Callable[[ModelConfig], float]) -> Callable:
    """KV bytes per token with another width than n_kv_heads * head_dim."""
    return lambda config, *, dtype_bytes: 2 * config.n_layers * width(config) * dtype_bytes


def _stored(config: ModelConfig, kv_bytes_per_value: float) -> float:
    """KV bytes of one token of a full-attention model, unrounded."""
    return config.n_layers * cost.kv_values_per_layer(config) * kv_bytes_per_value


def _contexts(first: int, last: int) -> Callable:
    """Decode seconds summed from context prompt + `first` up to, not with, prompt + output + `last`."""

    def total(config, constants, *, prompt, output):
        line = cost.growth(config, constants)
        return sum(line(n) for n in range(prompt + first, prompt + output + last))

    return total


def _ratio(flops: Callable, moved: Callable) -> Callable:
    """An intensity counted by other rules, given W and F (weight bytes and FLOPs), R and S (KV bytes, attention FLOPs of one sequence), n."""

    def ratio(config, *, new_tokens, context, batch, dtype_bytes):
        F = cost.weight_flops(config, tokens=batch * new_tokens, logit_rows=batch)
        S = cost.attention_flops(config, new_tokens=new_tokens, context=context)
        W = cost.weight_bytes_per_step(config, dtype_bytes=dtype_bytes, batch=batch * new_tokens)
        return flops(F, S, batch) / moved(W, cost.kv_bytes(config, context=context, dtype_bytes=dtype_bytes), batch)

    return ratio


def _exercise(reference: Callable, marks: tuple[int, int, int], cases: Callable, statement: str, *mistakes: tuple[str, Callable],
              behind: Callable | None = None) -> Exercise:  # fmt: skip
    """marks: minutes, difficulty, importance."""
    return Exercise(statement, reference, cases, tuple(Mistake(*mistake) for mistake in mistakes), *marks, behind or reference)


# fmt: off
_ALL = (
    _exercise(cost.kv_bytes_per_token, (6, 2, 3), _kv_cases,
        "Write `kv_bytes_per_token(config, *, dtype_bytes)`: the bytes of K and V that one more token adds to the cache, over all layers, for one "
        "sequence. Mind which heads store anything.",
        ("query heads do not store K and V; kv heads do", _head_width(lambda c: c.n_heads * c.head_dim)),
        ("hidden is the width between layers; what is stored is n_kv_heads * head_dim wide", _head_width(lambda c: c.hidden)),
        ("hidden / n_heads is not always the size of a head; the config gives head_dim", _head_width(lambda c: c.n_kv_heads * c.hidden / c.n_heads)),
        ("half of it is missing: a token leaves a K and a V", _head_width(lambda c: c.kv_width / 2)),
        ("that is one layer; each of n_layers keeps its own K and V", _head_width(lambda c: c.kv_width / c.n_layers)),
        ("dtype_bytes is in bytes already; times 8 makes it bits", _head_width(lambda c: c.kv_width * 8))),
    _exercise(cost.step_time, (10, 3, 3), _step_cases,
        "Write `step_time(config, constants, *, context, batch, weight_bytes_per_value, kv_bytes_per_value)`: the seconds of one decode step. Both "
        "maxima matter: what bounds the weights need not bound attention.",
        ("the overhead is missing: a step pays c0 + c1*batch before it reads a byte", _step(lambda W, F, R, S, c, n: max(W, F) + max(R, S))),
        ("c1 is paid once per row: overhead_s takes the batch", lambda m, c, **k: cost.step_time(m, c, **k) - (k["batch"] - 1) * c.per_row_s),
        ("one step reads the weights once, whatever the batch", _step(lambda W, F, R, S, c, n: c + max(n * W, F) + max(R, S))),
        ("each sequence of the batch reads its own K and V", _step(lambda W, F, R, S, c, n: c + max(W, F) + max(R, S) / n)),
        ("arithmetic can be longer: a term is the maximum of bytes/bandwidth and flops/peak", _step(lambda W, F, R, S, c, n: c + W + R)),
        ("one maximum is not enough: the weights and the cache each have their own", _step(lambda W, F, R, S, c, n: c + max(W + R, F + S))),
        ("reads and arithmetic overlap: take the longer of the two, not their sum", _step(lambda *terms: sum(terms[:5]))),
        ("a step looks up one embedding row per sequence; it does not read every parameter", lambda m, c, **k: _step(
            lambda W, F, R, S, o, n: o + max(cost.parameters(m) * k["weight_bytes_per_value"] / c.weight_bytes_per_s, F) + max(R, S))(m, c, **k))),
    _exercise(cost.weight_bytes_per_step, (8, 2, 3), _drawn(11, ("smollm2-135m", "llama-2-7b", "llama-3.1-8b", "qwen3-4b", "llama-3.2-1b"),
                                                           dtype_bytes=(4, 2, 1), batch=(2, 16, 256)),
        "Write `weight_bytes_per_step(config, *, dtype_bytes, batch)`: the weight bytes that one decode step of a dense Llama-shaped model must read. A "
        "layer holds `cost.layer_parameters(config).total` values and the final norm `config.hidden`. What of the embedding, what of the output matrix?",
        ("the output matrix multiplies every token, also where it is tied to the embedding", lambda m, *, dtype_bytes, batch: cost.weight_bytes_per_step(
            m, dtype_bytes=dtype_bytes, batch=batch) - m.tied_embeddings * m.vocab_size * m.hidden * dtype_bytes),
        ("the embedding is a table: a step looks up one row per sequence and leaves the rest where it is", lambda m, *, dtype_bytes, batch: dtype_bytes * (
            cost.weight_bytes_per_step(m, dtype_bytes=1, batch=0) + m.vocab_size * m.hidden)),
        ("that is what the model stores; an untied embedding is stored and not read", lambda m, *, dtype_bytes, batch: cost.parameters(m) * dtype_bytes),
        ("one step reads the weights once for all its sequences", lambda m, *, dtype_bytes, batch: batch * cost.weight_bytes_per_step(m, dtype_bytes=dtype_bytes)),
        ("each sequence looks up an embedding row of its own", lambda m, *, dtype_bytes, batch: cost.weight_bytes_per_step(m, dtype_bytes=dtype_bytes))),
    _exercise(cost.kv_bytes, (6, 2, 2), _drawn(12, ("gpt2", "llama-3.1-8b", "mistral-7b", "gpt-oss-20b", "gpt-oss-120b", "gemma-2-9b", "gemma-3-4b",
                                                   "gemma-3-27b", "gemma-3-12b"), random_shapes=3, context=(100, 3000, 30_000), dtype_bytes=(4, 2, 1)),
        "Write `kv_bytes(config, *, context, dtype_bytes)`: the bytes of K and V that the next step of one sequence reads with `context` tokens in the "
        "cache. Of `config.n_layers` layers, `config.windowed_layers` see at most the last `config.window` tokens. "
        "`cost.kv_values_per_layer(config)` is what a token leaves in one layer.",
        ("a layer with a window reads no more than its window", lambda m, *, context, dtype_bytes: context * _stored(m, dtype_bytes)),
        ("only windowed_layers have the window; the others read every token", lambda m, *, context, dtype_bytes:
            (min(context, m.window) if m.window else context) * _stored(m, dtype_bytes)),
        ("a window is a limit: until it is full, a layer reads what is there", lambda m, *, context, dtype_bytes: cost.kv_bytes(
            m, context=context, dtype_bytes=dtype_bytes) + m.windowed_layers * max(0, m.window - context) * cost.kv_values_per_layer(m) * dtype_bytes),
        ("the layers with a window read too", lambda m, *, context, dtype_bytes:
            (m.n_layers - m.windowed_layers) * context * cost.kv_values_per_layer(m) * dtype_bytes)),
    _exercise(intercept_s, (8, 2, 3), _drawn(13, ("gpt2", "smollm2-135m", "llama-3.1-8b", "qwen3-4b"), constants=True, random_shapes=8,
                                             batch=(1, 4, 64), weight_bytes_per_value=(4, 2, 0.5625)),
        "Write `intercept_s(config, constants, *, batch, weight_bytes_per_value)`: a of t(n) = a + b·n, the seconds of a step that finds nothing in the "
        "cache. Three things are in it that no cached token changes.",
        ("the overhead is missing: c0 + c1*batch is paid at any length", _step(lambda W, F, R, S, c, n: max(W, F))),
        ("one step reads the weights once, whatever the batch", _step(lambda W, F, R, S, c, n: c + max(n * W, F))),
        ("beyond the ridge the arithmetic of the weights is longer than reading them", _step(lambda W, F, R, S, c, n: c + W)),
        ("reads and arithmetic overlap: take the longer of the two, not their sum", _step(lambda W, F, R, S, c, n: c + W + F)),
        ("weights are read at weight_bytes_per_s; kv_bytes_per_s is for the cache", lambda m, c, **k: intercept_s(m, replace(c, weight_bytes_per_s=c.kv_bytes_per_s), **k)), behind=cost.step_time),
    _exercise(slope_s_per_token, (8, 2, 3), _drawn(14, ("gpt2", "smollm2-135m", "llama-3.1-8b", "llama-3.1-70b"), constants=True, random_shapes=8,
                                                   batch=(1, 4, 64), kv_bytes_per_value=(4, 2, 0.5)),
        "Write `slope_s_per_token(config, constants, *, batch, kv_bytes_per_value)`: b of t(n) = a + b·n, the seconds that one more cached token in each "
        "sequence adds to a step. No weight is in it.",
        ("each sequence of the batch has a cache of its own: b grows with the batch", _step(lambda W, F, R, S, c, n: max(R, S) / n, context=1)),
        ("attention's arithmetic can be longer than its reads: b has a maximum too", _step(lambda W, F, R, S, c, n: R, context=1)),
        ("reads and arithmetic overlap: take the longer of the two, not their sum", _step(lambda W, F, R, S, c, n: R + S, context=1)),
        ("K and V are read at kv_bytes_per_s, not at the rate of the weights", lambda m, c, **k: slope_s_per_token(m, replace(c, kv_bytes_per_s=c.weight_bytes_per_s), **k)),
        ("a token costs its K and V, not a share of the weights", _step(lambda W, F, R, S, c, n: W, context=1)), behind=cost.step_time),
    _exercise(cost.crossover_tokens, (6, 2, 3), _drawn(15, ("gpt2", "smollm2-135m", "llama-2-7b", "llama-3.1-8b", "qwen3-4b"), batch=(1, 4, 64),
                                                       weight_bytes_per_value=(4, 2, 0.5625), kv_bytes_per_value=(4, 2, 1)),
        "Write `crossover_tokens(config, *, batch, weight_bytes_per_value, kv_bytes_per_value)`: the context at which a step reads as many bytes of K and "
        "V as of weights, for a model without windows. With sixteen sequences, is it later or sooner?",
        ("every sequence reads its own cache: with a batch the crossover comes sooner", lambda m, **k: k["batch"] * cost.crossover_tokens(m, **k)),
        ("K and V have a format of their own: kv_bytes_per_value", lambda m, **k: cost.crossover_tokens(m, **{**k, "kv_bytes_per_value": k["weight_bytes_per_value"]})),
        ("that is the cache of one layer; every layer keeps K and V", lambda m, **k: m.n_layers * cost.crossover_tokens(m, **k)),
        ("query heads do not store K and V; kv heads do", lambda m, **k: m.n_kv_heads / m.n_heads * cost.crossover_tokens(m, **k))),
    _exercise(cost.visible_pairs, (7, 2, 2), _pair_cases,
        "Write `visible_pairs(*, new_tokens, context, window)`: how many (query, key) pairs attention computes when the last `new_tokens` of `context` "
        "tokens are the queries. A token sees itself and those before it; with a window other than 0, at most `window` tokens, itself included.",
        ("half of a prompt's square is hidden: a token does not see those after it", lambda *, new_tokens, context, window: new_tokens * context),
        ("the tokens in front of the queries are seen too", lambda *, new_tokens, context, window: new_tokens * (new_tokens + 1) / 2),
        ("a half holds for a prompt with nothing in front of it; one decode step sees all its context", lambda *, new_tokens, context, window: new_tokens * context / 2),
        ("a token sees itself too", lambda **k: cost.visible_pairs(**k) - k["new_tokens"]),
        ("a query sees at most `window` keys", lambda **k: cost.visible_pairs(**{**k, "window": 0})),
        ("the window fills one token at a time: the first queries may see fewer", lambda **k: k["new_tokens"] * (min(k["window"], k["context"]) or k["context"]))),
    _exercise(decode_s, (9, 3, 3), _drawn(17, ("gpt2", "smollm2-135m", "llama-3.1-8b"), constants=True, random_shapes=7, prompt=(20, 100, 500), output=(50, 300, 1000)),
        "Write `decode_s(config, constants, *, prompt, output)`: the seconds of all decode steps of one request, weights and cache at 2 bytes per value. "
        "The first of `output` tokens comes from prefill. A loop over t(n) will do; `cost.visible_pairs` does it without one.",
        ("the first token comes from prefill: output - 1 steps are left", _contexts(1, 1)),
        ("the first step reads prompt + 1 tokens: it writes its own K and V first", _contexts(0, 0)),
        ("each step reads one token more than the one before: sum t(n)", lambda m, c, *, prompt, output: (output - 1) * cost.growth(m, c)(prompt + 1)),
        ("not every step is as long as the last", lambda m, c, *, prompt, output: (output - 1) * cost.growth(m, c)(prompt + output - 1)),
        ("the prompt stays in the cache and every step reads it", lambda m, c, *, prompt, output: sum(
            map(cost.growth(m, c), range(1, output)))), behind=cost.request_time),
    _exercise(planning.amdahl, (4, 1, 3), lambda: [Case(f"share={share}, speedup={speedup}", (share,), {"speedup": speedup})
            for share in (0.0001, 0.05, 0.3, 0.5, 0.9, 0.999) for speedup in (2, 10)],
        "Write `amdahl(share, *, speedup)`: how many times faster the whole gets when the part that takes `share` of the time becomes `speedup` times faster.",
        ("that is the share of the time that is left; how many times faster is one over it", lambda share, *, speedup: 1 - share + share / speedup),
        ("that part still takes share / speedup; only a free one takes nothing", lambda share, *, speedup: 1 / (1 - share)),
        ("it is `share` that gets faster, and the rest that stays", lambda share, *, speedup: 1 / (share + (1 - share) / speedup)),
        ("times add up, speeds do not", lambda share, *, speedup: 1 - share + share * speedup)),
    _exercise(cost.weight_flops, (6, 2, 3), _drawn(21, ("gpt2", "smollm2-135m", "llama-3.1-8b", "mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b", "deepseek-v3"),
                                                   tokens=(16, 512, 2048), logit_rows=(1, 4, 16)),
        "Write `weight_flops(config, *, tokens, logit_rows)`: the FLOP of every product with a weight matrix when a pass takes `tokens` tokens and makes "
        "`logit_rows` rows of logits. `cost.active_matrix_parameters(config)` counts the matrix values that one token meets inside the layers.",
        ("a multiply and an add are 2 FLOP", lambda m, **k: cost.weight_flops(m, **k) / 2),
        ("6 FLOP per weight is training; forward it is 2", lambda m, **k: 3 * cost.weight_flops(m, **k)),
        ("the output matrix runs on logit_rows rows, not on every token", lambda m, *, tokens, logit_rows: cost.weight_flops(m, tokens=tokens, logit_rows=tokens)),
        ("a token passes through its active experts, not through all", lambda m, **k: cost.weight_flops(replace(m, moe_experts_active=m.moe_experts_total), **k)),
        ("the embedding is looked up, not multiplied", lambda m, *, tokens, logit_rows: cost.weight_flops(m, tokens=tokens, logit_rows=tokens + logit_rows)),
        ("the output matrix is missing", lambda m, *, tokens, logit_rows: cost.weight_flops(m, tokens=tokens, logit_rows=0))),
    _exercise(cost.intensity, (8, 2, 3), _pass_cases,
        "Write `intensity(config, *, new_tokens, context, batch, dtype_bytes)`: the FLOP per byte of one pass of `batch` sequences, each with `new_tokens` "
        "queries against `context` tokens. It makes one row of logits per sequence; weights and cache have the same format.",
        ("K and V are bytes of the pass too", _ratio(lambda F, S, n: F + n * S, lambda W, R, n: W)),
        ("each sequence reads its own K and V", _ratio(lambda F, S, n: F + n * S, lambda W, R, n: W + R)),
        ("one pass reads the weights once for all its sequences", _ratio(lambda F, S, n: F + n * S, lambda W, R, n: n * (W + R))),
        ("attention is arithmetic too", _ratio(lambda F, S, n: F, lambda W, R, n: W + n * R)),
        ("each sequence has its own attention", _ratio(lambda F, S, n: F + S, lambda W, R, n: W + n * R)),
        ("upside down: FLOP per byte", lambda m, **k: 1 / cost.intensity(m, **k))),
    _exercise(ridge_batch, (8, 3, 3), lambda: _cases([(one.arguments[0], _random_card(random.Random(i))) for i, one in enumerate(_kv_cases())]),
        "Write `ridge_batch(config, card)`: the batch at which the arithmetic of the weights (`card.gemm_flops_per_s`) takes as long as reading them at the "
        "read roof (`card.read_bytes_per_s`). Read what a step of one sequence reads; leave K and V out. `catalog.dtype_bytes(card.dtype)` is the format.",
        ("that is the ridge in FLOP per byte; how many FLOP does a sequence bring, and how many bytes does a step read?", lambda m, card: card.ridge_flops_per_byte()),
        ("the ridge is where the two roofs meet: the read roof, not BW_w", lambda m, card: ridge_batch(m, replace(card, read_bytes_per_s=card.matvec_bytes_per_s))),
        ("those are values; each one is dtype_bytes(card.dtype) bytes", lambda m, card: ridge_batch(m, card) / catalog.dtype_bytes(card.dtype)),
        ("a multiply and an add are 2 FLOP", lambda m, card: 2 * ridge_batch(m, card)),
        ("upside down: the seconds of reading over the seconds of one sequence's arithmetic", lambda m, card: 1 / ridge_batch(m, card)),
        behind=planning.ridge_batch),
    _exercise(cost.expected_experts, (7, 2, 2), lambda: _cases([(catalog.model(name), tokens) for tokens in (1, 8, 64) for name in (
            "mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-20b", "deepseek-v3")], ["tokens"]),
        "Write `expected_experts(config, *, tokens)`: how many different routed experts of one layer `tokens` tokens touch, where each picks "
        "`config.moe_experts_active` different ones of `config.moe_experts_total`, all equally likely.",
        ("tokens pick the same expert by chance: k · tokens counts it twice", lambda m, *, tokens: min(m.moe_experts_total, tokens * m.moe_experts_active)),
        ("that is one token; a batch touches more", lambda m, *, tokens: m.moe_experts_active),
        ("a few tokens do not touch every expert", lambda m, *, tokens: m.moe_experts_total),
        ("those are the experts that no token touched", lambda m, *, tokens: m.moe_experts_total - cost.expected_experts(m, tokens=tokens)),
        ("one token's experts are all different: it misses an expert with probability 1 - k/E", lambda m, *, tokens: m.moe_experts_total * (
            1 - (1 - 1 / m.moe_experts_total) ** (tokens * m.moe_experts_active)))),
    _exercise(planning.sequences_that_fit, (8, 2, 3), _drawn(23, ("smollm2-135m", "llama-2-7b", "llama-3.1-8b", "qwen3-4b", "mixtral-8x7b", "qwen3-30b-a3b"),
            memory_bytes=(141e9, 192e9), context=(1000, 8000, 32_000), weight_bytes_per_value=(2, 1), kv_bytes_per_value=(2, 1), reserved_fraction=(0.1, 0.2)),
        "Write `sequences_that_fit(config, *, memory_bytes, context, weight_bytes_per_value, kv_bytes_per_value, reserved_fraction)`: how many sequences of "
        "`context` tokens have room beside the weights when `reserved_fraction` of the memory is left free. `cost.parameters(config)` values are stored.",
        ("the weights are in the same memory", lambda m, *, memory_bytes, context, weight_bytes_per_value, kv_bytes_per_value, reserved_fraction:
            memory_bytes * (1 - reserved_fraction) // cost.kv_bytes(m, context=context, dtype_bytes=kv_bytes_per_value)),
        ("all sequences share one copy of the weights", lambda m, *, memory_bytes, context, weight_bytes_per_value, kv_bytes_per_value, reserved_fraction: memory_bytes * (
            1 - reserved_fraction) // (cost.parameters(m) * weight_bytes_per_value + cost.kv_bytes(m, context=context, dtype_bytes=kv_bytes_per_value))),
        ("the reserve is a part of the whole memory, not of what the weights leave", lambda m, *, reserved_fraction, **k: planning.sequences_that_fit(m, **{
            **k, "memory_bytes": k["memory_bytes"] - reserved_fraction * (k["memory_bytes"] - cost.parameters(m) * k["weight_bytes_per_value"]), "reserved_fraction": 0})),
        ("every expert is stored, also those that a step does not touch", lambda m, **k: planning.sequences_that_fit(
            replace(m, moe_experts_total=m.moe_experts_active), **k)),
        ("a part of a sequence does not fit: round down", lambda m, **k: planning.sequences_that_fit(m, **k) + 1),
        ("K and V have a format of their own: kv_bytes_per_value", lambda m, **k: planning.sequences_that_fit(m, **{**k, "kv_bytes_per_value": k["weight_bytes_per_value"]}))),
    _exercise(split_step_s, (9, 3, 2), _drawn(26, ("llama-3.1-8b", "llama-3.1-70b", "qwen3-4b", "smollm2-135m"), constants=True, random_shapes=8,
            devices=(1, 2, 8), context=(1000, 8000), exchange_s=(5e-6, 2e-5)),
        "Write `split_step_s(config, constants, *, devices, context, exchange_s)`: the seconds of a step of one sequence when every matrix is cut over "
        "`devices`, and the cache by whole heads, so over at most `config.n_kv_heads`. More than one device exchange results twice in each layer, "
        "`exchange_s` each time; `cost.step_time(config, constants, context=context)` is the step of one device (with `context=0` it has no cache to read), "
        "and `constants.overhead_s(config)` is what no device can share.",
        ("the overhead is paid on every device at once and does not shrink", lambda m, c, **k: split_step_s(m, c, **k) - (1 - 1 / k["devices"]) * c.overhead_s(m)),
        ("each layer has two exchanges, one after attention and one after the MLP", lambda m, c, **k: split_step_s(m, c, **{**k, "exchange_s": k["exchange_s"] / 2})),
        ("K and V are cut by whole heads: devices beyond the KV heads hold them twice", lambda m, c, *, devices, context, exchange_s: split_step_s(
            m, c, devices=devices, context=0, exchange_s=exchange_s) + (cost.step_time(m, c, context=context) - cost.step_time(m, c, context=0)) / devices),
        ("the exchanges are missing", lambda m, c, **k: split_step_s(m, c, **{**k, "exchange_s": 0})),
        ("one device exchanges with nobody", lambda m, c, **k: split_step_s(m, c, **k) + (k["devices"] == 1) * 2 * m.n_layers * k["exchange_s"]),
        ("an exchange is one for all devices at once; its seconds count once", lambda m, c, **k: split_step_s(m, c, **{**k, "exchange_s": k["exchange_s"] * k["devices"]})),
        ("that step is no shorter: every device reads only its part of the bytes", lambda m, c, *, devices, context, exchange_s:
            cost.step_time(m, c, context=context) + (devices > 1) * 2 * m.n_layers * exchange_s), behind=planning.tensor_split_step),
    _exercise(answer_dollars, (7, 2, 3), _drawn(25, ("llama-3.1-8b", "qwen3-4b", "smollm2-135m"), constants=True, random_shapes=8, prompt=(100, 1000),
            reasoning=(200, 1000, 5000), answer=(100, 300), batch=(1, 8, 32), dollars_per_hour=(0.5, 3)),
        "Write `answer_dollars(config, constants, *, prompt, reasoning, answer, batch, dollars_per_hour)`: the dollars of one answer when the device costs "
        "`dollars_per_hour` and `batch` such requests share it. The user sees `answer` tokens; `reasoning` tokens come before them and are hidden. "
        "`cost.request_time(config, constants, catalog.Workload(prompt_tokens=…, output_tokens=…, batch=batch))` has `total_s`.",
        ("hidden tokens take the same steps and cost the same", lambda m, c, **k: answer_dollars(m, c, **{**k, "reasoning": 0})),
        ("the requests of a batch share the device and its price", lambda m, c, **k: k["batch"] * answer_dollars(m, c, **k)),
        ("an hour has 3,600 seconds", lambda m, c, **k: 60 * answer_dollars(m, c, **k)),
        ("a step with more sequences takes longer: time the whole batch", lambda m, c, **k: answer_dollars(m, c, **{**k, "batch": 1}) / k["batch"]),
        ("prefill is on the bill too", lambda m, c, *, prompt, reasoning, answer, batch, dollars_per_hour: cost.request_time(m, c, Workload(
            prompt_tokens=prompt, output_tokens=reasoning + answer, batch=batch)).decode_s * dollars_per_hour / 3600 / batch), behind=planning.answer_cost),
    _exercise(int8_step_s, (6, 2, 3), _drawn(31, ("gpt2", "smollm2-135m", "llama-3.1-8b", "qwen3-4b"), constants=True, random_shapes=8,
                                             context=(100, 4000, 30_000), kv_bytes_per_value=(4, 2)),
        "Write `int8_step_s(config, constants, *, context, kv_bytes_per_value)`: the seconds of one decode step of one sequence when the weights are "
        "stored in 1 byte per value and K and V in `kv_bytes_per_value`. Leave the scales out; `cost.step_time` knows the rest.",
        ("K and V are not in 8 bits: they keep kv_bytes_per_value", lambda m, c, *, context, kv_bytes_per_value: int8_step_s(m, c, context=context, kv_bytes_per_value=1)),
        ("only the reading of the weights gets shorter, not the overhead and not K and V", lambda m, c, **k: cost.step_time(m, c, weight_bytes_per_value=4, **k) / 4),
        ("int8 is 1 byte per value; without weight_bytes_per_value the formula takes 2", lambda m, c, **k: cost.step_time(m, c, **k)),
        ("the overhead is missing: no format makes a call cheaper", lambda m, c, **k: int8_step_s(m, c, **k) - c.overhead_s(m)),
        ("K and V of the context are read too", lambda m, c, *, context, kv_bytes_per_value: int8_step_s(m, c, context=0, kv_bytes_per_value=kv_bytes_per_value)),
        behind=cost.step_time),
    _exercise(step_factor, (7, 2, 3), _drawn(32, ("gpt2", "smollm2-135m", "llama-3.1-8b", "llama-3.1-70b"), constants=True, random_shapes=8,
                                             context=(100, 4000, 30_000), a_factor=(0.3, 0.5, 1.0), b_factor=(0.25, 1.0, 2.5)),
        "Write `step_factor(config, constants, *, context, a_factor, b_factor)`: after / before of the seconds of a step with `context` tokens in the cache, "
        "when a technique multiplies a by `a_factor` and b by `b_factor`. `cost.growth(config, constants)` has `a_s` and `b_s_per_token`.",
        ("a and b·n are no equal shares of a step: weigh each factor by its seconds", lambda m, c, *, context, a_factor, b_factor: (a_factor + b_factor) / 2),
        ("a and b·n add up; the factors of two parts do not multiply", lambda m, c, *, context, a_factor, b_factor: a_factor * b_factor),
        ("the cache's part of the step has a factor of its own", lambda m, c, *, context, a_factor, b_factor: step_factor(m, c, context=context, a_factor=a_factor, b_factor=a_factor)),
        ("b is paid for each of the `context` tokens", lambda m, c, *, context, **k: step_factor(m, c, context=1, **k)),
        ("that is before / after: how many times faster", lambda m, c, **k: 1 / step_factor(m, c, **k)), behind=cost.growth),
    _exercise(expanded_kv_bytes, (6, 2, 2), _drawn(33, ("smollm2-135m", "llama-3.1-8b", "llama-3.1-70b", "qwen3-4b"), random_shapes=8,
                                                   context=(100, 4000, 30_000), dtype_bytes=(4, 2, 1)),
        "Write `expanded_kv_bytes(config, *, context, dtype_bytes)`: the bytes of K and V that one step of one sequence moves when every KV head is first "
        "copied once for each query head that uses it. `cost.kv_bytes(config, context=context, dtype_bytes=dtype_bytes)` is read by a step that copies nothing.",
        ("the copies must be made: K and V are read and the copies written before attention reads them", lambda m, **k: m.n_heads / m.n_kv_heads * cost.kv_bytes(m, **k)),
        ("attention then reads the copies", lambda m, **k: (1 + m.n_heads / m.n_kv_heads) * cost.kv_bytes(m, **k)),
        ("what is copied has to be read first", lambda m, **k: 2 * m.n_heads / m.n_kv_heads * cost.kv_bytes(m, **k)),
        ("a KV head is copied for the query heads of its group: n_heads / n_kv_heads", lambda m, **k: (1 + 2 * m.n_heads) * cost.kv_bytes(m, **k)),
        ("every layer copies its own K and V", lambda m, **k: expanded_kv_bytes(m, **k) / m.n_layers), behind=cost.kv_bytes),
    _exercise(kept_drafts, (9, 2, 3), _draft_cases,
        "Write `kept_drafts(drafts, *, p, q, uniforms)`: how many of a round's drafts are kept. `drafts` are token ids; of the draft at place i, `q[i]` is the "
        "distribution it was drawn from, `p[i]` the target's there and `uniforms[i]` a random number, at least 0 and less than 1. A draft x is kept with "
        "probability min(1, p(x) / q(x)).",
        ("what stands behind a rejected draft was guessed after a token that is not there: stop at the first", _kept(lambda p, q, u: u * q < p, to_the_first=False)),
        ("a draft that q says more often than p is kept sometimes, not never: with probability p/q", _kept(lambda p, q, u: p >= q)),
        ("q has thrown its dice already: hold the number against p/q, not against p", _kept(lambda p, q, u: u < p)),
        ("upside down: p over q", _kept(lambda p, q, u: u * p < q)),
        ("a number below p/q keeps the draft", _kept(lambda p, q, u: u * q >= p)),
        ("a number may be 0, and what the target never says is never kept: below p/q, not at it", _kept(lambda p, q, u: u * q <= p)),
        ("each place has distributions of its own", lambda drafts, *, p, q, uniforms: kept_drafts(drafts, p=[p[0]] * len(p), q=[q[0]] * len(q), uniforms=uniforms)),
        ("the token behind the kept ones is the target's own, not a draft", lambda drafts, **k: kept_drafts(drafts, **k) + 1)),
    _exercise(replacement, (7, 2, 3), _replacement_cases,
        "Write `replacement(token, *, p, q)`: the probability that `token` is what takes the place of a rejected draft, so that the token written is distributed "
        "as `p` whatever `q` is. Kept drafts have brought min(p, q) of each token; what is missing?",
        ("that is p in all; the kept drafts have brought a part of it already", lambda token, *, p, q: p[token]),
        ("these do not add up to 1: a draft that is rejected is always replaced", _replaced(lambda p, q: max(0.0, p - q), lambda left, kept: 1)),
        ("of a token that q says often enough nothing is missing, and never less than nothing", _replaced(lambda p, q: p - q, lambda left, kept: 1 - kept)),
        ("upside down: what p has more than q", _replaced(lambda p, q: max(0.0, q - p))),
        ("what the kept drafts have brought is missing no more: p - q, not p", _replaced(lambda p, q: p if p > q else 0.0)),
        ("divide by what is missing, not by what was kept", _replaced(lambda p, q: max(0.0, p - q), lambda left, kept: kept)),
        ("what q says too often is not missing", _replaced(lambda p, q: abs(p - q))), behind=speculation.overlap),
    _exercise(tokens_per_round, (6, 2, 3), _round_cases,
        "Write `tokens_per_round(acceptance, k)`: the tokens that a round of `k` drafts writes on average, when each draft that is tested is kept with "
        "probability `acceptance`. A round always writes one token of the target's own. Both 0 and 1 are probabilities.",
        ("a draft is tested only if all those before it were kept", lambda acceptance, k: 1 + k * acceptance),
        ("behind the kept drafts stands a token of the target's own", lambda acceptance, k: speculation.expected_tokens(acceptance, k) - 1),
        ("one kept draft counts too, not only the whole round", lambda acceptance, k: 1 + k * acceptance**k),
        ("there are k drafts, and so k + 1 terms", lambda acceptance, k: speculation.expected_tokens(acceptance, max(0, k - 1))),
        ("that would be all of them kept", lambda acceptance, k: k + 1), behind=speculation.expected_tokens),
    _exercise(break_even, (10, 3, 3), _even_cases,
        "Write `break_even(k, *, draft_cost, pass_cost)`: the acceptance at which a round of `k` drafts takes as long per token as plain decoding. A draft costs "
        "`draft_cost` steps of the target, the pass that reads them all `pass_cost`. No formula gives it: halve an interval until it is right to eight digits.",
        ("a draft counts only if all those before it were kept: 1 + a + … + a^k, not 1 + k·a", lambda k, *, draft_cost, pass_cost: (k * draft_cost + pass_cost - 1) / k),
        ("k ends the sum: 1 / (1 - a) is a round without end", lambda k, *, draft_cost, pass_cost: 1 - 1 / (k * draft_cost + pass_cost)),
        ("the pass over k + 1 tokens is paid too, at its own price", _even(lambda k, draft, reading: k * draft + 1)),
        ("the drafts are made one after the other: k of them", _even(lambda k, draft, reading: draft + reading)),
        ("drafts are not free", _even(lambda k, draft, reading: reading)),
        ("the target's own token counts too", _even(lambda k, draft, reading: k * draft + reading + 1)),
        ("k drafts, not k + 1: the draft does not read its last one", _even(lambda k, draft, reading: (k + 1) * draft + reading)),
        ("the pass is one for all drafts", _even(lambda k, draft, reading: k * (draft + reading))), behind=speculation.acceptance_for),
    _exercise(drafts_to_ask, (9, 3, 3), _machine_cases,
        "Write `drafts_to_ask(acceptance, *, draft_s, pass_s)`: the K that writes the most tokens per second, where `draft_s` is the seconds of one draft and "
        "`pass_s[k]` those of a pass over the last token and k drafts. `pass_s[0]` is the plain step; where no K gains, the answer is 0.",
        ("tokens per second, not per round: the longest round writes the most", _asked(lambda a, k, draft, reading: k)),
        ("K = 0 is a choice too: where no round gains, do not speculate", _asked(
            lambda a, k, draft, reading: speculation.expected_tokens(a, k) / (k * draft + reading[k]), least=1)),
        ("drafts are not free", _asked(lambda a, k, draft, reading: speculation.expected_tokens(a, k) / reading[k])),
        ("the drafts are made one after the other: k of them", _asked(lambda a, k, draft, reading: speculation.expected_tokens(a, k) / ((k > 0) * draft + reading[k]))),
        ("a longer pass takes longer: pass_s[k], not pass_s[0]", _asked(lambda a, k, draft, reading: speculation.expected_tokens(a, k) / (k * draft + reading[0]))),
        ("a draft counts only if all those before it were kept", _asked(lambda a, k, draft, reading: (1 + k * a) / (k * draft + reading[k]))),
        ("the target's own token counts too", _asked(
            lambda a, k, draft, reading: (speculation.expected_tokens(a, k) - 1) / (k * draft + reading[k]) if k else 1 / reading[0])),
        ("that still gains, but another K gains more", lambda acceptance, *, draft_s, pass_s: max(
            k for k, taken in enumerate(pass_s) if not k or speculation.expected_tokens(acceptance, k) * pass_s[0] > k * draft_s + taken)), behind=speculation.best_k),
    _exercise(scheduler.pages_for, (4, 1, 3), lambda: _cases([(tokens, size) for size in (1, 4, 16) for tokens in (0, 1, 15, 16, 17)], ["page_tokens"]),
        "Write `pages_for(tokens, *, page_tokens)`: how many pages of `page_tokens` slots hold `tokens` tokens of one sequence.",
        ("a page that is used in part is held whole: round up", lambda tokens, *, page_tokens: tokens // page_tokens),
        ("a full last page needs no empty one behind it", lambda tokens, *, page_tokens: tokens // page_tokens + 1),
        ("a page is given whole or not at all", lambda tokens, *, page_tokens: tokens / page_tokens),
        ("no token, no page", lambda tokens, *, page_tokens: max(1, scheduler.pages_for(tokens, page_tokens=page_tokens))),
        ("those are slots; a page has page_tokens of them", lambda tokens, *, page_tokens: scheduler.pages_for(tokens, page_tokens=page_tokens) * page_tokens)),
    _exercise(scheduler.slots_needed, (5, 2, 3), lambda: _cases([(read, written) for read in (1, 12, 1000) for written in (0, 1, 4, 10_000)],
                                                                ["prompt_tokens", "max_tokens"]),
        "Write `slots_needed(*, prompt_tokens, max_tokens)`: the cache slots that a request needs from its first token to its last. Which token is "
        "written and never read? A request that may write 0 tokens still reads its prompt.",
        ("no step follows the last token: its K and V are never written", lambda *, prompt_tokens, max_tokens: prompt_tokens + max_tokens),
        ("with max_tokens 0 the prompt still needs all its slots", lambda *, prompt_tokens, max_tokens: prompt_tokens + max_tokens - 1),
        ("what it writes goes into the cache too", lambda *, prompt_tokens, max_tokens: prompt_tokens),
        ("the prompt stays in the cache to the end", lambda *, prompt_tokens, max_tokens: max(max_tokens, 1) - 1),
        ("prompt and output lie behind each other: add them", lambda *, prompt_tokens, max_tokens: max(prompt_tokens, max_tokens))),
    _exercise(unused_bytes, (6, 2, 3), _token_cases(44, 4000, 5, page_tokens=(16, 256, 4096), token_bytes=(36_864, 131_072)),
        "Write `unused_bytes(contexts, *, page_tokens, token_bytes)`: the bytes of K and V that are reserved and hold no token, for sequences of these "
        "contexts in pages of `page_tokens`. A page of as many tokens as a request may ever have is a contiguous cache.",
        ("that is what is reserved; take off what is used", lambda contexts, *, page_tokens, token_bytes: sum(
            scheduler.pages_for(held, page_tokens=page_tokens) for held in contexts) * page_tokens * token_bytes),
        ("sequences do not share a page: round up for each of them", lambda contexts, *, page_tokens, token_bytes: (
            scheduler.pages_for(sum(contexts), page_tokens=page_tokens) * page_tokens - sum(contexts)) * token_bytes),
        ("half a page is the average; count what these sequences leave", lambda contexts, *, page_tokens, token_bytes: len(contexts) * page_tokens / 2 * token_bytes),
        ("those are slots; each is token_bytes", lambda contexts, *, page_tokens, token_bytes: unused_bytes(contexts, page_tokens=page_tokens, token_bytes=1)),
        ("that is the used part of each last page", lambda contexts, *, page_tokens, token_bytes: sum(held % page_tokens for held in contexts) * token_bytes),
        behind=scheduler.pages_for),
    _exercise(admitted, (12, 3, 3), _queue_cases,
        "Write `admitted(queue, *, free_pages, page_tokens, reserve)`: how many requests, from the head of the queue on, start now. Each is a pair: the "
        "tokens it has, all of which need pages before it starts, and the tokens it may still write. With `reserve=\"prompt\"` only the first count; with "
        "`reserve=\"full\"` every slot that it may need. The queue is served in order.",
        ("nobody overtakes: a large request that is passed by small ones may wait for ever", _started(_pages_needed, overtakes=True)),
        ("what one request was given is not free for the next", _started(_pages_needed, gives=False)),
        ("pages are not shared: the rest of one request's last page is of no use to another",
            lambda queue, **k: _started(lambda tokens, left, reserve, size: tokens if reserve == "prompt" else tokens + left - 1)(
                queue, **{**k, "free_pages": k["free_pages"] * k["page_tokens"]})),
        ("reserve=\"full\" wants pages for what it may still write too", lambda queue, **k: admitted(queue, **{**k, "reserve": "prompt"})),
        ("reserve=\"prompt\" wants no page for what it has not written", lambda queue, **k: admitted(queue, **{**k, "reserve": "full"})),
        ("the last token it writes needs no slot", _started(lambda tokens, left, reserve, size: _pages_needed(tokens, left + 1, reserve, size))),
        ("the last free page may be given away", _started(_pages_needed, last=False)), behind=scheduler.admits),
    _exercise(static_occupancy, (8, 2, 3), _token_cases(45, 900, 24, batch=(2, 4, 8, 12)),
        "Write `static_occupancy(outputs, *, batch)`: how many sequences write a token in a mean decode step, when requests of these output lengths are "
        "served in static batches: the first `batch` of them, all to the end of the longest, then the next. The first token of each comes from prefill.",
        ("batches last unequally long: add up tokens and steps before you divide", lambda outputs, *, batch: sum(
            static_occupancy(outputs[i : i + batch], batch=batch) for i in range(0, len(outputs), batch)) * batch / len(outputs)),
        ("the first token comes from prefill: output - 1 steps", lambda outputs, *, batch: static_occupancy([output + 1 for output in outputs], batch=batch)),
        ("a batch lasts until its own longest ends, not the longest of all", lambda outputs, *, batch: batch * sum(
            output - 1 for output in outputs) / len(outputs) / (max(outputs) - 1)),
        ("that is the share of the batch; times `batch` it is sequences", lambda outputs, *, batch: static_occupancy(outputs, batch=batch) / batch),
        ("the queue is served as it comes, not sorted by length", lambda outputs, *, batch: static_occupancy(sorted(outputs), batch=batch)),
        ("an ended row is computed on and writes nothing", lambda outputs, *, batch: batch)),
    _exercise(simulator.mean_context, (8, 3, 3), _arrival_cases,
        "Write `mean_context(arrivals)`: the tokens in the cache of a sequence, in the mean over all decode steps of all requests. A request has "
        "`prompt_tokens` and `output_tokens`; its first step reads prompt + 1 tokens and its last, the (output - 1)th, prompt + output - 1.",
        ("a long answer is in the batch for longer: its steps count, not its request", _steps_weighted(lambda read, written: read + written / 2, lambda _: 1)),
        ("that is its length at the end; a sequence grows to it", _steps_weighted(lambda read, written: read + written - 1)),
        ("the prompt is read by each step", _steps_weighted(lambda read, written: written / 2)),
        ("what it has written is read by each step too", _steps_weighted(lambda read, written: read)),
        ("the steps are output - 1: the first token comes from prefill", _steps_weighted(
            lambda read, written: read + (written + 1) / 2, lambda output: output))),
    _exercise(tpot_s, (6, 2, 3), _event_cases,
        "Write `tpot_s(token_s, *, output_tokens)`: the time per output token of one answer, in seconds. `token_s` are the times at which events with "
        "text arrived, one or several tokens each; `output_tokens` is the server's count, at least 2.",
        ("an event may bring several tokens: count tokens, not events", lambda token_s, *, output_tokens: (token_s[-1] - token_s[0]) / (len(token_s) - 1)),
        ("between n tokens there are n - 1 times", lambda token_s, *, output_tokens: (token_s[-1] - token_s[0]) / output_tokens),
        ("the first token is prefill's: the time before it is TTFT", lambda token_s, *, output_tokens: token_s[-1] / (output_tokens - 1)),
        ("with TTFT inside and n below the line it is the mean of the whole request, not of decode", lambda token_s, *, output_tokens: token_s[-1] / output_tokens),
        ("that is tokens per second", lambda token_s, *, output_tokens: (output_tokens - 1) / (token_s[-1] - token_s[0])), behind=RequestRecord.tpot_s.fget),
    _exercise(felt_ttft_s, (7, 2, 3), _record_cases,
        "Write `felt_ttft_s(records)`: the mean time to first token of the completed requests, in seconds, as their users felt it. Each record has "
        "`scheduled_s`, when the workload wanted it sent, `sent_s`, when the client sent it, `token_s`, when its tokens came, and `complete`.",
        ("a client that waits before it sends has queued the user: count from the schedule", _mean_over(lambda one: one.token_s[0] - one.sent_s)),
        ("the first token ends the wait, not the last", _mean_over(lambda one: one.token_s[-1] - one.scheduled_s)),
        ("hidden reasoning is tokens too; the first answer token is another word: time to first answer",
            _mean_over(lambda one: (one.first_answer_s or one.token_s[0]) - one.scheduled_s)),
        ("a request that failed or was cancelled has no latency", _mean_over(lambda one: one.token_s[0] - one.scheduled_s, every=True)),
        ("the mean, not the median", lambda records: percentiles([one.ttft_s for one in records if one.complete]).p50_s), behind=summarise_requests),
    _exercise(roof_share, (9, 3, 3), _drawn(49, ("gpt2", "smollm2-135m", "llama-3.1-8b", "qwen3-30b-a3b", "llama-3.1-70b"), tokens_per_s=(20, 150, 3000),
                                            batch=(1, 2, 8, 64), context=(500, 8000), bandwidth_bytes_per_s=(120e9, 3.35e12)),
        "Write `roof_share(config, *, tokens_per_s, batch, context, bandwidth_bytes_per_s)`: the share of the memory's bandwidth that a decode rate needs "
        "when `batch` sequences with `context` tokens each in their caches write `tokens_per_s` together. Weights and cache are in 16 bits. "
        "`cost.weight_bytes_per_step(config, batch=batch)` and `cost.kv_bytes(config, context=context)` count the bytes; above 1 the rate is impossible.",
        ("a pass writes one token for each sequence: tokens_per_s / batch passes a second", _share(lambda rate, n: rate, lambda W, K, n: W + n * K)),
        ("K and V are read too", _share(lambda rate, n: rate / n, lambda W, K, n: W)),
        ("each sequence reads its own K and V", _share(lambda rate, n: rate / n, lambda W, K, n: W + K)),
        ("one pass reads the weights once for the whole batch", _share(lambda rate, n: rate / n, lambda W, K, n: n * (W + K))),
        ("upside down: bytes a second over the bandwidth", lambda m, **k: 1 / roof_share(m, **k)),
        ("a pass does not read what is stored, but what it uses: the embedding is looked up, and only the experts in use are read", lambda m, *, batch, **k: roof_share(
            m, batch=batch, **k) + (2 * cost.parameters(m) - cost.weight_bytes_per_step(m, batch=batch)) * k["tokens_per_s"] / batch / k["bandwidth_bytes_per_s"]),
        behind=utilisation),
)
# fmt: on

EXERCISES = {exercise.name: exercise for exercise in _ALL}
"""Every exercise of the labs by name, in the order of the labs."""
