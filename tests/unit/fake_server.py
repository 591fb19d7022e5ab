"""Servers with a script: every event and its time are written down, so what a client should measure is known by hand.

`Script` and `virtual` play one to the client on a clock that jumps, with exact times. `FakeServer` is a real one on loopback,
for what only a real one can do: stall, cut, refuse, answer with junk.
"""

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

from decodelab.serving import endpoint
from decodelab.serving.endpoint import Target
from decodelab.serving.report import CheckResult, Load

STREAM = "text/event-stream"
DONE = b"data: [DONE]\n\n"
CUT = "cut"


def event(message: dict | bytes) -> bytes:
    """One server-sent event."""
    return message if isinstance(message, bytes) else b"data: " + json.dumps(message, ensure_ascii=False).encode() + b"\n\n"


def usage(completion: int, *, prompt: int = 32, **more) -> dict:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion, **more}


def text(piece: str, *, so_far: int | None = None, finish: str | None = None) -> dict:
    """A completion event; `so_far` puts the usage up to here into it."""
    return {"choices": [{"index": 0, "text": piece, "finish_reason": finish}]} | ({"usage": usage(so_far)} if so_far is not None else {})


def delta(*, finish: str | None = None, so_far: int | None = None, **fields: str) -> dict:
    """A chat event."""
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": finish}]} | ({"usage": usage(so_far)} if so_far is not None else {})


def last(tokens: int, **more) -> dict:
    """The event of `stream_options.include_usage`: no choice, the whole usage."""
    return {"choices": [], "usage": usage(tokens, **more)}


def answer(tokens: int, *, gap_s: float = 0.0, first_s: float = 0.0, counted: bool = True) -> list[tuple[float, dict | bytes]]:
    """A whole answer, one token an event, `gap_s` apart."""
    events = [(first_s + i * gap_s, text(f" {i}", so_far=i + 1 if counted else None)) for i in range(tokens)]
    end_s = events[-1][0] if events else first_s
    return [*events, (end_s, text("", finish="length")), (end_s, last(tokens)), (end_s, DONE)]


# --- how the same bytes may arrive --------------------------------------------------------------------------------

Pieces = list[tuple[float, bytes]]


def whole(script: Iterable[tuple[float, dict | bytes]]) -> Pieces:
    return [(at_s, event(message)) for at_s, message in script]


def byte_by_byte(script: Iterable[tuple[float, dict | bytes]]) -> Pieces:
    return [(at_s, bytes([byte])) for at_s, piece in whole(script) for byte in piece]


def together(script: Iterable[tuple[float, dict | bytes]]) -> Pieces:
    """All events of one moment in one piece."""
    pieces: dict[float, bytes] = {}
    for at_s, piece in whole(script):
        pieces[at_s] = pieces.get(at_s, b"") + piece
    return list(pieces.items())


def ahead(cut: Callable[[bytes], int]) -> Callable[[Iterable[tuple[float, dict | bytes]]], Pieces]:
    """The first `cut(piece)` bytes of each event come already with the event before it."""

    def deliver(script: Iterable[tuple[float, dict | bytes]]) -> Pieces:
        events = whole(script)
        cuts = [0, *(cut(piece) for _, piece in events[1:]), 0]
        following = [*(piece for _, piece in events[1:]), b""]
        return [(at_s, piece[cuts[i] :] + following[i][: cuts[i + 1]]) for i, (at_s, piece) in enumerate(events)]

    return deliver


def inside_a_character(piece: bytes) -> int:
    """Up to the middle of the first character of several bytes, else inside the line's end."""
    return next((i + 1 for i, byte in enumerate(piece) if byte >= 0xC0), len(piece) - 1)


def with_crlf(script: Iterable[tuple[float, dict | bytes]]) -> Pieces:
    """CRLF line ends, comments between, no space after the colon, and each CR in another piece than its LF."""
    pieces = [(at_s, b": ping\n\n" + piece.replace(b"data: ", b"event:message\nid: 7\ndata:")) for at_s, piece in whole(script)]
    return [(at_s, part) for at_s, piece in pieces for line in piece.split(b"\n")[:-1] for part in (line + b"\r", b"\n")]


DELIVERIES = {"whole": whole, "byte by byte": byte_by_byte, "together": together, "inside data:": ahead(lambda piece: 3),
              "inside a character": ahead(inside_a_character), "before its blank line": ahead(lambda piece: len(piece) - 1),
              "CRLF, comments, ids": with_crlf}  # fmt: skip


# --- on a virtual clock -------------------------------------------------------------------------------------------


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose time jumps to the next timer: nothing waits, and every time is exact."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        timers = [timer.when() for timer in self._scheduled if not timer.cancelled()]
        if not self._ready and timers:
            self.now_s = max(self.now_s, min(timers))
        super()._run_once()


@dataclass
class Script:
    """A server in memory. `events(body)` gives an answer's events, timed from the moment in which the server takes the request up."""

    events: Callable[[dict], Iterable[tuple[float, dict | bytes]]]
    deliver: Callable[[Iterable[tuple[float, dict | bytes]]], Pieces] = whole
    slots: int = 10**6  # requests that it serves at once; the others wait
    pages: list[str] = field(default_factory=list)  # of /metrics, one after the other, the last one for ever
    refuses: tuple[str, ...] = ()  # fields that it answers 400 to, naming them
    bodies: list[dict] = field(default_factory=list)
    running: int = 0
    most: int = 0
    free: asyncio.Semaphore | None = None

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "fake"}]})
        if request.url.path == "/metrics":
            return httpx.Response(200, text=self.pages.pop(0) if len(self.pages) > 1 else self.pages[0]) if self.pages else httpx.Response(404)
        body = json.loads(request.content)
        fields = [*body, *body.get("stream_options", {})]
        if refused := [name for name in self.refuses if name in fields]:
            return httpx.Response(400, json={"error": {"message": f"Unsupported parameter: '{refused[0]}'"}})
        self.bodies.append(body)
        self.free = self.free or asyncio.Semaphore(self.slots)
        return httpx.Response(200, headers={"content-type": STREAM}, content=self._answer(body))

    async def _answer(self, body: dict):
        self.running += 1
        self.most = max(self.most, self.running)
        async with self.free:
            start_s = asyncio.get_running_loop().time()
            for at_s, piece in self.deliver(self.events(body)):
                await asyncio.sleep(start_s + at_s - asyncio.get_running_loop().time())
                yield piece
        self.running -= 1


def apart(call: Callable):
    """What `call` gives in a thread of its own: a browser test may have left an event loop running in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(call).result()


def virtual(script: Script, load: Load, **settings) -> CheckResult:
    """What the client measures of this script, with exact times."""

    def play() -> CheckResult:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            target, clock = Target.parse("localhost:8000"), runner.get_loop().time
            return runner.run(endpoint.measure(target, load, clock=clock, transport=httpx.MockTransport(script), **settings))

    return apart(play)


# --- on loopback --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reply:
    """What a request is answered: a status, a content type, and steps: bytes to send, seconds to wait, or CUT."""

    steps: Iterable = ()
    status: int = 200
    kind: str = STREAM

    @classmethod
    def json(cls, message: object, status: int = 200) -> "Reply":
        return cls(steps=[json.dumps(message).encode()], status=status, kind="application/json")


def answers(tokens: int | None = None, *, gap_s: float = 0.0) -> Callable[[str, dict], Reply]:
    """A server of one model, "fake", that writes as many tokens as asked, or `tokens`."""

    def respond(path: str, body: dict) -> Reply:
        if path.endswith("/models"):
            return Reply.json({"data": [{"id": "fake"}]})
        if path.endswith("/metrics"):
            return Reply(status=404)
        n = tokens or body["max_tokens"]
        return Reply([part for _, piece in whole(answer(n)) for part in (piece, gap_s)])

    return respond


class FakeServer:
    """A real server on a free port of loopback, in threads of its own; `seen` holds (path, headers, body) of each request."""

    def __init__(self, respond: Callable[[str, dict], Reply]) -> None:
        self.seen: list[tuple[str, dict, dict]] = []
        self.hung_up = threading.Event()  # a client went away before its answer had ended
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def handle_any(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
                outer.seen.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body))
                outer.send(self, respond(self.path, body))

            do_GET = do_POST = handle_any

            def log_message(self, *_) -> None:
                """Silent."""

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads, self.http.block_on_close = True, False
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def send(self, handler: BaseHTTPRequestHandler, reply: Reply) -> None:
        try:
            handler.send_response(reply.status)
            handler.send_header("content-type", reply.kind)
            if CUT in (steps := list(reply.steps)):
                handler.send_header("content-length", "1000000")  # promised, so that the end is seen as a cut
            handler.end_headers()
            for step in steps:
                if step == CUT:
                    return
                if isinstance(step, bytes):
                    handler.wfile.write(step)
                    handler.wfile.flush()
                else:
                    time.sleep(step)
        except OSError:
            self.hung_up.set()

    def __enter__(self) -> "FakeServer":
        threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self.http.shutdown()
        self.http.server_close()
