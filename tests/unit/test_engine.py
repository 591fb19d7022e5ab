"""The engine on real decoders: batched output is single output, pages come back, one request's fault is its own."""

import pytest
import torch

import tiny
from decodelab.arithmetic.workload import Arrival
from decodelab.decoder.cache import PagedRows
from decodelab.decoder.generate import generate
from decodelab.decoder.sampling import Sampling
from decodelab.serving.engine import Engine
from decodelab.serving.scheduler import Limits, RequestError

NEAR = 1e-4  # of the largest logit: two tokens closer than this may change places with the order of sums


def engine(config=tiny.LLAMA, **limits) -> Engine:
    return Engine(tiny.decoder(config), Limits(**{"pages": 64, "page_tokens": 4, "max_sequences": 8, "token_budget": 32, **limits}))


def finish(served: Engine) -> None:
    for _ in range(10_000):
        if not served.busy:
            break
        served.step()
    assert not served.busy and len(served.scheduler.free) == served.pool.pages and not served.scheduler.padding


def alone(model, prompt, *, max_tokens, **options):
    return [step.token for step in generate(model, prompt, max_tokens=max_tokens, **options)]


def same_up_to_near_ties(model, prompt, got, wanted):
    """Greedy tokens are equal, or the first difference is between two logits that nearly tie."""
    for index, (one, other) in enumerate(zip(got, wanted, strict=True)):
        if one != other:
            cache = model.new_cache(max_len=64)
            logits = model(torch.tensor([[*prompt, *wanted[:index]]]), cache=cache)[0]
            assert abs(logits[one] - logits[other]) <= NEAR * logits.abs().max(), f"token {index}: {one} for {other}"
            return


@pytest.mark.parametrize("config", [tiny.GPT2, tiny.LLAMA])
@pytest.mark.parametrize("limits", [{}, {"chunk": 3}, {"pages": 14}, {"policy": "prefill_first"}, {"policy": "decode_first"}, {"reserve": "full"},
                                    {"static": True, "max_sequences": 3}, {"page_tokens": 1, "pages": 200}, {"page_tokens": 16}])  # fmt: skip
def test_batched_output_is_single_output(config, limits):
    """Every policy, chunks, preemption, pages of 1, 4 and 16: the text does not depend on who runs beside it."""
    served = engine(config, **limits)
    prompts = [tiny.ids(length, seed=length) for length in (1, 4, 5, 9, 13, 17, 3, 8)]
    requests = [served.submit(prompt, max_tokens=9 + number) for number, prompt in enumerate(prompts)]
    finish(served)
    for prompt, request in zip(prompts, requests, strict=True):
        assert request.finish == "length"
        same_up_to_near_ties(served.model, prompt, served.output(request), alone(served.model, prompt, max_tokens=request.max_tokens))
    assert (served.scheduler.preemptions > 0) == (limits == {"pages": 14})


def test_a_seed_belongs_to_its_request():
    """B036, B041: seeded draws are the same alone, beside greedy and unseeded neighbours, and at another place in the batch."""
    hot = Sampling(temperature=1.0)
    wanted = alone(engine().model, [5, 6, 7], max_tokens=12, sampling=hot, generator=torch.Generator().manual_seed(42))
    for place in (0, 1, 2):
        served, mine = engine(), None
        for number in range(3):
            if number == place:
                mine = served.submit([5, 6, 7], max_tokens=12, sampling=hot, seed=42)
            else:
                served.submit(tiny.ids(4, seed=number), max_tokens=9, sampling=(hot, Sampling())[number % 2])
        finish(served)
        assert served.output(mine) == wanted


def test_an_end_token_stops_one_request_and_is_checked_before_length():
    served = engine()
    wanted = alone(served.model, [1, 2, 3], max_tokens=8)
    last = wanted.index(wanted[5])
    stopped, other = served.submit([1, 2, 3], max_tokens=last + 1, eos=[wanted[5]]), served.submit([1, 2, 3], max_tokens=8)
    finish(served)
    assert (stopped.finish, served.output(stopped)) == ("stop", wanted[: last + 1])
    assert (other.finish, served.output(other)) == ("length", wanted)


def test_b089_b090_what_cannot_run_is_refused_alone():
    served = engine(pages=8)
    for prompt, tokens, words in (([], 4, "empty"), ([1], -1, "-1"), ([1] * 30, 4, "needs 33 cache slots .* the pool holds 32"), ([99], 4, "id 99"),
                                  (["a"], 1, "list of token ids"), ([1], 2.5, "2.5")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            served.submit(prompt, max_tokens=tokens)
    with pytest.raises(RequestError, match="needs 65 cache slots .* the model has 64 positions. Ask for at most 4 tokens"):
        engine().submit([1] * 61, max_tokens=5)
    none, one, good = served.submit([1, 2], max_tokens=0), served.submit([1, 2], max_tokens=1), served.submit([3, 4], max_tokens=5)
    assert none.finish == "length" and served.record(none).end_s is not None
    finish(served)
    assert [len(served.output(request)) for request in (none, one, good)] == [0, 1, 5]
    full = engine(pages=100).submit([1] * 64, max_tokens=1)
    assert full.max_tokens == 1  # a prompt as long as the context may give one token


def test_b091_cancelled_requests_give_their_pages_back():
    served = engine(pages=8, token_budget=16, max_sequences=3)
    first, second, third = (served.submit(tiny.ids(10, seed=number), max_tokens=2) for number in range(3))
    served.step()
    assert served.cancel(first) and served.cancel(third) and not served.cancel(first)
    finish(served)
    assert [request.finish for request in (first, second, third)] == ["cancelled", "length", "cancelled"]
    assert not served.cancel(second)


def test_a_request_without_a_token_to_choose_ends_alone(monkeypatch):
    """A row of NaN ends its own request with "error"; its neighbours write what they would have written."""
    served = engine()
    good, bad = served.submit([1, 2, 3], max_tokens=6), served.submit([4, 5], max_tokens=6)
    served.step()
    decode = served._decode

    def spoiled(plan):
        logits = decode(plan).clone()
        logits[plan.decode.index(bad)] = torch.nan
        return logits

    monkeypatch.setattr(served, "_decode", spoiled)
    events = served.step()
    monkeypatch.undo()
    assert [(event.request, event.finish) for event in events if event.finish] == [(bad, "error")]
    finish(served)
    assert served.output(good) == alone(served.model, [1, 2, 3], max_tokens=6) and "NaN" in served.record(bad).error


def test_a_fault_of_a_pass_frees_the_pages_and_is_raised(monkeypatch):
    served = engine()
    hit = [served.submit(tiny.ids(4, seed=number), max_tokens=6) for number in range(2)]
    served.step()
    monkeypatch.setattr(served, "_decode", lambda plan: (_ for _ in ()).throw(MemoryError("no room")))
    with pytest.raises(MemoryError, match="no room"):
        served.step()
    monkeypatch.undo()
    assert [request.finish for request in hit] == ["error", "error"] and "no room" in served.record(hit[0]).error
    later = served.submit([7, 8], max_tokens=3)
    finish(served)
    assert later.finish == "length"


def test_b018_ended_rows_of_a_static_batch_write_only_their_own_slots():
    """Padding rows are computed on, and no page of another sequence changes."""
    served = engine(static=True, max_sequences=2, pages=16)
    short, long = served.submit([1, 2, 3], max_tokens=2), served.submit([4, 5, 6], max_tokens=12)
    while short.finish is None:
        served.step()
    pages = list(long.pages)
    for _ in range(3):
        before = [tensor.clone() for tensor in served.pool.keys]
        written = long.cached
        plan_rows = len(served.scheduler.padding)
        served.step()
        changed = {int(page) for tensor, old in zip(served.pool.keys, before, strict=True) for page in (tensor != old).flatten(1).any(1).nonzero()}
        assert plan_rows == 1 and changed <= {pages[written // 4]}  # the ended row writes what was there already
    finish(served)
    assert served.output(long) == alone(served.model, [4, 5, 6], max_tokens=12)


def test_a_pass_holds_no_more_than_the_limits_say(monkeypatch):
    """B095: sequences and tokens of every pass, seen from inside it."""
    seen = []
    real = PagedRows.require
    monkeypatch.setattr(
        PagedRows,
        "require",
        lambda self, *a, batch, new_tokens, **k: seen.append((batch, new_tokens)) or real(self, *a, batch=batch, new_tokens=new_tokens, **k),
    )
    served = engine(max_sequences=3, token_budget=7, chunk=5)
    for number in range(7):
        served.submit(tiny.ids(11, seed=number), max_tokens=6)
    finish(served)
    assert max(batch for batch, _ in seen) == 3 and max(tokens for _, tokens in seen) == 5
    assert served.pool.page_tokens == 4 and served.pool.pages == 64


def test_a_workload_is_served_when_it_is_due_and_its_record_adds_up():
    served = engine(pages=40)
    arrivals = [Arrival(at_s=0.02 * number, prompt_tokens=4 + number, output_tokens=5 + number) for number in range(6)]
    run = served.run(arrivals, seed=3)
    assert [record.output_tokens for record in run.records] == [5, 6, 7, 8, 9, 10] and run.summary.completed == 6
    for record, arrival in zip(run.records, arrivals, strict=True):
        assert record.sent_s >= arrival.at_s == pytest.approx(record.scheduled_s) and record.single_tokens
        assert record.sent_s <= record.token_s[0] <= record.token_s[-1] == record.end_s
    assert sum(run.occupancy) == sum(record.output_tokens - 1 for record in run.records)
    assert run.summary.occupancy == sum(run.occupancy) / len(run.occupancy) and 0 < run.summary.kv_used_fraction <= 1
    assert run.recomputed_tokens == 0 and len(served.scheduler.free) == 40


def test_a_budget_ends_a_run_and_cancels_what_is_left():
    served = engine()
    run = served.run([Arrival(at_s=0, prompt_tokens=4, output_tokens=50), Arrival(at_s=1000, prompt_tokens=4, output_tokens=50)], budget_s=0.05)
    assert {record.finish for record in run.records} <= {"cancelled", "length"} and len(run.records) == 1
    assert not served.busy and len(served.scheduler.free) == 64


def test_the_pool_is_refused_where_it_does_not_fit():
    with pytest.raises(ValueError, match="a pool of 1,000,000,000,000 pages of 16 tokens needs .* is free"):
        Engine(tiny.decoder(tiny.LLAMA), Limits(pages=10**12))
