"""Recorded decode passes give what plain ones give; the recording itself is played by running them again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from streamfleet_worker.engine.batch import Batch
from streamfleet_worker.engine.graphs import MAX_GRAPHS, DecodeGraphs, bucket
from streamfleet_worker.engine.kv_cache import KVCache, Slot
from streamfleet_worker.engine.model_runner import ModelRunner
from streamfleet_worker.engine.models import LoadedModel


def replayed(compute: Callable[[], torch.Tensor]) -> tuple[Callable[[], None], torch.Tensor]:
    """Stands for the GPU's recorder: a replay runs the computation again, into the same tensor."""
    result = compute().clone()

    def replay() -> None:
        result.copy_(compute())

    return replay, result


def test_rows_go_by_buckets_within_the_arena() -> None:
    assert [bucket(rows, 32) for rows in (1, 2, 3, 4, 5, 8, 9, 17)] == [1, 2, 4, 4, 8, 8, 16, 24]
    assert bucket(5, 6) == 6
    assert bucket(3, 3) == 3


def decoded(cache: KVCache, slots: list[Slot], lengths: list[int], token_id: int) -> tuple[Batch, list[int]]:
    """A pass that feeds one token to each slot; and which slot each place of it belongs to."""
    batch, order = Batch(), []
    for arena in cache.arenas:
        mine = sorted((slot.row, i) for i, slot in enumerate(slots) if slot.arena is arena)
        if mine:
            batch.decode(arena, [token_id + i for _, i in mine], [lengths[i] for _, i in mine])
            order += [i for _, i in mine]
    return batch, order


@torch.inference_mode()
def test_replays_give_the_same_states_and_touch_nobody_elses_rows(llama: LoadedModel) -> None:
    runner = ModelRunner(llama)
    plain, recorded = (
        KVCache(llama.cache_shape, 256, 8, 4096, dtype=llama.dtype, device=llama.device) for _ in range(2)
    )
    graphs = DecodeGraphs(runner._compute, replayed)
    lengths = [3, 10, 70, 5, 90]
    both: list[list[Slot]] = []
    for cache in (plain, recorded):
        slots = [cache.take(length + 8) for length in lengths]
        batch = Batch()
        for slot, length in zip(slots, lengths, strict=True):
            batch.prefill(slot, 0, [7 + length + i for i in range(length)])
        runner.run(batch)
        # One that is still in its prompt lies behind those that decode, where padding would write.
        waiting = cache.take(20)
        batch = Batch()
        batch.prefill(waiting, 0, [500 + i for i in range(20)])
        runner.run(batch)
        for slot in slots:
            cache.start_decoding(slot)
        both.append([*slots, waiting])
    for step in range(4):
        places = [length + step for length in lengths]
        expected = runner.run(decoded(plain, both[0][:5], places, 40 * step)[0])
        found = graphs.run(decoded(recorded, both[1][:5], places, 40 * step)[0])
        assert found is not None
        torch.testing.assert_close(found, expected)
        # Only two shapes of batch: all five in two arenas.
        assert len(graphs) == 1
    for ours, theirs, length in zip(both[1], both[0], [*lengths, 16], strict=True):
        torch.testing.assert_close(
            recorded.read(ours, 0, length + 4).keys, plain.read(theirs, 0, length + 4).keys
        )


@torch.inference_mode()
def test_passes_with_prompts_are_not_recorded_and_old_memory_is_forgotten(llama: LoadedModel) -> None:
    runner = ModelRunner(llama)
    cache = KVCache(llama.cache_shape, 256, 8, 4096, dtype=llama.dtype, device=llama.device)
    graphs = DecodeGraphs(runner._compute, replayed)
    slots = [cache.take(10)]
    batch = Batch()
    batch.prefill(slots[0], 0, [1, 2, 3])
    assert graphs.run(batch) is None
    runner.run(batch)
    cache.start_decoding(slots[0])
    assert graphs.run(decoded(cache, slots, [3], 5)[0]) is not None
    cache.arenas[0].resize(11)
    assert graphs.run(decoded(cache, slots, [4], 5)[0]) is not None
    assert len(graphs) == 1
    assert MAX_GRAPHS > 8


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_the_gpu_records() -> None:
    from streamfleet_worker.engine.graphs import record  # noqa: PLC0415

    x = torch.ones(4, device="cuda")
    replay, y = record(lambda: x * 2)
    x.fill_(3)
    replay()
    assert y.tolist() == [6.0] * 4
