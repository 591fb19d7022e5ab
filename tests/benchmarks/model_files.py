"""One model's values written in the two forms that the peers read: a Hugging Face folder and a GGUF file."""

import json
from collections.abc import Iterator
from pathlib import Path

import gguf
import torch
from safetensors.torch import save_file
from torch import Tensor

from decodelab.decoder.model import Decoder

LLAMA = {"embed": "model.embed_tokens", "norm": "model.norm", "attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
         "attention.q": "self_attn.q_proj", "attention.k": "self_attn.k_proj", "attention.v": "self_attn.v_proj", "attention.out": "self_attn.o_proj",
         "mlp.gate": "mlp.gate_proj", "mlp.up": "mlp.up_proj", "mlp.down": "mlp.down_proj", "blocks": "model.layers"}  # fmt: skip
GPT2 = {"embed": "wte", "positions": "wpe", "norm": "ln_f", "attention_norm": "ln_1", "mlp_norm": "ln_2", "attention.qkv": "attn.c_attn",
        "attention.out": "attn.c_proj", "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj", "blocks": "h"}  # fmt: skip
GGUF = {"embed": "token_embd", "positions": "position_embd", "norm": "output_norm", "attention_norm": "attn_norm", "mlp_norm": "ffn_norm",
        "attention.q": "attn_q", "attention.k": "attn_k", "attention.v": "attn_v", "attention.qkv": "attn_qkv", "attention.out": "attn_output",
        "mlp.gate": "ffn_gate", "mlp.up": "ffn_up", "mlp.down": "ffn_down", "blocks": "blk"}  # fmt: skip
GGUF_TYPES = {"f32": "F32", "bf16": "BF16", "int8": "Q8_0"}


def tensors(model: Decoder, names: dict[str, str]) -> Iterator[tuple[str, str, Tensor]]:
    """(our name without its layer, the name in the file, values) of every tensor, GPT-2's q, k and v joined as its files have them."""
    own = dict(model.named_parameters())
    for name, value in own.items():
        if model.config.is_gpt2 and ".attention.q." in name:
            value = torch.cat([own[name.replace(".q.", f".{part}.")] for part in "qkv"])
            name = name.replace(".q.", ".qkv.")
        elif model.config.is_gpt2 and (".attention.k." in name or ".attention.v." in name):
            continue
        layer, (part, kind) = "", name.rsplit(".", 1)
        if part.startswith("blocks."):
            _, number, part = part.split(".", 2)
            layer = f"{names['blocks']}.{number}."
        if part in names:
            yield part, f"{layer}{names[part]}.{kind}", value


def write_folder(model: Decoder, folder: Path) -> Path:
    """config.json and model.safetensors, float32, as transformers and vLLM read them."""
    c = model.config
    folder.mkdir(parents=True, exist_ok=True)
    if c.is_gpt2:
        config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_layer": c.n_layers, "n_embd": c.hidden, "n_head": c.n_heads,
                  "n_inner": c.intermediate, "n_positions": c.max_context, "layer_norm_epsilon": c.norm_eps, "activation_function": "gelu_new"}  # fmt: skip
    else:
        config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": c.n_layers, "hidden_size": c.hidden,
                  "intermediate_size": c.intermediate, "num_attention_heads": c.n_heads, "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim,
                  "max_position_embeddings": c.max_context, "rms_norm_eps": c.norm_eps, "rope_theta": c.rope_base, "hidden_act": "silu"}  # fmt: skip
    config |= {"vocab_size": c.vocab_size, "tie_word_embeddings": True, "torch_dtype": "float32", "bos_token_id": 0, "eos_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    turned = ("attention.qkv", "attention.out", "mlp.up", "mlp.down") if c.is_gpt2 else ()  # GPT-2's files keep matrices as (in, out)
    values = {name: (value.t() if part in turned and value.ndim == 2 else value).contiguous()
              for part, name, value in tensors(model, GPT2 if c.is_gpt2 else LLAMA)}  # fmt: skip
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_gguf(model: Decoder, file: Path, *, format: str) -> Path:
    """A GGUF file without a vocabulary; matrices in `format`, vectors and GPT-2's positions in float32, as llama.cpp's own converter has them."""
    c, kind = model.config, gguf.GGMLQuantizationType[GGUF_TYPES[format]]
    writer = gguf.GGUFWriter(file, "gpt2" if c.is_gpt2 else "llama")
    writer.add_context_length(c.max_context)
    writer.add_embedding_length(c.hidden)
    writer.add_block_count(c.n_layers)
    writer.add_feed_forward_length(c.intermediate)
    writer.add_head_count(c.n_heads)
    writer.add_key_length(c.head_dim)
    writer.add_value_length(c.head_dim)
    writer.add_vocab_size(c.vocab_size)
    writer.add_tokenizer_model("no_vocab")
    if c.is_gpt2:
        writer.add_layer_norm_eps(c.norm_eps)
    else:
        writer.add_head_count_kv(c.n_kv_heads)
        writer.add_layer_norm_rms_eps(c.norm_eps)
        writer.add_rope_dimension_count(c.head_dim)
        writer.add_rope_freq_base(c.rope_base)
    for part, name, value in tensors(model, GGUF):
        if part in ("attention.q", "attention.k") and not c.is_gpt2:  # rotary pairs side by side
            value = value.unflatten(0, (-1, 2, c.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        stored = kind if value.ndim == 2 and part != "positions" else gguf.GGMLQuantizationType.F32
        writer.add_tensor(name, gguf.quants.quantize(value.contiguous().numpy(), stored), raw_dtype=stored)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    return file
