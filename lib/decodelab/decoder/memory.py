"""Where tensors lie: how much memory is free, and blocks of it that the processor can look up quickly."""

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

HUGE = 2**21  # bytes of a huge page
ADVICE = 14  # MADV_HUGEPAGE
LINE = 64  # bytes of a cache line


def free_memory_bytes(device: str | torch.device = "cpu") -> int:
    """Bytes that can still be allocated: of the card, or of RAM within the container's limit."""
    if torch.device(device).type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    room = [psutil.virtual_memory().available]
    with suppress(OSError, ValueError):  # cgroup 2; its limit may be the word "max"
        limit, used = (int(Path(f"/sys/fs/cgroup/memory.{part}").read_text()) for part in ("max", "current"))
        room.append(max(0, limit - used))
    return min(room)


def huge_pages(tensor: Tensor) -> Tensor:
    """Asks Linux to back an unwritten CPU tensor with 2 MiB pages, and returns it.

    A stream over memory needs an address looked up for each page: with pages of 4 KiB that cost 6 to 8 % of the read bandwidth.
    """
    if sys.platform != "linux" or tensor.device.type != "cpu":
        return tensor
    start = -(-tensor.data_ptr() // HUGE) * HUGE
    size = (tensor.data_ptr() + tensor.nbytes) // HUGE * HUGE - start
    if size > 0:
        ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), ADVICE)  # advice: a refusal changes nothing
    return tensor


def together(tensors: Sequence[Tensor], *, device: str | torch.device) -> list[Tensor]:
    """Copies of `tensors`, one after the other in one block of huge pages; those on `meta` are left unwritten."""
    starts = [0]
    for tensor in tensors:
        starts.append(starts[-1] + -(-tensor.nbytes // LINE) * LINE)
    block = huge_pages(torch.empty(starts[-1], dtype=torch.uint8, device=device))
    views = [block[at : at + tensor.nbytes].view(tensor.dtype).view(tensor.shape) for at, tensor in zip(starts, tensors, strict=False)]
    for view, tensor in zip(views, tensors, strict=True):
        if tensor.device.type != "meta":
            view.copy_(tensor)
    return views


def gather(module: nn.Module, *, device: str | torch.device) -> None:
    """Moves all parameters of a module into one block, shared ones once. None takes a gradient."""
    old = list(module.parameters())
    new = {id(before): nn.Parameter(after, requires_grad=False) for before, after in zip(old, together(old, device=device), strict=True)}
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False, remove_duplicate=False):
            setattr(part, name, new[id(parameter)])
