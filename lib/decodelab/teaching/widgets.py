"""Sliders that answer at once: numbers in HTML, a picture redrawn as PNG. Callbacks compute costs, they never measure.

Every explorer also prints its default numbers, so that a page without a kernel still says something.
"""

import html
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import ipywidgets

from decodelab.arithmetic import catalog, cost, engines, planning, speculation, units
from decodelab.arithmetic.catalog import ModelConfig, Workload
from decodelab.arithmetic.cost import Constants
from decodelab.arithmetic.records import Card
from decodelab.teaching import plots

STEPS_PER_DOUBLING = (1, 2, 5)


class Explorer(ipywidgets.VBox):
    """Sliders above a line of numbers and a picture. `answer(values)` returns the text and draws on `canvas.ax`.

    The sliders move through lists of values with the arrow keys; each has its meaning in text beside it.
    """

    def __init__(self, controls: Sequence[tuple[str, str, Sequence, object]], answer: Callable[[dict], str], canvas: plots.Canvas):
        self.answer, self.canvas = answer, canvas
        self.sliders = {key: ipywidgets.SelectionSlider(options=list(options), value=start, continuous_update=True, layout=ipywidgets.Layout(width="24em"))
                        for key, _, options, start in controls}  # fmt: skip
        self.numbers, self.picture = (ipywidgets.HTML(), ipywidgets.Image(format="png", layout=ipywidgets.Layout(max_width="100%", width="760px")))
        rows = [ipywidgets.HBox([ipywidgets.HTML(f"<div style='width:15em'>{html.escape(meaning)}</div>"), self.sliders[key]])
                for key, meaning, _, _ in controls]  # fmt: skip
        self.update()
        for slider in self.sliders.values():
            slider.observe(self.update, names="value")
        super().__init__([*rows, self.numbers, self.picture])

    def update(self, _: object = None) -> None:
        """Recomputes the numbers and the picture from the sliders."""
        text = self.answer({key: slider.value for key, slider in self.sliders.items()})
        self.numbers.value = "<b>" + html.escape(text).replace("\n", "<br>") + "</b>"
        self.picture.value = self.canvas.png()
        self.text = text

    def show(self) -> "Explorer":
        """Prints the numbers at the sliders' present values and returns the explorer, for a cell's last line."""
        print(self.text)
        return self


def ladder(least: int, most: int) -> list[int]:
    """Round values from `least` to `most`: 1, 2, 5 in every decade.

    >>> ladder(5, 200)
    [5, 10, 20, 50, 100, 200]
    """
    return [step * 10**power for power in range(13) for step in STEPS_PER_DOUBLING if least <= step * 10**power <= most]


def request_explorer(config: ModelConfig, constants: Constants, *, bytes_per_value: float = 2, prompt: int = 100, output: int = 10_000) -> Explorer:
    """A request of any shape: its time by phase, as it is, with prefill twice as fast, and with prefill free."""
    canvas = plots.Canvas()

    def answer(values: dict) -> str:
        work = Workload(
            prompt_tokens=values["prompt"], output_tokens=values["output"], weight_bytes_per_value=bytes_per_value, kv_bytes_per_value=bytes_per_value
        )
        if work.slots > config.max_context:
            canvas.say(f"{work.slots:,} tokens do not fit in the {config.max_context:,} positions of {config.name}")
            return f"{work.slots:,} tokens: more than the {config.max_context:,} positions of {config.name}. Shorten the prompt or the output."
        estimate = cost.request_time(config, constants, work)
        bars = [("as it is", estimate.ttft_s, estimate.decode_s), ("prefill twice as fast", estimate.ttft_s / 2, estimate.decode_s),
                ("prefill free", 0.0, estimate.decode_s)]  # fmt: skip
        plots.phases(bars, ax=canvas.clear(), title=f"{config.name}: {work.prompt_tokens:,} tokens in, {work.output_tokens:,} out")
        return (f"{work.output_tokens / work.prompt_tokens:g}:1 · total {units.format_seconds(estimate.total_s)} · decode "
                f"{units.format_percent(estimate.decode_share)} · a free prefill saves {units.format_percent(estimate.free_prefill_saves_fraction)}")  # fmt: skip

    tokens = ladder(1, config.max_context)
    nearest = [min(tokens, key=lambda n, start=start: abs(n - start)) for start in (prompt, output)]
    controls = [("prompt", "prompt, tokens read", tokens, nearest[0]), ("output", "output, tokens written", tokens, nearest[1])]
    return Explorer(controls, answer, canvas)


HERE = "this machine"
MODELS = ("SmolLM2-135M", "Llama-3.2-1B", "Qwen3-4B", "Llama-3.1-8B", "Qwen3-30B-A3B", "Llama-3.1-70B", "DeepSeek-V3")
MACHINES = ("RTX 4090", "A100 80GB SXM", "H100 SXM", "H200 SXM", "MI300X", "B200")


def _machine(config: ModelConfig, name: str, card: Card | None) -> tuple[Constants, Constants, float, float]:
    """(prediction, floor, bytes per value, memory in bytes): the card's own, or an engine class on a datasheet, 16 bits."""
    if name == HERE:
        return card.constants(config), card.floor(), catalog.dtype_bytes(card.dtype), card.machine.memory_bytes
    hardware = catalog.hardware(name)
    return engines.engine_for(hardware).constants(hardware), cost.floor_constants(hardware), 2.0, hardware.memory_gb * 1e9


def _room(config: ModelConfig, *, memory_bytes: float, context: int, value_bytes: float, kv_value_bytes: float = 0) -> tuple[int, str]:
    """(sequences of `context` tokens that fit, why not even one if so); K and V are as wide as the weights unless given."""
    if context > config.max_context:
        return 0, f"{context:,} tokens do not fit in the {config.max_context:,} positions of {config.name}"
    try:
        most = planning.sequences_that_fit(config, memory_bytes=memory_bytes, context=context, weight_bytes_per_value=value_bytes,
                                           kv_bytes_per_value=kv_value_bytes or value_bytes)  # fmt: skip
    except planning.DoesNotFit as fault:
        return 0, str(fault)
    return most, "" if most else f"beside the weights of {config.name} not one sequence of {context:,} tokens fits"


def plane_explorer(card: Card | None = None, *, model: str = "Llama-3.1-8B", hardware: str = "H200 SXM", prompt: int = 100,
                   output: int = 10_000) -> Explorer:  # fmt: skip
    """Decode share over prompt and output, for a model on a machine, with one request on it and the output where the phases meet."""
    canvas = plots.Canvas(size=(7.6, 4.2), margins=(0.13, 1.0, 0.14, 0.9))

    def answer(values: dict) -> str:
        config = catalog.model(values["model"])
        constants, _, size, memory = _machine(config, values["hardware"], card)
        formats = {"weight_bytes_per_value": size, "kv_bytes_per_value": size}
        work = Workload(prompt_tokens=values["prompt"], output_tokens=values["output"], **formats)
        _, refusal = _room(config, memory_bytes=memory, context=work.slots, value_bytes=size)
        if refusal:
            canvas.say(refusal)
            return f"{refusal}. Move a slider."
        tokens = [2**power for power in range(config.max_context.bit_length())]
        shares = planning.decode_shares(config, constants, prompts=tokens, outputs=tokens, **formats)
        plots.plane(shares, prompts=tokens, outputs=tokens, points=[("this request", work.prompt_tokens, work.output_tokens)], ax=canvas.clear(),
                    title=f"{config.name} on {values['hardware']}")  # fmt: skip
        meets = planning.balance_output(config, constants, prompt=work.prompt_tokens, **formats)
        share = units.format_percent(cost.request_time(config, constants, work).decode_share)
        lengths = f"{work.prompt_tokens:,} in, {work.output_tokens:,} out"
        return f"{lengths}: {share} decode · for this prompt the phases meet at {meets:,} tokens out"

    tokens = ladder(1, 100_000)
    controls = [("model", "model", MODELS, model), ("hardware", "machine", (*((HERE,) if card else ()), *MACHINES), hardware),
                ("prompt", "prompt, tokens read", tokens, prompt), ("output", "output, tokens written", tokens, output)]  # fmt: skip
    return Explorer(controls, answer, canvas)


def batch_explorer(card: Card | None = None, *, model: str = "Llama-3.1-8B", hardware: str = "H200 SXM", context: int = 5000,
                   batch: int = 64) -> Explorer:  # fmt: skip
    """Latency against throughput as the batch grows, up to the largest that fits; floor and prediction."""
    canvas = plots.Canvas(margins=(0.12, 0.97, 0.17, 0.9))

    def answer(values: dict) -> str:
        config, chosen, context = catalog.model(values["model"]), values["batch"], values["context"]
        predicted, floor, size, memory = _machine(config, values["hardware"], card)
        most, refusal = _room(config, memory_bytes=memory, context=context, value_bytes=size)
        if refusal or chosen > most:
            refusal = refusal or f"{chosen:,} sequences of {context:,} tokens do not fit on {values['hardware']}: at most {most:,} do"
            canvas.say(refusal)
            return f"{refusal}. Move a slider."
        formats = {"context": context, "weight_bytes_per_value": size, "kv_bytes_per_value": size}
        batches = [2**power for power in range(most.bit_length())]
        curves = [[(n, cost.step_time(config, constants, batch=n, **formats)) for n in batches] for constants in (predicted, floor)]
        step = cost.step_time(config, predicted, batch=chosen, **formats)
        plots.frontier([("predicted, batch beside the dots", "-", curves[0]), ("floor", "--", curves[1])], chosen=(chosen, step), ax=canvas.clear(),
                       title=f"{config.name} on {values['hardware']}, {context:,} tokens each")  # fmt: skip
        ridge = planning.ridge_batch(config, floor, weight_bytes_per_value=size)
        note = "" if config.moe_experts_total else f" · ridge at {ridge:,.0f}"
        waits, rate = units.format_seconds(step), units.format_rate(chosen, step)
        return f"batch {chosen:,}: {waits} per token for each, {rate} in all · at most {most:,} fit{note}"

    controls = [("model", "model", MODELS, model), ("hardware", "machine", (*((HERE,) if card else ()), *MACHINES), hardware),
                ("context", "context, tokens in each cache", ladder(100, 100_000), context), ("batch", "batch, sequences per step", [2**i for i in range(11)], batch)]  # fmt: skip
    return Explorer(controls, answer, canvas)


FORMATS = ("float32", "bfloat16", "fp8", "q8_0", "q4_0")
KV_FORMATS = ("float32", "bfloat16", "fp8", "q4_0")


def _roofs(config: ModelConfig, machine: str, dtype: str, card: Card | None) -> tuple[Constants, Constants, float] | str:
    """(what the dots run at, the roofs, memory in bytes), or why there is no roofline for this machine and format."""
    if machine == HERE:
        if dtype != card.dtype:
            return f"This machine's card was measured in {card.dtype}; for {dtype}, measure machine.card({dtype!r})"
        return card.constants(config), card.floor(), card.machine.memory_bytes
    hardware = catalog.hardware(machine)
    floor = cost.floor_constants(hardware, dtype=dtype)
    if hardware.flops_per_s(dtype) is None:
        return f"No source gives a dense {dtype} peak for {hardware.name}"
    return floor, floor, hardware.memory_gb * 1e9


def roofline_explorer(card: Card | None = None, *, model: str = "SmolLM2-135M", hardware: str | None = None, prompt: int = 100) -> Explorer:
    """Two dots under the roofs of a machine: the prefill of a prompt, and the decode step after it."""
    canvas = plots.Canvas(size=(7.6, 4.0), margins=(0.13, 0.94, 0.14, 0.91))

    def answer(values: dict) -> str:
        config, batch, tokens = catalog.model(values["model"]), values["batch"], values["prompt"]
        size, found = catalog.dtype_bytes(values["dtype"]), _roofs(config, values["hardware"], values["dtype"], card)
        most, refusal = (0, found) if isinstance(found, str) else _room(config, memory_bytes=found[2], context=tokens + 1, value_bytes=size)
        if refusal or batch > most:
            refusal = refusal or f"beside the weights of {config.name}, {most:,} sequences of {tokens + 1:,} tokens fit, not {batch:,}"
            canvas.say(refusal)
            return f"{refusal}. Move a slider."
        constants, floor, _ = found
        formats = {"batch": batch, "weight_bytes_per_value": size, "kv_bytes_per_value": size}
        pair = [cost.pass_work(config, new_tokens=new, context=context, **formats) for new, context in ((tokens, tokens), (1, tokens + 1))]
        seconds = [cost.prefill_time(config, constants, Workload(prompt_tokens=tokens, output_tokens=1, **formats)),
                   cost.step_time(config, constants, context=tokens + 1, **formats)]  # fmt: skip
        points = [(name, one.intensity, one.flops / taken) for name, one, taken in zip(("prefill", "decode"), pair, seconds, strict=True)]
        plots.roofs(floor, points=points, ax=canvas.clear(), title=f"{config.name} in {values['dtype']} on {values['hardware']}")
        ridge = floor.flops_per_s / floor.weight_bytes_per_s
        lines = [f"ridge {units.significant(ridge, 3)} FLOP/B"]
        for (name, intensity, _), taken in zip(points, seconds, strict=True):
            limit = "bytes" if intensity < ridge else "arithmetic"
            lines.append(f"{name}: {units.significant(intensity, 3)} FLOP/B, limited by {limit}, {units.format_seconds(taken)}")
        return "\n".join(lines)

    machines = (*((HERE,) if card else ()), *MACHINES)
    controls = [("model", "model", MODELS, model), ("hardware", "machine", machines, hardware or machines[0]),
                ("dtype", "format of weights and KV", FORMATS, card.dtype if card and not hardware else "bfloat16"),
                ("prompt", "prompt, tokens read", ladder(1, 100_000), prompt), ("batch", "batch, sequences per pass", [2**i for i in range(9)], 1)]  # fmt: skip
    return Explorer(controls, answer, canvas)


def cache_explorer(config: ModelConfig, *, window: int = 1024, context: int = 8192) -> Explorer:
    """How much one sequence's cache holds, for this shape with other KV heads, windows, KV formats and lengths."""
    canvas = plots.Canvas(size=(7.6, 4.0), margins=(0.13, 0.94, 0.14, 0.91))
    contexts = [2**power for power in range(7, config.max_context.bit_length())]

    def answer(values: dict) -> str:
        shape = replace(config, n_kv_heads=values["kv_heads"], windowed_layers=values["windowed"], window=window)
        size, chosen, weights = catalog.dtype_bytes(values["dtype"]), values["context"], 2 * cost.parameters(shape)
        curves = [[cost.kv_bytes(one, context=n, dtype_bytes=width) for n in contexts] for one, width in ((shape, size), (config, 2))]
        held = cost.kv_bytes(shape, context=chosen, dtype_bytes=size)
        title = f"{config.name} with {shape.n_kv_heads} KV heads and {shape.windowed_layers} of {shape.n_layers} layers windowed"
        plots.cache_size([("this shape", curves[0]), (f"{config.name} as it is, bfloat16", curves[1])], contexts=contexts, weights=weights,
                         chosen=(chosen, held), ax=canvas.clear(), title=title)  # fmt: skip
        return (f"{units.format_bytes(cost.kv_bytes_per_token(shape, dtype_bytes=size))} for each new token (windows not yet full) · "
                f"{units.format_capacity(held)} at {chosen:,} tokens, {units.format_percent(held / weights)} of the weights in bfloat16")  # fmt: skip

    divisors = [count for count in range(1, config.n_heads + 1) if config.n_heads % count == 0]
    windowed = [0, config.n_layers // 2, config.n_layers * 5 // 6, config.n_layers]
    controls = [("kv_heads", f"KV heads, for {config.n_heads} query heads", divisors, config.n_kv_heads),
                ("windowed", f"layers that keep {window:,} tokens", windowed, 0), ("dtype", "format of K and V", KV_FORMATS, "bfloat16"),
                ("context", "context, tokens in cache", contexts, context)]  # fmt: skip
    return Explorer(controls, answer, canvas)


def capacity_explorer(card: Card | None = None, *, model: str = "Llama-3.1-8B", hardware: str = "H200 SXM") -> Explorer:
    """How many sequences fit beside the weights: model, formats, machine, context."""
    canvas = plots.Canvas(size=(7.6, 3.0), margins=(0.04, 0.97, 0.42, 0.88))

    def answer(values: dict) -> str:
        config, tokens = catalog.model(values["model"]), values["context"]
        sizes = [catalog.dtype_bytes(values[key]) for key in ("weights", "kv")]
        total = card.machine.memory_bytes if values["hardware"] == HERE else catalog.hardware(values["hardware"]).memory_gb * 1e9
        count, refusal = _room(config, memory_bytes=total, context=tokens, value_bytes=sizes[0], kv_value_bytes=sizes[1])
        if refusal:
            canvas.say(refusal)
            return f"{refusal}. Move a slider."
        weights, each = cost.parameters(config) * sizes[0], cost.kv_bytes(config, context=tokens, dtype_bytes=sizes[1])
        plots.memory(weights, each, count, total=total, ax=canvas.clear(),
                     title=f"{config.name} on {values['hardware']}: {count:,} sequences of {tokens:,} tokens")  # fmt: skip
        return (f"{count:,} sequences of {tokens:,} tokens fit: each holds {units.format_capacity(each)} of K and V beside "
                f"{units.format_capacity(weights)} of weights, and a tenth of the memory is left to the engine")  # fmt: skip

    controls = [("model", "model", MODELS, model), ("hardware", "machine", (*((HERE,) if card else ()), *MACHINES), hardware),
                ("weights", "format of the weights", FORMATS, "bfloat16"), ("kv", "format of K and V", KV_FORMATS, "bfloat16"),
                ("context", "context, tokens in each cache", [2**power for power in range(7, 18)], 8192)]  # fmt: skip
    return Explorer(controls, answer, canvas)


def serving_explorer(run: Callable[..., Any], *, kinds: Sequence[str], page_bytes: float, kind: str = "reasoning") -> Explorer:
    """A full queue of one kind of work through one device: the batch and the cache over time, as `run` serves them.

    `run(kind, static=, rows=, pool_bytes=)` gives a simulation: `summary`, `records`, `timeline`, `recomputed_tokens`. Each is run once.
    """
    canvas = plots.Canvas(size=(7.6, 5.0), margins=(0.1, 0.97, 0.1, 0.93), panels=2)
    found = cache(run)

    def answer(values: dict) -> str:
        rows, pool = values["rows"], values["pool"]
        done = found(values["kind"], static=values["batching"] == "static", rows=rows, pool_bytes=pool * 2**30)
        told, answers = done.summary, sorted(one.output_tokens for one in done.records)
        title = f"{values['kind']}, {values['batching']} batches of at most {rows}: {told.requests} requests"
        plots.occupied(done.records, rows=rows, ax=canvas.clear(), title=title)
        held = [moment.held_pages * page_bytes / 2**30 for moment in done.timeline]
        plots.curves({"reserved": ([moment.t_s for moment in done.timeline], held)}, ax=canvas.panels[1], title="K and V reserved",
                     labels=("seconds", "GiB"), limit=("the pool", pool))  # fmt: skip
        canvas.panels[1].set(xlim=canvas.ax.get_xlim(), ylim=(0, 1.3 * pool))
        return (f"occupancy {told.occupancy:.1f} of {rows} · {told.decode_tokens_per_s:,.0f} tokens/s · ITL {told.itl}\n"
                f"K and V {units.format_percent(told.kv_used_fraction, 2)} of {pool} GiB · {told.preemptions:,} preemptions, {done.recomputed_tokens:,} "
                f"tokens computed again · answers of {answers[len(answers) // 2]:,} tokens in the median, {answers[-1]:,} at most")  # fmt: skip

    controls = [("kind", "kind of work", kinds, kind), ("batching", "batching", ("static", "continuous"), "static"),
                ("rows", "batch, sequences at most", (4, 8, 16, 32), 16), ("pool", "memory for K and V, GiB", (2, 4, 8, 16, 64), 64)]  # fmt: skip
    return Explorer(controls, answer, canvas)


def pools_explorer(capacity: Callable[..., float], *, devices: int = 8, prompt: int = 100, output: int = 10_000) -> Explorer:
    """Devices cut into a pool for prefill and one for decode, for a request of any shape; `capacity(prompt, output, prefill_devices)` is in requests/s."""
    canvas = plots.Canvas(margins=(0.12, 0.97, 0.17, 0.9))
    splits = range(1, devices)

    def answer(values: dict) -> str:
        prompt, output = values["prompt"], values["output"]
        rates, together = [capacity(prompt, output, split) for split in splits], capacity(prompt, output, 0)
        best = max(splits, key=lambda split: rates[split - 1])
        plots.curves({"two pools": (splits, rates)}, ax=canvas.clear(), title=f"{prompt:,} tokens in, {output:,} out: {devices} devices",
                     labels=("devices that prefill", "requests per second"), limit=("every device does both", together))  # fmt: skip
        canvas.ax.set_ylim(0, 1.25 * max(*rates, together))
        most, all_both = (units.significant(rate, 3) for rate in (rates[best - 1], together))
        share = units.format_percent(rates[best - 1] / together)
        return f"best split: {best} prefill, {devices - best} decode, {most} requests/s, {share} of {all_both} with every device doing both"

    tokens = ladder(10, 50_000)
    return Explorer([("prompt", "prompt, tokens read", tokens, prompt), ("output", "output, tokens written", tokens, output)], answer, canvas)


def speculation_explorer(config: ModelConfig, constants: Constants, *, context: int = 1000, acceptance: float = 0.7, k: int = 4,
                         draft_cost: float = 0.15, batch: int = 1) -> Explorer:  # fmt: skip
    """Speed-up of speculation over K: acceptance, K, what a draft costs beside a step of the target, and the batch."""
    canvas = plots.Canvas(margins=(0.1, 0.97, 0.17, 0.9))
    lengths = range(1, 13)

    def price(k: int, draft_cost: float, batch: int) -> speculation.RoundPrice:
        alone = speculation.round_price(config, constants, k=k, context=context, batch=batch)
        return replace(alone, draft_s=k * draft_cost * alone.step_s)

    def answer(values: dict) -> str:
        chance, chosen = values["acceptance"], values["k"]
        prices = [price(k, values["draft_cost"], values["batch"]) for k in lengths]
        gains, one = [each.speedup(chance) for each in prices], prices[chosen - 1]
        plots.curves({f"acceptance {chance:.2f}, draft {values['draft_cost']:g}": (lengths, gains)}, ax=canvas.clear(),
                     title=f"{config.name}, {context:,} tokens each, batch {values['batch']}", labels=("K, drafts per round", "speed-up"), limit=("no gain", 1))  # fmt: skip
        canvas.ax.plot(chosen, gains[chosen - 1], "o", color=plots.PREDICTED, markersize=10)
        canvas.ax.set_ylim(0, 1.3 * max(1.2, *gains))
        best, even = speculation.best_k(prices, chance), one.break_even
        needs = "loses at any acceptance" if even is None else f"breaks even at acceptance {even:.2f}"
        return (f"speed-up {gains[chosen - 1]:.2f}: {speculation.expected_tokens(chance, chosen):.2f} tokens per round for the time of "
                f"{(one.draft_s + one.verify_s) / one.step_s:.2f} steps, {one.draft_s / one.step_s:.2f} of them drafts\n"
                f"K = {chosen} {needs} · {f'best K: {best.k}, {best.speedup(chance):.2f} times' if best else 'no K gains: do not speculate'}")  # fmt: skip

    controls = [("acceptance", "acceptance of a tested draft", [step / 20 for step in range(21)], acceptance), ("k", "K, drafts per round", lengths, k),
                ("draft_cost", "a draft, in steps of the target", (0, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 1), draft_cost),
                ("batch", "batch, sequences per pass", [2**i for i in range(9)], batch)]  # fmt: skip
    return Explorer(controls, answer, canvas)


def budget_explorer(thoughts: Sequence[Any], *, dollars_per_million_out: float = 4.0) -> Explorer:
    """What was measured at each budget of thought: the share right, and what a right answer costs in tokens, seconds, bytes and dollars."""
    canvas = plots.Canvas(size=(7.6, 5.0), margins=(0.12, 0.97, 0.11, 0.93), panels=2)
    found = {thought.budget: thought for thought in thoughts}
    series = {"% of problems right": [100 * thought.accuracy for thought in thoughts],
              "seconds per right answer": [thought.per_right(thought.decode_s) for thought in thoughts]}  # fmt: skip

    def answer(values: dict) -> str:
        one = found[values["budget"]]
        canvas.clear()
        for panel, (name, ys) in zip(canvas.panels, series.items(), strict=True):
            plots.curves({name: (list(found), ys)}, ax=panel, title=name, labels=("budget, tokens of trace", ""))
            panel.plot(one.budget, dict(zip(found, ys, strict=True))[one.budget], "o", color=plots.PREDICTED, markersize=11)
            panel.get_legend().remove()
        tokens = one.per_right(sum(one.tokens))
        return (f"budget {one.budget:,}: {one.right} of {len(one.answers)} right, {units.format_percent(one.accuracy)}\n"
                f"a right answer costs {units.significant(tokens, 3)} tokens · {units.format_seconds(one.per_right(one.decode_s))} of decode · "
                f"{units.format_bytes(one.per_right(one.weight_bytes + one.kv_bytes), 3)} read · {units.significant(100 * tokens * dollars_per_million_out / 1e6, 3)} cents "
                f"at {dollars_per_million_out:g} dollars per million output tokens")  # fmt: skip

    return Explorer([("budget", "budget, tokens of trace", list(found), thoughts[len(thoughts) // 2].budget)], answer, canvas)
