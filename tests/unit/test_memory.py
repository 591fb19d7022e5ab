"""Where weights lie: one block, huge pages where Linux gives them, shared parameters once."""

import re
import sys
from pathlib import Path

import pytest
import torch

import tiny
from decodelab.decoder.memory import HUGE, LINE, huge_pages, together
from decodelab.decoder.model import Decoder


def test_together_copies_values_into_one_block_at_whole_cache_lines():
    parts = [torch.arange(7.0), torch.ones(3, 5, dtype=torch.bfloat16), torch.empty(4, device="meta"), torch.arange(9).to(torch.int8)]
    views = together(parts, device="cpu")
    for before, after in zip(parts, views, strict=True):
        assert (after.shape, after.dtype) == (before.shape, before.dtype)
        assert before.is_meta or torch.equal(before, after)
        assert after.untyped_storage().data_ptr() == views[0].untyped_storage().data_ptr()
        assert (after.data_ptr() - views[0].data_ptr()) % LINE == 0
    views[0].fill_(5)
    assert torch.equal(parts[0], torch.arange(7.0))


@pytest.mark.parametrize("config", [tiny.GPT2, tiny.LLAMA])
def test_a_decoder_lies_in_one_block_and_shares_what_is_tied(config):
    model = Decoder(config)
    ends = sum(-(-parameter.nbytes // LINE) * LINE for parameter in model.parameters())
    assert {parameter.untyped_storage().nbytes() for parameter in model.parameters()} == {ends}
    assert (model.head.weight is model.embed.weight) == config.tied_embeddings
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_int8_frees_the_block_of_the_floats():
    floats, ints = tiny.decoder(tiny.LLAMA), tiny.weights.random(tiny.LLAMA, dtype="int8")
    sizes = [next(model.parameters()).untyped_storage().nbytes() for model in (floats, ints)]
    assert {parameter.untyped_storage().nbytes() for parameter in ints.parameters()} == {sizes[1]}
    assert sizes[1] < sizes[0] / 3


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages by advice are Linux's")
def test_huge_pages_are_asked_for_the_whole_pages_inside():
    tensor = huge_pages(torch.empty(8 * HUGE, dtype=torch.uint8))
    begin, flags = 0, ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            begin, end = (int(part, 16) for part in found.groups())
        if line.startswith("VmFlags") and begin <= tensor.data_ptr() + 4 * HUGE < end:
            flags = line
    assert " hg" in flags


def test_a_tensor_smaller_than_a_huge_page_is_left_alone():
    assert torch.equal(huge_pages(torch.ones(3)), torch.ones(3))
