"""Recorded runs of real servers, the published ones beside them, and the numbers that lesson 09 states in prose."""

import json
import re

import nbformat
import pytest

import course
from decodelab.arithmetic import catalog, cost, engines
from decodelab.arithmetic.catalog import Workload
from decodelab.serving import endpoint, recorded
from decodelab.teaching import notes

SPREAD = {"n": 4, "mean_s": 0.02, "p50_s": 0.02, "p90_s": 0.02, "p99_s": 0.03, "max_s": 0.03}
RUN = {"note": "test", "arguments": "--requests 4", "measured_at": "2026-12-01T00:00:00+00:00", "summary": {"ttft": SPREAD, "itl": SPREAD, "tpot": None, "total": SPREAD},
       "server": {"engine": "vllm", "itl": {"n": 4, "sum": 0.08, "mean": 0.021}}, "requests": [{"token_s": [0.1, 0.2]}]}  # fmt: skip


# ---- a run at hand ---------------------------------------------------------------------------------------------------


def test_a_recorded_run_says_so_and_shows_what_it_has():
    run = recorded.ServedRun(RUN, "RECORDED")
    assert (run.mean_s("itl"), run.server_s("itl"), run.server_s("ttft"), run.mean_s("tpot")) == (0.02, 0.021, None, None)
    assert [row[0] for row in run.rows()] == ["time to first token", "inter-token latency", "whole request"]
    assert run.rows()[1] == ("inter-token latency", "20.0 ms", "30.0 ms", "20.0 ms", "4", "21.0 ms")
    assert run.token_s() == [0.1, 0.2]
    assert repr(run).startswith("RECORDED\n") and "<caption" in run._repr_html_() and "RECORDED" in run._repr_html_()


def test_a_kept_run_is_found_by_its_number(tmp_path, monkeypatch):
    monkeypatch.setattr(recorded.catalog, "data_dir", lambda: tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "two.json").write_text(json.dumps({"runs": [{}, RUN]}), encoding="utf-8")
    run = recorded.kept("two.json", 1)
    assert run.values == RUN and run.label == "RECORDED 2026-12-01, not measured now: test; --requests 4"
    with pytest.raises(IndexError):
        recorded.kept("two.json", 2)


def test_without_a_server_the_recorded_run_is_at_hand_and_nothing_is_sent(monkeypatch):
    monkeypatch.delenv(recorded.SERVER, raising=False)
    monkeypatch.setattr(endpoint, "check", lambda *_, **__: pytest.fail("something was sent"))
    kept = recorded.ServedRun(RUN, "RECORDED")
    assert recorded.at_hand("  ", otherwise=kept) is kept


@pytest.mark.parametrize(("typed", "set_to", "asked"), [("http://localhost:1", "", "http://localhost:1"), ("", "http://localhost:2", "http://localhost:2"),
                                                        ("http://localhost:1", "http://localhost:2", "http://localhost:1")])  # fmt: skip
def test_a_server_typed_or_set_is_measured(monkeypatch, typed, set_to, asked):
    class Result:
        model, host = "smollm2", "loopback"

        def to_json(self):
            return RUN

    calls = []
    monkeypatch.setenv(recorded.SERVER, set_to)
    monkeypatch.setattr(endpoint, "check", lambda url, **load: calls.append((url, load)) or Result())
    run = recorded.at_hand(typed, otherwise=None, say=lambda _: None, requests=3)
    assert calls[0][0] == asked and calls[0][1]["requests"] == 3
    assert run.label == "MEASURED NOW: smollm2 at loopback"


def test_a_table_is_aligned_as_text_and_escaped_as_html():
    table = notes.Table(("a", "b"), [("long one", 1), ("<x>", 22)], "caption")
    assert repr(table) == "a         b\nlong one  1\n<x>       22"
    assert "&lt;x&gt;" in table._repr_html_() and "<x>" not in table._repr_html_() and "caption" in table._repr_html_()


# ---- what was published ----------------------------------------------------------------------------------------------


def served(profile: str) -> dict[str, str]:
    return next(row for row in catalog.read_table("served_benchmarks.csv") if row["profile"] == profile)


def whole_s(row: dict[str, str]) -> float:
    """TTFT + (n - 1) TPOT."""
    return float(row["mean_ttft_s"]) + (int(row["output_tokens"]) - 1) * float(row["mean_tpot_s"])


def test_every_published_row_names_its_file_and_its_commit():
    for row in catalog.read_table("served_benchmarks.csv"):
        assert re.fullmatch(r"[\w.-]+/[\w.-]+ \S+\.md@[0-9a-f]{7}", row["source"]) and re.fullmatch(r"\d{4}-\d\d-\d\d", row["seen"])
        catalog.hardware(row["hardware"])


def test_the_impossible_rate_is_impossible_and_its_page_contradicts_it():
    """Half the weights, or four tokens a pass, or both: still above the roof; and 0.7 s are not 17.5 s."""
    heavy, roof = served("Generation Heavy"), catalog.hardware("h100-sxm").bandwidth_bytes_per_s
    read = float(heavy["weights_b"]) * 1e9 * 2
    assert 16 < read / float(heavy["mean_tpot_s"]) / roof < 17
    assert read / 2 / 4 / float(heavy["mean_tpot_s"]) / roof > 1.05
    assert 0.7 < whole_s(heavy) < 0.72 and float(heavy["mean_total_s"]) == 17.48
    real = (float(heavy["mean_total_s"]) - float(heavy["mean_ttft_s"])) / 1999
    assert 0.5 < read / real / roof < 0.7 and abs(real - float(heavy["p99_tpot_s"])) < 1e-4


def test_the_possible_rate_is_wrong_too_and_is_the_first_token_over_all_tokens():
    long = served("Long Context")
    assert float(long["median_tpot_s"]) * 100 == pytest.approx(float(long["mean_ttft_s"]), rel=2e-3)
    assert whole_s(long) < 0.3 * float(long["mean_total_s"])
    assert round(1e3 * (float(long["mean_total_s"]) - float(long["mean_ttft_s"])) / 99) == 69


def test_numbers_in_the_prose_of_lesson_09():
    """What the text says in words, computed: 5 ms of 50 s, 10.2 ms possible, 69 ms, 8.79 ms."""
    cells = nbformat.read(str(course.ROOT / "lessons" / "09_real_servers.ipynb"), as_version=4).cells
    prose = " ".join(cell.source for cell in cells if cell.cell_type == "markdown")
    llama, h200 = catalog.model("llama-3.1-8b"), catalog.hardware("h200-sxm")
    line = cost.request_time(llama, engines.engine_for(h200).constants(h200), Workload(prompt_tokens=100, output_tokens=10_000))
    assert round(1e3 * line.ttft_s) == 5 and round(line.total_s, -1) == 50 and "to save 5 ms of 50 s" in prose and "it saves 5 ms" in prose
    assert "10.2 ms is *possible*" in prose and float(served("Long Context")["mean_tpot_s"]) == pytest.approx(0.0102, rel=2e-3)
    assert "its tokens took 69 ms" in prose and "is 8.79 ms" in prose and float(served("Generation Heavy")["p99_tpot_s"]) == 0.00879
    [full] = [row for row in catalog.read_table("server_knobs.csv") if row["knob"] == "utilization-detector kvCacheUtilThreshold"]
    assert full["default"] == "0.8" and "above 0.8 of the pool" in prose
