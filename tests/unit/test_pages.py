"""The paged cache gives what the contiguous one gives, on both paths, and leaves alone what is not its own."""

import pytest
import torch

import tiny
from decodelab.decoder import kernels
from decodelab.decoder.cache import PAD_POSITION, ContextError, PagePool
from decodelab.decoder.generate import decode_step, prefill
from decodelab.decoder.model import attend, visible_keys
from pairs import GPT2, LLAMA, QWEN, TOLERANCE, apart, pair
from test_kernels import compiled, no_recompilation

CLOSE = TOLERANCE["float32"]
PATHS = [pytest.param("eager", id="eager"),
         pytest.param("fast", id="fast", marks=pytest.mark.skipif(kernels.no_compiler("cpu") is not None, reason="nothing compiles here"))]  # fmt: skip
PAGE = 4


def model_of(config, path, dtype="float32"):
    fast, eager = pair(config, dtype) if path == "fast" else (None, tiny.decoder(config))
    return fast or eager


def dirty_pool(model, *, pages: int, page_tokens: int = PAGE) -> PagePool:
    """A pool whose memory holds NaN, as memory taken uninitialised may."""
    pool = model.new_pool(pages=pages, page_tokens=page_tokens)
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(torch.nan)
    return pool


def contiguous(model, tokens, new: int) -> torch.Tensor:
    """Logits after the prompt and after each of `new` further tokens, (new + 1, V)."""
    cache = model.new_cache(max_len=len(tokens) + new)
    out = [prefill(model, [tokens[: len(tokens)]], cache=cache)]
    for _ in range(new):
        out.append(decode_step(model, out[-1].argmax(-1), cache=cache))
    return torch.cat(out)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("config", [GPT2, LLAMA, QWEN], ids=lambda config: config.name)
def test_every_length_up_to_two_pages_and_one(config, path):
    """Cross-check 1: lengths 1 ... 2 * page + 1 in pages that lie anywhere, on memory full of NaN, one token after the other."""
    model = model_of(config, path)
    for length in range(1, 2 * PAGE + 2):
        tokens, pool = tiny.ids(length, seed=length), dirty_pool(model, pages=7)
        table, wanted = [5, 2, 6, 0], contiguous(model, tokens, 4)
        got = [prefill(model, [tokens], cache=pool.rows([table], [0]))]
        for held in range(length, length + 4):
            got.append(decode_step(model, got[-1].argmax(-1), cache=pool.rows([table], [held])))
        assert apart(torch.cat(got), wanted) <= CLOSE


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("page_tokens", [1, 4, 16])
def test_rows_of_unequal_length_in_one_batch(path, page_tokens):
    """Four sequences, each prefilled alone, then decoded together; each equals its own contiguous run."""
    model = model_of(LLAMA, path)
    lengths, new = (3, 16, 17, 9), 6
    prompts = [tiny.ids(length, seed=length) for length in lengths]
    pages = [-(-(length + new) // page_tokens) for length in lengths]
    order = torch.randperm(sum(pages), generator=torch.Generator().manual_seed(0)).tolist()
    tables = [[order.pop() for _ in range(count)] for count in pages]
    pool = dirty_pool(model, pages=sum(pages), page_tokens=page_tokens)
    got = [torch.cat([prefill(model, [prompt], cache=pool.rows([table], [0])) for prompt, table in zip(prompts, tables, strict=True)])]
    for step in range(new):
        held = [length + step for length in lengths]
        got.append(decode_step(model, got[-1].argmax(-1), cache=pool.rows(tables, held)))
    for row, prompt in enumerate(prompts):
        assert apart(torch.stack(got, 1)[row], contiguous(model, prompt, new)) <= CLOSE


def test_prompts_of_unequal_length_in_one_prefill_and_in_chunks():
    """Padding is not written, whatever the chunk; the shorter rows' pages hold nothing but their own."""
    model = tiny.decoder(tiny.LLAMA)
    prompts = [tiny.ids(3, seed=1), tiny.ids(11, seed=2), tiny.ids(6, seed=3)]
    tables = [[1], [2, 3, 4], [0, 5]]
    for chunk in (None, 1, 4, 5):
        pool = dirty_pool(model, pages=6)
        got = prefill(model, prompts, cache=pool.rows(tables, [0, 0, 0]), chunk=chunk)
        for row, prompt in enumerate(prompts):
            assert apart(got[row], contiguous(model, prompt, 0)[0]) <= CLOSE
        assert torch.equal(pool.keys[0][1, :, 3], torch.zeros_like(pool.keys[0][1, :, 3]))  # prompt 0 has 3 tokens: its 4th slot is untouched


@pytest.mark.parametrize("path", PATHS)
def test_b009_the_unused_slots_of_the_last_page_may_hold_anything(path):
    """Page 4, 13 tokens: three slots of the last page were never written, and the pool held NaN."""
    model = model_of(LLAMA, path)
    tokens, pool = tiny.ids(13), dirty_pool(model, pages=4)
    first = prefill(model, [tokens[:12]], cache=pool.rows([[0, 1, 2, 3]], [0]))
    got = decode_step(model, torch.tensor(tokens[12:]), cache=pool.rows([[0, 1, 2, 3]], [12]))
    assert torch.isfinite(first).all() and apart(got, contiguous(model, tokens, 0)) <= CLOSE


@pytest.mark.parametrize("path", PATHS)
def test_b018_nobody_elses_page_changes(path):
    """Sequence A owns page 0. Others are prefilled with padding and decoded: page 0 stays as it was, bit for bit."""
    model = model_of(LLAMA, path)
    pool = model.new_pool(pages=8, page_tokens=PAGE)
    prefill(model, [tiny.ids(4)], cache=pool.rows([[0]], [0]))
    before = [tensor[0].clone() for tensor in (*pool.keys, *pool.values)]
    tables, prompts = [[1, 2], [3], [4, 5]], [tiny.ids(5, seed=2), tiny.ids(2, seed=3), tiny.ids(7, seed=4)]
    logits = prefill(model, prompts, cache=pool.rows(tables, [0, 0, 0]))
    decode_step(model, logits.argmax(-1), cache=pool.rows(tables, [5, 2, 7]))
    assert all(torch.equal(old, tensor[0]) for old, tensor in zip(before, (*pool.keys, *pool.values), strict=True))


def test_b013_a_page_used_again_shows_nothing_of_its_last_owner():
    """A, then B in A's pages, then A again: the third run equals the first. Prefixes are not shared, so nothing can be hit."""
    model = tiny.decoder(tiny.LLAMA)
    pool, a, b = model.new_pool(pages=2, page_tokens=PAGE), list(range(1, 9)), list(range(11, 19))
    first, other, again = (prefill(model, [tokens], cache=pool.rows([[0, 1]], [0])) for tokens in (a, b, a))
    assert torch.equal(first, again) and not torch.equal(first, other)
    short = prefill(model, [a[:2]], cache=pool.rows([[1]], [0]))
    assert apart(short, contiguous(model, a[:2], 0)) <= CLOSE


def test_a_page_fault_would_show_as_a_wrong_mean():
    """With all queries zero, attention is the mean of the visible values: V = 1 ... 7 over two pages of 4 gives 4."""
    config = tiny.GPT2
    pool = PagePool(config, pages=3, page_tokens=4)
    rows = pool.rows([[2, 0]], [0])
    keys = rows.place(torch.arange(7)[None])
    value = torch.arange(1.0, 8).view(1, 1, 7, 1).expand(1, config.n_kv_heads, 7, config.head_dim)
    k, v = rows.append(0, torch.ones_like(value), value)
    seen = visible_keys(torch.tensor([[6]]), keys)[:, None]
    mixed = attend(torch.zeros(1, config.n_heads, 1, config.head_dim), k, v, visible=seen)
    assert torch.allclose(mixed, torch.full_like(mixed, 4.0))
    assert keys.tolist() == [[0, 1, 2, 3, 4, 5, 6, PAD_POSITION]]


def test_what_does_not_fit_is_refused_before_anything_is_written():
    model = tiny.decoder(tiny.LLAMA)
    pool = model.new_pool(pages=4, page_tokens=PAGE)
    before = [tensor.clone() for tensor in pool.keys]
    for tables, lengths, prompts, words in (([[0]], [0], [[1] * 5], "5 more tokens .* pages for 4 tokens that hold 0"),
                                            ([[0], [1, 2]], [0, 0], [[1] * 5, [1] * 8], "row 0 would hold 5 tokens and its pages 4")):  # fmt: skip
        with pytest.raises(ContextError, match=words):
            prefill(model, prompts, cache=pool.rows(tables, lengths))
    with pytest.raises(ContextError, match="more tokens"):
        decode_step(model, torch.tensor([1]), cache=pool.rows([[0]], [4]))
    for tables in ([[]], [[4]], [[-1]]):
        with pytest.raises(ValueError, match="from 0 to 3"):
            pool.rows(tables, [0])
    with pytest.raises(ContextError, match="this cache is of"):
        prefill(tiny.decoder(tiny.GPT2), [[1]], cache=pool.rows([[0]], [0]))
    with pytest.raises(ValueError, match="holds nothing"):
        model.new_pool(pages=0)
    assert all(torch.equal(old, tensor) for old, tensor in zip(before, pool.keys, strict=True))


def test_bytes_are_those_of_the_contiguous_cache():
    model = tiny.decoder(tiny.LLAMA)
    pool, cache = model.new_pool(pages=8, page_tokens=4), model.new_cache(max_len=32)
    assert pool.bytes_per_token == cache.bytes_per_token
    assert pool.allocated_bytes == 32 * cache.bytes_per_token == sum(tensor.nbytes for tensor in (*pool.keys, *pool.values))
    assert pool.rows([[0, 1], [2]], [5, 3]).read_bytes() == (6 + 4) * pool.bytes_per_token


@pytest.mark.skipif(kernels.no_compiler("cpu") is not None, reason="nothing compiles here")
def test_pages_compile_once_for_all_batches_contexts_and_pools():
    model = model_of(LLAMA, "fast")
    steps = [(2, 3, 20), (5, 17, 40), (3, 33, 64), (1, 9, 20), (1, 40, 64)]
    for rows, held, pages in [(2, 3, 8), (1, 3, 8), *steps]:
        made = compiled()
        pool, each = model.new_pool(pages=pages, page_tokens=4), -(-(held + 1) // 4)
        with no_recompilation():
            tables = [[(row * each + page) % pages for page in range(each)] for row in range(rows)]
            decode_step(model, torch.zeros(rows, dtype=torch.long), cache=pool.rows(tables, [held] * rows))
        assert (rows, held, pages) not in steps or compiled() == made
