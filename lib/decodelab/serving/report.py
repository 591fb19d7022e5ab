"""What one load showed: the users' times, the server's own numbers beside them, the bytes that had to move, what makes a run invalid."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from math import inf

from decodelab.arithmetic import catalog, cost, units
from decodelab.arithmetic.latency import Percentiles, RequestRecord, ServingSummary, percentiles, summarise_requests
from decodelab.arithmetic.records import utilisation
from decodelab.arithmetic.workload import Arrival
from decodelab.serving.stream import Answer

WARM_UP_TOKENS = 16


@dataclass(frozen=True, kw_only=True)
class Load:
    """What is sent. Open loop: each request at its time, whatever the server does. Closed: the next one when one has ended."""

    schedule: tuple[Arrival, ...]
    open_loop: bool = False
    concurrency: int | None = 1  # requests in flight, at most; None: no limit
    chat: bool = False

    def __post_init__(self) -> None:
        least = min((min(arrival.prompt_tokens, arrival.output_tokens) for arrival in self.schedule), default=0)
        for name, value in (("requests", len(self.schedule)), ("concurrency", self.concurrency), ("prompt and output tokens", least)):
            if value is not None and value < 1:
                raise ValueError(f"{name}: {value}; it must be at least 1")

    @property
    def warm_up(self) -> list[Arrival]:
        """One request alone, then as many as run together, with the first arrival's prompt and short answers."""
        first, together = self.schedule[0], min(self.concurrency or 1, len(self.schedule))
        short = replace(first, at_s=0.0, output_tokens=min(first.output_tokens, WARM_UP_TOKENS))
        return [short] * (1 + together * (together > 1))

    @property
    def tokens(self) -> int:
        """Prompt and output tokens of the whole run, the warm-up included."""
        return sum(arrival.prompt_tokens + arrival.output_tokens for arrival in (*self.warm_up, *self.schedule))

    def __str__(self) -> str:
        return f"open loop of {len(self.schedule)} arrivals" if self.open_loop else f"closed loop of {self.concurrency}"


@dataclass(frozen=True, kw_only=True)
class CheckResult:
    """What a server's users felt under one load, what the server says of the same time, and what makes the run invalid."""

    host: str  # "loopback" for this machine
    model: str
    load: Load
    answers: tuple[Answer, ...]
    server: dict = field(default_factory=dict)  # see stream.server_side
    notes: tuple[str, ...] = ()
    moved: dict | None = None  # see must_move
    measured_at: str = ""

    @property
    def records(self) -> list[RequestRecord]:
        return [answer.record for answer in self.answers]

    @cached_property
    def done(self) -> list[Answer]:
        """The answers that ended by themselves."""
        return [answer for answer in self.answers if answer.record.complete]

    @cached_property
    def counted(self) -> bool:
        """Whether the tokens of every event are known, so that a time between tokens can be told."""
        return all(answer.tokens for answer in self.done)

    @cached_property
    def chunks(self) -> Percentiles | None:
        """Inter-chunk latency: between two events that bring tokens, however many."""
        return percentiles([gap for answer in self.done for gap, _ in answer.gaps])

    @cached_property
    def itl(self) -> Percentiles | None:
        """Inter-token latency: an event's gap shared by its tokens. None where the server does not say how many those are."""
        gaps = [gap for answer in self.done for gap in answer.gaps] if self.counted else []
        return percentiles([gap / tokens for gap, tokens in gaps], counts=[tokens for _, tokens in gaps])

    @cached_property
    def summary(self) -> ServingSummary:
        """The run in the words of the engine and the simulator; occupancy is the answers in flight while any was."""
        return replace(summarise_requests(self.records, occupancy=occupancy([answer.record for answer in self.done])), itl=self.itl)

    def from_sending(self, name: str) -> Percentiles | None:
        """`ttft_s` or `total_s` counted from the sending: what the server alone is responsible for."""
        values = ((getattr(answer.record, name), answer.record.queue_s) for answer in self.done)
        return percentiles([value - queue for value, queue in values if value is not None])

    @property
    def hit_fraction(self) -> float | None:
        """Prompt tokens found in the server's prefix cache, of those it looked up; None where it does not say."""
        hits = self.server.get("prefix_hits", {}).get("sum", sum(answer.cached_tokens for answer in self.answers) or None)
        read = self.server.get("prefix_queries", {}).get("sum") or sum(record.prompt_tokens for record in self.records)
        return None if hits is None or not read else hits / read

    @cached_property
    def halves(self) -> tuple[float, ...] | None:
        """Mean seconds per token before and after the middle of the run."""
        gaps = [(at_s, *gap) for answer in self.done for at_s, gap in zip(answer.record.token_s[1:], answer.gaps, strict=True)]
        middle = (min(gaps)[0] + max(gaps)[0]) / 2 if gaps else 0
        parts = [[(gap, tokens) for at_s, gap, tokens in gaps if (at_s > middle) == late] for late in (False, True)]
        means = tuple(sum(gap for gap, _ in part) / sum(tokens for _, tokens in part) for part in parts if part)
        return means if len(means) == 2 and min(means) > 0 else None

    def agreement(self) -> dict[str, dict]:
        """Mean TTFT, from the sending, and mean ITL of this client beside the server's own sum / count, where it has them."""
        pairs = {"ttft": self.from_sending("ttft_s"), "itl": self.itl}
        return {name: {"client_s": ours.mean_s, "client_n": ours.n, "server_s": theirs["mean"], "server_n": theirs["n"]}
                for name, ours in pairs.items() if ours and (theirs := self.server.get(name)) and theirs["mean"]}  # fmt: skip

    @property
    def faults(self) -> list[str]:
        """Why the run does not measure what was asked; empty where it does."""
        found, failed = [], [record for record in self.records if not record.complete]
        other = [answer.record for answer in self.done if answer.usage and answer.record.output_tokens != answer.record.asked_tokens]
        if failed:
            found.append(f"{len(failed)} of {len(self.records)} requests did not complete, the first: {failed[0].error or failed[0].finish}")
        if uncounted := sum(not answer.usage for answer in self.done):
            found.append(f"{uncounted} answers came without the server's count of tokens, so their length is not known")
        if other:
            worst = min(other, key=lambda record: record.output_tokens / record.asked_tokens)
            lengths = f"such as {worst.output_tokens} tokens for {worst.asked_tokens}"
            found.append(f"{len(other)} of {len(self.done)} answers have another length than asked, {lengths}")
        return found

    @property
    def warnings(self) -> list[str]:
        """What a reader of the numbers should know."""
        events, tokens = (sum(values) for values in zip(*((len(a.record.token_s), a.record.output_tokens) for a in self.done), strict=True))
        found = list(self.notes)
        if abs(events - tokens) > 0.02 * tokens:
            how = (
                "each one's tokens are known from its usage"
                if self.counted
                else "how many each brought is not told, so there is no inter-token latency"
            )
            found.append(f"{tokens:,} tokens came in {events:,} events: {how}")
        if (self.hit_fraction or 0) > 0.01:
            found.append(
                f"{units.format_percent(self.hit_fraction)} of the prompt tokens were in the prefix cache; a chat template starts all prompts alike"
            )
        if self.halves and abs(self.halves[1] / self.halves[0] - 1) > 0.05:
            both = " and ".join(map(units.format_seconds, self.halves))
            found.append(f"time per token in the two halves of the run: {both}. Growing caches, fewer answers in flight, heat or other work")
        if (pair := self.agreement().get("ttft")) and abs(pair["client_s"] - pair["server_s"]) > max(0.01, 0.1 * pair["server_s"]):
            both = " and ".join(units.format_seconds(pair[side]) for side in ("client_s", "server_s"))
            found.append(f"mean time to first token, here and as the server counts it: {both}. The network, a proxy, or other clients' requests")
        if unanswered := sum(not answer.record.answered for answer in self.done):
            found.append(f"{unanswered} answers ended inside their reasoning")
        return found

    def to_json(self, *, tokens: bool = False) -> dict:
        """Everything but the schedule; with `tokens`, when each event came and what it brought."""
        records = [asdict(answer.record) | {"reasoning_tokens": (answer.usage.get("completion_tokens_details") or {}).get("reasoning_tokens")}
                   | {"token_s": [round(at_s, 6) for at_s in answer.record.token_s], "tokens": answer.tokens} for answer in self.answers]  # fmt: skip
        if not tokens:
            records = [{name: value for name, value in record.items() if name not in ("token_s", "tokens")} for record in records]
        sent = {name: asdict(found) for name in ("ttft_s", "total_s") if (found := self.from_sending(name))}
        return {"measured_at": self.measured_at, "host": self.host, "model": self.model, "api": "chat" if self.load.chat else "completions",
                "loop": "open" if self.load.open_loop else "closed", "concurrency": self.load.concurrency, "warm_up": len(self.load.warm_up),
                "prompt_tokens_asked": span([arrival.prompt_tokens for arrival in self.load.schedule]), "valid": not self.faults,
                "faults": self.faults, "notes": self.warnings, "summary": self.summary.to_json(), "from_sending": sent,
                "inter_chunk": asdict(self.chunks) if self.chunks else None, "halves_s": self.halves, "prefix_hit_fraction": self.hit_fraction,
                "server": self.server, "agreement": self.agreement(), "must_move": self.moved, "requests": records}  # fmt: skip

    def __str__(self) -> str:
        summary, head = self.summary, f"{self.model} at {self.host}, {'chat' if self.load.chat else 'completions'}, {self.load}"
        lines = [f"{head}: {summary.completed} of {summary.requests} requests completed in {units.format_seconds(summary.duration_s)}",
                 *_lengths(self), *_times(self)]  # fmt: skip
        if summary.decode_tokens_per_s:
            rate = units.significant(summary.decode_tokens_per_s, 3)
            lines.append(f"decode throughput {rate} tokens/s, first tokens left out; {summary.occupancy:.1f} answers in flight")
        lines += [_server(self.server, self.hit_fraction)] if self.server else []
        lines += [self.moved["text"]] if self.moved else []
        return "\n".join([*lines, *(f"note: {line}" for line in self.warnings), *(f"INVALID: {line}" for line in self.faults)])

    __repr__ = __str__


def occupancy(records: Sequence[RequestRecord]) -> float | None:
    """Mean answers at once between their first and last token, over the time in which any is."""
    spans = sorted((record.token_s[0], record.token_s[-1]) for record in records if len(record.token_s) > 1)
    busy, end = 0.0, -inf
    for first, last in spans:
        busy += max(0.0, last - max(first, end))
        end = max(end, last)
    return sum(last - first for first, last in spans) / busy if busy else None


def span(counts: Sequence[int]) -> str:
    """Smallest to largest, once where they are the same."""
    low, high = min(counts, default=0), max(counts, default=0)
    return f"{low:,}" if low == high else f"{low:,}-{high:,}"


def _lengths(result: CheckResult) -> Iterator[str]:
    """Tokens asked and got."""
    got = [answer.record for answer in result.done]
    source = "server usage" if all(answer.usage for answer in result.done) else "events: the server counts no tokens"
    yield f"{'':<24}{'asked':>12}{'got':>12}   warm-up of {len(result.load.warm_up)} requests apart"
    yield f"{'prompt tokens':<24}{span([arrival.prompt_tokens for arrival in result.load.schedule]):>12}{span([r.prompt_tokens for r in got]):>12}"
    yield f"{'output tokens':<24}{span([r.asked_tokens for r in got]):>12}{span([r.output_tokens for r in got]):>12}   {source}"


def _times(result: CheckResult) -> Iterator[str]:
    """Each latency: p50, p99, mean, how many, and the server's own mean where it counts from the same moment."""
    summary = result.summary
    reasoned = any(answer.record.first_answer_s is not None or not answer.record.answered for answer in result.done)
    rows = [("time to first token", summary.ttft, ""), ("  from the sending", result.from_sending("ttft_s"), "ttft"),
            ("time to first answer", summary.answer if reasoned else None, ""), ("inter-token latency", summary.itl, "itl"),
            ("inter-chunk latency", result.chunks if result.chunks != summary.itl else None, ""), ("time per output token", summary.tpot, "tpot"),
            ("whole request", summary.total, ""), ("  from the sending", result.from_sending("total_s"), "total"),
            ("client's own queue", summary.queue, "")]  # fmt: skip
    yield f"{'':<24}" + "".join(f"{head:>12}" for head in ("p50", "p99", "mean", "n", "server mean"))
    for name, spread, quantity in rows:
        if spread:
            seconds = [spread.p50_s, spread.p99_s, spread.mean_s, result.server.get(quantity, {}).get("mean")]
            p50, p99, mean, server = ("-" if value is None else units.format_seconds(value) for value in seconds)
            yield f"{name:<24}{p50:>12}{p99:>12}{mean:>12}{spread.n:>12,}{server:>12}"


def _server(server: dict, hit_fraction: float | None) -> str:
    """What the server says of itself, in one line."""
    parts = [f"{name} {server[name]['mean']:.1f} mean, {server[name]['max']:.0f} most" for name in ("running", "waiting") if name in server]
    parts += [f"KV used {units.format_percent(server['kv_used']['max'])} at most"] if "kv_used" in server else []
    parts += [f"prefix hits {units.format_percent(hit_fraction)}"] if hit_fraction is not None else []
    parts += [f"{server['preemptions']['sum']:.0f} preemptions"] if "preemptions" in server else []
    return f"the server ({server['engine']}): {'; '.join(parts)}"


def must_move(result: CheckResult, config: catalog.ModelConfig, *, read_bytes_per_s: float, hardware: str, dtype: str = "bfloat16",
              kv_bytes_per_value: float = 2.0) -> dict | None:  # fmt: skip
    """Bytes that one decode step of the run had to read, beside the mean time between events; None where there was no such time.

        weights once + occupancy * KV bytes at the mean context, over read_bytes_per_s

    An event of several steps makes the time longer, so the utilisation is never overstated. Taught in: lessons/09.
    """
    if not result.chunks or not result.chunks.mean_s:
        return None
    batch, done = max(1, round(result.summary.occupancy or 1)), [answer.record for answer in result.done]
    context = round(sum(record.prompt_tokens + record.output_tokens / 2 for record in done) / len(done))
    weights = cost.weight_bytes_per_step(config, dtype_bytes=catalog.dtype_bytes(dtype), batch=batch)
    kv = batch * cost.kv_bytes(config, context=context, dtype_bytes=kv_bytes_per_value)
    step_s, floor_s = result.chunks.mean_s, (weights + kv) / read_bytes_per_s
    fraction, verdict = utilisation(weights + kv, step_s, read_bytes_per_s)
    text = (f"{config.name} {dtype} must read {units.format_bytes(weights)} of weights and {units.format_bytes(kv)} of KV in a step of {batch} at "
            f"{context:,} tokens: {units.format_seconds(floor_s)} at the {units.format_bandwidth(read_bytes_per_s)} of {hardware}; "
            f"measured {units.format_seconds(step_s)}, {verdict}")  # fmt: skip
    return {"model": config.name, "hardware": hardware, "dtype": dtype, "batch": batch, "context": context, "weight_bytes": weights,
            "kv_bytes": kv, "floor_s": floor_s, "measured_s": step_s, "fraction_of_roof": fraction, "verdict": verdict, "text": text}  # fmt: skip
