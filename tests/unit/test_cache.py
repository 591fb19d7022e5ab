"""Kind 1 of the faults the course guards against: the KV cache. Cached, uncached, chunked and padded runs agree."""

from dataclasses import replace

import pytest
import torch

from decodelab.decoder import cache as caches
from decodelab.decoder.cache import PAD_POSITION, ContextError
from decodelab.decoder.generate import decode_step, generate, prefill
from decodelab.decoder.model import attend, visible_keys
from tiny import GPT2, LLAMA, decoder, ids

PAGE = 16  # the page size later caches use: lengths 1 ... 2 * page + 1
SHAPES = pytest.mark.parametrize("config", [GPT2, LLAMA], ids=lambda config: config.name)


def uncached(model, tokens):
    """Logits of the last token, computed from nothing."""
    return prefill(model, [tokens], cache=model.new_cache(max_len=len(tokens)))


def nan_cache(model, max_len):
    cache = model.new_cache(max_len=max_len)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    return cache


@SHAPES
@pytest.mark.parametrize("make", [lambda m, n: m.new_cache(max_len=n), nan_cache], ids=["zeros", "nan"])
def test_cached_uncached_and_chunked_logits_agree_for_every_length(config, make):
    """B004, B009: at each length 1 ... 33, and on a cache full of NaN."""
    model, tokens = decoder(config), ids(2 * PAGE + 1)
    stepped = make(model, len(tokens))
    logits = prefill(model, [tokens[:1]], cache=stepped)
    for length in range(1, len(tokens) + 1):
        expected = uncached(model, tokens[:length])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        for chunk in (1, 3, PAGE):
            chunked = prefill(model, [tokens[:length]], cache=make(model, length), chunk=chunk)
            torch.testing.assert_close(chunked, expected, rtol=1e-4, atol=1e-4)
        if length < len(tokens):
            logits = decode_step(model, torch.tensor([tokens[length]]), cache=stepped)


@SHAPES
def test_positions_of_each_pass(config, monkeypatch):
    """B001: prompt of 6, then one new position a step; cache length and offset move together, once."""
    model, seen = decoder(config), []
    forward = type(model).forward

    def spy(self, tokens, *, cache, **rest):
        before = cache.length
        out = forward(self, tokens, cache=cache, **rest)
        seen.append((before, before + tokens.shape[1] - 1, cache.length))
        return out

    monkeypatch.setattr(type(model), "forward", spy)
    list(generate(model, ids(6), max_tokens=4))
    assert seen == [(0, 5, 6), (6, 6, 7), (7, 7, 8), (8, 8, 9)]


def test_one_query_sees_the_whole_past():
    """B002: zero queries weigh all visible keys alike, so the output is their plain mean."""

    def mean(new, total, heads=1, **mask):
        q, v = torch.zeros(1, heads, new, 4), torch.arange(1.0, total + 1).view(1, 1, total, 1).expand(1, 1, total, 4)
        return attend(q, torch.randn(1, 1, total, 4), v, **mask)[0, 0, :, 0].tolist()

    rule = lambda new, total: visible_keys(torch.arange(total - new, total), torch.arange(total))  # noqa: E731
    assert mean(1, 4) == [2.5]
    assert mean(1, 4, heads=3) == [2.5]
    assert mean(2, 5, visible=rule(2, 5)) == [2.5, 3.0]
    assert mean(3, 5, visible=rule(3, 5)) == [2.0, 2.5, 3.0]  # B005: two cached, a chunk of three
    assert mean(4, 4, visible=rule(4, 4)) == mean(4, 4, causal=True) == [1.0, 1.5, 2.0, 2.5]
    with pytest.raises(ValueError, match="2 queries and 5 keys"):
        mean(2, 5, causal=True)


def test_mask_of_a_chunk():
    """B005: chunk [7, 16) of 16: 9 x 16, 108 visible, 36 hidden."""
    mask = visible_keys(torch.arange(7, 16), torch.arange(16))
    assert mask.shape == (9, 16) and int(mask.sum()) == 108 and int((~mask).sum()) == 36


@pytest.mark.parametrize(("capacity", "prompt", "new", "need"), [(16, 12, 8, 19), (18, 12, 8, 19), (46, 32, 16, 47)])
def test_capacity_is_checked_before_any_forward(capacity, prompt, new, need, monkeypatch):
    """B007: slots needed = prompt + new - 1; the error names both numbers and the model stays usable."""
    model = decoder(LLAMA)
    cache = model.new_cache(max_len=capacity)
    with pytest.raises(ContextError, match=rf"needs {need} cache slots .* holds {capacity}.*at most {capacity - prompt + 1} new.*max_len={need}"):
        generate(model, ids(prompt), max_tokens=new, cache=cache)
    assert cache.length == 0
    assert len(list(generate(model, ids(prompt), max_tokens=capacity - prompt + 1, cache=cache))) == capacity - prompt + 1


def test_model_positions_are_a_capacity_too():
    """B007, B090: a prompt as long as the context may give exactly one token, one longer none."""
    model = decoder(GPT2)
    assert [step.finish for step in generate(model, ids(64), max_tokens=1)] == ["length"]
    with pytest.raises(ContextError, match="needs 67 positions .*60 .* has 64. Ask for at most 5 new tokens"):
        generate(model, ids(60), max_tokens=8)
    with pytest.raises(ContextError, match="Shorten the prompt to at most 64"):
        generate(model, ids(65), max_tokens=1)
    with pytest.raises(ContextError, match="this pass reaches 65"):
        prefill(model, [ids(65)], cache=model.new_cache(max_len=80))
    assert len(list(generate(model, ids(60), max_tokens=5))) == 5


@SHAPES
def test_same_text_again_after_another_prompt(config):
    """B004: nothing of one request survives into the next, on the same cache too."""
    model = decoder(config)
    cache = model.new_cache(max_len=48)
    first = [step.token for step in generate(model, ids(7), max_tokens=8, cache=cache)]
    cache.reset()
    assert cache.length == 0
    list(generate(model, ids(20, seed=5), max_tokens=4, cache=cache))
    cache.reset()
    assert [step.token for step in generate(model, ids(7), max_tokens=8, cache=cache)] == first


@SHAPES
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_batches_equal_single_rows(config, side):
    """B008, B017: rows of 3 and 5 padded to 5, then three decode steps; junk in the padding changes nothing; no NaN."""
    model, rows = decoder(config), [ids(3), ids(5, seed=2)]
    for junk in (0, 63):
        tokens = torch.full((2, 5), junk)
        positions = torch.full((2, 5), PAD_POSITION)
        for row, prompt in enumerate(rows):
            place = slice(0, len(prompt)) if side == "right" else slice(5 - len(prompt), 5)
            tokens[row, place], positions[row, place] = torch.tensor(prompt), torch.arange(len(prompt))
        last = torch.tensor([len(prompt) - 1 if side == "right" else 4 for prompt in rows])
        cache = model.new_cache(max_len=8, batch=2)
        out = model(tokens, cache=cache, positions=positions, last=last)
        singles = [model.new_cache(max_len=8) for _ in rows]
        expected = torch.cat([prefill(model, [prompt], cache=single) for prompt, single in zip(rows, singles, strict=True)])
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        assert cache.next_positions().tolist() == [3, 5]
        for step in range(3):
            new = torch.tensor([step + 1, step + 9])
            out = decode_step(model, new, cache=cache)
            expected = torch.cat([decode_step(model, new[i : i + 1], cache=single) for i, single in enumerate(singles)])
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
    every = model(tokens, cache=model.new_cache(max_len=8, batch=2), positions=positions, every_row=True)
    assert every.shape == (2, 5, 64) and bool(every.isfinite().all())


def test_prefill_pads_unequal_prompts_itself():
    """B017: the logits are those of each row's last real token, also when chunks split the rows differently."""
    model, rows = decoder(LLAMA), [ids(3), ids(9, seed=2), ids(5, seed=3)]
    expected = torch.cat([uncached(model, row) for row in rows])
    for chunk in (None, 2, 4):
        out = prefill(model, rows, cache=model.new_cache(max_len=12, batch=3), chunk=chunk)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_batch_order_changes_logits_only_in_the_last_digits():
    """B039: float32 logits agree within 1e-5 relative at batch 1, 2, 7; bit equality is not promised."""
    model, row = decoder(LLAMA), ids(6)
    one = uncached(model, row)
    for batch in (2, 7):
        many = prefill(model, [row] * batch, cache=model.new_cache(max_len=8, batch=batch))
        assert float((many - one).abs().max() / one.abs().max()) < 1e-5


def test_crop_keeps_the_memory_and_the_rest():
    """B011: 10 -> 15 -> 13 in place; the next write is at 13."""
    model, tokens = decoder(LLAMA), ids(20)
    cache = model.new_cache(max_len=20)
    prefill(model, [tokens[:10]], cache=cache)
    address = cache.keys[0].data_ptr()
    prefill(model, [tokens[10:13] + [0, 0]], cache=cache)
    assert cache.length == 15
    cache.crop(13)
    assert cache.length == 13 and cache.keys[0].data_ptr() == address
    out = decode_step(model, torch.tensor([tokens[13]]), cache=cache)
    torch.testing.assert_close(out, uncached(model, tokens[:14]), rtol=1e-4, atol=1e-4)
    for wrong in (15, -1):
        with pytest.raises(ValueError, match=f"14 tokens to {wrong}"):
            cache.crop(wrong)


def test_a_saved_prefix_is_not_changed_by_its_continuations():
    """B015: two continuations of one 6-token prefix both start at 6, in either order."""
    model, prefix = decoder(LLAMA), ids(6)
    saved = model.new_cache(max_len=12)
    prefill(model, [prefix], cache=saved)
    runs = {}
    for order in (("a", "b"), ("b", "a")):
        for name in order:
            twin = saved.copy()
            assert twin.length == 6
            runs.setdefault(name, []).append(prefill(model, [ids(4, seed=ord(name))], cache=twin))
            assert (twin.length, saved.length) == (10, 6)
    assert all(torch.equal(first, second) for first, second in runs.values())


def test_bytes_are_those_of_the_tensors():
    """Cross-check 7: cache bytes from the cost model equal the real tensors', and the next step's reads follow the length."""
    from decodelab.arithmetic.cost import kv_bytes_per_token

    cache = caches.KVCache(LLAMA, max_len=10, batch=3, dtype=torch.bfloat16)
    stored = sum(tensor.numel() * tensor.element_size() for tensor in (*cache.keys, *cache.values))
    assert cache.slots == 48  # two chunks of 16, the fewest a compiled step reads, and one more
    assert cache.bytes_per_token == kv_bytes_per_token(LLAMA, dtype_bytes=2) == stored // (3 * 48)
    assert cache.allocated_bytes == stored
    cache.fill_random(4, generator=torch.Generator().manual_seed(0))
    assert cache.read_bytes() == 3 * 5 * cache.bytes_per_token
    assert float(cache.keys[0][:, :, :4].abs().min()) > 0 and float(cache.keys[0][:, :, 4:].abs().max()) == 0


def test_fill_and_size_limits():
    with pytest.raises(ContextError, match="fill 11 tokens into a cache that holds 10"):
        caches.KVCache(LLAMA, max_len=10).fill_random(11)
    with pytest.raises(ValueError, match="max_len 0"):
        caches.KVCache(LLAMA, max_len=0)


@SHAPES
def test_attention_without_sdpa_gives_the_same(config):
    """B008: the hand-written softmax agrees with SDPA on every visible row, grouped heads included."""
    heads, groups = config.n_heads, config.n_kv_heads
    q, k, v = torch.randn(2, heads, 3, 8), torch.randn(2, groups, 7, 8), torch.randn(2, groups, 7, 8)
    mask = visible_keys(torch.arange(4, 7), torch.arange(7))
    wide_k, wide_v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    scores = (q @ wide_k.transpose(-1, -2) / 8**0.5).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(attend(q, k, v, visible=mask), scores.softmax(-1) @ wide_v, rtol=1e-5, atol=1e-5)
    one = attend(q[:, :, :1], k, v)
    torch.testing.assert_close(one, (q[:, :, :1] @ wide_k.transpose(-1, -2) / 8**0.5).softmax(-1) @ wide_v, rtol=1e-5, atol=1e-5)


@SHAPES
def test_a_padded_batch_goes_on_where_each_row_stopped(config):
    """A second prefill and a crop after a ragged one: each row continues at its own next position."""
    model, first, more = decoder(config), [ids(3), ids(5, seed=2)], ids(4, seed=9)
    cache = model.new_cache(max_len=20, batch=2)
    prefill(model, first, cache=cache)
    for chunk in (None, 2):
        twin = cache.copy()
        out = prefill(model, [more, more], cache=twin, chunk=chunk)
        expected = torch.cat([uncached(model, row + more) for row in first])
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)
        assert twin.next_positions().tolist() == [7, 9]
    cache.crop(0)
    assert cache.next_positions().tolist() == [0, 0]
    torch.testing.assert_close(prefill(model, [more, more], cache=cache)[:1], uncached(model, more), rtol=1e-4, atol=1e-4)


def test_a_padded_cache_is_usable_outside_a_generation():
    """The cache outlives the pass that made it: a plain forward call may write it too."""
    model = decoder(LLAMA)
    cache = model.new_cache(max_len=12, batch=2)
    prefill(model, [ids(2), ids(4)], cache=cache)
    with torch.no_grad():
        assert model(torch.zeros((2, 1), dtype=torch.long), cache=cache).shape == (2, 64)


@pytest.mark.parametrize(
    "other", [replace(LLAMA, n_layers=4), replace(LLAMA, n_kv_heads=1), replace(LLAMA, head_dim=16)], ids=["layers", "heads", "size"]
)
def test_a_cache_of_another_model_or_batch_is_refused_before_anything_is_written(other):
    model = decoder(LLAMA)
    foreign = caches.KVCache(other, max_len=20)
    for cache in (foreign, model.new_cache(max_len=20, batch=2), caches.KVCache(LLAMA, max_len=20, dtype=torch.float16)):
        with pytest.raises(ContextError, match="this cache is of .* and the pass of"):
            generate(model, ids(5), max_tokens=3, cache=cache)
        with pytest.raises(ContextError):
            prefill(model, [ids(5)], cache=cache)
        assert cache.length == 0


def test_a_cache_larger_than_the_memory_is_refused_before_it_is_made():
    with pytest.raises(ContextError, match="needs .*TiB and .* is free"):
        decoder(LLAMA).new_cache(max_len=10**12)


def test_a_chunked_prefill_past_the_positions_writes_nothing():
    model = decoder(LLAMA)
    cache = model.new_cache(max_len=200)
    with pytest.raises(ContextError, match="this pass reaches 80"):
        prefill(model, [ids(80)], cache=cache, chunk=16)
    assert cache.length == 0


def test_two_requests_on_one_cache_are_noticed():
    model = decoder(LLAMA)
    cache = model.new_cache(max_len=40)
    first, second = (generate(model, ids(4), max_tokens=5, cache=cache) for _ in range(2))
    next(first), next(second)
    with pytest.raises(RuntimeError, match="went from 4 to 8 tokens under this generator"):
        next(first)
