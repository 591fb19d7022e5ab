"""Speculative decoding: a cheap draft proposes K tokens, one pass of the target reads them all, an exact rule keeps a prefix.

That pass reads the weights once, as a step of one token does. What is written has the target's own distribution whatever
the draft is: a bad draft costs time, never text. A round is propose -> one forward of K + 1 tokens -> verify -> crop.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from decodelab.arithmetic.catalog import slots_needed
from decodelab.decoder.cache import ContextError, KVCache
from decodelab.decoder.generate import FinishReason, Phase, checked_request, prefill
from decodelab.decoder.model import Decoder
from decodelab.decoder.sampling import GREEDY, Sampling, probabilities, require_finite

Allowed = Callable[[tuple[int, ...]], Tensor]
"""A grammar: of the tokens written so far, without the prompt, the ones that may follow, (V,) bool."""


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one pass of the target gave. The first is the prefill: one token, nothing proposed."""

    index: int
    phase: Phase
    tokens: tuple[int, ...]  # the accepted drafts, then one token of the target's own unless a draft ended the text
    proposed: int
    accepted: int  # and emitted: drafts behind an end token do not count
    context: int  # tokens in the target's cache after the rollback: all but the last one emitted
    finish: FinishReason | None

    @property
    def emitted(self) -> int:
        return len(self.tokens)

    @property
    def tested(self) -> int:
        """Drafts the rule decided on: the accepted ones and the first rejected, none behind it."""
        return min(self.emitted, self.proposed)


def acceptance(rounds: Iterable[Round]) -> float | None:
    """Accepted share of the drafts tested, as arithmetic/speculation.py means it; None where none was.

    accepted / proposed is lower: it counts all drafts behind a rejected one as rejected.
    """
    rounds = list(rounds)
    tested = sum(each.tested for each in rounds)
    return sum(each.accepted for each in rounds) / tested if tested else None


def acceptance_by_place(rounds: Iterable[Round]) -> tuple[float, float]:
    """Acceptance of the first draft of a block, and of those behind an accepted one; 0 where none was tested.

    Equal where drafts are independent. Copies come in runs: the first is often wrong, those behind a right one seldom.
    """
    drafted = [each for each in rounds if each.tested]
    firsts = sum(each.accepted > 0 for each in drafted)
    behind = sum(each.tested for each in drafted) - len(drafted)
    return firsts / max(1, len(drafted)), (sum(each.accepted for each in drafted) - firsts) / max(1, behind)


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What a request asks of its tokens, the target's and the draft's alike."""

    prompt_tokens: int
    vocab_size: int
    sampling: Sampling
    generator: torch.Generator | None
    eos: frozenset[int]
    allowed: Allowed | None

    def mask(self, ids: Sequence[int]) -> Tensor | None:
        """Tokens that may follow `ids`, prompt included, (V,) bool; None without a grammar."""
        mask = None if self.allowed is None else self.allowed(tuple(ids[self.prompt_tokens :]))
        if mask is not None and (not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != (self.vocab_size,)):
            found = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else repr(mask)[:40]
            raise ValueError(f"allowed() gave {found}; it must give a torch.bool tensor of shape ({self.vocab_size},)")
        return mask

    def masks(self, ids: list[int], drafts: list[int]) -> Tensor:
        """Tokens that may follow `ids` and each prefix of `drafts`, (K + 1, V) bool; any, behind a draft that ends the block."""
        masks = torch.ones((len(drafts) + 1, self.vocab_size), dtype=torch.bool)
        for at, draft in enumerate([*drafts, None] if self.allowed else ()):
            masks[at] = self.mask([*ids, *drafts[:at]])
            if draft is None or draft in self.eos or not masks[at, draft]:
                break  # a grammar is never asked what follows a text it does not allow
        return masks


class Proposal(NamedTuple):
    """Drafted tokens, and the distributions (K, V) they were drawn from; None where nothing was drawn: one-hot."""

    tokens: list[int]
    q: Tensor | None = None


class Drafter(Protocol):
    """What `speculate` needs of a draft: faults raised by `start`, at most k tokens to follow `ids` (prompt + written)."""

    def start(self, target: Decoder, *, slots: int) -> None: ...

    def propose(self, ids: list[int], k: int, terms: Terms) -> Proposal: ...


@dataclass(frozen=True, kw_only=True)
class PromptLookup:
    """Copies what followed the last earlier occurrence of the text's last n tokens, n from `longest` down to `shortest`.

    Needs no model. A copy may run into itself, so that a repeated line goes on. Source: Saxena 2023, prompt lookup decoding.
    """

    longest: int = 3
    shortest: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.shortest <= self.longest:
            raise ValueError(f"shortest is {self.shortest} and longest {self.longest}; they must be 1 <= shortest <= longest")

    def start(self, target: Decoder, *, slots: int) -> None:
        """Any target will do."""

    def propose(self, ids: list[int], k: int, terms: Terms) -> Proposal:
        if k < 1:
            return Proposal([])
        text, known = "".join(map(chr, ids)), list(ids)  # ids as characters: str.rfind searches at the speed of C
        sizes = range(self.longest, self.shortest - 1, -1)
        found = next((at + n for n in sizes if (at := text.rfind(text[-n:], 0, len(text) - 1)) >= 0), None)
        for source in () if found is None else range(found, found + k):
            if (mask := terms.mask(known)) is not None and not mask[known[source]]:
                break
            known.append(known[source])
            if known[-1] in terms.eos:
                break
        return Proposal(known[len(ids) :])


class DraftModel:
    """A smaller decoder with its own cache, which first reads what it has not seen. `sampling` None: as the request.

    `vocabularies` are the target's and the draft's tokens by id; without them the caller says that both use one tokenizer.
    An id that one of them does not know is never drafted, and ends the drafting once it is in the text.
    """

    def __init__(self, model: Decoder, *, sampling: Sampling | None = None, vocabularies: tuple[Sequence[str], Sequence[str]] | None = None):
        self.model, self.sampling, self.cache = model, sampling, None
        self.read: list[int] = []  # the tokens in the cache
        self.shared = None if vocabularies is None else shared_ids(*vocabularies)

    def start(self, target: Decoder, *, slots: int) -> None:
        """Raises: ValueError for another number of ids or another device, ContextError where the draft has too few positions."""
        ours, theirs, config = target.config.vocab_size, self.model.config.vocab_size, self.model.config
        if self.shared is None and ours != theirs:
            raise ValueError(f"the target has {ours} ids and the draft {theirs}, so they differ from id {min(ours, theirs)} on; "
                             "have the others compared: DraftModel(model, vocabularies=(target's tokens, draft's))")  # fmt: skip
        if target.device != self.model.device:
            raise ValueError(f"the target is on {target.device} and the draft on {self.model.device}; load both on one device")
        if slots > config.max_context:
            raise ContextError(f"this request needs {slots:,} positions and the draft {config.name} has {config.max_context:,}; ask for fewer tokens")
        self.known = min(ours, theirs, theirs if self.shared is None else self.shared)
        if self.cache is None or self.cache.max_len < slots:
            self.cache, self.read = self.model.new_cache(max_len=slots), []

    @torch.inference_mode()
    def propose(self, ids: list[int], k: int, terms: Terms) -> Proposal:
        if k < 1 or max(ids) >= self.known:
            return Proposal([])
        held = next(n for n in range(min(len(self.read), len(ids) - 1), -1, -1) if self.read[:n] == ids[:n])  # what cache and text share
        self.cache.crop(held)
        self.read, new = ids[:held], ids[held:]  # two new tokens where a block was accepted whole
        sampling, tokens, rows = self.sampling or terms.sampling, [], []
        while len(tokens) < k and not (tokens and tokens[-1] in terms.eos):
            mask = terms.mask([*ids, *tokens])
            if mask is not None and not mask[: self.known].any():
                break
            logits = self.model(torch.tensor([new], device=self.model.device), cache=self.cache)[:, : self.known]
            self.read += new
            q = probabilities(logits if mask is None else logits.masked_fill(~mask[: self.known].to(logits.device), -torch.inf), sampling)
            new = (q.argmax(-1) if draws_nothing(sampling) else torch.multinomial(q, 1, generator=terms.generator)[0]).tolist()
            tokens += new
            rows.append(F.pad(q, (0, terms.vocab_size - self.known)))  # probability 0 for what the draft does not know
        return Proposal(tokens, torch.cat(rows) if rows else None)


def shared_ids(target: Sequence[str], draft: Sequence[str]) -> int:
    """How many ids mean one token in both vocabularies: all of the shorter one. Raises: ValueError naming the first that differs.

    >>> shared_ids(["a", "b", "c", "<pad>"], ["a", "b", "c"])
    3
    """
    for number, (ours, theirs) in enumerate(zip(target, draft, strict=False)):
        if ours != theirs:
            raise ValueError(f"id {number} is {ours!r} to the target and {theirs!r} to the draft; use a draft with the target's tokenizer")
    return min(len(target), len(draft))


def draws_nothing(sampling: Sampling) -> bool:
    """Whether the largest logit is taken, without a random number."""
    return sampling.temperature == 0 or sampling.top_k == 1


def clipped(k: int, *, remaining: int, room: int) -> int:
    """Drafts to ask for: of the `remaining` tokens, and of the cache slots free, one is for a token that is no draft.

    >>> clipped(4, remaining=7, room=64), clipped(4, remaining=3, room=64), clipped(4, remaining=7, room=2), clipped(4, remaining=1, room=0)
    (4, 2, 1, 0)
    """
    return max(0, min(k, remaining - 1, room - 1))


def residual(p: Tensor, q: Tensor) -> Tensor:
    """What a rejected draft is replaced from, (..., V): max(0, p - q) / its sum; p where nothing is left, which rounding alone can bring."""
    left = (p - q).clamp(min=0)
    left = torch.where(left.sum(-1, keepdim=True) > 0, left, p)
    return left / left.sum(-1, keepdim=True)


def verify(p: Tensor, q: Tensor | None, drafts: Tensor, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Accepted drafts and the token behind them, (B,) each, so that tokens are distributed as p whatever q is.

        accept x with probability min(1, p(x) / q(x)); in place of a rejected one draw from the residual, behind K from p

    p (B, K + 1, V) is the target's, q (B, K, V) what `drafts` (B, K) were drawn from, None for one-hot.
    Source: Leviathan et al. 2023, algorithm 1. Taught in: lessons/07, labs/07.
    """
    q = F.one_hot(drafts, p.shape[-1]).to(p.dtype) if q is None else q
    of_p, of_q = (each[:, : drafts.shape[1]].gather(-1, drafts[..., None]).squeeze(-1) for each in (p, q))  # (B, K)
    uniform = torch.rand(drafts.shape, generator=generator, device=p.device)
    accepted = (uniform * of_q < of_p).long().cumprod(-1).sum(-1)
    row = torch.arange(len(p), device=p.device)
    left = residual(p[row, accepted], F.pad(q, (0, 0, 0, 1))[row, accepted])  # (B, V); behind the last draft q is 0, so this is p
    return accepted, torch.multinomial(left, 1, generator=generator).squeeze(-1)


def speculate(target: Decoder, prompt: Sequence[int], *, max_tokens: int, draft: Drafter, k: int, sampling: Sampling = GREEDY,
              generator: torch.Generator | None = None, eos: Collection[int] = (), allowed: Allowed | None = None, mask_draft: bool = True,
              cache: KVCache | None = None) -> Iterator[Round]:  # fmt: skip
    """Yields the rounds that write what `generate` would: the same text if greedy, else one of the same distribution.

    Each asks for `k` drafts, fewer at the end; 0 is plain decoding. `allowed` constrains the target and, with `mask_draft`,
    the draft. The draft sees only the prompt of a `cache` that holds more. All checks are made before any forward pass.
    Raises: ContextError where prompt + max_tokens - 1 slots do not fit, ValueError for other bad arguments.
    """
    (prompt, eos), config = checked_request(target, prompt, max_tokens=max_tokens, eos=eos, cache=cache), target.config
    if not isinstance(k, int) or not 0 <= k < config.max_context:
        raise ValueError(f"k is {k!r}; it must be a whole number from 0 to {config.max_context - 1}, for a block fits {config.name}'s context")
    terms = Terms(prompt_tokens=len(prompt), vocab_size=config.vocab_size, sampling=sampling, generator=generator, allowed=allowed,
                  eos=frozenset(eos))  # fmt: skip
    slots = slots_needed(prompt_tokens=len(prompt), max_tokens=max_tokens)
    require_way(terms.masks(prompt, [])[0], 0)
    draft.start(target, slots=slots)
    cache = cache if cache is not None else target.new_cache(max_len=slots)
    return _rounds(target, prompt, max_tokens, draft, k, cache, terms, terms if mask_draft else replace(terms, allowed=None))


def _rounds(target, prompt, max_tokens, draft, k, cache, terms, draft_terms) -> Iterator[Round]:  # noqa: ANN001
    """The loop behind `speculate`. Between rounds the cache holds all tokens but the last."""
    ids, proposal, index, start, finish = list(prompt), Proposal([]), 0, cache.length, None
    logits = prefill(target, [prompt], cache=cache) if max_tokens else None  # (1, V): a block without drafts
    while finish is None and len(ids) < len(prompt) + max_tokens:
        block, accepted = judge(logits, ids, proposal, terms)
        ids += block
        cache.crop(start + len(ids) - 1)
        finish = "stop" if block[-1] in terms.eos else "length" if len(ids) == len(prompt) + max_tokens else None
        yield Round(index=index, phase="decode" if index else "prefill", tokens=tuple(block), proposed=len(proposal.tokens),
                    accepted=accepted, context=cache.length, finish=finish)  # fmt: skip
        if finish is None:
            if cache.length != start + len(ids) - 1:
                raise RuntimeError(f"the cache now holds {cache.length} tokens, not {start + len(ids) - 1}; give each request its own cache")
            room = clipped(k, remaining=len(prompt) + max_tokens - len(ids), room=cache.max_len - cache.length)
            proposal, index = draft.propose(ids, room, draft_terms), index + 1
            with torch.inference_mode():  # (K + 1, V): row i is what follows token i
                logits = target(torch.tensor([[ids[-1], *proposal.tokens]], device=target.device), cache=cache, every_row=True)[0]


@torch.inference_mode()
def judge(logits: Tensor, ids: list[int], proposal: Proposal, terms: Terms) -> tuple[list[int], int]:
    """The tokens a round emits and how many of them are drafts, from the target's logits (K + 1, V)."""
    drafts, masks = torch.tensor(proposal.tokens, dtype=torch.long, device=logits.device), None  # (K,)
    if terms.allowed is not None:
        masks = terms.masks(ids, proposal.tokens)
        logits = logits.masked_fill((~masks & masks.any(-1, keepdim=True)).to(logits.device), -torch.inf)
    if draws_nothing(terms.sampling):
        require_finite(logits)
        best = logits.argmax(-1)
        count = int((best[:-1] == drafts).long().cumprod(-1).sum())
        token = best[count]
    else:
        q = None if proposal.q is None else proposal.q[None]
        accepted, token = verify(probabilities(logits, terms.sampling)[None], q, drafts[None], generator=terms.generator)
        count = int(accepted)
    if masks is not None:
        require_way(masks[count], len(ids) - terms.prompt_tokens + count)
    block = [*proposal.tokens[:count], int(token)]
    end = next((at for at, token in enumerate(block) if token in terms.eos), count)  # nothing is emitted behind an end token
    return block[: end + 1], min(count, end + 1)


def require_way(mask: Tensor, written: int) -> None:
    """Raises ValueError where a grammar lets no token follow the `written` ones."""
    if not mask.any():
        raise ValueError(f"allowed() lets no token follow the {written} written; a grammar must leave at least one, such as an end token")
