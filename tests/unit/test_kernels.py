"""The fast path gives what the eager decoder gives, whatever the cache has been through, and compiles once."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import tiny
from decodelab.decoder import kernels, weights
from decodelab.decoder.cache import CHUNK, PAD_POSITION, ContextError
from decodelab.decoder.generate import decode_step, generate, prefill
from decodelab.decoder.model import Decoder
from pairs import GPT2, INT8_ERROR, LLAMA, QWEN, TOLERANCE, apart, build, pair
from tiny import ids

FORMATS = [(LLAMA, "float32"), (GPT2, "float32"), (QWEN, "float32"), (LLAMA, "bfloat16"), (LLAMA, "int8")]
EVERY = pytest.mark.parametrize(("config", "dtype"), FORMATS, ids=[f"{config.name}-{dtype}" for config, dtype in FORMATS])
SHAPES = pytest.mark.parametrize("config", [LLAMA, GPT2], ids=lambda config: config.name)
CLOSE = TOLERANCE["float32"]
needs_compiler = pytest.mark.skipif(kernels.no_compiler("cpu") is not None, reason=f"nothing compiles here: {kernels.no_compiler('cpu')}")
pytestmark = needs_compiler


def step(model, token, cache):
    return decode_step(model, torch.tensor([token]), cache=cache)


def uncached(model, tokens):
    """Eager logits of the last token, computed from nothing."""
    return prefill(model, [tokens], cache=model.new_cache(max_len=len(tokens)))


def read_in(model, tokens, *, max_len):
    """A cache that holds these tokens."""
    cache = model.new_cache(max_len=max_len)
    prefill(model, [tokens], cache=cache)
    return cache


def compiled() -> int:
    """Graphs that torch.compile has made in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def no_recompilation():
    """Inside, compiling anything again is an error."""
    return torch._dynamo.config.patch(error_on_recompile=True)


# --- the same logits ----------------------------------------------------------------------------------------------


@EVERY
def test_every_length_from_one_step_at_a_time(config, dtype):
    """Lengths 1 ... 33, in caches of just that length as well as in one that grows; chunks end at 16 and 32."""
    fast, eager = pair(config, dtype)
    tokens = ids(34)
    growing, reference = read_in(fast, tokens[:1], max_len=34), read_in(eager, tokens[:1], max_len=34)
    for length in range(1, 34):
        expected = step(eager, tokens[length], reference)
        assert apart(step(fast, tokens[length], growing), expected) < TOLERANCE[dtype], length
        short = read_in(fast, tokens[:length], max_len=length + 1)
        read = read_in(eager, tokens[:length], max_len=length + 1)
        assert apart(step(fast, tokens[length], short), step(eager, tokens[length], read)) < TOLERANCE[dtype], length


@EVERY
def test_at_four_thousand_tokens(config, dtype):
    """Steps at 4,095 ... 4,100 tokens, past the border of a chunk, after a prefill of all that stands before."""
    fast, eager = pair(config, dtype)
    tokens = ids(4100)
    caches = [read_in(model, tokens[:4094], max_len=4100) for model in (fast, eager)]
    for token in tokens[4094:]:
        ours, expected = (step(model, token, cache) for model, cache in zip((fast, eager), caches, strict=True))
        assert apart(ours, expected) < TOLERANCE[dtype]


def test_bfloat16_is_as_near_to_float32_as_the_eager_decoder_is():
    """Where two roundings differ, neither is the right one: both stay equally far from the exact result."""
    (fast, eager), exact = pair(LLAMA, "bfloat16"), pair(LLAMA)[1]
    distance = {"fast": [], "eager": []}
    for seed in range(3):
        caches = [read_in(model, ids(1, seed=seed), max_len=20) for model in (fast, eager, exact)]
        for token in ids(15, seed=seed + 10):
            ours, theirs, right = (step(model, token, cache) for model, cache in zip((fast, eager, exact), caches, strict=True))
            distance["fast"].append(apart(ours, right))
            distance["eager"].append(apart(theirs, right))
    assert sum(distance["fast"]) < 1.5 * sum(distance["eager"])
    assert max(distance["fast"]) < TOLERANCE["bfloat16"]


def test_int8_against_float32_of_the_same_weights():
    """Rounding the matrices moves the logits, by a stated amount, on prefill and on every step alike."""
    fast, exact = pair(LLAMA, "int8")[0], pair(LLAMA)[1]
    tokens = ids(34)
    assert apart(uncached(fast, tokens), uncached(exact, tokens)) < INT8_ERROR
    caches = [read_in(model, tokens[:1], max_len=34) for model in (fast, exact)]
    errors = [apart(step(fast, token, caches[0]), step(exact, token, caches[1])) for token in tokens[1:]]
    assert 1e-4 < max(errors) < INT8_ERROR  # below, it would not be int8


@EVERY
def test_greedy_text_is_equal_up_to_near_ties(config, dtype):
    """Where the texts part, the eager decoder itself held the two tokens for equal."""
    fast, eager = pair(config, dtype)
    seen = set()
    for seed in (1, 2):
        prompt = ids(5, seed=seed)
        ours, theirs = ([s.token for s in generate(model, prompt, max_tokens=24)] for model in (fast, eager))
        seen |= set(ours)
        parted = [count for count, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if mine != other]
        if parted:
            mine, other = ours[parted[0]], theirs[parted[0]]
            logits = uncached(eager, prompt + theirs[: parted[0]])[0]
            assert float(logits[other] - logits[mine]) <= 2 * TOLERANCE[dtype] * float(logits.abs().max())
    assert len(seen) > 3  # texts of one token would be equal for no reason


def test_every_row_and_last_have_the_shapes_of_the_eager_path():
    """A pass of one token goes the fast way from `forward` too, with the shapes that forward promises."""
    fast, eager = pair(LLAMA)
    caches = [model.new_cache(max_len=4) for model in (fast, eager)]
    token = torch.tensor([[7]])
    for options in ({}, {"every_row": True}, {"last": torch.tensor([0])}):
        ours, theirs = (model(token, cache=cache, **options) for model, cache in zip((fast, eager), caches, strict=True))
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.float32
        assert apart(ours, theirs) < CLOSE
    assert caches[0].length == 3


# --- batches, padding ---------------------------------------------------------------------------------------------


def singles(model, rows, *, max_len):
    """Each prompt in an eager cache of its own, and their logits."""
    caches = [model.new_cache(max_len=max_len) for _ in rows]
    return caches, torch.cat([prefill(model, [row], cache=cache) for row, cache in zip(rows, caches, strict=True)])


@SHAPES
@pytest.mark.parametrize("side", ["even", "left", "right"])
def test_rows_of_a_batch_equal_single_rows(config, side):
    """B008, B017: four rows of one length, or padded on either side; 25 steps, past two chunks; the junk is unseen."""
    fast, eager = pair(config)
    lengths = [9] * 4 if side == "even" else [3, 9, 5, 1]
    rows = [ids(length, seed=number) for number, length in enumerate(lengths)]
    cache, (alone, expected) = fast.new_cache(max_len=40, batch=4), singles(eager, rows, max_len=40)
    if side == "left":
        tokens, positions = torch.full((4, 9), 63), torch.full((4, 9), PAD_POSITION)
        for number, row in enumerate(rows):
            tokens[number, 9 - len(row) :], positions[number, 9 - len(row) :] = torch.tensor(row), torch.arange(len(row))
        out = fast(tokens, cache=cache, positions=positions)
    else:
        out = prefill(fast, rows, cache=cache)
    assert apart(out, expected) < CLOSE
    for number in range(25):
        new = torch.tensor([number, number + 9, number + 17, 63 - number]) % 64
        expected = torch.cat([decode_step(eager, new[i : i + 1], cache=single) for i, single in enumerate(alone)])
        assert apart(decode_step(fast, new, cache=cache), expected) < CLOSE
    assert cache.next_positions().tolist() == [length + 25 for length in lengths]


@SHAPES
def test_prompts_of_unequal_length_token_by_token(config):
    """A prefill in chunks of one token is made of fast steps, in which the short rows are padding: no position is out of range."""
    fast, eager = pair(config)
    rows = [ids(3), ids(9, seed=2)]
    out = prefill(fast, rows, cache=fast.new_cache(max_len=9, batch=2), chunk=1)
    assert apart(out, torch.cat([uncached(eager, row) for row in rows])) < CLOSE


@SHAPES
def test_a_row_of_only_padding_stays_finite(config):
    """B008: its logits mean nothing, but are numbers, and its neighbour does not notice."""
    fast, eager = pair(config)
    positions = torch.stack((torch.arange(6), torch.full((6,), PAD_POSITION)))
    cache, prompt = fast.new_cache(max_len=40, batch=2), ids(6)
    fast(torch.tensor([prompt, [0] * 6]), cache=cache, positions=positions)
    alone = read_in(eager, prompt, max_len=40)
    for number in range(20):
        places = torch.tensor([[6 + number], [PAD_POSITION]])
        out = fast(torch.tensor([[number], [0]]), cache=cache, positions=places)
        assert bool(out.isfinite().all())
        assert apart(out[:1], step(eager, number, alone)) < CLOSE
    assert bool(decode_step(fast, torch.tensor([1, 2]), cache=cache).isfinite().all())  # the padding row begins at its position 0


@SHAPES
def test_a_padded_cache_used_again(config):
    """After a crop to nothing, columns behind the new tokens still hold low positions of the old rows: they stay unseen."""
    fast, eager = pair(config)
    cache = fast.new_cache(max_len=40, batch=2)
    prefill(fast, [ids(3), ids(9, seed=2)], cache=cache)
    for number in range(10):
        decode_step(fast, torch.tensor([number, number]), cache=cache)
    cache.crop(0)
    rows = [ids(8, seed=4), ids(8, seed=5)]
    prefill(fast, rows, cache=cache)
    assert int(cache.positions[0, 9]) == 3
    alone, _ = singles(eager, rows, max_len=40)
    for number in range(12):
        new = torch.tensor([number, 63 - number])
        expected = torch.cat([decode_step(eager, new[i : i + 1], cache=single) for i, single in enumerate(alone)])
        assert apart(decode_step(fast, new, cache=cache), expected) < CLOSE


# --- what a cache goes through ------------------------------------------------------------------------------------


def test_crop_then_continue():
    """B011: a draft of five is read, two of it are kept, as speculation does; then others follow."""
    fast, eager = pair(LLAMA)
    kept, draft, later = ids(12), ids(5, seed=2), ids(25, seed=3)
    cache = read_in(fast, kept, max_len=48)
    for token in draft:
        step(fast, token, cache)
    cache.crop(14)
    text = kept + draft[:2]
    for token in later:
        text.append(token)
        assert apart(step(fast, token, cache), uncached(eager, text)) < CLOSE
    cache.crop(0)
    assert apart(step(fast, 9, cache), uncached(eager, [9])) < CLOSE


def test_two_continuations_of_a_copy():
    """B015: neither sees the other, nor does the original; it may be continued in between."""
    fast, eager = pair(LLAMA)
    prefix = ids(15)
    saved = read_in(fast, prefix, max_len=40)
    first, second = saved.copy(), saved.copy()
    texts = {id(cache): list(prefix) for cache in (saved, first, second)}
    for number in range(8):
        for cache, offset in ((first, 1), (second, 20), (saved, 40)):
            texts[id(cache)].append(number + offset)
            assert apart(step(fast, number + offset, cache), uncached(eager, texts[id(cache)])) < CLOSE


def test_two_caches_of_different_length_in_turn():
    """What one step reads depends on its own cache, not on the one before."""
    fast, eager = pair(LLAMA)
    texts, caches = [ids(3), ids(70, seed=2)], []
    for text, max_len in zip(texts, (20, 500), strict=True):
        caches.append(read_in(fast, text, max_len=max_len))
    for token in ids(15, seed=4):
        for text, cache in zip(texts, caches, strict=True):
            text.append(token)
            assert apart(step(fast, token, cache), uncached(eager, text)) < CLOSE


@EVERY
def test_a_cache_full_of_nan(config, dtype):
    """B009: slots that were never written are never seen, at any length and after a crop."""
    fast, eager = pair(config, dtype)
    cache, reference, tokens = fast.new_cache(max_len=36), eager.new_cache(max_len=36), ids(36)
    for tensor in (*cache.keys, *cache.values):
        tensor.fill_(torch.nan)
    for model, held in ((fast, cache), (eager, reference)):
        prefill(model, [tokens[:20]], cache=held)
        held.crop(4)
    for token in tokens[4:]:
        assert apart(step(fast, token, cache), step(eager, token, reference)) < TOLERANCE[dtype]


def test_a_random_fill_stays_as_it_was():
    """Moving `length` over a filled cache, as the labs do, writes one column a step and leaves no zeros behind."""
    fast, eager = pair(LLAMA)
    caches = [model.new_cache(max_len=200) for model in (fast, eager)]
    for cache in caches:
        cache.fill_random(200, generator=torch.Generator().manual_seed(1))
    for length in (20, 190, 20, 100):
        for cache in caches:
            cache.length = length
        assert apart(step(fast, 5, caches[0]), step(eager, 5, caches[1])) < CLOSE
    assert float(caches[0].keys[1][:, :, :200].abs().min()) > 0


def test_a_step_that_does_not_fit_writes_nothing():
    """B007: slots and positions are checked before the fast path writes."""
    fast = pair(GPT2)[0]
    cache = read_in(fast, ids(20), max_len=20)
    before = [tensor.clone() for tensor in (*cache.keys, *cache.values)]
    with pytest.raises(ContextError, match="1 more tokens need 21 cache slots but the cache holds 20"):
        step(fast, 1, cache)
    with pytest.raises(ContextError, match="this cache is of"):
        decode_step(fast, torch.tensor([1, 2]), cache=cache)
    assert cache.length == 20 and all(map(torch.equal, before, (*cache.keys, *cache.values)))
    short = build(tiny.GPT2, "float32", path="fast")
    full = read_in(short, ids(64), max_len=80)
    with pytest.raises(ContextError, match="this pass reaches 65"):
        step(short, 1, full)
    full.crop(63)
    assert bool(step(short, 1, full).isfinite().all()) and full.length == 64


def test_gradient_modes_make_no_difference():
    """Caches and steps inside torch.inference_mode, inside no_grad and outside, mixed: bit-equal logits, nothing compiled again."""
    fast, tokens = pair(LLAMA)[0], ids(12)
    modes = {"inference": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}
    seen = []
    with no_recompilation():
        for make in modes.values():
            for run in modes.values():
                with make():
                    cache = read_in(fast, tokens[:4], max_len=40)
                with run():
                    seen.append(torch.cat([step(fast, token, cache) for token in tokens]))
                with make():
                    cache.crop(5)
                    step(fast, 1, cache.copy())
    assert all(torch.equal(seen[0], other) for other in seen[1:])


# --- compiled once ------------------------------------------------------------------------------------------------


def test_nothing_is_compiled_again_as_the_context_grows():
    """Contexts, cache sizes, batches above one, padding, a second load of the same shape: one compilation serves them all."""
    fast = pair(LLAMA)[0]
    decode_step(fast, torch.tensor([1, 2]), cache=fast.new_cache(max_len=4, batch=2))  # the first batch compiles once
    before = compiled()
    with no_recompilation():
        for model in (fast, build(LLAMA, "float32", path="fast", seed=5)):
            for batch in (1, 2, 3, 7, 16):
                for max_len in (1, 20, 33, 64, 500):
                    cache = model.new_cache(max_len=max_len, batch=batch)
                    for length in {0, 15, 31, 32, 63, 498, max_len - 1}:
                        if length < max_len:
                            cache.fill_random(length)
                            decode_step(model, torch.zeros(batch, dtype=torch.long), cache=cache)
            ragged = model.new_cache(max_len=60, batch=3)
            prefill(model, [ids(3), ids(9), ids(1)], cache=ragged)
            for _ in range(40):
                decode_step(model, torch.tensor([1, 2, 3]), cache=ragged)
    assert compiled() == before


FIRST_STEPS = """
import torch
from decodelab.decoder.generate import decode_step
from pairs import LLAMA, build
model = build(LLAMA, "float32", path="fast")
for first, batches in ((1, (1,)), (2, (2, 3, 8))):
    decode_step(model, torch.zeros(first, dtype=torch.long), cache=model.new_cache(max_len=3000, batch=first)) if first > 1 else None
    with torch._dynamo.config.patch(error_on_recompile=True):
        for batch in batches:
            for max_len, length in ((1, 0), (3000, 0), (3000, 40), (20, 15), (500, 450), (3000, 2999)):
                cache = model.new_cache(max_len=max_len, batch=batch)
                cache.fill_random(length)
                decode_step(model, torch.zeros(batch, dtype=torch.long), cache=cache)
print(torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


def test_the_first_steps_of_a_process_use_what_was_compiled_at_load():
    """A size that was not marked would be compiled for again at the first step, and only there: later it is known to vary."""
    setting = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run([sys.executable, "-c", FIRST_STEPS], env=setting, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split()[-1] == "4"  # layers and head for one row, both again for several


def test_the_layers_share_one_compilation():
    """A deeper model of the same width compiles nothing, where its layers go into the same groups."""
    pair(LLAMA)
    before = compiled()
    with no_recompilation():
        deep = build(replace(LLAMA, n_layers=4), "float32", path="fast")
        logits = step(deep, 1, deep.new_cache(max_len=4))
    reference = build(replace(LLAMA, n_layers=4), "float32", path="eager")
    assert apart(logits, uncached(reference, [1])) < CLOSE
    assert compiled() == before


THREADS = """
import torch
from decodelab.decoder.generate import decode_step
from pairs import LLAMA, apart, build
fast, eager = (build(LLAMA, "float32", path=path) for path in ("fast", "eager"))
torch._dynamo.config.recompile_limit = 1
torch.set_num_threads(torch.get_num_threads() % 2 + 1)
for rows in (1, 3):
    ids = torch.arange(rows)
    print(apart(*(decode_step(model, ids, cache=model.new_cache(max_len=20, batch=rows)) for model in (fast, eager))) < 1e-5)
"""


def test_another_number_of_threads_after_the_load():
    """torch compiles for a number of threads, and a process that has compiled much refuses to go on; the step makes room for it."""
    setting = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run([sys.executable, "-c", THREADS], env=setting, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr, done.stdout.split()) == (0, "", ["True", "True"])


# --- int8 ---------------------------------------------------------------------------------------------------------


def test_int8_rounds_each_row_to_its_own_scale():
    """|w - q * scale| <= scale / 2, the largest of a row becomes +-127, a row of zeros stays zero; norms and biases stay."""
    model, exact = weights.random(QWEN, path="eager"), weights.random(QWEN, path="eager")
    for one in (model, exact):
        one.blocks[0].mlp.up.weight[3] = 0
    kernels.quantise(model)
    scales = {name: module.scale for name, module in model.named_modules() if getattr(module, "scale", None) is not None}
    assert len(scales) == 2 + 2 * 7  # embedding, head, and seven matrices a layer
    kept = dict(model.named_parameters())
    for name, weight in exact.named_parameters():
        if weight.ndim == 1:
            assert torch.equal(kept[name], weight), name
            continue
        scale = scales[name.removesuffix(".weight")]
        assert kept[name].dtype == torch.int8 and scale.shape == weight.shape[:1]
        assert bool(((weight - kept[name] * scale[:, None]).abs() <= scale[:, None] / 2 * 1.001).all()), name
        largest = kept[name].abs().amax(-1)
        assert set(largest.tolist()) == ({0, 127} if name == "blocks.0.mlp.up.weight" else {127})


@pytest.mark.parametrize("path", ["fast", "eager"])
def test_int8_takes_a_quarter_of_the_bytes_and_a_tied_matrix_stays_tied(path):
    """Matrices: 1 byte a value and 4 a row. By `weights.random` itself, as a learner asks for it."""
    with no_recompilation():
        model = weights.random(LLAMA, dtype="int8", path=path, say=lambda _: None)
    exact = weights.random(LLAMA, path="eager")
    assert model.path == path and model.dtype == torch.float32 and model.new_cache(max_len=4).keys[0].dtype == torch.float32
    assert model.head.weight is model.embed.weight and model.head.scale is model.embed.scale
    names = [name for name, _ in exact.named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names
    matrices = [name for name, weight in exact.named_parameters() if weight.ndim == 2]
    assert {model.get_parameter(name).dtype for name in matrices} == {torch.int8}

    def stored(one: Decoder) -> int:
        scales = [buffer for name, buffer in one.named_buffers() if name.endswith("scale")]  # named_buffers gives a shared one once
        return sum(tensor.nbytes for tensor in (*one.parameters(), *scales))

    values, rows = (sum(exact.get_parameter(name).shape[axis].numel() for name in matrices) for axis in (slice(None), slice(1)))
    assert stored(exact) - stored(model) == 3 * values - 4 * rows
    assert stored(model) < 0.4 * stored(exact)  # 0.25 and the scales, which weigh little in rows longer than these


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_fast_path_copies_no_weight(dtype):
    """It holds the model's own tensors: what is changed in the model is changed in its steps."""
    model = build(LLAMA, dtype, path="fast")
    held = {id(model.fast.head.weight), *(id(rows.weight) for w in model.fast.blocks for rows in flat(w) if isinstance(rows, kernels.Rows))}
    assert held <= {id(parameter) for parameter in model.parameters()}
    assert model.head.weight is model.embed.weight
    before = step(model, 1, model.new_cache(max_len=2))
    model.blocks[1].mlp.down.weight.zero_()
    assert apart(step(model, 1, model.new_cache(max_len=2)), before) > 1e-3


def flat(parts):
    """Every Rows of a block, whatever the nesting."""
    for part in parts:
        if isinstance(part, tuple) and not isinstance(part, kernels.Rows):
            yield from flat(part)
        else:
            yield part


# --- choosing a path ----------------------------------------------------------------------------------------------


def path_of(path, monkeypatch, *, environment=None, problem=None):
    """(the model's path, what was said) of a load with this path argument."""
    monkeypatch.delenv("DECODELAB_PATH", raising=False)
    if environment is not None:
        monkeypatch.setenv("DECODELAB_PATH", environment)
    if problem:
        monkeypatch.setattr(kernels, "no_compiler", lambda device: problem)
    said = []
    model = weights.random(LLAMA, path=path, say=said.append)
    return model.path, said


@pytest.mark.parametrize(
    ("path", "environment", "expected"),
    [("auto", None, "fast"), ("auto", "eager", "eager"), ("auto", "fast", "fast"), ("eager", "fast", "eager"), ("fast", "eager", "fast")],
)
def test_the_argument_wins_over_the_environment_and_auto_is_fast(path, environment, expected, monkeypatch):
    chosen, said = path_of(path, monkeypatch, environment=environment)
    assert chosen == expected and len(said) == (expected == "fast")


@pytest.mark.parametrize(("path", "environment"), [("quick", None), ("auto", "quick"), ("", None)])
def test_an_unknown_path_is_one_line(path, environment, monkeypatch):
    with pytest.raises(ValueError, match=r"^path is '(quick)?'; use one of auto, fast, eager$"):
        path_of(path, monkeypatch, environment=environment)


def test_without_a_compiler_auto_says_so_and_runs_eager(monkeypatch):
    chosen, said = path_of("auto", monkeypatch, problem="no working C++ compiler")
    assert chosen == "eager" and len(said) == 1 and "\n" not in said[0]
    assert "no working C++ compiler" in said[0] and "eager" in said[0]
    assert path_of("eager", monkeypatch, problem="no working C++ compiler") == ("eager", [])
    with pytest.raises(ValueError, match='path="fast" needs a working torch.compile; here: no working C.. compiler$'):
        path_of("fast", monkeypatch, problem="no working C++ compiler")


def test_the_probe_answers_with_one_line(monkeypatch):
    """Whatever torch.compile raises, and however long it is."""

    def broken(*_, **__):
        raise RuntimeError("first line\nsecond line")

    monkeypatch.setattr(torch, "compile", broken)
    assert kernels.no_compiler.__wrapped__("cpu") == "RuntimeError: first line"


WITHOUT_COMPILER = """
from decodelab.decoder import weights
from decodelab.decoder.generate import generate
from pairs import LLAMA
model = weights.random(LLAMA)
print(model.path, [step.token for step in generate(model, [1, 2, 3], max_tokens=8)])
try:
    weights.random(LLAMA, path="fast")
except ValueError as fault:
    print(fault)
"""


def test_a_machine_without_a_compiler(tmp_path):
    """A process that finds no C++ compiler and no compiled kernel: one line, the eager text, nothing on stderr."""
    setting = {name: value for name, value in os.environ.items() if name not in ("DECODELAB_PATH", "CC")}
    setting |= {"CXX": str(tmp_path / "absent"), "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], env=setting, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    said, text, refused = done.stdout.splitlines()
    assert said.startswith("Nothing compiles here (") and said.endswith("so the decoder runs eager, and the eager card predicts it.")
    expected = [s.token for s in generate(weights.random(LLAMA, path="eager"), [1, 2, 3], max_tokens=8)]
    assert text == f"eager {expected}"
    assert refused.startswith('path="fast" needs a working torch.compile; here: ')


# --- buckets and graphs, which a CPU runs without recording -------------------------------------------------------


@pytest.fixture
def bucketed(monkeypatch):
    """(fast model that steps by graphs over buckets of 64, eager model, the graphs recorded)."""
    (fast, eager), made = pair(LLAMA), []

    class Counted(kernels.Graph):
        def __init__(self, *arguments):
            made.append(self)
            super().__init__(*arguments)

    monkeypatch.setattr(kernels, "Graph", Counted)
    monkeypatch.setattr(fast.fast, "graphs", True)
    monkeypatch.setattr(fast.fast, "bucket", 4 * CHUNK)
    return fast, eager, made


def test_one_graph_for_each_bucket(bucketed):
    """Equal logits on both sides of 64 and 128 tokens; the last bucket ends where the cache does."""
    fast, eager, made = bucketed
    tokens = ids(150)
    cache, reference = read_in(fast, tokens[:3], max_len=150), read_in(eager, tokens[:3], max_len=150)
    counts = {}
    for token in tokens[3:]:
        assert apart(step(fast, token, cache), step(eager, token, reference)) < CLOSE
        counts[cache.length] = len(made)
    assert (counts[4], counts[64], counts[65], counts[128], counts[129], counts[150]) == (1, 1, 2, 2, 3, 3)
    assert sorted(slots for _, slots in cache.graphs) == [64, 128, 160]


def test_a_graph_outlives_crop_reset_and_fill_and_dies_with_its_cache(bucketed):
    """It holds the cache's addresses, and takes token and column as inputs: those may change, the memory may not."""
    fast, eager, made = bucketed
    cache = read_in(fast, ids(10), max_len=60)
    step(fast, 1, cache), step(fast, 2, cache)
    cache.crop(5)
    assert apart(step(fast, 7, cache), uncached(eager, [*ids(10)[:5], 7])) < CLOSE
    cache.reset()
    prefill(fast, [ids(8, seed=3)], cache=cache)
    assert apart(step(fast, 9, cache), uncached(eager, [*ids(8, seed=3), 9])) < CLOSE
    reference = eager.new_cache(max_len=60)
    for held in (cache, reference):
        held.fill_random(40, generator=torch.Generator().manual_seed(2))
    assert apart(step(fast, 3, cache), step(eager, 3, reference)) < CLOSE
    assert len(made) == 1
    twin = cache.copy()
    assert twin.graphs == {}
    assert apart(step(fast, 4, twin), step(eager, 4, reference)) < CLOSE
    assert len(made) == 2 and cache.length == 41
    cache.reset()
    prefill(fast, [ids(2), ids(2)][:1], cache=cache)
    assert apart(step(fast, 4, cache), uncached(eager, [*ids(2), 4])) < CLOSE


def test_a_cache_that_two_models_share_has_a_graph_of_each(bucketed):
    """Two models of one shape may take turns on one cache: neither may replay the other's weights."""
    fast, _, made = bucketed
    other = build(LLAMA, "float32", path="fast", seed=9)
    other.fast.graphs, other.fast.bucket = True, fast.fast.bucket
    cache = read_in(fast, ids(6), max_len=60)
    step(fast, 1, cache)
    cache.reset()
    prefill(other, [ids(6)], cache=cache)
    assert apart(step(other, 1, cache), uncached(build(LLAMA, "float32", path="eager", seed=9), [*ids(6), 1])) < CLOSE
    assert len(made) == 2


def test_ragged_batches_take_no_graph(bucketed):
    """Their positions are in a tensor that a reset drops, so they run step by step, and stay right across buckets."""
    fast, eager, made = bucketed
    rows = [ids(50), ids(58, seed=2)]
    cache, (alone, _) = fast.new_cache(max_len=100, batch=2), singles(eager, rows, max_len=100)
    prefill(fast, rows, cache=cache)
    for number in range(12):
        new = torch.tensor([number, number + 30])
        expected = torch.cat([decode_step(eager, new[i : i + 1], cache=single) for i, single in enumerate(alone)])
        assert apart(decode_step(fast, new, cache=cache), expected) < CLOSE
    assert made == []
