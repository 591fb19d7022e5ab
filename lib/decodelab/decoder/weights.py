"""Weights from a GGUF file, a Hugging Face folder or a seed into a Decoder: every parameter is written exactly once."""

import json
import os
import re
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from decodelab.arithmetic import catalog
from decodelab.arithmetic.catalog import ModelConfig, RopeScaling
from decodelab.arithmetic.units import format_capacity
from decodelab.decoder import kernels
from decodelab.decoder.memory import free_memory_bytes
from decodelab.decoder.model import Decoder, rotary_frequencies

LAB_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
REASONERS = ("reasoner", "reasoner-draft")  # trained for the course by labs/reasoner/train.py
FAMILIES = ("gpt2", "llama", "qwen2", "qwen3")
TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")  # of stored tensors
DTYPES = ("float32", "bfloat16", "float16", "int8")
HUB_TIMEOUT_S = 4.0
_HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json", "model-?????-of-?????.safetensors",
              "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]  # fmt: skip


class LoadError(ValueError):
    """A model that cannot be loaded: one line that names the file or tensor, the cause and the way out."""


def load(source: str | Path, *, device: str | torch.device = "cpu", dtype: str | torch.dtype | None = None, path: str = "auto",
         say: Callable[[str], None] = print) -> Decoder:  # fmt: skip
    """The model in `source`: a .gguf file, a Hugging Face folder, a hub name "org/model", or one of the lab's own,
    "smollm2-135m", "reasoner" and "reasoner-draft".

    Without `dtype` it is `default_dtype(device)`; "int8" makes the matrices int8 and computes in that default. `path` is how
    decode steps run: "fast" (compiled, see kernels.py), "eager", or "auto", fast where it compiles. Everything is checked
    before memory is taken; nothing is left half-loaded.

    Raises: LoadError, one line.
    """
    place, kind = check_device(device), check_dtype(dtype, device)
    file = find(source)
    config, tensors = _read_folder(file) if file.is_dir() else _read_gguf(file)
    chosen = _assign(config, tensors, file)
    model = _empty(config, place, kind)
    for name, parameter in model.named_parameters():  # the names are the keys of `chosen`: once each
        parameter.copy_(chosen[name].read())
    return _finish(model, dtype, path, say)


def random(config: ModelConfig, *, seed: int = 0, device: str | torch.device = "cpu", dtype: str | torch.dtype | None = None, path: str = "auto",
           say: Callable[[str], None] = print) -> Decoder:  # fmt: skip
    """A model of this shape with random weights: normal, standard deviation 0.02, norms at one.

    Speed and bytes do not depend on the values, as long as they are not constant. For more positions than the shape has,
    pass `dataclasses.replace(config, max_context=...)`.

    Raises: LoadError where the decoder cannot run the shape; names what is missing.
    """
    place, kind = check_device(device), check_dtype(dtype, device)
    require_runnable(config)
    model = _empty(config, place, kind)
    generator = torch.Generator(place).manual_seed(seed)
    for name, parameter in model.named_parameters():
        parameter.fill_(1) if name.endswith("norm.weight") else parameter.normal_(0, 0.02, generator=generator)
    return _finish(model, dtype, path, say)


def _finish(model: Decoder, dtype: str | torch.dtype | None, path: str, say: Callable[[str], None]) -> Decoder:
    """The model with int8 matrices where asked, and its fast path."""
    if str(dtype).removeprefix("torch.") == "int8":
        kernels.quantise(model)
    if kernels.chosen_path(path, device=model.device.type, say=say) == "fast":
        kernels.attach(model, say=say)
    return model


def require_runnable(config: ModelConfig) -> None:
    """Raises LoadError where the decoder cannot run this shape, naming what is missing."""
    if missing := not_runnable(config):
        raise LoadError(f"{config.name} needs {', '.join(missing)}, which this decoder does not have; its costs can still be estimated")


def not_runnable(config: ModelConfig) -> list[str]:
    """What this shape needs and the decoder lacks; empty when it runs."""
    lacks = (
        ("a mixture of experts", config.moe_experts_total > 0),
        ("latent attention (MLA)", config.attention == "MLA"),
        (f"{config.norms_per_layer} norms per layer", config.norms_per_layer != 2),
        ("an ungated MLP without GPT-2's layout", not config.gated_mlp and not config.is_gpt2),
        (f"a sliding window of {config.window}", config.windowed_layers > 0 and config.window < config.max_context),
    )
    return [what for what, needed in lacks if needed]


# Device, dtype, memory: settled before anything is allocated.


def check_device(device: str | torch.device) -> torch.device:
    """The device as torch names it. Raises: LoadError for "mps", for a CUDA card that is not there, for anything else."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(device)):
        raise LoadError(f'device="{device}" is unknown or lacks operations the decoder needs; use "cpu" (also on Apple silicon), "cuda" or "cuda:N"')
    place = torch.device(device)
    if place.type == "cuda" and (place.index or 0) >= (cards := torch.cuda.device_count() if torch.cuda.is_available() else 0):
        raise LoadError(f'device="{place}" needs an NVIDIA GPU and a CUDA build of PyTorch; this machine shows {cards}. Use device="cpu"')
    return place


def check_dtype(dtype: str | torch.dtype | None, device: str | torch.device) -> torch.dtype:
    """What activations and KV are in for a `dtype` by name or as torch's own; for int8 or None the device's default.

    Raises: LoadError for any other.
    """
    name = str(default_dtype(device)[0] if dtype is None else dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise LoadError(f"dtype={name} is not a dtype the decoder computes in; use {', '.join(DTYPES)}")
    return default_dtype(device)[0] if name == "int8" else getattr(torch, name)


def default_dtype(device: str | torch.device, *, capability: tuple[int, int] | None = None) -> tuple[torch.dtype, str]:
    """The dtype to load in and, in one line, why. `capability` is read from the card unless given."""
    if torch.device(device).type == "cpu":
        return torch.float32, "float32: every CPU computes in it at full speed"
    major, minor = capability or torch.cuda.get_device_capability(device)
    if major < 8:
        return torch.float16, f"float16: a card of compute capability {major}.{minor} has no bfloat16"
    return torch.bfloat16, f"bfloat16: half the bytes of float32, and compute capability {major}.{minor} has it"


def _empty(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """An unwritten model. Raises: LoadError before it is allocated, where its parameters and one of them in float32 do not fit."""
    sizes = [parameter.numel() for parameter in Decoder(config, device="meta").parameters()]
    needed, free = sum(sizes) * dtype.itemsize + max(sizes) * 4, free_memory_bytes(device)
    if needed > free:
        raise LoadError(f"{config.name} in {str(dtype)[6:]} needs {format_capacity(needed)} and {format_capacity(free)} is free on {device}; "
                        "take a smaller model or a 16-bit dtype, or free memory first")  # fmt: skip
    return Decoder(config, device=device, dtype=dtype)


# Where the files are.


def find(source: str | Path) -> Path:
    """The .gguf file or the folder that `source` means, one of the course's own by its name; a hub name is downloaded.

    Raises: LoadError for pickled weights, an unknown name, a file that is not there.
    """
    try:
        shipped = isinstance(source, str) and source in REASONERS  # before a folder of that name: the labs have one
        path = catalog.data_dir() / "models" / source if shipped else Path(source if str(source).strip() else None).expanduser()
        folder, file = path.is_dir(), path.is_file()
    except (TypeError, RuntimeError, OSError) as error:  # empty or no text, "~nobody/m", a name too long
        raise LoadError(f"{str(source)[:80]!r} is empty, too long or not a path ({type(error).__name__}); give a file, folder or name") from None
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise LoadError(f"{path}: a pickle can run code when it is read, so it is refused; use the model's .safetensors or .gguf file")
    if folder or (file and path.suffix == ".gguf"):
        return path
    if file and path.name in ("model.safetensors", "model.safetensors.index.json"):
        return path.parent  # its config.json is beside it
    if file or path.suffix in (".gguf", ".safetensors"):
        raise LoadError(f"{path}: {'not a .gguf file and not a folder with config.json and model.safetensors' if file else 'no such file'}")
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
        return _from_hub(str(source))
    name = catalog.model(str(source)).name
    if name != "SmolLM2-135M":
        raise LoadError(f'{name} has a shape and no weights here; use weights.random(catalog.model({str(source)!r})), or a hub name "org/model"')
    path = Path(os.environ.get("DECODELAB_MODEL") or catalog.data_dir() / "models" / LAB_MODEL)
    if not path.is_file():
        raise LoadError(f"{path}: no such file. `python course.py lab` fetches the lab's model; or set DECODELAB_MODEL to where {LAB_MODEL} is")
    return path


def _from_hub(name: str) -> Path:
    """The folder of a hub model, from the local cache or downloaded; without internet one line within about HUB_TIMEOUT_S."""
    from huggingface_hub import HfApi, snapshot_download  # tokenizers brings it

    fetch = partial(snapshot_download, name, allow_patterns=_HUB_FILES, etag_timeout=HUB_TIMEOUT_S)
    with suppress(Exception):  # not in the cache, or not whole there: the hub is asked next
        _weight_files(cached := Path(fetch(local_files_only=True)))
        return cached
    answered = threading.Event()

    def ask() -> None:  # in a thread: name resolution can outlast every timeout of the client
        with suppress(Exception):
            HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
            answered.set()

    threading.Thread(target=ask, daemon=True).start()
    if answered.wait(HUB_TIMEOUT_S):
        with suppress(Exception):
            return Path(fetch())
    raise LoadError(f"{name}: its weights are not on this machine and the hub gave nothing: no internet, no such model, or one that "
                    "needs a login. Put config.json, model.safetensors and tokenizer.json of it in a folder and load that folder")  # fmt: skip


# From the names and layouts of a file to ours.


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: its name, type and shape there, and how to read it in PyTorch's (out, in) layout."""

    name: str
    kind: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    def then(self, change: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> "Stored":
        return Stored(self.name, self.kind, shape, lambda: change(self.read()))


_NAMES = {  # ours: Llama and Qwen in Hugging Face, GPT-2 in Hugging Face, GGUF
    "embed": "embed_tokens wte token_embd", "positions": "wpe position_embd", "norm": "norm ln_f output_norm", "head": "lm_head output",
    "attention_norm": "input_layernorm ln_1 attn_norm", "mlp_norm": "post_attention_layernorm ln_2 ffn_norm",
    "attention.q": "self_attn.q_proj attn_q", "attention.k": "self_attn.k_proj attn_k", "attention.v": "self_attn.v_proj attn_v",
    "attention.q_norm": "self_attn.q_norm attn_q_norm", "attention.k_norm": "self_attn.k_norm attn_k_norm",
    "attention.qkv": "attn.c_attn attn_qkv", "attention.out": "self_attn.o_proj attn.c_proj attn_output",
    "mlp.gate": "mlp.gate_proj ffn_gate", "mlp.up": "mlp.up_proj mlp.c_fc ffn_up", "mlp.down": "mlp.down_proj mlp.c_proj ffn_down",
}  # fmt: skip
_OURS = {theirs: ours for ours, names in _NAMES.items() for theirs in names.split()}
_BUFFERS = re.compile(r"(^|\.)(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)$")  # masks and angles, not weights
_NAME = re.compile(r"(?:transformer\.|model\.)?(?:(?:h|layers|blk)\.(\d{1,9})\.)?([\w.]+)\.(weight|bias)")


def _places(tensor: Stored, config: ModelConfig) -> list[tuple[str, Stored]]:
    """The names of ours that this tensor fills, each with its part of it; a tensor of no known layout keeps its own name."""
    match = _NAME.fullmatch(tensor.name)
    if not match or match[2] not in _OURS:
        return [(f"unknown {tensor.name}", tensor)]
    layer, theirs, end = match.groups()
    name = f"{'' if layer is None else f'blocks.{int(layer)}.'}{_OURS[theirs]}.{end}"
    if theirs.split(".")[-1].startswith("c_") and len(tensor.shape) == 2:  # GPT-2's Conv1D stores (in, out)
        tensor = tensor.then(Tensor.t, tensor.shape[::-1])
    if theirs in ("attn_q", "attn_k") and config.family == "llama":  # GGUF keeps its rotary pairs side by side, rotate half a head apart
        heads = config.n_heads if theirs == "attn_q" else config.n_kv_heads
        tensor = tensor.then(lambda rows: rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2), tensor.shape)
    if _OURS[theirs] != "attention.qkv":
        return [(name, tensor)]
    rows, rest = divmod(tensor.shape[0] if tensor.shape else 1, 3)  # one that has no thirds stays whole and fails on shape
    return [(name.replace("qkv", part), tensor if rest else tensor.then(lambda fused, i=i: fused.chunk(3)[i], (rows, *tensor.shape[1:])))
            for i, part in enumerate("qkv")]  # fmt: skip


def _assign(config: ModelConfig, tensors: list[Stored], path: Path) -> dict[str, Stored]:
    """Our parameter name -> the one tensor of the file that fills it.

    Raises: LoadError naming what is missing, unexpected, there twice or of another shape or type.
    """
    tensors = [tensor for tensor in tensors if not _BUFFERS.search(tensor.name)]
    if unread := sorted({tensor.kind for tensor in tensors} - set(TYPES)):
        raise LoadError(f"{path}: tensors of type {', '.join(unread)} are not read; supported: {', '.join(TYPES)}")
    widest = max(config.vocab_size, config.max_context, config.intermediate, config.query_width)
    if config.n_layers > len(tensors) or config.hidden * widest > 1 << 48:  # torch cannot count the bytes of such a matrix
        raise LoadError(f"{path}: its config has {config.n_layers:,} layers of up to {config.hidden:,} x {widest:,} values "
                        f"and the file {len(tensors)} tensors; they do not belong together")  # fmt: skip
    shapes = {name: tuple(value.shape) for name, value in Decoder(config, device="meta").named_parameters()}
    chosen: dict[str, Stored] = {}
    for tensor in tensors:
        for name, part in _places(tensor, config):
            if name in chosen:
                raise LoadError(f"{path}: {name} is there twice, as {chosen[name].name} and {part.name}; keep one")
            chosen[name] = part
    if config.tied_embeddings and (head := chosen.pop("head.weight", None)):
        if chosen.setdefault("embed.weight", head) is not head and not torch.equal(chosen["embed.weight"].read(), head.read()):
            raise LoadError(f"{path}: the config ties the output matrix to the embedding, but {head.name} differs from "
                            f"{chosen['embed.weight'].name}; set tie_word_embeddings to false if both are meant")  # fmt: skip
    unexpected = [part.name for name, part in chosen.items() if name not in shapes]
    for what, names in (("missing", [name for name in shapes if name not in chosen]), ("unexpected", unexpected)):
        if names:
            raise LoadError(f"{path}: {len(names)} {what} tensor(s): {', '.join(names[:4])}{', ...' if names[4:] else ''}; "
                            "the file is incomplete or not of the architecture its config names")  # fmt: skip
    for name, shape in shapes.items():
        if chosen[name].shape != shape:
            raise LoadError(f"{path}: {chosen[name].name} gives {name} the shape {chosen[name].shape} and the model has {shape}; correct its config")
    return chosen


# From a config to ours.

_KEYS = {  # ModelConfig: config.json of Llama and Qwen, config.json of GPT-2, GGUF
    "n_layers": "num_hidden_layers n_layer block_count", "hidden": "hidden_size n_embd embedding_length",
    "n_heads": "num_attention_heads n_head attention.head_count", "vocab_size": "vocab_size vocab_size vocab_size",
    "max_context": "max_position_embeddings n_positions context_length", "intermediate": "intermediate_size n_inner feed_forward_length",
    "norm_eps": "rms_norm_eps layer_norm_epsilon attention.layer_norm_rms_epsilon", "rope_base": "rope_theta rope_theta rope.freq_base",
    "n_kv_heads": "num_key_value_heads n_head attention.head_count_kv", "head_dim": "head_dim head_dim attention.key_length",
}  # fmt: skip
_DEFAULTS = {"layer_norm_epsilon": 1e-5, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "rope.freq_base": 1e4}  # of transformers and llama.cpp
_LIMITS = {"norm_eps": (0.0, 1e30), "rope_base": (1e-30, 1e30), "head_dim": (1, 65_536)}  # the others: 1 to 2**31 - 1
_USUAL = {"intermediate": lambda s: 4 * s["hidden"], "n_kv_heads": lambda s: s["n_heads"], "head_dim": lambda s: s["hidden"] // s["n_heads"]}
_ONLY = {  # settings the decoder computes in one way; the first value is the default of a file that says nothing
    "hidden_act": ("silu",), "attention_bias": (False, True), "mlp_bias": (False,), "partial_rotary_factor": (1.0,),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,), "quantization_config": (None,),
    "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,), "use_sliding_window": (False,),
    "layer_types": ("full_attention", None), "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,), "logit_scale": (1, 0),
    "expert_count": (0,), "rope.scaling.type": ("none",), "attention.sliding_window": (0,), "attention.causal": (True,),
    "rope.scale_linear": (1,), "rope.scaling.factor": (1,), "attention.scale": (0,), "embedding_scale": (1, 0), "residual_scale": (1, 0),
}  # fmt: skip
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _config(found: dict[str, Any], column: int, family: Any, path: Path, *, tied: bool, bias: bool, out_bias: bool) -> ModelConfig:
    """The ModelConfig of the settings `found`, named as in this column of _KEYS. Raises: LoadError."""
    if family not in FAMILIES:
        raise LoadError(f"{path}: architecture {family!r:.60} is not supported; supported: {', '.join(FAMILIES)}")
    for key, values in _ONLY.items():
        given = found.get(key, values[0])
        if odd := [value for value in (given if isinstance(given, list) else [given]) if value not in values]:
            raise LoadError(f"{path}: {key}={odd[0]!r:.60} is not supported; only {values[0]!r} is: load another model")
    gpt2, sizes = family == "gpt2", {}
    for ours, names in _KEYS.items():
        name, (least, most) = names.split()[column], _LIMITS.get(ours, (1, 2**31 - 1))
        value = found.get(name, _DEFAULTS.get(name))
        if value is None and (usual := _USUAL.get(ours)):
            value = usual(sizes)
        even = ours == "head_dim" and not gpt2  # values rotate in pairs; a list, below: layers that differ
        if type(value) not in (int, type(least)) or not least <= value <= most or (even and value % 2):
            given = "absent" if value is None else repr(value)[:60]
            raise LoadError(f"{path}: {name} is {given} and must be one {'even ' * even}number from {least:,} to {most:,}; correct it")
        sizes[ours] = type(least)(value)
    kind = "MHA" if sizes["n_kv_heads"] == sizes["n_heads"] else "MQA" if sizes["n_kv_heads"] == 1 else "GQA"
    try:
        return ModelConfig(name=re.sub(r"\.B?[QF]\d\w*$", "", path.stem) if column == 2 else path.name, family=family, attention=kind,
                           tied_embeddings=tied, gated_mlp=not gpt2, qkv_bias=gpt2 or family == "qwen2" or bias, attention_out_bias=gpt2 or out_bias,
                           qk_norm=family == "qwen3", **sizes)  # fmt: skip
    except ValueError as error:
        raise LoadError(f"{path}: {error}") from None


def config_from_hf(found: dict[str, Any], path: Path) -> ModelConfig:
    """The ModelConfig of a config.json whose model_type is in FAMILIES, as transformers 4 or 5 writes it.

    Raises: LoadError for another architecture, for anything in it the decoder does not compute, for a missing key.
    """
    family = found.get("model_type")
    rule = found.get("rope_parameters") or found.get("rope_scaling") or {}
    rule = rule if isinstance(rule, dict) else {"type": rule}
    beside = {key: rule[key] for key in ("rope_theta", "partial_rotary_factor") if key in rule}  # transformers 4: beside the rule
    found = ({"head_dim": 128} if family == "qwen3" else {}) | found | beside
    bias = bool(found.get("attention_bias")) and family != "qwen2"  # which has biases on q, k and v whatever its config says
    config = _config(found, int(family == "gpt2"), family, path, tied=found.get("tie_word_embeddings", family == "gpt2"), bias=bias, out_bias=bias)
    rope = rule.get("rope_type", rule.get("type", "default"))
    odd = rule.keys() - {"rope_type", "type", *beside, *(_LLAMA3 if rope == "llama3" else ())}
    if rope not in ("default", "llama3") or odd:
        raise LoadError(f"{path}: rope type {rope!r:.60} with {sorted(odd)} is not supported; supported: default, llama3, one rule for all layers")
    try:
        scaling = None if rope == "default" else RopeScaling(**{key.replace("position_embeddings", "context"): rule[key] for key in _LLAMA3})
    except (KeyError, ValueError) as error:
        raise LoadError(f"{path}: its llama3 rope scaling lacks or misstates {error}; correct its config.json") from None
    return replace(config, rope_scaling=scaling)


def _with_rope_factors(config: ModelConfig, factors: Stored, path: Path) -> ModelConfig:
    """GGUF keeps Llama 3's scaling as one divisor per rotary pair; this is the published rule, if it gives them. Raises: LoadError."""
    with suppress(ValueError, RuntimeError):  # a divisor below 1 or not finite, another number of them, a type that is not read
        divisors = factors.read()
        rule = RopeScaling(factor=round(float(divisors.max()), 4), low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=8192)
        scaled = replace(config, rope_scaling=rule)
        if torch.allclose(rotary_frequencies(config) / rotary_frequencies(scaled), divisors, rtol=1e-3):
            return scaled
    raise LoadError(f"{path}: its rope_freqs.weight is not Llama 3's rule (low 1, high 4, context 8,192); load the Hugging Face folder")


# Files: JSON, safetensors, GGUF.


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object. Raises: LoadError."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")).items())
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise LoadError(f"{path}: not readable as a JSON object: {error}; download it again") from None


def _read_folder(path: Path) -> tuple[ModelConfig, list[Stored]]:
    """config.json and the weight files."""
    if not (path / "config.json").is_file():
        raise LoadError(f"{path}: no config.json; a Hugging Face folder has config.json and model.safetensors")
    config = config_from_hf(read_json(path / "config.json"), path)
    return config, [tensor for file, placed in _weight_files(path).items() for tensor in _read_safetensors(file, placed)]


def _weight_files(path: Path) -> dict[Path, set[str] | None]:
    """The weight files of a folder, each with the tensors its index places there; None where no index is needed. Raises: LoadError."""
    whole, index = path / "model.safetensors", path / "model.safetensors.index.json"
    if whole.is_file():
        return {whole: None}
    if not index.is_file():
        raise LoadError(f"{path}: no model.safetensors and no index of shards; pickled weights are not read, since a pickle can run code")
    placed, shards = read_json(index).get("weight_map"), {}
    if not placed or not isinstance(placed, dict):
        raise LoadError(f"{index}: its weight_map is {placed!r:.60} and must name the file of each tensor; download it again")
    for name, file in placed.items():
        if not re.fullmatch(r"[\w.-]{1,99}\.safetensors", str(file), re.ASCII):
            raise LoadError(f"{index}: it places {name!r:.80} in {file!r:.60}, which is not a .safetensors file in its folder; download it again")
        shards.setdefault(path / file, set()).add(name)
    if absent := [shard.name for shard in shards if not shard.is_file()]:
        raise LoadError(f"{path}: {len(absent)} of {len(shards)} shards are not there: {', '.join(absent[:4])}; download them")
    return shards


def _refuse_text(path: Path) -> None:
    """Say what is there instead of weights: a Git LFS pointer, nothing, or a stub."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(64).startswith(b"version https://git-lfs"):
            raise LoadError(f"{path}: a Git LFS pointer ({size} bytes of text), not the weights; run `git lfs pull` or download the file")
    if size < 24:
        raise LoadError(f"{path}: {size} bytes is {'an empty file' if size == 0 else 'too short to hold weights'}; download it again")


def _read_safetensors(path: Path, placed: set[str] | None) -> list[Stored]:
    """The tensors of a file, of a shard exactly those `placed` there; the package believes no length before it fits the file."""
    from safetensors import SafetensorError, safe_open

    _refuse_text(path)
    try:
        file = safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise LoadError(f"{path}: its {path.stat().st_size:,} bytes are not what a safetensors header says ({str(error)!r:.150}); "
                        "it is something else, or the download was cut: fetch it again") from None  # fmt: skip
    parts = {name: file.get_slice(name) for name in file.keys()}
    for name in sorted(parts.keys() ^ placed) if placed is not None else []:
        raise LoadError(f"{path}: {name!r:.80} is in {'this shard' if name in parts else 'the index'} only; download shard and index again")
    return [Stored(name, part.get_dtype(), tuple(part.get_shape()), partial(file.get_tensor, name)) for name, part in parts.items()]


def open_gguf(path: Path) -> tuple[dict[str, Any], list[Any]]:
    """The metadata of a GGUF file by key, arrays as lists, and its tensors as the package gives them. Raises: LoadError."""
    _refuse_text(path)
    stat = path.stat()
    return _gguf_reader(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1)
def _gguf_reader(path: Path, size: int, modified: int) -> tuple[dict[str, Any], list[Any]]:
    """Both kept for the tokenizer: reading a vocabulary of 49,152 entries takes over a second."""
    import gguf

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > self.data.nbytes:  # the package itself reads on without a word
                raise EOFError(f"it ends before its own table of contents says, at {size:,} bytes: the download was cut")
            return super()._get(offset, dtype, count, override_order)

    try:
        reader = Reader(path)
        return {key: field.contents() for key, field in reader.fields.items()}, reader.tensors
    except Exception as error:
        raise LoadError(f"{path}: not a readable GGUF file ({' '.join(str(error).split())[:120]}); download it again") from None


def dequantise(data: Any, kind: Any) -> Tensor:
    """The values of a GGUF tensor as float32: rows of blocks, each with its own scale.

    Source: ggml-org/llama.cpp ggml-quants.c; Q4_0 18 bytes, Q4_1 20, Q8_0 34 bytes per 32 values.
    """
    import gguf

    values = gguf.quants.dequantize(data, kind)
    return torch.from_numpy(values if values.flags.writeable else values.copy())  # F32 tensors are views of the read-only file


def _read_gguf(path: Path) -> tuple[ModelConfig, list[Stored]]:
    """Shape from the metadata: the output matrix is tied where the file has none, biases are there where the first layer has them."""
    fields, found = open_gguf(path)
    tensors = {t.name: Stored(t.name, t.tensor_type.name, tuple(int(n) for n in reversed(t.shape)), partial(dequantise, t.data, t.tensor_type))
               for t in found}  # fmt: skip # dimensions are listed innermost first
    family = fields.get("general.architecture")
    own = {key.removeprefix(f"{family}."): value for key, value in fields.items() if key.startswith(f"{family}.")}
    own.setdefault("attention.layer_norm_rms_epsilon", own.get("attention.layer_norm_epsilon"))
    own["vocab_size"] = tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 0
    config = _config(own, 2, family, path, tied="output.weight" not in tensors, bias="blk.0.attn_q.bias" in tensors,
                     out_bias="blk.0.attn_output.bias" in tensors)  # fmt: skip
    if (turned := own.get("rope.dimension_count", config.head_dim)) != config.head_dim:
        raise LoadError(f"{path}: rotates {turned} of {config.head_dim} values per head; the decoder rotates all")
    if factors := tensors.pop("rope_freqs.weight", None):
        config = _with_rope_factors(config, factors, path)
    return config, list(tensors.values())
