"""The scheduler on a virtual clock: hand-stepped runs, the formula's own values, and stretches that change no number."""

import json
import random
from dataclasses import replace
from math import inf

import pytest

from decodelab import cli
from decodelab.arithmetic import cost, workload
from decodelab.arithmetic.catalog import Workload, hardware, model
from decodelab.arithmetic.cost import Constants
from decodelab.arithmetic.latency import Slo, summarise_requests
from decodelab.arithmetic.planning import DoesNotFit
from decodelab.arithmetic.workload import Arrival
from decodelab.measuring import machine
from decodelab.serving import simulator
from decodelab.serving.scheduler import Chunk, Limits, Plan, Request, Scheduler
from decodelab.serving.simulator import Price, capacity_requests_per_s, largest_batch, mean_context, simulate, simulate_pools

GPT2, LLAMA, WINDOWED, LATENT = (model(name) for name in ("gpt2", "llama-3.1-8b", "gpt-oss-20b", "deepseek-v3"))
SLOW = Constants(weight_bytes_per_s=1e9, kv_bytes_per_s=5e8, flops_per_s=1e12, step_overhead_s=1e-3, layer_overhead_s=1e-4, per_row_s=1e-5,
                 weight_rows_bytes_per_s=8e8)  # fmt: skip
CLOCK = Constants(weight_bytes_per_s=inf, kv_bytes_per_s=inf, step_overhead_s=1.0, per_row_s=0.1)  # a pass takes 1 s and 0.1 s a sequence


def arrival(at_s, prompt, output):
    return Arrival(at_s=at_s, prompt_tokens=prompt, output_tokens=output)


def run(arrivals, *, config=GPT2, constants=SLOW, pages=10_000, **rest):
    knobs = {name: rest.pop(name) for name in list(rest) if name in Limits.__dataclass_fields__}
    return simulate(arrivals, config=config, constants=constants, limits=Limits(pages=pages, **knobs), **rest)


def crowd(n, *, seed, rate_per_s, prompts=(1, 60), outputs=(1, 40)):
    rng = random.Random(seed)
    at_s = [rng.expovariate(rate_per_s)]
    while len(at_s) < n:
        at_s.append(at_s[-1] + rng.expovariate(rate_per_s))
    return [arrival(t, rng.randint(*prompts), rng.randint(*outputs)) for t in at_s]


# ---- the price of a pass ---------------------------------------------------------------------------------------------


def running(context, name=""):
    return Request(id=name, prompt_tokens=context - 1, max_tokens=9, generated=1, cached=context - 1)


@pytest.mark.parametrize("config", [GPT2, LLAMA, WINDOWED, LATENT], ids=lambda config: config.name)
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("flops_per_s", [1e12, 1e9])
def test_a_pass_of_one_kind_costs_what_the_formula_says(config, fused, flops_per_s):
    """Whether bytes or arithmetic decide."""
    machine, formats = replace(SLOW, flops_per_s=flops_per_s), {"weight_bytes_per_value": 1, "kv_bytes_per_value": 1}
    price = Price(config=config, constants=machine, fused=fused, **formats)
    assert price(Plan(decode=(running(300),) * 4)) == pytest.approx(cost.step_time(config, machine, context=300, batch=4, **formats), rel=1e-12)
    assert price(Plan(decode=(running(300),) * 3, padding=(running(301),))) == price(Plan(decode=(running(300),) * 4))
    chunk = Chunk(Request(id="a", prompt_tokens=90, max_tokens=1), 50, 40)
    shape = Workload(prompt_tokens=40, output_tokens=1, **formats)
    for batch in (1, 3):
        expected = cost.prefill_time(config, machine, replace(shape, batch=batch if fused else 1), cached=50) * (1 if fused else batch)
        assert price(Plan(prefill=(chunk,) * batch)) == pytest.approx(expected, rel=1e-12)


def test_a_fused_pass_reads_the_weights_once():
    """2 decodes and a chunk of 6: one overhead and one reading of weights for 8 rows, 3 sequences; else two passes."""
    plan = Plan(decode=(running(100), running(200)), prefill=(Chunk(Request(id="a", prompt_tokens=6, max_tokens=1), 0, 6),))
    overhead = 1e-3 + 12 * 1e-4 + 3 * 1e-5
    weights = cost.weight_bytes_per_step(GPT2, batch=8) / 8e8
    reads = (300 + 6) * 36_864 / 5e8
    assert Price(config=GPT2, constants=SLOW)(plan) == pytest.approx(overhead + weights + reads, rel=1e-9)
    apart = cost.step_time(GPT2, SLOW, context=150, batch=2) + cost.prefill_time(GPT2, SLOW, Workload(prompt_tokens=6, output_tokens=1))
    assert Price(config=GPT2, constants=SLOW, fused=False)(plan) == pytest.approx(apart, rel=1e-9)


# ---- by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", [GPT2, LLAMA, WINDOWED, LATENT], ids=lambda config: config.name)
def test_one_request_alone_is_the_formulas_request(config):
    """100 in, 300 out: the window of 128 is outgrown on the way; MLA decodes and prefills at different cost."""
    expected = cost.request_time(config, SLOW, Workload(prompt_tokens=100, output_tokens=300))
    found = run([arrival(5.0, 100, 300)], config=config)
    record = found.records[0]
    assert record.ttft_s == pytest.approx(expected.ttft_s, rel=1e-9) and record.total_s == pytest.approx(expected.total_s, rel=1e-9)
    assert record.itl_s[0] == pytest.approx(expected.itl_first_s, rel=1e-6) and record.itl_s[-1] == pytest.approx(expected.itl_last_s, rel=1e-6)
    assert found.summary.itl.n == 299 and found.summary.occupancy == 1 and found.busy_fraction == pytest.approx((1.0,))


def test_a_prompt_in_chunks_is_the_sum_of_its_passes():
    """10 tokens in chunks of 4: 4, 4 and 2, each against what is there."""
    passes = [cost.prefill_time(GPT2, SLOW, Workload(prompt_tokens=new, output_tokens=1), cached=cached) for new, cached in ((4, 0), (4, 4), (2, 8))]
    assert run([arrival(0, 10, 1)], chunk=4).records[0].ttft_s == pytest.approx(sum(passes))


def test_queueing_counts_from_the_schedule():
    """B054: service 0.5 s, one at a time, 8 arrivals 0.1 s apart: mean wait 1.4 s, mean end-to-end 1.9 s, at most 3.3 s."""
    service = replace(CLOCK, step_overhead_s=0.5, per_row_s=0.0)
    found = run([arrival(number / 10, 8, 1) for number in range(8)], constants=service, max_sequences=1)
    total = found.summary.total
    assert (total.mean_s, total.max_s) == pytest.approx((1.9, 3.3)) and total.mean_s - 0.5 == pytest.approx(1.4)
    assert found.summary.ttft == total and found.summary.itl is None and found.summary.occupancy is None


@pytest.mark.parametrize(
    ("fused", "first", "second"), [(True, (1.1, 2.2, 3.4, 4.6), (3.4, 4.6, 5.7)), (False, (1.1, 2.2, 4.4, 5.6), (4.4, 5.6, 6.7))]
)
def test_two_requests_stepped_by_hand(fused, first, second):
    """B comes at 1.5, in the middle of A's second token: it is read with A's third; one pass of 1.2 s, or two of 1.1 s."""
    found = run([arrival(0, 4, 4), arrival(1.5, 4, 3)], constants=CLOCK, fused=fused, slo=Slo(ttft_s=2.0, itl_p99_s=1.3))
    assert [record.token_s for record in found.records] == [pytest.approx(first), pytest.approx(second)]
    assert found.summary.occupancy == pytest.approx((1 + 1 + 2 + 1) / 4) and found.summary.itl.n == 5
    assert found.summary.decode_tokens_per_s == pytest.approx(5 / (second[-1] - 1.1))
    assert (found.good, found.summary.goodput_requests_per_s) == ((2, pytest.approx(2 / 5.7)) if fused else (0, 0))


def test_arrivals_at_one_moment_share_the_first_pass():
    """Also at the moment at which a pass ends: the next one takes them."""
    found = run([arrival(0, 4, 2), arrival(0, 4, 2), arrival(1.2, 4, 1)], constants=CLOCK)
    assert [record.token_s for record in found.records] == [pytest.approx((1.2, 2.5)), pytest.approx((1.2, 2.5)), pytest.approx((2.5,))]


def test_the_least_loaded_replica_takes_the_next():
    """One sequence at a time: the third request waits behind the short second one, not behind the long first."""
    found = run([arrival(0, 100, 50), arrival(0, 10, 1), arrival(0, 10, 1)], constants=CLOCK, devices=2, max_sequences=1)
    assert [record.ttft_s for record in found.records] == pytest.approx([1.1, 1.1, 2.2])
    assert found.busy_fraction == pytest.approx((1.0, 2 / 50))


def test_what_has_ended_is_no_load():
    """The long prompt is done when the third request comes: its device is free, the other one decodes."""
    found = run([arrival(0, 100, 1), arrival(0, 10, 50), arrival(5, 10, 1)], constants=CLOCK, devices=2, max_sequences=1)
    assert [record.ttft_s for record in found.records] == pytest.approx([1.1, 1.1, 1.1])


def test_arrivals_may_come_in_any_order():
    arrivals = crowd(30, seed=2, rate_per_s=3.0)
    found, turned = run(arrivals), run(arrivals[::-1])
    assert [record.token_s for record in found.records] == [record.token_s for record in turned.records[::-1]]


def test_an_idle_replica_jumps_to_the_next_arrival():
    found = run([arrival(3, 4, 1), arrival(1000, 4, 2)], constants=CLOCK)
    assert [record.token_s for record in found.records] == [pytest.approx((4.1,)), pytest.approx((1001.1, 1002.2))]
    assert found.busy_fraction == pytest.approx((3.3 / 999.2,)) and found.summary.duration_s == pytest.approx(999.2)


def test_pages_held_by_hand():
    """8 tokens in pages of 4, one pass: 2 of 4 pages from beginning to end. With 16 more, all of them at last."""
    assert run([arrival(0, 8, 1)], pages=4, page_tokens=4).summary.kv_used_fraction == pytest.approx(0.5)
    found = run([arrival(0, 1, 1000)], constants=CLOCK, pages=250, page_tokens=4)
    assert found.summary.kv_used_fraction == pytest.approx(0.5, abs=0.04)
    assert len(found.timeline) == simulator.SAMPLES and found.timeline[-1] == pytest.approx((1100.0, 0, 0, 0))
    middle = found.timeline[simulator.SAMPLES // 2]
    assert (middle.running, middle.waiting) == (1, 0) and middle.held_pages == pytest.approx(125, abs=simulator.STRETCH / 4)


# ---- static and continuous -------------------------------------------------------------------------------------------


def test_static_batching_loses_nothing_at_equal_lengths_and_much_at_unequal_ones():
    """4 rows. All of 50 tokens: the same times. 3 in 4 of 5 tokens and 1 of 200: rows that ended are computed on, and nobody enters."""
    equal = [arrival(0, 8, 50)] * 4
    continuous, static = (run(equal, max_sequences=4, static=kind) for kind in (False, True))
    assert [one.token_s for one in continuous.records] == [one.token_s for one in static.records]
    mixed = [arrival(0, 8, 200 if number % 4 == 3 else 5) for number in range(32)]
    continuous, static = (run(mixed, max_sequences=4, static=kind).summary for kind in (False, True))
    assert continuous.output_tokens == static.output_tokens and continuous.decode_tokens_per_s > 1.5 * static.decode_tokens_per_s
    assert static.occupancy < 2 < continuous.occupancy


def test_static_rows_that_ended_are_paid_for():
    """Rows of 2 and 4 tokens: three steps of two rows each, 1.2 s; continuous batching pays one row for the last two."""
    pair = [arrival(0, 4, 2), arrival(0, 4, 4)]
    assert run(pair, constants=CLOCK, static=True).records[1].token_s == pytest.approx((1.2, 2.4, 3.6, 4.8))
    assert run(pair, constants=CLOCK).records[1].token_s == pytest.approx((1.2, 2.4, 3.5, 4.6))


# ---- stretches and conservation --------------------------------------------------------------------------------------

BUSY = {"token_budget": 40, "max_sequences": 12, "page_tokens": 4, "chunk": 24}


@pytest.mark.parametrize(
    "knobs",
    [
        {"pages": 60},
        {"pages": 60, "devices": 3},
        {"pages": 60, "fused": False, "policy": "prefill_first", "longest_run": 2},
        {"pages": 60, "policy": "decode_first", "longest_run": 2},
        {"pages": 300, "static": True},
        {"pages": 60, "config": replace(WINDOWED, window=16)},
    ],
    ids=str,
)
def test_a_stretch_at_once_is_the_same_as_step_by_step(monkeypatch, knobs):
    """A crowded trace, with preemption: every token of every request at the same time, to 1e-9."""
    arrivals = crowd(80, seed=3, rate_per_s=1.5 * knobs.get("devices", 1) * (1 if "config" not in knobs else 0.05))
    at_once = run(arrivals, **BUSY, **knobs)
    monkeypatch.setattr(Scheduler, "quiet_steps", lambda self: 0)
    stepped = run(arrivals, **BUSY, **knobs)
    for one, other in zip(at_once.records, stepped.records, strict=True):
        assert one.token_s == pytest.approx(other.token_s, rel=1e-9, abs=0) and one.preemptions == other.preemptions
    assert at_once.recomputed_tokens == stepped.recomputed_tokens and (at_once.summary.preemptions > 0 or "static" in knobs)
    assert at_once.summary.occupancy == stepped.summary.occupancy and at_once.summary.itl.p99_s == pytest.approx(stepped.summary.itl.p99_s)
    assert at_once.summary.kv_used_fraction == pytest.approx(stepped.summary.kv_used_fraction, rel=0.1)


@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("knobs", [{}, {"policy": "prefill_first"}, {"static": True}, {"reserve": "full"}], ids=str)
def test_every_token_is_there_once_and_in_order(devices, knobs):
    arrivals = crowd(60, seed=5, rate_per_s=3.0)
    found = run(arrivals, **BUSY, pages=80, devices=devices, **knobs)
    for one, record in zip(arrivals, found.records, strict=True):
        assert len(record.token_s) == record.output_tokens == one.output_tokens and record.scheduled_s == one.at_s
        assert record.token_s[0] > one.at_s and record.end_s == record.token_s[-1] and all(gap > 0 for gap in record.itl_s)
    summary = found.summary
    assert summary.completed == 60 and summary.output_tokens == sum(one.output_tokens for one in arrivals)
    assert summary.itl.n == summary.output_tokens - 60 and summary.preemptions == sum(record.preemptions for record in found.records)
    assert (found.recomputed_tokens > 0) == (summary.preemptions > 0) and 0 < summary.kv_used_fraction <= 1
    assert max(sample.held_pages for sample in found.timeline) <= 80 * devices


@pytest.mark.parametrize("pools", [False, True])
def test_the_counted_summary_is_that_of_all_tokens(monkeypatch, pools):
    """Gaps counted per pass give what `latency.summarise_requests` gives from every token's time; a long run keeps only the ends."""
    arrivals, slo = crowd(80, seed=7, rate_per_s=2.0), Slo(ttft_s=3.0, itl_p99_s=0.4)

    def found():
        shared = {"config": GPT2, "constants": SLOW, "limits": Limits(pages=60, **BUSY), "slo": slo}
        rates = {"prefill_devices": 1, "decode_devices": 2, "transfer_bytes_per_s": 1e7}
        return simulate_pools(arrivals, **rates, **shared) if pools else simulate(arrivals, **shared)

    counted = found()
    whole = summarise_requests(counted.records, slo=slo, occupancy=counted.summary.occupancy, kv_used_fraction=counted.summary.kv_used_fraction)
    assert 0 < counted.good < 80 and counted.summary.preemptions
    for name in ("n", "p50_s", "p90_s", "p99_s", "max_s", "mean_s"):
        assert getattr(counted.summary.itl, name) == pytest.approx(getattr(whole.itl, name), rel=1e-9)
    assert replace(counted.summary, itl=None) == replace(whole, itl=None)
    monkeypatch.setattr(simulator, "KEPT_TOKENS", 0)
    short = found()
    assert max(len(record.token_s) for record in short.records) == 2 and short.summary == counted.summary and short.good == counted.good


def test_progress_ends_at_the_whole():
    shares = []
    run(crowd(20, seed=1, rate_per_s=0.01), progress=shares.append)
    assert shares == sorted(shares) and len(shares) == 20 and 0.9 <= shares[-1] <= 1


# ---- two pools -------------------------------------------------------------------------------------------------------


def pools(arrivals, *, transfer=inf, constants=CLOCK, pages=10_000, prefill=1, decode=1, **knobs):
    return simulate_pools(arrivals, config=GPT2, constants=constants, limits=Limits(pages=pages, **knobs), prefill_devices=prefill,
                          decode_devices=decode, transfer_bytes_per_s=transfer)  # fmt: skip


def test_a_transfer_delays_the_second_token_only():
    """8 tokens of GPT-2's cache, 36,864 bytes each, at 147,456 bytes/s: 2 s."""
    fast, slow = (pools([arrival(0, 8, 4)], transfer=rate).records[0].token_s for rate in (inf, 147_456))
    assert fast == pytest.approx((1.1, 2.2, 3.3, 4.4)) and slow == pytest.approx((1.1, 4.2, 5.3, 6.4))


def test_prefill_elsewhere_leaves_the_steps_alone():
    """While A decodes, B's prompt is read on the other device: A's steps stay 1.1 s until B joins them."""
    found = pools([arrival(0, 4, 6), arrival(1.2, 4, 3)])
    assert found.records[0].token_s == pytest.approx((1.1, 2.2, 3.3, 4.5, 5.7, 6.8)) and found.records[1].token_s == pytest.approx((2.3, 4.5, 5.7))
    assert found.summary.occupancy == pytest.approx(7 / 5) and found.busy_fraction == pytest.approx((2.2 / 6.8, 5.7 / 6.8))


def test_what_a_decode_device_preempts_is_read_again_there():
    """7 pages of 2, two requests of 4 in, 5 out: the second gives way with 4 + 3 tokens and is prefilled with them."""
    found = pools([arrival(0, 4, 5), arrival(0, 4, 5), arrival(0, 4, 0)], pages=7, page_tokens=2)
    assert (found.recomputed_tokens, found.summary.preemptions) == (7, 1) and [record.output_tokens for record in found.records] == [5, 5, 0]


def test_pools_lose_nothing():
    arrivals = [*crowd(60, seed=9, rate_per_s=3.0), arrival(1.0, 5, 1), arrival(2.0, 5000, 2), arrival(3.0, 230, 20)]
    found = pools(arrivals, constants=SLOW, transfer=1e8, prefill=2, decode=2, **{**BUSY, "pages": 60})
    assert [record.output_tokens for record in found.records] == [one.output_tokens for one in arrivals[:-2]] + [0, 1]
    assert all(gap > 0 for record in found.records for gap in record.itl_s) and found.summary.itl.n == found.summary.output_tokens - 61
    refused = found.records[-2:]  # one by the device that prefills, one by the device that would decode
    assert "needs 5,000 cache slots" in refused[0].error and "needs 249 cache slots" in refused[1].error and found.summary.completed == 61
    assert found.summary.preemptions > 0 and found.recomputed_tokens > 0  # what a decode device preempts it prefills itself


# ---- bad input -------------------------------------------------------------------------------------------------------


def test_a_request_that_never_fits_is_recorded_and_the_others_go_on():
    found = run([arrival(0, 8, 4), arrival(0, 100, 4), arrival(0, 8, 0)], constants=CLOCK, pages=4, slo=Slo(ttft_s=9, itl_p99_s=9))
    assert [record.finish for record in found.records] == ["length", "error", "length"] and "the pool holds 64" in found.records[1].error
    assert found.summary.requests == 3 and found.summary.completed == 2 and found.good == 1 and found.records[2].token_s == ()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: run([]), "no arrivals to simulate"),
        (lambda: run([arrival(0, 4, 4)], devices=0), "0 devices; each pool needs at least 1"),
        (lambda: pools([arrival(0, 4, 4)], decode=0), "0 devices"),
        (lambda: pools([arrival(0, 4, 4)], transfer=0), "transfer_bytes_per_s 0"),
        (lambda: pools([arrival(0, 4, 4)], static=True), "static is True"),
        (lambda: largest_batch(LLAMA, 16.1e9 / 0.9, context=1000), "no room for one sequence of 1,000 tokens"),
    ],
)
def test_runs_that_cannot_be(call, said):
    with pytest.raises(ValueError, match=said):
        call()


# ---- capacity --------------------------------------------------------------------------------------------------------


def test_mean_context_by_hand():
    """10 in, 4 out: steps at 11, 12 and 13. With 20 in, 2 out: one more step, at 21."""
    assert mean_context([arrival(0, 10, 4)]) == 12 and mean_context([arrival(0, 10, 4), arrival(0, 20, 2)]) == (36 + 21) / 4
    assert mean_context([arrival(0, 10, 1), arrival(0, 20, 1)]) == 15


def test_the_largest_batch_fills_nine_tenths_of_the_memory():
    """GPT-2 in 1 GB: 900 MB - 248.9 MB of weights, 37.7 MB a sequence of 1,024."""
    assert largest_batch(GPT2, 1e9, context=1024) == 17
    with pytest.raises(DoesNotFit, match="needs 0.2 GB for weights"):
        largest_batch(GPT2, 2e8, context=1024)


def test_capacity_is_what_a_full_fleet_serves():
    """Equal requests, more than two devices can take, 8 rows each: requests/s within a tenth; a third device for prefill moves the bound."""
    arrivals = [arrival(number / 100, 50, 100) for number in range(400)]
    capacity = capacity_requests_per_s(GPT2, SLOW, arrivals=arrivals, batch=8, devices=2)
    served = run(arrivals, devices=2, max_sequences=8, fused=False)
    assert 400 / served.summary.duration_s == pytest.approx(capacity, rel=0.1)
    split = capacity_requests_per_s(GPT2, SLOW, arrivals=arrivals, batch=8, devices=3, prefill_devices=1)
    limits = Limits(pages=10_000, max_sequences=8)
    found = simulate_pools(arrivals, config=GPT2, constants=SLOW, limits=limits, prefill_devices=1, decode_devices=2, transfer_bytes_per_s=1e12)
    assert 400 / found.summary.duration_s == pytest.approx(split, rel=0.1) and split > capacity


# ---- the command -----------------------------------------------------------------------------------------------------

COMMAND = ("simulate", "--model", "llama-3.1-8b", "--hardware", "h200-sxm", "--requests", "60")


def simulated(capsys, *options):
    assert cli.main([*COMMAND, *options, "--json"]) == 0
    return json.loads(capsys.readouterr().out, parse_constant=pytest.fail)


def test_the_command(capsys):
    found = simulated(capsys, "--devices", "2", "--workload", "reasoning")
    assert found["completed"] == found["requests"] == 60 and found["devices"] == len(found["busy_fraction"]) == 2
    assert found["rate_per_s"] == pytest.approx(0.8 * found["capacity_requests_per_s"]) and found["slo"] == {"ttft_s": 1.0, "itl_p99_s": 0.05}
    assert found["itl"]["p50_s"] <= found["itl"]["p99_s"] and 1 <= found["occupancy"] <= found["largest_batch"]
    assert found["goodput_requests_per_s"] > 0 and found["preemptions"] == 0 and found["kv_held_bytes"] < found["kv_pool_bytes"] <= 0.9 * 141e9 - 16e9
    floor = cost.step_time(LLAMA, cost.floor_constants(hardware("h200-sxm")), context=0)
    assert found["itl"]["p50_s"] > floor and found["output_tokens"] == found["itl"]["n"] + 60
    assert cli.main(COMMAND) == 0
    text = capsys.readouterr().out
    assert all(word in text for word in ("inter-token latency", "goodput", "preemptions", "of the largest batch", "tokens/s", "of capacity"))


def test_a_seed_is_a_run(capsys):
    first, again, other = (simulated(capsys, "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again and first["ttft"] != other["ttft"]


@pytest.mark.parametrize(
    ("options", "changed"),
    [
        (("--static",), "occupancy"),
        (("--policy", "prefill_first"), "itl"),
        (("--chunk", "64"), "ttft"),
        (("--token-budget", "300"), "ttft"),
        (("--max-sequences", "2"), "occupancy"),
        (("--dtype", "fp8"), "itl"),
        (("--kv-dtype", "fp8"), "itl"),
        (("--burstiness", "4"), "ttft"),
        (("--rate", "0.5"), "occupancy"),
        (("--workload", "chat"), "output_tokens"),
        (("--slo-ttft", "0.01"), "good"),
        (("--slo-itl", "0.001"), "good"),
        (("--devices", "3", "--prefill-devices", "1"), "itl"),
        (("--devices", "3", "--prefill-devices", "1", "--transfer-gb-per-s", "0.1"), "itl"),
    ],
    ids=" ".join,
)
def test_every_option_moves_a_number(capsys, options, changed):
    """B095: an option that is accepted and has no effect is a fault."""
    plain = ("--devices", "3", "--prefill-devices", "1") if "--transfer-gb-per-s" in options else ()
    assert simulated(capsys, *options)[changed] != simulated(capsys, *plain)[changed]


def test_a_trace_keeps_its_own_times_unless_a_rate_is_given(capsys, tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{10 * number},100,20\n" for number in range(10)))
    own = simulated(capsys, "--trace", str(file))
    assert own["requests"] == 10 and own["rate_per_s"] == pytest.approx(9 / 90) and 90 < own["duration_s"] < 92 and own["occupancy"] == 1
    faster = simulated(capsys, "--trace", str(file), "--rate", "1")
    assert 9 < faster["duration_s"] < 10 and simulated(capsys, "--trace", str(file), "--requests", "4")["requests"] == 4


def test_here_is_this_machines_card(capsys, monkeypatch):
    from test_clock import CARD

    monkeypatch.setattr(machine, "card", lambda dtype, say: CARD)
    arguments = ["simulate", "--model", "gpt2", "--hardware", "here", "--dtype", "float32", "--workload", "chat", "--requests", "5", "--json"]
    assert cli.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["hardware"] == CARD.machine.processor and found["weight_bytes_per_value"] == found["kv_bytes_per_value"] == 4


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--model", "llama-3.1-405b"), "needs 811.7 GB for weights and 126.9 GB is there"),
        (("--devices", "2", "--prefill-devices", "2"), "2 devices, 2 of them for prefill: at least 1 must be left to decode"),
        (("--devices", "0"), "0 devices"),
        (("--requests", "0"), "0 requests at a rate of None"),
        (("--rate", "-1"), "at a rate of -1.0"),
        (("--workload", "poetry"), "poetry"),
        (("--trace", "nothing.csv"), "nothing.csv"),
        (("--token-budget", "10"), "a token budget of 10 cannot decode 256 sequences"),
        (("--hardware", "abacus"), "unknown hardware 'abacus'"),
        (("--burstiness", "-1"), "burstiness is -1.0"),
    ],
    ids=" ".join,
)
def test_bad_input_is_one_line(capsys, options, said):
    assert cli.main([*COMMAND, *options]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and said in captured.err and len(captured.err.strip().splitlines()) == 1


def test_a_trace_of_which_nothing_can_run_fails_loudly(capsys, tmp_path):
    file = tmp_path / "trace.csv"
    file.write_text("arrival_s,prompt_tokens,output_tokens\n0,140000,20\n1,140000,20\n")
    assert cli.main([*COMMAND, "--trace", str(file)]) == 2
    assert "all 2 requests were refused; the first: request 0 needs 140,019 cache slots" in capsys.readouterr().err


def test_progress_is_a_line_a_second(monkeypatch):
    clock, lines = iter([0.0, 0.5, 1.2, 1.2, 1.5, 2.3, 2.3]), []
    monkeypatch.setattr(simulator.time, "monotonic", lambda: next(clock))
    tell = simulator._progress(lines.append, 200)
    for share in (0.1, 0.25, 0.5, 1.0):
        tell(share)
    assert lines == ["25 % of 200 requests served", "100 % of 200 requests served"]


def test_the_laws_fit_the_simulator():
    """The mean context of the reasoning law, which the catalogue's DeepSeek-R1 row gives: thousands of tokens, held by the longest."""
    arrivals = workload.workload("reasoning", 2000, rate_per_s=1.0, seed=0, max_context=LLAMA.max_context)
    middle = sum(one.prompt_tokens + one.output_tokens / 2 for one in arrivals) / len(arrivals)
    assert mean_context(arrivals) > 1.3 * middle
