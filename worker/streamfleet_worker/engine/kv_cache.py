"""The keys and values of everything that runs, in slots.

One buffer per layer and kind is laid out when the engine starts: `[slots, kv_heads, max_len, head_dim]`.
A sequence owns a slot for life, so joining and leaving copy nothing, but for one row that may move into a
hole. The model sees the cache through transformers' `Cache` face; what an `update` does depends on the
`Window` that the model runner opens before each forward pass.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


@dataclass(frozen=True, slots=True)
class LayerShape:
    """Sizes of one layer's keys and values; they differ in some attention variants."""

    heads: int
    key_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class PrefillWindow:
    """Whole prompts from their first token on: row i of the input goes to slot `slots[i]`."""

    slots: torch.Tensor
    length: int


@dataclass(frozen=True, slots=True)
class ChunkWindow:
    """The next tokens of one prompt, `start` of which are in `slot` already."""

    slot: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class DecodeWindow:
    """One token for each of `rows` neighbouring slots from `first` on.

    `positions` is where each goes, `[rows]`; `span` is the number of places that the attention looks at.
    """

    first: int
    rows: int
    positions: torch.Tensor
    row_index: torch.Tensor
    span: int


Window = PrefillWindow | ChunkWindow | DecodeWindow


class SlotLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # its __init_subclass__
    """Keys and values of one layer."""

    is_sliding = False

    def __init__(
        self,
        shape: LayerShape,
        slots: int,
        max_len: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.key_slots = _zeros((slots, shape.heads, max_len, shape.key_dim), dtype, device)
        self.value_slots = _zeros((slots, shape.heads, max_len, shape.value_dim), dtype, device)
        self.is_initialized = True
        self.window: Window | None = None

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is left to do: the buffers are there from the start."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new keys and values, `[rows, kv_heads, tokens, head_dim]`; give what attention reads."""
        match self.window:
            case PrefillWindow(slots=slots, length=length):
                self.key_slots[:, :, :length].index_copy_(0, slots, key_states)
                self.value_slots[:, :, :length].index_copy_(0, slots, value_states)
                # The prompt starts here, so it has nothing but itself to look at.
                return key_states, value_states
            case ChunkWindow(slot=slot, start=start, length=length):
                end = start + length
                keys, values = self.key_slots[slot], self.value_slots[slot]
                keys[:, start:end] = key_states[0]
                values[:, start:end] = value_states[0]
                return keys[None, :, :end], values[None, :, :end]
            case DecodeWindow(first=first, rows=rows, positions=positions, span=span) as window:
                keys = self.key_slots[first : first + rows]
                values = self.value_slots[first : first + rows]
                keys[window.row_index, :, positions] = key_states[:, :, 0]
                values[window.row_index, :, positions] = value_states[:, :, 0]
                return keys[:, :, :span], values[:, :, :span]
            case _:
                raise RuntimeError("a forward pass ran without a window into the cache")

    def get_seq_length(self) -> int:
        """Tokens before this pass, as far as the model's own mask is concerned."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the model's own mask; asked for whole prompts only."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Places in a slot."""
        return int(self.key_slots.shape[2])


class SlotCache(Cache):
    """All layers. `slots` is the number of rows, padding included; lengths are in tokens."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        slots: int,
        max_len: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.slot_layers = [SlotLayer(s, slots, max_len, dtype=dtype, device=device) for s in shapes]
        super().__init__(layers=[*self.slot_layers])
        self.slots = slots
        self.max_len = max_len

    @property
    def bytes(self) -> int:
        """Size of all buffers."""
        return sum(
            t.numel() * t.element_size()
            for layer in self.slot_layers
            for t in (layer.key_slots, layer.value_slots)
        )

    def open(self, window: Window | None) -> None:
        """Say what the next forward pass reads and writes."""
        for layer in self.slot_layers:
            layer.window = window

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        for layer in self.slot_layers:
            layer.key_slots[target, :, :length] = layer.key_slots[source, :, :length]
            layer.value_slots[target, :, :length] = layer.value_slots[source, :, :length]

    def clear(self, slot: int) -> None:
        """Forget what a slot holds; a NaN in it would spoil its next owner."""
        for layer in self.slot_layers:
            layer.key_slots[slot].zero_()
            layer.value_slots[slot].zero_()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not garbage: masked places are multiplied by 0, and 0 times NaN is NaN."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private anonymous pages are zero, and take no memory until they are written, while torch writes the
    # zeros. Few slots ever grow to their full length. (Shared ones, which `mmap` makes unless told, take it
    # when read too, as idle rows are.)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # Huge pages span several rows: the first batch would touch them all.
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_NOHUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
