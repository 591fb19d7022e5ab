"""The load client: what it measures of scripts whose values are known by hand, and what it says of servers that fail."""

import _thread
import asyncio
import io
import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from decodelab import cli
from decodelab.arithmetic import catalog, latency
from decodelab.arithmetic.workload import Arrival
from decodelab.serving import endpoint, report, stream
from decodelab.serving.report import Load
from fake_server import (
    CUT,
    DELIVERIES,
    DONE,
    STREAM,
    FakeServer,
    Reply,
    Script,
    answer,
    answers,
    apart,
    delta,
    event,
    last,
    text,
    usage,
    virtual,
    whole,
)  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]
MANY = pytest.mark.parametrize("deliver", DELIVERIES.values(), ids=DELIVERIES)


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv(endpoint.KEY, raising=False)


def load(requests=1, *, prompt=32, output=64, **settings):
    return Load(schedule=(Arrival(at_s=0.0, prompt_tokens=prompt, output_tokens=output),) * requests, **settings)


def measured(events, *, deliver=whole, **settings):
    """The result of one request that is answered with these events."""
    return virtual(Script(lambda body: events, deliver=deliver), load(output=len(events), **settings))


# --- one stream, by hand ------------------------------------------------------------------------------------------

REASONING = {
    "reasoning_content": [(0.05, delta(reasoning_content="Hm – ")), (0.55, delta(content="Tōkyō 東京"))],
    "reasoning": [(0.05, delta(reasoning="Hm – ")), (0.55, delta(content="Tōkyō 東京"))],
    "tags": [(0.05, delta(content="<think>Hm – ")), (0.55, delta(content="</think>\n\nTōkyō 東京"))],
    "tags in pieces": [
        (0.05, delta(content="\n<thi")),
        (0.05, delta(content="nk>a</th")),
        (0.55, delta(content="ink>")),
        (0.55, delta(content="東京")),
    ],
    "no opening tag": [(0.05, delta(content="Hm – a < b")), (0.55, delta(content="</think>Tōkyō 東京"))],
}


@MANY
@pytest.mark.parametrize("events", REASONING.values(), ids=REASONING)
def test_the_role_is_no_token_and_reasoning_is(events, deliver):
    """B047: role at 5 ms, reasoning at 50, answer at 550, then usage. TTFT 50 ms, first answer 550; 5 never; the usage is no interval."""
    script = [(0.005, delta(role="assistant", content="")), *events, (0.9, delta(finish="stop")), (0.9, last(len(events))), (0.95, DONE)]
    result = virtual(Script(lambda body: script, deliver=deliver), load(output=len(events), chat=True))
    (record,) = result.records
    assert (record.ttft_s, record.answer_s, record.total_s) == pytest.approx((0.05, 0.55, 0.95))
    assert sum(record.itl_s) == pytest.approx(0.5) and result.summary.itl.n == len(events) - 1 and result.summary.answer.n == 1
    assert record.finish == "stop" and record.output_tokens == len(events) and result.faults == []


def test_an_answer_that_never_left_its_reasoning_has_no_first_answer_token():
    for opening in (delta(content="<think>"), delta(reasoning_content="a")):
        script = [(0.1, opening), (0.2, delta(content=" ")), (0.2, delta(finish="length")), (0.2, last(2)), (0.2, DONE)]
        result = virtual(Script(lambda body, script=script: script), load(output=2, chat=True))
        assert result.records[0].ttft_s == pytest.approx(0.1) and result.summary.answer is None and not result.records[0].answered
        assert "1 answers ended inside their reasoning" in str(result) and result.faults == []


@MANY
def test_tokens_that_come_four_at_a_time(deliver):
    """B045: 64 tokens in 16 events of 4, 40 ms apart. 10 ms a token where the usage counts each event, else an inter-chunk latency of 40."""
    for counted in (True, False):
        script = [(0.1 + 0.04 * i, text(" abcd", so_far=4 * i + 4 if counted else None)) for i in range(16)]
        script += [(0.7, text("", finish="length")), (0.7, last(64)), (0.7, DONE)]
        result = virtual(Script(lambda body, script=script: script, deliver=deliver), load(output=64))
        assert (result.chunks.mean_s, result.chunks.p99_s) == pytest.approx((0.04, 0.04)) and result.chunks.n == 15
        assert result.summary.tpot.mean_s == pytest.approx(0.6 / 63) and result.records[0].output_tokens == 64 and result.faults == []
        assert "64 tokens came in 16 events" in str(result) and "inter-chunk latency" in str(result)
        if counted:
            assert (result.itl.mean_s, result.itl.p99_s) == pytest.approx((0.01, 0.01)) and result.itl.n == 60
        else:
            assert result.itl is None and "inter-token latency  " not in str(result)


def test_mean_itl_is_what_the_throughput_says_at_concurrency_1():
    """The check of B045: 1 / (decode tokens per second) is the mean ITL, each token an event or not."""
    for step in (1, 4):
        script = [(0.2 + 0.03 * i, text("a", so_far=i * step + 1)) for i in range(9)]  # the first event brings one token, the others `step`
        script += [(0.44, text("", finish="length")), (0.44, last(8 * step + 1)), (0.44, DONE)]
        result = virtual(Script(lambda body, script=script: script), load(output=8 * step + 1))
        assert 1 / result.summary.decode_tokens_per_s == pytest.approx(result.itl.mean_s) == pytest.approx(0.03 / step)


@MANY
def test_tokens_are_the_servers_count(deliver):
    """B046: 15 tokens of spaces in 5 events. Not 5 and not 1, and the disagreement is shown."""
    script = [(0.1 * i, text("   ")) for i in range(1, 6)] + [(0.6, text("", finish="length")), (0.6, last(15)), (0.6, DONE)]
    result = virtual(Script(lambda body: script, deliver=deliver), load(output=15))
    assert result.records[0].output_tokens == 15 and result.summary.output_tokens == 15 and result.faults == []
    assert "15 tokens came in 5 events" in str(result) and "server usage" in str(result)


def test_without_usage_events_are_counted_and_the_run_is_not_valid():
    script = [(0.1, text("a")), (0.2, text("b", finish="length")), (0.2, DONE)]
    result = virtual(Script(lambda body: script), load(output=2))
    assert result.records[0].output_tokens == 2 and result.itl is None and "events: the server counts no tokens" in str(result)
    assert len(result.faults) == 1 and "without the server's count" in result.faults[0]


def test_a_usage_with_the_last_event_alone_does_not_put_all_tokens_there():
    script = [(0.1, text("a")), (0.2, text("b")), (0.3, text("c", so_far=3, finish="length")), (0.3, DONE)]
    result = virtual(Script(lambda body: script), load(output=3))
    assert result.answers[0].tokens == (1, 1, 1) and result.itl.n == 2 and result.itl.mean_s == pytest.approx(0.1)


def test_tokens_without_text_count_where_the_usage_counts_them():
    """The first bytes of a character give an event without text, but its token took its time."""
    script = [(0.1, text("", so_far=1)), (0.2, text("é", so_far=2)), (0.3, text("", so_far=2, finish="length")), (0.3, DONE)]
    result = virtual(Script(lambda body: script), load(output=2))
    assert result.records[0].ttft_s == pytest.approx(0.1) and result.answers[0].tokens == (1, 1)


RECORDED = [(0.0, delta(role="assistant", content="")), *((0.0, delta(content=piece)) for piece in ("Tōkyō", " は", "東京", " \n", "\"data:\" ")),
            (0.0, delta(finish="stop")), (0.0, last(5)), (0.0, DONE)]  # fmt: skip


@pytest.mark.parametrize("name", [*DELIVERIES, "one piece"])
def test_the_same_bytes_are_the_same_events(name):
    """B055: the same text, whitespace kept, the same number of events and one finish, however they are cut."""
    pieces = [(0.0, b"".join(piece for _, piece in whole(RECORDED)))] if name == "one piece" else DELIVERIES[name](RECORDED)
    events = stream.Events()
    found = [json.loads(data) for _, piece in pieces for _, data in events.feed(piece) if data != "[DONE]"]
    assert found == [message for _, message in RECORDED[:-1]]
    read = stream.Stream()
    for at_s, piece in pieces:
        read.feed(at_s, piece)
    read.close()
    assert read.done and read.finish == "stop" and read.answer(id="0", scheduled_s=0, prompt_tokens=1, asked_tokens=5).tokens == (1,) * 5


def test_lines_of_data_are_joined_and_the_rest_is_skipped():
    events = stream.Events()
    sent = b'\xef\xbb\xbfdata: {"a":\ndata:1}\n\nretry: 5\n: note\n\nevent: error\n: it broke\n\ndata\n\n\rdata: x\r\rdata: not ended'
    assert events.feed(sent) == [("", '{"a":\n1}'), ("error", "it broke"), ("", ""), ("", "x")]
    assert events.feed(b"\n") == [] and events.feed(b"\n") == [("", "not ended")]
    assert events.feed(b"data: a\r") == [] and events.feed(b"\ndata:  b \r\n\r\n") == [("", "a\n b ")]
    with pytest.raises(stream.StreamFault, match="without an end of line"):
        events.feed(bytes(stream.LONGEST_LINE + 1))


# --- many requests ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [43, 1])
def test_a_length_that_is_not_honoured_makes_the_run_invalid(tokens):
    """B051: asked and got stand in the table."""
    result = virtual(Script(lambda body: answer(min(tokens, body["max_tokens"]))), load(3, output=512))
    assert f"{512:>12}{tokens:>12}" in str(
        result
    ) and f"INVALID: 3 of 3 answers have another length than asked, such as {tokens} tokens for 512" in str(result)
    assert not result.to_json()["valid"] and virtual(Script(lambda body: answer(512)), load(3, output=512)).to_json()["valid"]


@pytest.mark.parametrize("gated", [True, False], ids=["the client waits", "the server queues"])
def test_waiting_counts_from_the_schedule(gated):
    """B054: service 0.5 s, one at a time, 8 arrivals 0.1 s apart: mean 1.9 s end to end, 3.3 at most, whoever makes them wait."""
    schedule = tuple(Arrival(at_s=i / 10, prompt_tokens=8, output_tokens=6) for i in range(8))
    script = Script(lambda body: answer(body["max_tokens"], first_s=0.0, gap_s=0.1), slots=10 if gated else 1)
    result = virtual(script, Load(schedule=schedule, open_loop=True, concurrency=1 if gated else None))
    summary, sent = result.summary, result.from_sending("total_s")
    assert (summary.total.mean_s, summary.total.max_s) == pytest.approx((1.9, 3.3))
    assert (summary.queue.mean_s, sent.mean_s, sent.max_s) == pytest.approx((1.4, 0.5, 0.5) if gated else (0.0, 1.9, 3.3))
    assert summary.ttft.mean_s == pytest.approx(1.4) and result.from_sending("ttft_s").mean_s == pytest.approx(0.0 if gated else 1.4, abs=1e-9)
    assert str(result).count("from the sending") == 2 and "client's own queue" in str(result)


def test_a_closed_loop_schedules_when_it_sends():
    result = virtual(Script(lambda body: answer(4, gap_s=0.1)), load(5, output=4, concurrency=2))
    assert [record.queue_s for record in result.records] == [0.0] * 5
    assert [record.sent_s for record in result.records] == pytest.approx([0.0, 0.0, 0.3, 0.3, 0.6])
    assert result.summary.occupancy == pytest.approx(5 / 3)


def test_a_late_sleep_does_not_delay_the_ones_after_it():
    """B060: 200 arrivals at 200 per second, a clock that wakes every 15.6 ms. The last leaves by 0.995 s and one tick, not after 3.1 s."""
    tick, now = 0.0156, 0.0

    async def sleep(seconds):
        nonlocal now
        now = (int((now + seconds) / tick) + 1) * tick

    async def departures():
        schedule = [Arrival(at_s=i / 200, prompt_tokens=1, output_tokens=1) for i in range(200)]
        return [(arrival.at_s, now) async for _, arrival in endpoint.due(schedule, now=lambda: now, sleep=sleep)]

    left = apart(lambda: asyncio.run(departures()))
    assert len(left) == 200 and all(due_s - 1e-5 < at_s < due_s + tick + 1e-5 for due_s, at_s in left)


def test_the_warm_up_keeps_the_cap_and_stays_out():
    """B061: four in flight at most, warm-up included; its slow first answer is in no percentile; percentiles carry their count."""
    cold = iter([5.0])
    script = Script(lambda body: answer(body["max_tokens"], first_s=next(cold, 0.1), gap_s=0.01))
    result = virtual(script, load(10, output=20, concurrency=4))
    assert script.most == 4 and len(script.bodies) == 15 and [body["max_tokens"] for body in script.bodies] == [16] * 5 + [20] * 10
    assert result.summary.ttft.max_s == pytest.approx(0.1) and result.summary.requests == 10
    line = next(line for line in str(result).splitlines() if line.startswith("time to first token"))
    assert line.split()[-2] == "10" and "(only 10 samples)" in str(result.summary.ttft) and "warm-up of 5 requests apart" in str(result)


def test_halves_that_differ_are_told():
    """B061: the second half 10 % slower is said, 2 % is not."""
    for slower, told in ((1.10, True), (1.02, False)):
        gaps = iter([0.01, 0.01] + [0.01] * 5 + [0.01 * slower] * 5)
        result = virtual(Script(lambda body, gaps=gaps: answer(30, gap_s=next(gaps))), load(11, output=30))
        assert ("the two halves of the run" in str(result)) == told
        assert result.halves[1] / result.halves[0] == pytest.approx(slower, rel=0.02)


def first_page(text, words=16):
    return " ".join(text.split()[:words])


def test_no_prompt_can_be_in_a_prefix_cache():
    """B052: first pages differ within a run, between two runs of one seed, and between four processes."""
    script = Script(lambda body: answer(2))
    for _ in range(2):
        virtual(script, load(50, output=2))
    code = "from decodelab.serving.endpoint import prompt; print(*(prompt(16) for _ in range(20)), sep='\\n')"
    others = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines() for _ in range(4)]
    pages = [first_page(body["prompt"]) for body in script.bodies] + sum(others, [])
    assert len(pages) == 2 * 51 + 80 and len(set(pages)) == len(pages)
    assert len(set(endpoint.WORDS)) == len(endpoint.WORDS) >= 190


def test_prompts_get_as_many_words_as_the_server_leaves_room_for():
    """The server's count is the truth: what its template adds is learnt from the first request and taken off."""
    script = Script(
        lambda body: [
            (0, text("a", so_far=1)),
            (0, {"choices": [], "usage": usage(1, prompt=len(body["messages"][0]["content"].split()) + 23)}),
            (0, DONE),
        ]
    )
    result = virtual(script, load(3, prompt=40, output=1, chat=True))
    assert [record.prompt_tokens for record in result.records] == [40] * 3 and f"{'prompt tokens':<24}{40:>12}{40:>12}" in str(result)
    short = virtual(script, load(3, prompt=10, output=1, chat=True))
    assert f"{'prompt tokens':<24}{10:>12}{24:>12}" in str(short)


@pytest.mark.parametrize(("cached", "warns"), [(0, False), (1, False), (2, True)])
def test_prefix_hits_over_one_percent_are_told(cached, warns):
    """B052: 100 prompt tokens: 1 of them found in the cache is no warning, 2 are."""
    found = {"prompt_tokens_details": {"cached_tokens": cached}}
    script = Script(lambda body: [(0, text("a", so_far=1)), (0, {"choices": [], "usage": usage(1, prompt=100, **found)}), (0, DONE)])
    result = virtual(script, load(1, prompt=100, output=1))
    assert ("in the prefix cache" in str(result)) == warns


# --- the fields a server takes ------------------------------------------------------------------------------------


def test_the_length_is_forced_and_usage_is_asked_for():
    script = Script(lambda body: answer(body["max_tokens"]))
    virtual(script, load(1, output=20))
    body = script.bodies[-1]
    assert (body["max_tokens"], body["min_tokens"], body["ignore_eos"], body["stream"], body["model"]) == (20, 20, True, True, "fake")
    assert body["stream_options"] == {"include_usage": True, "continuous_usage_stats": True} and len(body["prompt"].split()) == 32


def test_fields_that_a_server_refuses_by_name_are_left_out():
    script = Script(lambda body: answer(body["max_completion_tokens"]), refuses=("continuous_usage_stats", "ignore_eos", "min_tokens"))
    script.events = lambda body: answer(body["max_tokens"])
    result = virtual(script, load(2, output=20))
    assert set(script.bodies[-1]) == {"model", "prompt", "max_tokens", "stream", "stream_options"} and len(script.bodies) == 3
    assert "the server refuses min_tokens and ignore_eos: the length may not be forced" in str(result) and result.faults == []


def test_a_chat_server_that_wants_max_completion_tokens_gets_it():
    def respond(path, body):
        if "max_tokens" in body:
            return Reply.json({"error": {"message": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."}}, 400)
        return answers(body.get("max_completion_tokens"))(path, body)

    with FakeServer(respond) as server:
        assert endpoint.check(server.url, requests=2, output_tokens=5, chat=True).faults == []


def test_another_400_is_the_servers_own_words():
    def respond(path, body):
        return answers()(path, body) if not body else Reply.json({"error": {"message": "maximum context length is 4096 tokens"}}, 400)

    with FakeServer(respond) as server, pytest.raises(ValueError, match="400 to /v1/completions: maximum context length is 4096 tokens"):
        endpoint.check(server.url)


# --- the server's own metrics -------------------------------------------------------------------------------------

PAGE = """# HELP vllm:time_to_first_token_seconds Histogram
vllm:time_to_first_token_seconds_bucket{{engine="0",le="0.1"}} 1.0
vllm:time_to_first_token_seconds_count{{engine="0",model_name="a}} b\\"c"}} {n}
vllm:time_to_first_token_seconds_sum{{engine="0",model_name="a}} b\\"c"}} {ttft}
vllm:inter_token_latency_seconds_count{{engine="0"}} {n}0
vllm:inter_token_latency_seconds_sum{{engine="0"}} {itl} 1700000000
vllm:num_requests_running{{engine="0"}} 2
vllm:num_requests_running{{engine="1"}} 3
vllm:kv_cache_usage_perc{{engine="0"}} 0.5
vllm:kv_cache_usage_perc{{engine="1"}} 0.25
vllm:prefix_cache_queries_total{{engine="0"}} {n}00
vllm:prefix_cache_hits_total{{engine="0"}} {n}
vllm:num_preemptions_total {n} # {{trace="x}}"}} 0.67
vllm:time_to_first_token_seconds_created{{engine="0"}} 1.7e+09
"""


def page(n, ttft, itl):
    return PAGE.format(n=n, ttft=ttft, itl=itl)


def test_the_servers_side_is_the_difference_of_two_pages():
    side = stream.server_side([stream.read_metrics(page(*values)) for values in ((4, 2.0, 1.0), (5, 0, 0), (8, 3.0, 1.8))])
    assert (
        side["engine"] == "vllm"
        and side["ttft"]["n"] == 4
        and side["ttft"]["mean"] == pytest.approx(0.25)
        and side["itl"]["mean"] == pytest.approx(0.02)
    )
    assert side["running"]["max"] == 5 and side["kv_used"]["mean"] == 0.375 and side["preemptions"]["sum"] == 4
    assert side["prefix_hits"]["sum"] / side["prefix_queries"]["sum"] == 0.01
    assert stream.server_side([{}, {}]) == {} and stream.server_side([stream.read_metrics("up 1\n")] * 2) == {}


def test_a_frontend_goes_before_its_workers():
    frontend = "dynamo_frontend_time_to_first_token_seconds_sum 3\ndynamo_frontend_time_to_first_token_seconds_count 2\n"
    side = stream.server_side([{}, stream.read_metrics(frontend + page(8, 3.0, 1.8))])
    assert side["engine"] == "dynamo + vllm" and side["ttft"]["metric"].startswith("dynamo") and side["ttft"]["mean"] == 1.5


def test_both_sides_stand_side_by_side():
    """The counters of the page before the load are taken off, and one that lags behind the last request is waited for."""
    pages = [page(4, 2.0, 1.0), *[page(8, 2.4, 1.4)] * 3, page(9, 2.5, 1.5)]  # before, one while it runs, three after
    result = virtual(Script(lambda body: answer(11, first_s=0.1, gap_s=0.02), pages=pages), load(5, output=11))
    assert result.server["ttft"]["n"] == 5 and result.server["ttft"]["mean"] == pytest.approx(0.1)
    assert result.agreement()["ttft"] == pytest.approx({"client_s": 0.1, "client_n": 5, "server_s": 0.1, "server_n": 5})
    assert result.agreement()["itl"] == pytest.approx({"client_s": 0.02, "client_n": 50, "server_s": 0.01, "server_n": 50})
    assert (
        "the server (vllm): running 5.0 mean, 5 most" in str(result)
        and "prefix hits 1.00 %" in str(result)
        and "mean time to first token, here" not in str(result)
    )


def test_a_client_that_waits_longer_than_the_server_says_is_told():
    pages = [page(4, 2.0, 1.0), page(5, 2.1, 1.5)]
    assert "mean time to first token, here and as the server counts it: 140 ms and 100 ms" in str(
        virtual(Script(lambda body: answer(11, first_s=0.14, gap_s=0.1), pages=pages), load(1, output=11))
    )


def test_the_table_of_metrics_is_whole():
    rows = catalog.read_table("server_metrics.csv")
    assert list(rows[0]) == ["engine", "quantity", "metric", "kind", "unit", "source", "seen", "tested"]
    assert all(all(row.values()) and row["kind"] in ("histogram", "counter", "gauge") and row["tested"] in ("yes", "no") for row in rows)
    assert {row["engine"] for row in rows if row["tested"] == "yes"} == {"vllm", "dynamo"}
    assert len({(row["engine"], row["metric"]) for row in rows}) == len(rows)
    assert {"ttft", "itl"} <= {row["quantity"] for row in rows if row["engine"] == "vllm"} & {
        row["quantity"] for row in rows if row["engine"] == "dynamo"
    }


# --- bytes that must move -----------------------------------------------------------------------------------------


def test_what_must_have_moved_stands_beside_what_was_measured():
    """llama-3.1-8b in bf16: 15.01 GB of weights a step, 131,072 bytes of KV a token. 32 in, 64 out: a mean context of 64."""
    config, h200 = catalog.model("llama-3.1-8b"), {"read_bytes_per_s": 4.8e12, "hardware": "H200"}
    honest = report.must_move(virtual(Script(lambda body: answer(64, gap_s=0.004)), load(2)), config, **h200)
    assert honest["weight_bytes"] == 15_009_857_536 and honest["kv_bytes"] == 64 * 131_072 and honest["batch"] == 1
    assert honest["floor_s"] == pytest.approx(15_018_246_144 / 4.8e12) and honest["fraction_of_roof"] == pytest.approx(honest["floor_s"] / 0.004)
    wonder = report.must_move(virtual(Script(lambda body: answer(64, gap_s=0.002)), load(2)), config, **h200)
    assert wonder["verdict"].startswith("impossible: 1.56 of the roof") and "impossible" in wonder["text"]
    four = report.must_move(virtual(Script(lambda body: answer(64, gap_s=0.004)), load(8, concurrency=4)), config, **h200)
    assert four["batch"] == 4 and four["kv_bytes"] == 4 * 64 * 131_072
    assert report.must_move(virtual(Script(lambda body: answer(1)), load(2, output=1)), config, **h200) is None


def test_tokens_that_come_together_are_no_wonder():
    """Several tokens a step may beat the floor per token; a step may not, and the time between events is what is held against it."""
    script = [(0.004 * i, text("abcd", so_far=4 * i + 4)) for i in range(16)] + [(0.06, text("", finish="length")), (0.06, last(64)), (0.06, DONE)]
    result = virtual(Script(lambda body: script), load())
    assert result.itl.mean_s == pytest.approx(0.001)
    assert report.must_move(result, catalog.model("llama-3.1-8b"), read_bytes_per_s=4.8e12, hardware="H200")["fraction_of_roof"] < 1


def test_occupancy_counts_overlaps_over_the_busy_time_only():
    def record(first, end):
        return latency.RequestRecord(id="", scheduled_s=0, sent_s=0, prompt_tokens=1, asked_tokens=2, output_tokens=2, token_s=(first, end))

    assert report.occupancy([record(0, 2), record(1, 3), record(10, 11)]) == pytest.approx(5 / 4)
    assert report.occupancy([]) is None and report.occupancy([record(1, 1)]) is None


# --- a real server on loopback ------------------------------------------------------------------------------------


def check(server, **settings):
    return endpoint.check(server.url, **{"requests": 3, "output_tokens": 4, "timeout_s": 5.0, **settings})


def test_in_a_script_a_thread_and_a_running_loop_twice():
    """B096: no loop is patched, none is left, no thread either."""
    with FakeServer(answers()) as server:

        async def cell():
            return check(server), asyncio.get_running_loop()

        before, loop = threading.active_count(), asyncio._get_running_loop()
        for _ in range(2):
            results = [check(server), apart(lambda: asyncio.run(cell()))[0]]
            with ThreadPoolExecutor(1) as pool:
                results.append(pool.submit(check, server).result())
            assert [result.summary.completed for result in results] == [3, 3, 3] and not any(result.faults for result in results)
        assert threading.active_count() <= before + 1  # the server's thread for a connection that is still open
        assert asyncio._get_running_loop() is loop


def test_ctrl_c_stops_it_and_leaves_nothing():
    begun, before = threading.Event(), threading.enumerate()

    def respond(path, body):
        if body.get("max_tokens") == 999:
            begun.set()
        return answers(gap_s=0.02)(path, body) if body.get("max_tokens") == 999 else answers()(path, body)

    def interrupt():
        begun.wait(30)
        _thread.interrupt_main()

    with FakeServer(respond) as server:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            check(server, output_tokens=999)
        assert server.hung_up.wait(10)  # the request was dropped at the server too
        started = [thread for thread in threading.enumerate() if thread not in before]
        assert not [thread for thread in started if thread.name.startswith("ThreadPoolExecutor") and thread.is_alive()]


def test_loopback_goes_past_a_proxy_and_others_through_it(monkeypatch):
    """B104: proxies of the environment, dead for loopback; for another host the proxy is asked."""
    with FakeServer(answers()) as server:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
            monkeypatch.setenv(name.lower(), "http://127.0.0.1:9")
        monkeypatch.delenv("NO_PROXY", raising=False)
        monkeypatch.delenv("no_proxy", raising=False)
        assert check(server).faults == []
        for name in ("HTTP_PROXY", "http_proxy"):
            monkeypatch.setenv(name, server.url)
        result = endpoint.check("http://model.example:8000", requests=1, output_tokens=2, yes=True)
        assert result.host == "model.example"
        asked = [path for path, *_ in server.seen if "model.example" in path]
        assert [path.removeprefix("http://model.example:8000") for path in asked] == ["/v1/models", "/v1/completions", "/metrics", "/v1/completions"]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/", "/v1/chat/completions", "/v1/completions", "/v1/models"])
def test_the_base_address_in_any_form(suffix):
    assert endpoint.Target.parse("http://127.0.0.1:80" + suffix).root == "http://127.0.0.1:80"
    assert endpoint.Target.parse("https://x.example/api" + suffix).root == "https://x.example/api"


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("localhost:8000", True),
        ("http://[::1]:8000", True),
        ("127.9.9.9", True),
        ("a.localhost", True),
        ("10.0.0.1", False),
        ("localhost.evil.example", False),
    ],
)
def test_what_is_this_machine(url, local):
    assert endpoint.Target.parse(url).local == local


@pytest.mark.parametrize("url", ["", "ftp://x", "http://", "http://x:port", "http://me:secret@x", "http://x/?api_key=secret", "http://x/#secret"])
def test_a_bad_address_is_one_line_without_its_secret(url):
    with pytest.raises(ValueError) as fault:
        endpoint.check(url)
    assert "secret" not in str(fault.value) and "\n" not in str(fault.value)


def says(status, message=""):
    return lambda path, body: Reply.json({"error": {"message": message}}, status)


def streams(*steps, kind=STREAM):
    return lambda path, body: Reply(steps, kind=kind) if body else answers()(path, body)


FAILURES = {
    "401": (says(401, "Incorrect API key provided: sk-abc"), "401 to /v1/models: it wants a key: set DECODELAB_API_KEY$"),
    "403": (says(403), "403 to /v1/models: it refuses this key"),
    "404": (
        lambda path, body: Reply(status=404, steps=[b"<h1>Not Found</h1>"], kind="text/html"),
        "404 to /v1/models: nothing is there: .* with or without /v1",
    ),
    "429": (says(429, "slow down"), "429 .*lower --concurrency or --rate.*slow down"),
    "500": (says(500, "CUDA\nout of memory\x1b[0m"), r"500 .*read its log; CUDA out of memory \[0m$"),
    "no model": (lambda path, body: Reply.json({"data": []}), "lists no model"),
    "two models": (lambda path, body: Reply.json({"data": [{"id": "a"}, {"id": "b"}]}), "lists a, b: choose one with --model"),
    "a web page": (lambda path, body: Reply([b"<html>"], kind="text/html"), "is no list of models: <html>"),
    "a stall before": (streams(30.0), "not a byte from 127.0.0.1 for 0.3 s"),
    "a stall within": (streams(event(text("a")), 30.0), "not a byte from 127.0.0.1 for 0.3 s"),
    "a cut connection": (streams(event(text("a")), CUT), "cut the connection"),
    "a short stream": (streams(event(text("a"))), "cut the stream before its end"),
    "a finish and no more": (streams(event(text("a", finish="stop"))), "cut the stream before its end"),
    "junk": (streams(b"data: {not json\n\n"), "an event that is no JSON: {not json"),
    "a list": (streams(b"data: [1]\n\n"), "of a form that this client does not know"),
    "a wrong form": (streams(b'data: {"choices": [7]}\n\n'), "of a form that this client does not know"),
    "no stream": (streams(b"{}", kind="application/json"), "application/json in place of text/event-stream"),
    "an error in the stream": (streams(b'data: {"error": {"message": "engine died"}}\n\n'), "broke off with an error: engine died"),
    "an error event": (streams(b"event: error\n: worker gone\n\n"), "sent an error: worker gone"),
}


@pytest.mark.parametrize(("respond", "message"), FAILURES.values(), ids=FAILURES)
def test_a_server_that_fails_is_one_clear_line(respond, message):
    with FakeServer(respond) as server, pytest.raises(ValueError, match=message) as fault:
        check(server, timeout_s=0.3)
    assert "\n" not in str(fault.value) and len(str(fault.value)) < 500


def test_a_port_where_nobody_listens():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(ValueError, match=f"no server answers at 127.0.0.1:{port}"):
        endpoint.check(f"127.0.0.1:{port}")


def test_a_stream_that_ends_while_its_connection_stays_open():
    with FakeServer(streams(*(event(piece) for _, piece in answer(4)), 30.0)) as server:
        assert check(server, requests=1, timeout_s=2.0).faults == []


def test_requests_that_fail_are_records_and_make_the_run_invalid():
    numbers = iter(range(100))

    def respond(path, body):
        return says(500, "overloaded")(path, body) if body and next(numbers) % 2 else answers()(path, body)

    with FakeServer(respond) as server:
        result = check(server, requests=4)
    assert [record.finish for record in result.records] == ["error", "length", "error", "length"] and result.summary.completed == 2
    assert "overloaded" in result.records[0].error and "INVALID: 2 of 4 requests did not complete, the first: the server answered 500" in str(result)
    assert result.summary.ttft.n == 2


def test_a_run_in_which_nothing_completes_fails_loudly():
    numbers = iter(range(100))
    with FakeServer(lambda path, body: says(429)(path, body) if body and next(numbers) else answers()(path, body)) as server:
        with pytest.raises(ValueError, match="none of 3 requests completed; the first: the server answered 429"):
            check(server)


def test_the_key_goes_to_the_server_and_nowhere_else(monkeypatch, tmp_path, capsys):
    """From the environment only; not to /metrics; not into an error, the result or the record, even where the server quotes it."""
    key = "sk-very-secret"
    monkeypatch.setenv(endpoint.KEY, f" {key}\n")
    numbers = iter(range(100))

    def respond(path, body):
        return says(500, f"bad key {key} for you")(path, body) if body and next(numbers) == 2 else answers()(path, body)

    with FakeServer(respond) as server:
        arguments = ["serve-check", server.url, "--requests", "3", "--output-tokens", "4", "--json", "--record", str(tmp_path / "run.json")]
        assert cli.main(arguments) == 0
        sent = {path: headers.get("authorization") for path, headers, _ in server.seen}
    assert sent == {"/v1/models": f"Bearer {key}", "/v1/completions": f"Bearer {key}", "/metrics": None}
    printed, written = capsys.readouterr(), (tmp_path / "run.json").read_text()
    assert "bad key [DECODELAB_API_KEY] for you" in written and key not in printed.out + printed.err + written
    monkeypatch.setenv(endpoint.KEY, "sk-\u00e9")
    with FakeServer(answers()) as server, pytest.raises(ValueError, match="holds a character that no key has"):
        check(server)


def test_a_run_that_leaves_this_machine_is_confirmed(monkeypatch):
    said = []
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    with pytest.raises(ValueError, match="816 tokens in and out, in 9 requests, to model.invalid: .*--yes"):  # 8 x (32 + 64) + 32 + 16
        endpoint.check("https://model.invalid", say=said.append)
    for reply, message in (("n\n", "not confirmed"), ("\n", "not confirmed"), ("y\n", "no server answers at model.invalid")):
        stdin = io.StringIO(reply)
        stdin.isatty = lambda: True
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(ValueError, match=message):
            endpoint.check("https://model.invalid", say=said.append)
    assert any("cost money" in line for line in said)


@pytest.mark.parametrize(
    "settings", [{"requests": 0}, {"concurrency": 0}, {"output_tokens": 0}, {"prompt_tokens": -1}, {"timeout_s": 0}, {"schedule": []}]
)
def test_settings_with_which_nothing_could_run(settings):
    with pytest.raises(ValueError, match="must be (at least 1|above 0)"):
        endpoint.check("localhost:9", **settings)


# --- the command --------------------------------------------------------------------------------------------------


def test_serve_check(capsys, tmp_path):
    with FakeServer(answers()) as server:
        trace = tmp_path / "trace.csv"
        trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,8,4\n0.02,9,6\n0.04,8,5\n")
        record = tmp_path / "run.json"
        common = ["serve-check", server.url, "--json", "--model-config", "smollm2-135m", "--hardware", "h200-sxm", "--devices", "2"]
        assert cli.main([*common, "--trace", str(trace), "--speed", "2", "--record", str(record), "--note", "a fake"]) == 0
        found, kept = json.loads(capsys.readouterr().out), json.loads(record.read_text())
        assert found["loop"] == "open" and [request["asked_tokens"] for request in found["requests"]] == [4, 6, 5] and found["valid"]
        assert [request["scheduled_s"] for request in found["requests"]] == pytest.approx([0, 0.01, 0.02])
        assert found["must_move"]["hardware"] == "2 x NVIDIA H200 SXM" and found["host"] == "loopback" and "token_s" not in found["requests"][0]
        assert (
            kept["note"] == "a fake"
            and [len(request["token_s"]) for request in kept["requests"]] == [4, 6, 5]
            and "127.0.0.1" not in record.read_text()
        )
        assert cli.main(["serve-check", server.url, "--requests", "2", "--output-tokens", "3", "--rate", "100", "--chat"]) == 0
        shown = capsys.readouterr()
        assert "open loop of 2 arrivals" in shown.out and "2 of 2 requests have ended" in shown.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "1", "--trace", "x.csv"], "--rate and --trace are two schedules"),
        (["--hardware", "h200-sxm"], "go together"),
        (["--model-config", "nosuch", "--hardware", "h200-sxm"], "unknown model"),
        (["--model-config", "gpt2", "--hardware", "h200-sxm", "--devices", "0"], "--devices is 0"),
        (["--rate", "0"], "must be a number above 0"),
        (["--trace", "nosuch.csv"], "nosuch.csv"),
        ([], "no server answers at 127.0.0.1:9"),
    ],
)
def test_bad_arguments_are_one_line(capsys, arguments, message):
    assert cli.main(["serve-check", "127.0.0.1:9", *arguments]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert message in lines[-1]


def test_the_command_line_does_not_wait_for_the_http_library():
    code = "import sys, decodelab.cli; decodelab.cli.parser(); print('httpx' in sys.modules, 'torch' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "lib")}
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment).stdout.strip() == "False False"
