"""Generation and sampling: kind 2 of the faults, and the bad input that a request may bring."""

import pytest
import torch

from decodelab.decoder.generate import StopStrings, generate, prefill
from decodelab.decoder.sampling import GREEDY, LogitsError, Sampling, nucleus, probabilities, sample, sample_rows
from tiny import LLAMA, decoder, ids

FOUR = torch.tensor([[0.5, -1.2, 3.1, 0.8]])
EIGHT = torch.tensor([[0.1, 0.2, 5.0, 0.3, 0.4, 0.5, 0.6, 0.7]])


class Letters:
    """A detokenizer for tests: token n is the n-th piece."""

    def __init__(self, pieces):
        self.pieces = pieces

    def push(self, token):
        return self.pieces[token]

    def flush(self):
        return ""


@pytest.mark.parametrize("zero", [0, 0.0])
def test_temperature_zero_is_greedy_and_draws_nothing(zero):
    """B023."""
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    assert {int(sample(FOUR, Sampling(temperature=zero), generator=generator)) for _ in range(100)} == {2}
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": -1}, {"top_p": 0.0},
                                 {"top_p": 1.01}, {"top_p": -0.5}, {"top_p": float("nan")}])  # fmt: skip
def test_bad_settings_are_refused_by_name(bad):
    """B023, B026: the message names the setting and its value."""
    name, value = next(iter(bad.items()))
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        Sampling(**bad)


@pytest.mark.parametrize(("p", "kept"), [(0.5, 1), (0.75, 2), (0.76, 3), (0.875, 3), (0.88, 4), (1.0, 4)])
def test_nucleus_keeps_the_smallest_set_that_reaches_p(p, kept):
    """B024, on probabilities that are exact in binary."""
    out = nucleus(torch.tensor([[0.5, 0.25, 0.125, 0.125]]), p)
    assert int((out > 0).sum()) == kept and float(out.sum()) == pytest.approx(1)


@pytest.mark.parametrize("k", [0, 1, 8, 9, 50])
def test_top_k_never_hides_the_best(k):
    """B026: 0, and anything from the vocabulary up, is off; 1 is greedy."""
    p = probabilities(EIGHT, Sampling(temperature=1, top_k=k))
    assert int(p.argmax()) == 2 and int((p > 0).sum()) == (1 if k == 1 else 8)
    assert int(sample(EIGHT, Sampling(temperature=1, top_k=1))) == 2


def test_tiny_temperature_in_half_precision():
    """B038: scaled in float32 after subtracting the maximum, where naive float16 overflows."""
    row = torch.tensor([[2.875, 2.955, 11.0625]], dtype=torch.float16)
    assert probabilities(row, Sampling(temperature=1e-5)).tolist() == [[0.0, 0.0, 1.0]]


@pytest.mark.parametrize(("value", "named"), [("-inf", "-inf for every token"), ("nan", "NaN"), ("inf", r"\+inf")])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=1)], ids=["greedy", "sampled"])
def test_logits_that_allow_no_choice_are_named_before_the_draw(value, named, sampling):
    """B038: one bad row is named by its number; -inf on some tokens alone is a mask and allowed."""
    rows = torch.stack([FOUR[0], torch.full((4,), -torch.inf)])
    if value != "-inf":
        rows[1] = FOUR[0]
        rows[1, 3] = float(value)
    with pytest.raises(LogitsError, match=f"row 1 hold {named}"):
        sample(rows, sampling)
    assert int(sample(torch.tensor([[-torch.inf, 1.0]]), sampling)) == 1


def test_a_row_does_not_depend_on_its_neighbours():
    """B036, B041: greedy, sampled and top-k 1 rows in one batch; a seeded row alone, beside an unseeded one, at index 1."""
    flat = torch.zeros(1000)
    drawn = Sampling(temperature=1)

    def seeded():
        return torch.Generator().manual_seed(42)

    alone = seeded()
    twenty = [int(sample_rows(flat[None], [drawn], generators=[alone])) for _ in range(20)]
    assert len(set(twenty)) > 1
    first, second = seeded(), seeded()
    assert [int(sample_rows(flat.expand(2, -1), [drawn, drawn], generators=[first, None])[0]) for _ in range(20)] == twenty
    assert [int(sample_rows(flat.expand(2, -1), [GREEDY, drawn], generators=[None, second])[1]) for _ in range(20)] == twenty
    shared = seeded()
    assert len(set(sample(flat.expand(4, -1), drawn, generator=shared).tolist())) > 1  # four equal prompts, one seed: they differ
    mixed = sample_rows(
        EIGHT.expand(3, -1), [GREEDY, Sampling(temperature=1, top_k=3), Sampling(temperature=1, top_k=1)], generators=[None, seeded(), seeded()]
    )
    assert mixed.tolist()[::2] == [2, 2] and int(mixed[1]) in (2, 6, 7)


def test_the_distribution_drawn_is_the_distribution_asked_for():
    """20,000 draws stay within four standard deviations of softmax(logits / T) cut to the nucleus."""
    sampling = Sampling(temperature=0.7, top_p=0.9)
    p = probabilities(FOUR, sampling)[0]
    drawn = sample(FOUR.expand(20_000, -1), sampling, generator=torch.Generator().manual_seed(0)).bincount(minlength=4) / 20_000
    assert bool(((drawn - p).abs() <= 4 * (p * (1 - p) / 20_000).sqrt() + 1e-9).all())
    assert float(p[1]) == 0.0


@pytest.mark.parametrize(("pieces", "shown", "found"), [
    (["DEF", "G", "HI", "J"], ["", "", "", ""], True), (["DEF", "G", "X"], ["", "", "DEFGX"], False),
    (["abDEFGHIJ tail"], ["ab"], True), (["DEFGHI", "DEFGHIJ"], ["", "DEFGHI"], True)])  # fmt: skip
def test_stop_strings_across_tokens(pieces, shown, found):
    """B031: nothing of a stop string is shown, and nothing else is lost."""
    watch = StopStrings(["DEFGHIJ"])
    assert [watch.feed(piece) for piece in pieces] == shown and watch.found is found


def test_held_back_text_is_flushed_at_the_length_limit():
    """B031: DEF, G and the length is reached: the text is "DEFG", the reason "length"."""
    model = decoder(LLAMA)
    tokens = [step.token for step in generate(model, ids(4), max_tokens=2)]
    pieces = {tokens[0]: "DEF"} | {tokens[1]: "G"}
    steps = list(generate(model, ids(4), max_tokens=2, stop=["DEFGHIJ"], detokenizer=Letters(pieces)))
    assert "".join(step.text for step in steps) == "".join(pieces[token] for token in tokens) and steps[-1].finish == "length"


def test_end_token_stops_before_length_and_is_the_last():
    """B027: the third greedy token declared to be the end: three tokens, reason "stop", also when it is the last allowed."""
    model = decoder(LLAMA)
    plain = [step.token for step in generate(model, ids(5), max_tokens=8)]
    third = plain.index(plain[2])  # the first time this token comes
    for limit in (8, third + 1):
        steps = list(generate(model, ids(5), max_tokens=limit, eos={plain[2]}))
        assert [step.token for step in steps] == plain[: third + 1] and steps[-1].finish == "stop"
    assert [step.token for step in generate(model, ids(5), max_tokens=8, eos=())] == plain


def test_phases_contexts_and_counts():
    """The first token is the prefill's; a request of n tokens makes n - 1 decode steps and fills prompt + n - 1 slots."""
    model = decoder(LLAMA)
    cache = model.new_cache(max_len=20)
    steps = list(generate(model, ids(5), max_tokens=4, cache=cache))
    assert [(step.phase, step.context, step.finish) for step in steps] == [
        ("prefill", 5, None),
        ("decode", 6, None),
        ("decode", 7, None),
        ("decode", 8, "length"),
    ]
    assert cache.length == 8


def test_max_tokens_zero_one_and_negative(monkeypatch):
    """B090: 0 gives nothing and runs nothing; 1 gives the prefill's token with one forward; -1 is refused."""
    model, passes = decoder(LLAMA), []
    forward = type(model).forward
    monkeypatch.setattr(type(model), "forward", lambda self, *a, **k: passes.append(1) or forward(self, *a, **k))
    assert list(generate(model, ids(3), max_tokens=0)) == [] and not passes
    assert len(list(generate(model, ids(3), max_tokens=1))) == 1 and len(passes) == 1
    with pytest.raises(ValueError, match="max_tokens is -1"):
        generate(model, ids(3), max_tokens=-1)


def test_empty_and_foreign_prompts_are_refused_and_the_model_goes_on():
    """B089: no ids; an id outside the vocabulary. A good request afterwards completes."""
    model = decoder(LLAMA)
    with pytest.raises(ValueError, match="prompt 0 is empty"):
        generate(model, [], max_tokens=3)
    for wrong in (64, -1):
        with pytest.raises(ValueError, match=f"holds id {wrong}; tiny-llama has ids 0 to 63"):
            prefill(model, [[1, wrong]], cache=model.new_cache(max_len=4))
    assert len(list(generate(model, ids(3), max_tokens=3))) == 3


def test_stop_strings_need_a_detokenizer():
    with pytest.raises(ValueError, match="detokenizer"):
        generate(decoder(LLAMA), ids(3), max_tokens=3, stop=["x"])
    with pytest.raises(ValueError, match="empty stop string"):
        StopStrings([""])


def test_golden_logits_on_one_and_two_threads():
    """B107: float32 logits within a tolerance whatever the threads; tokens are not demanded beyond a near tie."""
    model, threads, seen = decoder(LLAMA), torch.get_num_threads(), []
    for count in (1, 2):
        torch.set_num_threads(count)
        seen.append(prefill(model, [ids(9)], cache=model.new_cache(max_len=9)))
    torch.set_num_threads(threads)
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prompt", ["hello", [1.7, 2.9], [[1, 2]], [None]])
def test_a_prompt_is_a_list_of_ids(prompt):
    with pytest.raises(ValueError, match="whole numbers"):
        generate(decoder(LLAMA), prompt, max_tokens=2)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"max_tokens": 2.5}, "max_tokens is 2.5"), ({"max_tokens": "3"}, "max_tokens is '3'"), ({"chunk": -1}, "chunk is -1"), ({"chunk": 1.5}, "chunk is 1.5"),
     ({"eos": "</s>"}, "end tokens are ids"), ({"eos": ["</s>"]}, "end tokens are ids"), ({"stop": "END"}, "detokenizer")],
)  # fmt: skip
def test_bad_arguments_are_refused_before_any_pass(wrong, said):
    model = decoder(LLAMA)
    cache = model.new_cache(max_len=20)
    with pytest.raises(ValueError, match=said):
        generate(model, ids(3), **{"max_tokens": 3, "cache": cache, **wrong})
    assert cache.length == 0
    with pytest.raises(ValueError, match="there is no prompt"):
        prefill(model, [], cache=cache)


def test_one_end_token_may_be_given_as_a_number():
    model = decoder(LLAMA)
    first = next(iter(generate(model, ids(3), max_tokens=1))).token
    assert [step.finish for step in generate(model, ids(3), max_tokens=3, eos=first)] == ["stop"]
    assert len(list(generate(model, ids(3), max_tokens=3, eos=None))) == 3


@pytest.mark.parametrize("bad", [{"temperature": "1"}, {"temperature": None}, {"top_k": 2.5}, {"top_k": None}, {"top_p": None}])
def test_settings_of_another_type_are_refused_by_name(bad):
    name, value = next(iter(bad.items()))
    with pytest.raises(ValueError, match=f"{name} is {value}"):
        Sampling(**bad)


@pytest.mark.parametrize("tiny", [{"temperature": 1e-50}, {"temperature": 1.0, "top_p": 1e-50}])
def test_settings_too_small_for_float32_still_choose_the_best(tiny):
    assert int(sample(FOUR, Sampling(**tiny), generator=torch.Generator().manual_seed(0))) == 2
