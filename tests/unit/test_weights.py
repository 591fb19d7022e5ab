"""Loading: every parameter once, the right layout, and one clear line for everything that is not a model."""

import json
import shutil
import struct
import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from decodelab.arithmetic import catalog
from decodelab.decoder import weights
from decodelab.decoder.weights import LoadError

GPT2 = {"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 97, "n_positions": 48, "initializer_range": 0.2}
LLAMA = {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": 97, "max_position_embeddings": 64, "initializer_range": 0.2}  # fmt: skip
RULE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}


@pytest.fixture(scope="module")
def gpt2_source(tmp_path_factory):
    torch.manual_seed(1)
    path = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(GPT2Config(**GPT2)).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def llama_source(tmp_path_factory):
    torch.manual_seed(2)
    path = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=False)).save_pretrained(path)
    return path


def changed(source, target, *, config=None, tensors=None):
    """A copy of a model folder with its config and its tensors passed through a function each."""
    target = target / "model"
    shutil.copytree(source, target)
    if config:
        found = json.loads((target / "config.json").read_text())
        config(found)
        (target / "config.json").write_text(json.dumps(found))
    if tensors:
        found = {name: value.clone() for name, value in load_file(target / "model.safetensors").items()}
        tensors(found)
        save_file({name: value.contiguous() for name, value in found.items()}, target / "model.safetensors", metadata={"format": "pt"})
    return target


def logits(model, ids):
    return model(ids, cache=model.new_cache(max_len=ids.shape[1]), every_row=True)


IDS = torch.tensor([[5, 96, 0, 17, 17, 42, 3]])


def refused(match, call, *args, **options):
    """The error of a call that must fail with one line that matches."""
    with pytest.raises(LoadError, match=match) as caught:
        call(*args, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# Exactly once.


def test_a_missing_tensor_is_named(llama_source, tmp_path):
    path = changed(llama_source, tmp_path, tensors=lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    refused(r"1 missing tensor\(s\): blocks.1.mlp.up.weight", weights.load, path)


def test_an_unexpected_tensor_is_named(llama_source, tmp_path):
    path = changed(llama_source, tmp_path, tensors=lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(32)}))
    refused("unexpected tensor.*model.layers.0.self_attn.q_proj.bias", weights.load, path)


def test_a_tensor_there_twice_is_named(gpt2_source, tmp_path):
    path = changed(gpt2_source, tmp_path, tensors=lambda t: t.update({"wpe.weight": t["transformer.wpe.weight"].clone()}))
    refused("positions.weight is there twice, as .*wpe.weight and .*wpe.weight", weights.load, path)


def test_a_wrong_shape_names_the_tensor_and_both_shapes(llama_source, tmp_path):
    path = changed(llama_source, tmp_path, config=lambda c: c.update(intermediate_size=40))
    refused(r"model.layers.0.mlp.*_proj.weight gives .* the shape \(.*48.*\) and the model has \(.*40.*\)", weights.load, path)


def test_a_layer_beyond_the_config_is_unexpected(llama_source, tmp_path):
    path = changed(llama_source, tmp_path, config=lambda c: c.update(num_hidden_layers=1))
    refused("unexpected tensor.*model.layers.1", weights.load, path)


def test_every_parameter_is_overwritten(gpt2_source, monkeypatch):
    """B075: no parameter keeps its initial value."""
    made = weights.Decoder.__init__

    def poisoned(self, config, **options):
        made(self, config, **options)
        for parameter in self.parameters():
            parameter.fill_(float("nan"))

    monkeypatch.setattr(weights.Decoder, "__init__", poisoned)
    assert all(torch.isfinite(p).all() for p in weights.load(gpt2_source).parameters())
    assert all(torch.isfinite(p).all() for p in weights.random(replace(catalog.model("gpt2"), n_layers=1, vocab_size=50)).parameters())


# GPT-2's layout.


@pytest.mark.parametrize("matrix", ["attn.c_attn", "mlp.c_fc", "mlp.c_proj"])
def test_b074_a_forgotten_transpose_fails_on_shape(gpt2_source, tmp_path, matrix):
    name = f"transformer.h.0.{matrix}.weight"
    path = changed(gpt2_source, tmp_path, tensors=lambda t: t.update({name: t[name].t()}))
    refused(name, weights.load, path)


def test_b074_the_square_matrix_is_caught_by_logits_only(gpt2_source, tmp_path):
    name = "transformer.h.0.attn.c_proj.weight"
    path = changed(gpt2_source, tmp_path, tensors=lambda t: t.update({name: t[name].t()}))
    good, bad = logits(weights.load(gpt2_source), IDS), logits(weights.load(path), IDS)
    assert (good - bad).abs().max() > 0.1
    with torch.no_grad():
        reference = GPT2LMHeadModel.from_pretrained(gpt2_source)(IDS).logits
    assert (good - reference).abs().max() < 1e-4


def test_gpt2_names_without_prefix_and_with_mask_buffers(gpt2_source, tmp_path):
    """B074: the hub's own gpt2 file has no `transformer.` prefix and carries its causal masks."""

    def as_on_the_hub(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors |= {"h.0.attn.bias": torch.ones(1, 1, 48, 48), "h.0.attn.masked_bias": torch.tensor(-1e4)}

    path = changed(gpt2_source, tmp_path, tensors=as_on_the_hub)
    assert torch.equal(logits(weights.load(path), IDS), logits(weights.load(gpt2_source), IDS))


def test_a_block_bias_is_not_taken_for_a_mask(gpt2_source, tmp_path):
    path = changed(gpt2_source, tmp_path, tensors=lambda t: t.pop("transformer.h.1.attn.c_attn.bias"))
    refused("missing tensor.*blocks.1.attention.q.bias", weights.load, path)


# Tied and untied.


def test_b075_tied_and_absent_shares_storage(gpt2_source):
    model = weights.load(gpt2_source)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    assert "head.weight" not in dict(model.named_parameters())


def test_b075_tied_and_present(llama_source, tmp_path):
    equal = changed(llama_source, tmp_path / "equal", config=lambda c: c.update(tie_word_embeddings=True),
                    tensors=lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))  # fmt: skip
    model = weights.load(equal)
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()
    other = changed(llama_source, tmp_path / "other", config=lambda c: c.update(tie_word_embeddings=True))
    refused("ties the output matrix.*lm_head.weight differs", weights.load, other)


def test_b075_untied_and_present_keeps_both(llama_source):
    model, stored = weights.load(llama_source), load_file(llama_source / "model.safetensors")
    assert torch.equal(model.head.weight, stored["lm_head.weight"])
    assert torch.equal(model.embed.weight, stored["model.embed_tokens.weight"])
    assert not torch.equal(model.head.weight, model.embed.weight)


def test_b075_untied_and_absent_is_an_error(llama_source, tmp_path):
    path = changed(llama_source, tmp_path, tensors=lambda t: t.pop("lm_head.weight"))
    refused("missing tensor.*head.weight", weights.load, path)


def test_b075_embedding_only_under_the_head_name(llama_source, tmp_path):
    path = changed(llama_source, tmp_path, config=lambda c: c.update(tie_word_embeddings=True),
                   tensors=lambda t: t.pop("model.embed_tokens.weight"))  # fmt: skip
    model = weights.load(path)
    assert torch.equal(model.embed.weight, load_file(path / "model.safetensors")["lm_head.weight"])
    assert model.head.weight.data_ptr() == model.embed.weight.data_ptr()


@pytest.mark.parametrize(("kind", "tied"), [("gpt2", True), ("llama", False)])
def test_the_tied_default_is_the_family_s(gpt2_source, llama_source, tmp_path, kind, tied):
    source = gpt2_source if kind == "gpt2" else llama_source
    path = changed(source, tmp_path, config=lambda c: c.pop("tie_word_embeddings", None))
    assert weights.load(path).config.tied_embeddings is tied


# Files that are not weights.


def safetensors_file(path, header, data=b""):
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


@pytest.mark.parametrize(("content", "cause"), [
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer"),
    (b"", "empty file"),
    (b"\x10\x00\x00\x00", "4 bytes is too short"),
    (struct.pack("<Q", 2_336_927_755_350_992_246) + b"{}" * 8, "claims 2,336,927,755,350,992,246 bytes and the file has 24"),
    (struct.pack("<Q", 4) + b"abcd" * 4, "not a safetensors header"),
    (struct.pack("<Q", 2) + b"[]", "not a safetensors header"),
    (struct.pack("<Q", 14) + b'{"a": {"b": 1}', "not a safetensors header"),
    (struct.pack("<Q", 99_999) + b"[" * 99_999, "not a safetensors header"),
    (struct.pack("<Q", 43) + b'{"a": {"dtype": 5, "data_offsets": [0, 0]}}', "type 5 are not read"),
])  # fmt: skip
def test_b078_what_is_there_instead_of_weights(llama_source, tmp_path, content, cause):
    path = changed(llama_source, tmp_path)
    (path / "model.safetensors").write_bytes(content)
    assert "model.safetensors" in refused(cause, weights.load, path)


def test_b078_the_first_bytes_of_a_pointer_are_not_a_length():
    assert struct.unpack("<Q", b"version ")[0] == 2_336_927_755_350_992_246


def test_b078_cut_by_one_byte(llama_source, tmp_path):
    path = changed(llama_source, tmp_path)
    file = path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    refused("the download was cut", weights.load, path)


def test_b078_a_header_of_100_000_bytes_is_valid(llama_source, tmp_path):
    path = changed(llama_source, tmp_path)
    file = path / "model.safetensors"
    whole = file.read_bytes()
    length = struct.unpack("<Q", whole[:8])[0]
    safetensors_file(file, whole[8 : 8 + length].ljust(100_000), whole[8 + length :])
    assert struct.unpack("<Q", file.read_bytes()[:8])[0] == 100_000
    assert torch.equal(logits(weights.load(path), IDS), logits(weights.load(llama_source), IDS))


def test_other_tensor_types_are_refused_by_name(llama_source, tmp_path):
    path = changed(llama_source, tmp_path, tensors=lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}))
    refused("type F8_E4M3 are not read; supported: F32, F16, BF16", weights.load, path)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_sixteen_bit_files_load_in_any_dtype(llama_source, tmp_path, kind):
    path = changed(llama_source, tmp_path, tensors=lambda t: t.update({name: value.to(kind) for name, value in t.items()}))
    stored = load_file(path / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"]
    for dtype in ("float32", "bfloat16", torch.float16):
        model = weights.load(path, dtype=dtype)
        assert model.dtype == weights.check_dtype(dtype, "cpu")
        assert torch.equal(model.blocks[0].attention.q.weight, stored.to(model.dtype))


def test_no_pickle(llama_source, tmp_path):
    for name in ("weights.bin", "weights.pt", "weights.pth"):
        refused("a pickle can run code", weights.load, tmp_path / name)
    path = changed(llama_source, tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused("only pickled weights", weights.load, path)


def test_a_sharded_model_is_refused(llama_source, tmp_path):
    path = changed(llama_source, tmp_path)
    (path / "model.safetensors").rename(path / "model-00001-of-00002.safetensors")
    (path / "model.safetensors.index.json").write_text("{}")
    refused("split over several files", weights.load, path)


def test_paths_that_hold_no_model(llama_source, tmp_path):
    refused("no config.json", weights.load, tmp_path)
    refused("no such file", weights.load, tmp_path / "absent.gguf")
    (tmp_path / "notes.txt").write_text("hello")
    refused("not a .gguf file and not a folder", weights.load, tmp_path / "notes.txt")
    object_expected = "not readable as a JSON object"
    for text, cause in (
        ("{", object_expected),
        ("[]", object_expected),
        ('{"a":' * 9999, object_expected),
        ('{"model_type": "llama"}', "num_hidden_layers is absent"),
    ):
        (tmp_path / "config.json").write_text(text)
        refused(cause, weights.load, tmp_path)
    assert torch.equal(weights.load(llama_source / "model.safetensors").embed.weight, weights.load(llama_source).embed.weight)


@pytest.mark.parametrize(("name", "cause"), [
    ("other.safetensors", "not a .gguf file and not a folder"), ("absent/model.safetensors", "no such file"), ("absent.safetensors", "no such file"),
    ("folder.gguf", "no config.json"), ("x" * 5000, "empty, too long or not a path"), ("~nobody-here/m", "empty, too long or not a path"),
    ("", "empty, too long"), (" ", "empty, too long"), (None, "empty, too long"),
])  # fmt: skip
def test_names_that_mean_no_file(tmp_path, monkeypatch, name, cause):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.safetensors").touch()
    (tmp_path / "folder.gguf").mkdir()
    refused(cause, weights.load, name)


# Configs that ask for something else.


@pytest.mark.parametrize(("change", "cause"), [
    ({"model_type": "qwen3"}, "model_type 'qwen3' is not supported; supported: gpt2, llama"),
    ({"attention_bias": True}, "attention_bias=True is not supported"),
    ({"mlp_bias": True}, "mlp_bias=True is not supported"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, r"rope type 'yarn' with \['factor'\] is not supported; supported: default, llama3"),
    ({"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 4.0}}, "rope type 'linear'"),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3 rope scaling lacks or misstates 'low_freq_factor'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "one rule for all layers"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"num_key_value_heads": 3}, "4 query heads cannot share 3 KV heads"),
    ({"num_hidden_layers": 10**9}, "1,000,000,000 layers of up to 32 x 97 values and the file 21 tensors"),
    ({"hidden_size": 32.0}, "hidden_size is 32.0 and must be one number"),
    ({"hidden_size": "32"}, "hidden_size is '32' and must be one number"),
    ({"num_attention_heads": 0}, "num_attention_heads is 0 and must be one number from 1 to 2,147,483,647"),
    ({"intermediate_size": -1}, "intermediate_size is -1"),
    ({"vocab_size": 1e30}, "vocab_size is 1e\\+30"),
    ({"vocab_size": 10**30}, "vocab_size is 1000"),
    ({"vocab_size": 2**31 - 1, "hidden_size": 2**31 - 1}, "2,147,483,647 x 2,147,483,647 values"),
    ({"head_dim": 7}, "head_dim is 7 and must be one even number"),
    ({"head_dim": 2**30}, "head_dim is 1073741824"),
    ({"num_hidden_layers": True}, "num_hidden_layers is True"),
    ({"rms_norm_eps": -1}, "rms_norm_eps is -1 and must be one number from 0.0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    *(({"rope_parameters": {"rope_theta": value}}, "rope_theta is .* must be one number") for value in (True, "1e4", None, 0, -1.0, float("inf"))),
    ({"rope_parameters": [1]}, r"rope type \[1\] .*supported"),
    ({"rope_parameters": {"factor": 2.0}}, r"rope type 'default' with \['factor'\]"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
    ({"rope_parameters": {**RULE, "attention_factor": 2.0}}, r"rope type 'llama3' with \['attention_factor'\]"),
    *(({"rope_parameters": {**RULE, key: value}}, f"misstates .*'{key}': .* it needs numbers") for key, value in (
        ("factor", 0.5), ("factor", "8"), ("factor", True), ("low_freq_factor", 0), ("low_freq_factor", 4.0), ("high_freq_factor", float("nan")))),
    ({"rope_parameters": {**RULE, "original_max_position_embeddings": 0}}, "misstates .*'original_max_context': 0"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types='sliding_attention' is not supported"),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50.0 is not supported"),
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping=30.0 is not supported"),
])  # fmt: skip
def test_what_a_config_may_not_ask_for(llama_source, tmp_path, change, cause):
    path = changed(llama_source, tmp_path, config=lambda c: c.update(change))
    assert str(path) in refused(cause, weights.load, path)


def test_gpt2_settings_that_change_the_arithmetic(gpt2_source, tmp_path):
    for i, change in enumerate(({"activation_function": "relu"}, {"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False})):
        path = changed(gpt2_source, tmp_path / str(i), config=lambda c, change=change: c.update(change))
        refused(f"{next(iter(change))}=.* is not supported", weights.load, path)


def test_rope_scaling_as_transformers_4_and_5_write_it():
    """The same rule from `rope_scaling` beside `rope_theta`, and from `rope_parameters`; and its absence."""
    rule = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    base = {"model_type": "llama", **LLAMA}
    read = lambda **more: weights.config_from_hf({**base, **more}, weights.Path("m"))  # noqa: E731
    four, five = read(rope_scaling=rule, rope_theta=5e5), read(rope_parameters={**rule, "rope_theta": 5e5})
    assert four == five
    assert (five.rope_base, five.rope_scaling.factor, five.rope_scaling.original_max_context) == (5e5, 8.0, 32)
    assert (read().rope_base, read().rope_scaling) == (10_000.0, None)
    assert read(head_dim=24).head_dim == 24 and read().head_dim == 8
    assert read(rms_norm_eps=0).norm_eps == 0 and read(rope_theta=500_000, layer_types=["full_attention"] * 2).rope_base == 5e5
    assert read(rope_parameters={"partial_rotary_factor": 1.0, "rope_theta": 2e4}).rope_base == 2e4
    assert read(rms_norm_eps=1e-5).norm_eps == 1e-5 and read().norm_eps == 1e-6


# Device, dtype, memory, names, hub.


def test_b081_the_default_dtype_and_its_reason():
    for device, capability, dtype in (("cpu", None, torch.float32), ("cuda", (7, 5), torch.float16), ("cuda", (9, 0), torch.bfloat16)):
        chosen, reason = weights.default_dtype(device, capability=capability)
        assert chosen == dtype
        assert str(dtype).removeprefix("torch.") in reason


def test_b082_devices(monkeypatch):
    assert weights.check_device("cpu") == torch.device("cpu")
    refused('Use device="cpu"', weights.load, "absent", device="mps")
    refused("unknown; use", weights.check_device, "tpu")
    refused("unknown; use", weights.check_device, "meta")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused('needs an NVIDIA GPU.*Use device="cpu"', weights.load, "absent", device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert weights.check_device("cuda:0").index == 0
    refused("shows 1", weights.check_device, "cuda:1")


def test_other_dtypes_are_refused(llama_source):
    refused("dtype=int8 .* use float32, bfloat16, float16", weights.load, llama_source, dtype="int8")
    refused("dtype=float64", weights.load, llama_source, dtype=torch.float64)


def test_b099_a_model_that_does_not_fit_is_refused_before_it_is_allocated(monkeypatch):
    monkeypatch.setattr(weights, "free_memory_bytes", lambda device: 4 << 30)
    made = []
    monkeypatch.setattr(weights.Decoder, "to_empty", lambda self, device, **options: made.append(str(device)))
    refused("Llama-3.1-8B in bfloat16 needs 1.*GiB and 4.000 GiB is free on cpu", weights.random, catalog.model("llama-3.1-8b"), dtype="bfloat16")
    assert made == ["meta"]


def test_free_memory_is_known():
    assert weights.free_memory_bytes() > 1 << 20


def test_random_weights_follow_the_seed_and_the_shape():
    shape = replace(catalog.model("llama-3.2-1b"), n_layers=1, vocab_size=300, max_context=64)
    first, again, other = (weights.random(shape, seed=seed) for seed in (3, 3, 4))
    named = dict(again.named_parameters())
    assert all(torch.equal(p, named[name]) for name, p in first.named_parameters())
    assert not torch.equal(first.embed.weight, other.embed.weight)
    for name, parameter in first.named_parameters():
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        else:
            assert abs(parameter.std() - 0.02) < 0.002 and abs(parameter.mean()) < 0.001, name
    assert torch.isfinite(first(torch.tensor([[1, 2, 3]]), cache=first.new_cache(max_len=4))).all()
    assert weights.random(replace(catalog.model("gpt2"), n_layers=1, max_context=9000)).positions.weight.shape == (9000, 768)


@pytest.mark.parametrize(("name", "what"), [
    ("mixtral-8x7b", "a mixture of experts"), ("deepseek-v3", "latent attention"), ("qwen3-0.6b", "q/k norms"),
    ("qwen2.5-0.5b", "attention biases"), ("mistral-7b", "a sliding window of 4096"), ("gemma-2-9b", "4 norms per layer"),
    ("phi-2", "an ungated MLP"),
])  # fmt: skip
def test_shapes_the_decoder_cannot_run_say_why(name, what):
    refused(f"needs .*{what}", weights.random, catalog.model(name))


def test_a_window_longer_than_the_context_does_not_bite():
    assert weights.not_runnable(replace(catalog.model("mistral-7b"), max_context=4096)) == []


def test_the_lab_s_model_missing_says_where_to_put_it(monkeypatch, tmp_path):
    monkeypatch.setenv("DECODELAB_MODEL", str(tmp_path / "elsewhere.gguf"))
    message = refused("course.py lab", weights.load, "smollm2-135m")
    assert str(tmp_path / "elsewhere.gguf") in message and "DECODELAB_MODEL" in message


def test_names_without_weights():
    refused("weights.random", weights.load, "gpt2")
    with pytest.raises(catalog.UnknownName, match="near names"):
        weights.load("smollm-135m-instrukt")


def test_b104_no_internet_is_one_line_within_five_seconds(monkeypatch):
    """Name resolution that hangs is the worst case: it outlasts the client's own timeout."""
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: (_ for _ in ()).throw(OSError("not cached")))
    assert weights.HUB_TIMEOUT_S < 5
    monkeypatch.setattr(weights, "HUB_TIMEOUT_S", 0.1)
    stopped = threading.Event()
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: stopped.wait(60))
    message = refused("no internet", weights.load, "someone/some-model")
    assert not stopped.is_set(), "the answer came while the name was still being looked up"
    assert "model.safetensors" in message and "Put config.json" in message
    stopped.set()


def test_b104_a_hub_that_refuses_or_breaks_off_is_one_line(monkeypatch):
    import huggingface_hub

    def fail(*args, **options):
        raise ConnectionError("a\nb")

    monkeypatch.setattr(weights, "HUB_TIMEOUT_S", 0.1)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    for model_info in (fail, lambda *args, **options: None):
        monkeypatch.setattr(huggingface_hub.HfApi, "model_info", model_info)
        refused("someone/some-model.*no such model.*Put config.json", weights.load, "someone/some-model")


def test_a_hub_model_is_taken_from_the_cache_or_fetched(monkeypatch, llama_source, tmp_path):
    import huggingface_hub

    calls = []

    def snapshot(name, *, allow_patterns, etag_timeout, local_files_only=False):
        calls.append(local_files_only)
        assert "model.safetensors" in allow_patterns and not any("*" in pattern for pattern in allow_patterns)
        return str(tmp_path if local_files_only and len(calls) == 1 else llama_source)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: None)
    assert weights.find("someone/some-model") == llama_source
    assert calls == [True, False]
    assert weights.find("someone/some-model") == llama_source
    assert calls == [True, False, True]
