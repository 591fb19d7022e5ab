"""The tiny reasoner: what its training draws, how it is saved, and that the shipped weights are what their card says."""

import json
import runpy
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import course
from decodelab.decoder import weights
from decodelab.decoder.tokenizer import load_tokenizer
from decodelab.teaching import tasks
from test_reference import TOLERANCE, every_logit, reference_logits

FOLDER = course.ROOT / "labs" / "reasoner"


@pytest.fixture(scope="module")
def training():
    return runpy.run_path(str(FOLDER / "train.py"))


@pytest.fixture(scope="module", params=weights.REASONERS)
def shipped(request):
    return weights.load(request.param, dtype="float32", path="eager")


def test_a_draw_is_what_the_seed_says_and_never_held_out(training):
    rows = [training["row"](Random(3), 256) for _ in range(2)]
    assert rows[0] == rows[1] != training["row"](Random(4), 256)
    rng, seen = Random(5), set()
    for _ in range(600):
        ids, _ = training["example"](rng)
        text = [tasks.VOCABULARY[token] for token in ids]
        prompt = "".join(text[1 : text.index("=") + 1])
        seen.add(prompt[0])
        assert not tasks.Problem(task="", prompt=prompt, trace="", answer="").held_out
        assert text[0] == tasks.START and text[-1] == tasks.END and text.count(tasks.ANSWER) == 1
    assert seen == set("CMS")


def test_an_early_answer_is_learned_and_where_it_comes_is_not(training):
    rng, cuts = Random(6), 0
    for _ in range(400):
        ids, labels = training["example"](rng)
        assert [label for label in labels[:-1] if label >= 0] == [token for token, label in zip(ids[1:], labels, strict=False) if label >= 0]
        hidden = [place for place, label in enumerate(labels[:-1]) if label < 0]
        assert labels[-1] < 0 and len(hidden) <= 1
        if hidden:
            cuts += 1
            assert tasks.VOCABULARY[ids[hidden[0] + 1]] == tasks.ANSWER
    assert 60 < cuts < 140  # a quarter of them


def test_rows_have_their_length_and_begin_anywhere_in_long_texts(training):
    rng, rows = Random(7), []
    for _ in range(200):
        ids, labels = training["row"](rng, 128)
        assert len(ids) == len(labels) == 128
        rows.append(tasks.VOCABULARY[ids[0]])
    assert 4 < sum(first != tasks.START for first in rows) < 100


def test_a_saved_model_is_read_back_by_us_and_by_transformers(training, tmp_path):
    model = training["fresh"](2, torch.Generator().manual_seed(1))
    training["save"](model, tmp_path / "saved")
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    ids = torch.randint(len(tasks.VOCABULARY), (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours = every_logit(weights.load(tmp_path / "saved", dtype="float32", path="eager"), ids)
        assert torch.equal(ours, every_logit(model.requires_grad_(False), ids))
    theirs = reference_logits(AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32), ids)
    assert (ours - theirs).abs().max() < TOLERANCE
    text = tasks.multiplication(123, 45)
    assert AutoTokenizer.from_pretrained(tmp_path / "saved").encode(text.prompt, add_special_tokens=False) == load_tokenizer(
        tmp_path / "saved").encode(text.prompt, start=False)  # fmt: skip


def test_the_shipped_models_and_their_vocabulary(shipped):
    tokenizer = load_tokenizer(shipped.config.name)
    assert tokenizer.tokens == tasks.VOCABULARY and shipped.config.vocab_size == len(tasks.VOCABULARY)
    problem = tasks.search([3, 5, 2], 7)
    ids = tokenizer.encode(problem.prompt + problem.trace + tasks.ANSWER + problem.answer + tasks.END)
    assert ids == [tasks.VOCABULARY.index(token) for token in problem.text()]
    assert tokenizer.decode(ids[1:], skip_special=False) == problem.prompt + problem.trace + tasks.ANSWER + problem.answer + tasks.END
    assert shipped.config.n_layers == {"reasoner": 10, "reasoner-draft": 1}[shipped.config.name]
    with pytest.raises(ValueError, match=r"the text 'C7é=' holds a character or word that is none of this vocabulary's 40"):
        tokenizer.encode("C7é=")


def test_both_models_are_small_enough_to_ship():
    files = [file for name in weights.REASONERS for file in weights.find(name).iterdir()]
    assert 1_000_000 < sum(file.stat().st_size for file in files) <= 12_000_000


def test_the_card_keeps_what_the_course_promises():
    card = json.loads((FOLDER / "card.json").read_text(encoding="utf-8"))
    named = card["tasks"]["collatz"]
    assert named["problems"] >= 200 and named["accuracy"] >= 0.95
    assert named["median_trace_tokens"] >= 40 * named["median_prompt_tokens"]
    assert set(card["tasks"]) == set(tasks.TASKS)
    for task in card["tasks"].values():
        assert task["problems"] >= 200 and 0 < task["accuracy"] <= 1
