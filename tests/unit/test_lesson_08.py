"""Lesson and lab 08: the figures and sliders they use, the exercises against the scheduler, and every number that their prose states."""

import random
from contextlib import redirect_stdout
from functools import cache
from io import StringIO

import nbformat
import numpy as np
import pytest
from matplotlib.colors import to_hex

import course
from decodelab.arithmetic import catalog, cost, engines, units, workload
from decodelab.arithmetic.latency import RequestRecord
from decodelab.arithmetic.workload import Arrival
from decodelab.serving import scheduler, simulator
from decodelab.teaching import exercises, notes, plots, predictions, widgets

LLAMA_8B, H200 = catalog.model("llama-3.1-8b"), catalog.hardware("h200-sxm")
PAGE_BYTES = 16 * cost.kv_bytes_per_token(LLAMA_8B)
EXERCISES = exercises.load()


@cache
def cells(pattern):
    """The cells of a notebook by id."""
    [path] = course.ROOT.glob(pattern)
    return {cell.id: cell.source for cell in nbformat.read(str(path), as_version=4).cells}


def prose(pattern):
    return "\n".join(cells(pattern).values())


LESSON, LAB = "lessons/08_*.ipynb", "labs/solutions/08_*/08_*.ipynb"
SIMULATED = ["setting", "serve", "four", "spread", "ask-unused", "reserved", "paged", "gaps", "gaps-table", "chunks", "sizes", "sizes-table"]


@pytest.fixture(scope="module")
def ran():
    """What the lesson's own cells compute, those without a machine and without a picture: names, and what each cell printed."""
    modules = {"np": np, "catalog": catalog, "cost": cost, "engines": engines, "units": units, "workload": workload, "scheduler": scheduler,
               "simulator": simulator, "notes": notes, "plots": plots, "predictions": predictions, "widgets": widgets}  # fmt: skip
    said = {}
    for name in SIMULATED:
        out = StringIO()
        with redirect_stdout(out):
            exec(cells(LESSON)[name], modules)
        said[name] = out.getvalue()
    return modules, said


# ---- figures ---------------------------------------------------------------------------------------------------------


def record(number, first, end, tokens=2):
    return RequestRecord(id=str(number), scheduled_s=0.0, sent_s=0.0, prompt_tokens=1, asked_tokens=tokens, output_tokens=tokens,
                         token_s=(first, end), end_s=end)  # fmt: skip


def test_a_row_is_given_on_when_its_answer_ends():
    """Two rows: the short one ends at 1 s and its row is taken again; a request without a token has no bar."""
    waiting = RequestRecord(id="w", scheduled_s=0.0, sent_s=0.0, prompt_tokens=1, asked_tokens=1, output_tokens=0)
    records = [record(0, 0.0, 5.0), record(1, 0.0, 1.0), waiting, record(2, 1.0, 2.0), record(3, 5.0, 6.0)]
    assert plots.rows_over_time(records) == [(0, 0.0, 5.0), (1, 0.0, 1.0), (1, 1.0, 2.0), (0, 5.0, 6.0)]


def test_occupied_draws_one_bar_a_request_and_all_rows():
    _, ax = plots.axes()
    plots.occupied([record(0, 0.0, 5.0), record(1, 0.0, 1.0), record(2, 1.0, 2.0)], rows=4, ax=ax, title="t")
    [bars] = ax.collections
    assert [bar.tolist() for bar in bars.get_segments()] == [[[0, 1], [5, 1]], [[0, 2], [1, 2]], [[1, 2], [2, 2]]]
    assert ax.get_ylim()[0] > 4 > 1 > ax.get_ylim()[1] and ax.get_xlim()[1] == 5
    plots.occupied([record(n, 0.0, 1.0) for n in range(6)], rows=4, ax=ax, title="t")
    assert ax.get_ylim()[0] > 6, "a preempted answer keeps its row: more rows than the batch may be needed, and none is hidden"


def test_curves_have_markers_where_points_are_few_and_plain_ticks_on_log_axes():
    _, ax = plots.axes(columns=2)
    plots.curves({"a": ((1, 2, 4), (3, 5, 9)), "b": ((1, 2, 4), (1, 1, 1))}, ax=ax[0], title="few", labels=("x", "y"), limit=("most", 8))
    first, second, limit = ax[0].lines
    assert list(first.get_ydata()) == [3, 5, 9] and first.get_marker() != second.get_marker() != "" and limit.get_ydata()[0] == 8
    assert to_hex(first.get_color()) != to_hex(second.get_color()) and ax[0].get_ylim()[0] == 0
    assert [text.get_text() for text in ax[0].get_legend().get_texts()] == ["a", "b", "most"]
    plots.curves({"a": (range(1, 1001), range(1, 1001))}, ax=ax[1], title="many", labels=("x", "y"), log="xy")
    assert ax[1].lines[0].get_marker() == "" and (ax[1].get_xscale(), ax[1].get_yscale()) == ("log", "log")
    assert ax[1].xaxis.get_major_formatter()(1000, 0) == "1,000"


# ---- sliders ---------------------------------------------------------------------------------------------------------


def explorer():
    """The lesson's explorer on a tenth of its queue, and the settings that were run."""
    run, names = [], {"workload": workload, "simulator": simulator, "scheduler": scheduler, "llama": LLAMA_8B, "page_bytes": PAGE_BYTES, "pages": 1}
    names["constants"] = engines.engine_for(H200).constants(H200)
    exec(cells(LESSON)["serve"], names)

    def small(kind, *, static, rows, pool_bytes):
        run.append((kind, static, rows, pool_bytes))
        pairs = workload.lengths(kind, 48, seed=1, max_context=16_384)
        return names["serve"](names["queue"](pairs), pages=int(pool_bytes // PAGE_BYTES), max_sequences=rows, static=static)

    return widgets.serving_explorer(small, kinds=workload.KINDS, page_bytes=PAGE_BYTES), run


def test_the_serving_explorer_moves_all_five(capsys):
    """Occupancy, throughput, ITL, KV held and the lengths each change with a slider; a setting is run once."""
    shown, run = explorer()
    shown.show()
    assert capsys.readouterr().out.startswith("occupancy ") and run == [("reasoning", True, 16, 64 * 2**30)]
    before, picture = shown.text, shown.picture.value
    shown.sliders["batching"].value = "continuous"
    assert shown.text != before and shown.picture.value != picture
    shown.sliders["batching"].value = "static"
    assert shown.text == before and len(run) == 2, "the second look costs a picture, not a run"
    shown.sliders["batching"].value, shown.sliders["rows"].value, shown.sliders["pool"].value = "continuous", 32, 2
    assert "of 2 GiB" in shown.text and " 0 preemptions" not in shown.text
    shown.sliders["kind"].value = "chat"
    assert "in the median" in shown.text and "chat, continuous batches" in shown.canvas.ax.get_title(loc="left")


def test_every_kind_of_work_fits_the_smallest_pool():
    shown, _ = explorer()
    shown.sliders["pool"].value, shown.sliders["rows"].value = 2, 4
    for kind in workload.KINDS:
        shown.sliders["kind"].value = kind
        assert "tokens/s · ITL" in shown.text and "48 requests" in shown.canvas.ax.get_title(loc="left")


def test_pools_explorer_finds_the_best_split(capsys):
    shown = widgets.pools_explorer(lambda prompt, output, split: {0: 10.0, 3: 9.0}.get(split, 1.0))
    shown.show()
    assert capsys.readouterr().out == "best split: 3 prefill, 5 decode, 9.00 requests/s, 90.0 % of 10.0 with every device doing both\n"
    assert list(shown.canvas.ax.lines[0].get_ydata()) == [1, 1, 9, 1, 1, 1, 1]
    shown.sliders["prompt"].value = 20
    assert "20 tokens in, 10,000 out" in shown.canvas.ax.get_title(loc="left")


def test_a_canvas_of_two_panels_is_cleared_and_hidden_whole():
    canvas = plots.Canvas(panels=2)
    for panel in canvas.panels:
        panel.plot([0, 1], [0, 1])
    assert canvas.clear() is canvas.panels[0] and not any(panel.lines for panel in canvas.panels)
    canvas.say("nothing")
    assert not any(panel.axison for panel in canvas.panels) and canvas.ax.texts[0].get_text() == "nothing"


# ---- exercises -------------------------------------------------------------------------------------------------------

BY_HAND = {
    "pages_for": (((17,), {"page_tokens": 16}), 2),
    "slots_needed": (((), {"prompt_tokens": 12, "max_tokens": 4}), 15),
    "unused_bytes": ((((10, 16, 17),), {"page_tokens": 16, "token_bytes": 100}), 100 * (6 + 0 + 15)),
    "admitted": (((((17, 4), (16, 8), (1, 1)),), {"free_pages": 3, "page_tokens": 16, "reserve": "prompt"}), 2),
    "static_occupancy": ((((3, 5, 2, 9),), {"batch": 2}), (2 + 4 + 1 + 8) / (4 + 8)),
    "mean_context": ((([Arrival(at_s=0, prompt_tokens=10, output_tokens=3), Arrival(at_s=0, prompt_tokens=20, output_tokens=1)],), {}), 11.5),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_references_give_the_values_worked_by_hand(name):
    (arguments, keywords), value = BY_HAND[name]
    assert EXERCISES[name].reference(*arguments, **keywords) == pytest.approx(value)


def test_admitted_is_what_the_scheduler_starts():
    """The exercise's count on random queues, and what `Scheduler.plan` admits of the same queue at once."""
    rng, admitted = random.Random(8), EXERCISES["admitted"].reference
    for _ in range(200):
        pages, reserve = rng.randint(30, 80), rng.choice(("prompt", "full"))
        queue = [(rng.randint(1, 200), rng.randint(1, 200)) for _ in range(8)]
        desk = scheduler.Scheduler(scheduler.Limits(pages=pages, reserve=reserve, max_sequences=8, token_budget=4096))
        for number, (tokens, left) in enumerate(queue):
            desk.submit(scheduler.Request(id=str(number), prompt_tokens=tokens, max_tokens=left))
        desk.plan()
        assert len(desk.running) == admitted(queue, free_pages=pages, page_tokens=16, reserve=reserve)


def test_static_occupancy_is_the_simulators():
    outputs = [written for _, written in workload.lengths("reasoning", 60, seed=3, max_context=4096)]
    limits = scheduler.Limits(pages=50_000, max_sequences=8, static=True)
    constants = engines.engine_for(H200).constants(H200)
    arrivals = [Arrival(at_s=0, prompt_tokens=10, output_tokens=written) for written in outputs]
    found = simulator.simulate(arrivals, config=LLAMA_8B, constants=constants, limits=limits).summary
    assert found.occupancy == pytest.approx(EXERCISES["static_occupancy"].reference(outputs, batch=8))


# ---- the prose: lesson 08 --------------------------------------------------------------------------------------------


def test_08_the_question(ran):
    """64 users: busy all the time, an eighth of the rows writing, less than a fifth of the tokens of a continuous batch."""
    names, _ = ran
    static, continuous = (names["served"]["reasoning", kind] for kind in (True, False))
    assert static.busy_fraction == pytest.approx((1.0,)) and static.summary.occupancy / 64 == pytest.approx(1 / 8, abs=0.01)
    assert static.summary.decode_tokens_per_s / continuous.summary.decode_tokens_per_s < 1 / 5
    assert "less than a fifth" in prose(LESSON) and "an eighth of the rows" in prose(LESSON)


def test_08_equal_answers_gain_nothing_and_unequal_ones_do(ran):
    """100:1 all alike: static is continuous. On the reasoning law at least 1.5 times; occupancy by hand is the simulator's."""
    served = ran[0]["served"]
    rate = {key: run.summary.decode_tokens_per_s for key, run in served.items()}
    assert rate["100:1, all alike", False] == pytest.approx(rate["100:1, all alike", True], rel=0.01)
    for name in ("100:1, unequal", "reasoning", "chat"):
        assert rate[name, False] > 1.5 * rate[name, True]
    assert ran[0]["by_hand"] == pytest.approx(served["reasoning", True].summary.occupancy, rel=1e-3)


def test_08_the_pool():
    """2 MiB a page; 16 GiB are 131,072 tokens, four contiguous caches of 32,768, the longest answer of the law."""
    assert PAGE_BYTES == 2 * 2**20 and 8192 * PAGE_BYTES == 16 * 2**30 and 8192 * 16 == 131_072 == 4 * 32_768
    assert all(text in prose(LESSON) for text in ("131,072 tokens", "4 sequences, no risk"))
    assert workload.laws("reasoning")[1].max == 32_768


def test_08_paging_is_room_not_speed(ran):
    """Nine tenths of the contiguous reserve is empty; with the sequences that pages make room for, ITL grows and so does throughput."""
    names, _ = ran
    empty = {kind: 1 - names["used"].sum() / names[kind].sum() for kind in ("whole", "paged")}
    assert empty["whole"] > 0.85 and empty["paged"] < 0.05
    contiguous, more = (run.summary for run in names["rooms"].values())
    assert more.itl.p50_s > 1.5 * contiguous.itl.p50_s
    assert more.decode_tokens_per_s > 1.5 * contiguous.decode_tokens_per_s


def test_b088_08_both_gaps_are_bounded(ran):
    """r + 1 passes for the stream under prefill first; four chunks, r decode passes before each, under decode first. A mixed pass: one."""
    names, _ = ran
    runs = names["runs"]
    assert names["gap"]["prefill_first"] == [r + 1 for r in runs]
    assert all(4 * (r + 1) - r <= wait <= 4 * (r + 1) + 1 for r, wait in zip(runs, names["wait"]["decode_first"], strict=True))
    assert set(names["gap"]["mixed"]) == {1.0} and max(names["gap"]["decode_first"]) <= 2


def test_08_chunks_matter_where_prompts_are_long(ran):
    """At 100:1 the budget changes nothing, at 1:100 a budget of 512 cuts p99 ITL by more than ten."""
    names, _ = ran
    p99 = {}
    for name in ("100:1", "1:100"):
        for budget in (512, 16_384):
            run = names["serve"](names["loaded"](names["shapes"][name]), max_sequences=64, token_budget=budget)
            p99[name, budget] = run.summary.itl.p99_s
    assert p99["100:1", 512] == pytest.approx(p99["100:1", 16_384], rel=0.01)
    assert p99["1:100", 512] < p99["1:100", 16_384] / 10


def test_08_pool_sizes_at_three_ratios(ran):
    """Prefill needs next to nothing, two and seven of eight devices; one of eight given to it stands idle at 100:1."""
    names, said = ran
    assert names["splits"] == {"100:1": 1, "1:1": 2, "1:100": 7}
    capacity = names["capacity"]
    assert capacity(100, 10_000, 1) / capacity(100, 10_000, 0) == pytest.approx(7 / 8, abs=0.01)
    assert "prefill needs 0.02 of 8 devices" in said["sizes-table"] and "One device of eight stands idle" in prose(LESSON)


def test_08_four_beliefs_are_named_and_answered():
    beliefs = ("The GPU is full, so it is efficient.", "Paged attention makes tokens faster.", "Chunked prefill speeds up long answers.",
               "Disaggregation makes decode faster.")  # fmt: skip
    for belief in beliefs:
        assert f'*"{belief}"* The best reason' in prose(LESSON) and f"| {belief} |" in cells(LESSON)["beliefs"]


# ---- the prose: lab 08 -----------------------------------------------------------------------------------------------


def test_lab_08_the_three_requests_are_one():
    """10,099 slots three ways, 632 pages of 16."""
    for read, written in ((100, 10_000), (5_050, 5_050), (10_000, 100)):
        slots = scheduler.slots_needed(prompt_tokens=read, max_tokens=written)
        assert (slots, scheduler.pages_for(slots, page_tokens=16)) == (10_099, 632)


def test_lab_08_its_tail_preempts_and_its_four_prompts_outgrow_their_pool():
    """One answer in ten is ten times as long; a pool for eight mean requests preempts, one of ten times the pages does not."""
    assert "one answer in ten is ten times as long" in prose(LAB) and "240 if number % 10 == 3 else 24" in cells(LAB)["tail"]
    outputs = [240 if number % 10 == 3 else 24 for number in range(30)]
    tail = [Arrival(at_s=0, prompt_tokens=16, output_tokens=written) for written in outputs]
    pool = int(8 * (16 + sum(outputs) / 30 - 1) // 16)
    constants = engines.engine_for(H200).constants(H200)
    done = {}
    for pages in (pool, 10 * pool):
        limits = scheduler.Limits(pages=pages, max_sequences=8, token_budget=512)
        done[pages] = simulator.simulate(tail, config=LLAMA_8B, constants=constants, limits=limits)
    assert done[pool].summary.preemptions > 0 < done[pool].recomputed_tokens and done[10 * pool].summary.preemptions == 0
    four = ((200, 40), (30, 600), (90, 90), (16, 16))
    assert str(four) in cells(LAB)["plan"]
    assert sum(scheduler.pages_for(p + m - 1, page_tokens=16) for p, m in four) > 64 >= sum(scheduler.pages_for(p, page_tokens=16) for p, _ in four)
