"""Kind 6 of the faults the course guards against: who runs in a pass. Pages are conserved, nothing waits for ever, every knob counts."""

import random
from copy import deepcopy

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from decodelab.serving.scheduler import Limits, Request, RequestError, Scheduler


def request(name, prompt, new, **rest):
    return Request(id=name, prompt_tokens=prompt, max_tokens=new, **rest)


def scheduler(*requests, pages=64, page_tokens=4, **knobs):
    made = Scheduler(Limits(pages=pages, page_tokens=page_tokens, **knobs))
    for one in requests:
        made.submit(one)
    return made


def finish(made, *, passes=500):
    """Every plan until nothing is left to do."""
    plans = []
    while made.busy:
        plans.append(made.plan())
        check(made, plans[-1])
        made.done(plans[-1])
        assert len(plans) <= passes, "it never ends"
    return plans


def check(made, plan):
    """What holds in every pass: no page in two hands, none lost, within the limits, nobody planned twice, and all decode who can, or none."""
    limits = made.limits
    held = [page for one in (*made.running, *made.padding, *made.waiting) for page in one.pages]
    assert sorted(held + made.free) == list(range(limits.pages))
    members = [chunk.request for chunk in plan.prefill] + list(plan.decode) + list(plan.padding)
    assert len(members) == len({id(one) for one in members}) <= limits.max_sequences
    assert len(made.running) + len(made.padding) <= limits.max_sequences
    assert plan.prefill_tokens + len(plan.decode) + len(plan.padding) <= limits.token_budget
    assert all(1 <= chunk.tokens <= (limits.chunk or limits.token_budget) and chunk.start == chunk.request.cached for chunk in plan.prefill)
    assert all(len(one.pages) * limits.page_tokens >= one.tokens for one in plan.decode)
    assert not plan.decode or list(plan.decode) == [one for one in made.running if one.decodes]
    assert limits.policy == "mixed" and not limits.static or not (plan.prefill and plan.decode)
    assert all(len(chunk.request.pages) * limits.page_tokens >= chunk.start + chunk.tokens for chunk in plan.prefill)


# ---- admission -------------------------------------------------------------------------------------------------------


def test_what_never_fits_is_refused_at_once_and_holds_up_nobody():
    """B084: 4 pages of 4; a prompt of 20 is refused with its size and the way out, the prompt of 3 behind it finishes."""
    made = scheduler(pages=4)
    with pytest.raises(RequestError, match=r"request big needs 23 cache slots \(prompt 20 \+ 4 new - 1\) but the pool holds 16. Shorten the prompt"):
        made.submit(request("big", 20, 4))
    with pytest.raises(RequestError, match="Ask for at most 7 tokens"):
        made.submit(request("long", 10, 8))
    small = request("small", 3, 4)
    made.submit(small)
    finish(made)
    assert small.finish == "length" and small.generated == 4 and len(made.free) == 4


def test_work_that_cannot_begin_raises():
    """B084: requests wait, none runs, none was admitted: a fault that would else hang for ever."""
    made = scheduler(request("a", 3, 4), pages=4)
    made.free.clear()
    with pytest.raises(RuntimeError, match="1 requests wait, 0 run and nothing can be computed with 0 free pages"):
        made.plan()


def test_admission_counts_the_whole_prompt_and_not_its_first_chunk():
    """B086: 4 pages of 4, chunk 4, two prompts of 12 with 4 new: one after the other, 24 tokens prefilled, nothing preempted."""
    pair = [request(name, 12, 4) for name in "ab"]
    made = scheduler(*pair, pages=4, chunk=4)
    plans = finish(made)
    assert sum(plan.prefill_tokens for plan in plans) == 24 == sum(one.prefilled for one in pair) and made.preemptions == 0
    begun = [chunk.request.id for plan in plans for chunk in plan.prefill]
    assert begun == ["a"] * 3 + ["b"] * 3 and len(made.free) == 4


def test_nobody_overtakes_a_large_request():
    """The head of the queue waits for its pages; the small one behind it waits too."""
    made = scheduler(request("a", 8, 8), request("large", 12, 2), request("small", 1, 1), pages=4)
    order = [chunk.request.id for plan in finish(made) for chunk in plan.prefill]
    assert order == ["a", "large", "small"]


@pytest.mark.parametrize(("prompt", "new", "said"), [(0, 4, "empty prompt"), (4, -1, "asks for -1 tokens"), (9, 1, "needs 9 cache slots"), (8, 2, "Ask for at most 1")])  # fmt: skip
def test_requests_that_cannot_be(prompt, new, said):
    """B089, B090: refused alone; a good request after them completes."""
    made, good = scheduler(max_context=8), request("good", 2, 2)
    with pytest.raises(RequestError, match=said):
        made.submit(request("bad", prompt, new))
    made.submit(good)
    finish(made)
    assert good.finish == "length" and made.held_pages == 0


@pytest.mark.parametrize(("prompt", "new", "passes", "generated"), [(8, 0, 0, 0), (8, 1, 1, 1), (7, 2, 2, 2)])
def test_the_ends_of_max_tokens_and_of_the_context(prompt, new, passes, generated):
    """B090: 0 tokens end at once and hold no page; 1 is the prefill's own; a prompt as long as the context gives exactly 1."""
    made, one = scheduler(max_context=8), request("a", prompt, new)
    made.submit(one)
    assert len(finish(made)) == passes and one.generated == generated and one.finish == "length" and made.held_pages == 0


# ---- policies --------------------------------------------------------------------------------------------------------


def gaps(marks):
    """Distances in passes between the passes that are marked."""
    at = [number for number, mark in enumerate(marks) if mark]
    return [after - before for before, after in zip(at, at[1:], strict=False)]


@pytest.mark.parametrize("longest_run", [1, 2, 4])
@pytest.mark.parametrize("policy", ["prefill_first", "decode_first", "mixed"])
def test_a_stream_is_never_held_up_for_long(policy, longest_run):
    """B088: a new 64-token prompt in each pass, budget 16: tokens of the stream at most r + 1 passes apart, and prompts move on."""
    stream = request("stream", 4, 60)
    made = scheduler(stream, pages=2000, max_sequences=16, token_budget=16, policy=policy, longest_run=longest_run)
    plans = []
    while stream.finish is None:
        made.submit(request(f"p{len(plans)}", 64, 1))
        plans.append(made.plan())
        check(made, plans[-1])
        made.done(plans[-1])
    waits = gaps([stream in plan.decode for plan in plans])
    prefills = gaps([plan.prefill_tokens > 0 for plan in plans])
    assert max(waits) == {"prefill_first": longest_run + 1, "decode_first": 2, "mixed": 1}[policy]
    assert max(prefills) == {"prefill_first": 2, "decode_first": longest_run + 1, "mixed": 1}[policy]


@pytest.mark.parametrize("longest_run", [1, 3])
@pytest.mark.parametrize("policy", ["prefill_first", "decode_first", "mixed"])
def test_a_prompt_is_never_starved_by_decoders(policy, longest_run):
    """B088, the mirror: 8 streams decode for long; a prompt of 64 in chunks of 16 has its first token within 4 * (r + 1) passes."""
    streams = [request(f"s{number}", 2, 200) for number in range(8)]
    made = scheduler(*streams, pages=2000, max_sequences=16, token_budget=24, chunk=16, policy=policy, longest_run=longest_run)
    while not all(one.decodes for one in streams):
        made.done(made.plan())
    prompt, passes = request("prompt", 64, 1), 0
    made.submit(prompt)
    while prompt.finish is None:
        made.done(made.plan())
        passes += 1
    assert passes == {"mixed": 4, "decode_first": 4 * (longest_run + 1), "prefill_first": 4 + 3 // longest_run}[policy]


def test_mixed_decodes_everyone_and_fills_the_budget_with_chunks():
    made = scheduler(*(request(f"s{number}", 1, 50) for number in range(3)), max_sequences=8, token_budget=10)
    made.done(made.plan())
    made.submit(request("prompt", 20, 1))
    shapes = [(len(plan.decode), plan.prefill_tokens) for plan in finish(made)[:4]]
    assert shapes == [(3, 7), (3, 7), (3, 6), (3, 0)]


# ---- static batching -------------------------------------------------------------------------------------------------


def test_a_static_batch_computes_its_padding_until_the_last_row_ends():
    """Lengths 2, 4, 6 of 2 tokens in: 5 decode passes of 3 rows; nobody enters; the ended rows hold their pages to the end."""
    rows = [request(f"r{new}", 2, new) for new in (2, 4, 6)]
    late = request("late", 2, 2)
    made = scheduler(*rows, static=True, pages=20)
    seen, held = [], []
    for number in range(7):
        plan = made.plan()
        check(made, plan)
        seen.append((plan.prefill_tokens, len(plan.decode), len(plan.padding)))
        held.append(made.held_pages)
        made.done(plan)
        if number == 0:
            made.submit(late)
    assert seen == [(6, 0, 0), (0, 3, 0), (0, 2, 1), (0, 2, 1), (0, 1, 2), (0, 1, 2), (2, 0, 0)]
    assert held == [5] * 6 + [1] and not made.padding  # 3, 5 and 7 slots: 1 + 2 + 2 pages
    finish(made)
    assert late.finish == "length" and len(made.free) == 20


def test_a_static_batch_decodes_only_when_all_its_prompts_are_read():
    made = scheduler(request("long", 20, 2), request("short", 1, 3), static=True, token_budget=256, chunk=8)
    plans = finish(made)
    assert [plan.prefill_tokens for plan in plans] == [9, 8, 4, 0, 0] and [len(plan.decode) for plan in plans] == [0, 0, 0, 2, 1]
    assert made.preemptions == 0 and made.held_pages == 0


# ---- pages -----------------------------------------------------------------------------------------------------------


def test_equal_prompts_do_not_share_pages_and_cannot_free_them_twice():
    """B020: 8 pages of 4; A and B of 8 + 2 tokens, admitted together; A ends, B goes on, a second end of B changes nothing."""
    a, b = request("a", 8, 2), request("b", 8, 4)
    made = scheduler(a, b, pages=8)
    made.done(made.plan())
    assert not set(a.pages) & set(b.pages)
    made.done(made.plan())
    kept = list(b.pages)
    assert a.finish == "length" and a.pages == [] and b.pages == kept and len(made.free) == 8 - len(kept)
    finish(made)
    assert sorted(made.free) == list(range(8)) and b.finish == "length"
    assert made.cancel(b) is False and b.finish == "length" and sorted(made.free) == list(range(8))


def test_preemption_takes_from_the_newest_and_computes_its_tokens_again():
    """3 pages of 4, prompts of 4 with 5 new (8 slots each): B gives up its page for A and starts again, before C, with what it had written."""
    a, b, c = request("a", 4, 5), request("b", 4, 5), request("c", 8, 1)
    made = scheduler(a, b, c, pages=3)
    plans = finish(made)
    assert [plan.preempted for plan in plans if plan.preempted] == [(b,)] and (a.preemptions, b.preemptions, made.preemptions) == (0, 1, 1)
    assert [chunk.request for plan in plans for chunk in plan.prefill] == [a, b, b, c]
    assert b.prefilled == 4 + 4 + 1 and a.prefilled == 4 and a.generated == b.generated == 5 and len(made.free) == 3


@pytest.mark.parametrize("policy", ["mixed", "decode_first", "prefill_first"])
def test_a_decoder_that_gives_up_its_own_pages_leaves_the_pass_to_the_prompt_before_it(policy):
    """A long prompt is read in chunks; the short request behind it needs a page and there is none. The pass must not be empty."""
    made = scheduler(request("long", 8, 2), request("short", 4, 4), pages=3, token_budget=256, chunk=2, policy=policy, longest_run=1)
    assert any(plan.preempted and plan.prefill and not plan.decode for plan in finish(made))
    assert len(made.free) == 3


@pytest.mark.parametrize("policy", ["mixed", "decode_first", "prefill_first"])
def test_what_arrives_with_its_cache_is_not_prefilled(policy):
    """Disaggregation: K and V of the prompt come from elsewhere, the first token too; pages for them are found here."""
    made = scheduler(request("moved", 8, 4, generated=1, arrived_tokens=8), policy=policy)
    plans = finish(made)
    assert [plan.prefill_tokens for plan in plans] == [0, 0, 0] and made.held_pages == 0
    late = request("late", 8, 3, generated=1, arrived_tokens=8)
    made.submit(request("here", 4, 5))
    made.done(made.plan())
    made.submit(late)
    finish(made)
    assert late.prefilled == 0 and late.generated == 3


def test_what_arrives_joins_the_next_decode_pass():
    """The pages are there and nothing is to be read: no pass is lost."""
    first, late = (request(name, 8, 5, generated=1, arrived_tokens=8) for name in ("first", "late"))
    made = scheduler(first)
    made.done(made.plan())
    made.submit(late)
    assert made.plan().decode == (first, late)


def test_what_arrived_and_is_preempted_is_prefilled_here():
    a, b = (request(name, 4, 5, generated=1, arrived_tokens=4) for name in "ab")
    made = scheduler(a, b, pages=7, page_tokens=2)
    finish(made)
    assert (a.prefilled, b.prefilled, b.preemptions) == (0, 4 + 3, 1) and a.generated == b.generated == 5 and len(made.free) == 7


def test_reserve_full_never_preempts():
    """The same crowd, once with pages for the prompt and once for all it may write."""
    seen = {}
    for reserve in ("prompt", "full"):
        crowd = [request(str(number), 3, 9) for number in range(6)]
        made = scheduler(*crowd, pages=8, reserve=reserve)
        finish(made)
        seen[reserve] = made.preemptions
    assert seen["full"] == 0 < seen["prompt"]


# ---- cancelling ------------------------------------------------------------------------------------------------------


def test_cancelling_at_every_moment():
    """B091: 8 pages of 4, three of 10 + 2 tokens: running, still waiting, once more, and during its last pass."""
    one, two, three = (request(name, 10, 2) for name in ("one", "two", "three"))
    made = scheduler(one, two, three, pages=8)
    made.done(made.plan())
    assert one in made.running and three in made.waiting
    assert made.cancel(one) and made.cancel(three) and not made.cancel(one)
    plan = made.plan()
    assert plan.decode == (two,) and two.left == 1  # its last
    assert made.cancel(two)
    assert made.done(plan) == [] and two.generated == 1
    assert [item.finish for item in (one, two, three)] == ["cancelled"] * 3
    assert len(made.free) == 8 and not made.busy and not any(item.pages for item in (one, two, three))


def test_cancelling_before_it_was_ever_planned_and_between_chunks():
    first, second = request("first", 12, 4), request("second", 2, 2)
    made = scheduler(first, second, token_budget=256, chunk=4)
    assert made.cancel(second, finish="error") and second.finish == "error"
    made.done(made.plan())
    plan = made.plan()
    assert first.cached == 4 and made.cancel(first)
    assert made.done(plan) == [] and first.cached == 4 and made.held_pages == 0 and not made.busy


def test_a_stop_token_ends_a_request_early():
    one, two = request("one", 2, 9), request("two", 2, 3)
    made = scheduler(one, two)
    made.done(made.plan())
    assert made.done(made.plan(), stopped={one}) == [one] and (one.finish, one.generated) == ("stop", 2)
    finish(made)
    assert two.finish == "length" and made.held_pages == 0


# ---- knobs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("knobs", "chunks", "pages_each"),
    [
        ({}, [10] * 6, 3),
        ({"page_tokens": 3}, [10] * 6, 4),
        ({"pages": 7}, [10] * 2, 3),
        ({"chunk": 7}, [7] * 6, 3),
        ({"token_budget": 23}, [10, 10, 3], 3),
        ({"max_sequences": 5}, [10] * 5, 3),
        ({"reserve": "full"}, [10] * 6, 4),
        ({"static": True}, [10] * 6, 4),
    ],
    ids=str,
)
def test_every_knob_is_read_back_from_inside_a_plan(knobs, chunks, pages_each):
    """B095: six prompts of 10 with 4 new (13 slots), an unusual value of one knob, and what the first plan shows."""
    made = scheduler(*(request(str(number), 10, 4) for number in range(6)), **{"max_sequences": 8, "token_budget": 200, **knobs})
    plan = made.plan()
    check(made, plan)
    assert [chunk.tokens for chunk in plan.prefill] == chunks and [len(chunk.request.pages) for chunk in plan.prefill] == [pages_each] * len(chunks)
    made.done(plan)
    assert all(sum(one in plan.decode for plan in finish(made)) == 3 for one in list(made.running)[:1])  # max_tokens - 1 decode passes


@pytest.mark.parametrize(
    ("knobs", "said"),
    [
        ({"pages": 0}, "pages is 0; it must be a whole number of at least 1"),
        ({"chunk": 0}, "chunk is 0"),
        ({"page_tokens": 2.5}, "page_tokens is 2.5"),
        ({"token_budget": 100}, "a token budget of 100 cannot decode 256 sequences at once"),
        ({"policy": "fifo"}, "policy is 'fifo'; use one of mixed, decode_first, prefill_first"),
        ({"reserve": "half"}, "reserve is 'half'; use one of prompt, full"),
    ],
)
def test_limits_that_cannot_be(knobs, said):
    with pytest.raises(ValueError, match=said):
        Limits(**{"pages": 4, **knobs})


# ---- random histories ------------------------------------------------------------------------------------------------

LIMITS = st.builds(
    Limits, pages=st.integers(5, 24), page_tokens=st.integers(1, 5), max_sequences=st.integers(1, 5), token_budget=st.integers(5, 16),
    chunk=st.none() | st.integers(1, 6), max_context=st.none() | st.integers(15, 40), policy=st.sampled_from(["mixed", "decode_first", "prefill_first"]),
    longest_run=st.integers(1, 3), reserve=st.sampled_from(["prompt", "prompt", "full"]), static=st.sampled_from([False, False, False, True])
)  # fmt: skip
SIZES = st.lists(st.tuples(st.integers(1, 14), st.integers(0, 20), st.booleans()), min_size=2, max_size=10)


def crowd(limits, sizes):
    """Requests of these prompts and answers; some come with their K and V, as from a prefill device."""
    moved = [{"generated": 1, "arrived_tokens": prompt} if arrives and new > 1 and not limits.static else {} for prompt, new, arrives in sizes]
    return [request(str(number), prompt, new, **rest) for number, ((prompt, new, _), rest) in enumerate(zip(sizes, moved, strict=True))]


def submitted(made, one):
    """Whether a request was accepted; where not, it could never fit."""
    limits, slots = made.limits, one.prompt_tokens + max(1, one.max_tokens) - 1
    try:
        made.submit(one)
    except RequestError:
        assert slots > min(limits.max_context or slots, limits.pages * limits.page_tokens)
        return False
    assert slots <= min(limits.max_context or slots, limits.pages * limits.page_tokens)
    return True


def live(limits, sizes, rng):
    """One history: requests come, are cancelled and stopped at any moment. Returns how often each accepted one ended."""
    made, coming, ends = Scheduler(limits), crowd(limits, sizes), {}
    passes = 0

    def disturb():
        while coming and rng.random() < 0.6:
            one = coming.pop()
            if submitted(made, one):
                ends[one] = int(one.finish is not None)
        if ends and rng.random() < 0.03:
            one = rng.choice(list(ends))
            ends[one] += made.cancel(one)

    while coming or made.busy:
        disturb()
        plan = made.plan()
        check(made, plan)
        disturb()
        tokens = {one: one.generated for one in made.running}
        ended = made.done(plan, stopped=[one for one in plan.decode if one.finish is None and rng.random() < 0.01])
        assert all(0 <= one.generated - before <= 1 for one, before in tokens.items())
        for one in ended:
            ends[one] += 1
        passes += 1
        assert passes < 2000, "it never ends"
    assert sorted(made.free) == list(range(limits.pages)) and not made.padding and made.preemptions == sum(one.preemptions for one in ends)
    for one, times in ends.items():
        assert times == 1 and one.pages == [] and (one.generated == one.max_tokens if one.finish == "length" else one.generated <= one.max_tokens)


@settings(max_examples=500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(limits=LIMITS, sizes=SIZES, seed=st.integers(0, 2**32))
def test_nothing_is_lost_in_10_000_random_histories(limits, sizes, seed):
    """Twenty histories of each crowd: pages conserved and disjoint, limits kept, every accepted request ends, once."""
    for number in range(20):
        live(limits, sizes, random.Random(seed + number))


def state(made):
    rows = [
        [(one.id, one.generated, one.cached, len(one.pages), one.preemptions) for one in rows] for rows in (made.running, made.waiting, made.padding)
    ]
    return rows, len(made.free), made.run, made.preemptions


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(limits=LIMITS, sizes=SIZES, seed=st.integers(0, 2**32))
def test_a_quiet_stretch_is_the_same_number_of_passes(limits, sizes, seed):
    """`skip` leaves what as many plans and dones leave: who runs and waits, with how many pages, and who ended in which order."""
    made, rng = Scheduler(limits), random.Random(seed)
    for one in crowd(limits, sizes):
        submitted(made, one)
    while made.busy:
        quiet = made.quiet_steps()
        if quiet:
            steps, twin, ended = rng.randint(1, quiet), deepcopy(made), []
            for number in range(steps):
                plan = twin.plan()
                assert list(plan.decode) == twin.running and not plan.prefill and not plan.preempted and list(plan.padding) == twin.padding
                ended = twin.done(plan)
                assert number == steps - 1 or not ended
            assert [one.id for one in made.skip(steps)] == [one.id for one in ended]
            assert state(made) == state(twin)
        else:
            made.done(made.plan())


def test_quiet_stretches_are_long():
    """One request alone decodes in a single stretch; a waiting one that could start, or a page that lacks, ends it."""
    alone = scheduler(request("a", 4, 100))
    alone.done(alone.plan())
    assert alone.quiet_steps() == 99
    alone.submit(request("b", 4, 4))
    assert alone.quiet_steps() == 0
    tight = scheduler(request("a", 4, 9), request("b", 4, 9), pages=4)
    tight.done(tight.plan())
    assert tight.quiet_steps() == 4  # both fill their second page; then one must give way
    tight.skip(4)
    assert tight.quiet_steps() == 0 and tight.plan().preempted
