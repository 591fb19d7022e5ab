"""What speculation pays: expected tokens per round, the price of a verification pass, speed-up, break-even, the best K.

    speed-up = expected_tokens(acceptance, K) * step_s / (K draft steps + one pass of K + 1 tokens)

`acceptance` is the probability that a tested draft is kept, taken as the same at each place and independent. Copies from the
text come in runs, so for them the `first` draft of a block has a probability of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from decodelab.arithmetic.catalog import ModelConfig
from decodelab.arithmetic.cost import Constants, attention_flops, kv_bytes, step_time, weights_time


def overlap(p: Sequence[float], q: Sequence[float]) -> float:
    """Acceptance of drafts drawn from q against a target of distribution p: sum of min(p, q).

    Source: Leviathan et al. 2023, corollary 3.6. Taught in: lessons/07, labs/07.

    >>> round(overlap([0.6, 0.3, 0.1], [0.3, 0.4, 0.3]), 2)
    0.7
    """
    return sum(min(pair) for pair in zip(p, q, strict=True))


def expected_tokens(acceptance: float, k: int, *, first: float | None = None) -> float:
    """Tokens that a round with `k` drafts emits: the accepted ones and one of the target's own.

        1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a), with `first`: 1 + first * (1 + a + ... + a^(k-1))

    Source: Leviathan et al. 2023, equation 1. Taught in: lessons/07. Raises: ValueError for acceptance outside 0 ... 1, k below 0.

    >>> [round(expected_tokens(0.7, k), 4) for k in (1, 2, 4)], expected_tokens(1.0, 8, first=0.5)
    ([1.7, 2.19, 2.7731], 5.0)
    """
    first = acceptance if first is None else first
    if wrong := [each for each in (acceptance, first) if not 0 <= each <= 1 or k < 0]:
        raise ValueError(f"acceptance is {wrong[0]} and k {k}; acceptance must be from 0 to 1 and k at least 0")
    return 1 + first * sum(acceptance**place for place in range(k))


def acceptance_for(tokens: float, k: int) -> float | None:
    """The acceptance at which a round with `k` drafts emits `tokens` on average; None where none does, outside 1 ... k + 1.

    >>> round(acceptance_for(2.7731, 4), 4), acceptance_for(5.5, 4)
    (0.7, None)
    """
    if k < 1 or not 1 <= tokens <= k + 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if expected_tokens(middle, k) < tokens else (low, middle)
    return round(high, 12)


def verify_time(config: ModelConfig, constants: Constants, *, k: int, context: int, batch: int = 1,
                weight_bytes_per_value: float = 2, kv_bytes_per_value: float = 2) -> float:  # fmt: skip
    """Seconds of one pass over the last token and `k` drafts of `batch` sequences, `context` tokens each with the last one.

    As a step, with batch * (k + 1) rows; unlike a prefill, the output matrix runs on all of them. The cache is read once
    for all k + 1 queries; of a mixture, more tokens wake more experts. Taught in: lessons/07.
    """
    rows, ends = batch * (k + 1), context + k
    weights = weights_time(config, constants, tokens=rows, logit_rows=rows, dtype_bytes=weight_bytes_per_value)
    reads = batch * kv_bytes(config, context=ends, dtype_bytes=kv_bytes_per_value) / constants.kv_bytes_per_s
    scores = batch * sum(attention_flops(config, new_tokens=1, context=at) for at in range(context, ends + 1)) / constants.flops_per_s
    return constants.overhead_s(config, batch=rows) + weights + max(reads, scores)


@dataclass(frozen=True, kw_only=True)
class RoundPrice:
    """Seconds of a round with `k` drafts and of the plain step it competes with, priced by `round_price` or measured."""

    k: int
    step_s: float
    draft_s: float  # all k drafts
    verify_s: float

    def speedup(self, acceptance: float) -> float:
        """Decoding time without speculation over the time with it; below 1 it loses."""
        return speedup([self], acceptance)

    @property
    def break_even(self) -> float | None:
        """The least acceptance at which the round loses nothing, 0 where it never does; None where even 1 is too little."""
        return acceptance_for(max(1.0, (self.draft_s + self.verify_s) / self.step_s), self.k)


def round_price(target: ModelConfig, constants: Constants, *, k: int, context: int, batch: int = 1, draft: ModelConfig | None = None,
                draft_constants: Constants | None = None, block_constants: Constants | None = None, **formats: float) -> RoundPrice:  # fmt: skip
    """Price of a round at `context` tokens per sequence, the last written one among them; without `draft`, drafts cost nothing.

    `draft_constants` and `block_constants` hold where the draft, or a pass of several tokens, runs otherwise than a step
    of the target. `formats` are bytes per value. Raises: ValueError for k below 0, context or batch below 1. Taught in: lessons/07.
    """
    if k < 0 or context < 1 or batch < 1:
        raise ValueError(f"k is {k}, context {context} and batch {batch}; k must be at least 0, context and batch at least 1")
    places = range(context, context + k) if draft else ()
    draft_s = sum(step_time(draft, draft_constants or constants, context=at, batch=batch, **formats) for at in places)
    step_s = step_time(target, constants, context=context, batch=batch, **formats)
    blocks = block_constants or constants
    return RoundPrice(
        k=k, step_s=step_s, draft_s=draft_s, verify_s=verify_time(target, blocks, k=k, context=context, batch=batch, **formats) if k else step_s
    )


def speedup(rounds: Iterable[RoundPrice], acceptance: float, *, first: float | None = None) -> float:
    """Decoding time without speculation over the time with it, of rounds that differ in price and number of drafts.

    A prompt lookup finds nothing in one round and a full block in the next: the mean of their k has not their mean price.
    Raises: ValueError where there is no round.
    """
    rounds = list(rounds)
    if not rounds:
        raise ValueError("there is no round to price; a request needs at least two tokens, for the first comes from prefill")
    plain_s = sum(expected_tokens(acceptance, each.k, first=first) * each.step_s for each in rounds)
    return plain_s / sum(each.draft_s + each.verify_s for each in rounds)


def best_k(prices: Iterable[RoundPrice], acceptance: float) -> RoundPrice | None:
    """The price with the largest speed-up at this acceptance; None where none is above 1: do not speculate."""
    winner = max(prices, key=lambda price: price.speedup(acceptance), default=None)
    return winner if winner and winner.speedup(acceptance) > 1 else None
