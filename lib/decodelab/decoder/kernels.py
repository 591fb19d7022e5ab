"""The fast path: a few decoder blocks, compiled once and called for all layers of a decode step.

Compiling fuses what eager PyTorch does in some forty calls a layer, and turns the product of one row into a
multiply-and-sum that streams the matrix at the machine's read bandwidth. Passes of many tokens run the eager block, with
oneDNN's product. On CUDA the whole step is recorded as a graph for each bucket of contexts.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decodelab.decoder.cache import CHUNK, HIDDEN, KVCache, PagedRows, PagePool, Pages
from decodelab.decoder.memory import gather
from decodelab.decoder.model import Block, Decoder, rotate

PATHS = ("auto", "fast", "eager")
GROUPS = (3, 2, 1)  # layers compiled together: each call from Python costs about 35 us, each layer 3 s of compiling
BUCKET = 512  # tokens by which the context of a CUDA graph grows: a graph reads a fixed length
WARM_UP_TOKENS = 2048  # the compiler takes sizes seen first as typical, so it must not see a short cache
OPTIONS = {
    "cpp.enable_floating_point_contract_flag": "fast",
    "size_asserts": False,
    "assert_indirect_indexing": False,
}  # fused multiply-adds; 5 us a layer not spent on checks
ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
LIMITS = {"recompile_limit": 10_000, "accumulated_recompile_limit": 10_000}  # a process may load many shapes and dtypes


class Rows(NamedTuple):
    """A matrix (O, I), with a bias (O,) or None, and in int8 a scale for each row (O,)."""

    weight: Tensor
    bias: Tensor | None
    scale: Tensor | None


class Matrix(nn.Module):
    """A Linear that multiplies by `product`, and may be int8."""

    def __init__(self, weight: nn.Parameter, bias: Tensor | None, scale: Tensor | None = None):
        super().__init__()
        self.weight, self.bias = weight, bias
        self.register_buffer("scale", scale)

    @property
    def rows(self) -> Rows:
        return Rows(self.weight, self.bias, self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.rows)


class Int8Embedding(nn.Module):
    """Rows of an int8 matrix, scaled as they are looked up."""

    def __init__(self, weight: nn.Parameter, scale: Tensor, dtype: torch.dtype):
        super().__init__()
        self.weight, self.dtype = weight, dtype
        self.register_buffer("scale", scale)

    def forward(self, ids: Tensor) -> Tensor:
        return (F.embedding(ids, self.weight) * F.embedding(ids, self.scale[:, None])).to(self.dtype)


def product(x: Tensor, w: Rows) -> Tensor:
    """x (..., I) times the matrix: (..., O) in x's dtype.

    One row of a compiled block is a multiply-and-sum in float32. Several float32 rows on a CPU go to oneDNN, which uses
    wider vectors than the library behind F.linear on some processors.
    """
    if torch.compiler.is_compiling() and x.shape[:-1].numel() == 1:
        y = (w.weight.float() * x.float()).sum(-1).view(*x.shape[:-1], -1)  # (1, O)
    elif w.scale is not None:
        y = product(x, Rows(w.weight.to(x.dtype), None, None)).float()
    elif x.dtype == torch.float32 and x.device.type == "cpu" and ONEDNN:
        return torch.ops.decodelab.onednn_linear(x, w.weight, w.bias)
    else:
        return F.linear(x, w.weight, w.bias)
    y = y if w.scale is None else y * w.scale
    return (y if w.bias is None else y + w.bias).to(x.dtype)


OPERATORS = torch.library.Library("decodelab", "DEF")
OPERATORS.define("onednn_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
OPERATORS.impl("onednn_linear", lambda x, weight, bias: torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""), "CPU")
torch.library.register_fake("decodelab::onednn_linear", lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0])), lib=OPERATORS)
"""oneDNN's float32 product as an operator the compiler takes as it is: its own lowering wants the matrix to be a constant."""


def compiled(function: Callable) -> Callable:
    """The function as the fast path runs it; torch compiles it at its first call."""
    return torch.compile(function, fullgraph=True, options=OPTIONS)


# Compiled functions. Each argument that changes is a tensor: one compilation serves all layers and all contexts.


class Shared(NamedTuple):
    """What the layers of one decode step share."""

    bias: Tensor  # (B, n, CHUNK), or (n, P) of pages: 0, or HIDDEN for a key that may not be seen; its size is what the step reads
    slot: Tensor  # (1,) int64: the cache column of the new token; with pages (B,): its place in the page
    page: Tensor | None  # (B,): the page of the new token; None in a contiguous cache
    pages: Pages | None
    cos: Tensor | None  # (B, 1, H)
    sin: Tensor | None


def blocks_step(x: Tensor, layers: tuple, shared: Shared, eps: float) -> Tensor:
    """Some layers of a decode step, x (B, D) -> (B, D), each with its K and V (B or pages, K, slots, H), into which it writes the new ones."""
    for (attention, mlp), keys, values in layers:
        x = x + attention_step(x, attention, keys, values, shared, eps)
        x = x + mlp_step(x, mlp, eps)
    return x


def attention_step(x: Tensor, w: tuple, keys: Tensor, values: Tensor, shared: Shared, eps: float) -> Tensor:
    """Norm, Q K V, cache write, attention, output product."""
    before, q, k, v, q_norm, k_norm, out = w
    batch, (_, kv_heads, _, head_dim) = len(x), keys.shape
    h = norm(x, before, eps)
    q, k, v = (product(h, part).view(batch, -1, head_dim) for part in (q, k, v))  # (B, N, H), (B, K, H) twice
    if q_norm is not None:
        q, k = norm(q, q_norm, eps), norm(k, k_norm, eps)
    if shared.cos is not None:
        q, k = rotate(q, shared), rotate(k, shared)
    for part, new in ((keys, k), (values, v)):
        if shared.pages is None:
            part.index_copy_(2, shared.slot, new[:, :, None])
        else:
            part.index_put_((shared.page, torch.arange(kv_heads, device=x.device)[:, None], shared.slot), new.transpose(0, 1))
    q = q.view(batch, kv_heads, -1, head_dim)
    if shared.pages is None:
        mixed = attend_chunks(q, keys, values, shared.bias)  # (B, K, G, H)
    else:
        mixed = attend_pages(q, keys, values, shared.bias, shared.pages)
    return product(mixed.to(x.dtype).view(batch, -1), out)


def mlp_step(x: Tensor, w: tuple, eps: float) -> Tensor:
    """Norm and feed-forward."""
    before, gate, up, down = w
    h = norm(x, before, eps)
    inner = F.gelu(product(h, up), approximate="tanh") if gate is None else F.silu(product(h, gate)) * product(h, up)  # (B, F)
    return product(inner, down)


def attend_chunks(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(H)) v for one query per row, float32: q (B, K, G, H) -> (B, K, G, H), G = N/K.

    Reads K and V once, in chunks of CHUNK tokens that stay in the first-level cache while the G query heads of a group use
    them; a chunk's sums are short, so that a processor runs several at a time.
    """
    k, v = (part.unflatten(2, (-1, CHUNK))[:, :, : bias.shape[1]].float() for part in (keys, values))  # (B, K, n, CHUNK, H)
    q = q.float() * q.shape[-1] ** -0.5
    scores = (q[:, :, None, :, None] * k[:, :, :, None]).sum(-1) + bias[:, None, :, None]  # (B, K, n, G, CHUNK)
    p = torch.exp(scores - scores.amax((2, 4), keepdim=True))
    return (p[..., None] * v[:, :, :, None]).sum(4).sum(2) / p.sum(4).sum(2)[..., None]


def attend_pages(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, pages: Pages) -> Tensor:
    """The same over pages (pages, K, P, H): each page by itself, whoever's it is, then each row's parts put together.

    A row pays for its own pages, not for the longest row's. Each page is read whole before the next one: scattered pages of
    16 tokens cost a third of the rate, pages in order nothing. Source: flash-decoding's split over keys.
    """
    k, v = (_rows(part, pages.ids).float() for part in (keys, values))  # (n, K, P, H)
    q = _rows(q.float() * q.shape[-1] ** -0.5, pages.row)  # (n, K, G, H)
    scores = (q[:, :, :, None] * k[:, :, None]).sum(-1) + bias[:, None, None]  # (n, K, G, P)
    top = scores.amax(-1)  # (n, K, G)
    p = torch.exp(scores - top[..., None])
    parts, total = (p[..., None] * v[:, :, None]).sum(-2), p.sum(-1)  # (n, K, G, H), (n, K, G)
    top = _rows(top, pages.order) + pages.hidden[..., None, None]  # (B, m, K, G)
    share = torch.exp(top - top.amax(1, keepdim=True))
    return (share[..., None] * _rows(parts, pages.order)).sum(1) / (share * _rows(total, pages.order)).sum(1)[..., None]


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """x[index], looked up as an embedding: the compiler has no index to check or to wrap at each load."""
    return F.embedding(index, x.flatten(1)).unflatten(-1, x.shape[1:])


def head_step(x: Tensor, w: tuple[Tensor, Tensor | None], head: Rows, eps: float) -> Tensor:
    """Final norm and output matrix: x (B, D) -> logits (B, V), float32."""
    return product(norm(x, w, eps), head).float()


def norm(x: Tensor, w: tuple[Tensor, Tensor | None], eps: float) -> Tensor:
    """LayerNorm where there is a bias (GPT-2), else RMSNorm, over the last dimension."""
    return F.rms_norm(x, x.shape[-1:], w[0], eps) if w[1] is None else F.layer_norm(x, x.shape[-1:], *w, eps)


# What a model keeps.


class FastPath:
    """The compiled decode step of one model; `attach` makes it."""

    def __init__(self, model: Decoder, *, say: Callable[[str], None] = print):
        self.model, self.eps, self.say = model, model.config.norm_eps, say
        self.blocks = [_block_tensors(block) for block in model.blocks]
        self.norm, self.head = _norm_tensors(model.norm), model.head.rows
        self.group = next(size for size in GROUPS if model.config.n_layers % size == 0)
        self.some, self.last = map(compiled, (blocks_step, head_step))
        self.graphs = model.device.type == "cuda"
        self.bucket = BUCKET if self.graphs else CHUNK
        self.ticks = torch.arange(model.config.max_context + 2 * max(BUCKET, CHUNK), device=model.device)
        self.compiled = set()  # (several rows, tokens of a page or 0, threads): torch compiles again where one of them changes

    @torch.inference_mode()
    def step(self, ids: Tensor, *, cache: KVCache | PagedRows, positions: Tensor | None = None) -> Tensor:
        """Logits (B, V) of one more token for each row, ids (B,); writes its K and V, leaves the cache's length alone."""
        kind = (len(ids) > 1, 0 if cache.table is None else cache.page_tokens, torch.get_num_threads())
        if kind not in self.compiled:
            self.warm_up(rows=4 if len(ids) > 1 else 1, page_tokens=kind[1])
        if cache.table is not None:
            cache.enter(positions)
            return self.run(ids, cache.offset[:, 0], cache, positions[:, 0])
        slots = cache.open(self.bucket)
        slot = torch.full((1,), cache.length, device=ids.device)
        if positions is not None:
            return self.run(ids, slot, cache, positions[:, 0], cache.place(positions, slots=slots))
        if not self.graphs:
            return self.run(ids, slot, cache, slot.expand(len(ids)), self.ticks[:slots])
        if (self, slots) not in cache.graphs:  # a graph is of this model's weights and this cache's memory
            cache.graphs[self, slots] = Graph(lambda ids, slot: self.run(ids, slot, cache, slot.expand(len(ids)), self.ticks[:slots]), ids, slot)
        return cache.graphs[self, slots](ids, slot)

    def run(self, ids: Tensor, slot: Tensor, cache: KVCache | PagedRows, query: Tensor, key: Tensor | None = None, *, mark: bool = False) -> Tensor:
        """The step, with queries at positions (B,) and, in a contiguous cache, keys at (S,) or (B, S). Nothing in it waits for the device.

        `mark` tells the compiler which sizes will change: the context, the slots or pages, and the rows where there are several.
        """
        x, shared = self.inputs(ids, slot, cache, query, key)
        if mark:
            _mark(x, shared, cache)
        layers = tuple(zip(self.blocks, cache.keys, cache.values, strict=not mark))
        for first in range(0, len(layers), self.group):
            x = self.some(x, layers[first : first + self.group], shared, self.eps)
        if mark and len(ids) > 1:
            torch._dynamo.mark_dynamic(x, 0)
        return self.last(x, self.norm, self.head, self.eps)

    def inputs(self, ids: Tensor, slot: Tensor, cache: KVCache | PagedRows, query: Tensor, key: Tensor | None) -> tuple[Tensor, Shared]:
        """The embedded tokens (B, D), and what all layers share."""
        model, page, pages, cos, sin = self.model, None, None, None, None
        if cache.table is None:
            seen = (torch.arange(key.shape[-1], device=ids.device) <= slot) & (key <= query[:, None])  # (B, S)
            bias = torch.where(seen, 0.0, HIDDEN).unflatten(-1, (-1, CHUNK))  # (B, n, CHUNK)
        else:
            page, (pages, seen) = cache.page[:, 0], cache.split()
            bias = torch.where(seen, 0.0, HIDDEN)  # (n, P)
        if model.inverse_wavelengths is not None:
            angles = (query[:, None] * model.inverse_wavelengths).repeat(1, 2)[:, None]  # (B, 1, H)
            cos, sin = angles.cos().to(model.dtype), angles.sin().to(model.dtype)
        x = model.embed(ids) if model.positions is None else model.embed(ids) + model.positions(query.clamp(max=model.config.max_context - 1))
        return x, Shared(bias, slot, page, pages, cos, sin)

    @torch.inference_mode()
    def warm_up(self, *, rows: int, page_tokens: int = 0) -> None:
        """Compiles the step for one row or for several, contiguous or in pages, on a cache of one group of layers."""
        kind = ("several rows" if rows > 1 else "one row") + (" in pages" if page_tokens else "")
        self.say(f"Compiling the decoder's block for {kind}: a second or two, up to ten the first time.")
        model, made = self.model, {"device": self.model.device, "dtype": self.model.dtype}
        some, ids = replace(model.config, n_layers=self.group), torch.zeros(rows, dtype=torch.long, device=model.device)
        with torch._dynamo.config.patch(LIMITS):
            if page_tokens:
                pool = PagePool(some, pages=2 * (pages := -(-WARM_UP_TOKENS // page_tokens)), page_tokens=page_tokens, **made)
                cache = pool.rows([range(pages)] * rows, [pages * page_tokens - 1] * rows)
                cache.enter(cache.positions[:, None])
                self.run(ids, cache.offset[:, 0], cache, cache.positions, mark=True)
            else:
                cache, slot = KVCache(some, max_len=2 * WARM_UP_TOKENS, batch=rows, **made), torch.zeros(1, dtype=torch.long, device=model.device)
                self.run(ids, slot, cache, slot.expand(rows), self.ticks[:1].expand(WARM_UP_TOKENS), mark=True)
        self.compiled.add((rows > 1, page_tokens, torch.get_num_threads()))


def _mark(x: Tensor, shared: Shared, cache: KVCache | PagedRows) -> None:
    """Tells the compiler which sizes of a step's inputs will change: the context always, the rows where there are several."""
    paged, kv = cache.table is not None, (*cache.keys, *cache.values)
    rows = [(tensor, 0) for tensor in (x, shared.cos, shared.sin) if tensor is not None]
    if paged:
        ids, row, order, hidden = shared.pages
        change = [(shared.bias, 0), (ids, 0), (row, 0), (order, 1), (hidden, 1), *((tensor, 0) for tensor in kv)]
        rows += [(tensor, 0) for tensor in (shared.slot, shared.page, order, hidden)]
    else:
        change = [(shared.bias, 1), *((tensor, 2) for tensor in kv)]
        rows += [(tensor, 0) for tensor in (shared.bias, *kv)]
    for tensor, dim in change + rows * (len(x) > 1):
        torch._dynamo.mark_dynamic(tensor, dim)


class Graph:
    """A CUDA step recorded once and replayed, so that Python launches no kernel. On a CPU it calls the step."""

    def __init__(self, step: Callable[[Tensor, Tensor], Tensor], ids: Tensor, slot: Tensor):
        self.inputs, self.graph = (ids.clone(), slot.clone()), None
        if ids.device.type != "cuda":
            self.step = step
            return
        side = torch.cuda.Stream(ids.device)
        side.wait_stream(torch.cuda.current_stream(ids.device))
        with torch.cuda.stream(side):  # what allocates or compiles on first use must have done so before the recording
            step(*self.inputs)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, stream=side):  # `step` is not kept: it holds the cache that holds this graph
                self.logits = step(*self.inputs)
        torch.cuda.current_stream(ids.device).wait_stream(side)

    def __call__(self, ids: Tensor, slot: Tensor) -> Tensor:
        for mine, given in zip(self.inputs, (ids, slot), strict=True):
            mine.copy_(given)
        if self.graph is None:
            return self.step(*self.inputs)
        self.graph.replay()
        return self.logits.clone()


def _norm_tensors(part: nn.Module | None) -> tuple[Tensor, Tensor | None] | None:
    return None if part is None else (part.weight, getattr(part, "bias", None))


def _block_tensors(block: Block) -> tuple:
    """A block's tensors in the order of `attention_step` and `mlp_step`."""
    a, m = block.attention, block.mlp
    return ((_norm_tensors(block.attention_norm), a.q.rows, a.k.rows, a.v.rows, _norm_tensors(a.q_norm), _norm_tensors(a.k_norm), a.out.rows),
            (_norm_tensors(block.mlp_norm), None if m.gate is None else m.gate.rows, m.up.rows, m.down.rows))  # fmt: skip


def quantise(model: Decoder) -> None:
    """Makes every matrix int8 in place: round(w / scale), with scale = a row's largest magnitude / 127. Norms and biases stay."""
    done: dict[nn.Parameter, tuple[nn.Parameter, Tensor]] = {}  # a tied matrix is quantised once

    def int8(weight: nn.Parameter) -> tuple[nn.Parameter, Tensor]:
        if weight not in done:
            scale = weight.float().abs().amax(-1).clamp(min=1e-12) / 127  # (O,)
            done[weight] = nn.Parameter((weight / scale[:, None]).round().to(torch.int8), requires_grad=False), scale
        return done[weight]

    dtype = model.dtype
    _replace(model, lambda linear: Matrix(int8(linear.weight)[0], linear.bias, int8(linear.weight)[1]))
    model.embed = Int8Embedding(*int8(model.embed.weight), dtype)
    gather(model, device=model.device)


def _replace(model: Decoder, make: Callable[[nn.Linear], nn.Module]) -> None:
    """Puts make(linear) where each Linear was."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.Linear):
                setattr(module, name, make(child))


def chosen_path(path: str, *, device: str, say: Callable[[str], None] = print) -> str:
    """ "fast" or "eager": what "auto" means here. The environment's DECODELAB_PATH stands in for "auto".

    Where nothing compiles "auto" is eager, and `say` says why. Raises: ValueError for another name, and for
    "fast" where nothing compiles.
    """
    path = os.environ.get("DECODELAB_PATH", path) if path == "auto" else path
    if path not in PATHS:
        raise ValueError(f"path is {path!r}; use one of {', '.join(PATHS)}")
    if path == "eager" or not (problem := no_compiler(device)):
        return "eager" if path == "eager" else "fast"
    if path == "fast":
        raise ValueError(f'path="fast" needs a working torch.compile; here: {problem}')
    say(f"Nothing compiles here ({problem}), so the decoder runs eager, and the eager card predicts it.")
    return "eager"


def attach(model: Decoder, *, say: Callable[[str], None] = print) -> None:
    """Gives the model its fast path, compiled for one row."""
    _replace(model, lambda linear: Matrix(linear.weight, linear.bias))
    model.fast = FastPath(model, say=say)
    model.fast.warm_up(rows=1)


@lru_cache(maxsize=2)
def no_compiler(device: str) -> str | None:
    """Why torch.compile does not work on this device, in one line; None where it does. Compiles one small function."""
    try:
        torch.compile(lambda x: (x * x).sum(-1), fullgraph=True)(torch.ones(8, 64, device=device))
    except Exception as fault:  # whatever a missing compiler, header or driver raises
        return f"{type(fault).__name__}: {(str(fault).strip().splitlines() or ['no reason given'])[0]:.160}"
    return None
