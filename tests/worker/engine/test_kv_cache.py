"""Whatever sequences come, grow and go: each row holds what was written to it, in the order passes need."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamfleet_worker.engine.kv_cache import CacheShape, KVCache, Slot, Values, widths

CPU = torch.device("cpu")
SHAPE = CacheShape(layers=2, heads=2, key_dim=3, value_dim=2)
MAX_LEN = 500
# Often such that several rows are equally wide.
LENGTHS = st.sampled_from([3, 90, 128, 129]) | st.integers(1, MAX_LEN)


def numbers(length: int, seed: int) -> Values:
    """Keys and values of some tokens, told apart from all others."""
    generator = torch.Generator().manual_seed(seed)
    size = (SHAPE.layers, SHAPE.heads, length)
    return Values(
        torch.randn(*size, SHAPE.key_dim, generator=generator),
        torch.randn(*size, SHAPE.value_dim, generator=generator),
    )


def same(ours: Values, theirs: Values) -> bool:
    return torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)


@dataclass(eq=False)
class Kept:
    """A row, and what it must hold."""

    slot: Slot
    length: int
    content: Values
    decodes: bool = False

    def put(self, start: int, values: Values) -> None:
        end = start + values.keys.shape[2]
        self.content.keys[:, :, start:end] = values.keys
        self.content.values[:, :, start:end] = values.values


class CacheMachine(RuleBasedStateMachine):
    """The cache beside a plain list of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Kept] = []
        self.peak = 0

    @initialize(rows=st.integers(2, 6), tokens=st.sampled_from([64, 512, 4096]))
    def begin(self, rows: int, tokens: int) -> None:
        self.rows = rows
        self.cache = KVCache(SHAPE, MAX_LEN, rows, tokens, dtype=torch.float32, device=CPU)

    @property
    def is_full(self) -> bool:
        return len(self.kept) >= self.rows

    @precondition(lambda self: not self.is_full)
    @rule(length=LENGTHS, seed=st.integers(0, 999))
    def take(self, length: int, seed: int) -> None:
        slot = self.cache.take(length)
        assert slot.arena.width == self.cache.width(length)
        values = numbers(length, seed)
        self.cache.write(slot, 0, values)
        self.kept.append(Kept(slot, length, numbers(length, seed)))
        self._count()

    @precondition(lambda self: any(not row.decodes for row in self.kept))
    @rule(data=st.data())
    def start_decoding(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from([row for row in self.kept if not row.decodes]))
        self.cache.start_decoding(row.slot)
        row.decodes = True

    @precondition(lambda self: any(row.decodes for row in self.kept))
    @rule(data=st.data(), seed=st.integers(0, 999))
    def grow(self, data: st.DataObject, seed: int) -> None:
        row = data.draw(st.sampled_from([row for row in self.kept if row.decodes]))
        length = data.draw(st.integers(row.length, MAX_LEN))
        old_width = row.slot.arena.width
        self.cache.grow(row.slot, length)
        assert row.slot.arena.width >= length
        # On its way it has both places.
        self._count(old_width)
        more = numbers(length - row.length, seed)
        self.cache.write(row.slot, row.length, more)
        content = [torch.cat(parts, dim=2) for parts in zip(row.content, more, strict=True)]
        row.length, row.content = length, Values(*content)

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), seed=st.integers(0, 999))
    def overwrite(self, data: st.DataObject, seed: int) -> None:
        row = data.draw(st.sampled_from(self.kept))
        start = data.draw(st.integers(0, row.length - 1))
        values = numbers(data.draw(st.integers(1, row.length - start)), seed)
        self.cache.write(row.slot, start, values)
        row.put(start, values)

    @precondition(lambda self: any(row.decodes for row in self.kept))
    @rule(data=st.data(), seed=st.integers(0, 999))
    def write_through_views(self, data: st.DataObject, seed: int) -> None:
        """As attention does: one token for each of the first rows of an arena."""
        arena = data.draw(st.sampled_from([row for row in self.kept if row.decodes])).slot.arena
        count = data.draw(st.integers(1, arena.decoding))
        mine = sorted((row for row in self.kept if row.slot.arena is arena), key=lambda row: row.slot.row)
        for layer, views in enumerate(arena.layers(count)):
            assert views.keys.shape == (count * SHAPE.heads, SHAPE.key_dim, arena.width)
            assert views.values.shape == (count * SHAPE.heads, arena.width, SHAPE.value_dim)
            for number, row in enumerate(mine[:count]):
                place, new = row.length - 1, numbers(1, seed + number)
                for head in range(SHAPE.heads):
                    pair = number * SHAPE.heads + head
                    views.key_places[pair * arena.width + place] = new.keys[layer, head, 0]
                    views.value_places[pair * arena.width + place] = new.values[layer, head, 0]
                    assert torch.equal(views.keys[pair, :, place], new.keys[layer, head, 0])
                    assert torch.equal(views.values[pair, place], new.values[layer, head, 0])
        for number, row in enumerate(mine[:count]):
            row.put(row.length - 1, numbers(1, seed + number))

    @precondition(lambda self: self.kept)
    @rule(data=st.data(), spoil=st.booleans())
    def free(self, data: st.DataObject, spoil: bool) -> None:
        row = data.draw(st.sampled_from(self.kept))
        if spoil:
            row.slot.arena.keys[:, row.slot.row] = torch.nan
            row.slot.arena.values[:, row.slot.row] = torch.nan
        self.cache.free(row.slot)
        self.kept.remove(row)

    @rule()
    def trim(self) -> None:
        self.cache.trim()
        assert all(arena.capacity == len(arena.slots) for arena in self.cache.arenas)

    def _count(self, leaving: int = 0) -> None:
        self.peak = max(self.peak, leaving + sum(row.slot.arena.width for row in self.kept))

    @invariant()
    def every_row_holds_its_own(self) -> None:
        for row in self.kept:
            assert same(self.cache.read(row.slot, 0, row.length), row.content)
            rest = self.cache.read(row.slot, row.length, row.slot.arena.width)
            assert not any(part.any() for part in rest), "somebody's before"

    @invariant()
    def rows_have_no_holes_and_those_that_decode_come_first(self) -> None:
        for arena in getattr(self, "cache", _Nothing).arenas:
            mine = {row.slot.row: row for row in self.kept if row.slot.arena is arena}
            assert sorted(mine) == list(range(len(arena.slots)))
            assert [mine[place].decodes for place in sorted(mine)] == [
                place < arena.decoding for place in sorted(mine)
            ]
            assert all(arena.slots[place] is row.slot for place, row in mine.items())
            assert arena.capacity >= len(mine)

    @invariant()
    def memory_keeps_its_bound(self) -> None:
        # Rows in use are never refused, but beyond the bound none is kept that nobody uses.
        arenas = getattr(self, "cache", _Nothing).arenas
        held = sum(arena.capacity * arena.width for arena in arenas)
        assert not arenas or held <= max(self.cache.max_tokens, self.peak)


class _Nothing:
    arenas: tuple[Any, ...] = ()


TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        (1, (128,)),
        (128, (128,)),
        (129, (128, 256)),
        (512, (128, 256, 384, 512)),
        (600, (128, 256, 384, 512, 768)),
        (1024, (128, 256, 384, 512, 768, 1024)),
    ],
)
def test_widths(longest: int, expected: tuple[int, ...]) -> None:
    assert widths(longest) == expected


def test_what_is_too_long_for_any_row_is_refused() -> None:
    cache = KVCache(SHAPE, 100, 2, 1000, dtype=torch.float32, device=CPU)
    assert cache.take(128).arena.width == 128
    with pytest.raises(ValueError, match="129 tokens are more than a row of 128 holds"):
        cache.take(129)


def test_what_was_read_does_not_change_with_the_row() -> None:
    cache = KVCache(SHAPE, 100, 2, 1000, dtype=torch.float32, device=CPU)
    slot = cache.take(10)
    cache.write(slot, 0, numbers(10, 1))
    read = cache.read(slot, 2, 6)
    cache.write(slot, 0, numbers(10, 2))
    assert torch.equal(read.keys, numbers(10, 1).keys[:, :, 2:6])
    assert read.bytes == 2 * 2 * 4 * (3 + 2) * 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_rows_that_nobody_filled_take_no_memory() -> None:
    shape = CacheShape(layers=1, heads=2, key_dim=64, value_dim=64)
    cache = KVCache(shape, 32_768, 64, 64 * 32_768, dtype=torch.bfloat16, device=CPU)
    before = resident_bytes()
    slot = cache.take(32_768)
    assert cache.bytes >= 64 * 32_768 * 2 * 2 * 64 * 2  # 1 GiB
    cache.write(slot, 0, Values(*(torch.ones(1, 2, 32_768, 64, dtype=torch.bfloat16) for _ in range(2))))
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    """Memory this process really takes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_on_a_gpu_an_arena_doubles_as_it_fills_and_stays_within_bounds() -> None:
    # A device without memory counts like one with.
    meta = torch.device("meta")
    cache = KVCache(SHAPE, 512, 20, 5 * 128 + 24 * 256, dtype=torch.float32, device=meta)
    assert cache.bytes == 0
    capacities = []
    for _ in range(20):
        slot = cache.take(200)
        capacities.append(slot.arena.capacity)
    assert capacities == [*[4] * 4, *[8] * 4, *[16] * 8, *[20] * 4]
    for _ in range(4):
        cache.take(100)
    # Four short rows fit beside the twenty; for a fifth nothing would be given up that is in use.
    assert [arena.capacity for arena in cache.arenas if arena.capacity] == [4, 20]
