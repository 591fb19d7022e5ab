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

from decodelab.arithmetic import catalog, cost
from decodelab.decoder import memory, model, weights
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
    *((struct.pack("<Q", length) + header, f"its {8 + len(header):,} bytes are not what a safetensors header says") for length, header in (
        (2_336_927_755_350_992_246, b"{}" * 8), (4, b"abcd" * 4), (18, b"[]" * 9), (18, b'{"a":\n {"b": 1} }'), (99_999, b"[" * 99_999),
        (43, b'{"a": {"dtype": 5, "data_offsets": [0, 0]}}'), (59, b'{"a": {"dtype": "x\\ny", "shape": [0], "data_offsets": [0,0]}}'))),
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
    path = changed(llama_source, tmp_path / "buffer", tensors=lambda t: t.update({"rotary_emb.inv_freq": torch.zeros(4, dtype=torch.int8)}))
    assert torch.equal(weights.load(path).embed.weight, weights.load(llama_source).embed.weight)  # a buffer is not read in any type


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
    refused("no model.safetensors and no index of shards; pickled weights are not read", weights.load, path)


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


# Weights in several files.


@pytest.fixture(scope="module")
def sharded_source(llama_source, tmp_path_factory):
    """The same model as `llama_source`, in shards."""
    path = tmp_path_factory.mktemp("sharded")
    LlamaForCausalLM.from_pretrained(llama_source).save_pretrained(path, max_shard_size="20KB")
    assert not (path / "model.safetensors").exists() and len(list(path.glob("model-?????-of-?????.safetensors"))) > 2
    return path


def placed_by(path):
    return json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]


def test_shards_are_the_same_model_as_one_file(sharded_source, llama_source):
    whole = dict(weights.load(llama_source).named_parameters())
    for source in (sharded_source, sharded_source / "model.safetensors.index.json"):
        parts = dict(weights.load(source).named_parameters())
        assert parts.keys() == whole.keys() and all(torch.equal(parts[name], whole[name]) for name in whole)


def test_one_whole_file_goes_before_shards(sharded_source, llama_source, tmp_path):
    path = changed(llama_source, tmp_path)
    (path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "absent.safetensors"}}')
    assert torch.equal(weights.load(path).embed.weight, weights.load(sharded_source).embed.weight)


def test_a_missing_shard_is_named(sharded_source, tmp_path):
    path = changed(sharded_source, tmp_path)
    shard = placed_by(path)["model.norm.weight"]
    (path / shard).unlink()
    refused(rf"1 of \d+ shards are not there: {shard}; download", weights.load, path)


def test_shard_and_index_hold_the_same_tensors(sharded_source, tmp_path):
    """A tensor in the shard alone, in the index alone, or placed by the index in another shard that lacks it."""
    index = {"weight_map": placed_by(sharded_source)}
    norm, head = (index["weight_map"][name] for name in ("model.norm.weight", "lm_head.weight"))
    assert norm != head
    extra, moved = {"model.extra.weight": norm}, {"model.norm.weight": head}
    for i, (placed, file, cause) in enumerate((
        (lambda m: m.pop("model.norm.weight"), norm, "'model.norm.weight' is in this shard only"),
        (lambda m: m.update(extra), norm, "'model.extra.weight' is in the index only"),
        (lambda m: m.update(moved), head, "'model.norm.weight' is in the index only"),
    )):  # fmt: skip
        path = changed(sharded_source, tmp_path / str(i))
        placed(entries := dict(index["weight_map"]))
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": entries}))
        if i == 2:  # the shard the tensor was moved from lacks it, as a whole model would
            found = load_file(path / norm)
            save_file({name: value for name, value in found.items() if name != "model.norm.weight"}, path / norm)
        assert str(path / file) in refused(cause, weights.load, path)


@pytest.mark.parametrize("file", ["../model.safetensors", "/etc/model.safetensors", "sub/model.safetensors", "..\\model.safetensors", "C:m.safetensors",
                                  "model.bin", "", ".safetensors", "a\nb.safetensors", "a\0.safetensors", "m" * 300 + ".safetensors", None, 5, ["a.safetensors"]])  # fmt: skip
def test_an_index_names_files_of_its_own_folder_only(sharded_source, tmp_path, file):
    path = changed(sharded_source, tmp_path)
    shutil.copy(path / placed_by(path)["model.norm.weight"], path.parent / "model.safetensors")  # it would be read if the path were followed
    index = {"weight_map": {**placed_by(path), "model.norm.weight": file}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    refused("it places 'model.norm.weight' in .*, which is not a .safetensors file in its folder", weights.load, path)


@pytest.mark.parametrize(("text", "cause"), [
    ("{", "not readable as a JSON object"), ("{}", "its weight_map is None and must name the file of each tensor"),
    ('{"weight_map": {}}', "its weight_map is {}"), ('{"weight_map": ["model.safetensors"]}', "its weight_map is .*model.safetensors"),
])  # fmt: skip
def test_an_index_that_is_none(sharded_source, tmp_path, text, cause):
    path = changed(sharded_source, tmp_path)
    (path / "model.safetensors.index.json").write_text(text)
    assert "model.safetensors.index.json" in refused(cause, weights.load, path)


@pytest.mark.parametrize(("content", "cause"), [
    (lambda whole: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer"),
    (lambda whole: b"", "empty file"),
    (lambda whole: whole[:-1], "the download was cut"),
    (lambda whole: whole[:40], "the download was cut"),
])  # fmt: skip
def test_b078_every_shard_is_checked_as_a_single_file_is(sharded_source, tmp_path, content, cause):
    path = changed(sharded_source, tmp_path)
    shard = path / placed_by(path)["model.norm.weight"]
    shard.write_bytes(content(shard.read_bytes()))
    assert str(shard) in refused(cause, weights.load, path)


# Configs that ask for something else.


@pytest.mark.parametrize(("change", "cause"), [
    ({"model_type": "qwen3_moe"}, "architecture 'qwen3_moe' is not supported; supported: gpt2, llama, qwen2, qwen3"),
    ({"model_type": ["llama"]}, "architecture .*'llama'.* is not supported"),
    ({"attention_bias": "yes"}, "attention_bias='yes' is not supported"),
    ({"attention_bias": True}, "missing tensor.*blocks.0.attention.q.bias"),
    ({"model_type": "qwen2"}, "missing tensor.*blocks.0.attention.q.bias"),
    ({"model_type": "qwen3"}, "missing tensor.*blocks.0.attention.q_norm.weight"),
    ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True is not supported"),
    ({"model_type": "qwen3", "layer_types": ["full_attention", "sliding_attention"]}, "layer_types='sliding_attention' is not supported"),
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
    for device in ("mps", "mps:0", "tpu", "meta", "cuda:x"):
        refused(f'device="{device}" is unknown or lacks operations.*use "cpu" .also on Apple silicon', weights.load, "absent", device=device)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    refused('needs an NVIDIA GPU.*Use device="cpu"', weights.load, "absent", device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert weights.check_device("cuda:0").index == 0
    refused("shows 1", weights.check_device, "cuda:1")


def test_other_dtypes_are_refused(llama_source):
    refused("dtype=int4 .* use float32, bfloat16, float16, int8", weights.load, llama_source, dtype="int4")
    refused("dtype=float64", weights.load, llama_source, dtype=torch.float64)


def test_b099_a_model_that_does_not_fit_is_refused_before_it_is_allocated(monkeypatch):
    monkeypatch.setattr(weights, "free_memory_bytes", lambda device: 4 << 30)
    made = []
    monkeypatch.setattr(model, "gather", lambda module, device: made.append(str(device)))
    refused("Llama-3.1-8B in bfloat16 needs 1.*GiB and 4.000 GiB is free on cpu", weights.random, catalog.model("llama-3.1-8b"), dtype="bfloat16")
    assert made == ["meta"]


def test_free_memory_is_known():
    assert memory.free_memory_bytes() > 1 << 20


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
    ("mixtral-8x7b", "a mixture of experts"), ("qwen3-30b-a3b", "a mixture of experts"), ("deepseek-v3", "latent attention"),
    ("mistral-7b", "a sliding window of 4096"), ("gemma-2-9b", "4 norms per layer"), ("phi-2", "an ungated MLP"),
])  # fmt: skip
def test_shapes_the_decoder_cannot_run_say_why(name, what):
    refused(f"needs .*{what}", weights.random, catalog.model(name))


@pytest.mark.parametrize("change", [{}, {"attention_out_bias": True, "tied_embeddings": False}])
@pytest.mark.parametrize("name", ["gpt2", "smollm2-135m", "qwen2.5-0.5b", "qwen3-0.6b"])
def test_catalogue_shapes_run_and_hold_as_many_values_as_the_formula_counts(name, change):
    """Two layers of each shape, with a small vocabulary: parameters of the built model, and a pass in two steps."""
    config = replace(catalog.model(name), n_layers=2, vocab_size=97, intermediate=64, max_context=32, **change)
    model = weights.random(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == cost.parameters(config)
    attention = model.blocks[1].attention
    assert (attention.q.bias is not None, attention.out.bias is not None) == (config.qkv_bias, config.attention_out_bias)
    cache = model.new_cache(max_len=7)
    model(IDS[:, :4], cache=cache)
    assert (model(IDS[:, 4:], cache=cache) - logits(model, IDS)[:, -1]).abs().max() < 1e-4


def test_every_dense_qwen_of_the_catalogue_runs():
    dense = [shape for shape in catalog.models().values() if "Qwen" in shape.name and not shape.moe_experts_total]
    assert len(dense) > 10 and not any(weights.not_runnable(shape) for shape in dense)


def test_qwen3_norms_start_at_one():
    attention = weights.random(replace(catalog.model("qwen3-0.6b"), n_layers=1, vocab_size=97)).blocks[0].attention
    for norm in (attention.q_norm, attention.k_norm):
        assert norm.weight.shape == (128,) and (norm.weight == 1).all() and norm.eps == 1e-5


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


@pytest.mark.parametrize("kind", ["one file", "shards"])
def test_a_hub_model_is_taken_from_the_cache_or_fetched(monkeypatch, llama_source, sharded_source, tmp_path, kind):
    """Nothing in the cache, or shards of which one is not there yet: the hub is asked. The patterns fetch every file and no pickle."""
    import huggingface_hub

    whole = llama_source if kind == "one file" else sharded_source
    part = changed(whole, tmp_path)
    next(part.glob("*.safetensors")).unlink()
    calls = []

    def snapshot(name, *, allow_patterns, etag_timeout, local_files_only=False):
        calls.append(local_files_only)
        offered = {file.name for file in whole.iterdir()} | {"pytorch_model.bin", "consolidated.safetensors", "model.fp16.safetensors", "run.py"}
        fetched = set(huggingface_hub.utils.filter_repo_objects(offered, allow_patterns=allow_patterns))
        assert fetched == {file.name for file in whole.iterdir()}
        return str(part if local_files_only and len(calls) == 1 else whole)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", lambda *a, **k: None)
    assert weights.find("someone/some-model") == whole
    assert calls == [True, False]
    assert weights.find("someone/some-model") == whole
    assert calls == [True, False, True]
