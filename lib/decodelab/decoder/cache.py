"""The KV cache, contiguous or in pages. One tensor per layer, and reads touch only the valid slice.

The cache is an argument of every pass, never a module attribute. `length` (valid tokens) is never `max_len`
(allocated slots), and it moves once per pass, in `Decoder.forward`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from decodelab.arithmetic.catalog import ModelConfig
from decodelab.decoder.memory import huge_pages

PAD_POSITION = 2**30
"""Position of a padding column: greater than any query's, so `key position <= query position` never shows it."""


CHUNK = 16
"""The fast path reads whole chunks of this many tokens; a cache has one more than it needs, so that no read is of all of it."""


HIDDEN = -1e30
"""Added to the score of a key that must not be seen; finite, so that a row of padding is no NaN."""


class ContextError(ValueError):
    """A request needs more cache slots, or positions, than there are. Raised before any forward pass."""


def zeros(shape: tuple[int, ...], n_layers: int, *, device: str | torch.device, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """(keys, values) of each layer, in huge pages; ordinary tensors, since a cache outlives a pass."""
    with torch.inference_mode(False):
        keys, values = ([huge_pages(torch.empty(shape, device=device, dtype=dtype)).zero_() for _ in range(n_layers)] for _ in "kv")
    return keys, values


def token_bytes(keys: Sequence[Tensor]) -> int:
    """K and V bytes of one token in one row, all layers, of a cache with these keys: (B or pages, K, slots, H) each."""
    return 2 * len(keys) * keys[0].shape[1] * keys[0].shape[3] * keys[0].element_size()


def require_shape(keys: Sequence[Tensor], rows: int, config: ModelConfig, batch: int, dtype: torch.dtype) -> None:
    """Raises ContextError where a cache with these keys and rows is not of this model, batch and dtype."""
    held = (len(keys), rows, keys[0].shape[1], keys[0].shape[3], keys[0].dtype)
    if held != (asked := (config.n_layers, batch, config.n_kv_heads, config.head_dim, dtype)):
        raise ContextError(f"this cache is of (layers, batch, KV heads, head size, dtype) {held} and the pass of {asked}; "
                           "make it with model.new_cache(max_len=..., batch=...)")  # fmt: skip


class KVCache:
    """Contiguous K and V of `batch` rows, `max_len` slots each: one (B, K, max_len, H) tensor per layer for K, one for V."""

    def __init__(self, config: ModelConfig, *, max_len: int, batch: int = 1, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32):
        if max_len < 1 or batch < 1:
            raise ValueError(f"a cache of max_len {max_len} and batch {batch} holds nothing; both must be at least 1")
        shape = (batch, config.n_kv_heads, (max(2, -(-max_len // CHUNK)) + 1) * CHUNK, config.head_dim)
        self.keys, self.values = zeros(shape, config.n_layers, device=device, dtype=dtype)
        self.max_len, self.length = max_len, 0
        self.finite = 0  # slots before this one hold numbers: written, or made zero by `open`
        self.graphs: dict = {}  # CUDA graphs of the fast path, by the model's path and the slots they read
        self.positions: Tensor | None = None  # (B, max_len), only once a pass names its positions
        self.table = None  # this cache has no pages

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
        return token_bytes(self.keys)

    @property
    def allocated_bytes(self) -> int:
        return self.batch * self.slots * self.bytes_per_token

    def read_bytes(self, new_tokens: int = 1) -> int:
        """K and V bytes the next pass of `new_tokens` tokens reads, all rows: the valid slice with the new tokens in it."""
        return self.batch * (self.length + new_tokens) * self.bytes_per_token

    def require(self, config: ModelConfig, *, batch: int, new_tokens: int, dtype: torch.dtype) -> None:
        """Raises ContextError, before anything is written, where this is another model's or batch's cache, or is too short."""
        require_shape(self.keys, self.batch, config, batch, dtype)
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
        twin.max_len, twin.finite, twin.graphs, twin.table = self.max_len, self.finite, {}, None
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


class Pages(NamedTuple):
    """The pages of a batch's rows in one list, n of them, for attention that takes each by itself."""

    ids: Tensor  # (n,): which page of the pool
    row: Tensor  # (n,): whose it is
    order: Tensor  # (B, m): each row's pages as places in that list
    hidden: Tensor  # (B, m): 0, or HIDDEN where a row has fewer than m


class PagePool:
    """K and V of many sequences in pages of `page_tokens` slots: one (pages, K, page_tokens, H) tensor per layer for K, one for V.

    Who holds which page is the scheduler's business; a sequence is the list of its pages and a number of tokens.
    """

    def __init__(self, config: ModelConfig, *, pages: int, page_tokens: int = CHUNK, device: str | torch.device = "cpu",
                 dtype: torch.dtype = torch.float32):  # fmt: skip
        if pages < 1 or page_tokens < 1:
            raise ValueError(f"a pool of {pages} pages of {page_tokens} tokens holds nothing; both must be at least 1")
        shape = (pages, config.n_kv_heads, page_tokens, config.head_dim)
        self.keys, self.values = zeros(shape, config.n_layers, device=device, dtype=dtype)
        self.pages, self.page_tokens = pages, page_tokens

    @property
    def bytes_per_token(self) -> int:
        """K and V bytes of one token, all layers."""
        return token_bytes(self.keys)

    @property
    def allocated_bytes(self) -> int:
        return self.pages * self.page_tokens * self.bytes_per_token

    def rows(self, tables: Sequence[Sequence[int]], lengths: Sequence[int]) -> "PagedRows":
        """The cache of one pass over sequences with these pages, in order, and so many tokens in them."""
        return PagedRows(self, tables, lengths)


class PagedRows:
    """Some sequences of a pool as the batch of one pass: the protocol of KVCache, for rows of unequal length.

    Raises: ValueError for a page that is not in the pool, or a sequence without one.
    """

    def __init__(self, pool: PagePool, tables: Sequence[Sequence[int]], lengths: Sequence[int]):
        if wrong := [table for table in tables if not table or not 0 <= min(table) <= max(table) < pool.pages]:
            raise ValueError(f"a row has the pages {list(wrong[0])}; it needs at least one, each from 0 to {pool.pages - 1}")
        self.keys, self.values, self.page_tokens, device = pool.keys, pool.values, pool.page_tokens, pool.keys[0].device
        width = max(2, *map(len, tables))  # a compiled step takes any number of pages but one
        self.pages = [list(table) for table in tables]
        self.tables = torch.tensor([[*table, *[table[0]] * (width - len(table))] for table in tables], device=device)
        self.table = self.tables  # (B, n): of these, the pages that the next pass reads
        self.room = [len(table) * pool.page_tokens for table in tables]
        self.held, self.positions = list(lengths), torch.tensor(lengths, device=device)  # tokens in each row, (B,)

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(self.held)

    @property
    def slots(self) -> int:
        """Slots that a pass reads per row: all pages of the row that has most."""
        return self.table.shape[1] * self.page_tokens

    def read_bytes(self, new_tokens: int = 1) -> int:
        """K and V bytes the next pass must read: each row's own tokens with the new ones."""
        return sum(length + new_tokens for length in self.held) * token_bytes(self.keys)

    def require(self, config: ModelConfig, *, batch: int, new_tokens: int, dtype: torch.dtype) -> None:
        """As KVCache.require; a row shorter than the others may have less room than `new_tokens`, for padding is not stored."""
        require_shape(self.keys, len(self.held), config, batch, dtype)
        if max(room - length for room, length in zip(self.room, self.held, strict=True)) < new_tokens:
            raise ContextError(
                f"{new_tokens} more tokens find no room in pages for {max(self.room)} tokens that hold {self.length}; give the rows more pages"
            )

    def next_positions(self) -> Tensor:
        """The position of each row's next token, (B,)."""
        return self.positions

    def enter(self, positions: Tensor) -> None:
        """Finds the slots of the columns about to be written, (B, T). Raises: ContextError where a row's pages are full.

        Padding is not written. Pages that a row enters at their first slot are made zero: they may hold another's NaN.
        """
        self.real = positions < PAD_POSITION  # (B, T)
        self.ends = torch.where(self.real, positions + 1, 0).amax(-1).maximum(self.positions)  # (B,)
        self.holds = self.ends.tolist()  # tokens of each row once the pass is done
        for row, (end, room) in enumerate(zip(self.holds, self.room, strict=True)):
            if end > room:
                raise ContextError(f"row {row} would hold {end} tokens and its pages {room}; give it more pages")
        column = torch.where(self.real, positions, 0)
        self.page, self.offset = self.tables.gather(1, column // self.page_tokens), column % self.page_tokens  # (B, T)
        fresh = self.page[self.real & (self.offset == 0)]
        if len(fresh):
            for tensor in (*self.keys, *self.values):
                tensor[fresh] = 0

    def place(self, positions: Tensor) -> Tensor:
        """Enters, and returns the position of every slot that `append` gives back, (B, S)."""
        self.enter(positions)
        used = -(-self.ends // self.page_tokens)[:, None]  # pages; where others have more, a row repeats its first: finite, its own, hidden
        pages = torch.arange(max(2, -(-max(self.holds) // self.page_tokens)), device=positions.device)
        self.table = torch.where(pages < used, self.tables[:, : len(pages)], self.tables[:, :1])
        columns = torch.arange(self.slots, device=positions.device)
        return torch.where(columns < self.ends[:, None], columns, PAD_POSITION)

    def split(self) -> tuple[Pages, Tensor]:
        """After `enter`: the pages that the pass reads, and which of their slots hold a token, (n, P) bool."""
        ends, device, size = self.holds, self.table.device, self.page_tokens
        counts = [-(-end // size) for end in ends]
        counts[0] += sum(counts) == 1  # a compiled step takes any number of pages but one: the first again, nothing of it seen
        ids = [table[at if at * size < end else 0] for table, end, count in zip(self.pages, ends, counts, strict=True) for at in range(count)]
        row = [number for number, count in enumerate(counts) for _ in range(count)]
        starts, width = [sum(counts[:number]) for number in range(len(counts))], max(2, *counts)
        order = [[start + min(at, count - 1) for at in range(width)] for start, count in zip(starts, counts, strict=True)]
        hidden = [[0.0 if at < count else HIDDEN for at in range(width)] for count in counts]
        pages = Pages(*(torch.tensor(part, device=device) for part in (ids, row, order, hidden)))
        first = size * torch.tensor([at for count in counts for at in range(count)], device=device)  # (n,): positions of the pages' first slots
        return pages, first[:, None] + torch.arange(size, device=device) < self.ends[pages.row][:, None]

    def append(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Writes k, v (B, K, T, H) into the rows' slots of `layer`; returns copies of all their pages in order, (B, K, S, H)."""
        read = []
        for pool, new in ((self.keys[layer], k), (self.values[layer], v)):
            pool[self.page[self.real], :, self.offset[self.real]] = new.transpose(1, 2)[self.real]
            read.append(pool[self.table].transpose(1, 2).flatten(2, 3))
        return read[0], read[1]

    def advance(self, new_tokens: int) -> None:
        """Makes the appended tokens valid. Called once per pass."""
        self.positions, self.held = self.ends, self.holds
