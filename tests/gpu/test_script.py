"""`tests/benchmarks/gpu.py` on small shapes: every section runs, and the document has the keys that its readers look for."""

import json

import pytest
import torch

import gpu
from decodelab.decoder import kernels

KEYS = {"date", "command", "machine", "budget_s", "seconds", "read_bytes_per_s", "copy_bytes_per_s", "gemm_flops_per_s", "growth",
        "missing_synchronise", "launches", "left_out", "rows"}  # fmt: skip
ROW = {
    "section",
    "model",
    "dtype",
    "path",
    "batch",
    "new_tokens",
    "context",
    "n",
    "median_s",
    "p95_s",
    "tokens_per_s",
    "flops",
    "bytes",
    "mbu",
    "mfu",
}


@pytest.fixture
def quick(monkeypatch):
    """One round of everything, and a machine of 100 GB/s and 1 TFLOP/s that is measured at once."""
    monkeypatch.setattr(gpu, "ROUNDS", 1)
    for name, rate in (("read_bandwidth", 100e9), ("copy_bandwidth", 80e9), ("gemm_rate", 1e12)):
        monkeypatch.setattr(gpu.machine, name, lambda *_, rate=rate, **__: rate)
    monkeypatch.delenv("DECODELAB_BUDGET_S", raising=False)


@pytest.mark.parametrize("path", ["fast", "eager"])
def test_every_section_on_a_cpu(quick, path, tmp_path, monkeypatch, capsys):
    if path == "fast" and kernels.no_compiler("cpu"):
        pytest.skip(f"nothing compiles here: {kernels.no_compiler('cpu')}")
    monkeypatch.setenv("DECODELAB_PATH", path)
    assert gpu.main(["--device", "cpu", "--tiny", "--budget", "300", "--out", str(tmp_path)]) == 0
    table, document = capsys.readouterr().out, json.loads((tmp_path / "gpu.json").read_text())
    assert set(document) == KEYS and document["left_out"] == {} and document["launches"] is None
    assert document["command"] == "python tests/benchmarks/gpu.py --device cpu --tiny"
    plan, rows = gpu.tiny_plan(), document["rows"]
    assert all(set(row) == ROW and row["n"] >= 1 for row in rows)
    found = {(row["section"], row["dtype"], row["batch"], row["new_tokens"], row["context"], row["path"]) for row in rows}
    wanted = {(f"batch 1, {dtype}", dtype, 1, 1, plan.context, path) for dtype in ("float32", "int8")}
    wanted |= {(f"growth, {dtype}", dtype, 1, 1, context, path) for dtype in ("float32", "int8") for context in plan.contexts}
    wanted |= {("batch sweep", "float32", batch, 1, plan.batch_context, path) for batch in plan.batches}
    wanted |= {("prefill", "float32", 1, tokens, tokens, "eager") for tokens in plan.prompts}
    paths = ("eager", "fast", "graph") if path == "fast" else ("eager",)
    wanted |= {("launch-bound", "float32", 1, 1, plan.context, one) for one in paths}
    assert found == wanted and len(rows) == len(wanted)
    for row in rows:
        assert row["mbu"] == pytest.approx(row["bytes"] / row["median_s"] / 100e9) and row["mfu"] == pytest.approx(
            row["flops"] / row["median_s"] / 1e12
        )
        assert row["tokens_per_s"] == pytest.approx(row["batch"] * row["new_tokens"] / row["median_s"])
    bytes_of = {row["dtype"]: row["bytes"] for row in rows if row["section"].startswith("batch 1")}
    assert bytes_of["int8"] < bytes_of["float32"]
    assert set(document["growth"]) == {"float32", "int8"}
    record = json.loads((tmp_path / "no_synchronise.json").read_text())
    assert record == document["missing_synchronise"] and record["path"] == path
    assert 0 < record["asked_s"] and 0 < record["synchronised_s"] and isinstance(record["machine"], str)
    assert len([line for line in table.splitlines() if line.startswith("| ")]) == 1 + len(rows)


def test_a_budget_that_is_spent_names_what_it_left_out(quick, monkeypatch, capsys):
    """Roofs and the first section are always there."""
    monkeypatch.setenv("DECODELAB_PATH", "eager")
    assert gpu.main(["--device", "cpu", "--tiny", "--budget", "0.001"]) == 0
    out = capsys.readouterr().out
    assert "batch 1, float32" in out and "left out: launch-bound: the budget of 0.001 s was spent" in out


def test_a_model_that_does_not_fit_is_left_out(quick, monkeypatch):
    """A smaller card still gives its rows of the small model."""
    monkeypatch.setenv("DECODELAB_PATH", "eager")
    random = gpu.weights.random

    def full(config, **options):
        if options["dtype"] == "float32" and options["path"] == "auto":
            raise gpu.weights.LoadError("needs 16 GB and 8 GB is free")
        return random(config, **options)

    monkeypatch.setattr(gpu.weights, "random", full)
    document = gpu.run(gpu.tiny_plan(), device="cpu", budget_s=300)
    assert document["left_out"] == {"tiny, float32": "needs 16 GB and 8 GB is free", "launch-bound": "needs 16 GB and 8 GB is free"}
    assert document["missing_synchronise"] is None and {row["dtype"] for row in document["rows"]} == {"int8"}
    assert "left out: launch-bound: needs 16 GB" in gpu.report(document)


def test_without_a_gpu_one_line_and_exit_status_2(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments, words in (([], "sees no NVIDIA GPU"), (["--device", "cpu"], "add --tiny")):
        assert gpu.main(arguments) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and len(captured.err.splitlines()) == 1 and words in captured.err


def test_the_shapes_of_the_real_run_exist():
    """The 8B shape reaches 32k positions, batches 1 to 64, and its int8 and bfloat16 rows share one plan."""
    plan = gpu.full_plan()
    assert plan.large.n_layers == 32 and plan.large.max_context >= plan.contexts[-1] == 32_768
    assert plan.batches == (1, 2, 4, 8, 16, 32, 64) and plan.prompts == (512, 2048, 8192) and plan.dtype == "bfloat16"
    assert plan.small.name == "SmolLM2-135M"
