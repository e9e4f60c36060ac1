"""The keys and values of everything that runs.

They lie in arenas, one for each width: `[layers, rows, kv_heads, width, head_dim]`. A sequence owns one row
of the narrowest arena that holds it, and moves on to a wider one as it grows. So the rows that decode
together are one contiguous block of memory, which the matrix kernels of a CPU read several times faster than
a slice of a wider one; and a short sequence never pays for a long neighbour.

In an arena the rows that decode come first, without holes. A row joins at the end; when one leaves, at most
two rows move, into the holes that are left.
"""

from __future__ import annotations

import contextlib
import math
import mmap
from dataclasses import dataclass
from typing import NamedTuple

import torch

FIRST_ROWS = 4
"""Rows of an arena on a GPU when its first sequence comes; it doubles when they are taken."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """Sizes of one token's keys and values; the same in all layers."""

    layers: int
    heads: int
    key_dim: int
    value_dim: int

    def bytes(self, dtype: torch.dtype) -> int:
        """Of one token, over all layers."""
        return self.layers * self.heads * (self.key_dim + self.value_dim) * dtype.itemsize


def widths(max_len: int) -> tuple[int, ...]:
    """Widths of arenas, up to one that holds `max_len` tokens: 128, 256, then two to each doubling.

    Each arena with rows in it costs a layer as much as some 1,500 more tokens in the others: the short widths
    are few. The limit is no width of its own: a sequence lies equally wide on workers of other limits, so
    that it gets the same numbers.
    """
    found = [128, 256]
    while found[-1] < max_len:
        found += [found[-1] // 2 * 3, found[-1] * 2]
    return tuple(width for place, width in enumerate(found) if not place or found[place - 1] < max_len)


class Values(NamedTuple):
    """Keys and values of a run of tokens, `[layers, kv_heads, tokens, head_dim]`."""

    keys: torch.Tensor
    values: torch.Tensor

    @property
    def bytes(self) -> int:
        return sum(part.numel() * part.element_size() for part in self)


class Slot:
    """One sequence's place: a row of an arena. The cache moves it; whoever holds it looks here."""

    __slots__ = ("arena", "row")

    def __init__(self, arena: Arena, row: int) -> None:
        self.arena = arena
        self.row = row


class Layer(NamedTuple):
    """What the attention of one layer reads of the first rows of an arena, and where it writes."""

    keys: torch.Tensor
    """`[rows x kv_heads, head_dim, width]`."""
    values: torch.Tensor
    """`[rows x kv_heads, width, head_dim]`."""
    key_places: torch.Tensor
    """`[rows x kv_heads x width, head_dim]`, the same memory."""
    value_places: torch.Tensor


class Arena:
    """All rows of one width."""

    def __init__(self, shape: CacheShape, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.width = width
        self._dtype = dtype
        self._device = device
        self.slots: list[Slot] = []
        self.decoding = 0
        """So many rows, from the first on, decode."""
        self.keys, self.values = self._buffers(0)
        self.version = 0
        """Another one whenever the memory is."""
        self._layers: dict[int, list[Layer]] = {}
        self._used = 0  # rows that somebody has had since the memory was new

    @property
    def capacity(self) -> int:
        """Rows there is memory for, besides the `spare` one."""
        return max(0, int(self.keys.shape[1]) - 1)

    @property
    def spare(self) -> int:
        """A row that nobody owns: what is computed for nobody is written there."""
        return self.capacity

    @property
    def bytes(self) -> int:
        return int(self.keys.shape[1]) * self.width * self.shape.bytes(self._dtype)

    def layers(self, rows: int) -> list[Layer]:
        """Views of the first `rows` rows, layer by layer."""
        found = self._layers.get(rows)
        if found is None:
            places = rows * self.shape.heads
            found = []
            for keys, values in zip(self.keys, self.values, strict=True):
                k, v = keys[:rows].flatten(0, 1), values[:rows].flatten(0, 1)
                flat_k, flat_v = k.view(places * self.width, -1), v.view(places * self.width, -1)
                found.append(Layer(k.transpose(1, 2), v, flat_k, flat_v))
            self._layers[rows] = found
        return found

    def resize(self, rows: int) -> None:
        """Have memory for so many rows, at least those in use."""
        old_keys, old_values, used = self.keys, self.values, len(self.slots)
        self.keys, self.values = self._buffers(max(rows, used))
        self.version += 1
        self._layers.clear()
        self._used = used
        self.keys[:, :used] = old_keys[:, :used]
        self.values[:, :used] = old_values[:, :used]

    def add(self, start: int = 0) -> Slot:
        """A row at the end, not decoding, and clean from the token at `start` on."""
        slot = Slot(self, len(self.slots))
        self.slots.append(slot)
        if slot.row < self._used:
            # Places are masked before they are written, but a NaN that somebody left would still be seen.
            self.keys[:, slot.row, :, start:].zero_()
            self.values[:, slot.row, :, start:].zero_()
        self._used = max(self._used, len(self.slots))
        return slot

    def start_decoding(self, slot: Slot) -> None:
        """Bring a row to the end of those that decode."""
        first = self.slots[self.decoding]
        if first is not slot:
            rows, swapped = [slot.row, first.row], [first.row, slot.row]
            self.keys[:, rows] = self.keys[:, swapped]
            self.values[:, rows] = self.values[:, swapped]
            self.slots[slot.row], self.slots[first.row] = first, slot
            slot.row, first.row = first.row, slot.row
        self.decoding += 1

    def remove(self, slot: Slot) -> None:
        """Give a row back; the last ones of both kinds close the holes."""
        hole = slot.row
        if hole < self.decoding:
            self.decoding -= 1
            self._move(self.decoding, hole)
            hole = self.decoding
        self._move(len(self.slots) - 1, hole)
        self.slots.pop()

    def _move(self, source: int, target: int) -> None:
        if source != target:
            self.keys[:, target] = self.keys[:, source]
            self.values[:, target] = self.values[:, source]
            self.slots[target] = self.slots[source]
            self.slots[target].row = target

    def _buffers(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self.shape
        size = (shape.layers, rows + 1 if rows else 0, shape.heads, self.width)
        return (
            _zeros((*size, shape.key_dim), self._dtype, self._device),
            _zeros((*size, shape.value_dim), self._dtype, self._device),
        )


class KVCache:
    """All arenas.

    Args:
        shape: sizes of a token's keys and values.
        max_len: the longest sequence, in tokens.
        max_rows: sequences that run at once.
        max_tokens: tokens in all rows together, each row counted at its full width; beyond it arenas give up
            rows they do not use before another grows.
    """

    def __init__(
        self,
        shape: CacheShape,
        max_len: int,
        max_rows: int,
        max_tokens: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape = shape
        self.max_rows = max_rows
        self.max_tokens = max_tokens
        self.token_bytes = shape.bytes(dtype)
        self._widths = widths(max_len)
        self.arenas = [Arena(shape, width, dtype, device) for width in self._widths]

    @property
    def bytes(self) -> int:
        """Size of all buffers. On a CPU rows take memory as they fill."""
        return sum(arena.bytes for arena in self.arenas)

    def width(self, length: int) -> int:
        """What a row of `length` tokens takes."""
        return self.arenas[self._index(length)].width

    def take(self, length: int) -> Slot:
        """A row that holds `length` tokens."""
        arena = self.arenas[self._index(length)]
        if len(arena.slots) == arena.capacity:
            self._enlarge(arena)
        return arena.add()

    def start_decoding(self, slot: Slot) -> None:
        """Let a row take part in decode passes."""
        slot.arena.start_decoding(slot)

    def grow(self, slot: Slot, length: int) -> None:
        """Make room for `length` tokens in a decoding row, which may move to another arena."""
        old = slot.arena
        if length <= old.width:
            return
        arena = self.arenas[self._index(length)]
        if len(arena.slots) == arena.capacity:
            self._enlarge(arena)
        new = arena.add(old.width)
        arena.keys[:, new.row, :, : old.width] = old.keys[:, slot.row]
        arena.values[:, new.row, :, : old.width] = old.values[:, slot.row]
        old.remove(slot)
        arena.slots[new.row] = slot
        slot.arena, slot.row = arena, new.row
        arena.start_decoding(slot)

    def free(self, slot: Slot) -> None:
        """Give a row back."""
        slot.arena.remove(slot)

    def read(self, slot: Slot, start: int, end: int) -> Values:
        """A copy of the keys and values of some of a row's tokens."""
        arena, row = slot.arena, slot.row
        return Values(arena.keys[:, row, :, start:end].clone(), arena.values[:, row, :, start:end].clone())

    def write(self, slot: Slot, start: int, values: Values) -> None:
        """Put them into a row."""
        end = start + values.keys.shape[2]
        slot.arena.keys[:, slot.row, :, start:end] = values.keys
        slot.arena.values[:, slot.row, :, start:end] = values.values

    def trim(self) -> None:
        """Give up all rows that nobody uses."""
        for arena in self.arenas:
            if arena.capacity > len(arena.slots):
                arena.resize(len(arena.slots))

    def _enlarge(self, arena: Arena) -> None:
        rows = self.max_rows
        if arena.keys.device.type != "cpu":
            # Only a CPU's rows take no memory before they fill. To enlarge an arena is to copy it.
            rows = min(rows, max(FIRST_ROWS, 2 * arena.capacity))
        others = sum(a.capacity * a.width for a in self.arenas if a is not arena)
        if others + rows * arena.width > self.max_tokens:
            self.trim()
            rows = 0
        arena.resize(max(rows, len(arena.slots) + 1))

    def _index(self, length: int) -> int:
        for index, width in enumerate(self._widths):
            if length <= width:
                return index
        raise ValueError(f"{length} tokens are more than a row of {self._widths[-1]} holds")


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros, not garbage: masked places are multiplied by 0, and 0 times NaN is NaN."""
    if device.type != "cpu" or not math.prod(shape):
        return torch.zeros(shape, dtype=dtype, device=device)
    # Private anonymous pages are zero, and take no memory until they are written, while torch writes the
    # zeros. Few rows ever grow to their full width. (Shared ones, which `mmap` makes unless told, take it
    # when read too.)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    pages = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=flags)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # A pass reads all of it: the fewer pages, the better.
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=dtype).view(shape)
