"""The ledger: its rows, its arithmetic, its table, and that each variant computes what the plain decoder computes."""

import ast
import dataclasses
from pathlib import Path

import nbformat
import pytest
import torch

import pairs
from decodelab.arithmetic import catalog, cost
from decodelab.arithmetic.records import Card
from decodelab.decoder import weights
from decodelab.decoder.cache import KVCache
from decodelab.decoder.generate import decode_step, prefill
from decodelab.decoder.model import Attention
from decodelab.measuring import ledger, machine
from decodelab.measuring.ledger import Change, Entry, Table
from labs import techniques

ROOT = Path(__file__).resolve().parents[2]
ROWS = ledger.load()
COUNTED = ("passes", "capacity")


def card(path: str = "eager") -> Card:
    """A card with made-up rates, so that no test waits for one; its cache is small, so that the shapes are."""
    here = dataclasses.replace(machine.describe(), last_level_cache_bytes=2**21)
    rates = {"read_bytes_per_s": 30e9, "copy_bytes_per_s": 30e9, "matvec_bytes_per_s": 15e9, "matvec_rows_bytes_per_s": 15e9, "kv_read_bytes_per_s": 12e9,
             "kv_read_grouped_bytes_per_s": 11e9, "gemm_flops_per_s": 1e11, "step_overhead_s": 1e-3, "layer_overhead_s": 1e-4, "layer_overhead_rows_s": 1e-4, "per_row_s": 1e-5}  # fmt: skip
    return Card(machine=here, dtype="float32", path=path, measured_at="", seconds=0, **rates)


@pytest.fixture(scope="module")
def changes():
    """What every row returns at a tiny budget, on the eager path. One thread: two of them wait for each other on a busy machine."""
    here, threads = card(), torch.get_num_threads()
    torch.set_num_threads(1)
    yield {name: row.measure(0.02, here) for name, row in ROWS.items()}
    torch.set_num_threads(threads)


# ---- arithmetic ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after", "found"), [(100, 90, "cut"), (100, 90.01, "same"), (100, 109.99, "same"), (100, 110, "worse"), (3, 2.7, "cut"),
                                                       (0.7, 0.77, "worse"), (1, 1, "same"), (1, 0, "cut"), (1, -0.02, "cut"), (1, -0.2, "unclear")])  # fmt: skip
def test_ten_percent_is_the_margin_and_belongs_to_cut_and_worse(before, after, found):
    assert ledger.class_of(Change(before, after).factor) == found


def test_noise_that_leaves_nothing_to_compare_with_has_no_class():
    assert ledger.class_of(Change(-1e-9, 1e-6).factor) == "unclear" and entry(change=Change(0, 1)).cells()[6] == "-"


def entry(**changed) -> Entry:
    return Entry(**{"technique": "t", "quantity": "a", "guess": "", "claimed": "cut", "change": Change(2e-3, 1e-3, predicted=0.4), **changed})


def test_an_entry_compares_its_class_with_the_claim_and_the_guess():
    assert entry().cells() == ("t", "a", "none", "cut", "0.40", "2.00 ms → 1.00 ms", "0.50", "cut", "yes", "measured")
    assert entry(guess="same").cells()[2] == "same, wrong" and entry(guess="cut").cells()[2] == "cut, right"
    assert not entry(claimed="worse").agrees and entry(claimed="worse").cells()[-2] == "no"
    assert entry(quantity="capacity", change=Change(2**30, 2**29)).cells()[4:7] == ("", "1.000 GiB → 512.0 MiB", "0.50")


def test_tables_add_up_and_count_right_guesses():
    table = Table((entry(guess="cut"), entry(quantity="b", guess="same"))) + Table((entry(technique="u"),))
    assert table.score() == (1, 2)
    assert table["u", "a"].technique == "u" and len(str(table).splitlines()) == 3
    with pytest.raises(KeyError):
        table["u", "b"]


def test_b110_the_table_escapes_what_a_learner_types():
    page = Table((entry(guess="<script>alert(1)</script>"),), "<b>")._repr_html_()
    assert "<script>" not in page and "&lt;script&gt;" in page and "<caption style='text-align:left'>&lt;b&gt;" in page


# ---- rows ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_complete(name):
    row = ROWS[name]
    assert row.name == name and row.why.endswith(".") and row.loses.endswith(".")
    assert row.claims and set(row.claims) <= set(ledger.QUANTITIES) and set(row.claims.values()) <= {"cut", "same", "worse"}


def test_the_ledger_has_a_row_for_every_toggle():
    assert len(ROWS) >= 16
    claimed = {(quantity, kind) for row in ROWS.values() for quantity, kind in row.claims.items()}
    assert {quantity for quantity, _ in claimed} == set(ledger.QUANTITIES)
    shorter = {name for name, row in ROWS.items() if row.claims.get("passes") == "cut"}
    assert shorter == {"a draft of one layer for a target of ten", "prompt lookup, on a text that repeats itself"}, "only drafts shorten the chain"


@pytest.mark.parametrize("name", ROWS)
def test_a_row_measures_what_it_claims_at_any_budget(changes, name):
    found = changes[name]
    assert set(found) == set(ROWS[name].claims)
    for quantity, change in found.items():
        assert change.before > 0 or quantity == "b", (quantity, change)
        assert change.predicted is None or change.predicted >= 0
        assert change.how.split(":")[0].split(",")[0] in ("measured", "counted", "recorded", "computed")


@pytest.mark.parametrize("name", ROWS)
def test_what_is_counted_or_computed_has_the_claimed_class_on_every_machine(changes, name):
    """Bytes and passes are facts; their classes do not depend on the clock. And the formula's factor agrees with the count."""
    for quantity, change in changes[name].items():
        if quantity in COUNTED or change.how.startswith("computed"):
            assert ledger.class_of(change.factor) == ROWS[name].claims[quantity], quantity
        if quantity in COUNTED and change.predicted is not None:
            within = 0.05 if ROWS[name].claims[quantity] == "cut" and quantity == "passes" else 0.02  # drafts are accepted by chance
            assert change.factor == pytest.approx(change.predicted, rel=within), quantity


@pytest.mark.parametrize("name", [name for name in ROWS if name not in ("weights that fit the last-level cache", "compiled instead of eager")])
def test_the_formulas_factor_has_the_claimed_class(changes, name):
    """Where the formula gives a factor, the claim follows from it; the cache is what it does not know."""
    for quantity, change in changes[name].items():
        if change.predicted is not None:
            assert ledger.class_of(change.predicted) == ROWS[name].claims[quantity], (quantity, change)


def test_run_puts_guesses_beside_claims_and_shares_the_budget(monkeypatch):
    asked = []

    def measure(budget_s, _):
        asked.append(budget_s)
        return {"a": Change(2, 1)}

    rows = {name: ledger.Technique(name=name, claims={"a": "cut"}, why="", loses="", measure=measure) for name in ("x", "y")}
    monkeypatch.setattr(ledger, "load", lambda: rows)
    monkeypatch.setenv("DECODELAB_BUDGET_S", "2")
    table = ledger.run(["x", "y"], card(), guesses={"x": {"a": " Cut "}, "y": {"a": None}}, budget_s=12)
    assert asked == [1.0, 1.0] and [one.guess for one in table.entries] == ["cut", ""]
    with pytest.raises(catalog.UnknownName, match="no technique 'z' in the ledger; there are: x, y"):
        ledger.run(["z"], card())


# ---- variants ------------------------------------------------------------------------------------------------------


def grouped(path: str = "eager"):
    return pairs.pair(pairs.LLAMA)[path == "eager"]


def logits(model, cache: KVCache) -> torch.Tensor:
    """Of a prompt of 5 tokens and 20 steps after it, past the first chunk."""
    first = prefill(model, [[1, 2, 3, 4, 5]], cache=cache)
    return torch.stack([first, *(decode_step(model, torch.tensor([token]), cache=cache) for token in range(6, 26))])


@pytest.mark.parametrize("kind", [techniques.Concatenating, techniques.StaticRead, techniques.Expanded])
def test_a_cache_variant_gives_the_plain_caches_logits(kind):
    model = grouped()
    plain = logits(model, KVCache(model.config, max_len=40))
    assert torch.allclose(logits(model, kind(model.config, max_len=40)), plain, rtol=1e-4, atol=1e-5)


def test_the_static_read_gives_the_plain_caches_logits_on_the_fast_path():
    model = grouped(path="fast")
    plain = logits(model, KVCache(model.config, max_len=40))
    cache = techniques.StaticRead(model.config, max_len=40)
    assert torch.allclose(logits(model, cache), plain, rtol=1e-4, atol=1e-5)
    assert cache.open(16) == cache.slots - 16 >= cache.max_len, "it reads every slot, whatever is in them"


def test_variants_read_what_they_say():
    """The keys that attention gets: how many heads and tokens, and whether they are the cache's own memory."""
    config, seen = grouped().config, {}
    k = torch.ones(1, config.n_kv_heads, 1, config.head_dim)
    for kind in (KVCache, techniques.Concatenating, techniques.StaticRead, techniques.Expanded):
        cache = kind(config, max_len=40)
        cache.fill_random(9)
        keys, _ = cache.append(0, k, k)
        seen[kind.__name__] = keys.shape[1], keys.shape[2], keys.data_ptr() == cache.keys[0].data_ptr()
    few, all_heads = config.n_kv_heads, config.n_heads
    assert seen == {"KVCache": (few, 10, True), "Concatenating": (few, 10, False), "StaticRead": (few, 64, True), "Expanded": (all_heads, 10, False)}


def test_naive_attention_gives_the_same_logits():
    config = techniques.tiny(hidden=256)
    models = [
        techniques.with_attention(weights.random(config, dtype="float32", path="eager"), kind) for kind in (Attention, techniques.NaiveAttention)
    ]
    plain, naive = (logits(model, model.new_cache(max_len=40)) for model in models)
    assert torch.allclose(naive, plain, rtol=1e-4, atol=1e-5)


def test_one_layer_over_and_over_does_the_work_of_all_layers_with_the_bytes_of_one():
    config = techniques.tiny()
    model = techniques.one_layer_over_and_over(config, "cpu", "eager")
    assert len(model.blocks) == config.n_layers and len({id(block) for block in model.blocks}) == 1
    assert sum(p.numel() for p in model.parameters()) < cost.parameters(config) / 3


def test_passes_are_counted_as_they_run():
    model = grouped()
    assert techniques.same_passes((model, model.new_cache(max_len=8)), (model, model.new_cache(max_len=8, batch=3))) == Change(
        1, 1, predicted=1, how="counted"
    )
    assert (
        techniques.passes((model, lambda: None), (model, lambda: prefill(model, [[1]], cache=model.new_cache(max_len=1)))).after
        == 1 / techniques.TOKENS
    )


def test_the_shape_outgrows_the_last_level_cache():
    for cached in (2, 8):
        config = techniques.shape(card(), cached=cached)
        assert cost.weight_bytes_per_step(config, dtype_bytes=4) >= cached * 2**21
    large = dataclasses.replace(card(), machine=dataclasses.replace(card().machine, last_level_cache_bytes=2**32))
    assert techniques.shape(large).n_layers == 48, "no more than fits a small machine"


def test_a_recorded_run_is_shown_where_there_is_one(tmp_path, monkeypatch):
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "no_synchronise.json").write_text('{"synchronised_s": 4e-3, "asked_s": 1e-3, "machine": "a card"}')
    monkeypatch.setattr(techniques.catalog, "data_dir", lambda: tmp_path)
    assert techniques.no_synchronise(1.0, card()) == {"a": Change(4e-3, 1e-3, how="recorded: a card")}


# ---- the lab -------------------------------------------------------------------------------------------------------


def literal_strings(cell: str) -> set[str]:
    return {node.value for node in ast.walk(ast.parse(cell)) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def test_lab_06_asks_for_every_row_before_it_measures_it():
    """A row of labs/techniques.py that the lab does not name would never be measured; its guesses stand before the first run."""
    lab = nbformat.read(ROOT / "labs" / "solutions" / "06_the_ledger" / "06_the_ledger.ipynb", as_version=4)
    code = [cell.source for cell in lab.cells if cell.cell_type == "code"]
    first_run = next(number for number, cell in enumerate(code) if "ledger.run(" in cell)
    guesses = {}
    for cell in code[:first_run]:
        for node in ast.walk(ast.parse(cell)):
            if isinstance(node, ast.Assign | ast.AugAssign) and isinstance(node.value, ast.Dict) and cell.startswith("yours"):
                guesses |= ast.literal_eval(node.value)
    assert guesses == {name: dict.fromkeys(row.claims, "") for name, row in ROWS.items()}
    assert set(ROWS) <= set().union(*(literal_strings(cell) for cell in code[first_run:] if "ledger.run(" in cell))
