"""Speculation measured: named settings, each text decoded plainly and with drafts in step, beside what the formula says of it.

Decode time only: the first round, which is prefill, is left out on both sides. Plain decoding is `speculate` with k = 0, so both sides
run the same code. Greedy texts must be equal; where two logits are nearly tied they may part, and that is told.

The prediction takes counts from the run and times from elsewhere: how often the first draft of a block was accepted and how often one
behind it, how many drafts each round had; and what a step, the drafting and a pass take by themselves, in the middle of a text.
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from statistics import median
from typing import Any, NamedTuple

import torch

from decodelab.arithmetic import catalog
from decodelab.arithmetic.records import html_table, text_table
from decodelab.arithmetic.speculation import RoundPrice, speedup
from decodelab.decoder import grammar, weights
from decodelab.decoder.cache import KVCache
from decodelab.decoder.generate import prefill
from decodelab.decoder.grammar import Grammar, Parts
from decodelab.decoder.model import Decoder
from decodelab.decoder.sampling import Sampling
from decodelab.decoder.speculative import Drafter, DraftModel, PromptLookup, Proposal, Round, Terms, acceptance, acceptance_by_place, judge, speculate
from decodelab.decoder.tokenizer import Tokenizer, load_tokenizer
from decodelab.measuring import machine
from decodelab.measuring.clock import time_call, timed

REPEATS = 40  # at most, after one that warms up; the budget ends them before that
FAULT = "more than rounding explains, so this is a fault; please report it"
CHAT, REASONER, DRAFT = "smollm2-135m", "reasoner", "reasoner-draft"


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Texts for one target, what drafts for it, and what is asked of the texts."""

    what: str
    prompts: tuple[str, ...]
    tokens: int  # per text, at most
    k: int
    target: str = CHAT
    draft: str | None = None  # None: prompt lookup
    grammar: Parts | None = None
    mask_draft: bool = True
    temperature: float = 0.0


QUAY = """The harbour lies at the mouth of the river. Two cranes stand on the old quay, and one of them still works. Every morning the first
ferry leaves for the island with bread, letters and a few passengers. In winter it is dark then, and the lamps along the pier are lit."""
CODE = """def total(prices, tax):
    result = 0
    for price in prices:
        result += price
    return result * (1 + tax)

def report(prices, tax):
    for price in prices:
        print(f"{price:.2f}")
    print(f"total {total(prices, tax):.2f}")
"""
PEOPLE = """Anna Berg is 34 years old. She lives in Oslo and works as an engineer. She is a member.
Luis Ortega is 51 years old. He lives in Madrid and works as a teacher. He is not a member.
Mei Tanaka is 28 years old. She lives in Osaka and works as a nurse. She is a member.

Write these people as a JSON list of records with the keys "name", "age", "city", "job" and "member"."""
PERSON = grammar.record({"name": grammar.string(most=24), "age": grammar.integer(digits=3), "city": grammar.string(most=16),
                         "job": grammar.enum("engineer", "teacher", "nurse", "driver"), "member": grammar.enum(True, False)})  # fmt: skip
TOOLS = """You can call these tools:
get_weather: {"name": "get_weather", "arguments": {"city": string, "days": integer, "unit": "celsius" or "fahrenheit"}}
send_message: {"name": "send_message", "arguments": {"to": string, "text": string, "urgent": boolean}}
set_timer: {"name": "set_timer", "arguments": {"minutes": integer, "label": string}}

Answer with one call in JSON and nothing else.

"""
CALL = grammar.tool_call({
    "get_weather": {"city": grammar.string(most=24), "days": grammar.integer(digits=2), "unit": grammar.enum("celsius", "fahrenheit")},
    "send_message": {"to": grammar.string(most=24), "text": grammar.string(most=80), "urgent": grammar.enum(True, False)},
    "set_timer": {"minutes": grammar.integer(digits=3), "label": grammar.string(most=24)},
})  # fmt: skip
ASKED = ("Send Clara the message that the ferry to the island is one hour late. It is urgent.",
         "What will the weather in Reykjavik be over the next three days, in celsius?")  # fmt: skip
COPY = {"prompts": (f"Repeat this text word for word, and write nothing else:\n\n{QUAY}",), "k": 8}
LIST = ("[", *PERSON, ", ", *PERSON, ", ", *PERSON, "]")
PEOPLE_OF = {"prompts": (PEOPLE,), "tokens": 128, "k": 6, "grammar": LIST}
THOUGHT = {"target": REASONER, "draft": DRAFT, "k": 4}

SETTINGS: Mapping[str, Setting] = {
    "copy": Setting(what="a text repeated word for word", tokens=72, **COPY),
    "code": Setting(what="a small change to a piece of code", tokens=80, k=8,
                    prompts=(f"Rename the function total to total_price in this code and write the whole code again:\n\n```python\n{CODE}```",)),
    "json": Setting(what="records in strict JSON, drafts held to the grammar", **PEOPLE_OF),
    "json_unmasked": Setting(what="the same, drafts not held to it", mask_draft=False, **PEOPLE_OF),
    "tool_call": Setting(what="a call of one of three tools", prompts=tuple(TOOLS + one for one in ASKED), tokens=64, k=6, grammar=CALL),
    "prose": Setting(what="an answer in words of its own", prompts=("Why is the sea salty? Answer in one paragraph.",), tokens=64, k=8),
    "hot": Setting(what="the first text at temperature 1.5", tokens=64, temperature=1.5, **COPY),
    "scratchpad": Setting(what="multiplication written out", prompts=("M905*412=", "M137*864=", "M137*224=", "M137*634="), tokens=64, **THOUGHT),
    "collatz": Setting(what="a Collatz trajectory", prompts=("C301=",), tokens=192, **THOUGHT),
    "search": Setting(what="a search with dead ends", prompts=("S7331998:72=", "S43837557:91=", "S6129555:51=", "S874942:02="), tokens=192, **THOUGHT),
}  # fmt: skip


def setting(name: str) -> Setting:
    """Raises: UnknownName, which names those that there are."""
    if name not in SETTINGS:
        raise catalog.UnknownName(f"no task {name!r} to speculate on; there are: {', '.join(SETTINGS)}")
    return SETTINGS[name]


class Loaded(NamedTuple):
    """A model and its tokenizer."""

    model: Decoder
    tokenizer: Tokenizer


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One setting: what its rounds counted, what was measured, and what the formula gives for that acceptance."""

    task: str
    what: str
    target: str
    draft: str
    path: str
    dtype: str
    k: int
    texts: int
    repeats: int
    prompt_tokens: int
    tokens: int  # of all texts, the first of each, which prefill gave, left out; so are the rounds below
    rounds: int
    proposed: int
    accepted: int
    acceptance: float | None  # accepted / tested
    first_acceptance: float  # of the first draft of a block
    next_acceptance: float  # of a draft behind an accepted one
    plain_s: float  # per token
    speculative_s: float
    price: RoundPrice  # of a round with as many drafts as were proposed at most
    predicted_speedup: float
    tied: tuple[float, ...] | None  # where greedy texts parted, how far apart the two logits were, over the largest; None if sampled

    @property
    def tokens_per_round(self) -> float:
        return self.tokens / self.rounds

    @property
    def measured_speedup(self) -> float:
        return self.plain_s / self.speculative_s

    @property
    def error(self) -> float:
        """predicted / measured - 1, a fraction."""
        return self.predicted_speedup / self.measured_speedup - 1

    def to_json(self) -> dict:
        return {**asdict(self), "tokens_per_round": self.tokens_per_round, "measured_speedup": self.measured_speedup,
                "break_even": self.price.break_even}  # fmt: skip


HEADER = ("task", "drafted by", "K", "acceptance", "tokens per round", "break-even", "predicted", "measured", "error")


class Results(dict[str, Measured]):
    """Measured settings by name, as a table."""

    def rows(self) -> list[tuple[str, ...]]:
        """The texts under HEADER; the break-even is that of a full round whose drafts are independent."""

        def cells(name: str, each: Measured) -> tuple[str, ...]:
            shares = ("-" if share is None else f"{share:.2f}" for share in (each.acceptance, each.tokens_per_round, each.price.break_even))
            return (name, each.draft, f"{each.k}", *shares, f"{each.predicted_speedup:.2f} x", f"{each.measured_speedup:.2f} x", f"{each.error:+.0%}")

        return [cells(name, each) for name, each in self.items()]

    def __str__(self) -> str:
        return text_table(HEADER, self.rows(), pad=str.rjust)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return html_table(HEADER, self.rows())

    def to_json(self) -> dict:
        return {"tasks": {name: each.to_json() for name, each in self.items()}}


def run(names: Iterable[str], *, k: int | None = None, dtype: str = "float32", path: str = "auto", device: str = "cpu", budget_s: float = 45.0,
        say: Callable[[str], None] = lambda _: None) -> Results:  # fmt: skip
    """Measures these settings, `budget_s` shared out evenly; `k` in place of each one's own. Loads what they need, once.

    The reasoner and its draft run eager unless `path` says otherwise: see lessons/07.
    Raises: UnknownName for a setting that is not there, LoadError where a model is not, ValueError for a `k` that no target can take.
    """
    chosen = {name: setting(name) for name in names}
    if k is not None and k < 0:
        raise ValueError(f"k is {k}; it must be 0 (plain decoding) or a number of drafts")
    loaded, share = {}, machine.budget(budget_s) / max(1, len(chosen))
    for source in dict.fromkeys(source for each in chosen.values() for source in (each.target, each.draft) if source):
        own = "eager" if path == "auto" and source != CHAT else path
        loaded[source] = Loaded(weights.load(source, device=device, dtype=dtype, path=own, say=say), load_tokenizer(source))
    results = Results()
    for name, each in chosen.items():
        say(f"{name}: {each.what}")
        results[name] = measure(name, loaded[each.target], draft=loaded.get(each.draft), k=k, budget_s=share)
    return results


def measure(name: str, target: Loaded, *, draft: Loaded | None = None, k: int | None = None, budget_s: float = 8.0) -> Measured:
    """Decodes a setting's texts with and without drafts, in step, and prices its rounds from parts timed by themselves.

    Without `draft`, prompt lookup. One repeat is run whatever the budget. Raises: ArithmeticError where the greedy texts
    differ and no near tie explains it, ValueError as `speculate` does.
    """
    chosen, model, words = setting(name), target.model, target.tokenizer
    k, vocabularies = chosen.k if k is None else k, (words.tokens, draft.tokenizer.tokens) if draft else None
    allowed = chosen.grammar and _grammar(chosen.grammar, words, model.config.vocab_size)
    trial = Trial(model, [_ids(words, prompt) for prompt in chosen.prompts], k=k, max_tokens=chosen.tokens, eos=frozenset(words.end_ids),
                  sampling=Sampling(temperature=chosen.temperature), allowed=allowed, mask_draft=chosen.mask_draft,
                  drafter=lambda: DraftModel(draft.model, vocabularies=vocabularies) if draft else PromptLookup())  # fmt: skip
    trial.run(machine.budget(budget_s))
    plain, drafted = ([each for text in side for each, _ in text[0][1:]] for side in trial.taken)
    tied, prices = None if chosen.temperature else tuple(trial.ties()), trial.prices()
    first, behind = acceptance_by_place(drafted)
    return Measured(
        task=name, what=chosen.what, target=model.config.name, draft=draft.model.config.name if draft else "prompt lookup", path=model.path,
        dtype=str(model.head.weight.dtype).removeprefix("torch."), k=k, texts=len(trial.prompts), repeats=len(trial.taken[1][0]),
        prompt_tokens=sum(map(len, trial.prompts)), tokens=sum(each.emitted for each in drafted), rounds=len(drafted),
        proposed=sum(each.proposed for each in drafted), accepted=sum(each.accepted for each in drafted), acceptance=acceptance(drafted),
        first_acceptance=first, next_acceptance=behind, plain_s=_seconds(trial.taken[0]) / sum(each.emitted for each in plain),
        speculative_s=_seconds(trial.taken[1]) / sum(each.emitted for each in drafted), price=prices[max(prices)],
        predicted_speedup=speedup([prices[each.proposed] for each in drafted], behind, first=first), tied=tied)  # fmt: skip


Run = list[tuple[Round, float]]
"""The rounds of one text with their seconds."""
Runs = list[list[Run]]
"""Of each text, its repeats."""


@lru_cache(maxsize=4)
def _grammar(parts: Parts, tokenizer: Tokenizer, vocab_size: int) -> Grammar:
    """One for all settings that ask for the same: its masks over a large vocabulary take seconds to fill."""
    return Grammar(parts, grammar.token_texts(tokenizer), end_ids=tokenizer.end_ids, vocab_size=vocab_size)


def _ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """A question to a chat model, or a text as it is."""
    return tokenizer.encode(prompt) if tokenizer.template is None else tokenizer.chat([{"role": "user", "content": prompt}])


class Trial:
    """Texts decoded plainly and with drafts in step, a part of a round by itself after each: what slows the machine down slows all three.

    Three caches and two drafters, so that none sees what the others do.
    """

    def __init__(self, model: Decoder, prompts: Sequence[list[int]], *, k: int, max_tokens: int, drafter: Callable[[], Drafter], **request: Any):
        self.model, self.prompts, self.ks = model, prompts, (0, k)
        self.caches = [model.new_cache(max_len=max(map(len, prompts)) + max_tokens) for _ in range(3)]
        self.drafter, self.other = drafter(), drafter()
        self.request = {"max_tokens": max_tokens, "draft": self.drafter, **request}  # of `speculate`
        self.taken: list[Runs] = [[[] for _ in prompts] for _ in self.ks]
        self.parts: dict[tuple[bool, int], list[float]] = {}  # by whether it is the drafting, and the number of drafts

    def run(self, budget_s: float) -> None:
        """Repeats within the budget. The first compiles, warms up and fills the grammar's masks; it goes where there is another,
        which only a budget below a second forbids."""
        began, parts = time.perf_counter(), iter(())
        for repeat in range(REPEATS + 1):
            for at in range(len(self.prompts)):
                for side, run in zip(self.taken, self._in_step(at, parts), strict=True):
                    side[at].append(run)
            parts = parts if repeat else self._parts()
            if time.perf_counter() - began > budget_s and (repeat or budget_s < 1):
                break
        while min(map(len, self.parts.values()), default=0) < 3:
            next(parts)
        self.taken = [[text[1:] or text for text in side] for side in self.taken]

    def _in_step(self, at: int, parts: Iterator[None]) -> tuple[Run, Run]:
        """One text twice: a round with drafts, as many plain ones as it wrote tokens, and a part."""
        plain, drafted = (self._timed(at, k, cache) for k, cache in zip(self.ks, self.caches, strict=False))
        runs: tuple[Run, Run] = [], []
        for each in drafted:
            runs[1].append(each)
            runs[0].extend(islice(plain, each[0].emitted))
            next(parts, None)
        runs[0].extend(plain)
        return runs

    def _timed(self, at: int, k: int, cache: KVCache) -> Iterator[tuple[Round, float]]:
        """The rounds of one text, the same each time."""
        cache.reset()
        generator = torch.Generator(self.model.device).manual_seed(at)
        return timed(speculate(self.model, self.prompts[at], k=k, cache=cache, generator=generator, **self.request), device=self.model.device)

    def _parts(self) -> Iterator[None]:
        """Times the parts of a round in the middle of the last text, one after the other and over and over: the pass with the choice, and the
        drafting, with each number of drafts that occurred."""
        prompt, text, cache = self.prompts[-1], self.texts(1)[-1], self.caches[2]
        widths = sorted({0} | {each.proposed for text in self.taken[1] for each, _ in text[0][1:]})
        at = max(1, min(len(text) // 2, len(text) - widths[-1]))
        ids, (sampling, allowed, eos) = prompt + text[:at], map(self.request.get, ("sampling", "allowed", "eos"))
        terms = Terms(prompt_tokens=len(prompt), vocab_size=self.model.config.vocab_size, sampling=sampling, eos=eos, allowed=allowed,
                      generator=torch.Generator(self.model.device))  # fmt: skip
        held = terms if self.request["mask_draft"] else replace(terms, allowed=None)

        def check(k: int) -> None:
            cache.length = len(ids) - 1
            with torch.inference_mode():
                logits = self.model(torch.tensor([[ids[-1], *text[at : at + k]]], device=self.model.device), cache=cache, every_row=True)[0]
            judge(logits, ids, Proposal(text[at : at + k]), terms)

        cache.fill_random(cache.max_len)  # times do not depend on what it holds
        self.other.start(self.model, slots=cache.max_len)
        calls = {(False, k): partial(check, k) for k in widths} | {(True, k): partial(self.other.propose, ids, k, held) for k in widths}
        for call in calls.values():
            call()  # warms up
        while True:
            for part, call in calls.items():
                self.parts.setdefault(part, []).append(time_call(call, device=self.model.device))
                yield

    def prices(self) -> dict[int, RoundPrice]:
        """By number of drafts."""
        taken = {part: median(seconds) for part, seconds in self.parts.items()}
        return {k: RoundPrice(k=k, step_s=taken[False, 0], draft_s=taken[True, k] if k else 0.0, verify_s=took)
                for (drafting, k), took in taken.items() if not drafting}  # fmt: skip

    def texts(self, side: int) -> list[list[int]]:
        """The tokens of each text, plain (0) or with drafts (1)."""
        return [[token for each, _ in text[0] for token in each.tokens] for text in self.taken[side]]

    def ties(self) -> list[float]:
        """Of greedy texts that are not equal, how near the tie is at which they part."""
        return [gap for texts in zip(self.prompts, self.texts(0), self.texts(1), strict=True) if (gap := _tie(self.model, *texts)) is not None]


def _seconds(side: Runs) -> float:
    """Decode time of all texts: the rounds behind the first, each the median of its repeats."""
    return sum(median(seconds) for text in side for seconds in zip(*([taken for _, taken in run[1:]] for run in text), strict=True))


def _tie(model: Decoder, prompt: list[int], plain: list[int], drafted: list[int]) -> float | None:
    """Where two greedy texts part, how far apart the logits of the two tokens are, over the largest; None where they are equal.

    A pass over several tokens adds in another order than one over a single token. Raises: ArithmeticError for more than rounding explains.
    """
    if plain == drafted:
        return None
    at = next((at for at, pair in enumerate(zip(plain, drafted, strict=False)) if pair[0] != pair[1]), None)
    if at is None:
        raise ArithmeticError(f"one greedy text has {len(plain)} tokens and the other {len(drafted)}, the same as far as they go: {FAULT}")
    logits = prefill(model, [prompt + plain[:at]], cache=model.new_cache(max_len=len(prompt) + at))[0]
    gap = float((logits[plain[at]] - logits[drafted[at]]).abs() / logits.abs().max())
    if gap > torch.finfo(model.dtype).eps ** 0.5:
        raise ArithmeticError(f"token {at} of a text is {drafted[at]} with drafts and {plain[at]} without; their logits are {gap:.1%} apart: {FAULT}")
    return gap
