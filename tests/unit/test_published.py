"""The cost model against published decode speeds: accuracy, no leakage, tables that cannot be read or do not fit."""

import csv
import json

import numpy as np
import pytest

from decodelab.arithmetic import catalog, published


def shipped() -> list[dict[str, str]]:
    with (catalog.data_dir() / "measured_decode.csv").open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.fixture(scope="module")
def report() -> dict:
    return published.validate()


def write(path, rows) -> str:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def by_id(report: dict) -> dict[str, dict]:
    return {row["id"]: row for row in report["predictions"]}


def changed(rows: list[dict], ids: set[str], factor: float) -> list[dict]:
    return [row | {"tokens_per_s": repr(float(row["tokens_per_s"]) * factor)} if row["id"] in ids else row for row in rows]


def group_of(row: dict) -> tuple[str, str]:
    return row["hardware_name"] or row["hardware"], row["framework"]


# --- accuracy -----------------------------------------------------------------------------------------------------


def test_batch_1_rows_are_predicted_within_5_percent(report):
    single = report["by_kind"]["decode_b1"]
    assert single["n"] >= 0.75 * 340
    assert single["median"] <= 0.05 and single["p90"] <= 0.18


def test_batched_rows_are_predicted_within_8_percent(report):
    batched = report["by_kind"]["decode_batched"]
    assert batched["n"] >= 90
    assert batched["median"] <= 0.08 and batched["p90"] <= 0.30


def test_other_machines_constants_carry_over(report):
    assert report["other_machines"]["decode_b1"]["median"] <= 0.14
    assert report["other_machines"]["decode_batched"]["median"] <= 0.14
    assert {kind: row["n"] for kind, row in report["other_machines"].items()} == {kind: row["n"] for kind, row in report["by_kind"].items()}


def test_error_is_predicted_over_published_less_one(report):
    for row in report["predictions"]:
        assert row["error"] == pytest.approx(abs(row["predicted_tokens_per_s"] / row["published_tokens_per_s"] - 1))
    errors = [row["error"] for row in report["predictions"] if row["kind"] == "decode_b1"]
    assert report["by_kind"]["decode_b1"]["median"] == pytest.approx(np.median(errors))
    assert report["by_kind"]["decode_b1"]["p90"] == pytest.approx(np.quantile(errors, 0.9))


def test_every_row_is_used_or_named_with_a_reason(report):
    used, left = set(by_id(report)), {row["id"]: row["reason"] for row in report["left_out"]["rows"]}
    assert used | set(left) == {row["id"] for row in shipped()} and not used & set(left)
    assert all(left.values()) and sum(report["left_out"]["by_reason"].values()) == report["left_out"]["n"] == len(left)
    for row in report["left_out"]["rows"]:
        excused = row["reason"] in ("fewer than 3 usable rows in its group", "model not in data/models.csv")
        assert excused or row["kind"] not in published.FITTED_KINDS
    json.dumps(report)


def test_the_table_shows_every_kind_and_every_reason(report):
    text = published.table(report)
    assert all(word in text for word in [*report["by_kind"], *report["left_out"]["by_reason"]])
    assert f"{report['by_kind']['decode_b1']['n']} of {report['rows_by_kind']['decode_b1']}" in text


# --- no leakage ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row_id", ["m001", "m076", "m270", "m396", "m602"])
def test_a_rows_own_speed_never_moves_its_prediction(report, row_id):
    before, after = by_id(report), by_id(published.validate(shipped=changed(shipped(), {row_id}, 3.0)))
    assert after[row_id]["published_tokens_per_s"] == pytest.approx(3 * before[row_id]["published_tokens_per_s"])
    for figure in ("predicted_tokens_per_s", "other_machines_tokens_per_s"):
        assert after[row_id][figure] == pytest.approx(before[row_id][figure], rel=1e-12)
    neighbours = [key for key, row in before.items() if row["group"] == before[row_id]["group"] and key != row_id]
    assert any(after[key]["predicted_tokens_per_s"] != before[key]["predicted_tokens_per_s"] for key in neighbours)


@pytest.mark.parametrize("group", [("NVIDIA RTX 4090", "calm"), ("NVIDIA H100 SXM", "vLLM")])
def test_a_group_never_moves_its_other_machines_figure(report, group):
    ids = {row["id"] for row in shipped() if group_of(row) == group}
    before, after = by_id(report), by_id(published.validate(shipped=changed(shipped(), ids, 2.0)))
    used = ids & set(before)
    assert len(used) >= 3
    for key in used:
        assert after[key]["other_machines_tokens_per_s"] == pytest.approx(before[key]["other_machines_tokens_per_s"], rel=1e-12)
        assert after[key]["predicted_tokens_per_s"] != pytest.approx(before[key]["predicted_tokens_per_s"], rel=1e-3)


def test_what_is_left_out_does_not_depend_on_the_speeds(report):
    rows = shipped()
    again = published.validate(shipped=changed(rows, {row["id"] for row in rows}, 0.1))
    assert again["left_out"] == report["left_out"]


# --- the fit ------------------------------------------------------------------------------------------------------


def synthetic(constants: np.ndarray, **cells: str) -> dict[str, str]:
    """A row of an invented machine that runs exactly at `constants`."""
    row = shipped()[0] | {"hardware": "made up", "hardware_name": "", "framework": "made up", "n_devices": "1", "notes": ""}
    row |= {"spec_bandwidth_gb_s": "1000", "tokens_per_s": "1", "tokens_per_s_is": "request", "includes_prefill": "no"}
    row |= cells
    return row | {"tokens_per_s": repr(float(1 / (published._parse(row).features @ constants)))}


def test_constants_that_a_group_shows_are_recovered():
    truth, rows = np.array([2.0, 0.9, 1.2, 3.0, 0.0]), []
    for i, model in enumerate(("Llama-2-7B", "Qwen3-0.6B", "Llama-3.1-8B", "Qwen3-14B") * 6):
        cells = {"id": f"x{i}", "model": model, "batch": str(1 + 150 * (i // 8)), "prompt_len": str(i * 40)}
        rows.append(published._parse(synthetic(truth, **cells)))
    constants = published.fit_group(rows, prior=np.ones(5))
    assert constants[:3] == pytest.approx(truth[:3], rel=0.05) and constants[3] == pytest.approx(truth[3], rel=0.15)


def test_a_constant_the_group_cannot_show_stays_at_the_prior():
    truth, cells = np.array([2.0, 1.0, 1.0, 0.0, 0.0]), {"prompt_len": "0", "output_len": "1"}
    models = ("Llama-2-7B", "Qwen3-14B", "TinyLlama-1.1B")
    rows = [published._parse(synthetic(truth, id=model, model=model, **cells)) for model in models]
    prior = np.array([1.0, 1.0, 1.3, 1.0, 1.7])
    constants = published.fit_group(rows, prior=prior)
    assert constants[2] == pytest.approx(prior[2], rel=0.01) and constants[4] == pytest.approx(prior[4], rel=0.01)
    assert constants[0] == pytest.approx(2.0, rel=0.1)


def test_no_constant_is_negative():
    rows = [published._parse(row | {"tokens_per_s": "100000"}) for row in shipped()[:6]]
    assert (published.fit(rows, np.ones(6), prior=np.ones(5), width=np.ones(5), spread=0.01) >= 0).all()


def test_a_mixed_format_counts_experts_and_rest_apart():
    config = catalog.model("gpt-oss-20b")
    mixed = published._weight_bytes(config, weight_format="mxfp4+bf16", bits=(4.25, 16.0), batch=1)
    expert = 3 * 2880 * 2880 + 2 * 2880 + 2880
    experts = 24 * 4 * expert
    rest = published.cost.weight_bytes_per_step(config, dtype_bytes=1, batch=1) - experts
    assert mixed == pytest.approx((experts * 4.25 + rest * 16) / 8, rel=1e-9)


def test_awq_keeps_the_output_matrix_at_16_bits():
    config = catalog.model("Llama-2-7B")
    plain, awq = (published._weight_bytes(config, weight_format=name, bits=(4.0,), batch=1) for name in ("gguf", "awq-int4"))
    assert awq - plain == pytest.approx(32000 * 4096 * (16 - 4) / 8)


def test_layer_split_streams_from_one_device_and_tensor_split_from_all():
    cells = {"id": "x", "model": "Llama-2-7B", "n_devices": "4"}
    tensor, layer = (published._parse(synthetic(np.ones(5), **cells, notes=notes)).features for notes in ("", "layer split"))
    assert layer[1] == pytest.approx(4 * tensor[1]) and layer[4] == 0 < tensor[4]


# --- tables of one's own ------------------------------------------------------------------------------------------


def test_rows_of_a_known_group_are_predicted_and_others_are_unfitted(tmp_path, report):
    known = next(row for row in shipped() if row["id"] == "m602")
    rows = [
        known | {"id": "mine", "tokens_per_s": "1"},
        known | {"id": "new", "framework": "unheard-of"},
        known | {"id": "odd", "model": "unheard-of"},
    ]
    result = published.validate(write(tmp_path / "mine.csv", rows))
    assert [row["id"] for row in result["predictions"]] == ["mine"] and result["by_kind"]["decode_batched"]["n"] == 1
    near = by_id(report)["m602"]["predicted_tokens_per_s"]
    assert result["predictions"][0]["predicted_tokens_per_s"] == pytest.approx(near, rel=0.1)
    assert [(row["id"], row["group"]) for row in result["unfitted"]] == [("new", ["NVIDIA H100 SXM", "unheard-of"])]
    assert result["left_out"]["by_reason"] == {"model not in data/models.csv": 1}
    assert "unheard-of" in published.table(result)


def test_a_table_of_the_shipped_rows_gives_the_same_figures(tmp_path, report):
    result = published.validate(write(tmp_path / "same.csv", shipped()))
    assert result["by_kind"] == report["by_kind"] and result["other_machines"] == report["other_machines"]


@pytest.mark.parametrize(
    ("column", "value"),
    [*[("tokens_per_s", value) for value in ("", "abc", "0", "-3", "nan", "1e999")], ("batch", "0"), ("batch", "many"),
     ("n_devices", "0"), ("n_devices", "1.5"), ("n_devices", ""), ("spec_bandwidth_gb_s", "-1"), ("prompt_len", "-1"),
     ("weight_bits", "four"), ("weight_bits", "0"), ("output_len", "long"), ("tokens_per_s_is", "per node"),
     ("framework", ""), ("id", "")],
)  # fmt: skip
def test_a_malformed_cell_is_reported_with_its_line(tmp_path, column, value):
    rows = shipped()[:4]
    rows[2] = rows[2] | {column: value}
    with pytest.raises(published.MalformedRows, match=rf"bad\.csv: line 4: .*{column}.*Nothing was read"):
        published.validate(write(tmp_path / "bad.csv", rows))


def test_all_bad_lines_are_in_one_error(tmp_path):
    rows = shipped()[:5]
    rows[0], rows[4] = rows[0] | {"tokens_per_s": "fast"}, rows[4] | {"batch": "-1"}
    with pytest.raises(published.MalformedRows) as error:
        published.validate(write(tmp_path / "bad.csv", rows))
    text = str(error.value)
    assert "line 2: tokens_per_s is 'fast'" in text and "line 6: batch is '-1'" in text
    assert "line 3" not in text and "\n" not in text


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda text: text.replace("tokens_per_s,", "speed,", 1), "line 1: no column tokens_per_s"),
        (lambda text: text.splitlines()[0] + "\n", "no rows"),
        (lambda text: "", "line 1: no column"),
        (lambda text: text.replace("gpt-fast,Llama", "gpt-fast,extra,Llama", 1), "line 2: more or fewer fields"),
        (lambda text: "\n".join(text.splitlines()[:3]).rsplit(",", 9)[0], "line 3: more or fewer fields"),
        (lambda text: text + 'm1,"never closed\n', "line "),
    ],
)
def test_a_table_that_cannot_be_read_in_full_is_refused(tmp_path, spoil, says):
    path = tmp_path / "bad.csv"
    write(path, shipped()[:4])
    path.write_text(spoil(path.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(published.MalformedRows, match=says):
        published.validate(path)


def test_a_missing_file_and_a_binary_file_are_refused(tmp_path):
    with pytest.raises(published.MalformedRows, match=r"absent\.csv: No such file"):
        published.validate(tmp_path / "absent.csv")
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00\x81")
    with pytest.raises(published.MalformedRows, match=r"binary\.csv: .*Nothing was read"):
        published.validate(tmp_path / "binary.csv")


# --- engine classes -----------------------------------------------------------------------------------------------


def test_engines_table_is_fresh():
    """Stale? Run `python -m decodelab.arithmetic.published`."""
    stored, refitted = catalog.read_table("engines.csv"), published.engine_rows()
    assert [row["engine_class"] for row in stored] == list(published.ENGINES)
    for old, new in zip(stored, refitted, strict=True):
        texts = {"engine_class", "kind", "source"} | {column for column in new if not new[column]}
        assert {column: old[column] for column in texts} == {column: new[column] for column in texts}
        for column in set(new) - texts:
            assert float(old[column]) == pytest.approx(float(new[column]), rel=0.01), column


def test_engine_constants_are_physical():
    for row in catalog.read_table("engines.csv"):
        weights, kv = float(row["weight_bandwidth_fraction"]), float(row["kv_bandwidth_fraction"])
        assert 0.4 < weights <= 1 and 0 < kv <= weights
        assert 1e-6 < float(row["layer_overhead_s"]) < 1e-3 and 0 < float(row["per_row_s"]) < 1e-3
        assert not row["compute_fraction"] or 0.2 < float(row["compute_fraction"]) < 0.9


@pytest.mark.parametrize(
    ("machine", "name"),
    [("h200", "datacenter"), ("l40s", "datacenter"), ("mi300x", "datacenter"), ("tpu-v5e", "datacenter"),
     ("rtx-4090", "consumer"), ("rx-7900-xtx", "consumer"), ("rtx-pro-6000", "consumer"), ("m4-max", "apple"),
     ("dgx-spark", "unified"), ("epyc-9554", "cpu")],
)  # fmt: skip
def test_every_machine_has_an_engine_class(machine, name):
    assert published.engine_class(catalog.hardware(machine)) == name
    assert all(published.engine_class(row) in published.ENGINES for row in catalog.hardware_by_slug().values())


def test_a_shipped_row_under_another_id_stays_out_of_its_own_fit(report):
    """Rows are told apart by what they say, not by their id; an id that is there twice is refused."""
    renamed = [{**row, "id": "x" + row["id"]} for row in shipped()]
    again = published.validate(rows=renamed)
    assert again["by_kind"]["decode_b1"]["median"] == pytest.approx(report["by_kind"]["decode_b1"]["median"], rel=1e-9)
    with pytest.raises(published.MalformedRows, match="line 3: id m001 is there twice"):
        published.validate(rows=[dict(shipped()[0]), dict(shipped()[0])])
