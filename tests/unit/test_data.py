"""The reference tables: every row has a source, every name resolves, and the shapes agree with the formula."""

import csv
import re

import pytest

from decodelab.arithmetic import catalog, cost

TABLES = ("models", "hardware", "workloads", "measured_decode", "measured_prefill", "spec_decode", "engines")
SERVING = ("server_knobs", "server_metrics", "served_benchmarks")


def rows(name: str) -> list[dict[str, str]]:
    with (catalog.data_dir() / f"{name}.csv").open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines, strict=True))


@pytest.mark.parametrize("name", [*TABLES, "aliases"])
def test_rows_are_whole(name):
    table = rows(name)
    assert table and all(None not in row and None not in row.values() for row in table)


@pytest.mark.parametrize("name", TABLES)
def test_every_row_names_a_public_source(name):
    assert [row for row in rows(name) if not row["source"].strip()] == []


@pytest.mark.parametrize("name", [*TABLES, "aliases"])
def test_no_recollection_no_machine_path_no_address(name):
    text = (catalog.data_dir() / f"{name}.csv").read_text(encoding="utf-8")
    assert not re.search(r"from memory|recollect|not seen|\(\s*\)|https?://|(?<![\w/])/\w+/", text)
    assert "seen" not in text.partition("\n")[0] and "from_memory" not in text.partition("\n")[0]


@pytest.mark.parametrize("name", ["models", "hardware"])
def test_names_are_unique_by_the_slug_rule(name):
    slugs = [catalog.slug(row["name"]) for row in rows(name)]
    assert sorted(set(slugs)) == sorted(slugs)


def test_every_alias_resolves_and_none_is_ambiguous():
    aliases = rows("aliases")
    keys = [(row["kind"], catalog.slug(row["alias"])) for row in aliases]
    taken = {("model", slug) for slug in catalog.models()} | {("hardware", slug) for slug in catalog.hardware_by_slug()}
    taken |= {("hardware", key.removeprefix(f"{catalog.slug(row.vendor)}-")) for key, row in catalog.hardware_by_slug().items()}
    assert len(set(keys)) == len(keys) and not taken & set(keys)
    for row in aliases:
        assert getattr(catalog, row["kind"])(row["alias"]).name == row["name"]


@pytest.mark.parametrize(
    ("kind", "spelling", "name"),
    [
        ("model", "openai-community/gpt2", "gpt2"),
        ("model", "GPT2-small", "gpt2"),
        ("model", "smollm2", "SmolLM2-135M"),
        ("model", "meta-llama/Llama-3.1-8B-Instruct", "Llama-3.1-8B"),
        ("model", "Qwen/Qwen3-8B", "Qwen3-8B"),
        ("model", "r1", "DeepSeek-V3"),
        ("hardware", "h200", "NVIDIA H200 SXM"),
        ("hardware", "H100", "NVIDIA H100 SXM"),
        ("hardware", "a100-80gb", "NVIDIA A100 80GB SXM"),
        ("hardware", "RTX 4090", "NVIDIA RTX 4090"),
        ("hardware", "nvidia_rtx_4090", "NVIDIA RTX 4090"),
        ("hardware", "m4-max", "Apple M4 Max (40-core GPU)"),
    ],
)
def test_usual_spellings(kind, spelling, name):
    assert getattr(catalog, kind)(spelling).name == name


@pytest.mark.parametrize("row", rows("models"), ids=lambda row: row["name"])
def test_shapes_agree_with_the_formula(row):
    """Phi-2 and GPT-J have feed-forward biases that no column states: 0.03 %."""
    config = catalog.model(row["name"])
    assert cost.parameters(config) / 1e9 == pytest.approx(float(row["computed_total_params_b"]), rel=3e-4, abs=6e-5)
    assert cost.kv_bytes_per_token(config) == int(row["kv_bytes_per_token_16bit"])
    if row["published_total_params_b"]:
        assert cost.parameters(config) / 1e9 == pytest.approx(float(row["published_total_params_b"]), rel=0.015)


@pytest.mark.parametrize(
    ("name", "window", "layers"),
    [
        ("Mistral-7B", 4096, 32),
        ("Phi-3-mini", 2047, 32),
        ("gpt-oss-20b", 128, 12),
        ("gpt-oss-120b", 128, 18),
        ("Gemma-2-9B", 4096, 21),
        ("Gemma-3-4B", 1024, 29),
        ("Gemma-3-27B", 1024, 52),
        ("Llama-3.1-8B", 0, 0),
    ],
)
def test_windows(name, window, layers):
    config = catalog.model(name)
    assert (config.window, config.windowed_layers) == (window, layers)


def test_hardware_figures_are_plausible():
    for machine in catalog.hardware_by_slug().values():
        assert 10e9 < machine.bandwidth_bytes_per_s < 1e13, machine.name
        assert machine.memory_gb is None or 1 < machine.memory_gb < 1000, machine.name
        peaks = [machine.fp32_flops_per_s, machine.bf16_fp16_flops_per_s, machine.fp8_flops_per_s]
        given = [peak for peak in peaks if peak]
        assert given == sorted(given) and all(1e12 < peak < 1e16 for peak in given), machine.name


def test_measured_rows_use_the_bandwidth_of_the_hardware_table():
    named = [row for row in rows("measured_decode") if row["hardware_name"]]
    assert len(named) > 500
    for row in named:
        table = catalog.hardware(row["hardware_name"]).bandwidth_bytes_per_s / 1e9
        assert float(row["spec_bandwidth_gb_s"]) == pytest.approx(table, rel=0.005), row["id"]


def test_measured_ids_are_unique():
    ids = [row["id"] for row in rows("measured_decode")]
    assert len(set(ids)) == len(ids)


def test_prefill_utilisation_is_rate_over_peak():
    given = [row for row in rows("measured_prefill") if row["mfu"]]
    assert len(given) > 20
    for row in given:
        share = float(row["implied_model_tflops_per_s"]) / float(row["peak_dense_tflops"])
        assert float(row["mfu"]) == pytest.approx(share, abs=2e-3) and share < 1


def test_quantiles_do_not_fall():
    for row in rows("workloads"):
        values = [float(row[column]) for column in ("p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "max") if row[column]]
        assert values == sorted(values), row["trace"]


def test_readme_counts_the_rows():
    text = (catalog.data_dir() / "README.md").read_text(encoding="utf-8")
    counts = {name: int(count) for name, count in re.findall(r"\| `(\w+)\.csv` \| (\d+) \|", text)}
    assert counts == {name: len(rows(name)) for name in (*TABLES, "aliases", *SERVING)}
