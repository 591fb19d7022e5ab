"""Lessons 01 and 02: passes counted and timed, one decode step line by line, the explorers, the numbers in the prose."""

import json
import random
import re
from dataclasses import replace
from functools import cache

import pytest
import torch

import course
from decodelab.arithmetic import catalog, cost
from decodelab.arithmetic.catalog import Workload, model
from decodelab.arithmetic.planning import sequences_that_fit
from decodelab.arithmetic.records import summarise
from decodelab.decoder import generate, weights
from decodelab.measuring import experiments, machine
from decodelab.measuring.experiments import PassesResult, TimedPass
from decodelab.teaching import plots, widgets
from test_clock import CARD
from tiny import LLAMA, decoder, ids

LESSONS = course.ROOT / "lessons"


@cache
def notebook_cells(name: str) -> dict[str, str]:
    """The cells of a lesson by id, code and text."""
    content = json.loads((LESSONS / name).read_text(encoding="utf-8"))
    return {cell["id"]: (cell["cell_type"], "".join(cell["source"])) for cell in content["cells"]}


# --- one pass, counted ----------------------------------------------------------------------------------------------


def test_a_pass_is_the_sum_of_its_parts():
    """By hand for GPT-2 at 1024 tokens: B070's pairs, B071's 2 per parameter, B062's 36 MiB of K and V."""
    step = cost.pass_work(model("gpt2"), new_tokens=1, context=1024)
    layer = 12 * 768 * 768 + 13 * 768  # matrices, biases and the two norms
    step_values = 12 * layer + 2 * 768 + 50_257 * 768 + 2 * 768  # final norm, output matrix, one row of each embedding
    assert step.flops == 2 * (12 * 12 * 768 * 768 + 50_257 * 768) + 37_748_736
    assert step.bytes == 2 * step_values + 36 * 2**20
    assert step.intensity == step.flops / step.bytes
    prompt = cost.pass_work(model("gpt2"), new_tokens=1024, context=1024)
    assert prompt.flops == 2 * (1024 * 12 * 12 * 768 * 768 + 50_257 * 768) + 19_346_227_200
    assert prompt.bytes == step.bytes + 2 * 1023 * 2 * 768  # more rows of the embeddings, nothing else


def test_a_batch_shares_the_weights_and_not_the_cache():
    """FLOPs grow with the batch; bytes by its K and V and embedding rows; separate formats are kept apart."""
    one, four = (cost.pass_work(LLAMA, new_tokens=1, context=20, batch=batch) for batch in (1, 4))
    assert four.flops == 4 * one.flops
    assert four.bytes - one.bytes == 3 * (cost.kv_bytes(LLAMA, context=20) + 2 * LLAMA.hidden)
    mixed = cost.pass_work(LLAMA, new_tokens=1, context=20, weight_bytes_per_value=0.5, kv_bytes_per_value=1)
    assert mixed.bytes == cost.weight_bytes_per_step(LLAMA, dtype_bytes=0.5) + cost.kv_bytes(LLAMA, context=20, dtype_bytes=1)


# --- passes, timed --------------------------------------------------------------------------------------------------


def test_passes_run_the_shapes_they_name(monkeypatch):
    """Each pass feeds exactly its new tokens and ends at its context; counts are in the dtype that is loaded."""
    loaded, seen = decoder(LLAMA), []
    forward = loaded.forward
    monkeypatch.setattr(loaded, "forward", lambda ids, **kw: seen.append((ids.shape[1], kw["cache"].length + ids.shape[1])) or forward(ids, **kw))  # fmt: skip
    monkeypatch.setattr(machine, "read_bandwidth", lambda **_: 50e9)
    shapes = [(8, 8), (1, 9), (4, 12), (1, 2)]
    result = experiments.passes(loaded, CARD, shapes=shapes, rounds=2, warmup=1)
    assert set(seen) == set(shapes) and seen[:4] == shapes
    assert [(p.new_tokens, p.context) for p in result.passes] == shapes and result.note == ""
    step = result.passes[1]
    assert step.work == cost.pass_work(LLAMA, new_tokens=1, context=9, weight_bytes_per_value=4, kv_bytes_per_value=4)
    formats = {"weight_bytes_per_value": 4, "kv_bytes_per_value": 4}
    assert step.predicted_s == pytest.approx(cost.step_time(LLAMA, CARD.constants(LLAMA), context=9, **formats), rel=1e-12)
    assert result.roof_bytes_per_s == 50e9  # the better of the card's and the one re-measured
    assert cost.ATTENTION_CONVENTION in result._repr_html_() and cost.ATTENTION_CONVENTION in str(result)


def test_a_short_budget_leaves_out_the_last_shapes_and_says_which(monkeypatch):
    """What is left out is named; four passes are run in any case."""
    monkeypatch.setattr(machine, "read_bandwidth", lambda **_: 1e9)
    shapes = [(8, 8), (1, 8), (16, 16), (1, 16), (32, 32), (1, 32)]
    result = experiments.passes(decoder(LLAMA), CARD, shapes=shapes, rounds=1, budget_s=1e-6)
    assert [(p.new_tokens, p.context) for p in result.passes] == shapes[:4]
    assert result.note == "The budget of 1e-06 s left out 32 of 32, 1 of 32."


def timed(new_tokens: int, context: int, seconds: float) -> TimedPass:
    work = cost.pass_work(LLAMA, new_tokens=new_tokens, context=context)
    return TimedPass(new_tokens=new_tokens, context=context, work=work, predicted_s=seconds, taken=summarise([seconds]))


def test_the_sum_over_all_lengths_by_hand():
    """Uncached 1 ... 4 at 1 s (as the cached step), 2, 3, 4 s: 10 s; cached 1 s each: 4 s. Flat beyond what was timed."""
    passes = (timed(4, 4, 4.0), timed(1, 4, 1.0), timed(2, 2, 2.0), timed(1, 2, 1.0))
    result = PassesResult(model="tiny", card=CARD, passes=passes, roof_bytes_per_s=1e9)
    assert experiments.summed_passes(result, tokens=4) == (4.0, 10.0)
    assert experiments.summed_passes(result, tokens=6) == (6.0, 18.0)


def test_mfu_and_mbu_are_against_their_own_roofs():
    """1 s for the work: MFU against the card's GEMM rate, MBU against the re-measured read roof."""
    one = timed(1, 20, 1.0)
    card = replace(CARD, gemm_flops_per_s=2.0 * one.work.flops)
    result = PassesResult(model="tiny", card=card, passes=(one,), roof_bytes_per_s=4.0 * one.work.bytes)
    assert result.rows()[0][-2:] == ("0.50 of the roof", "0.25 of the roof")
    assert one.flops_per_s == one.work.flops


# --- one decode step, line by line ----------------------------------------------------------------------------------


def unrolled(loaded, prompt):
    """Runs the lesson's own cell after a prefill: (names of the cell, the decoder's own logits)."""
    held = loaded.new_cache(max_len=len(prompt) + 4)
    token = generate.prefill(loaded, [prompt], cache=held).argmax(-1)
    before = held.copy()
    names = {"torch": torch, "model": loaded, "held": held, "token": token, "step": experiments.Ledger(loaded, held)}
    exec(notebook_cells("02_kv_cache.ipynb")["step"][1], names)
    return names, generate.decode_step(loaded, token, cache=before), before


def test_the_unrolled_step_is_at_most_twelve_lines():
    lines = [line for line in notebook_cells("02_kv_cache.ipynb")["step"][1].splitlines() if line.strip()]
    assert 0 < len(lines) <= 12
    assert not any(";" in line for line in lines)


@pytest.mark.parametrize("config", [LLAMA, replace(LLAMA, tied_embeddings=True)], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prompt", [1, 7, 30])
def test_the_unrolled_step_equals_the_decoder_and_its_bytes_the_formula(config, dtype, prompt):
    """Logits bit for bit, cache too; the ledger's sums against the formula and against the real tensors."""
    loaded = weights.random(config, seed=3, dtype=dtype)
    names, own, twin = unrolled(loaded, ids(prompt))
    step, held = names["step"], names["held"]
    assert torch.equal(names["logits"], own)
    assert held.length == twin.length == prompt + 1
    assert all(torch.equal(a[:, :, : prompt + 1], b[:, :, : prompt + 1]) for a, b in zip(held.keys, twin.keys, strict=True))
    size = dtype.itemsize
    read = cost.weight_bytes_per_step(config, dtype_bytes=size) + cost.kv_bytes(config, context=prompt + 1, dtype_bytes=size)
    assert step.read_bytes == read
    assert step.written_bytes == cost.kv_bytes_per_token(config, dtype_bytes=size) == held.bytes_per_token


def test_the_unrolled_step_on_the_lessons_own_weights():
    """The real SmolLM2: logits equal, 269,515,008 B at context 21 in 16 bits; every parameter is entered once per layer."""
    loaded = weights.load("smollm2-135m", dtype="bfloat16")
    names, own, _ = unrolled(loaded, list(range(20)))
    assert torch.equal(names["logits"], own)
    step = names["step"]
    # 30 layers of 3,540,096 values, the final norm, the output matrix, one embedding row; then K and V of 21 tokens
    assert step.read_bytes == 2 * (30 * 3_540_096 + 576 + 49_152 * 576 + 576) + 21 * 23_040 == 269_515_008
    assert step.written_bytes == 23_040
    weights_entered = {e.tensor: e for e in step.entries.values() if e.tensor.endswith("weight")}
    assert len(weights_entered) == 12
    assert {e.times for name, e in weights_entered.items() if name.startswith("blocks")} == {30}
    assert weights_entered["embed.weight"].shape == (1, 576)


def test_the_ledgers_rows_name_line_tensor_shape_and_bytes():
    """Lines count from the cell's first; written bytes stand at the append, reads of the cache at the attention."""
    names, _, _ = unrolled(decoder(LLAMA), ids(5))
    step = names["step"]
    rows = {row[1]: row for row in step.rows()}
    assert rows["embed.weight"] == ("1", "embed.weight", "(1, 32)", "1", "128", "0")
    assert rows["K, appended"] == ("5", "K, appended", "(1, 2, 1, 8)", "2", "0", "128")
    assert rows["V, all"] == ("6", "V, all", "(1, 2, 6, 8)", "2", "768", "0")
    assert rows["sum"][-2:] == (f"{step.read_bytes:,}", f"{step.written_bytes:,}")
    assert repr(step).count("\n") == len(step.entries) and "0x" not in repr(step)
    assert step.activation_bytes > 0


# --- explorers ------------------------------------------------------------------------------------------------------


def shown(explorer, **values) -> str:
    """The explorer's text after its sliders were moved, and a fresh picture behind it."""
    for key, value in values.items():
        explorer.sliders[key].value = value
    assert bytes(explorer.picture.value).startswith(b"\x89PNG")
    return explorer.text


def some_states(explorer, count: int, *, seed: int = 0):
    """Every option of every slider alone, then `count` random states of all of them."""
    start = {key: slider.value for key, slider in explorer.sliders.items()}
    for key, slider in explorer.sliders.items():
        for option in slider.options:
            yield {**start, key: option}
    draw = random.Random(seed)
    for _ in range(count):
        yield {key: draw.choice(slider.options) for key, slider in explorer.sliders.items()}


EXPLORERS = {
    "roofline": lambda: widgets.roofline_explorer(CARD),
    "roofline without a card": lambda: widgets.roofline_explorer(),
    "cache": lambda: widgets.cache_explorer(model("llama-3.1-8b")),
    "capacity": lambda: widgets.capacity_explorer(CARD),
}


@pytest.mark.parametrize("make", EXPLORERS.values(), ids=EXPLORERS)
def test_no_state_of_an_explorer_fails(make, monkeypatch):
    """Every state gives numbers or a sentence with a way out; a sentence is in the picture too."""
    explorer, said = make(), []
    monkeypatch.setattr(explorer.canvas, "png", lambda: b"\x89PNG")
    monkeypatch.setattr(explorer.canvas, "say", said.append)
    for state in some_states(explorer, 60):
        said.clear()
        text = explorer.answer(state)
        assert text and "nan" not in text and "inf" not in text.replace("information", "")
        assert bool(said) == text.endswith("Move a slider.")
        assert not said or text.startswith(said[0])


def test_the_roofline_dots_are_the_formulas():
    explorer = widgets.roofline_explorer(CARD)
    text = shown(explorer, hardware="H200 SXM", model="Llama-3.1-8B", dtype="bfloat16", prompt=500)
    llama, floor = model("llama-3.1-8b"), cost.floor_constants(catalog.hardware("h200-sxm"))
    work = cost.pass_work(llama, new_tokens=500, context=500)
    seconds = cost.prefill_time(llama, floor, Workload(prompt_tokens=500, output_tokens=1))
    assert text.splitlines()[0] == "ridge 206 FLOP/B"
    assert text.splitlines()[1] == f"prefill: {work.intensity:.0f} FLOP/B, limited by arithmetic, {1e3 * seconds:.2f} ms"
    assert text.splitlines()[2].startswith("decode: 1.01 FLOP/B, limited by bytes, 3.14 ms")


def test_impossible_states_of_the_roofline_are_said_in_words():
    """Larger than the memory, more sequences than fit, too long, another dtype than the card's, a peak nobody gives."""
    explorer = widgets.roofline_explorer(CARD)
    assert "the card was measured in float32; for bfloat16" in shown(explorer, dtype="bfloat16").replace("This machine's", "the")
    assert shown(explorer, dtype="float32", model="Llama-3.1-8B").startswith("Llama-3.1-8B needs 32.1 GB for weights and 7.2 GB is there")  # fmt: skip
    assert "positions" in shown(explorer, model="SmolLM2-135M", prompt=10_000)
    assert "no source gives" in shown(explorer, prompt=100, hardware="B200").lower()
    text = shown(explorer, hardware="H100 SXM", dtype="bfloat16", model="Llama-3.1-8B", prompt=100_000, batch=256)
    assert "4 sequences of 100,001 tokens fit, not 256" in text
    assert min(explorer.sliders["batch"].options) == 1


def test_the_cache_explorer_offers_only_head_counts_that_divide():
    """B062: KV heads store, and query heads must share them evenly. MHA is four times GQA of 8, MQA an eighth."""
    explorer = widgets.cache_explorer(model("llama-3.1-8b"))
    assert explorer.sliders["kv_heads"].options == (1, 2, 4, 8, 16, 32)
    assert shown(explorer, kv_heads=8, context=8192).startswith("131.1 kB for each new token")
    assert "1.000 GiB at 8,192 tokens" in explorer.text
    assert shown(explorer, kv_heads=32).startswith("524.3 kB")
    assert shown(explorer, kv_heads=1).startswith("16.38 kB")
    assert shown(explorer, kv_heads=8, dtype="fp8").startswith("65.54 kB")
    assert "128.0 MiB at 8,192 tokens" in shown(explorer, dtype="bfloat16", windowed=32)  # 1,024 tokens of each layer
    odd = widgets.cache_explorer(model("smollm2-135m"), context=4096)
    assert odd.sliders["kv_heads"].options == (1, 3, 9)


def test_the_capacity_explorer_counts_what_fits_and_says_what_does_not():
    explorer = widgets.capacity_explorer(CARD)
    # H200: 141 GB * 0.9 - 16.06 GB = 110.84 GB; a sequence of 32,768 tokens is 4 GiB = 4.295 GB: 25 fit
    assert shown(explorer, context=32_768).startswith("25 sequences of 32,768 tokens fit: each holds 4.000 GiB")
    assert shown(explorer, kv="fp8").startswith("51 sequences")
    assert shown(explorer, model="Llama-3.1-70B", kv="bfloat16").startswith("Llama-3.1-70B needs 141.1 GB for weights")
    assert shown(explorer, weights="q4_0").endswith("is left to the engine")
    assert "not one sequence of 131,072 tokens fits" in shown(
        explorer, model="Llama-3.1-8B", weights="bfloat16", hardware="RTX 4090", context=131_072
    )


# --- figures --------------------------------------------------------------------------------------------------------


def test_figures_draw_what_they_are_given():
    """Bars carry their values, panels the sums, the memory bar adds up to the memory."""
    canvas = plots.Canvas()
    plots.bars([("a", 1.5), ("b", 3.0)], ax=canvas.ax, title="t", form=lambda v: f"{v:.1f} x", xlabel="x", marks=[("m", 2.0)])  # fmt: skip
    assert [text.get_text() for text in canvas.ax.texts] == [" 1.5 x", " 3.0 x"]
    panels = plots.Canvas().figure.subplots(1, 2)
    again = [cost.pass_work(LLAMA, new_tokens=n, context=n) for n in (1, 2, 3)]
    kept = [cost.pass_work(LLAMA, new_tokens=1, context=n) for n in (1, 2, 3)]
    plots.work([("read again", again), ("with cache", kept)], ax=panels)
    ends = [[line.get_ydata()[-1] for line in panel.lines] for panel in panels]
    assert ends[0] == pytest.approx([sum(w.flops for w in series) / 1e12 for series in (again, kept)])
    assert ends[1] == pytest.approx([sum(w.bytes for w in series) / 1e9 for series in (again, kept)])
    plots.memory(10 * 2**30, 2 * 2**30, 5, total=40 * 2**30, reserved_fraction=0.1, ax=canvas.clear(), title="t")
    assert [patch.get_width() for patch in canvas.ax.patches] == pytest.approx([10, 10, 16, 4])


# --- the prose ------------------------------------------------------------------------------------------------------


def paired_speeds() -> list[float]:
    """Decode speeds of the RTX 4090 over those of the RTX 3090 Ti in one engine, batch 1, by model and format."""
    rows = [r for r in catalog.read_table("measured_decode.csv") if r["framework"] == "exllamav2" and r["batch"] == "1"]
    speed = {(r["hardware_name"], r["model"], r["weight_format"]): float(r["tokens_per_s"]) for r in rows}
    slow = [key[1:] for key in speed if key[0] == "NVIDIA RTX 3090 Ti" and ("NVIDIA RTX 4090", *key[1:]) in speed]
    return [speed["NVIDIA RTX 4090", *key] / speed["NVIDIA RTX 3090 Ti", *key] for key in slow]


def test_what_lesson_01_says_of_numbers():
    """Words that rest on numbers: nearly the same FLOPs per token, hardly more bytes, a clean pair of cards."""
    smol, llama = model("smollm2-135m"), model("llama-3.1-8b")
    prompt, step = (cost.pass_work(smol, new_tokens=n, context=c) for n, c in ((128, 128), (1, 129)))
    assert 0.7 < prompt.flops / 128 / step.flops < 1  # "nearly the same"; "prefill even has a few less"
    assert prompt.bytes / step.bytes < 1.01  # "hardly more"
    for size, expected in ((2, 1), (4, 0.5)):  # "a pass over t tokens does about t FLOP per byte; in 32 bits, half"
        work = cost.pass_work(llama, new_tokens=64, context=64, weight_bytes_per_value=size, kv_bytes_per_value=size)
        assert work.intensity / 64 == pytest.approx(expected, rel=0.1)
    ideal = cost.floor_constants(catalog.hardware("h200-sxm"))
    one, many = (cost.prefill_time(llama, ideal, Workload(prompt_tokens=n, output_tokens=1)) for n in (1, 128))
    assert many / one < 1.01  # "hardly more than a single token"
    old, new = catalog.hardware("rtx-3090-ti"), catalog.hardware("rtx-4090")
    assert old.bandwidth_bytes_per_s == new.bandwidth_bytes_per_s and new.fp32_flops_per_s > 2 * old.fp32_flops_per_s
    gains = paired_speeds()
    assert len(gains) >= 5 and 1 < min(gains) and max(gains) < 1.25  # "decode follows the memory"
    h100 = catalog.hardware("h100-sxm")
    assert h100.bf16_fp16_flops_per_s == catalog.hardware("h200-sxm").bf16_fp16_flops_per_s


def test_what_lesson_02_says_of_numbers():
    """Words that rest on numbers: bytes hardly change, FLOPs do; who stores most and least per token."""
    smol = model("smollm2-135m")
    again = [cost.pass_work(smol, new_tokens=n, context=n) for n in range(1, 513)]
    kept = [cost.pass_work(smol, new_tokens=1, context=n) for n in range(1, 513)]
    assert sum(w.bytes for w in again) / sum(w.bytes for w in kept) < 1.01
    assert sum(w.flops for w in again) / sum(w.flops for w in kept) > 150
    assert max(w.intensity for w in kept) < 1.2  # "about one or less"
    names = ("llama-2-7b", "llama-3.1-8b", "llama-3.1-70b", "gemma-3-27b", "deepseek-v3")
    stored = {name: cost.kv_bytes_per_token(model(name)) for name in names}
    size = {name: cost.parameters(model(name)) for name in names}
    assert min(stored, key=stored.get) == "deepseek-v3" == max(size, key=size.get)
    assert max(stored, key=stored.get) == "llama-2-7b" and sorted(size, key=size.get)[:2] == ["llama-2-7b", "llama-3.1-8b"]
    gemma = model("gemma-3-27b")
    assert gemma.windowed_layers > gemma.n_layers / 2  # "most layers windowed"
    llama = model("llama-3.1-8b")
    assert (llama.n_layers, llama.n_heads, llama.n_kv_heads, llama.head_dim) == (32, 32, 8, 128)


STATED = {
    "01_prefill_and_decode.ipynb": {
        "128": "the prompt, an argument",
        "2": "FLOP per multiply-add; bytes of 16 bits",
        "16": "bits",
        "32": "bits",
        "1": "batch",
    },
    "02_kv_cache.ipynb": {
        "511": "512 - 1",
        "512": "the longest length, an argument",
        "1": "first length",
        "2": "K and V",
        "8": "bits",
        "16": "bits",
        "0.9": "1 - reserved_fraction, whose default a test below asserts",
    },
}


@pytest.mark.parametrize("name", STATED)
def test_every_number_in_the_prose_is_known(name):
    """Headings, names of models and lessons aside, the text states only definitions and the code's own arguments."""
    names = re.compile(r"SmolLM2|Llama-[\d.]+-\d+B|H\d00|RTX \d+( Ti)?|[Ll]esson \d\d|\d\d_\w+\.ipynb|^#+ \d.*$|^\d\. |\*\d+ minutes.*\*", re.M)  # fmt: skip
    stated = {}
    for key, (kind, text) in notebook_cells(name).items():
        if kind == "markdown":
            for number in re.findall(r"\d[\d,.]*\d|\d", names.sub("", text)):
                stated.setdefault(number, key)
    assert stated and {number: cell for number, cell in stated.items() if number not in STATED[name]} == {}


def test_a_tenth_is_left_to_the_engine():
    """The lesson's 0.9 is the default of sequences_that_fit: nine and a half caches of room hold nine sequences."""
    room = 2 * cost.parameters(LLAMA) + 9.5 * cost.kv_bytes(LLAMA, context=100)
    assert sequences_that_fit(LLAMA, memory_bytes=room / 0.9, context=100) == 9
    assert sequences_that_fit(LLAMA, memory_bytes=room, context=100, reserved_fraction=0) == 9


def test_llama_kinds_cover_the_lessons_list():
    """The lesson names MHA, GQA, MQA, MLA, windows and 8-bit KV, and shows all but MQA by a model; MQA by the slider."""
    shown_kinds = {model(name).attention for name in ("llama-2-7b", "llama-3.1-8b", "deepseek-v3")}
    assert shown_kinds == {"MHA", "GQA", "MLA"}
    assert 1 in widgets.cache_explorer(model("llama-3.1-8b")).sliders["kv_heads"].options


def test_both_lessons_follow_the_order_ask_measure_result_takeaway():
    """Every question is asked before its result is shown, and every lesson has takeaways and says how it could mislead."""
    for name, prefix in (("01_prefill_and_decode.ipynb", "01."), ("02_kv_cache.ipynb", "02.")):
        text = "\n".join(source for kind, source in notebook_cells(name).values() if kind == "code")
        asked = re.findall(r'predictions\.ask\(\s*"([\w.]+)"', text)
        assert len(asked) == 2 and all(key.startswith(prefix) for key in asked)
        shown_at = {key: re.search(rf'predictions\.result\(\s*"{key}"', text).start() for key in asked}
        assert all(text.index(f'"{key}"') < at for key, at in shown_at.items())
        assert text.count("notes.takeaway(") >= 4 and text.count("notes.misleads(") >= 2
