"""GGUF: block layouts by hand, tensor order, rotary rows, and files that are cut or are something else."""

import struct
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from decodelab.arithmetic.catalog import ModelConfig, RopeScaling
from decodelab.decoder import weights
from decodelab.decoder.model import rotary_frequencies
from decodelab.decoder.weights import LoadError, dequantise

KIND = gguf.GGMLQuantizationType
SHAPE = {"n_layers": 2, "hidden": 64, "intermediate": 96, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "vocab_size": 50, "max_context": 32}
LLAMA = ModelConfig(name="tiny", **SHAPE, rope_base=5e4, norm_eps=1e-6)
QWEN2 = replace(LLAMA, family="qwen2", qkv_bias=True)
QWEN3 = replace(LLAMA, family="qwen3", qk_norm=True, head_dim=24)
GPT2 = ModelConfig(name="tiny", **{**SHAPE, "n_kv_heads": 4}, family="gpt2", gated_mlp=False, qkv_bias=True, attention_out_bias=True)
NAMES = {"embed": "token_embd", "positions": "position_embd", "norm": "output_norm", "head": "output", "attention_norm": "attn_norm",
         "q": "attn_q", "k": "attn_k", "v": "attn_v", "q_norm": "attn_q_norm", "k_norm": "attn_k_norm", "out": "attn_output", "mlp_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up",
         "down": "ffn_down"}  # fmt: skip


def half(value):
    return np.float16(value).tobytes()


# B083: what a block's bytes mean.


def test_b083_q4_1():
    """Scale 0.5, minimum -1; low nibbles are weights 0-15, high nibbles 16-31."""
    block = half(0.5) + half(-1) + bytes([0x10, 0x32]) + bytes(14)
    assert len(block) == 20
    values = dequantise(np.frombuffer(block, np.uint8)[None], KIND.Q4_1)[0]
    assert values[[0, 1, 16, 17]].tolist() == [-1.0, 0.0, -0.5, 0.5]
    assert (values[2:16] == -1).all() and (values[18:] == -1).all()


def test_b083_q8_0():
    block = half(0.5) + bytes([0x80, 127, 0]) + bytes(29)
    assert len(block) == 34
    assert dequantise(np.frombuffer(block, np.uint8)[None], KIND.Q8_0)[0, :3].tolist() == [-64.0, 63.5, 0.0]


def test_b083_q4_0():
    block = half(1) + bytes([0x00, 0x98]) + bytes(14)
    assert len(block) == 18
    values = dequantise(np.frombuffer(block, np.uint8)[None], KIND.Q4_0)[0]
    assert values[[0, 1, 16, 17]].tolist() == [-8.0, 0.0, -8.0, 1.0]


def test_plain_types_keep_their_values():
    values = np.array([[1.0, -2.5, 0.15625, 3e-5]], np.float32)
    assert torch.equal(dequantise(values, KIND.F32), torch.from_numpy(values))
    assert torch.equal(dequantise(values.astype(np.float16), KIND.F16), torch.from_numpy(values).half().float())
    bits = torch.from_numpy(values).bfloat16().view(torch.uint8).numpy()
    assert torch.equal(dequantise(bits, KIND.BF16), torch.from_numpy(values).bfloat16().float())


# Whole files.


def permuted(matrix, heads):
    """The row order llama.cpp's converter gives Llama's q and k, matrix or bias: the two halves of a head interleaved."""
    return matrix.reshape(heads, 2, -1, *matrix.shape[1:]).swapaxes(1, 2).reshape(matrix.shape)


def stored_tensors(model, config):
    """A model's parameters under GGUF names, as the converter would write them."""
    found = {}
    for name, parameter in model.named_parameters():
        parts, value = name.split("."), parameter.numpy().copy()
        block = f"blk.{parts[1]}." if parts[0] == "blocks" else ""
        if parts[-2] in ("q", "k") and config.family == "llama":
            value = permuted(value, config.n_heads if parts[-2] == "q" else config.n_kv_heads)
        found[f"{block}{NAMES[parts[-2]]}.{parts[-1]}"] = value
    if config.is_gpt2:
        for layer in range(config.n_layers):
            for end in ("weight", "bias"):
                found[f"blk.{layer}.attn_qkv.{end}"] = np.concatenate([found.pop(f"blk.{layer}.attn_{part}.{end}") for part in "qkv"])
    return found


def write(path, tensors, config=LLAMA, *, kind=KIND.F32, arch=None, extra=(), leave_out=()):
    arch = arch or config.family
    writer = gguf.GGUFWriter(str(path), arch)
    norm = "layer_norm_epsilon" if config.is_gpt2 else "layer_norm_rms_epsilon"
    numbers = {"block_count": config.n_layers, "embedding_length": config.hidden, "feed_forward_length": config.intermediate,
               "attention.head_count": config.n_heads, "attention.head_count_kv": config.n_kv_heads,
               "context_length": config.max_context, "rope.dimension_count": config.head_dim, "rope.freq_base": config.rope_base,
               f"attention.{norm}": config.norm_eps, **({"attention.key_length": config.head_dim} if config.family == "qwen3" else {}),
               **dict(extra)}  # fmt: skip
    for key, value in numbers.items():
        if key not in leave_out:
            add = {str: writer.add_string, int: writer.add_int32, bool: writer.add_bool, float: writer.add_float32, list: writer.add_array}[
                type(value)
            ]
            add(f"{arch}.{key}", value)
    for name, value in tensors.items():
        if kind != KIND.F32 and value.ndim == 2:
            writer.add_tensor(name, gguf.quants.quantize(value, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def llama():
    return weights.random(LLAMA, seed=5)


@pytest.fixture(scope="module")
def llama_file(llama, tmp_path_factory):
    return write(tmp_path_factory.mktemp("gguf") / "tiny.gguf", stored_tensors(llama, LLAMA))


def assert_same(loaded, model, tolerance=0.0):
    values = dict(loaded.named_parameters())
    assert values.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert (values[name] - parameter).abs().max() <= tolerance, name


def test_llama_with_permuted_q_and_k(llama, llama_file):
    """The permutation is undone: forgetting it moves rows but no shape, so only values show it."""
    loaded = weights.load(llama_file)
    assert_same(loaded, llama)
    config = loaded.config
    assert (config.n_heads, config.n_kv_heads, config.head_dim, config.vocab_size, config.rope_base) == (4, 2, 16, 50, 5e4)
    assert config.norm_eps == pytest.approx(1e-6) and not config.tied_embeddings
    swapped = permuted(llama.blocks[0].attention.q.weight.numpy(), 4)
    assert not np.array_equal(swapped, llama.blocks[0].attention.q.weight.numpy())


def shaken(config, *, seed):
    """Random weights with norms away from one, so that a norm put in the wrong place or left out shows."""
    model = weights.random(config, seed=seed)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return model


@pytest.mark.parametrize("config", [QWEN2, QWEN3, replace(LLAMA, qkv_bias=True, attention_out_bias=True), replace(QWEN3, qkv_bias=True)],
                         ids=["qwen2", "qwen3", "llama with biases", "qwen3 with biases"])  # fmt: skip
def test_qwen_keeps_the_order_of_q_and_k_and_llama_permutes_its_biases_too(tmp_path, config):
    model = shaken(config, seed=7)
    loaded = weights.load(write(tmp_path / "tiny.gguf", stored_tensors(model, config), config))
    assert_same(loaded, model)
    assert (loaded.config.qkv_bias, loaded.config.attention_out_bias, loaded.config.qk_norm, loaded.config.head_dim) == (
        config.qkv_bias, config.attention_out_bias, config.qk_norm, config.head_dim)  # fmt: skip
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    first, second = (m(ids, cache=m.new_cache(max_len=8), every_row=True) for m in (model, loaded))
    assert torch.equal(first, second)


@pytest.mark.parametrize("config", [LLAMA, QWEN2, replace(QWEN3, head_dim=128)], ids=["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_file_as_the_same_model(tmp_path, config):
    """An independent reader agrees on where q and k are permuted. It takes Qwen3's head size to be 128 whatever the file says."""
    path = write(tmp_path / "tiny.gguf", stored_tensors(shaken(config, seed=9), config), config, extra={"vocab_size": 50}.items())
    reference, model = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32), weights.load(path)
    ids = torch.arange(20)[None]
    with torch.no_grad():
        expected = reference(ids).logits
    assert expected.std() > 0.01
    assert (model(ids, cache=model.new_cache(max_len=20), every_row=True) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("config", "arch", "name"), [
    (QWEN2, "qwen2", "k.bias"), (QWEN3, "qwen3", "k_norm.weight"), (QWEN3, "qwen3", "q_norm.weight"), (QWEN2, "llama", "k.bias"),
])  # fmt: skip
def test_a_bias_or_norm_that_one_layer_lacks(tmp_path, config, arch, name):
    """A bias or norm of one layer is missing, whichever architecture the file names."""
    tensors = stored_tensors(weights.random(config), config)
    del tensors[f"blk.1.{NAMES[name.split('.')[0]]}.{name.split('.')[1]}"]
    refused(rf"1 missing tensor\(s\): blocks.1.attention.{name}", write(tmp_path / "a.gguf", tensors, config, arch=arch))


def test_qwen2_without_any_bias_is_incomplete(tmp_path):
    tensors = {name: value for name, value in stored_tensors(weights.random(QWEN2), QWEN2).items() if not name.endswith("bias")}
    refused(r"6 missing tensor\(s\): blocks.0.attention.q.bias", write(tmp_path / "a.gguf", tensors, QWEN2))


def test_gpt2_with_fused_qkv(tmp_path):
    model = weights.random(GPT2, seed=6)
    path = write(tmp_path / "gpt2.gguf", stored_tensors(model, GPT2), GPT2)
    loaded = weights.load(path)
    assert_same(loaded, model)
    assert loaded.config.is_gpt2 and loaded.config.intermediate == 96


@pytest.mark.parametrize(("kind", "tolerance"), [(KIND.F16, 1e-4), (KIND.BF16, 1e-3), (KIND.Q8_0, 1e-3), (KIND.Q4_0, 2e-2), (KIND.Q4_1, 1e-2)])
def test_every_supported_type(llama, tmp_path, kind, tolerance):
    """The error of each type at values of 0.02; half a step of a 4-bit block is about 0.005, of an 8-bit one 0.0003."""
    loaded = weights.load(write(tmp_path / "tiny.gguf", stored_tensors(llama, LLAMA), kind=kind))
    assert_same(loaded, llama, tolerance)


def test_other_types_are_refused_by_name(llama, tmp_path):
    path = write(tmp_path / "tiny.gguf", stored_tensors(llama, LLAMA), kind=KIND.Q5_0)
    refused("type Q5_0 are not read; supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1", path)


def test_tied_when_the_output_matrix_is_absent(llama, tmp_path):
    tensors = stored_tensors(llama, LLAMA)
    del tensors["output.weight"]
    loaded = weights.load(write(tmp_path / "tied.gguf", tensors))
    assert loaded.config.tied_embeddings
    assert loaded.head.weight.data_ptr() == loaded.embed.weight.data_ptr()


def refused(match, path):
    with pytest.raises(LoadError, match=match) as caught:
        weights.load(path)
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_missing_and_unexpected_tensors(llama, tmp_path):
    tensors = stored_tensors(llama, LLAMA)
    value = tensors.pop("blk.1.ffn_down.weight")
    refused("missing tensor.*blocks.1.mlp.down.weight", write(tmp_path / "a.gguf", tensors))
    refused("unexpected tensor.*blk.0.attn_q_norm.weight",
            write(tmp_path / "b.gguf", {**tensors, "blk.1.ffn_down.weight": value, "blk.0.attn_q_norm.weight": np.ones(16, np.float32)}))  # fmt: skip
    refused(r"blk.1.ffn_down.weight gives .* the shape \(96, 64\) and the model has \(64, 96\)",
            write(tmp_path / "c.gguf", {**tensors, "blk.1.ffn_down.weight": value.T.copy()}))  # fmt: skip


@pytest.mark.parametrize(("extra", "cause"), [
    ({"expert_count": 8}, "expert_count=8"),
    ({"rope.scaling.type": "yarn"}, "rope.scaling.type='yarn'"),
    ({"rope.dimension_count": 8}, "rotates 8 of 16"),
    ({"rope.scale_linear": 2.0}, "rope.scale_linear=2.0 is not supported"),
    ({"rope.scaling.factor": 4.0}, "rope.scaling.factor=4.0 is not supported"),
    ({"attention.scale": 0.5}, "attention.scale=0.5 is not supported"),
    ({"logit_scale": 2.0}, "logit_scale=2.0 is not supported"),
    ({"embedding_scale": 2.0}, "embedding_scale=2.0 is not supported"),
    ({"attention.causal": False}, "attention.causal=False is not supported"),
    ({"feed_forward_length": -1}, "feed_forward_length is -1 and must be one number from 1"),
    ({"rope.freq_base": float("nan")}, "rope.freq_base is nan and must be one number"),
    ({"rope.freq_base": "5"}, "rope.freq_base is '5' and must be one number"),
    ({"attention.head_count_kv": [2, 4]}, r"attention.head_count_kv is \[2, 4\] and must be one number"),
])  # fmt: skip
def test_what_the_metadata_may_not_ask_for(llama, tmp_path, extra, cause):
    refused(cause, write(tmp_path / "tiny.gguf", stored_tensors(llama, LLAMA), extra=extra.items()))


def test_architecture_and_missing_keys(llama, tmp_path):
    tensors = stored_tensors(llama, LLAMA)
    refused("architecture 'qwen3moe' is not supported; supported: gpt2, llama, qwen2, qwen3", write(tmp_path / "a.gguf", tensors, arch="qwen3moe"))
    refused("block_count is absent", write(tmp_path / "b.gguf", tensors, leave_out=("block_count",)))


def test_llama_3_scaling_comes_from_rope_freqs(llama, tmp_path):
    rule = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=8192)
    plain, scaled = (rotary_frequencies(ModelConfig(name="tiny", **SHAPE, rope_base=5e5, rope_scaling=r)) for r in (None, rule))
    factors = (plain / scaled).numpy()
    assert factors.max() == 8 and factors.min() == 1
    options = {"extra": {"rope.freq_base": 5e5}.items()}
    tensors = stored_tensors(llama, LLAMA)
    loaded = weights.load(write(tmp_path / "a.gguf", {**tensors, "rope_freqs.weight": factors}, **options))
    assert loaded.config.rope_scaling == rule
    assert torch.allclose(loaded.inverse_wavelengths, scaled)
    for i, value in enumerate((3.0, float("nan"), float("inf"))):
        factors[-1] = value
        refused("not Llama 3's rule", write(tmp_path / f"b{i}.gguf", {**tensors, "rope_freqs.weight": factors}, **options))
    refused("not Llama 3's rule", write(tmp_path / "c.gguf", {**tensors, "rope_freqs.weight": factors[:4] * 0}, **options))


@pytest.mark.parametrize(("old", "new", "cause"), [
    (b"llama.block_count", b"llama.block_\xffount", "not a readable GGUF file .*utf-8"),
    (b"a name", b"a\xffname", "not a readable GGUF file .*utf-8"),
    (b"token_embd.weight\x02\0\0\0\x40\0\0\0\0\0\0\0", b"token_embd.weight\x02\0\0\0" + b"\xff" * 8, "not a readable|ends before"),
])  # fmt: skip
def test_flipped_bytes(llama, tmp_path, old, new, cause):
    path = write(tmp_path / "a.gguf", stored_tensors(llama, LLAMA), extra={"note": "a name"}.items())
    whole = path.read_bytes()
    assert whole.count(old) == 1
    path.write_bytes(whole.replace(old, new))
    refused(cause, path)


# Files that are not GGUF.


@pytest.mark.parametrize(("content", "cause"), [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer"),
    (b"", "empty file"),
    (b"GGUF", "4 bytes is too short"),
    (b"PK\x03\x04" + bytes(60), "magic invalid"),
    (b"GGUF" + struct.pack("<IQQ", 99, 0, 0) + bytes(40), "version 99"),
    (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 2**60), "ends before its own table of contents"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q1sIIQ", 1, b"a", 9, 4, 2**60), "ends before its own table of contents"),
    (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**60) + bytes(8), "ends before its own table of contents"),
])  # fmt: skip
def test_b078_what_is_there_instead_of_a_gguf(tmp_path, content, cause):
    path = tmp_path / "file.gguf"
    path.write_bytes(content)
    refused(cause, path)


@pytest.mark.parametrize("keep", [0.02, 0.3, 0.5, 0.99])
def test_a_cut_file_says_so(llama_file, tmp_path, keep):
    whole = llama_file.read_bytes()
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[: int(len(whole) * keep)])
    refused("the download was cut", path)


def test_cut_by_one_value(llama_file, tmp_path):
    """Tensor data are padded to 32 bytes; one byte into the last tensor is already a cut file."""
    end = max(t.data_offset + t.n_bytes for t in gguf.GGUFReader(llama_file).tensors)
    path = tmp_path / "cut.gguf"
    path.write_bytes(llama_file.read_bytes()[: end - 1])
    refused("the download was cut", path)
