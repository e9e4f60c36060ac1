"""The engine that serves an encoder: vectors, labels, ranks and decisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamfleet_worker.engine.base import EngineInfo
from streamfleet_worker.engine.encoder_exactness import LENGTH_STEP, EncoderExactness
from streamfleet_worker.engine.encoder_runner import EncoderRunner
from streamfleet_worker.engine.micro_batch import WINDOW, MicroBatchEngine
from streamfleet_worker.engine.tasks.encoder_task import EncoderTask

if TYPE_CHECKING:
    from streamfleet_worker.engine.answer_cache import AnswerCache
    from streamfleet_worker.engine.encoder_model import EncoderModel

MAX_BATCH_SIZE = 32
MAX_BATCH_TOKENS = 16_384
TOKEN_CACHE_BYTES = 32 << 20


def encoder_engine(
    encoder: EncoderModel,
    *,
    max_batch_size: int = MAX_BATCH_SIZE,
    max_batch_tokens: int = MAX_BATCH_TOKENS,
    max_delay_s: float = 0.0,
    max_seq_len: int | None = None,
    exact: bool = True,
    preload: bool = True,
    token_cache_bytes: int = TOKEN_CACHE_BYTES,
    answers: AnswerCache | None = None,
) -> MicroBatchEngine:
    """Build it, on the thread that will run it.

    Args:
        encoder: the model.
        max_batch_size: items in one batch.
        max_batch_tokens: tokens in one batch, those that fill its rows up included.
        max_delay_s: how long the oldest item may wait, since its acceptance, for a batch to fill.
        max_seq_len: tokens of one item; never more than the model can read.
        exact: give an item the same bits in any company, where the machine can; batches have rows of one
            length then.
        preload: run a batch of each length before the first request.
        token_cache_bytes: memory for the tokens of texts that may come again.
        answers: results that are kept.
    """
    task = EncoderTask(encoder, max_seq_len=max_seq_len, token_cache_bytes=token_cache_bytes)
    runner = EncoderRunner(encoder)
    found = ""
    if exact:
        found = EncoderExactness.find(
            encoder, runner, max_batch_size=max_batch_size, max_seq_len=task.max_seq_len
        ).name
    if preload:
        runner.preload(
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            max_seq_len=task.max_seq_len,
            length_step=LENGTH_STEP,
        )
    info = EngineInfo(
        model=encoder.name,
        revision=encoder.revision,
        tasks=task.tasks,
        device=encoder.device_name,
        precision=encoder.precision,
        max_batch_size=max_batch_size,
        max_seq_len=task.max_seq_len,
        vocab_size=encoder.vocab_size,
        exact=found,
        window=WINDOW,
        layout=task.layout,
    )
    return MicroBatchEngine(
        task,
        runner,
        info,
        max_delay_s=max_delay_s,
        max_batch_tokens=max_batch_tokens,
        length_step=LENGTH_STEP,
        # On a CPU what fills rows up costs more than smaller batches do; a GPU has rather too little to do.
        uniform=bool(found) or encoder.device.type == "cpu",
        answers=answers,
    )
