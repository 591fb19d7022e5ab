"""What follows from the formula, by hand: capacity, splits, Amdahl, price, agents, ridge and balance. Bad input is one line."""

from dataclasses import replace
from math import inf, isnan

import pytest

from decodelab.arithmetic import cost, planning
from decodelab.arithmetic.catalog import Workload, hardware, model
from decodelab.arithmetic.cost import Constants
from decodelab.arithmetic.planning import DoesNotFit

GPT2 = model("gpt2")
LLAMA = model("llama-3.1-8b")
H200 = cost.floor_constants(hardware("h200-sxm"))
SLOW = Constants(weight_bytes_per_s=1e9, kv_bytes_per_s=5e8, flops_per_s=1e12, step_overhead_s=1e-3, layer_overhead_s=1e-4, per_row_s=1e-5)


# ---- capacity --------------------------------------------------------------------------------------------------------


def test_sequences_that_fit_by_hand():
    """1 GB - 124,439,808 * 2 B = 751,120,384 B; a sequence of 1,024 tokens is 37,748,736 B: 19. With a tenth kept back, 17."""
    whole = {"memory_bytes": 1e9, "context": 1024}
    assert planning.sequences_that_fit(GPT2, reserved_fraction=0, **whole) == 19
    assert planning.sequences_that_fit(GPT2, **whole) == 17
    assert planning.sequences_that_fit(GPT2, reserved_fraction=0, kv_bytes_per_value=1, **whole) == 39  # B073: 8-bit KV holds twice as much


def test_capacity_at_its_edges():
    """Exactly three fit, one byte less holds two; weights alone hold none; one byte less is refused with both sizes."""
    weights, each = 124_439_808 * 2, 100 * 36_864

    def fits(memory):
        return planning.sequences_that_fit(GPT2, memory_bytes=memory, context=100, reserved_fraction=0)

    assert (fits(weights + 3 * each), fits(weights + 3 * each - 1), fits(weights)) == (3, 2, 0)
    with pytest.raises(DoesNotFit, match=r"gpt2 needs 0.2 GB for weights and 0.2 GB is there; use fewer"):
        fits(weights - 1)
    with pytest.raises(ValueError, match="context is 0; it must be at least 1"):
        planning.sequences_that_fit(GPT2, memory_bytes=1e9, context=0)


# ---- splits ----------------------------------------------------------------------------------------------------------


def test_split_by_tensor_divides_the_bytes_and_adds_exchanges():
    """overhead + (weights + KV) / devices + 2 * 12 layers * exchange."""
    overhead = 1e-3 + 12 * 1e-4 + 1e-5
    streaming = cost.weight_bytes_per_step(GPT2) / 1e9 + 1024 * 36_864 / 5e8
    step = planning.tensor_split_step(GPT2, SLOW, devices=4, context=1024, exchange_s=2e-5)
    assert step == pytest.approx(overhead + streaming / 4 + 24 * 2e-5)
    assert planning.tensor_split_step(GPT2, SLOW, devices=1, context=1024, exchange_s=2e-5) == pytest.approx(overhead + streaming)


def test_split_by_tensor_can_lose():
    """Where a step streams little, 24 exchanges of 0.1 ms cost more than seven more devices save."""
    tiny = replace(SLOW, weight_bytes_per_s=1e12, kv_bytes_per_s=1e12)
    alone = planning.tensor_split_step(GPT2, tiny, devices=1, context=1024, exchange_s=1e-4)
    assert planning.tensor_split_step(GPT2, tiny, devices=8, context=1024, exchange_s=1e-4) > alone


def test_split_by_layer_is_no_shorter():
    """One device's step plus a hop between neighbours: 8 devices have 7 of them."""
    alone = cost.step_time(GPT2, SLOW, context=1024)
    assert planning.layer_split_step(GPT2, SLOW, devices=8, context=1024, hop_s=1e-3) == pytest.approx(alone + 7e-3)
    assert planning.layer_split_step(GPT2, SLOW, devices=1, context=1024, hop_s=1e-3) == alone


@pytest.mark.parametrize("split", [planning.tensor_split_step, planning.layer_split_step])
def test_a_split_needs_a_device(split):
    cost_name = "exchange_s" if split is planning.tensor_split_step else "hop_s"
    with pytest.raises(ValueError, match="devices is 0; it must be at least 1"):
        split(GPT2, SLOW, devices=0, context=10, **{cost_name: 1e-5})


# ---- bounds ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("share", "speedup", "faster"),
    [(0.5, 2, 4 / 3), (0.5, inf, 2), (0.0, inf, 1), (1.0, 2, 2), (1.0, inf, inf), (0.9, 10, 1 / 0.19), (0.25, 0.5, 0.8)],
)
def test_amdahl(share, speedup, faster):
    assert planning.amdahl(share, speedup=speedup) == pytest.approx(faster)


@pytest.mark.parametrize(("share", "speedup"), [(-0.1, 2), (1.1, 2), (0.5, 0), (0.5, -1), (float("nan"), 2)])
def test_amdahl_refuses_what_is_no_share_or_speedup(share, speedup):
    with pytest.raises(ValueError, match="share must be from 0 to 1 and speedup above 0"):
        planning.amdahl(share, speedup=speedup)


# ---- reasoning, price, energy ----------------------------------------------------------------------------------------


def test_hidden_reasoning_costs_the_same_steps():
    """Total and price depend on reasoning + answer alone; the first answer token waits for every hidden one."""
    paid = {"prompt": 50, "dollars_per_hour": 3.6, "watts": 500}
    hidden = planning.answer_cost(GPT2, SLOW, reasoning=90, answer=10, **paid)
    visible = planning.answer_cost(GPT2, SLOW, reasoning=0, answer=100, **paid)
    assert (hidden.total_s, hidden.dollars, hidden.joules) == (visible.total_s, visible.dollars, visible.joules)
    assert visible.first_answer_s == visible.ttft_s == hidden.ttft_s and visible.reasoning_share == 0
    steps = sum(cost.step_time(GPT2, SLOW, context=50 + n) for n in range(1, 91))
    assert hidden.first_answer_s == pytest.approx(hidden.ttft_s + steps)
    assert hidden.reasoning_share == pytest.approx(steps / hidden.total_s)


def test_price_and_energy_by_hand():
    """3.60 dollars an hour is 0.1 cent a second; half of it for each of two that share; twice for two devices."""
    request = {"prompt": 50, "reasoning": 5, "answer": 10, "dollars_per_hour": 3.6, "watts": 500}
    one = planning.answer_cost(GPT2, SLOW, **request)
    assert one.dollars == pytest.approx(0.001 * one.total_s) and one.joules == pytest.approx(500 * one.total_s)
    both = planning.answer_cost(GPT2, SLOW, batch=2, devices=2, **request)
    assert both.dollars == pytest.approx(0.001 * both.total_s) and both.total_s > one.total_s


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": 0}, "answer is 0"),
        ({"reasoning": -5}, "output_tokens is -4"),
        ({"prompt": 0}, "prompt_tokens is 0"),
        ({"devices": 0}, "devices is 0"),
    ],
)
def test_answers_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=f"{message}; it must be at least 1"):
        planning.answer_cost(GPT2, SLOW, **{"prompt": 5, "reasoning": 5, "answer": 10, "dollars_per_hour": 1, "watts": 1, **change})


def test_token_price():
    """1,000 in at 2 and 3,000 out at 10 dollars per million: 0.002 + 0.03, of which 15/16 is output."""
    dollars, share = planning.token_price(prompt=1_000, output=3_000, dollars_per_million_in=2, dollars_per_million_out=10)
    assert dollars == pytest.approx(0.032) and share == pytest.approx(15 / 16)


# ---- agents ----------------------------------------------------------------------------------------------------------


def turns(reuse_prefix, count=3):
    return planning.agent_turns(GPT2, SLOW, turns=count, first_prompt=10, tool_tokens=5, output=3, reuse_prefix=reuse_prefix)


def test_what_an_agent_reads_by_hand():
    """10 in, 3 out leaves 12 in the cache: the last token was written and never read back, so it comes with the 5 of the tool."""
    kept, again = turns(True), turns(False)
    assert [turn.prefill_tokens for turn in kept] == [10, 6, 6]
    assert [turn.prefill_tokens for turn in again] == [10, 18, 26]
    assert [turn.context for turn in kept] == [turn.context for turn in again] == [12, 20, 28]
    assert [turn.output_tokens for turn in kept] == [3, 3, 3]


def test_an_agents_times_are_the_formulas():
    """Decode does not care how the cache came to be; a kept prefix is attended to, not computed again."""
    kept, again = turns(True), turns(False)
    assert [turn.decode_s for turn in kept] == [turn.decode_s for turn in again]
    assert again[1].decode_s == cost.request_time(GPT2, SLOW, Workload(prompt_tokens=18, output_tokens=3)).decode_s
    assert again[2].prefill_s == cost.prefill_time(GPT2, SLOW, Workload(prompt_tokens=26, output_tokens=3))
    assert kept[2].prefill_s == cost.prefill_time(GPT2, SLOW, Workload(prompt_tokens=6, output_tokens=3), cached=20)
    assert kept[0] == again[0] and kept[2].prefill_s < again[2].prefill_s
    decode, prefill = sum(turn.decode_s for turn in again), sum(turn.prefill_s for turn in again)
    assert planning.decode_share(again) == pytest.approx(decode / (decode + prefill)) and planning.decode_share(kept) > planning.decode_share(again)


@pytest.mark.parametrize(
    ("change", "message"), [({"turns": 0}, "turns is 0"), ({"first_prompt": 0}, "prompt_tokens is 0"), ({"output": 0}, "output_tokens is 0")]
)
def test_agents_that_cannot_be(change, message):
    with pytest.raises(ValueError, match=f"{message}; it must be at least 1"):
        planning.agent_turns(GPT2, SLOW, **{"turns": 2, "first_prompt": 10, "tool_tokens": 5, "output": 3, "reuse_prefix": True, **change})


# ---- ridge, balance, plane -------------------------------------------------------------------------------------------


def test_ridge_by_hand():
    """2 bytes and 2 FLOP per weight: peak / bandwidth = 989e12 / 4.8e12 = 206; norms and the embedding row hardly count. 1 byte: half."""
    assert planning.ridge_batch(LLAMA, H200) == pytest.approx(989 / 4.8, rel=1e-3)
    assert planning.ridge_batch(LLAMA, H200, weight_bytes_per_value=1) == pytest.approx(989 / 9.6, rel=1e-3)
    assert planning.ridge_batch(LLAMA, replace(H200, flops_per_s=inf)) == inf


def test_the_ridge_is_where_a_step_starts_to_grow():
    """Below it a step's weight part does not change with the batch (but for embedding rows), above it doubles with it."""

    def step(batch):
        return cost.step_time(LLAMA, H200, context=0, batch=batch)

    assert step(200) == pytest.approx(step(1), rel=2e-4) and step(206) == pytest.approx(step(1), rel=1e-3)
    assert step(412) == pytest.approx(2 * step(206), rel=1e-3)


@pytest.mark.parametrize("prompt", [1, 100, 5_000, 50_000])
def test_balance_is_the_first_output_where_decode_leads(prompt):
    meets = planning.balance_output(LLAMA, H200, prompt=prompt)
    shares = [cost.request_time(LLAMA, H200, Workload(prompt_tokens=prompt, output_tokens=n)).decode_share for n in (meets - 1, meets)]
    assert shares[0] < 0.5 <= shares[1]


def test_balance_follows_batch_and_formats():
    """In a batch the weights are shared and prefill is not: decode needs more tokens to lead."""
    assert planning.balance_output(LLAMA, H200, prompt=5_000, batch=8) > planning.balance_output(LLAMA, H200, prompt=5_000)
    assert planning.balance_output(LLAMA, H200, prompt=5_000, weight_bytes_per_value=0.5) > planning.balance_output(LLAMA, H200, prompt=5_000)
    with pytest.raises(ValueError, match="prompt_tokens is 0"):
        planning.balance_output(LLAMA, H200, prompt=0)


def test_the_plane_is_request_time_and_ends_at_the_positions():
    """Rows are outputs, columns prompts; GPT-2 has 1,024 positions, so 1,000 in and 26 out (1,025 slots) is nan."""
    shares = planning.decode_shares(GPT2, SLOW, prompts=(10, 1_000), outputs=(1, 25, 26))
    assert shares[0] == [0, 0] and isnan(shares[2][1])
    assert shares[1][1] == cost.request_time(GPT2, SLOW, Workload(prompt_tokens=1_000, output_tokens=25)).decode_share
    assert 0 < shares[1][1] < shares[1][0] < shares[2][0] < 1
