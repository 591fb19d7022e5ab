"""Workloads: draws that follow the published laws, arrivals with the rate asked for, traces read in any unit or refused by line."""

import json
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from decodelab.arithmetic import workload
from decodelab.arithmetic.workload import KINDS, Arrival, laws, lengths, read_trace, write_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
OURS = "arrival_s,prompt_tokens,output_tokens\n"


def drawn(kind, n=20_000, **options):
    return np.array(lengths(kind, n, **{"seed": 0, **options}))


def trace(tmp_path, text, name="trace.csv", **options):
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(path, **options)


def times(tmp_path, text, name="trace.csv", **options):
    return [arrival.at_s for arrival in trace(tmp_path, text, name, **options).arrivals]


def azure(*at):
    return AZURE + "".join(f"{time},100,10\n" for time in at)


# ---- lengths ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_draws_have_the_published_quantiles(kind, side):
    """At each published value the share of draws below it, and up to it, embraces the published share; the largest is never passed."""
    law, tokens = laws(kind)[side], drawn(kind)[:, side]
    for name, value in law.quantiles.items():
        share = float(name[1:]) / 100
        assert (tokens < value - 0.5).mean() - 0.01 <= share <= (tokens <= value + 0.5).mean() + 0.01, (name, value)
    assert tokens.min() >= 1 and tokens.max() <= round(law.max or law.quantiles["p99"])


def test_reasoning_draws_within_a_few_percent_of_the_table():
    """DeepSeek-R1 in ServeGen, output: p50 792, p99 12,607 tokens; 20,000 draws show a p99 to about 5 %."""
    tokens = drawn("reasoning")[:, 1]
    assert laws("reasoning")[1].quantiles["p50"] == 792 and laws("reasoning")[1].quantiles["p99"] == 12_607
    for name, value in laws("reasoning")[1].quantiles.items():
        assert np.percentile(tokens, float(name[1:])) == pytest.approx(value, rel=0.08 if name == "p99" else 0.03), name


@pytest.mark.parametrize(("kind", "within"), [("chat", 0.03), ("code", 0.05), ("agent", 0.06), ("reasoning", 0.12)])
def test_draws_have_the_published_mean_though_only_quantiles_are_drawn(kind, within):
    """The mean is not used for drawing, so it tells whether the tail between p99 and the largest is drawn well."""
    for law, mean in zip(laws(kind), np.mean([drawn(kind, seed=seed).mean(axis=0) for seed in range(5)], axis=0), strict=True):
        assert mean == pytest.approx(law.mean, rel=within), law.field


def test_assumed_laws_say_so_and_published_ones_do_not():
    assumed = {kind for kind in KINDS for law in laws(kind) if law.notes.startswith("assumption")}
    assert assumed == {"json", "agent"}
    assert [law.mean for law in laws("agent")] == [8_596, 182] and laws("json")[1].quantiles["p50"] == 200 * 50


def test_draws_follow_the_seed():
    assert lengths("chat", 50, seed=3) == lengths("chat", 1_000, seed=3)[:50]
    one, other = drawn("reasoning", seed=1), drawn("reasoning", seed=2)
    assert (one == other).all(axis=1).mean() < 0.01
    assert workload.poisson(9, rate_per_s=1, seed=1) != workload.poisson(9, rate_per_s=1, seed=2)


def test_input_output_and_arrivals_are_independent_of_each_other():
    """One seed, and no two of the three tell anything of each other (ranks correlate by chance only, 1 / sqrt(n))."""
    n = 20_000
    gaps = np.diff(workload.poisson(n, rate_per_s=2, seed=5), prepend=0)
    ranks = [values.argsort().argsort() for values in (*drawn("reasoning", n, seed=5).T, gaps)]
    assert (abs(np.corrcoef(ranks) - np.eye(3)) < 5 / n**0.5).all()


def test_a_seeds_first_gap_tells_nothing_of_its_first_request():
    """Gamma gaps are made from normals: drawn from the stream of the lengths, the first of both would be the same number."""
    firsts = [(workload.bursty(1, rate_per_s=1, burstiness=0.2, seed=seed)[0], lengths("json", 1, seed=seed)[0][0]) for seed in range(1_000)]
    ranks = [np.array(values).argsort().argsort() for values in zip(*firsts, strict=True)]
    assert abs(np.corrcoef(ranks)[0, 1]) < 5 / 1_000**0.5


def test_the_largest_of_a_trace_is_as_rare_as_in_the_trace():
    """32,768 tokens once in 1.4 million requests, so not in a thousandth of 200,000."""
    assert (drawn("reasoning", 200_000)[:, 1] >= 32_768).sum() <= 2


def test_scale_divides_both():
    whole, small = drawn("reasoning"), drawn("reasoning", scale=16)
    assert (small == np.maximum(1, np.rint(whole / 16))).mean() > 0.95  # all but those that rounding twice moves by one
    assert abs(small - whole / 16).max() <= 1 and small.min() == 1


def test_max_context_cuts_the_output_then_the_prompt():
    """The last token is never stored: input + output - 1 slots."""
    whole, cut = drawn("agent", 5_000), drawn("agent", 5_000, max_context=4_096)
    slots = whole.sum(axis=1) - 1
    assert (cut.sum(axis=1) - 1 == np.minimum(slots, 4_096)).all() and (cut >= 1).all()
    shortened = cut[:, 0] < whole[:, 0]
    assert (cut[shortened] == [4_096, 1]).all() and (whole[shortened, 0] > 4_096).all() and shortened.any()
    assert workload.cut_share("agent", 5_000, seed=0, max_context=4_096) == pytest.approx((slots > 4_096).mean())
    assert (drawn("agent", 50, max_context=1) == 1).all()


# ---- arrivals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 3.0])
def test_arrivals_keep_the_rate_and_the_burstiness(burstiness):
    at = np.array(workload.bursty(50_000, rate_per_s=4.0, burstiness=burstiness, seed=1))
    gaps = np.diff(at, prepend=0)
    assert (gaps >= 0).all() and 50_000 / at[-1] == pytest.approx(4.0, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness, rel=0.05)


def test_poisson_gaps_are_exponential():
    """A share 1/e of the gaps is above the mean, 1/e**2 above twice the mean; burstiness 1 is the same thing."""
    at = workload.poisson(50_000, rate_per_s=4.0, seed=1)
    gaps = np.diff(at, prepend=0)
    assert [(gaps > times / 4).mean() for times in (1, 2)] == pytest.approx([np.exp(-1), np.exp(-2)], abs=0.01)
    assert at == workload.bursty(50_000, rate_per_s=4.0, burstiness=1.0, seed=1)


def test_a_uniform_schedule_is_of_deadlines():
    """B060: arrival i of 200 per second at i / 200 s from the start, the last at 0.995 s, whatever the sleeps before it took."""
    at = workload.uniform(200, rate_per_s=200)
    assert at == [i / 200 for i in range(200)] and at[0] == 0 and at[-1] == 0.995


def test_a_workload_is_its_lengths_at_its_arrivals():
    made = workload.workload("chat", 100, rate_per_s=2.0, seed=7, burstiness=2.0, max_context=1_000, scale=2.0)
    assert [(one.prompt_tokens, one.output_tokens) for one in made] == lengths("chat", 100, seed=7, max_context=1_000, scale=2.0)
    assert [one.at_s for one in made] == workload.bursty(100, rate_per_s=2.0, burstiness=2.0, seed=7)
    assert [one.at_s for one in workload.workload("chat", 4, rate_per_s=2.0, seed=7, burstiness=0)] == [0, 0.5, 1, 1.5]
    assert all(type(one.prompt_tokens) is int and type(one.at_s) is float for one in made)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"kind": "video"}, "no workload is called 'video'; there are: chat, code, json, agent, reasoning"),
        ({"n": 0}, "n is 0; it must be a number above 0"),
        ({"seed": -1}, "seed is -1; it must be a whole number of at least 0"),
        ({"scale": 0}, "scale is 0; "),
        ({"max_context": 0}, "max_context is 0; "),
        ({"rate_per_s": float("inf")}, "rate_per_s is inf; "),
        ({"rate_per_s": -1.0}, "rate_per_s is -1.0; "),
        ({"burstiness": -1.0}, "burstiness is -1.0; "),
        ({"burstiness": float("nan")}, "burstiness is nan; "),
        ({"burstiness": 0, "rate_per_s": 0}, "rate_per_s is 0; "),
    ],
)
def test_impossible_workloads_are_refused(changed, message):
    values = {"kind": "chat", "n": 3, "rate_per_s": 1.0, "seed": 0, **changed}
    with pytest.raises(ValueError) as refused:
        workload.workload(values.pop("kind"), values.pop("n"), **values)
    assert str(refused.value).startswith(message)


# ---- traces: units ---------------------------------------------------------------------------------------------------

EPOCH = 1_790_000_000


@pytest.mark.parametrize(
    ("at", "unit"),
    [
        ((0, 1, 3), "s"),
        ((86_400, 86_401, 86_403), "s"),
        ((EPOCH, EPOCH + 1, EPOCH + 3), "epoch s"),
        (tuple((EPOCH + s) * 1_000 for s in (0, 1, 3)), "epoch ms"),
        (tuple((EPOCH + s) * 1_000_000 for s in (0, 1, 3)), "epoch us"),
        (tuple((EPOCH + s) * 1_000_000_000 for s in (0, 1, 3)), "epoch ns"),
        (("2023-11-16 18:15:46.6805900", "2023-11-16 18:15:47.6805900", "2023-11-16 18:15:49.6805900"), "ISO 8601 without offset"),
        (("2024-05-10T01:00:00+02:00", "2024-05-09T23:00:01Z", "2024-05-10 00:00:03+01:00"), "ISO 8601"),
    ],
)
def test_a_time_column_in_any_unit_gives_the_same_offsets(tmp_path, at, unit):
    """B093: 0, 1, 3 s in every unit, and 0, 0.5, 1.5 s at rate 2; the unit is echoed."""
    text = azure(*at)
    assert times(tmp_path, text) == [0, 1, 3] and times(tmp_path, text, rate=2) == [0, 0.5, 1.5]
    assert trace(tmp_path, text).unit == unit and trace(tmp_path, text).note == ""


def test_one_instant_in_two_offsets_has_no_gap(tmp_path):
    assert times(tmp_path, azure("2024-05-10T01:00:00+02:00", "2024-05-09T23:00:00Z")) == [0, 0]


def test_the_unit_may_be_given(tmp_path):
    """What a column's size or name would say is overruled; what was echoed may be given back."""
    assert times(tmp_path, azure(0, 1_000_000, 3_000_000), unit="us") == [0, 1, 3]
    assert times(tmp_path, azure(EPOCH * 1_000, EPOCH * 1_000 + 500), unit="epoch ms") == [0, 0.5]
    micro = OURS + "".join(f"{(EPOCH + s) * 1_000_000},10,5\n" for s in (0, 1, 3))
    assert times(tmp_path, micro, unit="us") == [0, 1, 3]
    with pytest.raises(ValueError, match=r"trace.csv line 4: arrival_s is 1790000003000000, in s after the year 2286 .* give unit="):
        trace(tmp_path, micro)


def test_a_name_that_ends_in_a_unit_is_believed(tmp_path):
    text = "sent_ms,in,out\n2000,10,5\n3500,10,5\n"
    found = trace(tmp_path, text, columns={"at_s": "sent_ms", "prompt_tokens": "in", "output_tokens": "out"})
    assert [arrival.at_s for arrival in found.arrivals] == [0, 1.5] and found.unit == "ms"
    assert found.columns == {"at_s": "sent_ms", "prompt_tokens": "in", "output_tokens": "out"}


def test_arrival_s_keeps_its_start_and_epoch_does_not(tmp_path):
    assert times(tmp_path, OURS + "2.5,10,5\n4,10,5\n", rate=2) == [1.25, 2]
    assert times(tmp_path, OURS + f"{EPOCH},10,5\n{EPOCH + 4},10,5\n") == [0, 4]


@pytest.mark.parametrize(
    ("text", "name", "first", "unit"),
    [
        (AZURE + "2023-11-16 18:15:46.6805900,4808,10\n", "a.csv", (4808, 10), "ISO 8601 without offset"),
        ('{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47]}\n', "m.jsonl", (6955, 52), "ms"),
        ("timestamp,input_length,output_length\n27482,6955,52.0\n", "m.csv", (6955, 52), "ms"),
        ("Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,Conversation log\n", "b.csv", (472, 18), "s"),
        ('{"arrival_s": 0.25, "prompt_tokens": 7, "output_tokens": 3}', "o.jsonl", (7, 3), "s"),
    ],
)
def test_known_traces_are_read_by_their_names(tmp_path, text, name, first, unit):
    """A single row is a trace too."""
    found = trace(tmp_path, text, name)
    assert [(one.prompt_tokens, one.output_tokens) for one in found.arrivals] == [first] and found.unit == unit
    assert set(found.columns) == {"at_s", "prompt_tokens", "output_tokens"} and set(found.columns.values()) <= set(
        text.replace('"', ",").replace("\n", ",").split(",")
    )


def test_mooncake_times_are_milliseconds(tmp_path):
    rows = [{"timestamp": time, "input_length": 5, "output_length": 5} for time in (3_000, 4_000, 6_000)]
    assert times(tmp_path, "\n\n".join(map(json.dumps, rows)), "m.jsonl") == [0, 1, 3]


# ---- traces: rows ----------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_back(tmp_path):
    made = workload.workload("reasoning", 200, rate_per_s=0.7, seed=4)
    write_trace(tmp_path / "saved.csv", made)
    found = read_trace(str(tmp_path / "saved.csv"))
    assert found.arrivals == made and found.unit == "s" and found.note == ""
    half = read_trace(tmp_path / "saved.csv", rate=2).arrivals
    assert half == [replace(one, at_s=one.at_s / 2) for one in made]


def test_requests_without_output_are_left_out_and_counted(tmp_path):
    found = trace(tmp_path, "Timestamp,Request tokens,Response tokens\n1,100,0\n2,100,9\n3,0,0\n5,100,9\n")
    assert [one.at_s for one in found.arrivals] == [0, 3] and found.note == "2 of 4 requests left out: 0 output tokens"


def test_unsorted_rows_are_sorted_and_said_so(tmp_path):
    found = trace(tmp_path, OURS + "3,30,3\n1,10,1\n2,0,0\n2,20,2\n")
    assert found.arrivals == [Arrival(at_s=float(n), prompt_tokens=10 * n, output_tokens=n) for n in (1, 2, 3)]
    assert found.note == "1 of 4 requests left out: 0 output tokens; rows were not in order of time and were sorted"
    assert all(one.at_s <= other.at_s for one, other in pairwise(found.arrivals))


def test_byte_order_mark_spaces_and_blank_lines_are_no_fault(tmp_path):
    text = b"\xef\xbb\xbfTIMESTAMP, ContextTokens ,generatedtokens\r\n\r\n 1 , 10, 5 \r\n\r\n2,10,5\r\n"
    assert times(tmp_path, text) == [0, 1]
    assert times(tmp_path, b'\xef\xbb\xbf{"arrival_s": 1, "prompt_tokens": 7, "output_tokens": 3}\n') == [1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "trace.csv has 0 rows, none that asks for output; a trace is CSV with a header, or one JSON object per line"),
        (" \n\n", "trace.csv has 0 rows"),
        (AZURE, "trace.csv has 0 rows"),
        (AZURE + "1,10,0\n", "trace.csv has 1 rows, none that asks for output"),
        (b"\x1f\x8b\x08\x00\xff\xfe", "trace.csv is not UTF-8 text; unpack or convert it first"),
        (AZURE + "1,10,\x005\n", "trace.csv "),
        ("TIMESTAMP,ContextTokens,Model\n1,10,x\n",
         "trace.csv has no columns for output_tokens (output_tokens or generatedtokens or output_length or response tokens); "
         "its columns are: TIMESTAMP, ContextTokens, Model. Name the right one: columns={'output_tokens': ...}"),
        ("timestamp,arrival_s,prompt_tokens,output_tokens\n1,1,1,1\n", "trace.csv has 2 columns for at_s (arrival_s or timestamp); its columns are: timestamp"),
        ("timestamp,timestamp,prompt_tokens,output_tokens\n1,1,1,1\n", "trace.csv line 2 has 4 cells and the header 3 different columns"),
        ("TIMESTAMP;ContextTokens;GeneratedTokens\n1;10;5\n", "trace.csv has no columns for at_s (arrival_s or timestamp); its columns are: TIMESTAMP;"),
        ("1,10,5\n2,10,5\n", "trace.csv has no columns for at_s (arrival_s or timestamp); its columns are: 1, 10, 5."),
        (AZURE + "1,10,5\n2,1,024,5\n", "trace.csv line 3 has 4 cells and the header 3 different columns: numbers take no thousands separators"),
        (AZURE + "1,10\n", "trace.csv line 2 has 2 cells and the header 3"),
        (AZURE + '1,10,5\n2,"1,024",5\n', "trace.csv line 3: ContextTokens is '1,024'; tokens are a whole number of at least 0, without sign or thousands"),
        (AZURE + "1,1_024,5\n", "trace.csv line 2: ContextTokens is '1_024'"),
        (AZURE + '"1,024",10,5\n', "trace.csv line 2: TIMESTAMP is '1,024'; a time is a finite number of at least 0"),
        (AZURE + "1,10,5\n\n2,0,5\n", "trace.csv line 4: ContextTokens is 0; a request that is answered reads at least 1 token"),
        (AZURE + "1,-10,5\n", "trace.csv line 2: ContextTokens is '-10'; tokens are a whole number of at least 0"),
        (AZURE + "1,10,-5\n", "trace.csv line 2: GeneratedTokens is '-5'"),
        (AZURE + "1,10.5,5\n", "trace.csv line 2: ContextTokens is '10.5'"),
        (AZURE + "1,,5\n", "trace.csv line 2: ContextTokens is ''"),
        (AZURE + "nan,10,5\n", "trace.csv line 2: TIMESTAMP is 'nan'; a time is a finite number"),
        (AZURE + "1,10,5\ninf,10,5\n", "trace.csv line 3: TIMESTAMP is 'inf'"),
        (AZURE + "1e999,10,5\n", "trace.csv line 2: TIMESTAMP is '1e999'"),
        (AZURE + "-1,10,5\n", "trace.csv line 2: TIMESTAMP is '-1'; a time is a finite number of at least 0"),
        (AZURE + "yesterday,10,5\n", "trace.csv line 2: TIMESTAMP is 'yesterday'"),
        (AZURE + "1,10,5\n2023-11-16 18:15:46,10,5\n",
         "trace.csv line 3: a time in ISO 8601 without offset, where the first row has numbers; one column takes one unit"),
        (AZURE + "2023-11-16 18:15:46Z,10,5\n2023-11-16 18:15:47,10,5\n", "trace.csv line 3: a time in ISO 8601 without offset, where the first row has ISO 8601;"),
        (azure(EPOCH, EPOCH + 1, (EPOCH + 3) * 1_000), "trace.csv line 4: TIMESTAMP is 1790000003000, in s after the year 2286 or 30 years after the first"),
        (azure(0, EPOCH, 3), "trace.csv line 3: TIMESTAMP is 1790000000, in s after the year 2286 or 30 years after the first arrival; one column takes one unit"),
        ('{"arrival_s": 1, "prompt_tokens": 7, "output_tokens": 3}\n{"arrival_s": 2, "prompt_tokens": 7}',
         "trace.csv line 2: no output_tokens; this row has: arrival_s, prompt_tokens"),
        ('{"arrival_s": 1, "prompt_tokens": 7, "output_tokens": 3}\n\n{"arrival_s": 2,\n', "trace.csv line 3 is not a JSON object (Expecting"),
        ('{"arrival_s": 1, "prompt_tokens": 7, "output_tokens": 3}\n[1, 7, 3]\n', "trace.csv line 2 is not a JSON object ([1, 7, 3])"),
        ('{"arrival_s": NaN, "prompt_tokens": 7, "output_tokens": 3}', "trace.csv line 1: arrival_s is 'nan'"),
        ('{"arrival_s": 1, "prompt_tokens": null, "output_tokens": 3}', "trace.csv line 1: prompt_tokens is 'None'"),
        ('{"arrival_s": 1, "prompt_tokens": true, "output_tokens": 3}', "trace.csv line 1: prompt_tokens is 'True'"),
    ],
)  # fmt: skip
def test_malformed_traces_are_refused_by_line(tmp_path, text, message):
    with pytest.raises(ValueError) as refused:
        trace(tmp_path, text)
    assert str(refused.value).startswith(message) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": 0}, "rate is 0; it must be a number above 0"),
        ({"unit": "minutes"}, "trace.csv has times in numbers, read with unit='minutes'; numbers take s, ms, us or ns"),
        ({"columns": {"time": "TIMESTAMP"}}, "trace.csv was to be read with columns for time; the fields are at_s, prompt_tokens, output_tokens"),
        ({"columns": {"at_s": "timestamp"}}, "trace.csv has no columns for at_s (timestamp); its columns are: TIMESTAMP"),
    ],
)
def test_wrong_options_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError) as refused:
        trace(tmp_path, azure(0, 1), **options)
    assert str(refused.value).startswith(message)


def test_a_unit_for_iso_times_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has times in ISO 8601, read with unit='ms'; .* ISO 8601 takes none"):
        trace(tmp_path, azure("2023-11-16T18:15:46Z"), unit="ms")


def test_a_trace_that_is_not_there_is_named(tmp_path):
    with pytest.raises(OSError, match="absent.csv"):
        read_trace(tmp_path / "absent.csv")
