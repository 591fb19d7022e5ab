"""What a server sends, read as it comes: events into tokens and times, a /metrics page into numbers. No network and no clock here."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from decodelab.arithmetic.catalog import read_table
from decodelab.arithmetic.latency import Finish, RequestRecord

LINE_END = re.compile(rb"\r\n|\n|\r(?=[^\n])")  # a CR that ends a piece may be half of a CRLF: it waits for the next piece
LONGEST_LINE = 1 << 24
SAMPLE = re.compile(r'([\w:]+)(?:\{(?:[^"}]|"(?:\\.|[^"\\])*")*\})?\s+(\S+)')
FINISHES: dict[str, Finish] = {"length": "length", "abort": "cancelled", "cancelled": "cancelled", "error": "error"}  # anything else: it stopped


class StreamFault(ValueError):
    """What the server sent is no answer. The message continues "the server ..."."""


class Events:
    """Server-sent events out of bytes, in whatever pieces the network brings them.

    Source: the HTML standard, section 9.2.6. A character or a line may lie in two pieces, two events in one.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._name, self._comment, self._data = "", "", []

    def feed(self, piece: bytes) -> list[tuple[str, str]]:
        """(name, data) of each event that this piece completes; an error without data gives its comment. Raises: StreamFault."""
        *lines, self._rest = LINE_END.split(self._rest + piece)
        if len(self._rest) > LONGEST_LINE:
            raise StreamFault(f"sent {len(self._rest):,} bytes without an end of line: that is no stream of events")
        return [event for line in lines if (event := self._line(line.decode("utf-8", "replace").removeprefix("\ufeff")))]

    def _line(self, line: str) -> tuple[str, str] | None:
        field, _, value = line.partition(":")
        if not line:
            event = (self._name, "\n".join(self._data) or self._comment) if self._data or self._name == "error" else None
            self._name, self._comment, self._data = "", "", []
            return event
        if field == "data":
            self._data.append(value.removeprefix(" "))
        elif field == "event":
            self._name = value.removeprefix(" ")
        elif not field:
            self._comment = value.strip()
        return None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One request as the client met it. `record.token_s` has one time for each event that brought tokens."""

    record: RequestRecord
    tokens: tuple[int, ...] | None  # that each of those events brought; None where the server does not say
    usage: dict  # the server's own count of tokens; empty where it gave none

    @property
    def gaps(self) -> list[tuple[float, int]]:
        """(seconds since the event before, tokens it brought) of every event after the first."""
        return list(zip(self.record.itl_s, self.tokens[1:] if self.tokens else [1] * len(self.record.token_s), strict=False))

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the server found in its prefix cache, where its usage says so."""
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class Stream:
    """One answer while it comes. `feed` takes pieces with their times; an event has the time of the piece that completed it.

    The role alone is no token and the usage is no token. Reasoning is: as `reasoning_content`, as `reasoning`, or in the
    text up to `</think>`. Where each event carries the usage so far, the tokens it brought are the difference; else an event
    with text counts as one arrival, of an unknown number of tokens.
    """

    def __init__(self) -> None:
        self._events = Events()
        self._arrivals: list[tuple[float, bool, int | None]] = []  # time, whether it has text, tokens
        self._head, self._tail = "", ""  # of the text, to find <think> and </think> in whatever pieces
        self._reasoned, self._closed = False, False
        self._answer_s: float | None = None
        self.usage: dict = {}
        self.finish: Finish | None = None
        self.done = False
        self.sent_s = 0.0  # when the request left
        self.last_s: float | None = None

    def feed(self, at_s: float, piece: bytes) -> None:
        """Takes the next bytes. Raises: StreamFault where they can be no answer."""
        self.last_s = at_s
        for name, data in self._events.feed(piece):
            self._event(at_s, name, data)

    def close(self) -> None:
        """The connection has ended. Raises: StreamFault where the answer has not."""
        self.done = self.done or ("", "[DONE]") in self._events.feed(b"\n\n")
        if not self.done and not (self.finish and self.usage):
            raise StreamFault("cut the stream before its end: neither a finish_reason with usage nor [DONE] came")

    def _event(self, at_s: float, name: str, data: str) -> None:
        if self.done or data.strip() == "[DONE]":
            self.done = True
            return
        try:
            message = json.loads(data)
        except ValueError:
            raise StreamFault(f"sent {'an error' if name == 'error' else 'an event that is no JSON'}: {data[:200]}") from None
        try:
            if name == "error" or message.get("error"):
                raise StreamFault(f"broke off with an error: {said(message)}")
            self._count(at_s, message)
        except (AttributeError, TypeError, IndexError, KeyError):
            raise StreamFault(f"sent an event of a form that this client does not know: {data[:200]}") from None

    def _count(self, at_s: float, message: dict) -> None:
        usage, before, tokens = message.get("usage") or {}, self.usage.get("completion_tokens", 0), None
        if isinstance(usage.get("completion_tokens"), int):
            self.usage, tokens = usage, usage["completion_tokens"] - before
        if not message.get("choices"):
            return
        choice = message["choices"][0]
        delta = choice.get("delta") or {}
        reasoning, text = delta.get("reasoning_content") or delta.get("reasoning") or "", choice.get("text") or delta.get("content") or ""
        self._reasoned = self._reasoned or bool(reasoning)
        if text or delta.get("tool_calls"):
            self._text(at_s, text or "tool call")
        self._arrivals.append((at_s, bool(reasoning or text or delta.get("tool_calls")), tokens))
        if choice.get("finish_reason"):
            self.finish = FINISHES.get(choice["finish_reason"], "stop")

    def _text(self, at_s: float, text: str) -> None:
        """Looks for the end of what was reasoned inside the text; the first visible text after it is the answer."""
        self._head = (self._head + text).lstrip()[: len("<think>")]
        seen = text if self._closed else self._tail + text
        before, closed, after = seen.partition("</think>")
        if closed and not self._closed:
            self._closed, self._answer_s, text = True, None, after
        self._tail = seen[-len("</think>") + 1 :]
        if text.strip() and self._answer_s is None:
            self._answer_s = at_s

    def answer(self, *, id: str, scheduled_s: float, prompt_tokens: int, asked_tokens: int, error: str = "") -> Answer:
        """What came, as a record; `prompt_tokens` are those asked for, used where the server gives no count."""
        texts = [(at_s, 1) for at_s, has_text, _ in self._arrivals if has_text]
        counted = [(at_s, tokens) for at_s, _, tokens in self._arrivals if tokens and tokens > 0]
        output = self.usage.get("completion_tokens", len(texts))
        known = bool(counted) and all(tokens is not None for _, has_text, tokens in self._arrivals if has_text)
        arrivals = counted if known else texts
        opened = self._head == "<think>"
        reasoned = self._reasoned or opened or self._closed
        answered = not reasoned or (self._answer_s is not None and (self._closed or not opened))
        finish = "error" if error else self.finish or "stop"
        record = RequestRecord(id=id, scheduled_s=scheduled_s, sent_s=self.sent_s, prompt_tokens=self.usage.get("prompt_tokens", prompt_tokens),
                               asked_tokens=asked_tokens, output_tokens=output, token_s=tuple(at_s for at_s, _ in arrivals), error=error,
                               first_answer_s=self._answer_s if reasoned and answered else None, answered=answered,
                               end_s=self.last_s, finish=finish)  # fmt: skip
        known = known or (bool(self.usage) and output == len(texts))
        return Answer(record=record, tokens=tuple(tokens for _, tokens in arrivals) if known else None, usage=self.usage)


def said(answer: object) -> str:
    """The message inside the JSON of an error, in whichever of the usual places it is."""
    for key in ("error", "message", "detail"):
        if isinstance(answer, dict) and answer.get(key):
            return said(answer[key])
    return answer if isinstance(answer, str) else json.dumps(answer)


# --- the server's own metrics -------------------------------------------------------------------------------------


def read_metrics(page: str) -> dict[str, list[float]]:
    """The samples of a Prometheus page that data/server_metrics.csv names, one value for each set of labels."""
    names = tuple(row["metric"] for row in read_table("server_metrics.csv"))
    samples: dict[str, list[float]] = {}
    for line in page.splitlines():
        if line.startswith(names) and (found := SAMPLE.match(line)) and "_bucket" not in found[1]:
            samples.setdefault(found[1], []).append(float(found[2]))
    return samples


def server_side(pages: Sequence[dict[str, list[float]]]) -> dict:
    """What the server's metrics say of the time between the first page and the last, by quantity, and the engine they belong to.

    A histogram gives its mean, count and sum, a counter its increase, a gauge the mean and maximum of the pages between.
    The first row of data/server_metrics.csv that the pages hold wins, so a frontend goes before its workers.
    """
    first, last, found, engines = pages[0], pages[-1], {}, {}
    for row in read_table("server_metrics.csv"):
        name, quantity = row["metric"], row["quantity"]
        if quantity in found or (f"{name}_count" if row["kind"] == "histogram" else name) not in last:
            continue
        rise = {suffix: sum(last.get(name + suffix, [])) - sum(first.get(name + suffix, [])) for suffix in ("", "_sum", "_count")}
        if row["kind"] == "histogram":
            found[quantity] = {"n": round(rise["_count"]), "sum": rise["_sum"], "mean": rise["_sum"] / rise["_count"] if rise["_count"] else None}
        elif row["kind"] == "counter":
            found[quantity] = {"sum": rise[""]}
        else:
            values = [sum(page[name]) / (len(page[name]) if row["unit"] == "fraction" else 1) for page in pages[1:-1] if name in page]
            if not values:  # a run too short for a look at it
                continue
            found[quantity] = {"n": len(values), "mean": sum(values) / len(values), "max": max(values)}
        found[quantity]["metric"] = name
        engines[row["engine"]] = None
    return {"engine": " + ".join(engines), **found} if found else {}
