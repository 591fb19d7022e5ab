"""Who runs in the next pass: admission, pages, chunks of prompts, preemption. Pure Python: it knows no model and no clock.

One request's life: `submit` puts it in the queue, `plan` admits it and names what the next pass computes, `done` counts the
tokens that pass made and ends what is complete. The engine runs the plan on a decoder; the simulator prices it.
"""

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal

from decodelab.arithmetic.catalog import slots_needed
from decodelab.arithmetic.latency import Finish

Policy = Literal["mixed", "decode_first", "prefill_first"]
Reserve = Literal["prompt", "full"]


class RequestError(ValueError):
    """A request that can never run here. Nothing was queued; the others go on."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the scheduler may use. Raises: ValueError for a value with which nothing could run.

    `policy`: "mixed" decodes every sequence in each pass and fills the rest of the token budget with chunks of prompts;
    "decode_first" and "prefill_first" run one phase per pass, at most `longest_run` passes of theirs in a row while the
    other waits. `reserve`: pages for the prompt at admission, more as it grows, or for all tokens it may write.
    `static`: a batch is admitted whole, and its ended rows are computed on, as padding, until its last one ends.
    """

    pages: int
    page_tokens: int = 16
    max_sequences: int = 256
    token_budget: int = 2048  # tokens of one pass: prompt tokens, and one for each sequence that decodes
    chunk: int | None = None  # prompt tokens of one request in one pass, at most; None: the budget
    max_context: int | None = None  # positions of the model
    policy: Policy = "mixed"
    longest_run: int = 4
    reserve: Reserve = "prompt"
    static: bool = False

    def __post_init__(self) -> None:
        for name in ("pages", "page_tokens", "max_sequences", "token_budget", "chunk", "max_context", "longest_run"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1")
        if self.token_budget < self.max_sequences:
            raise ValueError(
                f"a token budget of {self.token_budget} cannot decode {self.max_sequences} sequences at once; raise it or lower max_sequences"
            )
        for name, kinds in (("policy", Policy), ("reserve", Reserve)):
            if getattr(self, name) not in kinds.__args__:
                raise ValueError(f"{name} is {getattr(self, name)!r}; use one of {', '.join(kinds.__args__)}")


def pages_for(tokens: int, *, page_tokens: int) -> int:
    """Pages that hold `tokens` cache slots; the last one may be part empty. Taught in: labs/08.

    >>> [pages_for(tokens, page_tokens=4) for tokens in (0, 1, 4, 5)]
    [0, 1, 1, 2]
    """
    return -(-tokens // page_tokens)


def admits(*, free_pages: int, tokens: int, max_tokens_left: int, page_tokens: int, reserve: Reserve = "prompt") -> bool:
    """Whether a request may start now: its `tokens` must find pages, all of them, not only those of its first chunk.

    With reserve="full" the `max_tokens_left` it may still write must find them too. Taught in: labs/08.

    >>> admits(free_pages=1, tokens=12, max_tokens_left=4, page_tokens=4)  # its first chunk of 4 would fit
    False
    """
    slots = tokens if reserve == "prompt" else slots_needed(prompt_tokens=tokens, max_tokens=max_tokens_left)
    return pages_for(slots, page_tokens=page_tokens) <= free_pages


@dataclass(kw_only=True, eq=False)
class Request:
    """One request as the scheduler sees it: counts of tokens, and the pages it holds."""

    id: str
    prompt_tokens: int
    max_tokens: int
    generated: int = 0
    arrived_tokens: int = 0  # tokens whose K and V come from another machine at admission, in place of a prefill
    cached: int = 0  # tokens whose K and V are in its pages
    pages: list[int] = field(default_factory=list)
    finish: Finish | None = None
    preemptions: int = 0
    prefilled: int = 0  # tokens computed in prefill, those computed again after a preemption included

    @property
    def tokens(self) -> int:
        """Prompt and output so far. The newest one is not in the cache until a pass has read it."""
        return self.prompt_tokens + self.generated

    @property
    def decodes(self) -> bool:
        """Whether one more pass over one token gives its next token."""
        return self.generated > 0 and self.tokens - self.cached == 1

    @property
    def left(self) -> int:
        """Tokens it may still write."""
        return self.max_tokens - self.generated


@dataclass(frozen=True)
class Chunk:
    """A part of one request's tokens to prefill."""

    request: Request
    start: int
    tokens: int

    @property
    def last(self) -> bool:
        """Whether this pass gives the request its next token."""
        return self.start + self.tokens == self.request.tokens


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One pass: chunks to prefill, sequences to decode, and rows of a static batch that have ended and are computed as padding."""

    prefill: tuple[Chunk, ...] = ()
    decode: tuple[Request, ...] = ()
    padding: tuple[Request, ...] = ()
    preempted: tuple[Request, ...] = ()

    @property
    def prefill_tokens(self) -> int:
        return sum(chunk.tokens for chunk in self.prefill)

    def __bool__(self) -> bool:
        return bool(self.prefill or self.decode)


class Scheduler:
    """The queue, the running sequences and the free pages."""

    def __init__(self, limits: Limits):
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self.padding: list[Request] = []  # ended rows of a static batch
        self.free = list(range(limits.pages))[::-1]
        self.run = 0  # passes of the preferred phase in a row while the other one waited
        self.preemptions = 0

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def held_pages(self) -> int:
        return self.limits.pages - len(self.free)

    def submit(self, request: Request) -> None:
        """Queues a request; one of no tokens ends at once. Raises: RequestError where it can never run."""
        limits, slots = self.limits, slots_needed(prompt_tokens=request.prompt_tokens, max_tokens=request.max_tokens)
        if request.prompt_tokens < 1:
            raise RequestError(f"request {request.id} has an empty prompt: there is no token to start from. Give at least one token.")
        if request.max_tokens < 0:
            raise RequestError(f"request {request.id} asks for {request.max_tokens} tokens; ask for 0 or more")
        if limits.max_context is not None and slots > limits.max_context:
            raise RequestError(self._too_long(request, slots, limits.max_context, "the model has {:,} positions"))
        if pages_for(slots, page_tokens=limits.page_tokens) > limits.pages:
            raise RequestError(self._too_long(request, slots, limits.pages * limits.page_tokens, "the pool holds {:,}"))
        if request.max_tokens == 0:
            request.finish = "length"
            return
        self.waiting.append(request)

    def _too_long(self, request: Request, slots: int, limit: int, holder: str) -> str:
        fits = limit - request.prompt_tokens + 1
        advice = f"Ask for at most {fits:,} tokens" if fits > 0 else f"Shorten the prompt to at most {limit:,} tokens"
        needs = f"request {request.id} needs {slots:,} cache slots (prompt {request.prompt_tokens:,} + {request.max_tokens:,} new - 1)"
        return f"{needs} but {holder.format(limit)}. {advice}."

    def plan(self) -> Plan:
        """What the next pass computes. Pages are given out here; call `done` with the plan once the pass has run.

        Raises: RuntimeError where requests wait, none runs and none could be admitted: a fault that would else hang for ever.
        """
        if not self.busy:
            return Plan()
        prefill_turn, decode_turn = self._turn()
        preempted: list[Request] = []
        decode = self._grow(preempted) if decode_turn else []
        joining = decode if decode_turn else []
        chunks = self._chunks(self.limits.token_budget - len(decode), admit=not preempted, joining=joining) if prefill_turn or not decode else []
        if not decode and not chunks:  # all that was admitted came with its K and V
            decode = self._grow(preempted)
        if not decode and not chunks:
            raise RuntimeError(
                f"{len(self.waiting)} requests wait, {len(self.running)} run and nothing can be computed with {len(self.free)} free pages"
            )
        return Plan(prefill=tuple(chunks), decode=tuple(decode), padding=tuple(self.padding) if decode else (), preempted=tuple(preempted))

    def _turn(self) -> tuple[bool, bool]:
        """(whether this pass prefills, whether it decodes)."""
        prompts = self._admissible() or any(not request.decodes for request in self.running)
        decodes = any(request.decodes for request in self.running)
        if not (prompts and decodes):
            self.run = 0
            return prompts, decodes
        if self.limits.static:
            return True, False  # a static batch starts to decode together
        if self.limits.policy == "mixed":
            return True, True
        self.run = 0 if self.run == self.limits.longest_run else self.run + 1
        prefill = (self.run > 0) == (self.limits.policy == "prefill_first")
        return prefill, not prefill

    def _admissible(self) -> bool:
        """Whether the head of the queue could start now. The queue is served in order: nobody overtakes a large request."""
        limits = self.limits
        if not self.waiting or len(self.running) >= limits.max_sequences or (limits.static and self._batch_started()):
            return False
        head, reserve = self.waiting[0], "full" if limits.static else limits.reserve
        return admits(free_pages=len(self.free), tokens=head.tokens, max_tokens_left=head.left, page_tokens=limits.page_tokens, reserve=reserve)

    def _batch_started(self) -> bool:
        return bool(self.padding) or any(request.cached or request.generated for request in self.running)

    def _grow(self, preempted: list[Request]) -> list[Request]:
        """The sequences that decode, each with a page for its next token; where pages run out the newest one gives up its own."""
        decode = []
        for request in list(self.running):
            if not request.decodes or request in preempted:
                continue
            while request.finish is None and pages_for(request.tokens, page_tokens=self.limits.page_tokens) > len(request.pages) and not self.free:
                preempted.append(self._preempt())
                if preempted[-1] is request:
                    break
            if request not in preempted:
                self._give(request, request.tokens)
                decode.append(request)
        return [request for request in decode if request not in preempted]

    def _preempt(self) -> Request:
        """The newest sequence loses its pages and goes back to the head of the queue; its tokens will be computed again."""
        request = self.running.pop()
        self._release(request)
        request.cached, request.arrived_tokens = 0, 0
        request.preemptions += 1
        self.preemptions += 1
        self.waiting.appendleft(request)
        return request

    def _chunks(self, budget: int, *, admit: bool, joining: list[Request]) -> list[Chunk]:
        """Prompt tokens for this pass: first of what has begun, then of what can be admitted. What came with its K and V goes to `joining`."""
        chunks: list[Chunk] = []
        for request in self.running:
            if not request.decodes:
                budget -= self._chunk(request, budget, chunks)
        while admit and (budget > 0 or self.limits.static) and self._admissible():
            request = self._admit()
            if request.decodes:
                joining.append(request)
            budget -= 1 if request.decodes else self._chunk(request, budget, chunks)
        return chunks

    def _chunk(self, request: Request, budget: int, chunks: list[Chunk]) -> int:
        tokens = min(request.tokens - request.cached, budget, self.limits.chunk or budget)
        if tokens > 0:
            chunks.append(Chunk(request, request.cached, tokens))
        return max(tokens, 0)

    def _admit(self) -> Request:
        request = self.waiting.popleft()
        full = self.limits.static or self.limits.reserve == "full"
        self._give(request, slots_needed(prompt_tokens=request.tokens, max_tokens=request.left) if full else request.tokens)
        request.cached = request.arrived_tokens
        self.running.append(request)
        return request

    def _give(self, request: Request, slots: int) -> None:
        """Pages for `slots` tokens."""
        for _ in range(pages_for(slots, page_tokens=self.limits.page_tokens) - len(request.pages)):
            request.pages.append(self.free.pop())

    def _release(self, request: Request) -> None:
        self.free.extend(reversed(request.pages))
        request.pages = []

    def done(self, plan: Plan, *, stopped: Collection[Request] = ()) -> list[Request]:
        """Counts what the pass computed and returns the requests that ended with it; `stopped` are those whose token was an end token."""
        for chunk in plan.prefill:
            request = chunk.request
            if request.finish is None:
                request.cached += chunk.tokens
                request.prefilled += chunk.tokens
                request.generated += request.cached == request.tokens
        for request in plan.decode:
            if request.finish is None:
                request.cached += 1
                request.generated += 1
        ended = [request for request in self.running if request.generated >= request.max_tokens or request in stopped]
        for request in ended:
            self._end(request, "stop" if request in stopped else "length")
        return ended

    def cancel(self, request: Request, *, finish: Finish = "cancelled") -> bool:
        """Ends a request that waits or runs, also between `plan` and `done`; False where it has ended already."""
        if request.finish is not None:
            return False
        if request in self.waiting:
            self.waiting.remove(request)
        self._end(request, finish)
        return True

    def _end(self, request: Request, finish: Finish) -> None:
        request.finish = finish
        if request in self.running:
            self.running.remove(request)
            if self.limits.static:
                self.padding.append(request)
        if not self.limits.static or not self.running:
            for ended in (request, *self.padding):
                self._release(ended)
            self.padding = []

    # Long stretches in which only sequences decode, for the simulator.

    def quiet_steps(self) -> int:
        """Decode passes in a row, the next one included, before a sequence ends, a prompt can start or pages run out; 0 where `plan` must decide."""
        if not self.running or self._admissible() or not all(request.decodes for request in self.running):
            return 0
        steps = min(request.left for request in self.running)
        while steps > 0 and self._pages_after(steps) > len(self.free):
            steps //= 2
        return steps

    def _pages_after(self, steps: int) -> int:
        """Pages that all sequences need beyond their own to decode `steps` more tokens."""
        size = self.limits.page_tokens
        return sum(max(0, -(-(request.cached + steps) // size) - len(request.pages)) for request in self.running)

    def skip(self, steps: int) -> list[Request]:
        """Runs `steps` quiet decode passes at once; returns the requests that ended with the last."""
        for request in self.running:
            self._give(request, request.cached + steps)
            request.cached += steps
            request.generated += steps
        self.run = 0
        ended = [request for request in self.running if request.generated >= request.max_tokens]
        for request in ended:
            self._end(request, "length")
        return ended
