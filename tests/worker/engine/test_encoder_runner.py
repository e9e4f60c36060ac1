"""The runner of encoders: buffers, filled-up rows, rows without numbers, and shapes made ready."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from encoder_driver import encoder, run
from engine_driver import Clock, Driver
from streamfleet_common.errors import GenerationFailed
from streamfleet_common.one_shot import EmbedRequest
from streamfleet_worker.engine.base import EngineInfo
from streamfleet_worker.engine.encoder_input import EncoderInput, Row
from streamfleet_worker.engine.encoder_model import EncoderModel
from streamfleet_worker.engine.encoder_runner import LOGITS, EncoderRunner
from streamfleet_worker.engine.faults import is_out_of_memory
from streamfleet_worker.engine.item import Done, ItemBatch, ItemSpec
from streamfleet_worker.engine.micro_batch import MicroBatchEngine
from streamfleet_worker.engine.tasks.encoder_task import EncoderTask
from tiny_encoder import CLS, MAX_POSITIONS, SENTENCE_LENGTH, SEP, VOCAB_SIZE

POISON = 777
"""A token that a spoiled model stumbles over."""


def row(seed: int, length: int, poison: bool = False) -> Row:
    ids = torch.randint(5, POISON, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    ids[0], ids[-1] = CLS, SEP
    if poison:
        ids[length // 2] = POISON
    return ids, [0] * length


def items(*rows: Row, group: str = "mean") -> list[ItemSpec]:
    return [EncoderInput.of(*one).spec(group) for one in rows]


def spoiled(spoil: Callable[[torch.Tensor, Any], Any]) -> EncoderModel:
    """An encoder of which `spoil(input_ids, output)` sees every batch."""
    loaded = encoder("bert", pack=False)  # packed weights cannot be copied
    model = copy.deepcopy(loaded.model)
    model.register_forward_hook(
        lambda _module, _args, inputs, output: spoil(inputs["input_ids"], output), with_kwargs=True
    )
    return replace(loaded, model=model)


@contextmanager
def shapes(loaded: EncoderModel) -> Iterator[list[tuple[int, ...]]]:
    """Of every batch that the model is given."""
    seen: list[tuple[int, ...]] = []
    handle = loaded.model.register_forward_hook(
        lambda _module, _args, inputs, _output: seen.append(tuple(inputs["input_ids"].shape)),
        with_kwargs=True,
    )
    yield seen
    handle.remove()


# --- numbers


@pytest.mark.parametrize("group", ["cls", "mean", "last"])
def test_what_fills_rows_up_is_not_seen(group: str) -> None:
    runner = EncoderRunner(encoder("bert"))
    short, long = row(1, 7), row(2, 40)
    together = runner.run([short, long, short], group, 48)
    assert together.dtype == torch.float32
    alone = runner.run([short], group, 7)
    torch.testing.assert_close(together[0], alone[0], rtol=1e-4, atol=1e-5)
    assert torch.equal(together[0], together[2])


def test_buffers_are_used_again_and_keep_nothing_of_the_last_batch() -> None:
    runner = EncoderRunner(encoder("classifier"))
    short = [([CLS, 20 + i, SEP], [0, 1, 1]) for i in range(3)]
    fresh = EncoderRunner(encoder("classifier")).run(short, LOGITS, 8)
    runner.run([([CLS, *[900] * 98, SEP], [1] * 100)] * 30, LOGITS, 104)
    taken = runner.memory["buffers"]
    assert taken >= 3 * 30 * 104 * 8
    assert torch.equal(runner.run(short, LOGITS, 8), fresh)
    assert runner.memory["buffers"] == taken
    assert runner.memory["peak"] > runner.memory["weights"] == encoder("classifier").weights_bytes
    runner.close()
    assert runner.memory["buffers"] == 0


def test_batches_are_filled_up_to_whole_granules() -> None:
    loaded = encoder("bert")
    runner = EncoderRunner(loaded, granule=4)
    rows = [row(seed, 9) for seed in range(5)]
    with shapes(loaded) as seen:
        results = runner.run(rows, "mean", 16)
    assert seen == [(8, 16)]
    assert results.shape == (5, 64)
    torch.testing.assert_close(results, EncoderRunner(loaded).run(rows, "mean", 16), rtol=1e-4, atol=1e-5)


def test_no_row_is_longer_than_the_model_can_read() -> None:
    loaded = encoder("sentence")
    with shapes(loaded) as seen:
        EncoderRunner(loaded).run([row(1, SENTENCE_LENGTH)], "cls", 64)
    assert seen == [(1, SENTENCE_LENGTH)]
    full = EncoderRunner(encoder("bert")).run([row(1, MAX_POSITIONS)], "cls", MAX_POSITIONS + 8)
    assert full.isfinite().all()


def test_a_result_does_not_hold_its_batch() -> None:
    outcomes = run(EncoderRunner(encoder("bert")), items(*(row(seed, 9) for seed in range(8))))
    for outcome in outcomes:
        assert isinstance(outcome, Done)
        assert outcome.value.untyped_storage().nbytes() == outcome.value.nbytes == 64 * 4


# --- faults


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_row_without_numbers_fails_alone(bad: float) -> None:
    def spoil(ids: torch.Tensor, output: Any) -> Any:
        hit = (ids == POISON).any(1)
        output.last_hidden_state = output.last_hidden_state.masked_fill(hit[:, None, None], bad)
        return output

    rows = [row(seed, 9, poison=seed == 3) for seed in range(8)]
    outcomes = run(EncoderRunner(spoiled(spoil)), items(*rows))
    sound = run(EncoderRunner(encoder("bert", pack=False)), items(*rows))
    for number, (outcome, expected) in enumerate(zip(outcomes, sound, strict=True)):
        if number == 3:
            assert isinstance(outcome, GenerationFailed)
            assert "no usable numbers" in outcome.message
        else:
            assert isinstance(outcome, Done)
            assert isinstance(expected, Done)
            assert torch.equal(outcome.value, expected.value)


def test_numbers_where_a_row_is_filled_up_do_no_harm() -> None:
    def spoil(ids: torch.Tensor, output: Any) -> Any:
        behind = torch.arange(ids.shape[1]) >= 7
        output.last_hidden_state = output.last_hidden_state.masked_fill(behind[None, :, None], float("nan"))
        return output

    for group in ("cls", "mean", "last"):
        [outcome] = run(EncoderRunner(spoiled(spoil)), items(row(1, 7), group=group), 16)
        assert isinstance(outcome, Done)


def test_what_the_model_raises_comes_out_of_the_batch_as_it_is() -> None:
    def spoil(ids: torch.Tensor, output: Any) -> Any:
        if ids.numel() > 64:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
        return output

    runner = EncoderRunner(spoiled(spoil))
    batch = runner.launch(ItemBatch([row(1, 20)] * 4, "mean", 20))
    with pytest.raises(RuntimeError) as found:
        batch.advance()
    assert is_out_of_memory(found.value)
    assert len(runner.launch(ItemBatch([row(1, 20)] * 3, "mean", 20)).advance().outcomes) == 3


def test_a_model_is_broken_when_it_fails_on_anything() -> None:
    def on_poison(ids: torch.Tensor, output: Any) -> Any:
        if (ids == POISON).any():
            raise RuntimeError("no")
        return output

    def always(ids: torch.Tensor, output: Any) -> Any:
        raise RuntimeError("device lost")

    def no_numbers(ids: torch.Tensor, output: Any) -> Any:
        output.last_hidden_state = output.last_hidden_state * float("nan")
        return output

    broken = [EncoderRunner(spoiled(spoil)).is_broken() for spoil in (on_poison, always, no_numbers)]
    assert broken == [False, True, True]
    assert not EncoderRunner(encoder("classifier")).is_broken()


def test_one_bad_text_of_32_fails_alone_in_the_engine() -> None:
    loaded = encoder("bert")
    [poison] = loaded.tokenizer.encode_piece("heap")

    def spoil(ids: torch.Tensor, output: Any) -> Any:
        if (ids == poison).any():
            raise ValueError("it stumbles")
        return output

    task = EncoderTask(loaded)
    info = EngineInfo("bert", "1", task.tasks, "cpu", "float32", 32, task.max_seq_len, VOCAB_SIZE)
    clock = Clock()
    engine = MicroBatchEngine(task, EncoderRunner(spoiled(spoil)), info, max_delay_s=0.0, clock=clock)
    driver = Driver(engine, clock)
    texts = [f"a heap {number}" if number == 19 else f"a tree {number}" for number in range(32)]
    for number, text in enumerate(texts):
        driver.add_prepared(str(number), engine.prepare(EmbedRequest(texts=(text,))))
    driver.run()
    sound = EncoderRunner(loaded)
    for number, text in enumerate(texts):
        end = driver.heard[str(number)].finished
        if number == 19:
            assert end.state == "failed"
            assert end.error is not None
            assert "it stumbles" in end.error.message
            continue
        job = task.prepare(EmbedRequest(texts=(text,)))
        [outcome] = run(sound, list(job.items))
        assert isinstance(outcome, Done)
        [expected] = job.answer([outcome.value])["embeddings"]
        assert list(end.embeddings[0].vector) == pytest.approx(list(expected.vector), abs=1e-5)


# --- shapes made ready


def test_lengths_are_made_ready_as_long_as_there_is_time() -> None:
    loaded = encoder("sentence")
    limits: dict[str, Any] = {
        "max_batch_size": 8,
        "max_batch_tokens": 1000,
        "max_seq_len": 40,
        "length_step": 16,
    }
    with shapes(loaded) as seen:
        assert EncoderRunner(loaded).preload(**limits) == 3
    assert seen == [(1, 16), (1, 32), (1, 48)]
    with shapes(loaded) as seen:
        assert EncoderRunner(loaded).preload(**{**limits, "max_batch_tokens": 32}) == 2
    ticks = iter([0.0, 0.0, 6.0, 12.0])
    with shapes(loaded) as seen:
        made = EncoderRunner(loaded).preload(**limits, limit_s=10.0, clock=lambda: next(ticks))
    assert made == len(seen) == 2
