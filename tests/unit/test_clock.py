"""Kind 3 of the faults: clocks, warm-up, roofs, threads. No test here asserts a time."""

import itertools
import json
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from decodelab.arithmetic import records
from decodelab.arithmetic.records import Card, Machine, fit_line, read_runs, summarise, utilisation, write_run
from decodelab.decoder.generate import generate
from decodelab.measuring import clock, experiments, machine
from decodelab.measuring.clock import Timer, interleaved, measure, split_step, time_call, timed, watch
from tiny import LLAMA, decoder, ids

HERE = Machine(processor="test", threads=2, torch="0", device="cpu", system="test", memory_bytes=8 * 10**9, last_level_cache_bytes=1000, load=None)
CARD = Card(machine=HERE, dtype="float32", path="eager", read_bytes_per_s=40e9, copy_bytes_per_s=40e9, matvec_bytes_per_s=20e9,
            matvec_rows_bytes_per_s=20e9, kv_read_bytes_per_s=25e9, kv_read_grouped_bytes_per_s=15e9, gemm_flops_per_s=100e9, step_overhead_s=1e-4, layer_overhead_s=1e-4, layer_overhead_rows_s=1e-4,
            per_row_s=1e-5, measured_at="2026-01-01T00:00:00+00:00", seconds=1.0)  # fmt: skip


def fake_counter(monkeypatch, step):
    ticks = itertools.count(0.0, step)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: next(ticks))


def test_first_call_is_kept_out_of_the_average():
    """B043: [2.0] + [0.02] * 9: 0.02 s and 50 tokens/s without the first; the first is reported, not averaged."""
    kept = summarise([2.0] + [0.02] * 9, warmup=1)
    assert (kept.median_s, kept.n, kept.first_s, 1 / kept.median_s) == (0.02, 9, 2.0, 50.0)
    assert summarise([2.0] + [0.02] * 9).median_s == 0.02
    with pytest.raises(ValueError, match="2 durations minus 2 of warm-up"):
        summarise([1.0, 2.0], warmup=2)


def test_percentiles_carry_their_count():
    """B061: p95 of 20 values is the 19th, and the text says n."""
    twenty = summarise([i / 1000 for i in range(1, 21)])
    assert twenty.p95_s == 0.019 and "n=20" in str(twenty)


def test_warm_up_runs_prefill_and_two_decode_steps_at_the_same_shapes():
    """B043: the warm-up is a request of its own; both start alike."""
    model, starts = decoder(LLAMA), []

    def start():
        starts.append([])
        for step in generate(model, ids(5), max_tokens=6):
            starts[-1].append(step.phase)
            yield step

    run = measure(start, model="tiny", machine=HERE, dtype="float32", path="eager", prompt_tokens=5, warmup_steps=1)
    assert starts == [["prefill", "decode", "decode"], ["prefill"] + ["decode"] * 5]
    assert run.warmup_steps == 3 and [step.context for step in run.steps] == [5, 6, 7, 8, 9, 10]


def test_definitions_of_the_latency_words(monkeypatch):
    """TTFT is the prefill; TPOT = (end - first) / (n - 1); decode throughput leaves the first token out."""
    steps = (records.StepRecord(phase="prefill", context=4, seconds=0.5),) + tuple(
        records.StepRecord(phase="decode", context=5 + i, seconds=0.1) for i in range(4))  # fmt: skip
    run = records.Run(model="m", machine=HERE, dtype="float32", path="eager", batch=2, prompt_tokens=4, warmup_steps=3, steps=steps)
    assert (run.ttft_s, run.output_tokens) == (0.5, 5)
    assert run.tpot_s == pytest.approx(0.1) and run.decode_tokens_per_s == pytest.approx(20)
    assert run.decode_share == pytest.approx(0.4 / 0.9) and run.free_prefill_saves_fraction == pytest.approx(0.5 / 0.9)
    single = replace(run, steps=steps[:1])
    assert single.tpot_s is None and single.decode_tokens_per_s is None and single.decode_share == 0


def test_a_budget_ends_a_run_and_says_so(monkeypatch):
    fake_counter(monkeypatch, 1.0)
    model = decoder(LLAMA)
    run = measure(
        lambda: generate(model, ids(3), max_tokens=30), model="tiny", machine=HERE, dtype="float32", path="eager", prompt_tokens=3, budget_s=10
    )
    assert 1 < run.output_tokens < 30 and f"after {run.output_tokens} tokens" in run.note


def test_runs_survive_the_disk(tmp_path):
    run = records.Run(model="m", machine=HERE, dtype="float32", path="eager", batch=1, prompt_tokens=4, warmup_steps=3,
                      steps=(records.StepRecord(phase="prefill", context=4, seconds=0.5, token=7),))  # fmt: skip
    file = tmp_path / "runs.jsonl"
    write_run(run, file)
    write_run(run, file)
    assert read_runs(file) == [run, run]
    file.write_text(file.read_text() + '{"model": "m"}\n')
    with pytest.raises(ValueError, match="runs.jsonl line 3 is not a run: Run with wrong fields: batch"):
        read_runs(file)


def test_impossible_rates_are_flagged_and_never_clamped():
    """B042: 137.4 GFLOP in 0.03 ms on 990 TFLOP/s; a roof's own spread is not an alarm."""
    flops = 2 * 4096**3
    assert flops == 137_438_953_472
    fraction, verdict = utilisation(flops, 0.03e-3, 990e12, what="FLOPs")
    assert fraction == pytest.approx(4.6275, rel=1e-3) and verdict.startswith("impossible")
    assert "spread" in utilisation(104, 1.0, 100)[1] and "impossible" not in utilisation(104, 1.0, 100)[1]
    assert utilisation(50, 1.0, 100) == (0.5, "0.50 of the roof")


def test_copy_counts_both_ways_and_read_one():
    """B049: 1 GiB in 1.000 ms: 2147.5 GB/s copied (read + written), 1073.7 GB/s read."""
    assert machine.copy_traffic(2**30) / 1e-3 / 1e9 == pytest.approx(2147.5, abs=0.05)
    assert 2**30 / 1e-3 / 1e9 == pytest.approx(1073.7, abs=0.05)
    assert "read + written" in str(CARD) and "read roof" in str(CARD)


@pytest.mark.parametrize(("affinity", "quota", "threads"), [(96, 400000 / 100000, 4), (96, 7.65, 7), (4, None, 4), (2, None, 2), (8, 0.5, 1)])
def test_threads_follow_quota_and_affinity(affinity, quota, threads):
    """B053."""
    assert machine.usable_threads(affinity, quota_cpus=quota) == threads


def test_container_quota_is_read_from_both_versions(tmp_path):
    """B053: cgroup 2 in one file, cgroup 1 in two; "max" and -1 are no limit; nothing there is no limit."""
    assert machine.container_quota(tmp_path) is None
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert machine.container_quota(tmp_path) == 4
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert machine.container_quota(tmp_path) is None
    (tmp_path / "cpu.max").unlink()
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text("765000\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert machine.container_quota(tmp_path) == 7.65


def test_short_regions_are_repeated(monkeypatch):
    """B060: a call far under 100 ticks is repeated until the region is long enough."""
    calls, now = [], [0.0]
    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])

    def call():
        calls.append(1)
        now[0] += 0.001

    assert time_call(call, tick_s=0.001) == pytest.approx(0.001)
    assert len(calls) > 100


def test_calls_are_taken_in_turn():
    order = []
    seconds = interleaved([lambda: order.append("a"), lambda: order.append("b")], rounds=3, budget_s=60, warmup=0)
    firsts = [key for key, _ in itertools.groupby(order)]
    assert firsts == ["a", "b"] * 3 and [len(s) for s in seconds] == [3, 3]
    assert [len(s) for s in interleaved([lambda: time.sleep(0.002)], rounds=50, budget_s=0)] == [1]


class FakeEvent:
    """A CUDA event that is ready only after synchronize, as a real one may be."""

    made: list = []

    def __init__(self, enable_timing=False):
        self.enable_timing, self.at, self.ready = enable_timing, None, False
        FakeEvent.made.append(self)

    def record(self):
        self.at = len(FakeEvent.made) * 50.0  # milliseconds

    def synchronize(self):
        self.ready = True

    def elapsed_time(self, end):
        if not (self.enable_timing and end.enable_timing and end.ready):
            raise RuntimeError("device not ready")
        return end.at - self.at


def test_cuda_timer_waits_for_its_own_end_and_returns_seconds(monkeypatch):
    """B056: read at once, and nested; events are made with timing on; milliseconds become seconds."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    with Timer("cuda") as outer, Timer("cuda") as inner:
        pass
    assert inner.seconds == pytest.approx(0.05) and outer.seconds == pytest.approx(0.15)


def test_cpu_timer_never_calls_cuda(monkeypatch):
    """B042: on a CPU the clock leaves CUDA alone; reading before the end is refused."""
    monkeypatch.setattr(torch, "cuda", SimpleNamespace())
    with Timer("cpu") as region:
        with pytest.raises(RuntimeError, match="has not been stopped"):
            _ = region.seconds
    assert region.seconds >= 0
    assert [item for item, _ in timed([1, 2])] == [1, 2]


def test_hooks_split_a_step_and_leave_nothing_behind():
    """The parts and the rest add up to the hooked step; hooks are gone afterwards, also after an error."""
    model = decoder(LLAMA)
    split = experiments.where_the_time_goes(model, context=8, rounds=3)
    assert split["attention"] + split["mlp"] + split["head"] + split["rest"] == pytest.approx(split["step"])
    assert split["overhead"] == pytest.approx(split["step"] - split["bare"])
    with pytest.raises(ZeroDivisionError), watch({"head": [model.head]}):
        _ = 1 / 0
    assert not model.head._forward_hooks and not model.head._forward_pre_hooks
    calls = []
    split_step(lambda: calls.append(model.head(torch.zeros(1, LLAMA.hidden))), {"head": [model.head]}, rounds=2)
    assert len(calls) == 6


def test_line_needs_two_points():
    """B073: slope and intercept are reported apart, and one total is not divided."""
    line = fit_line([1000, 2000], [100 * 2**20 + 49_139 * n for n in (1000, 2000)])
    assert line.slope == pytest.approx(49_139) and line.intercept == pytest.approx(100 * 2**20) and line.r2 == pytest.approx(1)
    with pytest.raises(ValueError, match="two different x"):
        fit_line([230_528], [10.55 * 2**30])
    assert round(10.55 * 2**30 / 230_528) == 49_139


def test_card_is_kept_and_found_again(tmp_path, monkeypatch):
    """The card on disk is keyed by processor, torch, threads, device, dtype and path; a broken file is measured again."""
    monkeypatch.setenv("DECODELAB_HOME", str(tmp_path))
    measured = []
    monkeypatch.setattr(machine, "measure_card", lambda dtype, device, path, say: measured.append(dtype) or replace(CARD, dtype=dtype))
    first = machine.card("float32")
    assert machine.card("float32") == first and measured == ["float32"]
    machine.card("bfloat16")
    assert measured == ["float32", "bfloat16"]
    for broken in ("{", "[]", json.dumps({**CARD.to_json(), "surplus": 1}), json.dumps({"machine": {}})):
        machine.card_file(machine.describe(), "float32", "eager").write_text(broken)
        said = []
        assert machine.card("float32", say=said.append) == first and "cannot be read" in said[0]
    names = {machine.card_file(replace(HERE, **change), "float32", "eager").name for change in
             ({}, {"processor": "other"}, {"threads": 4}, {"torch": "1"}, {"device": "cuda"})}  # fmt: skip
    assert len(names) == 5


@pytest.mark.parametrize(
    ("read", "matvec", "kv", "said"),
    [(38e9, 21e9, 15e9, None), (20e9, 20e9, 15e9, "read_bytes_per_s is 20.0 GB/s now and 40.0"),
     (40e9, 10e9, 15e9, "matvec_bytes_per_s is 10.0 GB/s now and 20.0"), (40e9, 40e9, 15e9, "matvec_bytes_per_s is 40.0 GB/s now and 20.0"),
     (40e9, 20e9, 150e9, "kv_read_grouped_bytes_per_s is 150.0 GB/s now and 15.0")],
)  # fmt: skip
def test_a_stale_card_is_measured_again(tmp_path, monkeypatch, read, matvec, kv, said):
    """A rate more than a third off, either way: the machine is not the one that the card describes."""
    monkeypatch.setenv("DECODELAB_HOME", str(tmp_path))
    measured, heard = [], []
    monkeypatch.setattr(machine, "measure_card", lambda *a, **k: measured.append(1) or CARD)
    for name, rate in (("read_bandwidth", read), ("matvec_bandwidth", matvec), ("kv_bandwidth", kv)):
        monkeypatch.setattr(machine, name, lambda *a, rate=rate, **k: rate)
    assert machine.fresh_card("float32", say=heard.append) == CARD
    assert len(measured) == 1 and not heard  # measured this moment: nothing to compare it with
    assert machine.fresh_card("float32", say=heard.append) == CARD
    assert len(measured) == (2 if said else 1) and (not heard if said is None else said in heard[-1])


@pytest.mark.parametrize("value", ["abc", 0, None, float("nan"), -1.0])
def test_a_card_with_an_impossible_rate_is_measured_again(tmp_path, monkeypatch, value):
    monkeypatch.setenv("DECODELAB_HOME", str(tmp_path))
    monkeypatch.setattr(machine, "measure_card", lambda *a, **k: CARD)
    machine.card("float32")
    file = machine.card_file(machine.describe(), "float32", "eager")
    file.write_text(json.dumps({**CARD.to_json(), "read_bytes_per_s": value}))
    said = []
    assert machine.card("float32", say=said.append) == CARD and "cannot be read" in said[0]


def test_a_card_that_cannot_be_kept_is_still_returned(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DECODELAB_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(machine, "measure_card", lambda *a, **k: CARD)
    said = []
    assert machine.card("float32", say=said.append) == CARD and "not kept" in said[-1] and "DECODELAB_HOME" in said[-1]


@pytest.mark.parametrize("wrong", ["abc", "-1", "0", "nan"])
def test_a_budget_that_is_no_time_is_refused_by_name(monkeypatch, wrong):
    monkeypatch.setenv("DECODELAB_BUDGET_S", wrong)
    with pytest.raises(ValueError, match=f"DECODELAB_BUDGET_S '{wrong}'"):
        machine.budget(1.0)
    monkeypatch.delenv("DECODELAB_BUDGET_S")
    with pytest.raises(ValueError, match="above 0"):
        machine.budget(float(wrong) if wrong != "abc" else -1.0)


def test_budget_is_shortened_by_the_environment(monkeypatch):
    monkeypatch.setenv("DECODELAB_BUDGET_S", "2")
    assert machine.budget(30) == 2 and machine.budget(1) == 1
    monkeypatch.delenv("DECODELAB_BUDGET_S")
    assert machine.budget(30) == 30


def test_constants_of_a_card_follow_the_kind_of_attention():
    grouped, alike = LLAMA, replace(LLAMA, n_kv_heads=LLAMA.n_heads)
    assert CARD.constants(grouped).kv_bytes_per_s == 15e9 and CARD.constants(alike).kv_bytes_per_s == 25e9
    assert CARD.constants(alike).overhead_s(alike, batch=3) == pytest.approx(1e-4 + 2 * 1e-4 + 3e-5)
    assert CARD.floor().overhead_s(alike) == 0 and CARD.floor().weight_bytes_per_s == 40e9


@pytest.mark.parametrize("contexts", [[128], [128, 128], [1, 128]])
def test_growth_needs_two_contexts(contexts):
    with pytest.raises(ValueError, match="at least two different contexts of 2 or more tokens"):
        experiments.growth(LLAMA, CARD, contexts=contexts)


def test_growth_and_saturation_count_what_they_move():
    """Bytes and FLOPs in the results are the cost model's; every context and batch is there; floor <= prediction."""
    result = experiments.growth(LLAMA, CARD, contexts=(8, 16, 64), rounds=3)
    assert result.contexts == (8, 16, 64) and [step.n for step in result.steps] == [3, 3, 3]
    assert 0 < result.a_s.floor < result.a_s.predicted and 0 < result.b_s_per_token.floor < result.b_s_per_token.predicted
    sweep = experiments.saturation(CARD, widths=(64, 128), batches=(1, 2), budget_s=1)
    assert [(point.model, point.batch) for point in sweep.points] == [("probe-64x4", 1), ("probe-128x4", 1), ("probe-128x4", 2)]
    one, two = sweep.points[1:]
    assert two.flops_per_step == 2 * one.flops_per_step and one.bytes_per_step < two.bytes_per_step < 2 * one.bytes_per_step
    assert one.read_bytes_per_s == one.bytes_per_step / one.step_s
