"""The scheduler on a virtual clock: the object that drives the engine, its passes priced by the cost model. No torch here.

While the same sequences decode, each step costs a little more than the last, on a line: such a stretch is priced at once.
"""

import argparse
import time
from collections import namedtuple
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from math import inf
from operator import itemgetter

import numpy as np

from decodelab.arithmetic import catalog, cost, engines, planning, units, workload
from decodelab.arithmetic.catalog import ModelConfig, Workload
from decodelab.arithmetic.cost import Constants
from decodelab.arithmetic.latency import RequestRecord, ServingSummary, Slo, percentiles, summarise_requests
from decodelab.arithmetic.workload import Arrival
from decodelab.serving.scheduler import Chunk, Limits, Plan, Policy, Request, RequestError, Scheduler

STRETCH = 64  # steps priced at once, at most: the pages held are noted once a stretch
SAMPLES = 500  # moments of a timeline
KEPT_TOKENS = 200_000  # of a run that writes more, a request's record keeps the times of its first and last token only
Sample = namedtuple("Sample", "t_s running waiting held_pages")


@dataclass(frozen=True, kw_only=True)
class Price:
    """Seconds of a pass: overhead and weights once, plus the attention of each sequence.

    `fused`: all of a plan is one pass, as in vLLM; else each chunk is one and all decodes are one, as in our engine. The output
    matrix runs on each sequence's last row. Padding rows read the tokens they hold.
    """

    config: ModelConfig
    constants: Constants
    fused: bool = True
    weight_bytes_per_value: float = 2
    kv_bytes_per_value: float = 2

    def __call__(self, plan: Plan) -> float:
        """Seconds of what `plan` asks for."""
        contexts = [*(request.tokens for request in plan.decode), *(request.cached for request in plan.padding)]
        if self.fused:
            return self._pass_s(contexts, plan.prefill)
        return sum(self._pass_s([], [chunk]) for chunk in plan.prefill) + (self._pass_s(contexts, []) if contexts else 0)

    def _pass_s(self, contexts: list[int], chunks: Sequence[Chunk]) -> float:
        tokens, sequences = len(contexts) + sum(chunk.tokens for chunk in chunks), len(contexts) + len(chunks)
        weights_s = cost.weights_time(self.config, self.constants, tokens=tokens, logit_rows=sequences, dtype_bytes=self.weight_bytes_per_value)
        decodes_s = self._attention_s(1, 1) / self._visible([1]) * self._visible(contexts)
        chunks_s = sum(self._attention_s(chunk.tokens, chunk.start + chunk.tokens) for chunk in chunks)
        return self.constants.overhead_s(self.config, batch=sequences) + weights_s + decodes_s + chunks_s

    def _attention_s(self, new_tokens: int, context: int) -> float:
        """One sequence's attention: its last `new_tokens` tokens against all `context`."""
        moved_s = cost.kv_bytes(self.config, context=context, dtype_bytes=self.kv_bytes_per_value) / self.constants.kv_bytes_per_s
        return max(moved_s, cost.attention_flops(self.config, new_tokens=new_tokens, context=context) / self.constants.flops_per_s)

    def _visible(self, contexts: Sequence[int]) -> int:
        """Cached tokens that rows at these contexts read, over all layers."""
        windowed, window = self.config.windowed_layers, self.config.window
        return (self.config.n_layers - windowed) * sum(contexts) + (windowed and windowed * sum(min(context, window) for context in contexts))

    def steps_s(self, contexts: list[int], padding: list[int], *, steps: int) -> np.ndarray:
        """Seconds of each of `steps` decode passes in which `contexts` grow by a token each; fewer where one outgrows a window."""
        steps = min([steps, *(self.config.window - context for context in contexts if context < self.config.window)])
        first_s, growing = self._pass_s([*contexts, *padding], []), [context + 1 for context in contexts]
        return first_s + (self._pass_s([*growing, *padding], []) - first_s) * np.arange(steps)


@dataclass(kw_only=True, eq=False)
class Served:
    """A request on its way through one replica, or two."""

    id: str
    arrival: Arrival
    runs: list[tuple["Replica", float | None, int, int]] = field(default_factory=list)  # tokens: one at a prefill's end, and those of decode passes
    counted: int = 0  # tokens in `runs`
    prefill_s: float | None = None  # when a prefill gave the first token of the next run
    prefilled: int = 0
    preemptions: int = 0
    end_s: float = 0.0
    error: str = ""

    def request(self, **changes: int) -> Request:
        return Request(**{"id": self.id, "prompt_tokens": self.arrival.prompt_tokens, "max_tokens": self.arrival.output_tokens, **changes})

    def token_s(self) -> np.ndarray:
        """When each token came."""
        parts = [part for replica, first, start, stop in self.runs for part in ([] if first is None else [first], replica.decode_s[start:stop])]
        return np.concatenate([[], *parts])

    def record(self, token_s: np.ndarray) -> RequestRecord:
        at_s, asked, error = self.arrival.at_s, self.arrival.output_tokens, self.error
        return RequestRecord(id=self.id, scheduled_s=at_s, sent_s=at_s, prompt_tokens=self.arrival.prompt_tokens, asked_tokens=asked, error=error,
                             output_tokens=self.counted, token_s=tuple(token_s.tolist()), end_s=self.end_s, preemptions=self.preemptions,
                             finish="error" if error else "length")  # fmt: skip


class Replica:
    """One device: a scheduler, and a clock that jumps to the end of each pass, or of each stretch of decode passes.

    Who decodes takes part in every decode pass, so the times of a request's tokens are a slice of the replica's.
    """

    def __init__(self, limits: Limits, price: Price):
        self.scheduler, self.price = Scheduler(limits), price
        self.served: dict[Request, Served] = {}
        self.now_s = self.busy_s = 0.0
        self.plan: Plan | None = None  # of the pass under way; None in a stretch
        self.ends_s = np.empty(0)  # when each pass under way ends
        self.tokens = self.ended = 0  # tokens of all that wait and run; requests that ended
        self.decode_tokens = self.decode_passes = 0
        self.passes: list[np.ndarray] = []
        self.decode_s = np.empty(0)  # when each decode pass ended, once all is done
        self.log = [Sample(0.0, 0, 0, 0)]

    def load(self, at_s: float) -> int:
        """Tokens that wait or run at `at_s`: what the router compares."""
        return self.tokens + (len(self.scheduler.running) * int(self.ends_s.searchsorted(at_s, "right")) if self.plan is None else 0)

    def advance(self, until_s: float) -> None:
        """Runs what ends before `until_s` and begins what begins before it."""
        while len(self.ends_s) or (self.scheduler.busy and self.now_s < until_s):
            if not len(self.ends_s):
                self._begin()
            if self.ends_s[-1] >= until_s:
                return
            self._finish()

    def submit(self, served: Served, request: Request, *, at_s: float) -> None:
        """Queues a request at `at_s`, to which the replica has advanced; a stretch ends with the step that is under way."""
        self.now_s = self.now_s if self.scheduler.busy else max(self.now_s, at_s)
        try:
            self.scheduler.submit(request)
        except RequestError as fault:
            served.error, request.finish = str(fault), "error"
        if request.finish:
            served.end_s, self.ended = at_s, self.ended + 1
            return
        self.served[request] = served
        self.tokens += request.tokens
        if self.plan is None:
            self.ends_s = self.ends_s[: self.ends_s.searchsorted(at_s) + 1]

    def _begin(self) -> None:
        scheduler, self.plan = self.scheduler, None
        if steps := min(scheduler.quiet_steps(), STRETCH):
            contexts, padding = [request.tokens for request in scheduler.running], [request.cached for request in scheduler.padding]
            self.ends_s = self.now_s + self.price.steps_s(contexts, padding, steps=steps).cumsum()
        else:
            self.plan = scheduler.plan()
            for request in self.plan.preempted:
                self._close(request)
            self.ends_s = np.array([self.now_s + self.price(self.plan)])
        self.log.append(Sample(self.now_s, len(scheduler.running), len(scheduler.waiting), scheduler.held_pages))

    def _finish(self) -> None:
        scheduler, plan, steps, end_s = self.scheduler, self.plan, len(self.ends_s), float(self.ends_s[-1])
        prefilled = [chunk.request for chunk in plan.prefill if chunk.last] if plan else []
        rows = len(plan.decode if plan else scheduler.running)
        if rows:
            self.passes.append(self.ends_s)
        self.decode_passes += steps if rows else 0
        self.decode_tokens += rows * steps
        self.tokens += rows * steps + len(prefilled)
        self.busy_s += end_s - self.now_s
        self.now_s, self.ends_s = end_s, np.empty(0)
        for request in prefilled:
            self.served[request].prefill_s = end_s
        for request in scheduler.done(plan) if plan else scheduler.skip(steps):
            self._close(request)
            served = self.served.pop(request)
            served.end_s, served.prefilled, served.preemptions = end_s, served.prefilled + request.prefilled, request.preemptions
            self.tokens -= request.tokens
            self.ended += 1
        if not scheduler.busy:
            self.log.append(Sample(end_s, 0, 0, 0))

    def _close(self, request: Request) -> None:
        """Notes the run of tokens that ends here, with the request or with its preemption."""
        served = self.served[request]
        decoded = request.generated - served.counted - (served.prefill_s is not None)
        if request.generated > served.counted:
            served.runs.append((self, served.prefill_s, self.decode_passes - decoded, self.decode_passes))
        served.counted, served.prefill_s = request.generated, None


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """A run on the virtual clock. With two pools, occupancy, pages and timeline are those of the pool that decodes."""

    summary: ServingSummary
    records: tuple[RequestRecord, ...]
    timeline: tuple[Sample, ...]
    good: int | None  # requests that kept the promise
    recomputed_tokens: int  # prefilled again after a preemption
    busy_fraction: tuple[float, ...]  # of each device, those that only prefill first

    def to_json(self) -> dict:
        """The numbers, without records and timeline."""
        return {**self.summary.to_json(), **{name: getattr(self, name) for name in ("good", "recomputed_tokens", "busy_fraction")}}


def simulate(
    arrivals: Sequence[Arrival], *, config: ModelConfig, constants: Constants, limits: Limits, devices: int = 1, fused: bool = True,
    weight_bytes_per_value: float = 2, kv_bytes_per_value: float = 2, slo: Slo | None = None, progress: Callable[[float], None] | None = None
) -> Simulation:  # fmt: skip
    """`devices` replicas of the model, each within `limits`; a request goes to the one with the fewest tokens waiting and running.

    `progress` hears the share of requests that ended. Taught in: lessons/08.
    """
    price = Price(
        config=config, constants=constants, fused=fused, weight_bytes_per_value=weight_bytes_per_value, kv_bytes_per_value=kv_bytes_per_value
    )
    served = _queue(arrivals)
    jobs = [(one.arrival.at_s, one, one.request()) for one in served]
    return _outcome(served, _serve(jobs, devices, limits, price, progress), slo=slo)


def simulate_pools(
    arrivals: Sequence[Arrival], *, config: ModelConfig, constants: Constants, limits: Limits, prefill_devices: int, decode_devices: int,
    transfer_bytes_per_s: float, fused: bool = True, weight_bytes_per_value: float = 2, kv_bytes_per_value: float = 2, slo: Slo | None = None,
    progress: Callable[[float], None] | None = None
) -> Simulation:  # fmt: skip
    """Disaggregation: some devices prefill and give the first token; the prompt's K and V then move to one that decodes.

    Each transfer has `transfer_bytes_per_s` to itself and delays the second token only. What a decode device preempts it
    prefills itself. Taught in: lessons/08.
    """
    if limits.static or not transfer_bytes_per_s > 0:
        raise ValueError(
            f"static is {limits.static} and transfer_bytes_per_s {transfer_bytes_per_s}; pools batch continuously and move above 0 bytes/s"
        )
    price = Price(
        config=config, constants=constants, fused=fused, weight_bytes_per_value=weight_bytes_per_value, kv_bytes_per_value=kv_bytes_per_value
    )
    served = _queue(arrivals)
    jobs = [(one.arrival.at_s, one, one.request(max_tokens=min(1, one.arrival.output_tokens))) for one in served]
    first = _serve(jobs, prefill_devices, limits, price, progress and (lambda share: progress(share / 2)))
    jobs = []
    for one in served:
        if one.arrival.output_tokens > 1 and not one.error:
            prompt = one.arrival.prompt_tokens
            moved_s = cost.kv_bytes(config, context=prompt, dtype_bytes=kv_bytes_per_value) / transfer_bytes_per_s
            jobs.append((one.end_s + moved_s, one, one.request(generated=1, arrived_tokens=prompt)))
    second = _serve(jobs, decode_devices, limits, price, progress and (lambda share: progress((1 + share) / 2)))
    return _outcome(served, second, prefill=first, slo=slo)


def _queue(arrivals: Sequence[Arrival]) -> list[Served]:
    if not arrivals:
        raise ValueError("there are no arrivals to simulate; give at least one")
    return [Served(id=str(number), arrival=arrival) for number, arrival in enumerate(arrivals)]


def _serve(
    jobs: list[tuple[float, Served, Request]], devices: int, limits: Limits, price: Price, progress: Callable[[float], None] | None
) -> list[Replica]:
    """The replicas, after each job went at its time to the one with the fewest tokens and all were done."""
    if devices < 1:
        raise ValueError(f"{devices} devices; each pool needs at least 1")
    replicas = [Replica(limits, price) for _ in range(devices)]
    for at_s, served, request in sorted(jobs, key=itemgetter(0)):
        for replica in replicas:
            replica.advance(at_s)
        min(replicas, key=lambda replica, at_s=at_s: replica.load(at_s)).submit(served, request, at_s=at_s)
        if progress:
            progress(sum(replica.ended for replica in replicas) / len(jobs))
    for replica in replicas:
        replica.advance(inf)
        replica.decode_s = np.concatenate([[], *replica.passes])
    return replicas


def _outcome(served: list[Served], replicas: list[Replica], *, prefill: Sequence[Replica] = (), slo: Slo | None) -> Simulation:
    """The numbers. A gap between two decode passes is counted once, with the number of requests it belongs to."""
    sharing = {replica: np.zeros(replica.decode_passes + 1, dtype=int) for replica in replicas}  # as changes from one gap to the next
    alone: list[float] = []  # gaps beside a prefill, a transfer or a preemption
    keep, good, records = sum(one.counted for one in served) <= KEPT_TOKENS, 0, []
    for one in served:
        token_s, at = one.token_s(), 0
        gaps_s = np.diff(token_s)
        for replica, first, start, stop in one.runs:
            alone += [gaps_s[at - 1]] if at else []
            if stop > start:
                alone += [] if first is None else [gaps_s[at]]
                sharing[replica][start] += 1
                sharing[replica][stop - 1] -= 1
            at += stop - start + (first is not None)
        in_time = slo and not one.error and len(token_s) and token_s[0] - one.arrival.at_s <= slo.ttft_s
        good += bool(in_time and (gaps_s <= slo.itl_p99_s).sum() >= -(-len(gaps_s) * 99 // 100))  # `latency.within`
        records.append(one.record(token_s if keep else token_s[:: max(1, len(token_s) - 1)]))
    gaps_s = np.concatenate([alone, *(np.diff(replica.decode_s) for replica in replicas)])
    counts = np.concatenate([np.ones(len(alone), dtype=int), *(changes.cumsum()[: max(0, len(changes) - 2)] for changes in sharing.values())])
    begin_s, end_s = min(one.arrival.at_s for one in served), max(one.end_s for one in served)
    span_s, steps = max(end_s - begin_s, 1e-12), sum(replica.decode_passes for replica in replicas)
    timeline, page_seconds = _timeline(replicas, begin_s=begin_s, end_s=end_s)
    summary = summarise_requests(records, occupancy=sum(replica.decode_tokens for replica in replicas) / steps if steps else None,
                                 kv_used_fraction=page_seconds / span_s / len(replicas) / replicas[0].scheduler.limits.pages)  # fmt: skip
    return Simulation(summary=replace(summary, itl=percentiles(gaps_s, counts=counts), goodput_requests_per_s=good / span_s if slo else None),
                      records=tuple(records), timeline=timeline, good=good if slo else None,
                      recomputed_tokens=sum(one.prefilled - one.arrival.prompt_tokens for one in served if one.prefilled),
                      busy_fraction=tuple(replica.busy_s / span_s for replica in (*prefill, *replicas)))  # fmt: skip


def _timeline(replicas: Sequence[Replica], *, begin_s: float, end_s: float) -> tuple[tuple[Sample, ...], float]:
    """(the replicas' sum at SAMPLES moments, pages held times seconds)."""
    grid, total, held = np.linspace(begin_s, end_s, SAMPLES), np.zeros((SAMPLES, 3)), 0.0
    for replica in replicas:
        log = np.array(replica.log)
        total += log[log[:, 0].searchsorted(grid, "right") - 1, 1:]
        held += float(np.diff(log[:, 0], append=end_s) @ log[:, 3])
    return tuple(Sample(t_s, *map(int, row)) for t_s, row in zip(grid.tolist(), total, strict=True)), held


# --- how much a device carries ------------------------------------------------------------------------------------


def mean_context(arrivals: Sequence[Arrival]) -> float:
    """Tokens in the cache of a sequence that decodes, over all steps of all requests: a long answer holds more, and for longer."""
    steps = [max(0, one.output_tokens - 1) for one in arrivals]
    held = sum(n * (one.prompt_tokens + (n + 1) / 2) for n, one in zip(steps, arrivals, strict=True))
    return held / sum(steps) if sum(steps) else sum(one.prompt_tokens for one in arrivals) / len(arrivals)


def largest_batch(config: ModelConfig, memory_bytes: float, *, context: float, **formats: float) -> int:
    """Sequences of `context` tokens that fit beside the weights in 0.9 of the memory. Raises: DoesNotFit for none.

    >>> largest_batch(catalog.model("llama-3.1-8b"), 141e9, context=4000)
    211
    """
    batch = planning.sequences_that_fit(config, memory_bytes=memory_bytes, context=max(1, round(context)), **formats)
    if not batch:
        raise planning.DoesNotFit(f"beside the weights of {config.name} there is no room for one sequence of {context:,.0f} tokens; "
                                  "use fewer bytes per value, or a larger device")  # fmt: skip
    return batch


def capacity_requests_per_s(config: ModelConfig, constants: Constants, *, arrivals: Sequence[Arrival], batch: int, devices: int = 1,
                            prefill_devices: int = 0, **formats: float) -> float:  # fmt: skip
    """Requests/s at `batch` sequences a device: each costs the prefill of a mean prompt and its share of a mean number of steps.

    `prefill_devices` of the devices only prefill; then the slower pool decides.
    """
    prompt = max(1, round(sum(one.prompt_tokens for one in arrivals) / len(arrivals)))
    steps = sum(max(0, one.output_tokens - 1) for one in arrivals) / len(arrivals)
    prefill_s = cost.prefill_time(config, constants, Workload(prompt_tokens=prompt, output_tokens=1, **formats))
    decode_s = steps * cost.step_time(config, constants, context=round(mean_context(arrivals)), batch=batch, **formats) / batch
    decoding = (devices - prefill_devices) / decode_s if decode_s else inf
    return min(prefill_devices / prefill_s, decoding) if prefill_devices else devices / (prefill_s + decode_s)


# --- the command --------------------------------------------------------------------------------------------------


def options(command: argparse.ArgumentParser) -> None:
    """The arguments of `decodelab simulate`."""
    add = command.add_argument
    add("--model", required=True, help="a name from data/models.csv, such as llama-3.1-8b")
    add("--hardware", required=True, help="a name from data/hardware.csv, such as h200-sxm; `here` is this machine's card")
    add("--devices", type=int, default=1, help="one-device replicas; a request goes to the one with the fewest tokens (default 1)")
    add("--prefill-devices", type=int, default=0, metavar="N", help="N of the devices only prefill, the others only decode (default 0)")
    add("--transfer-gb-per-s", type=float, default=50.0, help="rate at which a prompt's K and V move between the pools (default 50)")
    add("--workload", default="reasoning", help=f"length law: {', '.join(workload.KINDS)} (default reasoning)")
    add("--trace", metavar="FILE", help="arrivals and lengths from a CSV or JSONL file instead")
    add("--requests", type=int, default=1000, help="how many; of a trace, at most (default 1000)")
    add("--rate", type=float, metavar="PER_S", help="requests/s (default: a trace's own, else 0.8 of what the largest batch that fits serves)")
    add("--burstiness", type=float, default=1.0, help="coefficient of variation of the gaps between arrivals (default 1: Poisson)")
    add("--seed", type=int, default=0, help="of lengths and arrivals (default 0)")
    add("--policy", default="mixed", choices=Policy.__args__, help="which phase a pass serves (default mixed)")
    add("--static", action="store_true", help="static batching: a batch is admitted whole and lasts until its last row ends")
    add("--max-sequences", type=int, default=256, help="sequences of a pass, at most (default 256)")
    add("--token-budget", type=int, default=2048, help="tokens of a pass, at most (default 2048)")
    add("--chunk", type=int, help="prompt tokens of one request in a pass, at most (default: the budget)")
    add("--dtype", default="bfloat16", help=f"format of the weights (default bfloat16): {', '.join(catalog.DTYPE_BYTES)}")
    add("--kv-dtype", help="format of the KV cache (default: 16 bits, or the weights' format if that is float32)")
    add("--slo-ttft", type=float, default=1.0, metavar="SECONDS", help="promised time to first token (default 1)")
    add("--slo-itl", type=float, default=0.05, metavar="SECONDS", help="promised 99th percentile of a request's own gaps (default 0.05)")


def _device(arguments: argparse.Namespace, config: ModelConfig, say: Callable[[str], None]) -> tuple[str, float, Constants, dict[str, float]]:
    """(name, bytes of memory, constants, bytes per value) of the hardware asked for."""
    dtype = catalog.dtype_name(arguments.dtype)
    kv_dtype = arguments.kv_dtype or ("float32" if dtype == "float32" else "bfloat16")
    formats = {"weight_bytes_per_value": catalog.dtype_bytes(dtype), "kv_bytes_per_value": catalog.dtype_bytes(kv_dtype)}
    if arguments.hardware == "here":
        from decodelab.measuring import machine

        card = machine.card(dtype, say=say)
        own = {} if arguments.kv_dtype else card.formats
        return card.machine.processor, card.machine.memory_bytes, card.constants(config), {**formats, **own}
    known = catalog.hardware(arguments.hardware)
    if not known.memory_gb or not known.flops_per_s(dtype):
        raise ValueError(f"no source gives the memory of {known.name} and its {dtype} peak; choose other hardware or another --dtype")
    return known.name, known.memory_gb * units.GB, engines.engine_for(known).constants(known, dtype=dtype), formats


def _arrivals(arguments: argparse.Namespace, config: ModelConfig, say: Callable[[str], None]) -> tuple[list[Arrival], float]:
    """(arrivals, their mean rate): a trace's own, or one a second of the length law."""
    if arguments.requests < 1 or not 0 < (arguments.rate or 1) < inf:
        raise ValueError(f"{arguments.requests} requests at a rate of {arguments.rate}; ask for at least 1, at a rate above 0")
    if not arguments.trace:
        law = {"seed": arguments.seed, "burstiness": arguments.burstiness, "max_context": config.max_context}
        return workload.workload(arguments.workload, arguments.requests, rate_per_s=1.0, **law), 1.0
    trace = workload.read_trace(arguments.trace)
    say(f"{arguments.trace}: {len(trace.arrivals):,} arrivals, times in {trace.unit}. {trace.note}".strip())
    arrivals = trace.arrivals[: arguments.requests]
    span_s = max(one.at_s for one in arrivals) - min(one.at_s for one in arrivals)
    return arrivals, (len(arrivals) - 1) / span_s if span_s else 1.0


def command(arguments: argparse.Namespace, *, say: Callable[[str], None]) -> tuple[dict, str]:
    """`decodelab simulate`."""
    config, devices, prefill = catalog.model(arguments.model), arguments.devices, arguments.prefill_devices
    if not 0 <= prefill < devices:
        raise ValueError(f"{devices} devices, {prefill} of them for prefill: at least 1 must be left to decode")
    name, memory_bytes, constants, formats = _device(arguments, config, say)
    arrivals, own_rate = _arrivals(arguments, config, say)
    context = mean_context(arrivals)
    fits = largest_batch(config, memory_bytes, context=context, **formats)
    batch = min(fits, arguments.max_sequences)
    limits = Limits(pages=int(fits * context // 16), max_sequences=arguments.max_sequences, token_budget=arguments.token_budget, chunk=arguments.chunk,
                    max_context=config.max_context, policy=arguments.policy, static=arguments.static)  # fmt: skip
    capacity = capacity_requests_per_s(config, constants, arrivals=arrivals, batch=batch, devices=devices, prefill_devices=prefill, **formats)
    rate = arguments.rate or (own_rate if arguments.trace else 0.8 * capacity)
    arrivals = [replace(one, at_s=one.at_s * own_rate / rate) for one in arrivals]
    run = {"config": config, "constants": constants, "limits": limits, "slo": Slo(ttft_s=arguments.slo_ttft, itl_p99_s=arguments.slo_itl),
           "progress": _progress(say, len(arrivals)), **formats}  # fmt: skip
    if prefill:
        pools = {"prefill_devices": prefill, "decode_devices": devices - prefill}
        found = simulate_pools(arrivals, transfer_bytes_per_s=arguments.transfer_gb_per_s * units.GB, **pools, **run)
    else:
        found = simulate(arrivals, devices=devices, **run)
    if not found.summary.completed:
        raise ValueError(f"all {len(arrivals)} requests were refused; the first: {found.records[0].error}")
    pool = fits * cost.kv_bytes(config, context=round(context), dtype_bytes=formats["kv_bytes_per_value"])
    result = {"model": config.name, "hardware": name, "devices": devices, "prefill_devices": prefill, "workload": arguments.trace or arguments.workload,
              "seed": arguments.seed, "burstiness": arguments.burstiness, **formats, **asdict(limits), "slo": asdict(run["slo"]), "rate_per_s": rate,
              "capacity_requests_per_s": capacity, "mean_context_tokens": context, "largest_batch": batch, "kv_pool_bytes": pool,
              "kv_held_bytes": pool * (found.summary.kv_used_fraction or 0), **found.to_json()}  # fmt: skip
    return result, _text(result, found.summary)


def _progress(say: Callable[[str], None], requests: int) -> Callable[[float], None]:
    """A line a second: the share of requests that ended."""
    said = time.monotonic()

    def tell(share: float) -> None:
        nonlocal said
        if time.monotonic() - said >= 1:
            said = time.monotonic()
            say(f"{units.format_percent(share, 2)} of {requests:,} requests served")

    return tell


def _text(result: dict, summary: ServingSummary) -> str:
    """The result as a table."""
    occupancy, percent = summary.occupancy or 0.0, units.format_percent
    rows = (("inter-token latency", summary.itl or "-"), ("time to first token", summary.ttft or "-"), ("whole request", summary.total or "-"),
            ("sequences per step", f"{occupancy:.1f}, {percent(occupancy / result['largest_batch'])} of the largest batch that fits"),
            ("decode, all devices", f"{summary.decode_tokens_per_s or 0:,.0f} tokens/s"),
            ("KV held per device", f"{units.format_capacity(result['kv_held_bytes'])}, {percent(summary.kv_used_fraction or 0)} of the pool"),
            ("goodput", f"{result['goodput_requests_per_s']:.2f} requests/s: {result['good']:,} requests kept the promise"),
            ("preemptions", f"{summary.preemptions:,}; {result['recomputed_tokens']:,} tokens prefilled again"),
            ("refused", f"{summary.requests - summary.completed:,}"))  # fmt: skip
    head = (f"{result['model']} on {result['devices']} x {result['hardware']}: {summary.requests:,} requests ({result['workload']}), "
            f"{result['rate_per_s']:.3g}/s, {percent(result['rate_per_s'] / result['capacity_requests_per_s'])} of capacity")  # fmt: skip
    return "\n".join([head, *(f"{label:<22}{value}" for label, value in rows)])
