"""Speculative decoding: the text of the target whatever the draft is, the rounds' counts, and both caches after a rollback."""

from collections import Counter
from dataclasses import replace
from itertools import product

import pytest
import torch

from decodelab.decoder.cache import ContextError
from decodelab.decoder.generate import decode_step, generate, prefill
from decodelab.decoder.model import Decoder
from decodelab.decoder.sampling import GREEDY, LogitsError, Sampling, probabilities
from decodelab.decoder.speculative import (
    DraftModel,
    PromptLookup,
    Proposal,
    Round,
    Terms,
    acceptance,
    clipped,
    residual,
    shared_ids,
    speculate,
    verify,
)
from tiny import GPT2, LLAMA, decoder, ids

UNTIED = replace(GPT2, name="untied-gpt2", tied_embeddings=False)  # a tied one goes on repeating its last token, which hides a wrong cache
SHAPES = pytest.mark.parametrize("config", [UNTIED, LLAMA], ids=["gpt2", "llama"])
HOT = Sampling(temperature=1.0)
P, Q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.3, 0.4, 0.3])
PROMPT = ids(10)


def varied(config, *, seed=11):
    """A tiny decoder; of this seed greedy text goes through a dozen tokens, where others settle on one and hide a wrong cache."""
    return decoder(config, seed=seed)


class Scripted:
    """Proposes what the script holds for each round, and keeps what it was asked. An end token does not stop it."""

    def __init__(self, *blocks, q=None):
        self.blocks, self.q, self.asked = list(blocks), q, []

    def start(self, target, *, slots):
        self.slots = slots

    def propose(self, ids, k, terms):
        self.asked.append(k)
        return Proposal((self.blocks.pop(0) if self.blocks else [])[:k], self.q)


class Now:
    """A drafter whose K changes from round to round."""

    def __init__(self, draft, *ks):
        self.draft, self.ks, self.start = draft, list(ks), draft.start

    def propose(self, ids, k, terms):
        return self.draft.propose(ids, min(k, self.ks.pop(0)) if self.ks else k, terms)


class Compared(DraftModel):
    """Holds each proposal against that of a draft which reads the whole text anew, with the same random numbers."""

    rounds = 0

    def propose(self, ids, k, terms):
        twin = DraftModel(self.model)
        twin.start(self.model, slots=64)
        state = terms.generator.get_state()
        fresh = twin.propose(ids, k, terms)
        terms.generator.set_state(state)
        proposal = super().propose(ids, k, terms)
        assert proposal.tokens == fresh.tokens and (proposal.q is None) == (not proposal.tokens)
        if proposal.tokens:
            torch.testing.assert_close(proposal.q, fresh.q, atol=1e-4, rtol=1e-3)
        assert self.cache.length == len(self.read) and (not k or self.cache.length == len(ids) + k - 1)
        self.rounds += 1
        return proposal


def plain(target, prompt=PROMPT, *, new=24, **options):
    return [step.token for step in generate(target, prompt, max_tokens=new, **options)]


def run(target, draft, *, prompt=PROMPT, new=24, k=4, **options):
    return list(speculate(target, prompt, max_tokens=new, draft=draft, k=k, **options))


def text(rounds):
    return [token for each in rounds for token in each.tokens]


def terms(**changes):
    given = {"prompt_tokens": 0, "vocab_size": 64, "sampling": GREEDY, "generator": None, "eos": frozenset(), "allowed": None}
    return Terms(**{**given, **changes})


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def near(counts, p, sigmas=3):
    """Whether counts agree with probabilities p within so many standard deviations, each."""
    total = counts.sum()
    return bool(((counts / total - p).abs() <= sigmas * (p * (1 - p) / total).sqrt() + 1e-9).all())


# ---- the rule --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("draft", "accepts"), [("sampled", 0.7), ("fixed", 0.3)])
def test_the_rule_writes_the_targets_distribution(draft, accepts):
    """B032, B033, cross-check 3: 100,000 rounds; a draft drawn from q, and one that always proposes token 1, whose q is one-hot."""
    generator, rounds = seeded(3), 100_000
    drafts = torch.multinomial(Q.expand(rounds, -1), 1, generator=generator) if draft == "sampled" else torch.ones((rounds, 1), dtype=torch.long)
    q = Q.expand(rounds, 1, -1) if draft == "sampled" else None
    accepted, token = verify(P.expand(rounds, 2, -1), q, drafts, generator=generator)
    first = torch.where(accepted == 1, drafts[:, 0], token)
    assert near(first.bincount(minlength=3), P)
    assert near(accepted.bincount(minlength=2), torch.tensor([1 - accepts, accepts]))
    assert near(token[accepted == 1].bincount(minlength=3), P)  # behind the last draft the target's own distribution
    rejected = token[accepted == 0]
    if draft == "sampled":
        assert set(rejected.tolist()) == {0}  # the residual is [1, 0, 0]
    else:
        assert near(rejected.bincount(minlength=3), torch.tensor([6 / 7, 0, 1 / 7]))


def test_tokens_per_round_of_the_rule():
    """B033: at acceptance 0.7, K = 4 emits 2.7731 tokens a round, and each place of the block is distributed as p."""
    rounds, generator = 100_000, seeded(2)
    drafts = torch.multinomial(Q.expand(rounds, -1), 4, replacement=True, generator=generator)
    accepted, token = verify(P.expand(rounds, 5, -1), Q.expand(rounds, 4, -1), drafts, generator=generator)
    per_place = torch.tensor([0.3 * 0.7**n for n in range(4)] + [0.7**4])
    assert near(accepted.bincount(minlength=5), per_place)
    assert float((accepted + 1).double().mean()) == pytest.approx(2.7731, abs=0.02)
    second = torch.where(accepted >= 2, drafts[:, 1], token)[accepted >= 1]  # emitted wherever the first draft was kept
    assert near(second.bincount(minlength=3), P)


def test_a_rule_that_rejects_every_row_apart():
    """Rows of one batch end at different places, each with its own residual; certain cases, so without a random outcome."""
    p = torch.zeros(3, 3, 4)
    p[0, [0, 1, 2], [1, 2, 3]] = 1.0  # accepts 1, 2 and gives 3
    p[1, [0, 1, 2], [1, 0, 3]] = 1.0  # rejects the second draft, gives 0
    p[2, [0, 1, 2], [3, 0, 0]] = 1.0  # rejects the first draft, gives 3
    accepted, token = verify(p, None, torch.tensor([[1, 2]] * 3), generator=seeded())
    assert accepted.tolist() == [2, 1, 0] and token.tolist() == [3, 0, 3]


def test_residual():
    """B033; where rounding leaves nothing of p - q, it is p."""
    assert residual(P, Q).tolist() == pytest.approx([1, 0, 0])
    assert residual(torch.tensor([0.5, 0.4, 0.1]), torch.tensor([0.2, 0.2, 0.6])).tolist() == pytest.approx([0.6, 0.4, 0])
    assert residual(P, P * 1.001).tolist() == pytest.approx(P.tolist()) and residual(P, torch.zeros(3)).tolist() == pytest.approx(P.tolist())


def test_a_greedy_target_follows_itself_and_draws_nothing():
    """B032: target {a: .3, b: .5}; a draft that prefers a is overruled by b, and no generator moves."""
    target, generator = varied(LLAMA), seeded(3)
    before, best = generator.get_state(), plain(target)
    wrong = [[(best[1] + 1) % 64] * 3]
    rounds = run(target, Scripted(*wrong, q=torch.full((3, 64), 1 / 64)), generator=generator)
    assert text(rounds) == best and (rounds[1].proposed, rounds[1].accepted, rounds[1].emitted, rounds[1].tested) == (3, 0, 1, 1)
    run(target, DraftModel(varied(LLAMA, seed=5)), sampling=Sampling(temperature=1, top_k=1), generator=generator)
    run(target, DraftModel(varied(LLAMA, seed=5)), sampling=GREEDY, generator=generator)
    assert torch.equal(generator.get_state(), before)


# ---- the text --------------------------------------------------------------------------------------------------------


@SHAPES
@pytest.mark.parametrize("k", range(1, 9))
def test_a_draft_that_is_the_target_is_always_right(config, k):
    """Cross-check 3, B011, B012: acceptance 100 % in every round, the text of plain greedy, ceil(23 / (K + 1)) rounds after the prefill."""
    target = varied(config)
    best = plain(target)
    assert len(set(best)) > 8
    rounds = run(target, DraftModel(target), k=k)
    assert text(rounds) == best and acceptance(rounds) == 1.0
    assert all(each.accepted == each.proposed and each.emitted == each.proposed + 1 for each in rounds)
    assert [each.emitted for each in rounds] == [1, *[k + 1] * (23 // (k + 1)), *[23 % (k + 1)] * (23 % (k + 1) > 0)]
    assert [each.finish for each in rounds] == [None] * (len(rounds) - 1) + ["length"]
    assert [(each.index, each.phase) for each in rounds[:3]] == [(0, "prefill"), (1, "decode"), (2, "decode")]


@SHAPES
@pytest.mark.parametrize(
    "draft", [lambda: DraftModel(varied(LLAMA, seed=7)), PromptLookup, lambda: Scripted([1, 2], [], [3])], ids=["model", "lookup", "script"]
)
def test_a_poor_draft_changes_no_greedy_text(config, draft):
    target = varied(config)
    assert text(run(target, draft())) == plain(target)


def test_a_partly_right_draft():
    """Drafts right at some places only: the kept prefix, the target's token, and what comes after stay the target's."""
    target = varied(UNTIED)
    best = plain(target)
    blocks = [[best[1], best[2], 63 - best[3], best[4]], [63 - best[4]], [best[5], best[6], best[7], best[8]]]
    rounds = run(target, Scripted(*blocks))
    assert text(rounds) == best
    assert [(each.proposed, each.accepted, each.emitted, each.tested) for each in rounds[:4]] == [
        (0, 0, 1, 0),
        (4, 2, 3, 3),
        (1, 0, 1, 1),
        (4, 4, 5, 4),
    ]
    assert acceptance(rounds) == 6 / 8  # tested: 3 + 1 + 4
    assert [each.context for each in rounds[:4]] == [10, 13, 14, 19]


@SHAPES
@pytest.mark.parametrize("k", range(1, 9))
def test_an_end_token_in_a_block_ends_it(config, k):
    """B027: the token of each step declared the end in turn, so that it falls on every place of a block; text, reason and cache of plain greedy."""
    target = varied(config)
    best = plain(target)
    for at in (0, 2, 3, 5, 9):
        end = best[at]
        cache, own = (target.new_cache(max_len=64) for _ in range(2))
        rounds, expected = (
            run(target, DraftModel(target), k=k, eos=[end], cache=cache),
            list(generate(target, PROMPT, max_tokens=24, eos=[end], cache=own)),
        )
        assert text(rounds) == [step.token for step in expected] == best[: best.index(end) + 1]
        assert rounds[-1].finish == expected[-1].finish == "stop" and cache.length == own.length == rounds[-1].context
        assert acceptance(rounds) in (1.0, None)


def test_tokens_behind_an_accepted_end_do_not_count():
    """B027: block [d1, d2, END, d4, d5, bonus] commits three tokens, not six; a target's own end token ends too; stop comes before length."""
    target = varied(LLAMA)
    best = plain(target)
    assert best[3] not in best[:3]
    (_, last) = run(target, Scripted(best[1:6]), k=5, eos=best[3])
    assert (last.tokens, last.proposed, last.accepted, last.emitted, last.tested, last.finish) == (tuple(best[1:4]), 5, 3, 3, 3, "stop")
    assert last.context == 13
    (_, last) = run(target, Scripted([*best[1:3], 63 - best[3]]), k=5, eos=best[3])
    assert (last.accepted, last.emitted, last.tested, last.finish) == (2, 3, 3, "stop")
    (*_, last) = run(target, Scripted(best[1:4]), k=5, new=4, eos=best[3])
    assert (last.emitted, last.finish) == (3, "stop")


@pytest.mark.parametrize("new", [0, 1, 2, 6, 7])
def test_exactly_as_many_tokens_as_asked(new):
    """B028: with a cache of just prompt + new - 1 slots."""
    target = varied(LLAMA)
    best = plain(target)
    for k in (0, 1, 4, 8):
        cache = target.new_cache(max_len=10 + max(new, 1) - 1)
        rounds = run(target, DraftModel(target), new=new, k=k, cache=cache)
        assert text(rounds) == best[:new] and (not rounds or rounds[-1].finish == "length")
        assert cache.length == (10 + new - 1 if new else 0)


def test_k_is_clipped():
    """B028: min(K, remaining - 1, capacity - length - 1), never below 0; what the drafter was asked for in each round."""
    assert [clipped(4, remaining=remaining, room=room) for remaining, room in ((9, 99), (3, 99), (1, 99), (9, 3), (9, 1), (9, 0))] == [
        4,
        2,
        0,
        2,
        0,
        0,
    ]
    target = varied(LLAMA)
    best = plain(target)
    script = Scripted(best[1:5], best[6:10])
    assert text(run(target, script, new=8)) == best[:8] and script.asked == [4, 1] and script.slots == 17
    script = Scripted()
    assert text(run(target, script, new=4)) == best[:4] and script.asked == [2, 1, 0]  # nothing drafted: plain decoding


def test_to_the_last_position_of_the_model():
    target = varied(UNTIED)
    rounds = run(target, DraftModel(target), new=55, k=7)
    assert text(rounds) == plain(target, new=55) and rounds[-1].context == 64


def test_a_cache_that_holds_more_goes_on():
    """Tokens read before the prompt stay, and count as context; the draft sees the prompt only."""
    target = varied(UNTIED)
    cache, own = (target.new_cache(max_len=64) for _ in range(2))
    for each in (cache, own):
        prefill(target, [ids(7, seed=4)], cache=each)
    rounds = run(target, DraftModel(target), cache=cache)
    assert text(rounds) == plain(target, cache=own) and cache.length == own.length == 40 and rounds[0].context == 17


# ---- the caches ------------------------------------------------------------------------------------------------------


class Watched(Decoder):
    """Keeps the ids and the cache length of each forward pass."""

    def forward(self, ids, *, cache, **options):
        before = cache.length
        out = super().forward(ids, cache=cache, **options)
        self.passes.append((before, ids[0].tolist(), cache.length))
        return out


def watched(config, *, seed=11):
    model = varied(config, seed=seed)
    model.__class__, model.passes = Watched, []
    return model


def storage(cache):
    return [tensor.data_ptr() for tensor in (*cache.keys, *cache.values)]


def test_rollback_is_a_crop_of_the_same_memory():
    """B011: 10 cached, [t, d1 .. d4] verified, two accepted: length 10 -> 15 -> 13, the next write at 13, the same addresses."""
    target = watched(LLAMA)
    best = plain(target)
    target.passes.clear()
    cache = target.new_cache(max_len=40)
    addresses, seen = storage(cache), []
    wrong = [best[1], best[2], 63 - best[3], best[4]]
    for each in speculate(target, PROMPT, max_tokens=12, draft=Scripted(wrong), k=4, cache=cache):
        seen.append((each.context, cache.length))
        assert storage(cache) == addresses
    assert target.passes[:3] == [(0, PROMPT, 10), (10, [best[0], *wrong], 15), (13, [best[3]], 14)]
    assert seen[:3] == [(10, 10), (13, 13), (14, 14)]
    one = target.new_cache(max_len=40)
    logits = prefill(target, [[*PROMPT, *best[:11]]], cache=one)  # the cache rolled back is the cache of the text
    cache.crop(20)
    torch.testing.assert_close(decode_step(target, torch.tensor([best[10]]), cache=cache), logits, atol=1e-4, rtol=1e-4)


def test_the_draft_reads_its_own_last_token():
    """B012: draft = target, K = 3, 10 cached: after a round the draft holds 13, the target 14; next input d3 at 13 and the bonus at 14."""
    target, twin = varied(UNTIED), watched(UNTIED)
    best, draft = plain(target, new=45), DraftModel(twin)
    addresses, rounds = None, []
    for each in speculate(target, PROMPT, max_tokens=45, draft=draft, k=3):
        addresses = addresses or (draft.cache and storage(draft.cache))
        rounds.append(each)
        assert storage(draft.cache) == addresses
        if each.index == 1:
            assert (draft.cache.length, each.context) == (13, 14)
    assert twin.passes[:4] == [(0, [*PROMPT, best[0]], 11), (11, [best[1]], 12), (12, [best[2]], 13), (13, [best[3], best[4]], 15)]
    assert len(rounds) == 12 and all(each.accepted == 3 for each in rounds[1:])


def test_rounds_without_drafts_leave_no_hole():
    """B012: K = 0 for two rounds, then 3: the draft catches up on all it has not seen, and is right again."""
    target, twin = varied(LLAMA), watched(LLAMA)
    rounds = run(target, Now(DraftModel(twin), 3, 0, 0, 3, 1), k=3)
    assert [(each.proposed, each.accepted) for each in rounds[1:6]] == [(3, 3), (0, 0), (0, 0), (3, 3), (1, 1)]
    best = plain(target)
    assert (13, best[3:7], 17) in twin.passes  # its own last draft, the bonus, and two tokens of plain steps


@SHAPES
@pytest.mark.parametrize("sampling", [GREEDY, HOT], ids=["greedy", "sampled"])
def test_a_cached_draft_proposes_what_a_fresh_one_would(config, sampling):
    """Accepted, half accepted and rejected blocks: the draft's cache never shows in what it proposes, nor in the distributions."""
    target, draft = varied(config), varied(config)
    draft.head.weight.data += 0.25 * draft.head.weight.std() * torch.randn(draft.head.weight.shape, generator=seeded())
    compared = Compared(draft)
    rounds = [run(target, compared, prompt=ids(10, seed=seed), k=3, new=45, sampling=sampling, generator=seeded(seed))[1:] for seed in (1, 2, 3)]
    assert {each.accepted for each in sum(rounds, [])} == {0, 1, 2, 3} and compared.rounds == sum(map(len, rounds))


def test_a_draft_model_serves_one_request_after_another():
    """Its cache goes on where the next prompt agrees with what it read, and grows where a request is longer."""
    target, twin = varied(LLAMA), watched(LLAMA)
    draft = DraftModel(twin)
    for prompt, new in ((PROMPT, 12), (PROMPT, 12), (ids(12, seed=8), 30), (PROMPT[:6], 8)):
        rounds = run(target, draft, prompt=prompt, new=new)
        assert text(rounds) == plain(target, prompt, new=new) and acceptance(rounds) == 1.0
    twin.passes.clear()
    run(target, draft, prompt=PROMPT[:6], new=8)
    assert twin.passes[0][0] == 6  # the prompt is read already


def test_two_requests_may_take_turns_on_one_draft():
    target, draft = varied(LLAMA), DraftModel(varied(LLAMA))
    first, second = (speculate(target, ids(10, seed=seed), max_tokens=20, draft=draft, k=4) for seed in (1, 2))
    pairs = list(zip(first, second, strict=True))
    for place, seed in enumerate((1, 2)):
        assert text(pair[place] for pair in pairs) == plain(target, ids(10, seed=seed), new=20)
    assert all(each.accepted == each.proposed for pair in pairs for each in pair)


def test_two_requests_may_not_share_a_cache():
    target = varied(LLAMA)
    cache = target.new_cache(max_len=64)
    rounds = speculate(target, PROMPT, max_tokens=9, draft=PromptLookup(), k=2, cache=cache)
    next(rounds)
    decode_step(target, torch.tensor([1]), cache=cache)
    with pytest.raises(RuntimeError, match="the cache now holds 11 tokens, not 10; give each request its own cache"):
        next(rounds)


# ---- sampling --------------------------------------------------------------------------------------------------------

SMALL = replace(LLAMA, name="small", n_layers=1, vocab_size=4, hidden=16, n_heads=2, n_kv_heads=1, intermediate=16)
WARM = Sampling(temperature=1.5, top_p=0.95)


def texts(target, sampling, *, new, rule=None):
    """Every text of `new` tokens after [1, 2] and its probability, from the target's own steps alone."""
    found = {}
    for words in product(range(target.config.vocab_size), repeat=new):
        chance = 1.0
        for at, word in enumerate(words):
            logits = prefill(target, [[1, 2, *words[:at]]], cache=target.new_cache(max_len=8))
            if rule is not None:
                logits = logits.masked_fill(~rule(words[:at]), -torch.inf)
            chance *= float(probabilities(logits, sampling)[0, word])
            if not chance:
                break
        found[words] = chance
    return found


def steep(seed):
    """A target of one small layer whose next tokens depend on the last ones and are far from even."""
    model = varied(SMALL, seed=seed)
    model.head.weight.data.mul_(3)
    return model


def rule(words):
    """Never twice the same token; after a 3 only 0."""
    return torch.tensor([not words or (token != words[-1] and (words[-1] != 3 or token == 0)) for token in range(4)])


@pytest.mark.parametrize(("drafter", "options"), [
    (lambda: DraftModel(steep(11)), {}), (lambda: DraftModel(steep(11), sampling=GREEDY), {}), (PromptLookup, {}),
    (lambda: DraftModel(steep(11)), {"allowed": rule}), (lambda: DraftModel(steep(11)), {"allowed": rule, "mask_draft": False}),
    (PromptLookup, {"allowed": rule})],
    ids=["sampled draft", "greedy draft", "lookup", "masked draft", "unmasked draft", "masked lookup"])  # fmt: skip
def test_sampled_texts_have_the_targets_distribution(drafter, options):
    """Joint distribution of 4 tokens over 800 requests: likely texts within 4 standard deviations each, and all of them by one statistic."""
    target, draft, generator, runs = steep(2), drafter(), seeded(5), 800
    expected = texts(target, WARM, new=4, rule=options.get("allowed"))
    assert sum(expected.values()) == pytest.approx(1, abs=1e-5) and max(expected.values()) < 0.6
    cache, found, asked = target.new_cache(max_len=8), Counter(), Counter()
    for _ in range(runs):
        cache.reset()
        rounds = run(target, draft, prompt=[1, 2], new=4, k=2, sampling=WARM, generator=generator, cache=cache, **options)
        found[tuple(text(rounds))] += 1
        asked.update(each.proposed for each in rounds)
    likely = [words for words, chance in expected.items() if chance * runs >= 5]
    p = torch.tensor([*(expected[words] for words in likely), 1 - sum(expected[words] for words in likely)]).clamp(min=1e-9)
    counts = torch.tensor([float(found[words]) for words in likely])
    counts = torch.cat([counts, runs - counts.sum().view(1)])  # the last cell is all unlikely texts together
    assert len(likely) > 10 and near(counts, p, sigmas=4) and all(expected[words] > 0 for words in found)
    statistic = float(((counts - runs * p)[p > 1e-3] ** 2 / (runs * p)[p > 1e-3]).sum())
    assert statistic < len(likely) + 4 * (2 * len(likely)) ** 0.5
    assert asked[2] > 50 and asked[1] > 10


def test_acceptance_is_the_overlap_of_the_two_distributions():
    """First draft after [1, 2, t]: kept with sum of min(p, q), p and q at the request's temperature and nucleus."""
    target, draft = steep(2), steep(11)
    generator, kept, expected = seeded(6), 0, 0.0
    for _ in range(600):
        rounds = run(target, DraftModel(draft), prompt=[1, 2], new=3, k=1, sampling=WARM, generator=generator)
        kept += rounds[1].accepted
        p, q = (probabilities(prefill(each, [[1, 2, rounds[0].tokens[0]]], cache=each.new_cache(max_len=4)), WARM) for each in (target, draft))
        expected += float(torch.minimum(p, q).sum())
    assert 0.1 < expected / 600 < 0.9 and abs(kept - expected) < 4 * (600 * 0.25) ** 0.5


@SHAPES
def test_a_seed_is_a_text(config):
    """Two requests of one seed agree in every round, another seed differs; a draft that is the target is kept but for rounding."""
    target, draft = varied(config), DraftModel(varied(config))
    one, two, other = (run(target, draft, sampling=HOT, generator=seeded(seed), k=3) for seed in (42, 42, 43))
    assert one == two and text(one) != text(other) and len(set(text(one))) > 5
    assert acceptance(one + other) > 0.99 and all(each.emitted == each.proposed + 1 for each in one)


def test_a_seed_decides_what_is_accepted_too():
    """A draft that is half right: the same rounds again from the same seed, whatever was drawn from the global generator meanwhile."""
    target, draft = steep(2), DraftModel(steep(11))
    rounds = [run(target, draft, prompt=[1, 2], new=40, k=3, sampling=WARM, generator=seeded(42)) for _ in range(4)]
    assert all(each == rounds[0] for each in rounds) and 0.1 < acceptance(rounds[0]) < 0.9


def test_without_drafts_a_seeded_request_is_generates():
    """K = 0 draws what `generate` draws, one number a token."""
    target = varied(LLAMA)
    assert text(run(target, PromptLookup(), k=0, sampling=HOT, generator=seeded(7))) == plain(target, sampling=HOT, generator=seeded(7))


# ---- drafters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("known", "k", "copied"), [
    ([1, 2, 3, 4, 9, 1, 2, 3], 3, [4, 9, 1]),  # what followed
    ([1, 2, 3, 8, 7, 3, 5, 1, 2, 3], 1, [8]),  # three tokens back before the later occurrence of one
    ([7, 1, 7, 2, 7], 1, [2]),  # the last occurrence before the first
    ([7, 7], 4, [7, 7, 7, 7]), ([1, 2, 1, 2], 5, [1, 2, 1, 2, 1]),  # a copy runs into itself
    ([1, 2, 3, 4], 3, []), ([5], 3, []), ([1, 1], 0, []),  # nothing to copy, nothing asked
    ([60000, 55296, 60000], 1, [55296])])  # fmt: skip
def test_prompt_lookup(known, k, copied):
    """Ids of any size, those of surrogates included."""
    assert PromptLookup().propose(known, k, terms(vocab_size=70000)).tokens == copied


def test_prompt_lookup_keeps_to_its_sizes_and_rules():
    known = [1, 2, 3, 8, 7, 3, 5, 1, 2, 3]
    assert PromptLookup(longest=1).propose(known, 2, terms()).tokens == [5, 1]
    assert PromptLookup(shortest=2).propose([7, 1, 7], 2, terms()).tokens == []
    assert PromptLookup().propose(known, 4, terms(eos=frozenset([7]))).tokens == [8, 7]  # nothing behind an end token
    no_seven = terms(allowed=lambda written: torch.arange(64) != 7)
    assert PromptLookup().propose(known, 4, no_seven).tokens == [8]
    for bad in ({"shortest": 0}, {"longest": 2, "shortest": 3}):
        with pytest.raises(ValueError, match="they must be 1 <= shortest <= longest"):
            PromptLookup(**bad)


@SHAPES
def test_prompt_lookup_on_text_that_copies(config):
    """A grammar makes the target repeat its prompt: after two tokens of it, every block is copied whole."""
    target, source = varied(config), ids(20, seed=3)
    assert len({*zip(source, source[1:], strict=False)}) == 19

    def copy(written):
        return torch.arange(64) == source[len(written)]

    rounds = run(target, PromptLookup(shortest=2), prompt=source, new=20, k=5, allowed=copy, mask_draft=False)
    assert text(rounds) == source and len(rounds) <= 6 and acceptance(rounds) == 1.0


def test_vocabularies_are_compared():
    """B035: equal sizes with two entries swapped are refused by the first; padding rows are allowed after the comparison."""
    words = [f"w{number}" for number in range(64)]
    swapped = [*words[:20], words[41], *words[21:41], words[20], *words[42:]]
    with pytest.raises(ValueError, match="id 20 is 'w20' to the target and 'w41' to the draft"):
        DraftModel(varied(LLAMA), vocabularies=(words, swapped))
    assert shared_ids(words, words) == 64 and shared_ids([*words, "<tool>"], words) == 64 and shared_ids(words[:9], words) == 9
    padded = varied(replace(LLAMA, vocab_size=192))
    with pytest.raises(ValueError, match="the target has 192 ids and the draft 64, so they differ from id 64 on"):
        run(padded, DraftModel(varied(LLAMA)))


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=4)], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("rows", "drafts", "shared"), [(192, 64, 64), (64, 192, 64), (64, 64, 40)])
def test_ids_above_the_shared_ones_are_never_drafted(rows, drafts, shared, sampling):
    """B035: probability 0, whichever model has more rows; a token that the draft does not know ends its drafting."""
    words = [f"w{number}" for number in range(shared)]
    target, draft = (
        varied(replace(LLAMA, vocab_size=rows)),
        DraftModel(varied(replace(LLAMA, vocab_size=drafts), seed=1), vocabularies=(words, words)),
    )
    prompt = [token % shared for token in PROMPT]
    draft.start(target, slots=20)
    asked = terms(vocab_size=rows, sampling=sampling, generator=seeded())
    proposal = draft.propose(prompt, 8, asked)
    assert len(proposal.tokens) == 8 and max(proposal.tokens) < shared
    assert proposal.q.shape == (8, rows) and not proposal.q[:, shared:].any() and proposal.q.sum(-1).tolist() == pytest.approx([1] * 8)
    if rows > shared:
        assert draft.propose([*prompt, shared], 8, asked).tokens == []
    rounds = run(target, draft, prompt=prompt, sampling=sampling, generator=seeded())
    assert len(text(rounds)) == 24 and (sampling != GREEDY or text(rounds) == plain(target, prompt))


def test_a_draft_may_sample_by_its_own_settings():
    """A greedy draft of a sampled request: its best tokens, one-hot, and no random number; what it says of itself is what it does."""
    target, generator = varied(LLAMA), seeded()
    before, draft = generator.get_state(), DraftModel(target, sampling=GREEDY)
    draft.start(target, slots=40)
    proposal = draft.propose(PROMPT, 5, terms(sampling=Sampling(temperature=9), generator=generator))
    assert (
        proposal.tokens == plain(target, new=5)
        and proposal.q.argmax(-1).tolist() == proposal.tokens
        and proposal.q.sum() == 5 == proposal.q.count_nonzero()
    )
    assert torch.equal(generator.get_state(), before)


def test_a_draft_stops_at_an_end_token():
    """It pays for no pass behind one."""
    target, twin = varied(LLAMA), watched(LLAMA)
    best = plain(target)
    rounds = run(target, DraftModel(twin), k=8, eos=best[3])
    assert (rounds[1].proposed, rounds[1].accepted, len(twin.passes)) == (3, 3, 3)


# ---- constrained decoding --------------------------------------------------------------------------------------------


def alternate(written):
    """Even and odd ids in turn, never twice one of them; an end token (0) after eight."""
    mask = (torch.arange(64) % 2 == len(written) % 2) & (torch.arange(64) > 0)
    mask[list(written)] = False
    mask[0] = len(written) >= 8
    return mask


def constrained(target, prompt, *, new, rule):
    """The target's own constrained greedy text, one plain step at a time."""
    written = []
    while len(written) < new and written[-1:] != [0]:
        logits = prefill(target, [[*prompt, *written]], cache=target.new_cache(max_len=64))
        written.append(int(logits.masked_fill(~rule(tuple(written)), -torch.inf).argmax()))
    return written


@SHAPES
@pytest.mark.parametrize("mask_draft", [True, False])
@pytest.mark.parametrize("drafter", [lambda config: DraftModel(varied(config)), lambda config: DraftModel(varied(config, seed=4)),
                                     lambda config: PromptLookup()], ids=["same", "other", "lookup"])  # fmt: skip
def test_constrained_text_is_the_targets_own(config, mask_draft, drafter):
    target = varied(config)
    rounds = run(target, drafter(config), new=16, k=4, allowed=alternate, mask_draft=mask_draft, eos=0)
    expected = constrained(target, PROMPT, new=16, rule=alternate)
    assert text(rounds) == expected and all(alternate(tuple(expected[:at]))[token] for at, token in enumerate(expected))


def test_a_masked_draft_agrees_more_often():
    """Draft = target: masked it is always right; unmasked it proposes what the grammar forbids."""
    target = varied(LLAMA)
    masked, unmasked = (run(target, DraftModel(varied(LLAMA)), allowed=alternate, mask_draft=mask, new=16, k=3) for mask in (True, False))
    assert acceptance(masked) == 1.0 > acceptance(unmasked) and text(masked) == text(unmasked)


def test_a_sampled_grammar_is_never_broken():
    target, generator = varied(LLAMA), seeded(8)
    for mask_draft in (True, False):
        for _ in range(10):
            written = text(run(target, DraftModel(varied(LLAMA, seed=4)), sampling=Sampling(temperature=5), generator=generator, allowed=alternate,
                               mask_draft=mask_draft, new=12, eos=0))  # fmt: skip
            assert all(alternate(tuple(written[:at]))[token] for at, token in enumerate(written))


@pytest.mark.parametrize("mask_draft", [True, False])
def test_a_grammar_is_asked_only_about_texts_it_allows(mask_draft):
    """Neither behind a forbidden draft nor behind an end token, so a parser may raise there."""
    target, prefixes = varied(LLAMA), []

    def parser(written):
        assert 0 not in written and all(alternate(written[:at])[token] for at, token in enumerate(written))
        prefixes.append(written)
        return alternate(written)

    best = constrained(target, PROMPT, new=16, rule=alternate)
    over = Scripted(best[1:5], best[6:8], [0, 0, 9])  # an end token that the grammar allows, and more behind it
    for draft in (DraftModel(varied(LLAMA, seed=4)), over, Scripted([0, 5], [9, 0, 1]), PromptLookup()):
        run(target, draft, allowed=parser, mask_draft=mask_draft, eos=0, new=16)
    assert prefixes[0] == () and max(map(len, prefixes)) >= 8  # the prompt is not among the tokens written


def test_a_dead_end_counts_only_where_the_text_reaches_it():
    """A draft may run into one that the target does not choose; the text may not."""
    target = varied(LLAMA)
    best = plain(target)
    trap = next(token for token in range(64) if token not in best)

    def rule(written):
        return torch.full((64,), trap not in written)

    assert text(run(target, Scripted([best[1], trap, 5], [trap]), allowed=rule)) == best
    with pytest.raises(ValueError, match=r"allowed\(\) lets no token follow the 3 written; a grammar must leave at least one"):
        run(target, DraftModel(varied(LLAMA)), allowed=lambda written: torch.full((64,), len(written) < 3))


def test_a_grammar_that_needs_an_id_the_draft_lacks():
    """Nothing is drafted there; the target writes it."""
    words, target = [f"w{number}" for number in range(64)], varied(replace(LLAMA, vocab_size=80))
    draft = DraftModel(varied(LLAMA), vocabularies=(words, words))
    rounds = run(target, draft, new=3, allowed=lambda written: torch.arange(80) == (70 if len(written) == 1 else 5))
    assert text(rounds) == [5, 70, 5] and [each.proposed for each in rounds] == [0, 0, 0]


# ---- bad input -------------------------------------------------------------------------------------------------------

SHORT = replace(LLAMA, name="short-draft", max_context=20)


@pytest.mark.parametrize(("changes", "named"), [
    ({"k": -1}, "k is -1; it must be a whole number from 0 to 63"), ({"k": 64}, "k is 64; it must be a whole number from 0 to 63"),
    ({"k": 2.0}, "k is 2.0"), ({"k": None}, "k is None"),
    ({"new": -1}, "max_tokens is -1"), ({"new": 2.5}, "max_tokens is 2.5"), ({"new": 56}, "this request needs 65 positions"),
    ({"prompt": []}, "prompt 0 is empty"), ({"prompt": [64]}, "prompt 0 holds id 64"), ({"prompt": "text"}, "a prompt is a list of token ids"),
    ({"eos": ["</s>"]}, "end tokens are ids"), ({"draft": lambda: DraftModel(varied(SHORT))}, "33 positions and the draft short-draft has 20"),
    ({"draft": lambda: DraftModel(varied(replace(LLAMA, vocab_size=32)))}, "the target has 64 ids and the draft 32, so they differ from id 32 on"),
    ({"allowed": lambda written: torch.zeros(64, dtype=torch.bool)}, r"allowed\(\) lets no token follow the 0 written"),
    ({"allowed": lambda written: torch.ones(63, dtype=torch.bool)}, r"allowed\(\) gave torch.bool \(63,\); it must give a torch.bool tensor of shape \(64,\)"),
    ({"allowed": lambda written: torch.ones(64)}, r"allowed\(\) gave torch.float32 \(64,\)"),
    ({"allowed": lambda written: [1, 2]}, r"allowed\(\) gave \[1, 2\]")])  # fmt: skip
def test_bad_input_is_one_line_before_any_forward(changes, named):
    """And a generator that was never started has told all there is to tell."""
    target = watched(LLAMA)
    options = {"draft": PromptLookup, **changes}
    with pytest.raises(ValueError, match=named) as refusal:
        speculate(
            target, options.pop("prompt", PROMPT), max_tokens=options.pop("new", 24), draft=options.pop("draft")(), k=options.pop("k", 4), **options
        )
    assert "\n" not in str(refusal.value) and target.passes == []


def test_a_cache_that_is_too_short_or_anothers_is_refused():
    target = watched(LLAMA)
    for cache, named in ((target.new_cache(max_len=32), "needs 33 cache slots"), (varied(UNTIED).new_cache(max_len=40), "this cache is of")):
        with pytest.raises(ContextError, match=named):
            speculate(target, PROMPT, max_tokens=24, draft=PromptLookup(), k=4, cache=cache)
    assert target.passes == []


def test_another_device_is_refused():
    target, draft = varied(LLAMA), DraftModel(varied(LLAMA).to("meta"))
    with pytest.raises(ValueError, match="the target is on cpu and the draft on meta; load both on one device"):
        run(target, draft)


@pytest.mark.parametrize("sampling", [GREEDY, HOT])
def test_logits_that_allow_no_choice_are_named(sampling):
    target = varied(LLAMA)
    target.head.weight.data[5] = float("nan")
    with pytest.raises(LogitsError, match="NaN"):
        run(target, PromptLookup(), sampling=sampling)


def test_acceptance_of_nothing_tested():
    assert acceptance([]) is None
    assert acceptance([Round(index=0, phase="prefill", tokens=(1,), proposed=0, accepted=0, context=1, finish=None)]) is None
