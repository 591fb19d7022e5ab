"""From logits to a token: temperature, top-k, top-p, an explicit generator. Temperature 0 is greedy and draws nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Real

import torch
from torch import Tensor


class LogitsError(ValueError):
    """Logits that no token can be chosen from: NaN, +inf, or a row with every token at -inf."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a token is chosen. `temperature` 0 takes the largest logit; `top_k` 0 and `top_p` 1 are off.

    Raises: ValueError for a negative or NaN temperature, a negative top_k, a top_p outside (0, 1].
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, Real) and isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; it must be 0 (greedy) or a positive number")
        if not isinstance(self.top_k, int) or self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}; it must be 0 (off) or a positive count")
        if not isinstance(self.top_p, Real) or not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must be above 0 and at most 1 (off)")


GREEDY = Sampling()


def require_finite(logits: Tensor) -> None:
    """Raises LogitsError, naming the row, unless each row of (B, V) has a largest finite logit and no NaN."""
    largest = logits.max(dim=-1).values  # (B,); NaN spreads, so one number per row tells all three faults
    bad = ~torch.isfinite(largest)
    if bad.any():
        row = int(bad.nonzero()[0])
        found = {float("inf"): "+inf", float("-inf"): "-inf for every token"}.get(float(largest[row]), "NaN")
        raise LogitsError(f"logits of row {row} hold {found}: no token can be chosen. Check the weights and the cache; nothing was drawn.")


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution (B, V) float32 that a draw uses; one-hot at temperature 0.

    Scaled in float32 after subtracting the row's maximum, so a tiny temperature cannot overflow.
    """
    logits = logits.float()
    require_finite(logits)
    if sampling.temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    scaled = (logits - logits.max(-1, keepdim=True).values) / max(sampling.temperature, torch.finfo(torch.float32).tiny)
    if 0 < sampling.top_k < logits.shape[-1]:
        keep = scaled.topk(sampling.top_k, dim=-1).indices
        scaled = torch.full_like(scaled, -torch.inf).scatter(-1, keep, scaled.gather(-1, keep))
    return nucleus(torch.softmax(scaled, dim=-1), sampling.top_p)


def nucleus(p: Tensor, top_p: float) -> Tensor:
    """Keeps, in each row, the smallest set of likeliest tokens whose sum is at least `top_p`, and renormalises."""
    if top_p >= 1:
        return p
    ranked, order = p.sort(dim=-1, descending=True, stable=True)
    before = ranked.cumsum(-1) - ranked  # probability of all likelier tokens
    kept = ranked * (before < top_p)
    kept[..., 0] = ranked[..., 0]  # also where top_p is too small for float32
    return torch.zeros_like(p).scatter_(-1, order, kept / kept.sum(-1, keepdim=True))


def sample(logits: Tensor, sampling: Sampling = GREEDY, *, generator: torch.Generator | None = None) -> Tensor:
    """One token per row: (B, V) -> (B,) int64. Greedy consumes no random number.

    Raises: LogitsError before anything is drawn.
    """
    if sampling.temperature == 0 or sampling.top_k == 1:
        require_finite(logits)
        return logits.argmax(-1)
    return torch.multinomial(probabilities(logits, sampling), 1, generator=generator).squeeze(-1)


def sample_rows(logits: Tensor, samplings: Sequence[Sampling], *, generators: Sequence[torch.Generator | None]) -> Tensor:
    """One token per row with each row's own settings and generator, so a row never depends on its neighbours."""
    rows = [sample(row[None], sampling, generator=generator) for row, sampling, generator in zip(logits, samplings, generators, strict=True)]
    return torch.cat(rows)
