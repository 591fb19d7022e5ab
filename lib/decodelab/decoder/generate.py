"""Generation: `generate` -> `decode_step` -> `Decoder.forward` -> `Block.forward` -> `Attention.forward`.

`generate` knows no clock: wrap its iterator (measuring/clock.py) to time it. The first token comes from prefill; each
further token costs one decode step, and a request of `new` tokens needs prompt + new - 1 cache slots.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Literal, Protocol

import torch
from torch import Tensor

from decodelab.arithmetic.catalog import slots_needed
from decodelab.decoder.cache import PAD_POSITION, ContextError, KVCache
from decodelab.decoder.model import Decoder
from decodelab.decoder.sampling import GREEDY, Sampling, sample

Phase = Literal["prefill", "decode"]
FinishReason = Literal["stop", "length"]


class Detokenizer(Protocol):
    """What `generate` needs of a tokenizer's stream: text for a token, held back inside a character."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Step:
    """One token: which pass made it, and the tokens in the cache once that pass was done (S)."""

    index: int
    phase: Phase
    token: int
    context: int
    text: str | None = None  # None without a detokenizer; may be "" while a character or a stop string is pending
    finish: FinishReason | None = None


def prefill(model: Decoder, prompts: Sequence[Sequence[int]], *, cache: KVCache, chunk: int | None = None) -> Tensor:
    """Reads the prompts into `cache` and returns the logits of each one's last token, (B, V).

    Prompts of unequal length are padded on the right; padding is never visible. `chunk` splits the pass.
    Raises: ValueError for an empty prompt or an id outside the vocabulary, ContextError where they do not fit.
    """
    prompts = checked_prompts(model, prompts, chunk)
    width, even = max(map(len, prompts)), len({len(prompt) for prompt in prompts}) == 1 and cache.positions is None
    cache.require(model.config, batch=len(prompts), new_tokens=width, dtype=model.dtype)
    ids = torch.zeros((len(prompts), width), dtype=torch.long)
    positions = torch.full_like(ids, PAD_POSITION)
    for row, (prompt, start) in enumerate(zip(prompts, cache.next_positions().tolist(), strict=True)):
        ids[row, : len(prompt)] = torch.tensor(prompt)
        positions[row, : len(prompt)] = torch.arange(start, start + len(prompt))
    model.require_positions(positions)
    return _prefill_chunks(model, ids.to(model.device), None if even else positions.to(model.device), cache, chunk or width,
                           ends=[len(prompt) - 1 for prompt in prompts])  # fmt: skip


@torch.inference_mode()
def _prefill_chunks(model: Decoder, ids: Tensor, positions: Tensor | None, cache: KVCache, chunk: int, ends: list[int]) -> Tensor:
    """The passes of a prefill; a row's logits are taken in the chunk that holds its last token."""
    logits = torch.empty((ids.shape[0], model.config.vocab_size), device=ids.device)
    for start in range(0, ids.shape[1], chunk):
        part = slice(start, min(start + chunk, ids.shape[1]))
        last = torch.tensor(ends, device=ids.device).clamp(part.start, part.stop - 1) - part.start
        out = model(ids[:, part], cache=cache, positions=None if positions is None else positions[:, part], last=last)
        for row, end in enumerate(ends):
            if part.start <= end < part.stop:
                logits[row] = out[row]
    return logits


@torch.inference_mode()
def decode_step(model: Decoder, tokens: Tensor, *, cache: KVCache) -> Tensor:
    """One step for every row: appends `tokens` (B,) to the cache and returns the next logits, (B, V).

    Reads each weight once and every cached K and V once, whatever the batch.
    """
    return model(tokens[:, None], cache=cache)


def generate(model: Decoder, prompt: Sequence[int], *, max_tokens: int, cache: KVCache | None = None, sampling: Sampling = GREEDY,
             generator: torch.Generator | None = None, eos: Collection[int] = (), stop: Sequence[str] = (),
             detokenizer: Detokenizer | None = None, chunk: int | None = None) -> Iterator[Step]:  # fmt: skip
    """Yields up to `max_tokens` steps after `prompt`; the last one names why it ended.

    `eos=()` ignores every end token. `stop` strings need a `detokenizer`. All checks are made before any forward pass.
    Raises: ContextError where prompt + max_tokens - 1 slots do not fit, ValueError for other bad arguments.
    """
    prompt, eos = checked_request(model, prompt, max_tokens=max_tokens, cache=cache, eos=eos, chunk=chunk)
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if stop and detokenizer is None:
        raise ValueError("stop strings need detokenizer=tokenizer.stream(), to turn tokens into text")
    if max_tokens == 0:
        return iter(())
    cache = cache if cache is not None else model.new_cache(max_len=slots_needed(prompt_tokens=len(prompt), max_tokens=max_tokens))
    return _steps(model, prompt, max_tokens, cache, sampling, generator, eos, StopStrings(stop), detokenizer, chunk)


def _steps(model, prompt, max_tokens, cache, sampling, generator, eos, stops, detokenizer, chunk) -> Iterator[Step]:  # noqa: ANN001
    """The loop behind `generate`: choose a token, tell the caller, pay for the next pass only if there is one."""
    logits, phase = prefill(model, [prompt], cache=cache, chunk=chunk), "prefill"
    for number in range(max_tokens):
        length = cache.length
        tokens = sample(logits, sampling, generator=generator)  # (1,)
        token = int(tokens)
        text, finish = stops.feed(detokenizer.push(token) if detokenizer and token not in eos else ""), None
        if token in eos or stops.found:
            finish = "stop"
        elif number == max_tokens - 1:
            finish = "length"
        if finish and detokenizer and not stops.found:
            text += stops.feed(detokenizer.flush()) + stops.flush()
            finish = "stop" if stops.found else finish
        yield Step(index=number, phase=phase, token=token, context=cache.length, text=text if detokenizer else None, finish=finish)
        if finish:
            return
        if cache.length != length:
            raise RuntimeError(f"the cache went from {length} to {cache.length} tokens under this generator; give each request its own cache")
        logits, phase = decode_step(model, tokens, cache=cache), "decode"


class StopStrings:
    """Watches streamed text for stop strings, holding back what may still become one.

    >>> watch = StopStrings(["DEFGHIJ"])
    >>> [watch.feed(piece) for piece in ("abcDEF", "G", "X")], watch.found
    (['abc', '', 'DEFGX'], False)
    """

    def __init__(self, stops: Sequence[str]):
        if "" in stops:
            raise ValueError("an empty stop string would stop before the first token; remove it")
        self.stops, self.held, self.found = tuple(stops), "", False

    def feed(self, piece: str) -> str:
        """Text that is now safe to show. Once a stop string is complete, what stood before it, and `found` is True."""
        text = self.held + piece
        at = min((text.find(stop) for stop in self.stops if stop in text), default=None)
        if at is not None:
            self.held, self.found = "", True
            return text[:at]
        keep = max((n for stop in self.stops for n in range(1, min(len(stop), len(text) + 1)) if text.endswith(stop[:n])), default=0)
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """The held-back text, at the end of a stream that did not stop."""
        text, self.held = self.held, ""
        return text


def checked_request(model: Decoder, prompt: Sequence[int], *, max_tokens: int, cache: KVCache | None, eos: Collection[int],
                    chunk: int | None = None) -> tuple[list[int], set[int]]:  # fmt: skip
    """The ids and end tokens of a request that can run behind what `cache` holds. Raises: ContextError where it does not fit, ValueError."""
    if not isinstance(max_tokens, int) or max_tokens < 0:
        raise ValueError(f"max_tokens is {max_tokens!r}; it must be a whole number of 0 or more")
    eos = {eos} if isinstance(eos, int) else set(eos or ())
    if not all(isinstance(token, int) for token in eos):
        raise ValueError(f"eos is {eos}; end tokens are ids, such as tokenizer.end_ids")
    (ids,) = checked_prompts(model, [prompt], chunk)
    new, held = slots_needed(prompt_tokens=len(ids), max_tokens=max_tokens), cache.length if cache is not None else 0
    limit = min(cache.max_len if cache is not None else new, model.config.max_context)
    if held + new > limit:
        raise ContextError(_no_room(held + len(ids), max_tokens, held + new, limit, model, cache))
    if cache is not None and max_tokens:
        cache.require(model.config, batch=1, new_tokens=new, dtype=model.dtype)
    return ids, eos


def checked_prompts(model: Decoder, prompts: Sequence[Sequence[int]], chunk: int | None) -> list[list[int]]:
    """The prompts as lists of ids. Raises: ValueError for what is no prompt, naming it."""
    if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
        raise ValueError(f"chunk is {chunk!r}; it must be at least 1, or None for the whole prompt")
    if not len(prompts):
        raise ValueError("there is no prompt; give at least one list of token ids")
    try:
        lists = [[index(token) for token in prompt] for prompt in prompts]
    except TypeError:
        raise ValueError("a prompt is a list of token ids, whole numbers; use tokenizer.encode(text) for text") from None
    for row, prompt in enumerate(lists):
        if not prompt:
            raise ValueError(f"prompt {row} is empty: there is no token to start from. Give at least one token id.")
        if wrong := [token for token in prompt if not 0 <= token < model.config.vocab_size]:
            raise ValueError(f"prompt {row} holds id {wrong[0]}; {model.config.name} has ids 0 to {model.config.vocab_size - 1}")
    return lists


def _no_room(prompt: int, new: int, slots: int, limit: int, model: Decoder, cache: KVCache | None) -> str:
    fits = limit - prompt + 1
    advice = f"Ask for at most {fits} new tokens" if fits > 0 else f"Shorten the prompt to at most {limit} tokens"
    if limit == model.config.max_context:
        return f"this request needs {slots:,} positions (prompt {prompt:,} + {new} new − 1) but {model.config.name} has {limit:,}. {advice}."
    return (f"this request needs {slots:,} cache slots (prompt {prompt:,} + {new} new − 1) but the cache holds {limit:,}. "
            f"{advice}, or make the cache with max_len={slots}.")  # fmt: skip
