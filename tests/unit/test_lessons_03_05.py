"""Lessons 03 to 05: the sweeps, figures and sliders they use, and every number that their prose states."""

import re
from dataclasses import replace
from math import inf, nan

import nbformat
import pytest

import course
from decodelab.arithmetic import catalog, cost, engines, planning, published, units, workload
from decodelab.arithmetic.catalog import Workload
from decodelab.arithmetic.records import Card, Machine, Run, StepRecord
from decodelab.measuring import experiments
from decodelab.teaching import plots, predictions, widgets
from tiny import LLAMA, decoder

HERE = Machine(processor="test", threads=2, torch="0", device="cpu", system="test", memory_bytes=8 * 10**9, last_level_cache_bytes=1000, load=None)
CARD = Card(machine=HERE, dtype="float32", path="eager", read_bytes_per_s=40e9, copy_bytes_per_s=40e9, matvec_bytes_per_s=20e9,
            matvec_rows_bytes_per_s=20e9, kv_read_bytes_per_s=25e9, kv_read_grouped_bytes_per_s=15e9, gemm_flops_per_s=100e9, step_overhead_s=1e-4, layer_overhead_s=1e-4, layer_overhead_rows_s=1e-4,
            per_row_s=1e-5, measured_at="2026-01-01T00:00:00+00:00", seconds=1.0)  # fmt: skip
LLAMA_8B, H200 = catalog.model("llama-3.1-8b"), catalog.hardware("h200-sxm")
FLOOR = cost.floor_constants(H200)
WIDE = replace(LLAMA, max_context=512)


def request(prompt, output, **formats):
    return cost.request_time(LLAMA_8B, FLOOR, Workload(prompt_tokens=prompt, output_tokens=output, **formats))


def law(trace, field="ratio"):
    [found] = [found for found in workload.length_laws(trace=trace, field=field) if "reason_tokens" not in found.field]
    return found


# ---- length laws -----------------------------------------------------------------------------------------------------


def test_share_above_is_what_the_quantiles_allow():
    """p99 37.8 and a largest request of 4,056: at most 1 % is beyond 100:1. A largest of 46.5: none is."""
    assert law("vidur").share_above(100) == (0.0, 0.01)
    assert law("2023 conversation").share_above(100) == (0.0, 0.0)
    assert law("2023 conversation").share_above(0.2792) == (0.25, 0.5)  # the median itself: half is at most above
    assert law("2023 conversation").share_above(0) == (0.99, 1.0)
    assert law("LIMO", "output").share_above(5) == (0.0, 1.0)  # nothing published, nothing known


def test_every_row_of_the_table_is_a_law():
    laws = workload.length_laws()
    assert len(laws) == len(catalog.read_table("workloads.csv")) and all(found.source for found in laws)
    for found in laws:
        values = list(found.quantiles.values())
        assert values == sorted(values), found.trace
    assert workload.length_laws(trace="no such trace") == []


# ---- sweeps ----------------------------------------------------------------------------------------------------------


def test_prefill_sweep_does_the_same_linear_work_twice():
    """One prompt of n, and n / 16 prompts of 16: equal weight FLOPs inside the layers, fewer visible pairs."""
    whole, cut = experiments.prefill_sweep(decoder(WIDE), CARD, lengths=(16, 64), part=16, rounds=2, budget_s=30)
    assert [(case.tokens, case.batch) for case in whole] == [(16, 1), (64, 1)]
    assert [(case.tokens, case.batch) for case in cut] == [(16, 1), (16, 4)]
    assert all(case.measured.n == 2 and 0 < case.floor_s < case.predicted_s for case in [*whole, *cut])
    pairs = cost.visible_pairs(new_tokens=64, context=64), 4 * cost.visible_pairs(new_tokens=16, context=16)
    assert pairs == (2080, 544)


def test_a_budget_leaves_the_longest_prefill_out(monkeypatch):
    """The first length is always measured; a length predicted to take longer than the budget is not begun."""
    monkeypatch.setenv("DECODELAB_BUDGET_S", "0.0001")
    whole, cut = experiments.prefill_sweep(decoder(WIDE), CARD, lengths=(512, 16), part=16)
    assert [case.tokens for case in whole] == [16] and [case.batch for case in cut] == [1] and whole[0].measured.n == 1


@pytest.mark.parametrize("lengths", [(100,), (16, 8)])
def test_prefill_lengths_must_be_cut_evenly(lengths):
    with pytest.raises(ValueError, match=r"cannot be cut into prompts of 16; give multiples of 16"):
        experiments.prefill_sweep(decoder(WIDE), CARD, lengths=lengths, part=16)


def test_batch_sweep_puts_the_formula_beside_each_batch():
    """The given model is timed, not a new one; bytes are the weights once and every row's cache."""
    result = experiments.batch_sweep(decoder(WIDE), CARD, batches=(1, 4), context=32, budget_s=0.2)
    assert [(point.model, point.batch) for point in result.points] == [("tiny-llama", 1), ("tiny-llama", 4)]
    four = result.points[1]
    formats = {"weight_bytes_per_value": 4, "kv_bytes_per_value": 4}
    assert four.predicted_s == cost.step_time(WIDE, CARD.constants(WIDE), context=32, batch=4, **formats)
    assert four.bytes_per_step == cost.weight_bytes_per_step(WIDE, dtype_bytes=4, batch=4) + 4 * cost.kv_bytes(WIDE, context=32, dtype_bytes=4)
    assert result.ridge_batch == planning.ridge_batch(WIDE, CARD.floor(), weight_bytes_per_value=4)


# ---- figures ---------------------------------------------------------------------------------------------------------


def texts(ax):
    legend = ax.get_legend()
    return [
        ax.get_title(loc="left") or ax.get_title(),
        ax.get_xlabel(),
        ax.get_ylabel(),
        *([text.get_text() for text in legend.get_texts()] if legend else []),
    ]


def test_the_area_of_the_figure_is_the_formulas():
    """31.3 s of constant part and 1.39 s of cache: together request_time's decode."""
    _, ax = plots.axes()
    line = cost.growth(LLAMA_8B, FLOOR)
    plots.integral(line, prompt=100, output=10_000, ax=ax)
    assert "31.3 s" in texts(ax)[3] and "1.39 s" in texts(ax)[4]
    assert 9_999 * line.a_s + line.b_s_per_token * 9_999 * (101 + 10_099) / 2 == pytest.approx(request(100, 10_000).decode_s)


def test_held_bytes_start_early_or_late():
    def run(prompt, output):
        steps = [StepRecord(phase="decode" if n else "prefill", context=prompt + n, seconds=1.0) for n in range(output)]
        return Run(model="m", machine=HERE, dtype="float32", path="eager", batch=1, prompt_tokens=prompt, warmup_steps=3, steps=tuple(steps))

    _, ax = plots.axes()
    plots.held([("late", run(2, 5)), ("early", run(5, 2))], token_bytes=10**6, ax=ax)
    late, early = [line.get_ydata() for line in ax.lines if len(line.get_ydata()) > 1]
    assert list(late) == [2, 2, 3, 4, 5, 6] and list(early) == [5, 5, 6]


def test_compared_draws_measured_predicted_and_floor():
    whole, _ = experiments.prefill_sweep(decoder(WIDE), CARD, lengths=(16, 32), part=16, rounds=1)
    _, ax = plots.axes()
    plots.compared(whole, ax=ax)
    measured, predicted, floor = ax.lines
    assert list(predicted.get_ydata()) == [1e3 * case.predicted_s for case in whole] and list(measured.get_xdata()) == [16, 32]
    assert (measured.get_marker(), predicted.get_linestyle(), floor.get_linestyle()) == ("o", "-", "--")
    assert "milliseconds" in texts(ax)[2] and "tokens" in texts(ax)[1]


def test_the_plane_marks_where_the_phases_meet_and_stays_white_beyond_the_positions():
    _, ax = plots.axes()
    plots.plane([[0.1, nan], [0.6, 0.3]], prompts=(1, 10), outputs=(1, 10), points=[("here", 1, 10)], ax=ax)
    plots.plane([[0.9, 0.8], [0.9, 0.8]], prompts=(1, 10), outputs=(1, 10), ax=ax)  # no line to draw, no second colour bar
    assert len(ax.figure.axes) == 2 and "here" in [text.get_text() for text in ax.texts]


def test_published_is_drawn_by_class():
    result = published.validate()
    _, ax = plots.axes()
    plots.published(result, ax=ax)
    drawn = sum(len(line.get_xdata()) for line in ax.lines[:-1])
    assert drawn == len(result["predictions"]) and any(label.startswith("NVIDIA datacenter, ") for label in texts(ax))


def outcome(key, error):
    return predictions.Outcome(key=key, unit="s", entered=1.0, floor=None, formula=None, measured=1.0, error_fraction=error, at="")


def test_the_closing_plot_takes_an_empty_history():
    for history in ([], [outcome("00.a", None)]):
        _, ax = plots.axes()
        plots.predictions(history, ax=ax)
        assert "No scored prediction yet" in ax.texts[0].get_text() and not ax.lines
    _, ax = plots.axes()
    plots.predictions([outcome("00.a", -0.5), outcome("01.b", None), outcome("02.c", 3.0)], ax=ax)
    assert list(ax.lines[0].get_ydata()) == [0.5, 3.0] and [tick.get_text() for tick in ax.get_xticklabels()] == ["00.a", "02.c"]


def test_a_computed_result_does_not_say_measured(tmp_path, monkeypatch):
    monkeypatch.setenv("DECODELAB_HOME", str(tmp_path))
    shown = predictions.result("03.x", measured=2.0, unit="s", how="computed")
    assert "computed" in str(shown) and "measured" not in shown._repr_html_()
    assert predictions.history()[0].how == "computed"
    log = tmp_path / "predictions.jsonl"
    log.write_text(re.sub(r', "how": "computed"', "", log.read_text()))
    assert predictions.history()[0].how == "measured"  # a line written before the word was there


# ---- sliders ---------------------------------------------------------------------------------------------------------


def test_plane_explorer_prints_and_refuses(capsys):
    """Default numbers; too long for the model; too large for the memory. In words, and no picture of nonsense."""
    explorer = widgets.plane_explorer(CARD)
    explorer.show()
    assert capsys.readouterr().out.startswith("100 in, 10,000 out: 99.99")
    explorer.sliders["model"].value = "SmolLM2-135M"
    assert "10,099 tokens do not fit in the 8,192 positions" in explorer.text and not explorer.canvas.ax.axison
    explorer.sliders["model"].value = "Llama-3.1-70B"
    assert "needs 141.1 GB for weights and 126.9 GB is there" in explorer.text
    explorer.sliders["model"].value = "Llama-3.1-8B"
    explorer.sliders["hardware"].value = widgets.HERE
    assert "needs 32.1 GB for weights and 7.2 GB is there" in explorer.text  # the card is float32 with 8 GB


def test_batch_explorer_prints_and_refuses(capsys):
    explorer = widgets.batch_explorer()
    explorer.show()
    step = cost.step_time(LLAMA_8B, engines.engine_for(H200).constants(H200), context=5_000, batch=64)
    assert f"{units.format_seconds(step)} per token for each" in capsys.readouterr().out and "at most 169 fit" in explorer.text
    explorer.sliders["batch"].value = 256
    assert "256 sequences of 5,000 tokens do not fit on H200 SXM: at most 169 do" in explorer.text and not explorer.canvas.ax.axison
    explorer.sliders["context"].value = 100
    assert explorer.canvas.ax.axison and "batch 256" in explorer.text
    explorer.sliders["hardware"].value = "RTX 4090"
    assert "at most" in explorer.text
    explorer.sliders["model"].value = "Qwen3-30B-A3B"
    assert "needs 61.1 GB" in explorer.text


@pytest.mark.parametrize("name", widgets.MODELS)
def test_every_model_and_machine_of_the_sliders_gives_an_answer(name):
    config = catalog.model(name)
    for hardware in widgets.MACHINES:
        predicted, floor, size, memory = widgets._machine(config, hardware, None)
        assert floor.flops_per_s < inf and memory > 0 and size == 2
        assert cost.step_time(config, floor, context=100) < cost.step_time(config, predicted, context=100)


# ---- the prose: lesson 03 --------------------------------------------------------------------------------------------


def prose(number):
    """The text of a lesson's markdown and code, for the statements below."""
    [path] = course.ROOT.glob(f"lessons/{number}_*.ipynb")
    return "\n".join(cell.source for cell in nbformat.read(str(path), as_version=4).cells)


def test_03_ratio_and_its_chain():
    """'The other 9,999 come from decode'; 10,100 tokens three ways; 100:1 is 10,000 / 100."""
    text = prose("03")
    assert "9,999" in text and 10_000 - 1 == 9_999 and 100 + 10_000 == 5_050 + 5_050 == 10_100
    assert request(100, 10_000).total_s == pytest.approx(32.66, abs=0.005)
    half_of_a_step = cost.request_time(LLAMA_8B, FLOOR, Workload(prompt_tokens=1, output_tokens=2)).crossover_tokens
    assert half_of_a_step == pytest.approx(114_516, abs=1)


def test_03_even_at_1_to_100_a_free_prefill_does_not_double_the_speed():
    assert planning.amdahl(request(10_000, 100).free_prefill_saves_fraction) < 2
    assert "does not make the request twice as fast" in prose("03")


def test_03_the_tail_and_its_traces():
    """19,366 requests; nearly everyone reads more than they write; a published pair of about 11 and 1,524 tokens is beyond 100:1."""
    text = prose("03")
    assert law("2023 conversation").n == 19_366 and "19,366" in text
    assert all(found.quantiles["p50"] < 0.5 for found in workload.length_laws(field="ratio_out_in"))
    assert len(workload.length_laws(field="ratio_out_in")) == 5 and "five traces" in text
    [traces] = workload.length_laws(trace="MATH, DeepSeek-R1")
    assert traces.mean == 1_524 and "average claimed 11 tokens" in traces.notes and traces.mean / 11 > 100
    assert all(found.mean >= 10_000 for found in workload.length_laws(trace="AIME")) and "five digits" in text
    assert law("2023 code", "output").quantiles["p50"] < 20 and 200 * 50 == 10_000
    assert not [found for found in workload.length_laws() if "json" in found.trace.lower()], "long JSON has no published length law"


def test_03_the_agent():
    """60 turns of 200 out and 1,000 from tools end near 73,000 tokens; with the cache kept decode leads in each turn."""
    shape = {"turns": 60, "first_prompt": 2_000, "tool_tokens": 1_000, "output": 200}
    kept = planning.agent_turns(LLAMA_8B, FLOOR, reuse_prefix=True, **shape)
    again = planning.agent_turns(LLAMA_8B, FLOOR, reuse_prefix=False, **shape)
    assert kept[-1].context == 72_999 and all(turn.decode_s > turn.prefill_s for turn in kept)
    assert [turn.prefill_s > turn.decode_s for turn in again].index(True) == 28 and planning.decode_share(again) < 0.5
    reads = [sum(turn.prefill_tokens for turn in turns) / 12_000 for turns in (kept, again)]
    assert min(reads) > 5, "they read far more than they write on either server"


# ---- lesson 04 -------------------------------------------------------------------------------------------------------


def test_04_equal_totals_equal_caches():
    """520 tokens either way, 519 in the cache at the end."""
    assert {Workload(prompt_tokens=p, output_tokens=520 - p).slots for p in (20, 500)} == {519}
    assert "519 tokens" in prose("04") and "520 tokens" in prose("04")


def test_04_pairs_are_half_a_square():
    assert cost.visible_pairs(new_tokens=2_048, context=2_048) == 2_048 * 2_049 // 2 and "n·(n + 1)/2" in prose("04")


def test_04_on_a_gpu_the_phases_meet_far_below_1_to_1():
    for prompt in (200, 2_000, 8_000):
        assert planning.balance_output(LLAMA_8B, FLOOR, prompt=prompt) < prompt / 50
    assert request(6_909, 350).decode_share > 0.9


# ---- lesson 05 -------------------------------------------------------------------------------------------------------


def test_05_the_question():
    """300 tokens a second for one user, with less than a hundredth of the arithmetic."""
    step = cost.step_time(LLAMA_8B, FLOOR, context=5_000)
    assert 1 / step == pytest.approx(300, rel=0.05)
    assert cost.weight_flops(LLAMA_8B, tokens=1, logit_rows=1) / step / FLOOR.flops_per_s < 0.01


def test_05_caches_of_64_are_almost_three_times_the_weights():
    assert 64 * cost.kv_bytes(LLAMA_8B, context=5_000) / cost.weight_bytes_per_step(LLAMA_8B, batch=64) == pytest.approx(2.8, abs=0.05)


def test_05_batching_comes_closer_to_free_when_contexts_are_short():
    def gain(context):
        return 64 * cost.step_time(LLAMA_8B, FLOOR, context=context) / cost.step_time(LLAMA_8B, FLOOR, context=context, batch=64)

    assert gain(5_000) < 20 < 45 < gain(500) < 64


def test_05_a_full_memory_holds_about_seven_times_the_weights():
    for context in (1_000, 4_000, 10_099, 32_000, 128_000):
        fits = planning.sequences_that_fit(LLAMA_8B, memory_bytes=141e9, context=context)
        assert fits * cost.kv_bytes(LLAMA_8B, context=context) / cost.weight_bytes_per_step(LLAMA_8B, batch=fits) == pytest.approx(7, abs=0.5)
    assert planning.sequences_that_fit(LLAMA_8B, memory_bytes=141e9, context=10_099) == 83 < planning.ridge_batch(LLAMA_8B, FLOOR)


def test_05_experts():
    """8 of 128; a batch of 16 reads 128 * (1 - (120/128)^16) = 82.4 of them."""
    moe = catalog.model("qwen3-30b-a3b")
    assert (moe.moe_experts_active, moe.moe_experts_total) == (8, 128)
    assert cost.expected_experts(moe, tokens=16) == pytest.approx(128 * (1 - 0.9375**16)) == pytest.approx(82.4, abs=0.05)


def test_05_published():
    """636 rows, and the layer-split row of eight RTX 4090: 6.47 tokens/s against 7.25 ideal for one card."""
    assert len(catalog.read_table("measured_decode.csv")) == 636 and "636" in prose("05")
    assert 1.008e12 / cost.weight_bytes_per_step(catalog.model("llama-3-70b")) == pytest.approx(7.25, abs=0.005)
    rows = [row for row in catalog.read_table("measured_decode.csv") if row["n_devices"] == "8" and row["model"] == "Llama-3-70B"]
    assert "6.47" in {row["tokens_per_s"] for row in rows if "layer split" in row["notes"]}


def test_05_five_constants_per_engine():
    assert len(published.START) == 5 and "five constants" in prose("05")
