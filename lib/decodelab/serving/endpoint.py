"""A load client for OpenAI-compatible servers: streams answers, and measures what their users feel beside what must move.

The key, where a server wants one, comes from DECODELAB_API_KEY and goes to that server only, never into a result. Loopback
is reached past any proxy. Times count from the schedule: what a client makes a user wait before it sends is waiting too.
"""

import argparse
import asyncio
import concurrent.futures
import ipaddress
import json
import os
import random
import re
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from decodelab.arithmetic import catalog, workload
from decodelab.arithmetic.workload import Arrival
from decodelab.serving.report import CheckResult, Load, must_move
from decodelab.serving.stream import Answer, Stream, StreamFault, read_metrics, said, server_side

if TYPE_CHECKING:
    import httpx

KEY = "DECODELAB_API_KEY"
WORDS = """
able above after again against air all along also always among animal answer any area arm around art ask away back bad base bear beat bed before
best better between big bird black blood blue boat body book both bottom box boy bread break brother build burn call came camp car case cat catch
cause cell center chair change chart check child city class clean clear clock close cloud coast cold color come common cook cool copy corn cost
count country course cover create cross cut dark day dead deal deep design direct do dog door double down draw dream drive drop dry during each ear
early earth east eat edge effect egg end energy engine enough enter even event ever every example eye face fact fall family far farm fast father
feed feel feet few field fight figure fill file find fine finger finish fire first fish five floor flow flower fly follow food foot force forest
form forward four free fresh friend front fruit full game gas gate girl give glass goal gold good grand grass gray great green ground group grow
guess guide hair half hand happy hard head heart heat heavy help high hill history hold
""".split()
OPTIONAL = ("continuous_usage_stats", "stream_options", "min_tokens", "ignore_eos")  # left out where a server refuses them by name
LENGTH = ("min_tokens", "ignore_eos")
SAMPLE_S = 1.0  # between two looks at /metrics while the load runs
HINTS = {
    401: f"it wants a key: set {KEY}",
    403: f"it refuses this key: check {KEY}",
    404: "nothing is there: give the base address, with or without /v1, and a model that it serves",
    429: "it limits the rate: lower --concurrency or --rate, or wait",
}
_random = random.SystemRandom()


class ServerFault(ValueError):
    """A server that could not be measured: one line with what it did and what to do."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


def prompt(words: int) -> str:
    """So many random words, others at every call, in every run and every process: no prefix cache has seen their first page."""
    return " ".join(_random.choices(WORDS, k=words))


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where a server is: the address before /v1, its host, and whether that is this machine."""

    root: str
    host: str
    local: bool

    @classmethod
    def parse(cls, url: str) -> "Target":
        """From an address with or without scheme, /v1 or the rest of the path. Raises: ValueError, never repeating a secret."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if "@" in parts.netloc or parts.query or parts.fragment:
            raise ValueError(f"the address carries a user, a query or a fragment; give scheme, host and path, and put a key into {KEY}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server; give one such as http://localhost:8000")
        host = parts.hostname
        local = host == "localhost" or host.endswith(".localhost")
        with suppress(ValueError):
            address = ipaddress.ip_address(host)
            local = address.is_loopback or address.is_unspecified
        _ = parts.port  # raises ValueError for one that is no port
        path = re.sub(r"(/v1(/(chat/)?completions|/models)?)?/*$", "", parts.path)
        return cls(root=f"{parts.scheme}://{parts.netloc}{path}", host=host, local=local)


async def due(schedule: Sequence[Arrival], *, now: Callable[[], float], sleep: Callable = asyncio.sleep) -> AsyncIterator[tuple[int, Arrival]]:
    """(number, arrival) when its time has come. Deadlines are absolute, so that a clock that wakes late is late once, not ever more."""
    for number, arrival in enumerate(schedule):
        while (left := arrival.at_s - now()) > 1e-6:
            await sleep(left)
        yield number, arrival


def acknowledge(answer: "httpx.Response") -> None:
    """Has what came acknowledged now, where the system can (Linux).

    A server without TCP_NODELAY holds each event back until the one before is acknowledged, and a receiver with nothing to
    send waits 40 ms with that: a delay of this client's making. Source: ai-dynamo/dynamo#14643.
    """
    stream = answer.extensions.get("network_stream")
    connection = stream.get_extra_info("socket") if stream else None
    if connection and hasattr(socket, "TCP_QUICKACK"):
        with suppress(OSError):  # the server may have closed it with its last event
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)


class Client:
    """One server: its model, the fields it takes, requests to it, and its metrics."""

    def __init__(self, target: Target, *, connect: Callable, chat: bool, timeout_s: float, clock: Callable[[], float]) -> None:
        self.target, self.connect, self.chat, self.timeout_s, self.clock = target, connect, chat, timeout_s, clock
        self.idle: list[httpx.AsyncClient] = []
        self.model = ""
        self.refused: set[str] = set()
        self.added_tokens = 0  # that the server puts to a prompt of that many words: template, start token
        self.start_s = clock()
        self._key = os.environ.get(KEY, "").strip()
        if not (self._key.isascii() and self._key.isprintable()):
            raise ValueError(f"{KEY} holds a character that no key has; set it again")
        self.headers = {"authorization": f"Bearer {self._key}"} if self._key else {}

    @asynccontextmanager
    async def _line(self) -> "AsyncIterator[httpx.AsyncClient]":
        """A connection, used before or new. Each is a pool of its own: one for all would look through it at every request."""
        http = self.idle.pop() if self.idle else self.connect()
        try:
            yield http
        finally:
            self.idle.append(http)

    async def aclose(self) -> None:
        """Ends every connection."""
        for http in self.idle:
            await http.aclose()

    def now(self) -> float:
        """Seconds since the start of the run."""
        return self.clock() - self.start_s

    def plain(self, text: str) -> str:
        """A server's text in one short line, without the key."""
        text = text.replace(self._key, f"[{KEY}]") if self._key else text
        return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:300]

    @contextmanager
    def _faults(self) -> Iterator[None]:
        """Every way in which a server or the way to it fails, as one ServerFault."""
        import httpx

        try:
            yield
        except StreamFault as fault:
            raise ServerFault(self.plain(f"the server {fault}")) from None
        except httpx.ConnectError as fault:
            raise ServerFault(
                f"no server answers at {urlsplit(self.target.root).netloc}: {self.plain(str(fault))}. Start it, or mind host and port"
            ) from None
        except httpx.TimeoutException:
            raise ServerFault(f"not a byte from {self.target.host} for {self.timeout_s:g} s; --timeout waits longer") from None
        except (httpx.ReadError, httpx.RemoteProtocolError):
            raise ServerFault(f"{self.target.host} cut the connection before its answer had ended") from None
        except (httpx.HTTPError, httpx.InvalidURL) as fault:
            raise ServerFault(self.plain(f"{type(fault).__name__}: {fault}")) from None

    async def _check(self, answer: "httpx.Response") -> None:
        if answer.status_code == 200:
            return
        await answer.aread()
        try:
            text = said(answer.json())
        except ValueError:
            text = answer.text
        hint = HINTS.get(answer.status_code, "it failed: read its log" if answer.status_code >= 500 else "")
        detail = self.plain(text) if answer.status_code not in (401, 403) else ""  # it may quote a part of the key
        parts = "; ".join(part for part in (hint, detail) if part)
        path = "/v1" + answer.request.url.path.rpartition("/v1")[2]
        raise ServerFault(f"the server answered {answer.status_code} to {path}{': ' * bool(parts)}{parts}", status=answer.status_code)

    async def choose_model(self, name: str | None) -> None:
        """The model named, else the only one that the server lists. Raises: ServerFault."""
        self.model = name or ""
        if name:
            return
        with self._faults():
            async with self._line() as http:
                answer = await http.get("/v1/models", headers=self.headers)
            await self._check(answer)
        try:
            names = [str(entry["id"]) for entry in answer.json()["data"]]
        except (ValueError, KeyError, TypeError):
            raise ServerFault(f"/v1/models is no list of models: {self.plain(answer.text)[:100]}. Is this an OpenAI-compatible server?") from None
        if len(names) != 1:
            what = f"lists {', '.join(names[:6])}: choose one with --model" if names else "lists no model: it loads still, or has no worker. Wait"
            raise ServerFault(self.plain(f"the server {what}"))
        self.model = names[0]

    def body(self, arrival: Arrival) -> bytes:
        """One request: new words, and the output's length forced as far as this server takes it."""
        words, length = prompt(max(1, arrival.prompt_tokens - self.added_tokens)), arrival.output_tokens
        fields = {"model": self.model, "min_tokens": length, "ignore_eos": True, "stream": True,
                  "max_completion_tokens" if "max_tokens" in self.refused else "max_tokens": length,
                  **({"messages": [{"role": "user", "content": words}]} if self.chat else {"prompt": words}),
                  "stream_options": {"include_usage": True, "continuous_usage_stats": True}}  # fmt: skip
        if "continuous_usage_stats" in self.refused:
            del fields["stream_options"]["continuous_usage_stats"]
        return json.dumps({name: value for name, value in fields.items() if name not in self.refused}).encode()

    async def settle(self, arrival: Arrival) -> None:
        """The first request, alone: leaves out what the server refuses by name and learns what it adds to a prompt. Raises: ServerFault."""
        while True:
            stream = Stream()
            try:
                await self._read(self.body(arrival), stream)
                break
            except ServerFault as fault:
                text, known = str(fault), len(self.refused)
                named = [name for name in OPTIONAL if name in text and name not in self.refused][:1] if fault.status in (400, 422) else []
                self.refused |= {"max_tokens"} if fault.status == 400 and self.chat and "max_completion_tokens" in text else set(named)
                if len(self.refused) == known:
                    raise
        self.added_tokens = stream.usage.get("prompt_tokens", arrival.prompt_tokens) - arrival.prompt_tokens

    async def request(self, number: int, body: bytes, asked: Arrival, *, scheduled_s: float | None = None) -> Answer:
        """One answer, read to its end; what goes wrong is in its record. In a closed loop it is due now."""
        stream, due_s, error = Stream(), self.now(), ""
        stream.sent_s = due_s
        try:
            await self._read(body, stream)
        except ServerFault as fault:
            error = str(fault)
        return stream.answer(id=str(number), scheduled_s=due_s if scheduled_s is None else scheduled_s,
                             prompt_tokens=asked.prompt_tokens, asked_tokens=asked.output_tokens, error=error)  # fmt: skip

    async def _read(self, body: bytes, stream: Stream) -> None:
        """Posts and feeds the stream until the server ends it; one that ends its answer but not the connection has a second for it."""
        path, headers = "/v1/chat/completions" if self.chat else "/v1/completions", {"content-type": "application/json", **self.headers}

        async def trace(moment: str, _: dict) -> None:
            if moment.endswith("send_request_headers.started"):  # connected, and nothing of it is on its way yet
                stream.sent_s = self.now()

        post = {"method": "POST", "url": path, "content": body, "headers": headers, "extensions": {"trace": trace}}
        with self._faults(), suppress(TimeoutError):
            async with asyncio.timeout(None) as limit, self._line() as http, http.stream(**post) as answer:
                await self._check(answer)
                if not (kind := answer.headers.get("content-type", "")).startswith("text/event-stream"):
                    raise StreamFault(f"answers {kind or 'without a content type'} in place of text/event-stream: it does not stream here")
                acknowledge(answer)
                async for piece in answer.aiter_bytes():
                    stream.feed(self.now(), piece)
                    acknowledge(answer)
                    if stream.done and limit.when() is None:
                        limit.reschedule(asyncio.get_running_loop().time() + 1)
        with self._faults():
            stream.close()

    async def page(self, url: str | None) -> dict[str, list[float]]:
        """What the server's metrics say now, asked without the key; empty where it has none, or none that we know."""
        import httpx

        with suppress(httpx.HTTPError, httpx.InvalidURL, ValueError):
            async with self._line() as http:
                answer = await http.get(url or "/metrics", timeout=5)
            return read_metrics(answer.text) if answer.status_code == 200 else {}
        return {}

    async def watch(self, url: str | None, pages: list[dict]) -> None:
        """A page every second, for what only shows while the load runs."""
        while pages[0]:
            await asyncio.sleep(SAMPLE_S)
            pages.append(await self.page(url) or pages[-1])


async def play(client: Client, load: Load, *, progress: Callable[[int], None] = lambda _: None) -> list[Answer]:
    """Sends the schedule and returns the answers in its order. Prompts are written before the first is sent."""
    gate, bodies, done = asyncio.Semaphore(load.concurrency or len(load.schedule)), [client.body(arrival) for arrival in load.schedule], 0

    async def one(number: int, arrival: Arrival) -> Answer:
        nonlocal done
        async with gate:
            answer = await client.request(number, bodies[number], arrival, scheduled_s=arrival.at_s if load.open_loop else None)
        done += 1
        progress(done)
        return answer

    client.start_s = client.clock()
    async with asyncio.TaskGroup() as group:
        schedule = load.schedule if load.open_loop else [replace(arrival, at_s=0.0) for arrival in load.schedule]
        tasks = [group.create_task(one(number, arrival)) async for number, arrival in due(schedule, now=client.now)]
    return [task.result() for task in tasks]


# --- running it ---------------------------------------------------------------------------------------------------


def connecting(target: Target, *, timeout_s: float, transport: "httpx.AsyncBaseTransport | None" = None) -> "Callable[[], httpx.AsyncClient]":
    """What opens a connection: past the proxies of the environment on loopback, through them elsewhere. Raises: ValueError."""
    try:
        import httpx
    except ImportError as missing:
        raise ValueError(f"{missing}: install the library with its extra, decodelab[lab]") from None
    settings = {"base_url": target.root, "timeout": httpx.Timeout(timeout_s, pool=None), "trust_env": not target.local, "transport": transport,
                "verify": httpx.create_ssl_context(), "limits": httpx.Limits(keepalive_expiry=1.0), "headers": {"accept-encoding": "identity"}}  # fmt: skip
    return lambda: httpx.AsyncClient(**settings)


async def measure(target: Target, load: Load, *, model: str | None = None, timeout_s: float = 60.0, metrics: str | None = None,
                  say: Callable[[str], None] = lambda _: None, clock: Callable[[], float] = time.perf_counter,
                  transport: "httpx.AsyncBaseTransport | None" = None) -> CheckResult:  # fmt: skip
    """Warms the server up, loads it and collects what both sides saw. Raises: ServerFault where nothing could be measured."""
    warm_up = load.warm_up
    connect = connecting(target, timeout_s=timeout_s, transport=transport)
    async with aclosing(Client(target, connect=connect, chat=load.chat, timeout_s=timeout_s, clock=clock)) as client:
        await client.choose_model(model)
        say(f"warm-up: {len(warm_up)} requests of {warm_up[0].prompt_tokens} tokens in, {warm_up[0].output_tokens} out")
        await client.settle(warm_up[0])
        if warm_up[1:]:
            await play(client, replace(load, schedule=tuple(warm_up[1:]), open_loop=False))
        pages = [await client.page(metrics)]
        say(f"load: {len(load.schedule)} requests to {client.model}")
        async with asyncio.TaskGroup() as group:
            watch = group.create_task(client.watch(metrics, pages))
            answers = await play(client, load, progress=_quarters(len(load.schedule), say))
            watch.cancel()
        server = await _server_side(client, metrics, pages, sum(answer.record.complete for answer in answers))
    if not any(answer.record.complete for answer in answers):
        raise ServerFault(f"none of {len(answers)} requests completed; the first: {answers[0].record.error or answers[0].record.finish}")
    notes = [] if server else ["no metrics that data/server_metrics.csv names: the server's own numbers are absent"]
    if refused := [name for name in LENGTH if name in client.refused]:
        notes.append(f"the server refuses {' and '.join(refused)}: the length may not be forced")
    return CheckResult(host="loopback" if target.local else target.host, model=client.model, load=load, answers=tuple(answers), server=server,
                       notes=tuple(notes), measured_at=datetime.now(UTC).isoformat(timespec="seconds"))  # fmt: skip


def _quarters(n: int, say: Callable[[str], None]) -> Callable[[int], None]:
    return lambda done: say(f"{done} of {n} requests have ended") if done * 4 // n > (done - 1) * 4 // n else None


async def _server_side(client: Client, metrics: str | None, pages: list[dict], completed: int) -> dict:
    """The server's numbers of the run, once its counters have seen the last request: they may lag by a moment."""
    server: dict = {}
    for _ in range(10 if pages[0] else 0):
        server = server_side([*pages, await client.page(metrics) or pages[-1]])
        if server.get("ttft", {"n": completed})["n"] >= completed:
            break
        await asyncio.sleep(0.2)
    return server


def check(url: str, *, model: str | None = None, requests: int = 8, concurrency: int | None = None, schedule: Sequence[Arrival] | None = None,
          prompt_tokens: int = 32, output_tokens: int = 64, chat: bool = False, timeout_s: float = 60.0, metrics: str | None = None, yes: bool = False,
          say: Callable[[str], None] = lambda _: None) -> CheckResult:  # fmt: skip
    """Loads the server at `url` and measures it: `requests` in a closed loop of `concurrency` (1), or `schedule` in an open loop.

    `metrics` is the address of the server's metrics where it is not /metrics. `yes` confirms a run that leaves this machine.
    Works in a script, a thread and a notebook's cell. Raises: ValueError.
    """
    target, opened = Target.parse(url), schedule is not None
    if metrics:
        Target.parse(metrics)
        metrics = metrics if "://" in metrics else f"http://{metrics}"
    if not timeout_s > 0:
        raise ValueError(f"the timeout is {timeout_s} s; it must be above 0")
    arrivals = schedule if opened else [Arrival(at_s=0.0, prompt_tokens=prompt_tokens, output_tokens=output_tokens)] * requests
    load = Load(schedule=tuple(arrivals), open_loop=opened, chat=chat, concurrency=1 if concurrency is None and not opened else concurrency)
    confirm(target, load, yes=yes, say=say)
    return in_own_loop(measure(target, load, model=model, timeout_s=timeout_s, metrics=metrics, say=say))


def confirm(target: Target, load: Load, *, yes: bool, say: Callable[[str], None]) -> None:
    """Says how many tokens the run takes and asks where it leaves this machine. Raises: ValueError without a yes."""
    where = "this machine" if target.local else target.host
    say(what := f"{load.tokens:,} tokens in and out, in {len(load.schedule) + len(load.warm_up)} requests, to {where}")
    if target.local or yes:
        return
    if not (sys.stdin and sys.stdin.isatty()):
        raise ValueError(f"{what}: they leave this machine and there is nobody to ask. Confirm with --yes (in Python yes=True)")
    say("They leave this machine and may cost money. Go on? [y/N]")
    if input().strip().lower() not in ("y", "yes"):
        raise ValueError("not confirmed; nothing was sent")


def in_own_loop(work: Coroutine[Any, Any, CheckResult]) -> CheckResult:
    """Runs `work` on an event loop of its own in a thread of its own: one that runs already is left alone. Ctrl-C cancels it and waits for its end."""
    running: list = []

    async def main() -> CheckResult:
        running.extend((asyncio.get_running_loop(), asyncio.current_task()))
        return await work

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(asyncio.run, main())
        try:
            while not future.done():
                concurrent.futures.wait((future,), timeout=0.2)  # a wait without end would not let ctrl-C through on every system
        except BaseException:
            with suppress(RuntimeError):  # the loop has just closed
                running and running[0].call_soon_threadsafe(running[1].cancel)
            raise
        return future.result()


# --- the command --------------------------------------------------------------------------------------------------


def options(command: argparse.ArgumentParser) -> None:
    """The arguments of `decodelab serve-check`."""
    command.add_argument("url", help=f"base address, with or without /v1, such as http://localhost:8000. A key is read from {KEY}")
    command.add_argument("--model", help="as the server calls it (default: the only one it lists)")
    command.add_argument("--requests", type=int, default=8, help="requests (default 8)")
    command.add_argument("--concurrency", type=int, help="in flight at most (default 1; without limit for --rate and --trace)")
    command.add_argument("--rate", type=float, help="open loop: requests per second, Poisson arrivals")
    command.add_argument("--trace", metavar="FILE", help="open loop: arrivals and lengths of a CSV or JSONL file")
    command.add_argument("--speed", type=float, default=1.0, help="of the trace: 2 halves its gaps (default 1)")
    command.add_argument("--prompt-tokens", type=int, default=32, help="tokens in (default 32): random words, about one token each")
    command.add_argument("--output-tokens", type=int, default=64, help="tokens out, forced where the server can (default 64)")
    command.add_argument("--chat", action="store_true", help="/v1/chat/completions in place of /v1/completions")
    command.add_argument("--seed", type=int, default=0, help="of the arrivals (default 0); prompts are new each time, so that no cache has them")
    command.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="longest wait for the next byte (default 60)")
    command.add_argument("--metrics", metavar="URL", help="the server's metrics, where they are not at /metrics")
    command.add_argument("--yes", action="store_true", help="send the tokens to another machine without asking")
    command.add_argument("--model-config", metavar="NAME", help="with --hardware: the shape in data/models.csv, for the bytes that must move")
    command.add_argument("--hardware", metavar="NAME", help="a name from data/hardware.csv, or `here` for this machine's card")
    command.add_argument("--devices", type=int, default=1, help="devices that share each step's bytes (default 1)")
    command.add_argument("--dtype", default="bfloat16", help="format of the served weights (default bfloat16)")
    command.add_argument("--record", metavar="FILE", help="write the run, each event's time included, as one JSON document")
    command.add_argument("--note", default="", help="a line for the record: engine, version, machine")


def command(arguments: argparse.Namespace, *, say: Callable[[str], None]) -> tuple[dict, str]:
    """`decodelab serve-check`."""
    if (arguments.model_config is None) != (arguments.hardware is None):
        raise ValueError("--model-config and --hardware go together: the bytes come from one, the bandwidth from the other")
    roof = _roof(arguments, say) if arguments.hardware else None
    result = check(arguments.url, model=arguments.model, requests=arguments.requests, concurrency=arguments.concurrency, chat=arguments.chat,
                   schedule=_schedule(arguments, say), prompt_tokens=arguments.prompt_tokens, output_tokens=arguments.output_tokens,
                   timeout_s=arguments.timeout, metrics=arguments.metrics, yes=arguments.yes, say=say)  # fmt: skip
    if roof:
        result = replace(result, moved=must_move(result, **roof))
    if arguments.record:
        document = {"note": arguments.note, **result.to_json(tokens=True)}
        Path(arguments.record).write_text(json.dumps(document) + "\n", encoding="utf-8")
    return result.to_json(), str(result)


def _schedule(arguments: argparse.Namespace, say: Callable[[str], None]) -> list[Arrival] | None:
    if arguments.rate is not None and arguments.trace:
        raise ValueError("--rate and --trace are two schedules; give one. --speed changes the pace of a trace")
    if arguments.trace:
        trace = workload.read_trace(arguments.trace, rate=arguments.speed)
        say(f"{arguments.trace}: {len(trace.arrivals)} arrivals, times in {trace.unit}. {trace.note}".strip())
        return trace.arrivals
    if arguments.rate is None:
        return None
    times = workload.poisson(arguments.requests, rate_per_s=arguments.rate, seed=arguments.seed)
    return [Arrival(at_s=at_s, prompt_tokens=arguments.prompt_tokens, output_tokens=arguments.output_tokens) for at_s in times]


def _roof(arguments: argparse.Namespace, say: Callable[[str], None]) -> dict:
    """What `must_move` needs, looked up before anything is sent."""
    config, dtype = catalog.model(arguments.model_config), catalog.dtype_name(arguments.dtype)
    if arguments.devices < 1:
        raise ValueError(f"--devices is {arguments.devices}; it must be at least 1")
    if arguments.hardware == "here":
        from decodelab.measuring import machine

        card = machine.card(dtype, say=say)
        name, bandwidth = card.machine.processor, card.read_bytes_per_s
    else:
        known = catalog.hardware(arguments.hardware)
        name, bandwidth = known.name, known.bandwidth_bytes_per_s
    name = f"{arguments.devices} x {name}" if arguments.devices > 1 else name
    return {"config": config, "dtype": dtype, "hardware": name, "read_bytes_per_s": arguments.devices * bandwidth,
            "kv_bytes_per_value": 4.0 if dtype == "float32" else 2.0}  # fmt: skip
