"""Grammars: brute force over a small vocabulary says which tokens may follow, and every text they accept is JSON of the right types."""

import json
import random
import re
from dataclasses import replace
from itertools import product

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import tiny
from decodelab.decoder import tokenizer as tokenizers_of
from decodelab.decoder.grammar import Grammar, OneOf, Parts, Some, after, enum, integer, read, record, string, token_texts, tool_call
from decodelab.decoder.sampling import Sampling
from decodelab.decoder.speculative import DraftModel, PromptLookup, speculate

CHARACTERS = [*'{}":, abcktxy"', *"0123456789-"]  # alone, one of them twice
LONGER = [
    '{"',
    '{"a',
    '": ',
    '": "',
    '", "',
    '"}',
    "ab",
    "abc",
    "bc",
    " true",
    "true}",
    '": true',
    "-1",
    "12",
    "10",
    "01",
    "true",
    "rue",
    '",',
    "},",
    "  ",
]
END = 0
SPELLED = ["", *CHARACTERS, *LONGER, "\ufffd", "a\ufffd", "\n", "\\", "é", *"truefalsnmg", '{"name": "', '"arguments": {']
"""Token 0 ends a text; behind it single characters, longer pieces, parts of characters, and what a string may not hold."""
INSIDE = sorted({text for text in SPELLED if len(text) == 1 and text not in '"\\\n\ufffd'})  # what a string of these tokens is made of


def strings(most: int) -> list[str]:
    return [f'"{"".join(chosen)}"' for size in range(most + 1) for chosen in product(INSIDE, repeat=size)]


def integers(digits: int) -> list[str]:
    return [str(number) for number in range(1 - 10**digits, 10**digits)]


GRAMMARS: dict[str, tuple[Parts, list[str]]] = {  # and every text, written out by hand
    "string": (record({"a": string(most=2)}), [f'{{"a": {value}}}' for value in strings(2)]),
    "empty string": (record({"a": string(most=0)}), ['{"a": ""}']),
    "integer": (record({"a": integer(digits=2)}), [f'{{"a": {value}}}' for value in integers(2)]),
    "boolean": (record({"a": enum(True, False)}), ['{"a": true}', '{"a": false}']),
    "enum with a common beginning": (record({"a": enum("a", "ab", "abc")}), ['{"a": "a"}', '{"a": "ab"}', '{"a": "abc"}']),
    "fields": (record({"a": string(most=1), "b": integer(digits=1), "c": enum(True, "x")}),
               [f'{{"a": {a}, "b": {b}, "c": {c}}}' for a in strings(1) for b in integers(1) for c in ("true", '"x"')]),
    "no fields": (record({}), ["{}"]),
    "tools": (tool_call({"a": {"x": integer(digits=1)}, "ab": {"y": string(most=1), "x": enum(True)}}),
              [*(f'{{"name": "a", "arguments": {{"x": {x}}}}}' for x in integers(1)),
               *(f'{{"name": "ab", "arguments": {{"y": {y}, "x": true}}}}' for y in strings(1))]),
}  # fmt: skip


def grammar(parts: Parts, **options) -> Grammar:
    return Grammar(parts, SPELLED, **{"end_ids": [END], **options})


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_tokens_allowed_are_those_that_brute_force_finds(name):
    """After every beginning that tokens can write: a token is allowed where some text goes on with it, and no other is."""
    parts, texts = GRAMMARS[name][0], set(GRAMMARS[name][1])
    begun = {text[:size] for text in texts for size in range(len(text) + 1)}
    allowed, todo, seen = grammar(parts), {"": ()}, set()
    while todo:
        text, ids = todo.popitem()
        seen.add(text)
        expected = {i for i, more in enumerate(SPELLED) if more and "\ufffd" not in more and text + more in begun}
        found = allowed(ids)
        assert found.dtype == torch.bool and found.shape == (len(SPELLED),)
        assert set(found.nonzero().flatten().tolist()) == expected | ({END} if text in texts else set()), text
        todo |= {text + SPELLED[i]: (*ids, i) for i in expected if text + SPELLED[i] not in seen}
    assert seen == begun, "every text can be written, and nothing else is ever begun"


@pytest.mark.parametrize("name", GRAMMARS)
def test_every_text_is_json_with_the_grammars_keys(name):
    _, texts = GRAMMARS[name]
    found = [json.loads(text) for text in texts]
    assert all(json.dumps(one, ensure_ascii=False) == text for one, text in zip(found, texts, strict=True)), "spaced as json.dumps does it"
    if name == "fields":
        assert all(list(one) == ["a", "b", "c"] and type(one["a"]) is str and type(one["b"]) is int for one in found)


def test_the_same_text_in_other_tokens_allows_the_same():
    allowed = grammar(GRAMMARS["fields"][0])
    ids = {text: i for i, text in reversed(list(enumerate(SPELLED)))}
    by_character, in_pieces = [ids[char] for char in '{"a": "'], [ids['{"a'], ids['": "']]
    assert torch.equal(allowed(by_character), allowed(in_pieces)) and bool(allowed(in_pieces)[ids["y"]])
    assert allowed(in_pieces) is allowed(tuple(by_character)), "one mask per state, made once"


def test_what_the_grammar_forbids_is_followed_by_nothing():
    allowed = grammar(GRAMMARS["boolean"][0])
    for ids in ([SPELLED.index("}")], [END], [SPELLED.index("\ufffd")], [10**6]):
        assert not allowed(ids).any()


def test_rows_beyond_the_tokenizer_are_never_allowed():
    allowed = grammar(GRAMMARS["string"][0], vocab_size=len(SPELLED) + 5)
    written = [SPELLED.index('{"a'), SPELLED.index('": "')]
    assert allowed(written).shape == (len(SPELLED) + 5,) and not allowed(written)[len(SPELLED) :].any() and allowed(written).any()


def test_the_states_kept_are_bounded():
    allowed = grammar(record({"a": string(most=9)}))
    start = [SPELLED.index('{"a'), SPELLED.index('": "')]
    for chosen in product([SPELLED.index(char) for char in "abcxy"], repeat=5):
        allowed([*start, *chosen])
    assert len(allowed.states) <= 2_100 and allowed([]).any() and allowed([*start, SPELLED.index("a")]).any()


@pytest.mark.parametrize(("build", "said"), [
    (lambda: string(most=-1), "a string of up to -1 characters can never be written; give 0 characters or more"),
    (lambda: integer(digits=0), "an integer of 0 digits can never be written; give one digit or more"),
    (lambda: enum(), "an enum of no values can never be written"), (lambda: tool_call({}), "a call of no tools can never be written"),
    (lambda: grammar(record({"key": enum("z")})), "no token writes 'z' alone, which the grammar may ask for"),
    (lambda: Grammar(record({}), ["a", "b"], end_ids=[0]), "no token writes '{' alone")])  # fmt: skip
def test_a_grammar_that_allows_nothing_is_one_clear_line(build, said):
    with pytest.raises(ValueError, match=re.escape(said)) as fault:
        build()
    assert "\n" not in str(fault.value)


def test_states_by_hand():
    assert read(frozenset({("ab", "c")}), "abc") == frozenset({()}) and not read(frozenset({("ab",)}), "abc")
    assert after((OneOf((("ab",), ("ac",))), "d"), "a") == {("b", "d"), ("c", "d")}
    assert after((Some("[0-9]", 2), "d"), "7") == {(Some("[0-9]", 1), "d")} and after((Some("[0-9]", 0), "d"), "d") == {()}


def backend(texts: list[str]) -> Tokenizer:
    """A byte-level vocabulary of these tokens; the first one ends a text."""
    found = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    found.pre_tokenizer, found.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    found.add_special_tokens([AddedToken(texts[0], special=True)])
    return found


def test_texts_of_a_byte_level_vocabulary():
    """A space is Ġ in the file; one byte of two that make an é is no text, and the end token has none."""
    known = tokenizers_of.Tokenizer(backend(["<end>", "Ġa", '"', "Ã", "©", "Ã©"]), end_ids=[0])
    assert token_texts(known) == ("", " a", '"', "\ufffd", "\ufffd", "é")
    allowed = Grammar(('"', Some(r'[^"]', 3), '"'), token_texts(known), end_ids=known.end_ids)
    assert allowed([2]).tolist() == [False, True, True, False, False, True] and allowed([2, 1]).tolist() == [False, False, True, False, False, True]


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=3.0)], ids=["greedy", "hot"])
@pytest.mark.parametrize("mask_draft", [True, False])
@pytest.mark.parametrize("drafter", [PromptLookup, lambda: DraftModel(target(5))], ids=["lookup", "model"])
def test_a_constrained_text_parses_whatever_drafts(drafter, mask_draft, sampling):
    """Random weights know no JSON; the grammar makes them write it."""
    allowed = Grammar(GRAMMARS["tools"][0], SPELLED, end_ids=[END], vocab_size=128)
    for seed in range(2):
        rounds = list(speculate(target(11), [1, 2, 3, 1, 2, 3], max_tokens=60, draft=drafter(), k=4, allowed=allowed, mask_draft=mask_draft, eos=[END],
                                sampling=sampling, generator=torch.Generator().manual_seed(seed)))  # fmt: skip
        text = "".join(SPELLED[token] for each in rounds for token in each.tokens)
        assert rounds[-1].finish == "stop" and text in GRAMMARS["tools"][1]


def target(seed: int):
    """A tiny decoder with room for the vocabulary above."""
    return tiny.decoder(replace(tiny.LLAMA, vocab_size=128, max_context=128), seed=seed)


def test_the_lab_models_vocabulary_writes_json():
    """49,152 tokens, one chosen at random from those allowed until the end: eight texts, each with the types that were asked for."""
    known = tokenizers_of.load_tokenizer("smollm2-135m")
    parts = record({"name": string(most=12), "age": integer(digits=3), "colour": enum("red", "blue"), "ok": enum(True, False)})
    allowed, chosen = Grammar(parts, token_texts(known), end_ids=known.end_ids), random.Random(3)
    for _ in range(8):
        ids = []
        while (token := chosen.choice(allowed(ids).nonzero().flatten().tolist())) not in known.end_ids:
            ids.append(token)
        found = json.loads(known.decode(ids))
        assert list(found) == ["name", "age", "colour", "ok"] and len(found["name"]) <= 12 and abs(found["age"]) < 1000
        assert type(found["age"]) is int and found["colour"] in ("red", "blue") and type(found["ok"]) is bool
