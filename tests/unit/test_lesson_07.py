"""Lesson 07: the published rows it reads, its figures and sliders, and every number that its prose states."""

from functools import cache

import nbformat
import pytest
import torch

import course
import tiny
from decodelab.arithmetic import catalog, cost, engines, planning, published, speculation
from decodelab.arithmetic.speculation import expected_tokens, overlap, round_price
from decodelab.decoder import speculative
from decodelab.teaching import plots, widgets

LLAMA, H200 = catalog.model("llama-3.1-8b"), catalog.hardware("h200-sxm")
FLOOR, MADE = cost.floor_constants(H200), engines.engine_for(H200).constants(H200)
DRAFT = catalog.model("llama-3.2-1b")


@cache
def prose():
    """The text and the code of the lesson."""
    return "\n".join(cell.source for cell in nbformat.read(str(course.ROOT / "lessons" / "07_speculative_decoding.ipynb"), as_version=4).cells)


# ---- published rows --------------------------------------------------------------------------------------------------


def test_every_published_row_is_read_and_only_plain_numbers_count():
    """'.85-.90', 'QPS 1' and '1.08-1.09 over MTP-3' are no numbers; the first paper's tokens were worked out from its acceptance."""
    rows = published.speculation_rows()
    assert len(rows) == len(catalog.read_table("spec_decode.csv"))
    by_target = {(row.target, row.method): row for row in rows}
    assert by_target["DeepSeek-V3", "MTP"].acceptance is None and by_target["DeepSeek-V3", "MTP"].k == 1
    relaxed = by_target["DeepSeek-R1 FP4", "MTP + relaxed acceptance"]
    assert relaxed.tokens is relaxed.speedup is relaxed.round_steps is None and relaxed.k == 3
    paper = [row for row in rows if row.source == "Leviathan et al. 2023 table 2"]
    assert len(paper) == 12 and {row.tokens for row in paper} == {None} and paper[0].acceptance == 0.75 and paper[0].speedup == 3.4
    assert [row.batch for row in rows if row.target == "Llama-3-70B"] == [None] * 4


def test_a_published_round_costs_its_tokens_over_its_speedup():
    [at_two] = [row for row in published.speculation_rows() if row.target == "DeepSeek-R1 FP4" and row.k == 2]
    assert (at_two.tokens, at_two.speedup) == (2.58, 2.25) and at_two.round_steps == pytest.approx(2.58 / 2.25)
    assert all(row.round_steps >= 1 for row in published.speculation_rows() if row.round_steps)


# ---- figures ---------------------------------------------------------------------------------------------------------


def test_speedups_draw_a_dot_and_a_bar_each_and_the_line_at_one():
    _, ax = plots.axes()
    plots.speedups([("wins", 1.8, 1.7), ("loses", 0.5, 0.6)], ax=ax, title="t", caption="here")
    even, measured, predicted = ax.lines
    assert list(even.get_xdata()) == [1, 1] and list(measured.get_xdata()) == [1.7, 0.6] and list(predicted.get_xdata()) == [1.8, 0.5]
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["wins", "loses"] and ax.get_ylim()[0] > ax.get_ylim()[1]
    assert ax.get_xlim()[1] > 1.8


def test_round_prices_lie_between_their_lines():
    """A result at 3 tokens and a speed-up of 2 lies on the line of 1.5 steps."""
    _, ax = plots.axes()
    plots.round_prices({"a": [(3.0, 2.0)], "b": [(2.0, 1.9), (1.5, 0.9)]}, ax=ax, title="t")
    slopes = [line.get_ydata()[1] / line.get_xdata()[1] for line in ax.lines[:4]]
    assert slopes == pytest.approx([1, 0.8, 2 / 3, 0.5]) and ax.lines[4].get_ydata()[0] / ax.lines[4].get_xdata()[0] == pytest.approx(slopes[2])
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["a", "b"]


def test_published_is_dots_and_the_formula_a_line():
    _, ax = plots.axes()
    plots.against_formula({"x": ((1, 2), (3, 4), (3, 5)), "y": ((1, 2), (1, 1), [])}, ax=ax, title="t", labels=("a", "b"), limit=("even", 1))
    assert [line.get_linestyle() for line in ax.lines] == ["None", "-", "None", "-", "--"] and list(ax.lines[1].get_ydata()) == [3, 5]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["x, published", "x, formula", "y, published", "even"]


# ---- sliders ---------------------------------------------------------------------------------------------------------


def test_the_explorer_prints_the_formulas_numbers(capsys):
    """A draft at the price that round_price gives it has that price's speed-up."""
    explorer = widgets.speculation_explorer(LLAMA, MADE, k=4)
    explorer.show()
    alone = round_price(LLAMA, MADE, k=4, context=1000)
    steps = 4 * 0.15 + alone.verify_s / alone.step_s
    said = capsys.readouterr().out
    assert f"speed-up {expected_tokens(0.7, 4) / steps:.2f}: 2.77 tokens per round for the time of {steps:.2f} steps, 0.60 of them drafts" in said
    assert "best K: 3," in said


def test_each_slider_can_make_it_lose():
    explorer = widgets.speculation_explorer(LLAMA, MADE)
    for name, value, words in (("acceptance", 0.0, "no K gains"), ("k", 12, "best K: 3"), ("draft_cost", 1, "loses at any acceptance"), ("batch", 256, "speed-up 0.73")):  # fmt: skip
        start, before, picture = explorer.sliders[name].value, explorer.text, explorer.picture.value
        explorer.sliders[name].value = value
        assert words in explorer.text and explorer.picture.value != picture
        explorer.sliders[name].value = start
        assert explorer.text == before


# ---- drafts held to a grammar ----------------------------------------------------------------------------------------


def test_a_masked_copy_proposes_less_and_keeps_the_same():
    """Digits, then letters, in turn: what the grammar forbids the target rejects anyway, so the rounds write alike and acceptance differs."""
    target, prompt = tiny.decoder(tiny.LLAMA), tiny.ids(12)
    low = torch.arange(64) < 32

    def alternate(written):
        return low if len(written) // 3 % 2 else ~low

    def rounds(mask_draft):
        request = {"max_tokens": 30, "draft": speculative.PromptLookup(), "k": 4, "allowed": alternate}
        return list(speculative.speculate(target, prompt * 2, mask_draft=mask_draft, **request))

    masked, unmasked = rounds(True), rounds(False)
    assert [each.tokens for each in masked] == [each.tokens for each in unmasked]
    assert sum(each.proposed for each in masked) < sum(each.proposed for each in unmasked)
    assert speculative.acceptance(masked) > speculative.acceptance(unmasked) > 0


# ---- the prose -------------------------------------------------------------------------------------------------------


def test_three_tokens():
    """0.3 + 0.3 + 0.1; the residual is all on the first token; seven in ten are drafts that were kept."""
    p, q = [0.6, 0.3, 0.1], [0.3, 0.4, 0.3]
    assert overlap(p, q) == pytest.approx(0.3 + 0.3 + 0.1) and "0.3 + 0.3 + 0.1" in prose() and "seven in ten" in prose()
    assert speculative.residual(torch.tensor(p), torch.tensor(q)).tolist() == [1, 0, 0]


def test_accepted_over_proposed_falls_with_k_alone():
    """'from 70 % to 15 %', and the ceiling of 3.3 tokens."""
    assert [round((expected_tokens(0.7, k) - 1) / k, 2) for k in (1, 16)] == [0.7, 0.15] and "from 70 % to 15 %" in prose()
    assert 1 / (1 - 0.7) == pytest.approx(3.33, abs=0.01) and expected_tokens(0.7, 1000) < 3.34 and "= 3.3 tokens" in prose()


def test_below_the_ridge_a_block_is_a_step():
    assert planning.ridge_batch(LLAMA, FLOOR) == pytest.approx(206, abs=0.5) and "near 206 rows" in prose()
    step, *blocks = (speculation.verify_time(LLAMA, FLOOR, k=k, context=1_000) for k in (0, 4, 128, 512))
    assert blocks[0] < 1.001 * step and blocks[1] < 1.02 * step and blocks[2] > 2 * step


def test_the_draft_has_a_seventh_of_the_weights_and_half_of_the_layers():
    """Its step costs more than its bytes: a sixth at the floor, above a quarter with overhead per layer, most of it overhead."""
    assert cost.parameters(LLAMA) / cost.parameters(DRAFT) == pytest.approx(6.5, abs=0.1) and "a seventh of the weights" in prose()
    assert (LLAMA.n_layers, DRAFT.n_layers) == (32, 16) and "**half of the layers**" in prose() and LLAMA.vocab_size == DRAFT.vocab_size
    floor, made = (cost.step_time(DRAFT, each, context=1000) / cost.step_time(LLAMA, each, context=1000) for each in (FLOOR, MADE))
    assert 1 / 7 < floor < 1 / 5 < 1 / 4 < made and MADE.overhead_s(DRAFT) > 0.5 * cost.step_time(DRAFT, MADE, context=1000)


def test_what_the_sliders_text_says():
    """Acceptance 0.9 moves the top right; acceptance 0.3, or a draft at half a step, leaves an eighth at K = 1; at a step every K loses."""

    def best(acceptance, share):
        alone = [round_price(LLAMA, MADE, k=k, context=1000) for k in range(1, 13)]
        return speculation.best_k([speculation.RoundPrice(k=each.k, step_s=each.step_s, draft_s=each.k * share * each.step_s, verify_s=each.verify_s)
                                   for each in alone], acceptance)  # fmt: skip

    assert best(0.9, 0.15).k > best(0.7, 0.15).k == 3
    for acceptance, share in ((0.3, 0.15), (0.7, 0.5)):
        assert best(acceptance, share).k == 1 and best(acceptance, share).speedup(acceptance) == pytest.approx(1 + 1 / 8, abs=0.01)
    free = best(0.7, 0)
    assert free.k == 12 or free.speedup(0.7) > 0.99 * round_price(LLAMA, MADE, k=12, context=1000).speedup(0.7)
    assert best(1.0, 1) is None


def test_where_a_batch_loses():
    """K = 4 loses from 64; with K = 2, 10,000 tokens each still gain at 64, and the caches of the figure fit."""
    where = {"draft": DRAFT, "context": 1_000}
    gains = {n: round_price(LLAMA, MADE, k=4, batch=n, **where).speedup(0.7) for n in (1, 32, 64)}
    assert gains[64] < 0.9 < 1 < gains[32] < gains[1]
    short, long = (round_price(LLAMA, MADE, k=2, batch=64, draft=DRAFT, context=n).speedup(0.7) for n in (1_000, 10_000))
    assert short < 1 < 1.2 < long
    for context, most in ((1_000, 256), (10_000, 64), (30_000, 16)):
        assert planning.sequences_that_fit(LLAMA, memory_bytes=H200.memory_gb * 1e9, context=context) >= most


def test_the_chain_of_the_closing_section():
    """2.8 tokens per round of a request of 10,000: about 3,600 passes."""
    assert 10_000 / expected_tokens(0.7, 4) == pytest.approx(3_600, rel=0.01) and "3,600 passes" in prose()


def test_the_published_sections():
    """Nearly four hundred rows; the best K of the module is 3 although tokens still grow; 4 rows above what their acceptance allows."""
    rows = published.speculation_rows()
    assert 380 < len(rows) < 400
    mtp = [row for row in rows if row.target == "DeepSeek-R1 FP4" and row.tokens]
    assert max(mtp, key=lambda row: row.speedup).k == 3 and [row.tokens for row in mtp] == sorted(row.tokens for row in mtp)
    assert mtp[1].acceptance == 0.92 and expected_tokens(0.92, 5) > 1.5 * mtp[-1].tokens
    paper = [row for row in rows if "table 2" in row.source and row.acceptance]
    assert sum(row.speedup > expected_tokens(row.acceptance, int(row.k)) for row in paper) == 4
