"""The commands: their JSON keys, their orderings, and one line for bad input."""

import json

import pytest

from decodelab import cli
from decodelab.arithmetic import cost
from decodelab.measuring import machine

ESTIMATE_KEYS = {"ttft_s", "itl_first_s", "itl_last_s", "decode_s", "total_s", "decode_share", "crossover_tokens", "free_prefill_saves_fraction"}


@pytest.fixture(autouse=True)
def own_home(tmp_path, monkeypatch):
    monkeypatch.setenv("DECODELAB_HOME", str(tmp_path))
    monkeypatch.setenv("DECODELAB_BUDGET_S", "1")


def run(capsys, *arguments):
    status = cli.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def document(capsys, *arguments):
    status, out, _ = run(capsys, *arguments, "--json")
    assert status == 0
    return json.loads(out)


def test_estimate(capsys):
    found = document(capsys, "estimate", "--model", "llama-3.1-8b", "--hardware", "h200-sxm", "--prompt", "100", "--output", "10000")
    assert ESTIMATE_KEYS <= set(found) and ESTIMATE_KEYS <= set(found["likely"])
    assert found["total_s"] == pytest.approx(32.66, rel=1e-3) and found["decode_share"] == pytest.approx(0.9999, abs=2e-5)
    assert found["crossover_tokens"] == pytest.approx(114_516, abs=1)
    assert all(found["likely"][key] > found[key] for key in ("ttft_s", "itl_first_s", "itl_last_s", "decode_s", "total_s"))
    halved = document(capsys, "estimate", "--model", "llama-3.1-8b", "--hardware", "h200", "--prompt", "100", "--output", "10000", "--dtype", "int8")
    assert halved["kv_dtype"] == "bfloat16" and 0.5 < halved["total_s"] / found["total_s"] < 0.55


def test_estimate_here_uses_this_machines_card(capsys, monkeypatch):
    from test_clock import CARD

    monkeypatch.setattr(machine, "card", lambda dtype, say: CARD)
    found = document(capsys, "estimate", "--model", "gpt2", "--hardware", "here", "--prompt", "8", "--output", "800", "--dtype", "float32")
    assert found["hardware"] == "test" and found["likely"]["total_s"] > found["total_s"]
    assert found["itl_first_s"] == pytest.approx((cost.weight_bytes_per_step(cli.catalog.model("gpt2"), dtype_bytes=4) + 9 * 73_728) / 40e9)


def test_machine(capsys):
    found = document(capsys, "machine")
    constants = {
        "read_bytes_per_s",
        "copy_bytes_per_s",
        "matvec_bytes_per_s",
        "kv_read_bytes_per_s",
        "gemm_flops_per_s",
        "step_overhead_s",
        "per_row_s",
    }
    assert constants <= set(found) and all(found[name] > 0 for name in constants if name.endswith("per_s"))
    assert found["machine"]["threads"] >= 1 and found["dtype"] == "float32" and found["path"] == "eager"
    status, out, err = run(capsys, "machine")
    assert status == 0 and "BW_w" in out and err == ""  # kept: nothing is measured twice


def test_growth(capsys):
    found = document(capsys, "growth", "--model", "smollm2-135m", "--contexts", "16,512,2048", "--budget", "3")
    for constant in ("a_s", "b_s_per_token"):
        assert set(found[constant]) == {"floor", "predicted", "measured"} and found[constant]["floor"] <= found[constant]["predicted"]
    assert found["contexts"] == [16, 512, 2048] and len(found["steps"]) == 3 and found["r2"] <= 1
    assert found["crossover_tokens"] == pytest.approx(11_677, abs=1)


def test_saturation(capsys):
    found = document(capsys, "saturation", "--budget", "1")
    assert {"points", "roof_bytes_per_s", "ridge_batch"} <= set(found)
    assert {"bytes_per_step", "batch", "step_s", "read_bytes_per_s", "flops_per_s"} <= set(found["points"][0])
    single = [point["bytes_per_step"] for point in found["points"] if point["batch"] == 1]
    assert single == sorted(single) and single[0] < 5e6 and single[-1] > 5e8


def test_validate(capsys):
    found = document(capsys, "validate")
    assert {"n", "median", "p90"} <= set(found["by_kind"]["decode_b1"]) and {"n", "median", "p90"} <= set(found["other_machines"]["decode_b1"])


@pytest.mark.parametrize(("arguments", "said"), [
    (["estimate", "--model", "lama-3.1-8b", "--hardware", "h200", "--prompt", "1", "--output", "1"], "unknown model 'lama-3.1-8b'; near names: llama-3.1-8b"),
    (["estimate", "--model", "gpt2", "--hardware", "h201", "--prompt", "1", "--output", "1"], "unknown hardware 'h201'; near names: h20"),
    (["estimate", "--model", "gpt2", "--hardware", "h200", "--prompt", "1000", "--output", "100"], "1,099 tokens, but gpt2 has 1,024 positions. Ask for at most 25"),
    (["estimate", "--model", "gpt2", "--hardware", "h200", "--prompt", "0", "--output", "100"], "prompt_tokens is 0"),
    (["estimate", "--model", "gpt2", "--hardware", "h200", "--prompt", "5", "--output", "5", "--dtype", "int3"], "unknown format 'int3'"),
    (["growth", "--contexts", "128,many"], "'128,many' is not a comma-separated list of whole numbers"),
    (["growth", "--model", "mixtral-8x7b"], "Mixtral-8x7B"),
    (["machine", "--device", "mps"], "mps"),
    (["machine", "--dtype", "fp8"], "fp8"),
    (["machine", "--path", "quick"], "use one of auto, fast, eager"),
    (["validate", "--rows", "no-such-file.csv"], "no-such-file.csv"),
])  # fmt: skip
def test_bad_input_is_one_line(capsys, arguments, said):
    status, out, err = run(capsys, *arguments)
    assert status == 2 and out == "" and said in err and len(err.strip().splitlines()) == 1


def test_a_model_larger_than_the_memory_is_said(capsys):
    status, _, err = run(capsys, "estimate", "--model", "llama-3.1-405b", "--hardware", "h200", "--prompt", "100", "--output", "100")
    assert status == 0 and "811.8 GB" in err and "141 GB" in err


@pytest.mark.parametrize("command", ["machine", "estimate", "growth", "saturation", "validate"])
def test_help_teaches(capsys, command):
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0 and "--json" in capsys.readouterr().out


def test_an_unknown_peak_is_said_and_not_guessed(capsys):
    """No source gives a Raspberry Pi's 16-bit peak: the floor is of bytes alone, and `likely` claims no prefill."""
    status, out, err = run(
        capsys, "estimate", "--model", "llama-3.1-8b", "--hardware", "raspberry-pi-5-lpddr4x-4267", "--prompt", "1000", "--output", "10", "--json"
    )
    found = json.loads(out)
    assert status == 0 and "no source gives" in err
    assert found["likely"]["ttft_s"] is None and found["likely"]["decode_share"] is None and found["likely"]["decode_s"] > found["decode_s"]


@pytest.mark.parametrize("dtype", ["fp8", "q4_0"])
def test_a_format_the_decoder_cannot_run_is_refused_here(capsys, dtype):
    status, _, err = run(capsys, "estimate", "--model", "gpt2", "--hardware", "here", "--prompt", "8", "--output", "8", "--dtype", dtype)
    assert status == 2 and dtype in err and len(err.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["NVIDIA H100", "NVIDIA H200", "Apple M3 Max", "NVIDIA GeForce RTX 4090", "h200"])
def test_vendor_and_alias_resolve_together(name):
    assert cli.catalog.hardware(name).bandwidth_bytes_per_s > 1e11


def test_growth_refuses_before_it_measures(capsys):
    for arguments in (["--batch", "0"], ["--contexts", "128,128"]):
        status, out, err = run(capsys, "growth", *arguments)
        assert status == 2 and out == "" and len(err.strip().splitlines()) == 1


def test_a_single_token_has_no_decode_step(capsys):
    status, out, _ = run(capsys, "estimate", "--model", "gpt2", "--hardware", "h200", "--prompt", "8", "--output", "1")
    assert status == 0 and "first decode step                -           -" in out
