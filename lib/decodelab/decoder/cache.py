"""The KV cache. One tensor per layer, and reads touch only the valid slice.

The cache is an argument of every pass, never a module attribute. `length` (valid tokens) is never `max_len`
(allocated slots), and it moves once per pass, in `Decoder.forward`.
"""

import torch
from torch import Tensor

from decodelab.arithmetic.catalog import ModelConfig

PAD_POSITION = 2**30
"""Position of a padding column: greater than any query's, so `key position <= query position` never shows it."""


CHUNK = 16
"""The fast path reads whole chunks of this many tokens; a cache has one more than it needs, so that no read is of all of it."""


class ContextError(ValueError):
    """A request needs more cache slots, or positions, than there are. Raised before any forward pass."""


class KVCache:
    """Contiguous K and V of `batch` rows, `max_len` slots each: one (B, K, max_len, H) tensor per layer for K, one for V."""

    def __init__(self, config: ModelConfig, *, max_len: int, batch: int = 1, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32):
        if max_len < 1 or batch < 1:
            raise ValueError(f"a cache of max_len {max_len} and batch {batch} holds nothing; both must be at least 1")
        shape = (batch, config.n_kv_heads, (max(2, -(-max_len // CHUNK)) + 1) * CHUNK, config.head_dim)
        with torch.inference_mode(False):  # the cache outlives a pass
            self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layers)]
            self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.n_layers)]
        self.max_len, self.length = max_len, 0
        self.finite = 0  # slots before this one hold numbers: written, or made zero by `open`
        self.graphs: dict = {}  # CUDA graphs of the fast path, by the model's path and the slots they read
        self.positions: Tensor | None = None  # (B, max_len), only once a pass names its positions

    @property
    def batch(self) -> int:
        return self.keys[0].shape[0]

    @property
    def slots(self) -> int:
        """Slots allocated per row: max_len in whole chunks, and one chunk more."""
        return self.keys[0].shape[2]

    @property
    def bytes_per_token(self) -> int:
        """K and V bytes of one more token in one row, all layers."""
        layer = self.keys[0]
        return 2 * len(self.keys) * layer.shape[1] * layer.shape[3] * layer.element_size()

    @property
    def allocated_bytes(self) -> int:
        return self.batch * self.slots * self.bytes_per_token

    def read_bytes(self, new_tokens: int = 1) -> int:
        """K and V bytes the next pass of `new_tokens` tokens reads, all rows: the valid slice with the new tokens in it."""
        return self.batch * (self.length + new_tokens) * self.bytes_per_token

    def require(self, config: ModelConfig, *, batch: int, new_tokens: int, dtype: torch.dtype) -> None:
        """Raises ContextError, before anything is written, where this is another model's or batch's cache, or is too short."""
        keys = self.keys[0]
        held = (len(self.keys), self.batch, keys.shape[1], keys.shape[3], keys.dtype)
        if held != (asked := (config.n_layers, batch, config.n_kv_heads, config.head_dim, dtype)):
            raise ContextError(f"this cache is of (layers, batch, KV heads, head size, dtype) {held} and the pass of {asked}; "
                               "make it with model.new_cache(max_len=..., batch=...)")  # fmt: skip
        if self.length + new_tokens > self.max_len:
            raise ContextError(f"{new_tokens} more tokens need {self.length + new_tokens} cache slots but the cache holds "
                               f"{self.max_len}. Make it with max_len={self.length + new_tokens}, or crop it.")  # fmt: skip

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k, v (B, K, T, H) behind the valid slice of `layer`; returns the slice with them, (B, K, S, H) views."""
        end = self.length + k.shape[2]
        self.keys[layer][:, :, self.length : end] = k
        self.values[layer][:, :, self.length : end] = v
        return self.keys[layer][:, :, :end], self.values[layer][:, :, :end]

    def open(self, multiple: int) -> int:
        """Slots that a step of fixed size reads: those in use and the new one, up to a `multiple` of chunks.

        Slots never written are made zero first: memory may hold NaN, and no mask hides 0 * NaN.
        """
        slots = min(max(2 * CHUNK, -(-(self.length + 1) // multiple) * multiple), self.slots - CHUNK)
        if self.finite < slots:
            for tensor in (*self.keys, *self.values):
                tensor[:, :, max(self.length, self.finite) : slots] = 0
            self.finite = slots
        return slots

    def place(self, positions: Tensor, *, slots: int | None = None) -> Tensor:
        """Records the positions (B, T) of the columns about to be written; returns those of all columns, or of `slots`: (B, S)."""
        if self.positions is None:
            with torch.inference_mode(False):  # the cache outlives this pass
                self.positions = torch.arange(self.slots, device=positions.device).repeat(self.batch, 1)
        end = self.length + positions.shape[1]
        self.positions[:, self.length : end] = positions
        return self.positions[:, : slots or end]

    def next_positions(self) -> Tensor:
        """The position of each row's next token, (B,): one past its last real column."""
        if self.positions is None or not self.length:
            return torch.full((self.batch,), self.length, device=self.keys[0].device)
        known = self.positions[:, : self.length]
        return known.masked_fill(known == PAD_POSITION, -1).amax(-1) + 1

    def advance(self, new_tokens: int) -> None:
        """Makes the appended tokens valid. Called once per pass."""
        self.length += new_tokens

    def crop(self, length: int) -> None:
        """Forgets all but the first `length` tokens, in place. Raises ValueError outside 0 ... length."""
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot crop a cache of {self.length} tokens to {length}; give a number from 0 to {self.length}")
        self.length = length

    def reset(self) -> None:
        """Empties the cache; the memory stays."""
        self.length, self.positions = 0, None

    def copy(self) -> "KVCache":
        """An independent cache with the same content: continuing one leaves the other as it is."""
        twin = object.__new__(type(self))
        twin.max_len, twin.finite, twin.graphs = self.max_len, self.finite, {}
        with torch.inference_mode(False):  # as in the first one: compiled steps tell the two kinds of tensor apart
            twin.keys, twin.values = [k.clone() for k in self.keys], [v.clone() for v in self.values]
            twin.positions = None if self.positions is None else self.positions.clone()
        twin.length = self.length
        return twin

    def fill_random(self, length: int, *, generator: torch.Generator | None = None) -> None:
        """Sets the first `length` tokens to random K and V: a step's bytes do not care about values. Never zeros."""
        if not 0 <= length <= self.max_len:
            raise ContextError(f"cannot fill {length} tokens into a cache that holds {self.max_len}")
        for tensor in (*self.keys, *self.values):
            tensor[:, :, :length].normal_(generator=generator)
        self.length, self.positions, self.finite = length, None, max(length, self.finite)
