"""Speculation measured: the settings, the counts, the prediction from counts and prices, and one line for bad input. No time is asserted."""

import json
import math
from dataclasses import replace

import pytest
import torch

import tiny
from decodelab import cli
from decodelab.arithmetic.speculation import RoundPrice, expected_tokens, speedup
from decodelab.decoder.generate import generate
from decodelab.decoder.speculative import Round, acceptance, acceptance_by_place
from decodelab.measuring import speculation
from decodelab.measuring.speculation import SETTINGS, Loaded, Measured, measure

CONFIG = replace(tiny.LLAMA, vocab_size=128, max_context=2048)
KEYS = {"acceptance", "measured_speedup", "predicted_speedup", "k", "tokens_per_round", "rounds", "break_even", "plain_s", "speculative_s", "tied"}


class Letters:
    """A tokenizer whose ids are ASCII codes; 1 ends a text."""

    end_ids, vocab_size = (1,), 128

    def __init__(self, template="chat", tokens=None):
        self.template, self.tokens = template, tuple(tokens or map(chr, range(128)))

    def encode(self, text):
        return [2, *map(ord, text)]

    def chat(self, messages):
        return [3, *map(ord, messages[0]["content"])]

    def decode(self, ids, *, skip_special=True):
        return "".join("" if skip_special and i < 4 else chr(i) for i in ids)


TARGET, OTHER = (Loaded(tiny.decoder(CONFIG, seed=seed), Letters()) for seed in (11, 5))
PLAIN_TEXT = Loaded(TARGET.model, Letters(template=None))


@pytest.fixture(autouse=True)
def stand_in(monkeypatch, tmp_path):
    """The tiny decoder under the names of the lab's models; no repeat beyond the first."""
    monkeypatch.setenv("DECODELAB_BUDGET_S", "0.001")
    monkeypatch.setenv("DECODELAB_HOME", str(tmp_path))
    kept = {speculation.CHAT: TARGET, speculation.REASONER: PLAIN_TEXT, speculation.DRAFT: OTHER}
    monkeypatch.setattr(speculation.weights, "load", lambda source, **_: kept[source].model)
    monkeypatch.setattr(speculation, "load_tokenizer", lambda source: kept[source].tokenizer)
    return kept


def a_round(proposed, accepted, *, own=1):
    return Round(index=1, phase="decode", tokens=(7,) * (accepted + own), proposed=proposed, accepted=accepted, context=9, finish=None)


# ---- what is measured ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETTINGS)
def test_every_setting_is_measured(name, stand_in):
    found = measure(name, stand_in[SETTINGS[name].target], draft=stand_in.get(SETTINGS[name].draft), budget_s=1)
    assert found.task == name and found.k == SETTINGS[name].k and found.texts == len(SETTINGS[name].prompts) and found.repeats == 1
    assert found.rounds <= found.tokens == found.accepted + found.rounds and found.accepted <= found.proposed
    assert found.plain_s > 0 and found.speculative_s > 0 and found.predicted_speedup > 0 and 0 <= found.first_acceptance <= 1
    assert (found.tied is None) == (SETTINGS[name].temperature > 0) and not found.tied
    assert found.price.k <= found.k and found.draft == ("prompt lookup" if SETTINGS[name].draft is None else OTHER.model.config.name)


def test_a_draft_that_is_the_target_is_always_right():
    found = measure("collatz", PLAIN_TEXT, draft=Loaded(TARGET.model, Letters()), k=3, budget_s=1)
    assert found.acceptance == found.first_acceptance == found.next_acceptance == 1.0
    assert found.rounds == math.ceil(found.tokens / 4) and found.tokens == SETTINGS["collatz"].tokens - 1
    assert found.predicted_speedup == pytest.approx(
        found.tokens * found.price.step_s / (found.rounds * (found.price.draft_s + found.price.verify_s)), rel=0.2
    )


def test_without_drafts_nothing_is_proposed():
    found = measure("prose", TARGET, k=0, budget_s=1)
    assert (found.k, found.proposed, found.acceptance, found.rounds) == (0, 0, None, found.tokens) and found.tied == ()
    assert found.price.k == 0 and found.price.verify_s == found.price.step_s


def test_a_masked_lookup_proposes_less_and_the_text_is_the_same():
    """Greedy, a copy is kept as far as the target agrees, masked or not: a mask leaves out drafts that the grammar would have refused."""
    masked, free = (measure(name, TARGET, k=4, budget_s=1) for name in ("json", "json_unmasked"))
    assert masked.proposed < free.proposed and masked.acceptance > free.acceptance
    assert (masked.tokens, masked.accepted, masked.rounds) == (free.tokens, free.accepted, free.rounds)


def test_texts_are_repeated_within_the_budget(monkeypatch):
    monkeypatch.setenv("DECODELAB_BUDGET_S", "20")
    monkeypatch.setattr(speculation, "REPEATS", 2)
    assert measure("prose", TARGET, k=2, budget_s=20).repeats == 2, "the first of three has warmed up"


def test_a_repeat_counts_by_its_medians_and_without_prefill():
    runs = [[(a_round(0, 0), 9.0), (a_round(2, 1), seconds), (a_round(2, 0), 0.5)] for seconds in (1.0, 2.0, 9.0)]
    assert speculation._seconds([runs, runs]) == 2 * (2.0 + 0.5)


# ---- what is predicted -----------------------------------------------------------------------------------------------


def test_acceptance_by_place():
    """Blocks of 4: all kept, two kept, none, nothing proposed: 2 of 3 first drafts, and 4 of 5 tested behind an accepted one."""
    rounds = [a_round(4, 4), a_round(4, 2), a_round(4, 0), a_round(0, 0)]
    assert acceptance_by_place(rounds) == (2 / 3, 4 / 5) and acceptance(rounds) == 6 / 8
    assert acceptance_by_place([a_round(3, 3, own=0)]) == (1.0, 1.0), "a draft that ended the text"
    assert acceptance_by_place([a_round(0, 0)]) == acceptance_by_place([]) == (0.0, 0.0)


def test_expected_tokens_where_the_first_draft_is_another_matter():
    assert expected_tokens(0.8, 4, first=0.8) == pytest.approx(expected_tokens(0.8, 4))
    assert expected_tokens(0.5, 3, first=0.2) == pytest.approx(1 + 0.2 * 1.75) and expected_tokens(0.5, 0, first=0.2) == 1
    with pytest.raises(ValueError, match=r"acceptance is 1\.5 and k 2; acceptance must be from 0 to 1"):
        expected_tokens(0.5, 2, first=1.5)


def test_rounds_of_unequal_width_are_priced_one_by_one():
    """Half the rounds find nothing, half four drafts: 1 step each, and 1 + 0.5 * (1 + 1 + 1 + 1) = 3 tokens for two steps."""
    plain, full = RoundPrice(k=0, step_s=1.0, draft_s=0.0, verify_s=1.0), RoundPrice(k=4, step_s=1.0, draft_s=0.0, verify_s=2.0)
    assert speedup([plain, full], 1.0, first=0.5) == pytest.approx((1 + 3) / (1 + 2))
    assert speedup([full], 0.7) == full.speedup(0.7) == pytest.approx(2.7731 / 2, rel=1e-4)
    with pytest.raises(ValueError, match="there is no round to price"):
        speedup([], 0.5)


def test_the_prediction_is_the_formula_on_the_counts(monkeypatch):
    """With prices put in, what comes out is arithmetic: no time of a whole text is in it."""
    prices = {k: RoundPrice(k=k, step_s=1.0, draft_s=0.1 * k, verify_s=1.0 + 0.1 * k) for k in range(9)}
    monkeypatch.setattr(speculation.Trial, "prices", lambda trial: prices)
    found = measure("collatz", PLAIN_TEXT, draft=Loaded(TARGET.model, Letters()), k=4, budget_s=1)
    assert found.tokens == 191 and found.rounds == 39  # 38 blocks of 5, and the last token alone
    assert found.predicted_speedup == pytest.approx(191 / (38 * 1.8 + 1))
    assert found.price.k == 8 and found.error == pytest.approx(found.predicted_speedup / found.measured_speedup - 1)


def test_a_price_for_each_number_of_drafts_that_occurred(monkeypatch):
    seen, kept = {}, speculation.Trial.prices
    monkeypatch.setattr(speculation.Trial, "prices", lambda trial: seen.setdefault("prices", kept(trial)))
    found = measure("scratchpad", PLAIN_TEXT, draft=OTHER, k=3, budget_s=1)
    assert set(seen["prices"]) == {0, 1, 2, 3} or set(seen["prices"]) < {0, 1, 2, 3}
    assert all(price.k == k and (price.draft_s > 0 or not k) for k, price in seen["prices"].items()) and found.price is seen["prices"][3]
    assert len({price.step_s for price in seen["prices"].values()}) == 1 and seen["prices"][0].verify_s == found.price.step_s


# ---- exactness -------------------------------------------------------------------------------------------------------


def test_texts_that_part_at_a_near_tie_are_reported_and_others_are_a_fault():
    prompt, plain = [5, 6, 7], [step.token for step in generate(TARGET.model, [5, 6, 7], max_tokens=6)]
    assert speculation._tie(TARGET.model, prompt, plain, plain) is None
    wrong = [*plain[:3], (plain[3] + 1) % 128, *plain[4:]]
    with pytest.raises(ArithmeticError, match=f"token 3 of a text is {wrong[3]} with drafts and {plain[3]} without; their logits are"):
        speculation._tie(TARGET.model, prompt, plain, wrong)
    twin = tiny.decoder(replace(CONFIG, tied_embeddings=False), seed=11)
    twin.head.weight.data[wrong[3]] = twin.head.weight.data[plain[3]] * (1 + 1e-6)
    assert 0 <= speculation._tie(twin, prompt, plain, wrong) < 1e-5


def test_a_wrong_text_is_not_measured(monkeypatch):
    monkeypatch.setattr(speculation, "speculate", lambda *given, k, **options: iter([a_round(0, 0), a_round(k, 0), a_round(k, k)]))
    with pytest.raises(ArithmeticError, match="one greedy text has 3 tokens and the other 5, .* this is a fault"):
        measure("prose", TARGET, k=2, budget_s=1)


# ---- the command -----------------------------------------------------------------------------------------------------


def run(capsys, *arguments):
    status = cli.main(["speculate", *arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def test_the_commands_document(capsys):
    status, out, err = run(capsys, "--task", "copy", "json", "--task", "scratchpad", "--k", "2", "--json")
    found = json.loads(out)["tasks"]
    assert status == 0 and list(found) == ["copy", "json", "scratchpad"] and all(KEYS <= set(task) for task in found.values())
    assert all(task["k"] == 2 for task in found.values()) and "copy: a text repeated word for word" in err
    assert found["copy"]["tokens_per_round"] == found["copy"]["tokens"] / found["copy"]["rounds"]


def test_the_commands_table_has_a_row_for_every_setting(capsys):
    status, out, _ = run(capsys)
    lines = out.splitlines()
    assert status == 0 and len(lines) == len(SETTINGS) + 1 and [line.split()[0] for line in lines[1:]] == list(SETTINGS)
    assert all(head in lines[0] for head in ("acceptance", "predicted", "measured"))


def test_a_table_escapes_and_shows_what_is_not_there(stand_in):
    found = replace(measure("prose", TARGET, k=0, budget_s=1), draft="<b>")
    table = speculation.Results(prose=found)
    assert "<b>" not in table._repr_html_() and table.rows()[0][3] == "-"


@pytest.mark.parametrize(("arguments", "said"), [
    (["--task", "poetry"], "no task 'poetry' to speculate on; there are: copy, code, json"),
    (["--k", "-1"], "k is -1; it must be 0"),
    (["--task", "copy", "--k", "2048"], "k is 2048; it must be a whole number from 0 to 2047"),
    (["--budget", "0"], "the budget is 0.0 s"),
    (["--dtype", "fp8"], "fp8"),
    (["--device", "mps"], "mps")])  # fmt: skip
def test_bad_input_is_one_line(capsys, arguments, said):
    status, out, err = run(capsys, *arguments)
    lines = [line for line in err.strip().splitlines() if not line.startswith("copy: ")]  # progress
    assert status == 2 and out == "" and said in err and len(lines) == 1


def test_a_missing_model_is_one_line(capsys, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setenv("DECODELAB_MODEL", str(tmp_path / "none.gguf"))
    status, out, err = run(capsys, "--task", "copy")
    assert status == 2 and out == "" and "none.gguf: no such file" in err and len(err.strip().splitlines()) == 1


def test_a_draft_of_another_vocabulary_is_named_by_its_first_differing_id(capsys, monkeypatch, stand_in):
    swapped = Letters(tokens=[chr({65: 66, 66: 65}.get(i, i)) for i in range(128)])
    monkeypatch.setattr(speculation, "load_tokenizer", lambda source: swapped if source == speculation.DRAFT else Letters(template=None))
    status, out, err = run(capsys, "--task", "collatz")
    assert status == 2 and out == "" and "id 65 is 'A' to the target and 'B' to the draft; use a draft with the target's tokenizer" in err


def test_a_draft_shorter_than_the_text_is_refused(capsys, stand_in):
    short = tiny.decoder(replace(CONFIG, max_context=64), seed=5)
    with pytest.raises(ValueError, match="positions and the draft tiny-llama has 64; ask for fewer tokens"):
        measure("collatz", PLAIN_TEXT, draft=Loaded(short, Letters()), budget_s=1)


def test_settings_speak_of_models_that_are_there():
    assert {each.target for each in SETTINGS.values()} == {speculation.CHAT, speculation.REASONER}
    for name, each in SETTINGS.items():
        assert each.k >= 1 and each.tokens > each.k and each.prompts and (each.draft is None) == (each.target == speculation.CHAT), name
    masked, free = SETTINGS["json"], SETTINGS["json_unmasked"]
    assert masked == replace(free, what=masked.what, mask_draft=True), "they differ in the mask alone"
    assert isinstance(SETTINGS["hot"].temperature, float) and SETTINGS["hot"].prompts == SETTINGS["copy"].prompts and Measured
    assert torch.equal(TARGET.model.head.weight, PLAIN_TEXT.model.head.weight)
