"""The slots hold what was written, and take memory for that alone."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from streamfleet_worker.engine.kv_cache import ChunkWindow, LayerShape, SlotCache


def resident_bytes() -> int:
    """Memory this process really takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def make(slots: int, max_len: int) -> SlotCache:
    shape = LayerShape(heads=2, key_dim=64, value_dim=64)
    return SlotCache([shape], slots, max_len, dtype=torch.bfloat16, device=torch.device("cpu"))


def test_a_slot_begins_as_zeros_and_keeps_what_is_written() -> None:
    cache = make(slots=4, max_len=8)
    layer = cache.slot_layers[0]
    assert layer.key_slots.shape == layer.value_slots.shape == (4, 2, 8, 64)
    assert not layer.key_slots.any()
    cache.open(ChunkWindow(slot=1, start=2, length=3))
    keys, values = torch.full((1, 2, 3, 64), 5.0), torch.full((1, 2, 3, 64), 7.0)
    seen_keys, seen_values = layer.update(keys.bfloat16(), values.bfloat16())
    assert seen_keys.shape == seen_values.shape == (1, 2, 5, 64)
    assert (layer.key_slots[1, :, 2:5] == 5).all()
    assert (layer.value_slots[1, :, 2:5] == 7).all()
    assert layer.key_slots.count_nonzero() == 2 * 3 * 64


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_slots_that_nobody_filled_take_no_memory() -> None:
    before = resident_bytes()
    cache = make(slots=64, max_len=32_768)
    assert cache.bytes == 2 * 64 * 2 * 32_768 * 64 * 2  # 1 GiB
    # One token in every slot, as the first batch writes: a page or two for each head.
    for slot in range(64):
        cache.open(ChunkWindow(slot=slot, start=0, length=1))
        ones = torch.ones(1, 2, 1, 64, dtype=torch.bfloat16)
        cache.slot_layers[0].update(ones, ones)
    assert resident_bytes() - before < 64 * 1024 * 1024
    # A long row makes the pass look as far into the idle ones beside it.
    assert cache.slot_layers[0].key_slots[:8].isfinite().all()
    assert resident_bytes() - before < 64 * 1024 * 1024
