"""Which engine a worker's settings ask for, and how it is built."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from streamfleet_common.errors import InvalidRequest, ModelLoadFailed

if TYPE_CHECKING:
    from streamfleet_worker.engine.base import Engine
    from streamfleet_worker.settings import WorkerSettings

MAX_DELAY_MS = 20.0
SEQUENCES = 8
"""In a batch of generation, if nobody says."""


def builder(settings: WorkerSettings) -> Callable[[], Engine]:
    """What makes the engine that the settings ask for, on the thread that will run it.

    It raises:
        StreamfleetError: the model or the handler cannot be had; the message says what to do.
    """
    if settings.handler is not None:
        return partial(_serve_handler, settings, settings.handler)
    if settings.engine == "scripted":
        return partial(_serve_script, settings)
    return partial(_serve_model, settings)


def _serve_script(settings: WorkerSettings) -> Engine:
    from streamfleet_worker.engine.scripted import ScriptedEngine  # noqa: PLC0415

    return ScriptedEngine(
        max_batch_size=settings.max_batch_size or SEQUENCES,
        max_delay_s=_delay_s(settings),
        max_seq_len=settings.max_seq_len,
    )


def _serve_handler(settings: WorkerSettings, reference: str) -> Engine:
    if settings.engine not in ("auto", "micro_batch"):
        raise InvalidRequest(
            f"a handler runs in micro-batches, not in the engine {settings.engine!r}: leave `engine` out"
        )
    from streamfleet_worker.engine.answer_cache import AnswerCache  # noqa: PLC0415
    from streamfleet_worker.handlers.engine import handler_engine  # noqa: PLC0415
    from streamfleet_worker.handlers.loading import load  # noqa: PLC0415

    return handler_engine(
        load(reference),
        max_batch_size=settings.max_batch_size,
        max_delay_s=None if settings.max_delay_ms is None else settings.max_delay_ms / 1000,
        answers=AnswerCache(settings.answer_cache_mib << 20, settings.answer_cache_ttl_s),
        batch_limit_s=settings.step_limit_s,
    )


def _serve_model(settings: WorkerSettings) -> Engine:
    # Torch takes seconds to import; nobody who serves without it should wait.
    try:
        from streamfleet_worker.engine.devices import set_threads  # noqa: PLC0415
        from streamfleet_worker.engine.encoder_model import kind_of  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ModelLoadFailed(
            f"to serve a model takes the Python package {error.name!r}: "
            "pip install 'streamfleet[transformers]'"
        ) from error
    set_threads(settings.threads)
    engine = settings.engine
    if engine == "auto":
        kind = kind_of(settings.model, aliases=settings.models_file)
        engine = "generation" if kind == "generation" else "micro_batch"
    return _generation(settings) if engine == "generation" else _encoder(settings)


def _generation(settings: WorkerSettings) -> Engine:
    from streamfleet_worker.engine.generation import GenerationEngine  # noqa: PLC0415
    from streamfleet_worker.engine.models import load  # noqa: PLC0415

    engine = GenerationEngine(
        load(settings.model, settings.device, settings.precision, aliases=settings.models_file),
        max_batch_size=settings.max_batch_size or SEQUENCES,
        max_delay_s=_delay_s(settings),
        max_seq_len=settings.max_seq_len,
        max_waiting_tokens=settings.max_waiting_tokens,
        max_waiting_s=settings.max_waiting_ms / 1000,
        max_prefill_tokens=settings.max_prefill_tokens,
        prefill_chunk=settings.prefill_chunk,
        cache_bytes=None if settings.cache_mib is None else settings.cache_mib << 20,
        prefix_cache_bytes=settings.prefix_cache_mib << 20,
        exact=settings.exact,
        cuda_graphs=settings.cuda_graphs,
    )
    engine.warm_up()
    return engine


def _encoder(settings: WorkerSettings) -> Engine:
    from streamfleet_worker.engine.answer_cache import AnswerCache  # noqa: PLC0415
    from streamfleet_worker.engine.encoder_engine import MAX_BATCH_SIZE, encoder_engine  # noqa: PLC0415
    from streamfleet_worker.engine.encoder_model import load_encoder  # noqa: PLC0415

    return encoder_engine(
        load_encoder(settings.model, settings.device, settings.precision, aliases=settings.models_file),
        max_batch_size=settings.max_batch_size or MAX_BATCH_SIZE,
        max_batch_tokens=settings.max_batch_tokens,
        max_delay_s=_delay_s(settings),
        max_seq_len=settings.max_seq_len,
        exact=settings.exact,
        preload=settings.preload,
        token_cache_bytes=settings.tokenization_cache_mib << 20,
        answers=AnswerCache(settings.answer_cache_mib << 20, settings.answer_cache_ttl_s),
    )


def _delay_s(settings: WorkerSettings) -> float:
    return (MAX_DELAY_MS if settings.max_delay_ms is None else settings.max_delay_ms) / 1000
