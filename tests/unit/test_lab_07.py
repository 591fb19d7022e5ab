"""Lab 07: its exercises in plain lists are the library's rule on tensors, and their values by hand."""

from math import sqrt
from random import Random

import pytest
import torch

from decodelab.arithmetic.speculation import expected_tokens, overlap
from decodelab.decoder.speculative import residual, verify
from decodelab.teaching import exercises

EXERCISES = exercises.load()
KEPT, REPLACEMENT, EVEN, ASKED = (EXERCISES[name].reference for name in ("kept_drafts", "replacement", "break_even", "drafts_to_ask"))


def rounds(seed: int, *, k: int = 4, tokens: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """p (64, k + 1, V), q (64, k, V) and drafts of q (64, k)."""
    dice = torch.Generator().manual_seed(seed)
    p, q = (torch.rand((64, places, tokens), generator=dice) ** 2 for places in (k + 1, k))
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    return p, q, torch.multinomial(q.view(-1, tokens), 1, generator=dice).view(64, k)


def test_drafts_kept_are_those_of_verify_on_the_same_random_numbers():
    p, q, drafts = rounds(1)
    kept, _ = verify(p, q, drafts, generator=torch.Generator().manual_seed(2))
    uniforms = torch.rand(drafts.shape, generator=torch.Generator().manual_seed(2))
    ours = [KEPT(d.tolist(), p=a[:-1].tolist(), q=b.tolist(), uniforms=u.tolist()) for d, a, b, u in zip(drafts, p, q, uniforms, strict=True)]
    assert ours == kept.tolist() and set(ours) == {0, 1, 2, 3, 4}


def test_the_replacement_is_the_residual():
    p, q, _ = rounds(3, k=1)
    for of_p, of_q, left in zip(p[:, 0], q[:, 0], residual(p[:, :1], q)[:, 0], strict=True):
        assert [REPLACEMENT(token, p=of_p.tolist(), q=of_q.tolist()) for token in range(5)] == pytest.approx(left.tolist(), abs=1e-5)


def written(p: list[float], q: list[float], *, count: int, mistake: int | None = None) -> list[float]:
    """Shares of the first tokens of `count` rounds of one draft, by the exercises alone; the rejected are replaced by a mistake where asked."""
    rng, tokens = Random(4), range(len(p))
    replace = REPLACEMENT if mistake is None else EXERCISES["replacement"].mistakes[mistake].wrong
    left = [replace(token, p=p, q=q) for token in tokens]
    shares = [0.0] * len(p)
    for draft in rng.choices(tokens, q, k=count):
        kept = KEPT([draft], p=[p], q=[q], uniforms=[rng.random()])
        shares[draft if kept else rng.choices(tokens, left)[0]] += 1 / count
    return shares


def test_both_together_write_p_and_a_draw_from_p_does_not():
    """20,000 rounds on p = (0.6, 0.3, 0.1), q = (0.3, 0.4, 0.3); replacing from p gives min(p, q) + 0.3 p."""
    p, q, count = [0.6, 0.3, 0.1], [0.3, 0.4, 0.3], 20_000
    spread = [3 * sqrt(x * (1 - x) / count) for x in p]
    assert all(abs(share - x) < three for share, x, three in zip(written(p, q, count=count), p, spread, strict=True))
    assert written(p, q, count=count, mistake=0) == pytest.approx([0.48, 0.39, 0.13], abs=0.012)


def test_by_hand():
    assert KEPT([0, 1, 0], p=[[0.6, 0.4]] * 3, q=[[0.5, 0.5]] * 3, uniforms=[0.99, 0.81, 0.0]) == 1
    assert (
        REPLACEMENT(0, p=[0.5, 0.2, 0.3], q=[0.0, 1.0, 0.0]) == pytest.approx(0.5 / (1 - overlap([0.5, 0.2, 0.3], [0, 1, 0]))) == pytest.approx(0.625)
    )
    assert EVEN(1, draft_cost=0.1, pass_cost=1.2) == pytest.approx(0.3)  # 1 + a = 1.3
    assert EVEN(2, draft_cost=0.1, pass_cost=1.55) == pytest.approx(0.5)  # 1 + a + a^2 = 1.75
    gains = [expected_tokens(0.7, k) / (1 + 0.1 * k) for k in range(10)]
    assert ASKED(0.7, draft_s=0.1, pass_s=[1.0] * 10) == gains.index(max(gains)) == 4
    assert ASKED(1.0, draft_s=1.0, pass_s=[1.0, 1.01]) == 0
