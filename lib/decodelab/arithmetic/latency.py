"""What a served request's user feels, and what a server's run adds up to: TTFT, ITL, TPOT, goodput. No torch here.

The engine, the simulator and the load client fill the same records, so the same words mean the same times.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Literal

import numpy as np

from decodelab.arithmetic import units

Finish = Literal["length", "stop", "cancelled", "error"]
FEW = 100  # below so many samples a percentile is printed with its count


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """A spread of durations in seconds: how many, their mean, percentiles and extremes."""

    n: int
    mean_s: float
    p50_s: float
    p90_s: float
    p99_s: float
    max_s: float

    def __str__(self) -> str:
        few = f" (only {self.n} samples)" if self.n < FEW else ""
        return f"{units.format_seconds(self.p50_s)} p50, {units.format_seconds(self.p99_s)} p99{few}"


def percentiles(durations_s: Sequence[float], *, counts: Sequence[int] | None = None) -> Percentiles | None:
    """The spread of `durations_s`, each standing for its count where `counts` is given; None where there is none.

    A percentile is the smallest duration that at least that share does not exceed: no value is invented between two.

    >>> percentiles([0.01, 0.05], counts=[99, 1]).p99_s, percentiles([0.01, 0.05], counts=[98, 2]).p99_s
    (0.01, 0.05)
    """
    values = np.asarray(durations_s, dtype=float)
    weights = np.ones(len(values), dtype=np.int64) if counts is None else np.asarray(counts, dtype=np.int64)
    values, weights = values[weights > 0], weights[weights > 0]
    if not len(values):
        return None
    order = values.argsort(kind="stable")
    values, weights = values[order], weights[order]
    upto, n = weights.cumsum(), int(weights.sum())
    p50, p90, p99 = (float(values[np.searchsorted(upto, -(-n * share // 100))]) for share in (50, 90, 99))
    return Percentiles(n=n, mean_s=float((values * weights).sum() / n), p50_s=p50, p90_s=p90, p99_s=p99, max_s=float(values[-1]))


@dataclass(frozen=True, kw_only=True)
class RequestRecord:
    """One request as its user met it. All times are seconds from the start of the run; absent is None.

    `scheduled_s` is when the workload wanted it sent and `sent_s` when it was: a client that waits before sending has
    queued the user, so every latency below counts from the schedule.
    """

    id: str
    scheduled_s: float
    sent_s: float
    prompt_tokens: int
    asked_tokens: int  # output tokens asked for
    output_tokens: int  # as the server or the engine counts them
    token_s: tuple[float, ...] = ()  # when each token arrived; of a stream that sends several at once, each event's time, once
    first_answer_s: float | None = None  # the first token after hidden reasoning; None where there is no reasoning
    end_s: float | None = None
    finish: Finish = "length"
    preemptions: int = 0
    error: str = ""
    answered: bool = True  # False where it ended inside its reasoning

    @property
    def queue_s(self) -> float:
        """From the schedule to the sending: the client's own queue."""
        return self.sent_s - self.scheduled_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token, reasoning or answer, from the schedule."""
        return self.token_s[0] - self.scheduled_s if self.token_s else None

    @property
    def answer_s(self) -> float | None:
        """Time to first answer token, from the schedule; TTFT where nothing was reasoned, None where no answer came."""
        if not self.answered:
            return None
        return self.ttft_s if self.first_answer_s is None else self.first_answer_s - self.scheduled_s

    @property
    def decode_s(self) -> float | None:
        """From the first token to the last."""
        return self.token_s[-1] - self.token_s[0] if self.token_s else None

    @property
    def tpot_s(self) -> float | None:
        """Time per output token: (last token - first token) / (n - 1); None for fewer than two."""
        return self.decode_s / (self.output_tokens - 1) if self.token_s and self.output_tokens > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Times between arrivals. They are inter-token latencies only where each arrival is one token: see `single_tokens`."""
        return [after - before for before, after in zip(self.token_s, self.token_s[1:], strict=False)]

    @property
    def single_tokens(self) -> bool:
        """Whether each arrival was one token, so that `itl_s` may be called inter-token latency."""
        return len(self.token_s) == self.output_tokens

    @property
    def total_s(self) -> float | None:
        """From the schedule to the end."""
        return None if self.end_s is None else self.end_s - self.scheduled_s

    @property
    def complete(self) -> bool:
        """Whether it ended by itself."""
        return self.finish in ("length", "stop")


@dataclass(frozen=True, kw_only=True)
class Slo:
    """What a user is promised: time to first token, and the 99th percentile of his own inter-token latencies."""

    ttft_s: float = 1.0
    itl_p99_s: float = 0.05


@dataclass(frozen=True, kw_only=True)
class ServingSummary:
    """A run in numbers. Decode throughput leaves first tokens out: they come from prefill."""

    requests: int
    completed: int
    duration_s: float
    output_tokens: int
    decode_tokens_per_s: float | None
    ttft: Percentiles | None
    answer: Percentiles | None
    itl: Percentiles | None
    tpot: Percentiles | None
    total: Percentiles | None
    queue: Percentiles | None
    goodput_requests_per_s: float | None  # completed within the SLO, per second
    preemptions: int
    occupancy: float | None = None  # mean sequences in a decode step, over time
    kv_used_fraction: float | None = None  # mean share of the page pool that is held

    def to_json(self) -> dict:
        return asdict(self)


def within(record: RequestRecord, slo: Slo) -> bool:
    """Whether a completed request kept the promise."""
    itl = percentiles(record.itl_s)
    return record.complete and record.ttft_s is not None and record.ttft_s <= slo.ttft_s and (itl is None or itl.p99_s <= slo.itl_p99_s)


def summarise_requests(
    records: Sequence[RequestRecord], *, slo: Slo | None = None, occupancy: float | None = None, kv_used_fraction: float | None = None
) -> ServingSummary:
    """The run's numbers from its records. Failed and cancelled requests count as requests, not in any latency."""
    done = [record for record in records if record.complete]
    ends = [record.end_s for record in records if record.end_s is not None]
    duration = max(ends) - min(record.scheduled_s for record in records) if ends else 0.0
    busy = max((record.token_s[-1] for record in done if record.token_s), default=0) - min(
        (record.token_s[0] for record in done if record.token_s), default=0
    )
    decoded = sum(max(0, record.output_tokens - 1) for record in done)

    def spread(name: str) -> Percentiles | None:
        return percentiles([value for record in done if (value := getattr(record, name)) is not None])

    good = sum(within(record, slo) for record in done) if slo else None
    return ServingSummary(requests=len(records), completed=len(done), duration_s=duration, output_tokens=sum(record.output_tokens for record in done),
                          decode_tokens_per_s=decoded / busy if busy > 0 else None, ttft=spread("ttft_s"), answer=spread("answer_s"), tpot=spread("tpot_s"),
                          itl=percentiles([gap for record in done if record.single_tokens for gap in record.itl_s]), total=spread("total_s"),
                          queue=spread("queue_s"), goodput_requests_per_s=good / duration if good is not None and duration > 0 else None,
                          preemptions=sum(record.preemptions for record in records), occupancy=occupancy, kv_used_fraction=kv_used_fraction)  # fmt: skip
