"""Kind 4 of the faults: cost arithmetic. Integers by hand from the config, and against real tensors."""

from dataclasses import replace
from math import inf

import pytest
import torch

from decodelab.arithmetic import catalog, cost, units
from decodelab.arithmetic.catalog import UnknownName, Workload, hardware, model
from decodelab.arithmetic.cost import Constants
from decodelab.decoder import weights
from tiny import GPT2, LLAMA

KV_BYTES_16_BIT = {"gpt2": 36_864, "smollm2-135m": 23_040, "smollm2-1.7b": 196_608, "tinyllama-1.1b": 22_528, "llama-2-7b": 524_288, "llama-2-70b": 327_680,
                   "llama-3-8b": 131_072, "llama-3.1-8b": 131_072, "llama-3.1-405b": 516_096, "qwen3-0.6b": 114_688, "qwen3-4b": 147_456,
                   "qwen2.5-7b": 57_344, "mixtral-8x7b": 131_072, "deepseek-v3": 70_272, "phi-3-mini": 393_216}  # fmt: skip
# name, KV bytes per token, parameters, weight bytes of one step, weight FLOPs of one token: 16 bits, batch 1, worked by hand from the shape
BY_HAND = [
    ("gpt2", 36_864, 124_439_808, 247_309_824, 247_064_064),
    ("gpt2-xl", 307_200, 1_557_611_200, 3_111_952_000, 3_109_942_400),
    ("smollm2-135m", 23_040, 134_515_008, 269_031_168, 268_959_744),
    ("smollm2-1.7b", 196_608, 1_711_376_384, 3_422_756_864, 3_422_552_064),
    ("tinyllama-1.1b", 22_528, 1_100_048_384, 2_069_028_864, 2_068_840_448),
    ("llama-2-7b", 524_288, 6_738_415_616, 13_214_695_424, 13_214_154_752),
    ("llama-2-70b", 327_680, 68_976_648_192, 137_429_024_768, 137_426_370_560),
    ("llama-3.1-8b", 131_072, 8_030_261_248, 15_009_857_536, 15_009_316_864),
    ("llama-3.1-70b", 327_680, 70_553_706_496, 139_006_083_072, 139_003_428_864),
    ("mistral-7b", 131_072, 7_241_732_096, 14_221_328_384, 14_220_787_712),
    ("mixtral-8x7b", 131_072, 46_702_792_704, 25_497_714_688, 25_497_174_016),
    ("qwen2.5-7b", 57_344, 7_615_616_512, 14_141_245_440, 14_140_571_648),
    ("qwen3-0.6b", 114_688, 596_049_920, 1_192_101_888, 1_191_968_768),
    ("qwen3-4b", 147_456, 4_022_468_096, 8_044_941_312, 8_044_544_000),
    ("phi-3-mini", 393_216, 3_821_079_552, 7_445_164_032, 7_444_758_528),
]  # fmt: skip


@pytest.mark.parametrize(("name", "kv", "stored", "step", "flops"), BY_HAND)
def test_integers_of_named_models(name, kv, stored, step, flops):
    """B062, B065: one table for fifteen models; each figure exact."""
    config = model(name)
    assert cost.kv_bytes_per_token(config) == kv
    assert cost.parameters(config) == stored
    assert cost.weight_bytes_per_step(config) == step
    assert cost.weight_flops(config, tokens=1, logit_rows=1) == flops


@pytest.mark.parametrize(("name", "stored"), KV_BYTES_16_BIT.items())
def test_kv_bytes_per_token(name, stored):
    """B062: KV heads store K and V, query heads do not; MLA stores one latent and one rotary key."""
    assert cost.kv_bytes_per_token(model(name)) == stored
    assert cost.kv_bytes_per_token(model(name), dtype_bytes=4) == 2 * stored


def test_untying_adds_the_output_matrix():
    """B065: GPT-2 untied is 163,037,184; the matrix is 38,597,376."""
    untied = replace(model("gpt2"), tied_embeddings=False)
    assert cost.parameters(untied) == 163_037_184
    assert cost.parameters(untied) - cost.parameters(model("gpt2")) == 38_597_376 == 50_257 * 768
    assert cost.weight_bytes_per_step(untied) == cost.weight_bytes_per_step(model("gpt2"))  # read once either way


@pytest.mark.parametrize("config", [GPT2, LLAMA, replace(LLAMA, tied_embeddings=True)], ids=["gpt2", "llama", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_counts_equal_the_real_tensors(config, dtype):
    """Cross-check 7: numel and element size of every loaded tensor; a step reads all but the rows not looked up."""
    loaded = weights.random(config, dtype=dtype)
    stored = sum(p.numel() for p in loaded.parameters())
    assert cost.parameters(config) == stored
    looked_up = {"embed.weight": config.vocab_size, "positions.weight": config.max_context}
    read = sum(p.numel() for name, p in loaded.named_parameters() if name not in looked_up)
    read += config.vocab_size * config.hidden * config.tied_embeddings + config.hidden * (2 if config.is_gpt2 else 1)
    assert cost.weight_bytes_per_step(config, dtype_bytes=dtype.itemsize) == read * dtype.itemsize
    matrices = sum(p.numel() for name, p in loaded.named_parameters() if p.ndim == 2 and name not in looked_up)
    matrices += config.vocab_size * config.hidden * config.tied_embeddings
    assert cost.weight_flops(config, tokens=1, logit_rows=1) == 2 * matrices


def test_long_context_examples_of_seven_and_seventy_billion():
    """B064: per layer, per token and at 32,768 tokens, each in its unit."""
    small, large = model("llama-2-7b"), model("llama-2-70b")
    assert cost.kv_values_per_layer(small) * 2 == 16_384 and cost.kv_values_per_layer(large) * 2 == 4_096
    assert units.format_capacity(cost.kv_bytes(small, context=32_768)) == "16.00 GiB"
    assert units.format_bytes(cost.kv_bytes(small, context=32_768)) == "17.18 GB"
    assert units.format_capacity(cost.kv_bytes(large, context=32_768)) == "10.00 GiB"
    assert units.format_bytes(cost.kv_bytes(large, context=32_768)) == "10.74 GB"
    assert units.format_capacity(cost.kv_bytes(replace(large, n_kv_heads=64), context=32_768)) == "80.00 GiB"


def test_experts_memory_from_the_total_and_flops_from_the_active():
    """B069: Mixtral holds 93.4 GB, reads 25.5 GB for one sequence (embedding rows only) and nearly all for 256."""
    mixtral = model("mixtral-8x7b")
    assert 2 * cost.parameters(mixtral) == pytest.approx(93.4e9, rel=1e-3)
    assert cost.weight_bytes_per_step(mixtral) == pytest.approx(25.5e9, rel=2e-3)
    assert cost.weight_bytes_per_step(mixtral, batch=256) == pytest.approx(93.4e9, rel=5e-3)
    assert cost.weight_flops(mixtral, tokens=1, logit_rows=1) == pytest.approx(2 * (12.88e9 - 0.131e9), rel=2e-3)
    assert cost.expected_experts(mixtral, tokens=1) == pytest.approx(2) and cost.expected_experts(mixtral, tokens=2) == pytest.approx(3.5)
    assert 2 * cost.parameters(model("deepseek-v3")) == pytest.approx(1342e9, rel=1e-3)


def test_attention_counts_visible_pairs():
    """B070: prefill of 1024 in GPT-2 sees half the square; a decode step has no half; the convention is stated."""
    gpt2 = model("gpt2")
    assert cost.visible_pairs(new_tokens=1024, context=1024) == 524_800
    assert cost.attention_flops(gpt2, new_tokens=1024, context=1024) == 19_346_227_200
    assert 1024 * 1024 * 4 * 768 * 12 == pytest.approx(38.65e9, rel=1e-3)
    assert cost.attention_flops(gpt2, new_tokens=1, context=1024) == 37_748_736
    assert "visible" in cost.ATTENTION_CONVENTION


@pytest.mark.parametrize("window", [0, 1, 3, 8, 100])
def test_visible_pairs_against_a_mask(window):
    """The closed form equals counting the cells of the mask, windows included."""
    for context in range(1, 12):
        for new in range(1, context + 1):
            cells = sum(1 for q in range(context - new, context) for k in range(context) if k <= q and (not window or k > q - window))
            assert cost.visible_pairs(new_tokens=new, context=context, window=window) == cells


def test_inference_is_two_flops_per_parameter_not_six():
    """B071: 0.247 GFLOP for one GPT-2 token, the output matrix included; prefill needs it for the last row only."""
    gpt2 = model("gpt2")
    assert cost.weight_flops(gpt2, tokens=1, logit_rows=1) == 247_064_064
    body = cost.weight_flops(gpt2, tokens=512, logit_rows=1) - cost.weight_flops(gpt2, tokens=511, logit_rows=1)
    assert body == 2 * 84_934_656 == cost.weight_flops(gpt2, tokens=1, logit_rows=0)


def test_kv_formats():
    """B073: 8-bit KV halves the bytes per token, so a pool holds twice the tokens."""
    config = model("llama-3.1-8b")
    pool = 10.55 * 2**30
    assert pool // cost.kv_bytes_per_token(config, dtype_bytes=1) == pytest.approx(2 * (pool // cost.kv_bytes_per_token(config)), abs=1)


def test_windows_cap_the_cache():
    mistral = model("mistral-7b")
    assert cost.kv_bytes(mistral, context=4096) == cost.kv_bytes(mistral, context=30_000) == 4096 * 131_072
    alternating = model("gemma-2-9b")
    assert cost.visible_tokens(alternating, context=8192) == 21 * 8192 + 21 * 4096
    assert cost.crossover_tokens(mistral) == inf


def test_units():
    """B067: one helper: decimal for traffic, binary for capacity, the unit always written."""
    assert units.format_capacity(83e9) == "77.30 GiB"
    assert (units.format_bytes(7e9 * 2), units.format_capacity(7e9 * 2)) == ("14.00 GB", "13.04 GiB")
    assert (units.format_bytes(100e12 * 2), units.format_capacity(100e12 * 2)) == ("200.0 TB", "181.9 TiB")
    assert (catalog.dtype_bytes("q8_0"), catalog.dtype_bytes("q4_0"), catalog.dtype_bytes("q4_1")) == (34 / 32, 18 / 32, 20 / 32)
    assert units.format_rate(0, 1.0) == units.format_rate(5, 0.0) == "-" and units.significant(float("nan")) == "-"
    assert units.format_bytes(999.96e6) == "1.000 GB" and units.format_seconds(0.0099996) == "10.0 ms"


def test_step_time_is_the_sum_of_its_parts():
    """c0 + c1*batch + max(weights) + max(KV), each max on its own; one max over the sum would differ."""
    constants = Constants(weight_bytes_per_s=1e9, kv_bytes_per_s=5e8, flops_per_s=1e10, step_overhead_s=1e-3, layer_overhead_s=1e-4, per_row_s=1e-5)
    config = model("gpt2")
    for batch, context in ((1, 1), (1, 1024), (8, 100), (64, 1024)):
        weight = max(cost.weight_bytes_per_step(config, batch=batch) / 1e9, cost.weight_flops(config, tokens=batch, logit_rows=batch) / 1e10)
        kv = max(batch * context * 36_864 / 5e8, batch * context * 36_864 / 1e10)
        expected = 1e-3 + 12e-4 + batch * 1e-5 + weight + kv
        assert cost.step_time(config, constants, context=context, batch=batch) == pytest.approx(expected)


def test_growth_is_the_line_through_step_times():
    constants = Constants(weight_bytes_per_s=1e9, kv_bytes_per_s=5e8, flops_per_s=1e12, step_overhead_s=1e-3)
    line = cost.growth(model("gpt2"), constants, batch=4)
    for context in (1, 100, 5000):
        assert line(context) == pytest.approx(cost.step_time(model("gpt2"), constants, context=context, batch=4))
    assert line.b_s_per_token == pytest.approx(4 * 36_864 / 5e8)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gemma-2-9b", "mistral-7b", "deepseek-v3"])
def test_request_is_the_sum_of_its_steps(name):
    """The closed form equals adding output - 1 steps one by one, also across a window's edge."""
    config, constants = model(name), cost.floor_constants(hardware("h200-sxm"))
    for prompt, output in ((100, 50), (4000, 200), (7, 1)):
        work = Workload(prompt_tokens=prompt, output_tokens=output, batch=3)
        estimate = cost.request_time(config, constants, work)
        steps = [cost.step_time(config, constants, context=prompt + i, batch=3) for i in range(1, output)]
        assert estimate.decode_s == pytest.approx(sum(steps))
        assert estimate.total_s == pytest.approx(estimate.ttft_s + estimate.decode_s)
        assert estimate.decode_share + estimate.free_prefill_saves_fraction == pytest.approx(1)
        assert (estimate.itl_first_s, estimate.itl_last_s) == ((steps[0], steps[-1]) if steps else (None, None))


def test_the_design_example():
    """100 in, 10,000 out on an H200: 3.1 ms a token, 31 s and 1.4 s of cache, prefill one part in ten thousand."""
    config, chip = model("llama-3.1-8b"), hardware("h200-sxm")
    assert cost.weight_bytes_per_step(config) == 15_009_857_536
    estimate = cost.request_time(config, cost.floor_constants(chip), Workload(prompt_tokens=100, output_tokens=10_000))
    assert estimate.ttft_s == pytest.approx(3.13e-3, rel=1e-3) and estimate.total_s == pytest.approx(32.66, rel=1e-3)
    assert estimate.free_prefill_saves_fraction == pytest.approx(1e-4, rel=0.05)
    kv_seconds = estimate.decode_s - 9_999 * cost.step_time(config, cost.floor_constants(chip), context=0)
    assert kv_seconds == pytest.approx(1.4, rel=0.02)
    assert cost.attention_flops(config, new_tokens=100, context=100) + cost.weight_flops(config, tokens=100, logit_rows=1) == pytest.approx(
        1.4e12, rel=0.01
    )


@pytest.mark.parametrize(
    ("name", "dtype_bytes", "tokens"), [("smollm2-135m", 4, 11_677), ("gpt2", 4, 6_709), ("qwen3-4b", 2, 54_600), ("qwen3-0.6b", 2, 10_400)]
)
def test_crossover(name, dtype_bytes, tokens):
    formats = {"weight_bytes_per_value": dtype_bytes, "kv_bytes_per_value": dtype_bytes}
    assert cost.crossover_tokens(model(name), **formats) == pytest.approx(tokens, rel=0.01)
    assert cost.crossover_tokens(model(name), batch=2, **formats) == pytest.approx(tokens / 2, rel=0.01)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "llama 3.1 8b", "LLAMA_3.1_8B", "meta-llama/Llama-3.1-8B-Instruct"])
def test_one_slug_rule_for_names(name):
    assert model(name).name == "Llama-3.1-8B"


@pytest.mark.parametrize("name", ["h200-sxm", "NVIDIA H200 SXM", "nvidia-h200-sxm", "H200"])
def test_the_vendor_is_optional(name):
    assert hardware(name).name == "NVIDIA H200 SXM"


def test_unknown_names_name_the_near_ones():
    with pytest.raises(UnknownName, match="unknown model 'llama-3.1-9b'; near names: .*llama-3.1-8b"):
        model("llama-3.1-9b")
    with pytest.raises(UnknownName, match="unknown hardware 'h210'; near names: .*h200"):
        hardware("h210")
    with pytest.raises(UnknownName, match="unknown format 'int3'; known: float32"):
        catalog.dtype_bytes("int3")


@pytest.mark.parametrize(("change", "said"), [({"n_kv_heads": 4}, "6 query heads cannot share 4 KV heads"), ({"n_layers": 0}, "at least 1"),
                                              ({"windowed_layers": 3}, "3 windowed layers of 2"), ({"head_dim": 0}, "at least 1")])  # fmt: skip
def test_impossible_shapes_are_refused(change, said):
    with pytest.raises(ValueError, match=said):
        replace(LLAMA, **change)


@pytest.mark.parametrize("field", ["prompt_tokens", "output_tokens", "batch"])
def test_impossible_workloads_are_refused(field):
    with pytest.raises(ValueError, match=f"{field} is 0; it must be at least 1"):
        Workload(**{"prompt_tokens": 1, "output_tokens": 1, "batch": 1, field: 0})


def test_mla_prefill_expands_and_decode_does_not():
    """In prefill MLA's K and V are expanded, 2 * heads * (nope + rope + v) per pair; a decode step reads the latent."""
    deepseek = model("deepseek-v3")
    pairs = cost.visible_pairs(new_tokens=100, context=100) * 61
    assert cost.attention_flops(deepseek, new_tokens=100, context=100) == pairs * 2 * 128 * (128 + 64 + 128)
    assert cost.attention_flops(deepseek, new_tokens=1, context=100) == 100 * 61 * 2 * 128 * (2 * 512 + 64)


def test_a_tensor_split_cuts_kv_by_whole_heads():
    from decodelab.arithmetic import planning

    constants = Constants(weight_bytes_per_s=1e12, kv_bytes_per_s=1e12)
    for name, heads in (("llama-2-70b", 8), ("deepseek-v3", 1), ("llama-2-7b", 32)):
        base = {"context": 1000, "exchange_s": 0.0}
        empty = planning.tensor_split_step(model(name), constants, devices=16, **{**base, "context": 0})
        split = planning.tensor_split_step(model(name), constants, devices=16, **base)
        assert split - empty == pytest.approx(cost.kv_bytes(model(name), context=1000) / 1e12 / min(16, heads))


def test_several_rows_have_their_own_rate_where_the_machine_has_one():
    """One token streams at BW_w; a batch or a prompt at the rate of several rows. Without one, both stream alike."""
    config, one = model("gpt2"), Constants(weight_bytes_per_s=4e9, kv_bytes_per_s=1e12)
    two = replace(one, weight_rows_bytes_per_s=1e9)
    read = cost.weight_bytes_per_step(config, batch=2)
    assert cost.step_time(config, two, context=0) == cost.step_time(config, one, context=0)
    assert cost.step_time(config, two, context=0, batch=2) == pytest.approx(read / 1e9)
    assert cost.step_time(config, one, context=0, batch=2) == pytest.approx(read / 4e9)
    work = Workload(prompt_tokens=2, output_tokens=1)
    assert cost.prefill_time(config, two, work) == pytest.approx(read / 1e9, rel=1e-3)


def test_several_rows_have_their_own_overhead_where_the_machine_has_one():
    config, one = model("gpt2"), Constants(weight_bytes_per_s=1e12, kv_bytes_per_s=1e12, step_overhead_s=1e-3, layer_overhead_s=1e-4, per_row_s=1e-5)
    two = replace(one, layer_overhead_rows_s=3e-4)
    assert two.overhead_s(config) == one.overhead_s(config) == pytest.approx(1e-3 + 12e-4 + 1e-5)
    assert one.overhead_s(config, batch=4) == pytest.approx(1e-3 + 12e-4 + 4e-5)
    assert two.overhead_s(config, batch=4) == pytest.approx(1e-3 + 36e-4 + 4e-5)
