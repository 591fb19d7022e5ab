"""What speculation pays, by hand: tokens per round, the price of a block, break-even against draft cost, K, batch and context."""

from dataclasses import replace

import pytest

from decodelab.arithmetic import cost, speculation
from decodelab.arithmetic.catalog import hardware, model
from decodelab.arithmetic.cost import Constants
from decodelab.arithmetic.speculation import RoundPrice, acceptance_for, best_k, expected_tokens, overlap, round_price, verify_time

GPT2, LLAMA, QWEN = model("gpt2"), model("llama-3.1-8b"), model("qwen3-0.6b")
H200 = cost.floor_constants(hardware("h200-sxm"))
SLOW = Constants(weight_bytes_per_s=1e9, kv_bytes_per_s=5e8, flops_per_s=1e12, step_overhead_s=1e-3, layer_overhead_s=1e-4, per_row_s=1e-5,
                 weight_rows_bytes_per_s=8e8, layer_overhead_rows_s=2e-4)  # fmt: skip


def test_tokens_per_round():
    """B033: 0.7 gives 1.70, 2.19, 2.7731. Nothing accepted gives the target's own token, everything K + 1."""
    assert [round(expected_tokens(0.7, k), 4) for k in (0, 1, 2, 4)] == [1, 1.7, 2.19, 2.7731]
    assert [expected_tokens(0, k) for k in (0, 3)] == [1, 1] and [expected_tokens(1, k) for k in (0, 3)] == [1, 4]
    assert expected_tokens(0.8, 7) == pytest.approx((1 - 0.8**8) / 0.2)  # Leviathan et al. 2023, table 2: 4.16


def test_tokens_per_round_of_a_simulated_rule():
    """By counting every outcome of three drafts, each kept with 0.6: sum over outcomes of probability times tokens."""
    outcomes = [(0.4, 1), (0.6 * 0.4, 2), (0.36 * 0.4, 3), (0.216, 4)]
    assert expected_tokens(0.6, 3) == pytest.approx(sum(chance * tokens for chance, tokens in outcomes))


def test_overlap():
    """B033, and its ends: equal distributions always agree, disjoint ones never."""
    assert overlap([0.6, 0.3, 0.1], [0.3, 0.4, 0.3]) == pytest.approx(0.7)
    assert overlap([0.25, 0.75], [0.25, 0.75]) == 1 and overlap([1, 0], [0, 1]) == 0
    with pytest.raises(ValueError):
        overlap([1.0], [0.5, 0.5])


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.7, 1.0])
def test_acceptance_is_found_back(acceptance, k):
    assert acceptance_for(expected_tokens(acceptance, k), k) == pytest.approx(acceptance, abs=1e-9)


def test_no_acceptance_gives_more_than_a_whole_block():
    assert acceptance_for(4.0, 3) == 1 and acceptance_for(4.01, 3) is None and acceptance_for(0.9, 3) is None and acceptance_for(1, 0) is None


def test_a_block_by_hand():
    """3 sequences of 4 rows: 12 rows of overhead, weights at the rows' bandwidth, 103 tokens of K and V each, once."""
    overhead = 1e-3 + 12 * 2e-4 + 12 * 1e-5
    weights = (cost.weight_bytes_per_step(GPT2) + 11 * 2 * 768 * 2) / 8e8  # 11 more rows of two embeddings
    block = verify_time(GPT2, SLOW, k=3, context=100, batch=3)
    assert block == pytest.approx(overhead + weights + 3 * 103 * 36_864 / 5e8)


def test_the_output_matrix_runs_on_every_row_of_a_block():
    """Where arithmetic binds, k + 1 rows cost k + 1 times the products of a step; a prefill would count one row of the output matrix."""
    weak = Constants(weight_bytes_per_s=1e18, kv_bytes_per_s=1e18, flops_per_s=1e9)
    scores = sum(cost.attention_flops(GPT2, new_tokens=1, context=at) for at in (10, 11, 12))
    one = 3 * cost.weight_flops(GPT2, tokens=1, logit_rows=1) + scores
    assert [verify_time(GPT2, weak, k=2, context=10, batch=batch) for batch in (1, 4)] == pytest.approx([one / 1e9, 4 * one / 1e9])
    assert scores == cost.attention_flops(GPT2, new_tokens=3, context=12)


def test_a_block_of_latent_attention_scores_against_the_latent():
    """An MLA block attends as its steps do, not as its prefill: (k + 1) queries of a step's FLOPs each."""
    mla = model("deepseek-v3")
    weak = Constants(weight_bytes_per_s=1e18, kv_bytes_per_s=1e18, flops_per_s=1e12)
    block, weights = (verify_time(mla, weak, k=1, context=4000), cost.weight_flops(mla, tokens=2, logit_rows=2) / 1e12)
    assert block - weights == pytest.approx(sum(cost.attention_flops(mla, new_tokens=1, context=at) for at in (4000, 4001)) / 1e12)


@pytest.mark.parametrize("batch", [1, 5])
def test_a_block_without_drafts_is_a_step(batch):
    assert verify_time(GPT2, SLOW, k=0, context=77, batch=batch) == pytest.approx(cost.step_time(GPT2, SLOW, context=77, batch=batch))
    price = round_price(GPT2, SLOW, k=0, context=77, batch=batch, block_constants=H200, draft=QWEN)
    assert price.draft_s == 0 and price.verify_s == price.step_s and price.speedup(0.5) == 1 and price.break_even is None


def test_a_round_is_k_growing_draft_steps_and_a_block():
    formats = {"batch": 5, "weight_bytes_per_value": 4, "kv_bytes_per_value": 1}
    price = round_price(LLAMA, H200, k=3, context=1000, draft=QWEN, **formats)
    assert price.draft_s == pytest.approx(sum(cost.step_time(QWEN, H200, context=at, **formats) for at in (1000, 1001, 1002)))
    assert price.verify_s == pytest.approx(verify_time(LLAMA, H200, k=3, context=1000, **formats))
    assert price.step_s == cost.step_time(LLAMA, H200, context=1000, **formats)
    assert round_price(LLAMA, H200, k=3, context=1000).draft_s == 0


def test_a_draft_and_a_block_may_run_on_other_constants():
    price = round_price(LLAMA, H200, k=2, context=10, draft=QWEN, draft_constants=SLOW, block_constants=replace(H200, step_overhead_s=1.0))
    assert price.draft_s == pytest.approx(sum(cost.step_time(QWEN, SLOW, context=at) for at in (10, 11)))
    assert price.verify_s == pytest.approx(1 + verify_time(LLAMA, H200, k=2, context=10)) and price.step_s < 0.01


def test_speedup_and_break_even_by_hand():
    """A round of 2.5 steps: at 0.7 and K = 4 it gives 2.7731 tokens, so 1.109 times; it breaks even where 1 + a + ... + a^4 = 2.5."""
    price = RoundPrice(k=4, step_s=2.0, draft_s=2.4, verify_s=2.6)
    assert price.speedup(0.7) == pytest.approx(2.7731 / 2.5)
    assert price.speedup(price.break_even) == pytest.approx(1) and 0.6 < price.break_even < 0.7
    assert price.speedup(0.6) < 1 < price.speedup(0.7)
    assert RoundPrice(k=4, step_s=1.0, draft_s=4.0, verify_s=1.2).break_even is None  # 5.2 steps for at most 5 tokens
    assert RoundPrice(k=4, step_s=1.0, draft_s=0.0, verify_s=0.9).break_even == 0


def test_where_it_loses():
    """Break-even rises with the draft's price, with the batch once arithmetic binds, and falls with the context that a block reads once."""

    def break_even(draft=QWEN, **where):
        return round_price(LLAMA, H200, **{"k": 4, "context": 1000, **where}, draft=draft).break_even

    assert break_even(draft=None) < break_even() < break_even(draft=model("llama-3.2-3b")) < 1
    assert break_even(draft=LLAMA) is None  # four steps and a block for at most five tokens
    assert break_even(draft=None) < 0.01 < 0.5 < break_even(draft=None, batch=256)  # 1,280 rows are far beyond the ridge of 206
    assert break_even(draft=None, batch=256, context=30_000) < break_even(draft=None, batch=256)


def test_the_best_k_grows_with_acceptance():
    prices = [round_price(LLAMA, H200, k=k, context=1000, draft=QWEN) for k in range(1, 17)]
    chosen = [best_k(prices, acceptance) for acceptance in (0.5, 0.7, 0.9)]
    assert [price.k for price in chosen] == sorted({price.k for price in chosen})  # strictly
    assert all(chosen[1].speedup(0.7) >= price.speedup(0.7) for price in prices)
    assert best_k(prices, 0.0) is None and best_k([], 0.9) is None


@pytest.mark.parametrize(("acceptance", "k"), [(-0.1, 2), (1.1, 2), (float("nan"), 2), (0.5, -1)])
def test_bad_acceptance_is_refused(acceptance, k):
    with pytest.raises(ValueError, match=f"acceptance is {acceptance} and k {k}; acceptance must be from 0 to 1 and k at least 0"):
        expected_tokens(acceptance, k)


@pytest.mark.parametrize("bad", [{"k": -1}, {"context": 0}, {"batch": 0}])
def test_bad_prices_are_refused(bad):
    with pytest.raises(ValueError, match=r"k must be at least 0, context and batch at least 1"):
        round_price(GPT2, SLOW, **{"k": 1, "context": 10, "batch": 1, **bad})


def test_the_arithmetic_is_in_the_docstrings():
    """The doctests run here, for the suite runs none by itself."""
    import doctest

    result = doctest.testmod(speculation)
    assert result.failed == 0 and result.attempted >= 3
