"""The same tiny model twice, eager and fast, for the tests of the fast path. Few shapes: each is compiled once per process."""

from dataclasses import replace
from functools import lru_cache

import torch

import tiny
from decodelab.arithmetic.catalog import ModelConfig
from decodelab.decoder import kernels, weights
from decodelab.decoder.model import Decoder

LONG = 5000  # positions: enough for a context of 4,096
LLAMA = replace(tiny.LLAMA, tied_embeddings=True, max_context=LONG)  # grouped-query
GPT2 = replace(tiny.GPT2, max_context=LONG)  # a KV head per query head, biases, learned positions
QWEN = replace(tiny.LLAMA, name="tiny-qwen3", family="qwen3", n_heads=4, head_dim=16, qk_norm=True, qkv_bias=True, tied_embeddings=False,
               norm_eps=1e-6, max_context=LONG)  # fmt: skip
TOLERANCE = {"float32": 1e-5, "bfloat16": 5e-2, "int8": 1e-5}
"""Largest difference of a logit, fast against eager of the same format, over the largest eager logit; int8 computes in float32.

Measured on these shapes, 33 lengths of 3 prompts and 4,100 tokens: 3e-6, 3e-2 and 3e-6.
"""
INT8_ERROR = 0.1
"""The same, int8 against float32 of the same weights: what rounding each matrix to 255 values costs. Measured: 0.05."""


def build(config: ModelConfig, dtype: str, *, path: str, device: str = "cpu", seed: int = 0) -> Decoder:
    """A decoder whose weights are wide enough that tokens differ clearly, the same for a seed whatever the path."""
    model = weights.random(config, dtype=weights.check_dtype(dtype, device), device=device, path="eager", seed=seed)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.mul_(8)
    if dtype == "int8":
        kernels.quantise(model)
    if path == "fast":
        kernels.attach(model, say=lambda _: None)
    return model


@lru_cache
def pair(config: ModelConfig, dtype: str = "float32", device: str = "cpu") -> tuple[Decoder, Decoder]:
    """(fast, eager) with the same weights. Shared by all tests: leave them as they are."""
    return build(config, dtype, path="fast", device=device), build(config, dtype, path="eager", device=device)


def apart(fast: torch.Tensor, eager: torch.Tensor) -> float:
    """Largest difference over the largest eager logit; NaN in either is infinitely far."""
    difference = (fast - eager).abs().max() / eager.abs().max()
    return float(difference) if bool(difference.isfinite()) else float("inf")
