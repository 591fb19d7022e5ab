"""Weights from a GGUF file, a Hugging Face folder or a seed into a Decoder: every parameter is written exactly once."""

import json
import os
import re
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor

from decodelab.arithmetic import catalog
from decodelab.arithmetic.catalog import ModelConfig, RopeScaling
from decodelab.arithmetic.units import format_capacity
from decodelab.decoder.model import Decoder, rotary_frequencies

LAB_MODEL = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1")
SAFETENSORS_TYPES = ("F32", "F16", "BF16")
DTYPES = ("float32", "bfloat16", "float16")
HUB_TIMEOUT_S = 4.0
_HUB_FILES = ["config.json", "generation_config.json", "model.safetensors", "model.safetensors.index.json",
              "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]  # fmt: skip


class LoadError(ValueError):
    """A model that cannot be loaded: one line that names the file or tensor, the cause and the way out."""


def load(source: str | Path, *, device: str | torch.device = "cpu", dtype: str | torch.dtype | None = None) -> Decoder:
    """The model in `source`: a .gguf file, a Hugging Face folder, a hub name "org/model", or "smollm2-135m", the lab's own.

    Without `dtype` it is `default_dtype(device)`. Everything is checked before memory is taken; nothing is left half-loaded.

    Raises: LoadError, one line.
    """
    place, kind = check_device(device), check_dtype(dtype, device)
    path = find(source)
    config, tensors = _read_folder(path) if path.is_dir() else _read_gguf(path)
    chosen = _assign(config, tensors, path)
    model = _empty(config, place, kind)
    for name, parameter in model.named_parameters():  # the names are the keys of `chosen`: once each
        parameter.copy_(chosen[name].read())
    return model


def random(config: ModelConfig, *, seed: int = 0, device: str | torch.device = "cpu", dtype: str | torch.dtype | None = None) -> Decoder:
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
    return model


def require_runnable(config: ModelConfig) -> None:
    """Raises LoadError where the decoder cannot run this shape, naming what is missing."""
    if missing := not_runnable(config):
        raise LoadError(f"{config.name} needs {', '.join(missing)}, which this decoder does not have; its costs can still be estimated")


def not_runnable(config: ModelConfig) -> list[str]:
    """What this shape needs and the decoder lacks; empty when it runs."""
    gpt2 = config.is_gpt2
    lacks = {
        "a mixture of experts": config.moe_experts_total > 0,
        "latent attention (MLA)": config.attention == "MLA",
        "q/k norms": config.qk_norm,
        "attention biases": (config.qkv_bias or config.attention_out_bias) and not gpt2,
        f"{config.norms_per_layer} norms per layer": config.norms_per_layer != 2,
        "an ungated MLP without GPT-2's layout": not config.gated_mlp and not gpt2,
        f"a sliding window of {config.window}": config.windowed_layers > 0 and config.window < config.max_context,
    }
    return [what for what, needed in lacks.items() if needed]


# Device, dtype, memory: settled before anything is allocated.


def check_device(device: str | torch.device) -> torch.device:
    """The device as torch names it. Raises: LoadError for "mps", for a CUDA card that is not there, for anything else."""
    if str(device).startswith("mps"):
        raise LoadError('device="mps" is not supported: it lacks operations the decoder needs. Use device="cpu" on Apple silicon')
    if not re.fullmatch(r"cpu|cuda(:\d+)?", str(device)):
        raise LoadError(f'device="{device}" is unknown; use "cpu", "cuda" or "cuda:N"')
    place = torch.device(device)
    if place.type == "cuda" and (place.index or 0) >= (cards := torch.cuda.device_count() if torch.cuda.is_available() else 0):
        raise LoadError(f'device="{place}" needs an NVIDIA GPU and a CUDA build of PyTorch; this machine shows {cards}. Use device="cpu"')
    return place


def check_dtype(dtype: str | torch.dtype | None, device: str | torch.device) -> torch.dtype:
    """float32, bfloat16 or float16, by name or as torch's own; None is the device's default. Raises: LoadError for any other."""
    name = str(default_dtype(device)[0] if dtype is None else dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise LoadError(f"dtype={name} is not a dtype the decoder computes in; use {', '.join(DTYPES)}")
    return getattr(torch, name)


def default_dtype(device: str | torch.device, *, capability: tuple[int, int] | None = None) -> tuple[torch.dtype, str]:
    """The dtype to load in and, in one line, why. `capability` is read from the card unless given."""
    if torch.device(device).type == "cpu":
        return torch.float32, "float32: every CPU computes in it at full speed"
    major, minor = capability or torch.cuda.get_device_capability(device)
    if major < 8:
        return torch.float16, f"float16: a card of compute capability {major}.{minor} has no bfloat16"
    return torch.bfloat16, f"bfloat16: half the bytes of float32, and compute capability {major}.{minor} has it"


def free_memory_bytes(device: str | torch.device = "cpu") -> int:
    """Bytes that can still be allocated: of the card, or of RAM within the container's limit."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    room = [psutil.virtual_memory().available]
    with suppress(OSError, ValueError):  # cgroup 2; its limit may be the word "max"
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{part}").read_text()) for part in ("max", "current"))
        room.append(max(0, limit - used))
    return min(room)


def _empty(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Decoder:
    """An unwritten model, refused before it is allocated where it does not fit: all parameters and one of them in float32.

    Raises: LoadError, with both numbers.
    """
    sizes = [parameter.numel() for parameter in Decoder(config, device="meta").parameters()]
    needed, free = sum(sizes) * dtype.itemsize + max(sizes) * 4, free_memory_bytes(device)
    if needed > free:
        raise LoadError(f"{config.name} in {str(dtype)[6:]} needs {format_capacity(needed)} and {format_capacity(free)} is free on {device}; "
                        "take a smaller model or a 16-bit dtype, or free memory first")  # fmt: skip
    return Decoder(config, device=device, dtype=dtype)


# Where the files are.


def find(source: str | Path) -> Path:
    """The .gguf file or the folder that `source` means; a hub name is downloaded.

    Raises: LoadError for pickled weights, an unknown name, a file that is not there.
    """
    try:
        path = Path(source if str(source).strip() else None).expanduser()
        folder, file = path.is_dir(), path.is_file()
    except (TypeError, RuntimeError, OSError) as error:  # empty or no text, "~nobody/m", a name too long
        raise LoadError(f"{str(source)[:80]!r} is empty, too long or not a path ({type(error).__name__}); give a file, folder or name") from None
    if path.suffix in (".bin", ".pt", ".pth", ".ckpt", ".pkl"):
        raise LoadError(f"{path}: a pickle can run code when it is read, so it is refused; use the model's .safetensors or .gguf file")
    if folder or (file and path.suffix == ".gguf"):
        return path
    if file and path.name == "model.safetensors":
        return path.parent  # its config.json is beside it
    if file or path.suffix in (".gguf", ".safetensors"):
        raise LoadError(f"{path}: {'not a .gguf file and not a folder with config.json and model.safetensors' if file else 'no such file'}")
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", str(source)):
        return _from_hub(str(source))
    name = catalog.model(str(source)).name
    if name != "SmolLM2-135M":
        raise LoadError(f"{name} has a shape in the catalogue and no weights here: use weights.random(catalog.model({str(source)!r})), "
                        'or load("org/name") from the hub')  # fmt: skip
    path = Path(os.environ.get("DECODELAB_MODEL") or catalog.data_dir() / "models" / LAB_MODEL)
    if not path.is_file():
        raise LoadError(f"{path}: the lab's model is not there. `python course.py lab` fetches it; without internet, put {LAB_MODEL} there "
                        "or set DECODELAB_MODEL to where it is")  # fmt: skip
    return path


def _from_hub(name: str) -> Path:
    """The folder of a hub model, from the local cache or downloaded; without internet one line within about HUB_TIMEOUT_S."""
    from huggingface_hub import HfApi, snapshot_download  # tokenizers brings it

    fetch = partial(snapshot_download, name, allow_patterns=_HUB_FILES, etag_timeout=HUB_TIMEOUT_S)
    with suppress(Exception):  # whatever is wrong with the cache, the hub is asked next
        if (cached := Path(fetch(local_files_only=True)) / "model.safetensors").exists():
            return cached.parent
    answered = threading.Event()

    def ask() -> None:  # in a thread: name resolution can outlast every timeout of the client
        with suppress(Exception):
            HfApi().model_info(name, timeout=HUB_TIMEOUT_S)
            answered.set()

    threading.Thread(target=ask, daemon=True).start()
    if answered.wait(HUB_TIMEOUT_S):
        with suppress(Exception):
            return Path(fetch())
    raise LoadError(f"{name}: its model.safetensors is not on this machine and the hub gave nothing: no internet, no such model, or one that "
                    "needs a login. Put config.json, model.safetensors and tokenizer.json of it in a folder and load that folder")  # fmt: skip


# From the names and layouts of a file to ours.


@dataclass(frozen=True)
class Stored:
    """One tensor of a file: its name and shape there, and how to read it in PyTorch's (out, in) layout."""

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]

    def transposed(self) -> "Stored":
        return Stored(self.name, self.shape[::-1], lambda: self.read().t())

    def third(self, part: int) -> "Stored":
        """Rows of q (0), k (1) or v (2) of a fused matrix or bias; one that has no thirds stays whole and fails on shape."""
        if not self.shape or self.shape[0] % 3:
            return self
        return Stored(self.name, (self.shape[0] // 3, *self.shape[1:]), lambda: self.read().chunk(3)[part])

    def unpermuted(self, heads: int) -> "Stored":
        """GGUF stores the rotary pairs of q and k side by side (0, 1), (2, 3); we keep them half a head apart, as rotate does."""
        return Stored(self.name, self.shape, lambda: self.read().unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2))


_TOP = {"embed_tokens": "embed", "norm": "norm", "lm_head": "head",  # Llama, Hugging Face
        "wte": "embed", "wpe": "positions", "ln_f": "norm",  # GPT-2, Hugging Face
        "token_embd": "embed", "position_embd": "positions", "output_norm": "norm", "output": "head"}  # fmt: skip # GGUF
_BLOCK = {"input_layernorm": "attention_norm", "self_attn.q_proj": "attention.q", "self_attn.k_proj": "attention.k",
          "self_attn.v_proj": "attention.v", "self_attn.o_proj": "attention.out", "post_attention_layernorm": "mlp_norm",
          "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down",
          "ln_1": "attention_norm", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.out",
          "ln_2": "mlp_norm", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down",
          "attn_norm": "attention_norm", "attn_q": "attention.q", "attn_k": "attention.k", "attn_v": "attention.v",
          "attn_qkv": "attention.qkv", "attn_output": "attention.out", "ffn_norm": "mlp_norm", "ffn_gate": "mlp.gate",
          "ffn_up": "mlp.up", "ffn_down": "mlp.down"}  # fmt: skip
_BUFFERS = re.compile(r"(^|\.)(attn\.bias|attn\.masked_bias|rotary_emb\.inv_freq)$")  # masks and angles, not weights
_NAME = re.compile(r"(?:transformer\.|model\.)?(?:(?:h|layers|blk)\.(\d+)\.)?([\w.]+)\.(weight|bias)")


def _places(tensor: Stored, config: ModelConfig) -> list[tuple[str, Stored]]:
    """Our parameters that this tensor fills, each with its part of it; empty for a name of no known layout."""
    match = _NAME.fullmatch(tensor.name)
    ours = match and (_TOP if match[1] is None else _BLOCK).get(match[2])
    if not ours:
        return []
    name = f"{'' if match[1] is None else f'blocks.{int(match[1])}.'}{ours}.{match[3]}"
    if match[2].split(".")[-1].startswith("c_") and len(tensor.shape) == 2:  # GPT-2's Conv1D stores (in, out)
        tensor = tensor.transposed()
    if match[2] in ("attn_q", "attn_k") and not config.is_gpt2:
        tensor = tensor.unpermuted(config.n_heads if match[2] == "attn_q" else config.n_kv_heads)
    if ours == "attention.qkv":
        return [(name.replace("qkv", part), tensor.third(i)) for i, part in enumerate("qkv")]
    return [(name, tensor)]


def _assign(config: ModelConfig, tensors: list[Stored], path: Path) -> dict[str, Stored]:
    """Our parameter name -> the one tensor of the file that fills it.

    Raises: LoadError naming what is missing, unexpected, there twice or of another shape.
    """
    widest = max(config.vocab_size, config.max_context, config.intermediate, config.query_width)
    if config.n_layers > len(tensors) or config.hidden * widest > 1 << 48:  # torch cannot count the bytes of such a matrix
        raise LoadError(f"{path}: its config has {config.n_layers:,} layers of up to {config.hidden:,} x {widest:,} values "
                        f"and the file {len(tensors)} tensors; they do not belong together")  # fmt: skip
    shapes = {name: tuple(value.shape) for name, value in Decoder(config, device="meta").named_parameters()}
    chosen: dict[str, Stored] = {}
    unexpected: list[str] = []
    for tensor in (tensor for tensor in tensors if not _BUFFERS.search(tensor.name)):
        places = _places(tensor, config)
        if not places:
            unexpected.append(tensor.name)
        for name, part in places:
            if name in chosen:
                raise LoadError(f"{path}: {name} is there twice, as {chosen[name].name} and {part.name}; keep one")
            chosen[name] = part
    if config.tied_embeddings and (head := chosen.pop("head.weight", None)):
        if chosen.setdefault("embed.weight", head) is not head and not torch.equal(chosen["embed.weight"].read(), head.read()):
            raise LoadError(f"{path}: the config ties the output matrix to the embedding, but {head.name} differs from "
                            f"{chosen['embed.weight'].name}; set tie_word_embeddings to false if both are meant")  # fmt: skip
    unexpected += [chosen[name].name for name in chosen if name not in shapes]
    missing = [name for name in shapes if name not in chosen]
    for what, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            raise LoadError(f"{path}: {len(names)} {what} tensor(s): {', '.join(names[:4])}{', ...' if names[4:] else ''}; "
                            "the file is incomplete or not of the architecture its config names")  # fmt: skip
    for name, shape in shapes.items():
        if chosen[name].shape != shape:
            raise LoadError(f"{path}: {chosen[name].name} gives {name} the shape {chosen[name].shape} and the model has {shape}; "
                            "config and weights do not belong together")  # fmt: skip
    return chosen


# From a config to ours.

_KEYS = {  # ModelConfig: config.json of Llama, config.json of GPT-2, GGUF
    "n_layers": ("num_hidden_layers", "n_layer", "block_count"),
    "hidden": ("hidden_size", "n_embd", "embedding_length"),
    "n_heads": ("num_attention_heads", "n_head", "attention.head_count"),
    "vocab_size": ("vocab_size", "vocab_size", "vocab_size"),
    "max_context": ("max_position_embeddings", "n_positions", "context_length"),
    "norm_eps": ("rms_norm_eps", "layer_norm_epsilon", "attention.layer_norm_rms_epsilon"),
    "intermediate": ("intermediate_size", "n_inner", "feed_forward_length"),
    "n_kv_heads": ("num_key_value_heads", "n_head", "attention.head_count_kv"),
    "head_dim": ("head_dim", "head_dim", "attention.key_length"),
    "rope_base": ("rope_theta", "rope_theta", "rope.freq_base"),
}
_DEFAULTS = {"layer_norm_epsilon": 1e-5, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "rope.freq_base": 1e4}  # of transformers and llama.cpp
_LIMITS = {"norm_eps": (0.0, 1e30), "rope_base": (1e-30, 1e30), "head_dim": (1, 65_536)}  # the others: 1 to 2**31 - 1
_USUAL = {"intermediate": lambda sizes: 4 * sizes["hidden"], "n_kv_heads": lambda sizes: sizes["n_heads"],
          "head_dim": lambda sizes: sizes["hidden"] // sizes["n_heads"]}  # fmt: skip
_ONLY = {  # settings the decoder computes in one way; the first value is the default of a file that says nothing
    "hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,), "partial_rotary_factor": (1.0,),
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,), "quantization_config": (None,),
    "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,),
    "layer_types": ("full_attention", None), "attn_logit_softcapping": (None,), "final_logit_softcapping": (None,), "logit_scale": (1, 0),
    "expert_count": (0,), "rope.scaling.type": ("none",), "attention.sliding_window": (0,), "attention.causal": (True,),
    "rope.scale_linear": (1,), "rope.scaling.factor": (1,), "attention.scale": (0,), "embedding_scale": (1, 0), "residual_scale": (1, 0),
}  # fmt: skip
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def _shape(found: dict[str, Any], column: int, path: Path, *, gpt2: bool, tied: bool, **rope: Any) -> ModelConfig:
    """The ModelConfig of the settings `found`, named as in this column of _KEYS. Raises: LoadError."""
    for key, values in _ONLY.items():
        given = found.get(key, values[0])
        for value in given if isinstance(given, list) else [given]:
            if value not in values:
                raise LoadError(f"{path}: {key}={value!r:.60} is not supported; only {values[0]!r} is: load another model")
    sizes: dict[str, Any] = {}
    for ours, names in _KEYS.items():
        name, (least, most) = names[column], _LIMITS.get(ours, (1, 2**31 - 1))
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
        return ModelConfig(name=re.sub(r"\.B?[QF]\d\w*$", "", path.stem) if path.suffix == ".gguf" else path.name, family="gpt2" if gpt2 else "llama", attention=kind,
                           tied_embeddings=tied, gated_mlp=not gpt2, qkv_bias=gpt2, attention_out_bias=gpt2, **sizes, **rope)  # fmt: skip
    except ValueError as error:
        raise LoadError(f"{path}: {error}") from None


def config_from_hf(found: dict[str, Any], path: Path) -> ModelConfig:
    """The ModelConfig of a config.json of model_type gpt2 or llama, as transformers 4 or 5 writes it.

    Raises: LoadError for another architecture, for anything in it the decoder does not compute, for a missing key.
    """
    kind = found.get("model_type")
    if kind == "gpt2":
        return _shape(found, 1, path, gpt2=True, tied=found.get("tie_word_embeddings", True))
    if kind != "llama":
        raise LoadError(f"{path}: model_type {kind!r} is not supported; supported: gpt2, llama")
    rule = found.get("rope_parameters") or found.get("rope_scaling") or {}
    rule = rule if isinstance(rule, dict) else {"type": rule}
    rope = rule.get("rope_type", rule.get("type", "default"))
    beside = {key: rule[key] for key in ("rope_theta", "partial_rotary_factor") if key in rule}  # transformers 4: beside the rule
    odd = rule.keys() - {"rope_type", "type", *beside, *(_LLAMA3 if rope == "llama3" else ())}
    if rope not in ("default", "llama3") or odd:
        raise LoadError(f"{path}: rope type {rope!r:.60} with {sorted(odd)} is not supported; supported: default, llama3, one rule for all layers")
    try:
        scaling = None if rope == "default" else RopeScaling(**{key.replace("position_embeddings", "context"): rule[key] for key in _LLAMA3})
    except (KeyError, ValueError) as error:
        raise LoadError(f"{path}: its llama3 rope scaling lacks or misstates {error}; correct its config.json") from None
    return _shape(found | beside, 0, path, gpt2=False, tied=found.get("tie_word_embeddings", False), rope_scaling=scaling)


def _gguf_config(fields: dict[str, Any], shapes: dict[str, tuple[int, ...]], path: Path) -> ModelConfig:
    """The ModelConfig of a GGUF file of architecture llama or gpt2; the output matrix is tied where the file has none."""
    kind = fields.get("general.architecture")
    if kind not in ("gpt2", "llama"):
        raise LoadError(f"{path}: architecture {kind!r} is not supported; supported: gpt2, llama")
    own = {key.removeprefix(f"{kind}."): value for key, value in fields.items() if key.startswith(f"{kind}.")}
    own.setdefault("attention.layer_norm_rms_epsilon", own.get("attention.layer_norm_epsilon"))
    own["vocab_size"] = (*shapes.get("token_embd.weight", ()), 0)[0]
    config = _shape(own, 2, path, gpt2=kind == "gpt2", tied="output.weight" not in shapes)
    if kind == "llama" and own.get("rope.dimension_count", config.head_dim) != config.head_dim:
        raise LoadError(f"{path}: rotates {own['rope.dimension_count']} of {config.head_dim} values per head; the decoder rotates all")
    return config


def _with_rope_factors(config: ModelConfig, factors: Tensor, path: Path) -> ModelConfig:
    """GGUF keeps Llama 3's scaling as one divisor per rotary pair; this is the published rule, if it gives them. Raises: LoadError."""
    with suppress(ValueError, RuntimeError):  # a divisor below 1 or not finite, no divisor at all
        scaled = replace(config, rope_scaling=RopeScaling(factor=round(float(factors.max()), 4), low_freq_factor=1.0, high_freq_factor=4.0,
                                                          original_max_context=8192))  # fmt: skip
        ratios = rotary_frequencies(config) / rotary_frequencies(scaled)
        if ratios.shape == factors.shape and torch.allclose(ratios, factors, rtol=1e-3):
            return scaled
    raise LoadError(f"{path}: its rope_freqs.weight is not Llama 3's rule (low 1, high 4, context 8,192); load the Hugging Face folder")


# Files.


def read_json(path: Path) -> dict[str, Any]:
    """One JSON object. Raises: LoadError."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")).items())
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise LoadError(f"{path}: not readable as a JSON object: {error}; download it again") from None


def _read_folder(path: Path) -> tuple[ModelConfig, list[Stored]]:
    """config.json and model.safetensors."""
    if not (path / "config.json").is_file():
        raise LoadError(f"{path}: no config.json; a Hugging Face folder has config.json and model.safetensors")
    config = config_from_hf(read_json(path / "config.json"), path)
    if (path / "model.safetensors").is_file():
        return config, _read_safetensors(path / "model.safetensors")
    if (path / "model.safetensors.index.json").is_file():
        raise LoadError(f"{path}: its weights are split over several files and one is read; save them with a larger max_shard_size")
    if any(path.glob("*.bin")) or any(path.glob("*.pt")):
        raise LoadError(f"{path}: only pickled weights; a pickle can run code when it is read. Use the model's .safetensors or .gguf file")
    raise LoadError(f"{path / 'model.safetensors'}: no such file")


def _refuse_types(path: Path, found: set[str], known: tuple[str, ...]) -> None:
    if unread := sorted(found - set(known)):
        raise LoadError(f"{path}: tensors of type {', '.join(unread)} are not read; supported: {', '.join(known)}")


def _refuse_text(path: Path, size: int, least: int) -> None:
    """Say what is there instead of weights: a Git LFS pointer, nothing, or a stub."""
    with path.open("rb") as file:
        head = file.read(64)
    if head.startswith(b"version https://git-lfs"):
        raise LoadError(f"{path}: a Git LFS pointer ({size} bytes of text), not the weights; run `git lfs pull` or download the file")
    if size < least:
        raise LoadError(f"{path}: {size} bytes is {'an empty file' if size == 0 else 'too short to hold weights'}; download it again")


def _read_safetensors(path: Path) -> list[Stored]:
    """The tensors of a file whose header is checked by hand first: no length in it is believed before it fits the file."""
    size = path.stat().st_size
    _refuse_text(path, size, 10)
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > size - 8:
            raise LoadError(f"{path}: its header claims {length:,} bytes and the file has {size:,}; not safetensors, or cut: fetch it again")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
            types = {str(entry["dtype"]) for entry in header.values()}
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise LoadError(f"{path}: its header is not a safetensors header ({type(error).__name__}); download it again") from None
    if end != size:
        raise LoadError(f"{path}: its header describes {end:,} bytes and the file has {size:,}; the download was cut: fetch it again")
    _refuse_types(path, types, SAFETENSORS_TYPES)
    from safetensors import SafetensorError, safe_open

    try:
        file = safe_open(str(path), framework="pt")
    except SafetensorError as error:
        raise LoadError(f"{path}: {error}; download it again") from None
    return [Stored(name, tuple(entry["shape"]), partial(file.get_tensor, name)) for name, entry in header.items()]


# GGUF.


def gguf_fields(path: Path) -> dict[str, Any]:
    """The metadata of a GGUF file by key, arrays as lists. Raises: LoadError."""
    return _open_gguf(path)[0]


def _open_gguf(path: Path) -> tuple[dict[str, Any], list[Any]]:
    stat = path.stat()
    _refuse_text(path, stat.st_size, 24)
    return _gguf_reader(path, stat.st_size, stat.st_mtime_ns)


@lru_cache(maxsize=1)
def _gguf_reader(path: Path, size: int, modified: int) -> tuple[dict[str, Any], list[Any]]:
    """What the package reads, metadata and tensors, kept for the tokenizer: reading a vocabulary of 49,152 entries takes over a second."""
    import gguf

    class Reader(gguf.GGUFReader):
        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if int(offset) + int(count) * np.dtype(dtype).itemsize > self.data.nbytes:  # the package itself reads on without a word
                raise EOFError
            return super()._get(offset, dtype, count, override_order)

    try:
        reader = Reader(path)
        return {key: field.contents() for key, field in reader.fields.items()}, reader.tensors
    except EOFError:
        raise LoadError(f"{path}: it ends before its own table of contents says ({size:,} bytes); the download was cut: fetch it again") from None
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
    """Shape from the metadata, tensors as they are stored; GGUF lists dimensions innermost first."""
    tensors = {tensor.name: tensor for tensor in _open_gguf(path)[1]}
    _refuse_types(path, {tensor.tensor_type.name for tensor in tensors.values()}, GGUF_TYPES)
    shapes = {name: tuple(int(n) for n in reversed(tensor.shape)) for name, tensor in tensors.items()}
    config = _gguf_config(gguf_fields(path), shapes, path)
    if factors := tensors.pop("rope_freqs.weight", None):
        config = _with_rope_factors(config, dequantise(factors.data, factors.tensor_type), path)
    return config, [Stored(name, shapes[name], partial(dequantise, t.data, t.tensor_type)) for name, t in tensors.items()]
