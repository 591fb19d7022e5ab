"""Small random decoders for tests: a GPT-2, a grouped-query Llama, and what compares them."""

import torch

from decodelab.arithmetic.catalog import ModelConfig
from decodelab.decoder import weights
from decodelab.decoder.model import Decoder

GPT2 = ModelConfig(name="tiny-gpt2", family="GPT-2", n_layers=2, hidden=32, intermediate=64, n_heads=4, n_kv_heads=4, head_dim=8, vocab_size=64,
                   max_context=64, tied_embeddings=True, gated_mlp=False, attention="MHA")  # fmt: skip
LLAMA = ModelConfig(name="tiny-llama", n_layers=2, hidden=32, intermediate=48, n_heads=6, n_kv_heads=2, head_dim=8, vocab_size=64, max_context=64)


def decoder(config: ModelConfig, *, seed: int = 0) -> Decoder:
    """Random weights wide enough that different tokens give clearly different logits."""
    model = weights.random(config, seed=seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(8)
    return model


def ids(length: int, *, seed: int = 1, vocab: int = 64) -> list[int]:
    return torch.randint(vocab, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
