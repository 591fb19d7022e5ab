"""GPT-2, Llama and Qwen decoders, top to bottom in reading order.

Dims: B batch, T new tokens, S tokens in the cache including the new ones, V vocabulary, D model width, F FFN width,
N query heads, K KV heads, H head size, L layers. Matrices are stored (out, in), as PyTorch's Linear does.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decodelab.arithmetic.catalog import ModelConfig
from decodelab.arithmetic.cost import kv_bytes_per_token
from decodelab.arithmetic.units import format_capacity
from decodelab.decoder.cache import CHUNK, PAD_POSITION, ContextError, KVCache, PagedRows, PagePool
from decodelab.decoder.memory import free_memory_bytes, gather


class Pass(NamedTuple):
    """What every layer of one forward pass shares: the rotary angles and which keys each query may see."""

    cos: Tensor | None  # (T, H) or (B, 1, T, H); None in GPT-2
    sin: Tensor | None
    visible: Tensor | None  # (T, S) or (B, 1, T, S) bool; None: no mask is needed, or `causal` says it
    causal: bool


class Decoder(nn.Module):
    """Token ids -> logits. Parameters start uninitialised: `weights.load` or `weights.random` writes each exactly once."""

    def __init__(self, config: ModelConfig, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32):
        super().__init__()
        self.config = config
        with torch.device("meta"):  # no time or memory spent on values that will be overwritten
            self.embed = nn.Embedding(config.vocab_size, config.hidden, dtype=dtype)
            self.positions = nn.Embedding(config.max_context, config.hidden, dtype=dtype) if config.is_gpt2 else None
            self.blocks = nn.ModuleList(Block(config, dtype=dtype) for _ in range(config.n_layers))
            self.norm = make_norm(config, dtype=dtype)
            self.head = nn.Linear(config.hidden, config.vocab_size, bias=False, dtype=dtype)
        if config.tied_embeddings:
            self.head.weight = self.embed.weight
        gather(self, device=device)
        self.register_buffer("inverse_wavelengths", None if config.is_gpt2 else rotary_frequencies(config).to(device), persistent=False)
        self.fast = None  # kernels.FastPath, where `weights.load` or `weights.random` attached one

    @property
    def path(self) -> str:
        """ "fast" where decode steps are compiled, else "eager"."""
        return "eager" if self.fast is None else "fast"

    @property
    def dtype(self) -> torch.dtype:
        """Of activations and KV; int8 matrices are scaled back to it."""
        return self.norm.weight.dtype

    @property
    def formats(self) -> dict[str, float]:
        """Bytes per value of matrices and of KV, as the functions of `cost` take them."""
        return {"weight_bytes_per_value": self.head.weight.itemsize, "kv_bytes_per_value": self.dtype.itemsize}

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    def new_cache(self, *, max_len: int, batch: int = 1) -> KVCache:
        """An empty cache of this model's shape, device and dtype. Raises: ContextError where it exceeds the free memory."""
        self._require_room(batch * max_len, f"a cache of {batch:,} x {max_len:,} tokens")
        return KVCache(self.config, max_len=max_len, batch=batch, device=self.device, dtype=self.dtype)

    def new_pool(self, *, pages: int, page_tokens: int = CHUNK) -> PagePool:
        """Pages for many sequences of this model. Raises: ContextError where they exceed the free memory."""
        self._require_room(pages * page_tokens, f"a pool of {pages:,} pages of {page_tokens} tokens")
        return PagePool(self.config, pages=pages, page_tokens=page_tokens, device=self.device, dtype=self.dtype)

    def _require_room(self, tokens: int, what: str) -> None:
        needed, free = tokens * kv_bytes_per_token(self.config, dtype_bytes=self.dtype.itemsize), free_memory_bytes(self.device)
        if needed > free:
            raise ContextError(f"{what} needs {format_capacity(needed)} and {format_capacity(free)} is free; ask for fewer tokens or sequences")

    def forward(
        self, ids: Tensor, *, cache: KVCache | PagedRows, positions: Tensor | None = None, last: Tensor | None = None, every_row: bool = False
    ) -> Tensor:
        """Logits of `ids` (B, T) after the tokens already in `cache`; appends their K and V to it.

        Without `positions` (B, T) each row goes on after its last token; PAD_POSITION marks padding. The output matrix runs on
        the last column only, or on column `last` (B,) of each row: (B, V); with `every_row`: (B, T, V). float32.
        Raises: ContextError before anything is written.
        """
        tokens = ids.shape[1]
        cache.require(self.config, batch=ids.shape[0], new_tokens=tokens, dtype=self.dtype)
        if positions is None and cache.positions is not None:
            positions = cache.next_positions()[:, None] + torch.arange(tokens, device=ids.device)
        self.require_positions(cache.length + tokens if positions is None else positions)
        if self.fast is not None and tokens == 1 and (cache.table is None or bool((positions != PAD_POSITION).all())):  # padding has no page
            logits = self.fast.step(ids[:, 0], cache=cache, positions=positions)  # (B, V)
            cache.advance(1)
            return logits[:, None] if every_row else logits
        shared = self._shared(tokens, cache, positions)
        x = self.embed(ids)  # (B, T, D)
        if self.positions is not None:
            x = x + self.positions(_columns(tokens, cache) if positions is None else positions.clamp(max=self.config.max_context - 1))
        for layer, block in enumerate(self.blocks):
            x = block(x, cache=cache, layer=layer, shared=shared)  # (B, T, D)
        cache.advance(tokens)
        if not every_row:
            x = x[:, -1] if last is None else x[torch.arange(len(x), device=x.device), last]  # (B, D)
        return self.head(self.norm(x)).float()  # (B, V) or (B, T, V)

    def _shared(self, tokens: int, cache: KVCache | PagedRows, positions: Tensor | None) -> Pass:
        """The mask and rotary angles of this pass, made once for all layers."""
        if positions is None:  # columns are positions: T = 1 sees all, an empty cache is causal
            query = _columns(tokens, cache)  # (T,)
            chunk = tokens > 1 and cache.length > 0
            visible = visible_keys(query, torch.arange(cache.length + tokens, device=self.device)) if chunk else None
            causal = tokens > 1 and not chunk
        else:
            query = positions  # (B, T)
            visible, causal = visible_keys(query, cache.place(query))[:, None], False  # (B, 1, T, S)
        if self.inverse_wavelengths is None:
            return Pass(None, None, visible, causal)
        angles = query.clamp(max=self.config.max_context)[..., None] * self.inverse_wavelengths  # (..., T, H/2)
        angles = torch.cat((angles, angles), dim=-1)
        angles = angles if angles.ndim == 2 else angles[:, None]  # (T, H) or (B, 1, T, H)
        return Pass(angles.cos().to(self.dtype), angles.sin().to(self.dtype), visible, causal)

    def require_positions(self, ends: int | Tensor) -> None:
        """Raises ContextError where a pass would go past the model's positions."""
        if isinstance(ends, Tensor):
            real = ends[ends != PAD_POSITION]
            ends = int(real.max()) + 1 if real.numel() else 0
        if ends > self.config.max_context:
            raise ContextError(f"{self.config.name} has {self.config.max_context} positions and this pass reaches {ends}. "
                               f"Shorten the request, or load a model with a longer context.")  # fmt: skip


class Block(nn.Module):
    """One layer: attention and feed-forward, each added to the residual stream after a norm of its input."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype):
        super().__init__()
        self.attention_norm = make_norm(config, dtype=dtype)
        self.attention = Attention(config, dtype=dtype)
        self.mlp_norm = make_norm(config, dtype=dtype)
        self.mlp = MLP(config, dtype=dtype)

    def forward(self, x: Tensor, *, cache: KVCache | PagedRows, layer: int, shared: Pass) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cache=cache, layer=layer, shared=shared)  # (B, T, D)
        return x + self.mlp(self.mlp_norm(x))  # (B, T, D)


class Attention(nn.Module):
    """Grouped-query attention: N query heads share K KV heads. Reads every cached K and V once per pass."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype):
        super().__init__()
        self.head_dim = config.head_dim
        bias = config.is_gpt2 or config.qkv_bias
        self.q = nn.Linear(config.hidden, config.query_width, bias=bias, dtype=dtype)
        self.k = nn.Linear(config.hidden, config.kv_width, bias=bias, dtype=dtype)
        self.v = nn.Linear(config.hidden, config.kv_width, bias=bias, dtype=dtype)
        self.out = nn.Linear(config.query_width, config.hidden, bias=config.is_gpt2 or config.attention_out_bias, dtype=dtype)
        self.q_norm, self.k_norm = (nn.RMSNorm(config.head_dim, eps=config.norm_eps, dtype=dtype) if config.qk_norm else None for _ in "qk")

    def forward(self, x: Tensor, *, cache: KVCache | PagedRows, layer: int, shared: Pass) -> Tensor:
        q, k, v = (self._heads(part(x)) for part in (self.q, self.k, self.v))  # (B, N, T, H), (B, K, T, H) twice
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)  # each head on its own
        if shared.cos is not None:
            q, k = rotate(q, shared), rotate(k, shared)
        keys, values = cache.append(layer, k, v)  # (B, K, S, H)
        mixed = attend(q, keys, values, visible=shared.visible, causal=shared.causal)  # (B, N, T, H)
        return self.out(mixed.transpose(1, 2).flatten(2))  # (B, T, D)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)  # (B, heads, T, H)


class MLP(nn.Module):
    """Feed-forward: SwiGLU when gated (Llama, Qwen), tanh-GELU otherwise (GPT-2)."""

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype):
        super().__init__()
        options = {"bias": config.is_gpt2, "dtype": dtype}
        self.gate = nn.Linear(config.hidden, config.intermediate, **options) if config.gated_mlp else None
        self.up = nn.Linear(config.hidden, config.intermediate, **options)
        self.down = nn.Linear(config.intermediate, config.hidden, **options)

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))  # (B, T, F) inside
        return self.down(F.silu(self.gate(x), inplace=True).mul_(self.up(x)))  # in place: new memory costs a prefill more than the arithmetic


def make_norm(config: ModelConfig, *, dtype: torch.dtype) -> nn.Module:
    """LayerNorm with bias for GPT-2, RMSNorm for Llama and Qwen."""
    kind = nn.LayerNorm if config.is_gpt2 else nn.RMSNorm
    return kind(config.hidden, eps=config.norm_eps, dtype=dtype)


def visible_keys(query_positions: Tensor, key_positions: Tensor) -> Tensor:
    """The one mask rule, (..., T) and (..., S) -> (..., T, S) bool: key position <= query position.

    It serves prefill, chunked prefill, decode, padding on either side and verification of a draft.
    """
    return key_positions[..., None, :] <= query_positions[..., :, None]


def attend(q: Tensor, k: Tensor, v: Tensor, *, visible: Tensor | None = None, causal: bool = False) -> Tensor:
    """softmax(q k^T / sqrt(H)) v over the visible keys: (B, N, T, H) against (B, K, S, H) twice -> (B, N, T, H).

    `causal` is allowed only where T = S: with fewer queries than keys SDPA would anchor the triangle at the wrong end.
    """
    batch, heads, tokens, head_dim = q.shape
    if causal and tokens != k.shape[2]:
        raise ValueError(f"causal=True with {tokens} queries and {k.shape[2]} keys hides the past; pass visible_keys(...) instead")
    if tokens == 1:  # a group's query heads become the rows of one product: no copy of K or V per query head
        grouped = q.reshape(batch, k.shape[1], -1, head_dim)  # (B, K, N/K, H)
        return F.scaled_dot_product_attention(grouped, k, v, attn_mask=visible).reshape(q.shape)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=visible, is_causal=causal, enable_gqa=heads != k.shape[1])


def rotate(x: Tensor, shared: Pass) -> Tensor:
    """Rotary position embedding of (B, heads, T, H): the two halves of each head turn as pairs."""
    left, right = x.chunk(2, dim=-1)
    return x * shared.cos + torch.cat((-right, left), dim=-1) * shared.sin


def rotary_frequencies(config: ModelConfig) -> Tensor:
    """Radians per token of each rotary pair, (H/2,) float32, with Llama 3's stretching where the config has it.

    Source: huggingface/transformers modeling_rope_utils.py, `llama3`.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = 1.0 / config.rope_base**exponents
    if (rule := config.rope_scaling) is None:
        return frequencies
    turns = rule.original_max_context * frequencies / (2 * torch.pi)  # full turns within the original context
    smooth = ((turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)).clamp(0, 1)
    return frequencies * (smooth + (1 - smooth) / rule.factor)


def _columns(tokens: int, cache: KVCache) -> Tensor:
    """Columns of the cache that this pass writes, (T,)."""
    return torch.arange(cache.length, cache.length + tokens, device=cache.keys[0].device)
