"""Attention over ragged passes against full softmax attention, one sequence at a time, in float64."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from streamfleet_worker.engine import attention
from streamfleet_worker.engine.attention import attend
from streamfleet_worker.engine.batch import Batch
from streamfleet_worker.engine.kv_cache import CacheShape, KVCache, Slot

LAYER = SimpleNamespace(layer_idx=1)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.03}


@dataclass(frozen=True)
class Kind:
    """Shape and rules of an attention layer."""

    heads: int = 4
    kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    window: int | None = None
    softcap: float | None = None
    scaling: float | None = None
    dtype: torch.dtype = torch.float32

    @property
    def options(self) -> dict[str, Any]:
        return {"sliding_window": self.window, "softcap": self.softcap, "scaling": self.scaling}


KINDS = [
    Kind(),
    Kind(kv_heads=4),
    Kind(kv_heads=1),
    Kind(heads=6, kv_heads=2, key_dim=24, value_dim=8),
    Kind(window=5),
    Kind(window=64, kv_heads=4),
    Kind(window=70, softcap=0.4),
    Kind(softcap=1.5, kv_heads=1, value_dim=40),
    Kind(scaling=0.7),
    Kind(dtype=torch.bfloat16),
    Kind(dtype=torch.bfloat16, window=33, softcap=2.0, value_dim=32),
]


class Story:
    """One sequence: queries, keys and values of all its tokens, and what came of them."""

    def __init__(self, kind: Kind, length: int, prompt: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def draw(heads: int, dim: int) -> torch.Tensor:
            return torch.randn(length, heads, dim, generator=generator).to(kind.dtype)

        self.kind, self.length, self.prompt = kind, length, prompt
        self.q = draw(kind.heads, kind.key_dim)
        self.k, self.v = draw(kind.kv_heads, kind.key_dim), draw(kind.kv_heads, kind.value_dim)
        self.outputs: list[torch.Tensor] = []
        self.slot: Any = None

    @property
    def done(self) -> int:
        return len(self.outputs)

    @property
    def decodes(self) -> bool:
        return self.done >= self.prompt

    def expected(self) -> torch.Tensor:
        """`[tokens, heads, value_dim]`."""
        kind, shared = self.kind, self.kind.heads // self.kind.kv_heads
        q = self.q.double()
        k, v = (part.double().repeat_interleave(shared, dim=1) for part in (self.k, self.v))
        scale = 1 / math.sqrt(kind.key_dim) if kind.scaling is None else kind.scaling
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if kind.softcap is not None:
            scores = kind.softcap * torch.tanh(scores / kind.softcap)
        for place in range(self.length):
            scores[:, place, place + 1 :] = -math.inf
            if kind.window is not None:
                scores[:, place, : max(0, place - kind.window + 1)] = -math.inf
        return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), v)


def cache_for(kind: Kind, rows: int = 8) -> KVCache:
    shape = CacheShape(layers=2, heads=kind.kv_heads, key_dim=kind.key_dim, value_dim=kind.value_dim)
    cache = KVCache(shape, 512, rows, 512 * rows * 4, dtype=kind.dtype, device=torch.device("cpu"))
    return spoiled(cache, rows)


def spoiled(cache: KVCache, rows: int) -> KVCache:
    """Rows that others had before: nothing of theirs may be seen."""
    slots = [cache.take(length) for length in (64, 128, 192, 256) for _ in range(rows)]
    for slot in slots:
        slot.arena.keys[:, slot.row] = torch.nan
        slot.arena.values[:, slot.row] = torch.nan
    for slot in slots:
        cache.free(slot)
    return cache


@torch.inference_mode()
def run_pass(
    kind: Kind, cache: KVCache, decodes: list[Story], chunks: list[tuple[Story, int]], *, whole: bool = True
) -> None:
    """One pass: the next token of each of `decodes`, and chunks up to some place of prompts."""
    batch, order = Batch(), list[tuple[Story, int, int]]()
    for arena in cache.arenas:
        mine = sorted((s for s in decodes if s.slot.arena is arena), key=lambda s: s.slot.row)
        if mine:
            rows = None if whole and len(mine) == arena.decoding else [s.slot.row for s in mine]
            batch.decode(arena, [0] * len(mine), [s.done for s in mine], rows)
            order += [(s, s.done, s.done + 1) for s in mine]
    for story, end in chunks:
        batch.prefill(story.slot, story.done, [0] * (end - story.done))
        order.append((story, story.done, end))
    parts = [torch.cat([getattr(s, name)[a:b] for s, a, b in order]) for name in "qkv"]
    padding = 3  # as passes are padded to a multiple
    q, k, v = (torch.cat([part, part.new_ones(padding, *part.shape[1:])]) for part in parts)
    query, keys, values = (part.transpose(0, 1)[None] for part in (q, k, v))
    output, weights = attend(LAYER, query, keys, values, None, batch=batch, **kind.options)
    assert weights is None
    place = 0
    for story, start, end in order:
        story.outputs += output[0, place : place + end - start]
        place += end - start


def tell(kind: Kind, stories: list[Story], seed: int, *, longest_chunk: int = 80) -> None:
    """Run sequences side by side: prompts cut at random, joining at random, tokens one by one."""
    source = random.Random(seed)
    cache = cache_for(kind)
    waiting, running = list(stories), list[Story]()
    while waiting or running:
        for _ in range(min(len(waiting), source.choice([0, 1, 1, 3]))):
            story = waiting.pop()
            story.slot = cache.take(story.prompt + 1)
            running.append(story)
        decodes = [s for s in running if s.decodes]
        for story in decodes:
            cache.grow(story.slot, story.done + 1)
        if len(decodes) > 1 and source.random() < 0.3:
            # As after a pass that failed: some of the rows only.
            decodes = source.sample(decodes, source.randint(1, len(decodes) - 1))
        chunks = [
            (s, min(s.prompt, s.done + source.randint(1, longest_chunk)))
            for s in running
            if not s.decodes and source.random() < 0.7
        ]
        if decodes or chunks:
            run_pass(kind, cache, decodes, chunks)
        for story, _ in chunks:
            if story.decodes:
                cache.start_decoding(story.slot)
        for story in [s for s in running if s.done == s.length]:
            cache.free(story.slot)
            running.remove(story)


def stories(kind: Kind, seed: int) -> list[Story]:
    lengths = [(1, 3), (2, 2), (63, 70), (64, 66), (65, 66), (127, 131), (150, 200)]
    return [Story(kind, length, prompt, seed + i) for i, (prompt, length) in enumerate(lengths)]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_every_token_looks_at_its_own_sequence_and_at_all_it_may(kind: Kind) -> None:
    told = stories(kind, seed=1)
    tell(kind, told, seed=2)
    for story in told:
        difference = (torch.stack(story.outputs).double() - story.expected()).abs().max()
        assert float(difference) < TOLERANCE[kind.dtype] * float(story.v.abs().max()), story.length


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40])
def test_neither_cuts_nor_company_change_a_bit(dtype: torch.dtype, window: int | None) -> None:
    kind = Kind(dtype=dtype, window=window)
    expected = stories(kind, seed=1)
    for story in expected:
        tell(kind, [story], seed=0, longest_chunk=1000)
    for seed in range(3):
        told = stories(kind, seed=1)
        tell(kind, told, seed=seed, longest_chunk=[7, 33, 80][seed])
        for ours, alone in zip(told, expected, strict=True):
            assert torch.equal(torch.stack(ours.outputs), torch.stack(alone.outputs)), ours.length


@pytest.mark.parametrize("kind", [k for k in KINDS if k.softcap is None], ids=str)
@pytest.mark.parametrize(("start", "end"), [(0, 1), (0, 100), (37, 38), (64, 150)])
@torch.inference_mode()
def test_the_fused_kernel_gives_the_same(kind: Kind, start: int, end: int) -> None:
    story = Story(kind, end, end, seed=5)
    cache = cache_for(kind)
    story.slot = slot = cache.take(end)
    run_pass(kind, cache, [], [(story, end)])
    assert isinstance(slot, Slot)
    batch = Batch()
    batch.prefill(slot, start, [0] * (end - start))
    keys, values = slot.arena.keys[1, slot.row], slot.arena.values[1, slot.row]
    queries = story.q[start:end]
    scale = kind.key_dim**-0.5 if kind.scaling is None else kind.scaling
    nothing = torch.empty(0)
    call = attention._Call(batch, 1, queries, nothing, nothing, nothing, scale, kind.window, None)
    for _ in range(2):  # the second time with the mask of the first
        found = attention._fused(call, batch.segments[0], queries, keys[:, :end], values[:, :end])
        difference = float((found.double() - story.expected()[start:]).abs().max())
        assert difference < TOLERANCE[kind.dtype] * float(story.v.abs().max())


@pytest.mark.parametrize("name", attention.UNKNOWN)
def test_what_attention_cannot_do_is_refused_by_name(name: str) -> None:
    batch = Batch()
    batch.prefill(cache_for(Kind()).take(5), 0, [1, 2])
    query, keys, values = (torch.zeros(1, heads, 2, 16) for heads in (4, 2, 2))
    more: dict[str, Any] = {name: torch.zeros(4)}
    with pytest.raises(NotImplementedError, match=name):
        attend(LAYER, query, keys, values, None, batch=batch, **more)
