"""What thinking costs: a reasoning model on problems whose answers can be checked, each trace held to a budget of tokens.

Where a trace reaches its budget, the token that opens the answer is put in place of the next one, and the model answers with
what it has. The steps before that do not depend on the budget, so one run of the longest serves all: at every shorter one the
rows in flight are made to answer, and what that appended is cropped again. Problems and tasks are those of teaching/tasks.py.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, sqrt
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from decodelab.arithmetic import cost
from decodelab.decoder.cache import ContextError, KVCache
from decodelab.decoder.generate import decode_step, prefill
from decodelab.decoder.model import Decoder
from decodelab.decoder.sampling import GREEDY, Sampling, sample
from decodelab.decoder.tokenizer import Tokenizer
from decodelab.measuring.clock import Timer

OPENS_ANSWER, ANSWER_TOKENS = "<answer>", 12
"""The token that ends a trace, and how many tokens may follow the trace: that one, the answer, the end."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One problem thought about and answered. Its output is the trace and what follows it, hidden or shown."""

    prompt: str
    trace: str
    answer: str
    right: bool
    forced: bool  # the budget ended the trace, not the model
    in_range: bool  # whether such problems were trained
    prompt_tokens: int
    trace_tokens: int
    answer_tokens: int  # the token that opens it and the end included
    first_answer_s: float | None  # from the start to the answer's first token; None where the model ended without one
    total_s: float

    @property
    def tokens(self) -> int:
        """Output tokens; each but the first is a decode step."""
        return self.trace_tokens + self.answer_tokens

    @property
    def kv_reads(self) -> int:
        """Cached tokens that its decode steps read, at contexts prompt + 1 ... prompt + tokens - 1."""
        return cost.visible_pairs(new_tokens=self.tokens - 1, context=self.prompt_tokens + self.tokens - 1)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One decode step of a batch: rows that ended taken out of the cache, the pass, and the next tokens chosen and on the host."""

    rows: int
    seconds: float
    joules: float | None  # of the whole processor; None where no counter can be read


@dataclass(frozen=True, kw_only=True)
class Thinking:
    """Problems answered at one budget, and every decode step that took; prefill stands apart."""

    budget: int
    answers: tuple[Answer, ...]
    steps: tuple[Step, ...]
    prefill_s: float
    weight_bytes: int  # read by all steps: once each, whatever the rows
    kv_bytes: int  # read by all rows of all steps

    @property
    def right(self) -> int:
        return sum(answer.right for answer in self.answers)

    @property
    def accuracy(self) -> float:
        return self.right / len(self.answers)

    @property
    def tokens(self) -> list[int]:
        return [answer.tokens for answer in self.answers]

    @property
    def decode_s(self) -> float:
        return sum(step.seconds for step in self.steps)

    @property
    def joules(self) -> float | None:
        used = [step.joules for step in self.steps]
        return None if None in used else sum(used)

    def per_right(self, total: float) -> float:
        """What one right answer costs of a total: the wrong ones are paid for too. inf where none is right."""
        return total / self.right if self.right else inf

    def __repr__(self) -> str:
        low, high = wilson(self.right, len(self.answers))
        return (f"budget {self.budget:,}: {self.right} of {len(self.answers)} right, {self.accuracy:.1%} (95 %: {low:.1%} to {high:.1%}); tokens: "
                f"mean {mean(self.tokens):,.0f}, median {median(self.tokens):,.0f}; {len(self.steps):,} steps, {self.decode_s:.2f} s")  # fmt: skip


def wilson(right: int, n: int, *, z: float = 1.96) -> tuple[float, float]:
    """Wilson's interval of a share, 95 % at z = 1.96: never outside 0 to 1, never a point.

    Source: Wilson 1927. Taught in: lessons/10.

    >>> [round(end, 3) for end in wilson(10, 10)]
    [0.722, 1.0]
    """
    share, spread = right / n, z * z / n
    middle, half = share + spread / 2, z * sqrt(share * (1 - share) / n + spread / (4 * n))
    return max(0.0, (middle - half) / (1 + spread)), min(1.0, (middle + half) / (1 + spread))


def think(model: Decoder, tokenizer: Tokenizer, problems: Sequence[Any], *, tasks: Mapping[str, Any], budget: int, sampling: Sampling = GREEDY,
          generator: torch.Generator | None = None) -> Thinking:  # fmt: skip
    """Answers `problems`, one batch, each with up to `budget` tokens of trace; see `curve`."""
    return curve(model, tokenizer, problems, tasks=tasks, budgets=[budget], sampling=sampling, generator=generator)[0]


def curve(model: Decoder, tokenizer: Tokenizer, problems: Sequence[Any], *, tasks: Mapping[str, Any], budgets: Sequence[int],
          sampling: Sampling = GREEDY, generator: torch.Generator | None = None) -> list[Thinking]:  # fmt: skip
    """The same at each of `budgets`, from the smallest: each with the steps that it takes alone, the shared ones run once.

    A row leaves the batch with its last token; in the few steps after a budget the batch stays whole. Problems outside the
    trained range are run like any other, and each answer says so.
    Raises: ValueError for a budget below 1, an unknown task, a compiled path; ContextError where the longest trace has no room.
    Taught in: lessons/10.
    """
    prompts = [tokenizer.encode(problem.prompt) for problem in problems]
    _require(model, prompts, problems, tasks, budgets)
    batch, found = _Batch(model, tokenizer, prompts, max(budgets), sampling, generator), []
    for budget in sorted(set(budgets)):
        while batch.rows and len(batch.steps) < budget:
            batch.advance()
        rows, steps = batch.answered()
        at_s = list(accumulate((step.seconds for step in steps), initial=batch.prefill_s))  # when token n was there
        answers = tuple(_read(row, prompts[row.number], problems[row.number], tasks, tokenizer, at_s) for row in rows)
        kv = sum(answer.kv_reads for answer in answers) * batch.cache.bytes_per_token
        weights = [cost.weight_bytes_per_step(model.config, dtype_bytes=model.formats["weight_bytes_per_value"], batch=s.rows) for s in steps]
        found.append(Thinking(budget=budget, answers=answers, steps=tuple(steps), prefill_s=batch.prefill_s, weight_bytes=sum(weights), kv_bytes=kv))
    return found


def vote(answers: Sequence[Answer], *, voters: int) -> list[Answer]:
    """Of each `voters` answers in a row one that most agree with, on a tie the first. Raises: ValueError where they do not come out even."""
    if voters < 1 or len(answers) % voters:
        raise ValueError(f"{len(answers)} answers are no whole number of votes of {voters}; give each problem {voters} times in a row")
    ballots = [answers[start : start + voters] for start in range(0, len(answers), voters)]
    winners = [Counter(one.answer for one in ballot).most_common(1)[0][0] for ballot in ballots]
    return [next(one for one in ballot if one.answer == winner) for ballot, winner in zip(ballots, winners, strict=True)]


def _require(model: Decoder, prompts: Sequence[Sequence[int]], problems: Sequence[Any], tasks: Mapping[str, Any], budgets: Sequence[int]) -> None:
    if not problems or not budgets:
        raise ValueError(f"{len(problems)} problems at {len(budgets)} budgets measure nothing; give at least one of each")
    if unknown := [problem.task for problem in problems if problem.task not in tasks]:
        raise ValueError(f"no task is called {unknown[0]!r}; there are: {', '.join(tasks)}")
    if wrong := [budget for budget in budgets if not isinstance(budget, int) or budget < 1]:
        raise ValueError(f"budget is {wrong[0]!r}; it must be at least 1 token of trace, a whole number")
    if model.path != "eager":
        raise ValueError(f'the model runs the {model.path} path, compiled for one batch, and here rows leave it; load it with path="eager"')
    prompt, limit = max(map(len, prompts)), model.config.max_context
    if max(budgets) > (room := limit - prompt - ANSWER_TOKENS + 1):
        raise ContextError(f"a budget of {max(budgets):,} tokens after a prompt of {prompt} leaves no room to answer: {model.config.name} has {limit:,} "
                           f"positions and the answer takes up to {ANSWER_TOKENS}. Give at most {room:,}.")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Row:
    """The output of one problem so far."""

    number: int
    ids: tuple[int, ...] = ()
    opened: int | None = None  # place of the token that opens the answer
    forced: bool = False
    complete: bool = False  # its last token is an end

    @property
    def ended(self) -> bool:
        return self.complete or (self.opened is not None and len(self.ids) - self.opened >= ANSWER_TOKENS)


class _Batch:
    """Problems that start together. `tokens` are the next ones of `rows`, the rows in the cache: chosen, not yet taken."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, prompts: Sequence[Sequence[int]], budget: int, sampling: Sampling,
                 generator: torch.Generator | None):  # fmt: skip
        self.model, self.sampling, self.generator, self.counters = model, sampling, generator, energy_counters()
        [self.opens], self.ends = tokenizer.encode(OPENS_ANSWER, start=False), tokenizer.end_ids
        self.cache = model.new_cache(max_len=max(map(len, prompts)) + budget + ANSWER_TOKENS, batch=len(prompts))
        self.rows, self.gone, self.steps = [_Row(number=number) for number in range(len(prompts))], [], []
        with Timer(model.device) as region:
            self.tokens = sample(prefill(model, prompts, cache=self.cache), sampling, generator=generator).tolist()
        self.prefill_s = region.seconds

    def advance(self) -> None:
        """Takes the chosen tokens, lets the rows go that ended, and runs a step for the others."""
        rows = [self.taken(row, token) for row, token in zip(self.rows, self.tokens, strict=True)]
        self.gone += [row for row in rows if row.ended]
        stay = [at for at, row in enumerate(rows) if not row.ended]
        self.rows, self.tokens, step = self.step(rows, stay) if stay else ([], [], None)
        self.steps += [step] if step else []

    def answered(self) -> tuple[list[_Row], list[Step]]:
        """All rows with their answers, in order, and the steps up to there: traces in flight are ended here. Then back to where it was."""
        length, rows, tokens, steps = self.cache.length, self.rows, self.tokens, list(self.steps)
        while rows := [self.taken(row, token, force=True) for row, token in zip(rows, tokens, strict=True)]:
            if all(row.ended for row in rows):
                break
            rows, tokens, step = self.step(rows, range(len(rows)))
            steps.append(step)
        self.cache.crop(length)
        return sorted([*self.gone, *rows], key=lambda row: row.number), steps

    def taken(self, row: _Row, token: int, *, force: bool = False) -> _Row:
        """The row with one more token, unless it has ended; with `force`, a row still in its trace opens its answer instead."""
        if row.ended:
            return row
        force = force and row.opened is None and token != self.opens
        token = self.opens if force else token
        opened = len(row.ids) if row.opened is None and token == self.opens else row.opened
        return _Row(number=row.number, ids=(*row.ids, token), opened=opened, forced=row.forced or force, complete=token in self.ends)

    def step(self, rows: Sequence[_Row], stay: Sequence[int]) -> tuple[list[_Row], list[int], Step]:
        """One decode step of the rows that stay: those rows in the cache's order, their next tokens, what it took."""
        before = [int(file.read_text()) for file in self.counters]
        with Timer(self.model.device) as region:
            rows = [rows[at] for at in keep_rows(self.cache, stay)]
            last = torch.tensor([row.ids[-1] for row in rows], device=self.model.device)
            tokens = sample(decode_step(self.model, last, cache=self.cache), self.sampling, generator=self.generator).tolist()
        used = [(int(file.read_text()) - start) % most for (file, most), start in zip(self.counters.items(), before, strict=True)]
        return rows, tokens, Step(rows=len(rows), seconds=region.seconds, joules=sum(used) / 1e6 if used else None)


def _read(row: _Row, prompt: Sequence[int], problem: Any, tasks: Mapping[str, Any], tokenizer: Tokenizer, at_s: Sequence[float]) -> Answer:
    """A row as text, checked. Right is only an answer that was opened and ended."""
    end, checks = len(row.ids) - row.complete, tasks[problem.task]
    opened = end if row.opened is None else row.opened
    answer = tokenizer.decode(row.ids[opened + 1 : end], skip_special=False)
    right = row.opened is not None and row.complete and checks.is_right(problem.prompt, answer)
    return Answer(prompt=problem.prompt, trace=tokenizer.decode(row.ids[:opened], skip_special=False), answer=answer, right=right, forced=row.forced,
                  in_range=checks.in_range(problem.prompt), prompt_tokens=len(prompt), trace_tokens=opened, answer_tokens=len(row.ids) - opened,
                  first_answer_s=None if row.opened is None else at_s[opened + 1], total_s=at_s[len(row.ids) - 1])  # fmt: skip


def keep_rows(cache: KVCache, stay: Sequence[int]) -> list[int]:
    """Shrinks `cache` to the rows `stay`: the last of them move into the places of those that go. Returns which row now stands where.

    >>> from decodelab.arithmetic.catalog import model
    >>> cache = KVCache(model("gpt2"), max_len=4, batch=5)
    >>> keep_rows(cache, [1, 2, 4]), cache.batch
    ([4, 1, 2], 3)
    """
    kept, last = set(stay), [at for at in stay if at >= len(stay)]
    order = [at if at in kept else last.pop() for at in range(len(stay))]
    moved = [at for at, source in enumerate(order) if at != source]
    for tensors in (cache.keys, cache.values):
        for layer, tensor in enumerate(tensors):
            if moved:
                tensor[moved, :, : cache.length] = tensor[[order[at] for at in moved], :, : cache.length]
            tensors[layer] = tensor[: len(order)]
    if cache.positions is not None:
        cache.positions = cache.positions[order]
    return order


def energy_counters(folder: Path = Path("/sys/class/powercap")) -> dict[Path, int]:
    """Linux's RAPL counters of energy, one per processor package, in microjoules, with the value at which each starts again.

    Empty where they cannot be read: in most virtual machines, and without the rights. AMD's processors bear the same name.
    """
    try:
        found = {file: int((file.parent / "max_energy_range_uj").read_text()) for file in sorted(folder.glob("intel-rapl:?/energy_uj"))}
        return found if all(file.read_text() for file in found) else {}
    except OSError:
        return {}
