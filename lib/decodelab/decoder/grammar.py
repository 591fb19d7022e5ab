"""Grammars for constrained decoding: a JSON record, a tool call. Which tokens may follow is read off the texts of the tokens.

A grammar is a sequence of parts: fixed text, a run of characters of one kind, a choice of sequences. What is left of it
after some characters is such a sequence again, so that the state of the automaton is a set of sequences.
"""

import json
import re
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice, takewhile

import torch
from torch import Tensor

from decodelab.decoder.tokenizer import Tokenizer


@dataclass(frozen=True)
class Some:
    """Up to `most` characters of a regular expression's class; what stands behind it must not begin with one of them."""

    of: str
    most: int


@dataclass(frozen=True)
class OneOf:
    """One of several sequences."""

    options: tuple["Parts", ...]


Parts = tuple[str | Some | OneOf, ...]


def string(*, most: int = 32) -> Parts:
    """A JSON string of up to `most` characters, none of them escaped. Raises: ValueError for a negative `most`."""
    _require(most >= 0, f"a string of up to {most} characters", "0 characters or more")
    return '"', Some(r'[^"\\\x00-\x1f]', most), '"'


def integer(*, digits: int = 6) -> Parts:
    """A JSON integer of at most so many digits, with a sign or without. Raises: ValueError for fewer than one."""
    _require(digits >= 1, f"an integer of {digits} digits", "one digit or more")
    return (OneOf((("0",), *((sign + first, Some("[0-9]", digits - 1)) for sign in ("", "-") for first in "123456789"))),)


def enum(*values: str | bool) -> Parts:
    """One of these JSON values; `enum(True, False)` is a boolean. Raises: ValueError without any."""
    _require(len(values) > 0, "an enum of no values", "one value or more")
    return (OneOf(tuple((json.dumps(value, ensure_ascii=False),) for value in values)),)


def record(fields: Mapping[str, Parts]) -> Parts:
    """A JSON object with these keys in this order, spaced as json.dumps does it."""
    parts = [part for at, (key, value) in enumerate(fields.items()) for part in (f"{', ' * (at > 0)}{json.dumps(key, ensure_ascii=False)}: ", *value)]
    return "{", *parts, "}"


def tool_call(tools: Mapping[str, Mapping[str, Parts]]) -> Parts:
    """A JSON object with the `name` of one of the tools and `arguments` as that tool takes them. Raises: ValueError without tools."""
    _require(len(tools) > 0, "a call of no tools", "one tool or more")
    calls = ((json.dumps(name, ensure_ascii=False), ', "arguments": ', *record(arguments)) for name, arguments in tools.items())
    return '{"name": ', OneOf(tuple(calls)), "}"


def _require(good: bool, what: str, least: str) -> None:
    if not good:
        raise ValueError(f"{what} can never be written; give {least}")


@lru_cache(maxsize=100_000)
def after(rest: Parts, char: str) -> frozenset[Parts]:
    """What may be left of `rest` once `char` is written; empty where it may not be.

    >>> after(("ab", "c"), "a"), after(("ab",), "b")
    (frozenset({('b', 'c')}), frozenset())
    """
    if not rest:
        return frozenset()
    head, tail = rest[0], rest[1:]
    if isinstance(head, OneOf):
        return frozenset().union(*(after((*option, *tail), char) for option in head.options))
    if isinstance(head, Some):
        if head.most and re.match(head.of, char):
            return frozenset({(Some(head.of, head.most - 1), *tail)})
        return after(tail, char)
    if char != head[0]:
        return frozenset()
    return frozenset({(head[1:], *tail) if len(head) > 1 else tail})


def read(state: frozenset[Parts], text: str) -> frozenset[Parts]:
    """The state after a text; empty where the grammar does not allow it."""
    for char in text:
        state = frozenset().union(*(after(rest, char) for rest in state))
    return state


@lru_cache(maxsize=2)
def token_texts(tokenizer: Tokenizer) -> tuple[str, ...]:
    """The text of each token by id: "" of a special one, marks where it is only a part of a character."""
    return tuple(tokenizer.decode([i]) for i in range(tokenizer.vocab_size))


def fixed_characters(parts: Parts) -> set[str]:
    """The characters of all fixed text, of every choice too."""
    inside = (fixed_characters(option) for part in parts if isinstance(part, OneOf) for option in part.options)
    return set().union(*(part for part in parts if isinstance(part, str)), *inside)


class Grammar:
    """`allowed(ids)` of `speculate`: which tokens may follow those written, (V,) bool; an end token once the text is complete.

    A token may end inside a part or span several. Tokens without text, and those that are part of a character, are never allowed.
    Raises: ValueError where no token writes one of the characters that the grammar asks for.
    """

    def __init__(self, parts: Parts, texts: Sequence[str], *, end_ids: Collection[int], vocab_size: int | None = None):
        self.texts, self.end_ids, self.vocab_size = ["" if "\ufffd" in text else text for text in texts], list(end_ids), vocab_size or len(texts)
        self.ids: dict[str, list[int]] = {}
        for token, text in enumerate(self.texts):
            self.ids.setdefault(text, []).append(token)
        self.ordered = sorted(self.ids)
        self.states, self.masks, self.runs = {(): frozenset({parts})}, {}, {}  # by ids written, by state or rest, by kind of character
        if missing := sorted(fixed_characters(parts) - self.ids.keys()):
            raise ValueError(f"no token writes {missing[0]!r} alone, which the grammar may ask for; take another tokenizer or another grammar")

    def __call__(self, ids: Sequence[int]) -> Tensor:
        known = len(ids := tuple(ids))
        while ids[:known] not in self.states:
            known -= 1
        state = self.states[ids[:known]]
        if len(self.states) > 2000:
            self.states = {(): self.states[()]}
        for at in range(known, len(ids)):
            text = self.texts[ids[at]] if ids[at] < len(self.texts) else ""
            state = self.states[ids[: at + 1]] = read(state, text) if text else frozenset()
        if state not in self.masks:
            self.masks[state] = torch.stack([torch.zeros(self.vocab_size, dtype=torch.bool), *map(self._mask, state)]).any(0)
        return self.masks[state]

    def _mask(self, rest: Parts) -> Tensor:
        """Tokens that may follow where `rest` is left, (V,) bool."""
        if rest in self.masks:
            return self.masks[rest]
        mask = torch.zeros(self.vocab_size, dtype=torch.bool)
        if not rest:
            mask[self.end_ids] = True
        elif isinstance(rest[0], str):
            mask[list(self._spelling(rest[0], rest[1:]))] = True
        elif isinstance(rest[0], OneOf):
            mask = torch.stack([mask, *(self._mask((*option, *rest[1:])) for option in rest[0].options)]).any(0)
        else:
            inside, length, leaving = self._run(rest[0].of, rest[1:])
            mask[: len(length)] = (inside | leaving) & (length <= rest[0].most)
        self.masks[rest] = mask
        return mask

    def _spelling(self, text: str, tail: Parts) -> Iterator[int]:
        """Tokens that write a beginning of a fixed text, or all of it and what may follow."""
        for size in range(1, len(text)):
            yield from self.ids.get(text[:size], ())
        for longer in takewhile(lambda one: one.startswith(text), islice(self.ordered, bisect_left(self.ordered, text), None)):
            if read(frozenset({tail}), longer[len(text) :]):
                yield from self.ids[longer]

    def _run(self, of: str, tail: Parts) -> tuple[Tensor, Tensor, Tensor]:
        """Of each token: whether all its characters are of this kind, how many at its beginning are, whether the others may follow the run."""
        if of not in self.runs:
            self.runs[of] = [re.match(f"(?:{of})*", text).end() for text in self.texts]
        lengths = self.runs[of]
        if (of, tail) not in self.runs:
            leaving = [run < len(text) and bool(read(frozenset({tail}), text[run:])) for text, run in zip(self.texts, lengths, strict=True)]
            inside = [0 < run == len(text) for text, run in zip(self.texts, lengths, strict=True)]
            self.runs[of, tail] = torch.tensor(inside), torch.tensor(lengths), torch.tensor(leaving)
        return self.runs[of, tail]
