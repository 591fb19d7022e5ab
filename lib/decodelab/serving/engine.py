"""The engine: the scheduler's plans, run on a real decoder over a paged cache.

One `step` is one plan: a pass for each chunk of a prompt, then one decode pass for all sequences that decode. Engines that
fuse both into one pass read the weights once for them; this one reads them for each pass, and says so.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from decodelab.arithmetic.latency import Finish, RequestRecord, ServingSummary, Slo, summarise_requests
from decodelab.arithmetic.workload import Arrival
from decodelab.decoder.generate import checked_prompts, decode_step, prefill
from decodelab.decoder.model import Decoder
from decodelab.decoder.sampling import GREEDY, LogitsError, Sampling, sample
from decodelab.serving.scheduler import Limits, Plan, Request, Scheduler


@dataclass(frozen=True, kw_only=True)
class Event:
    """What one step told one request: its new token, or its end."""

    request: Request
    token: int | None
    finish: Finish | None


@dataclass(kw_only=True)
class Job:
    """What the engine keeps of a request beside the scheduler's counts. Times are seconds on the engine's clock."""

    ids: list[int]  # prompt and output
    sampling: Sampling
    generator: torch.Generator | None
    eos: frozenset[int]
    scheduled_s: float
    sent_s: float
    token_s: list[float] = field(default_factory=list)
    end_s: float | None = None
    error: str = ""


class Engine:
    """Continuous batching of one decoder: `submit` requests, `step` until `busy` is False; or `run` a workload."""

    def __init__(self, model: Decoder, limits: Limits, *, clock: Callable[[], float] = time.perf_counter):
        self.model, self.clock = model, clock
        self.pool = model.new_pool(pages=limits.pages, page_tokens=limits.page_tokens)
        self.scheduler = Scheduler(replace(limits, max_context=min(limits.max_context or model.config.max_context, model.config.max_context)))
        self.jobs: dict[Request, Job] = {}
        self.passes: list[tuple[int, int]] = []  # of each decode pass: sequences that wrote a token, pages held

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def submit(self, prompt: Sequence[int], *, max_tokens: int, sampling: Sampling = GREEDY, seed: int | None = None, eos: Collection[int] = (),
               id: str | None = None, scheduled_s: float | None = None) -> Request:  # fmt: skip
        """Queues a request; its draws follow its own `seed`, whatever runs beside it.

        Raises: ValueError for what is no prompt, RequestError where it can never run: then nothing was queued.
        """
        (ids,) = checked_prompts(self.model, [prompt], None)
        if not isinstance(max_tokens, int):
            raise ValueError(f"max_tokens is {max_tokens!r}; it must be a whole number of 0 or more")
        request = Request(id=id or str(len(self.jobs)), prompt_tokens=len(ids), max_tokens=max_tokens)
        self.scheduler.submit(request)
        generator = None if seed is None else torch.Generator(self.model.device).manual_seed(seed)
        now = self.clock()
        self.jobs[request] = Job(ids=ids, sampling=sampling, generator=generator, eos=frozenset(eos), sent_s=now,
                                 scheduled_s=now if scheduled_s is None else scheduled_s, end_s=now if request.finish else None)  # fmt: skip
        return request

    def cancel(self, request: Request) -> bool:
        """Ends a request wherever it is; False where it has ended already. Its pages are free at once."""
        return self._close(request, "cancelled")

    def _close(self, request: Request, finish: Finish, error: str = "") -> bool:
        ended = self.scheduler.cancel(request, finish=finish)
        if ended:
            self.jobs[request].end_s, self.jobs[request].error = self.clock(), error
        return ended

    def step(self) -> list[Event]:
        """Runs one plan and returns what it gave. A request whose logits hold no token ends alone, with finish "error".

        Any other fault of a pass ends the plan's requests with "error", frees their pages and is raised.
        """
        plan = self.scheduler.plan()
        tokens: dict[Request, int] = {}
        try:
            for chunk in plan.prefill:
                ids = self.jobs[chunk.request].ids[chunk.start : chunk.start + chunk.tokens]
                logits = prefill(self.model, [ids], cache=self.pool.rows([chunk.request.pages], [chunk.start]))
                if chunk.last:
                    self._choose([chunk.request], logits, tokens)
            if plan.decode:
                self._choose(plan.decode, self._decode(plan), tokens)
        except BaseException as fault:
            for request in {*(chunk.request for chunk in plan.prefill), *plan.decode}:
                self._close(request, "error", f"{type(fault).__name__}: {fault}")
            raise
        return self._tell(plan, tokens)

    @torch.inference_mode()
    def _decode(self, plan: Plan) -> Tensor:
        """Logits (B, V) of one step of all sequences, and of a static batch's ended rows: those write their last slot again."""
        rows = [*((request, request.cached) for request in plan.decode), *((request, request.cached - 1) for request in plan.padding)]
        self.passes.append((len(plan.decode), self.scheduler.held_pages))
        tokens = torch.tensor([self.jobs[request].ids[at] for request, at in rows], device=self.model.device)
        cache = self.pool.rows([request.pages for request, _ in rows], [at for _, at in rows])
        return decode_step(self.model, tokens, cache=cache)[: len(plan.decode)]

    def _choose(self, requests: Sequence[Request], logits: Tensor, tokens: dict[Request, int]) -> None:
        """One token for each request, by its own sampling and generator: no row depends on its neighbours."""
        greedy = all(self.jobs[request].sampling == GREEDY for request in requests)
        try:
            if greedy:
                tokens.update(zip(requests, sample(logits).tolist(), strict=True))
                return
        except LogitsError:  # one row at a time: the others go on
            pass
        for request, row in zip(requests, logits, strict=True):
            job = self.jobs[request]
            try:
                tokens[request] = int(sample(row[None], job.sampling, generator=job.generator))
            except LogitsError as fault:
                self._close(request, "error", str(fault))

    def _tell(self, plan: Plan, tokens: dict[Request, int]) -> list[Event]:
        """Counts the pass, keeps tokens and times, and says who ended."""
        now = self.clock()
        alive = {request: token for request, token in tokens.items() if request.finish is None}
        stopped = [request for request, token in alive.items() if token in self.jobs[request].eos]
        for request, token in alive.items():
            self.jobs[request].ids.append(token)
            self.jobs[request].token_s.append(now)
        for request in self.scheduler.done(plan, stopped=stopped):
            self.jobs[request].end_s = now
        failed = [request for request in (*(chunk.request for chunk in plan.prefill), *plan.decode) if request.finish == "error"]
        return [Event(request=request, token=token, finish=request.finish) for request, token in alive.items()] + [
            Event(request=request, token=None, finish="error") for request in failed
        ]

    def output(self, request: Request) -> list[int]:
        """The tokens it has written."""
        return self.jobs[request].ids[request.prompt_tokens :]

    def record(self, request: Request, *, start_s: float = 0.0) -> RequestRecord:
        """What its user met, in seconds from `start_s`."""
        job = self.jobs[request]
        return RequestRecord(id=request.id, scheduled_s=job.scheduled_s - start_s, sent_s=job.sent_s - start_s, prompt_tokens=request.prompt_tokens,
                             asked_tokens=request.max_tokens, output_tokens=request.generated, token_s=tuple(at - start_s for at in job.token_s),
                             end_s=None if job.end_s is None else job.end_s - start_s, finish=request.finish or "cancelled",
                             preemptions=request.preemptions, error=job.error)  # fmt: skip

    def run(self, arrivals: Sequence[Arrival], *, seed: int = 0, slo: Slo | None = None, budget_s: float | None = None) -> "ServingRun":
        """Serves a workload of random prompts, each request sent when it is due; ends after `budget_s`, cancelling what is left.

        What has to compile does so before the clock starts.
        """
        self.warm_up()
        draw, first, start = torch.Generator().manual_seed(seed), len(self.passes), self.clock()
        due = sorted(arrivals, key=lambda arrival: arrival.at_s)
        mine: list[Request] = []
        while (len(mine) < len(due) or self.busy) and (budget_s is None or self.clock() - start < budget_s):
            while len(mine) < len(due) and (due[len(mine)].at_s <= self.clock() - start):
                arrival = due[len(mine)]
                prompt = torch.randint(self.model.config.vocab_size, (arrival.prompt_tokens,), generator=draw).tolist()
                mine.append(self.submit(prompt, max_tokens=arrival.output_tokens, id=str(len(mine)), scheduled_s=start + arrival.at_s))
            if self.busy:
                self.step()
            else:
                time.sleep(max(0.0, min(0.01, due[len(mine)].at_s - (self.clock() - start))))
        for request in mine:
            self.cancel(request)
        passes = self.passes[first:]
        occupancy = sum(rows for rows, _ in passes) / len(passes) if passes else None
        held = sum(pages for _, pages in passes) / len(passes) / self.pool.pages if passes else None
        records = tuple(self.record(request, start_s=start) for request in mine)
        return ServingRun(records=records, summary=summarise_requests(records, slo=slo, occupancy=occupancy, kv_used_fraction=held),
                          occupancy=tuple(rows for rows, _ in passes), held_pages=tuple(pages for _, pages in passes),
                          recomputed_tokens=sum(max(0, request.prefilled - request.prompt_tokens) for request in mine))  # fmt: skip

    def warm_up(self) -> None:
        """Compiles what one row, several rows and a prompt need, on free pages."""
        pages = self.scheduler.free[-2:]
        for tables in [[page] for page in pages[:1]], [[page] for page in pages]:
            prefill(self.model, [[0, 1]], cache=self.pool.rows(tables[:1], [0]))
            if self.scheduler.limits.max_sequences >= len(tables):
                decode_step(
                    self.model, torch.zeros(len(tables), dtype=torch.long, device=self.model.device), cache=self.pool.rows(tables, [0] * len(tables))
                )


@dataclass(frozen=True, kw_only=True)
class ServingRun:
    """A workload that was served: each request's record, their summary, and each decode pass's sequences and pages."""

    records: tuple[RequestRecord, ...]
    summary: ServingSummary
    occupancy: tuple[int, ...]
    held_pages: tuple[int, ...]
    recomputed_tokens: int  # in prefill again after a preemption
