"""The picture of `streamfleet top` as JSON, for scripts. Its fields are stable: docs/top.md lists them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from streamfleet_producer.cli.top_reading import Reading
from streamfleet_producer.cli.top_rows import Percentiles, QueueRow, WorkerRow

VERSION = 1


def document(
    redis: str, reading: Reading, queues: Sequence[QueueRow], workers: Sequence[WorkerRow]
) -> dict[str, Any]:
    """The whole picture. `redis` is the server's URL without its passwords."""
    at = datetime.fromtimestamp(reading.at_ms / 1000, UTC)
    return {
        "version": VERSION,
        "at": at.isoformat(timespec="milliseconds"),
        "redis": redis,
        "unread_queues": reading.unread,
        "queues": [_queue(row) for row in queues],
        "workers": [_worker(row) for row in workers],
    }


def _queue(row: QueueRow) -> dict[str, Any]:
    figures = row.figures
    return {
        "queue": row.queue,
        "models": list(row.models),
        "is_paused": figures.is_paused,
        "is_unserved": row.is_unserved,
        "queued": figures.queued,
        "running": figures.running,
        "max_depth": figures.max_depth,
        "lanes": dict(figures.lanes),
        "oldest_s": _rounded(row.oldest_s),
        "waiting_tokens": figures.waiting_tokens,
        "open_tokens": figures.open_tokens,
        "retrying": figures.retrying,
        "dead_letters": figures.dead_letters,
        "ready_workers": figures.ready,
        "draining_workers": figures.draining,
        "ended": figures.ended,
        "last_sweep_s": _rounded(figures.last_sweep_s),
        **_rates(row),
    }


def _worker(row: WorkerRow) -> dict[str, Any]:
    return {
        "worker": row.worker,
        "queue": row.queue,
        "model": row.model,
        "device": row.device,
        "state": row.state,
        "capacity": row.capacity,
        "max_batch_size": row.max_batch_size,
        "window_s": _rounded(row.window_s),
        "running": row.running,
        "waiting": row.waiting,
        "batch_rows": _rounded(row.batch_rows),
        "kv_usage": _rounded(row.kv_usage),
        **_rates(row),
    }


def _rates(row: QueueRow | WorkerRow) -> dict[str, Any]:
    return {
        "ended_per_s": _rounded(row.ended_per_s),
        "failed_per_s": _rounded(row.failed_per_s),
        "prompt_tokens_per_s": _rounded(row.prompt_tokens_per_s),
        "generated_tokens_per_s": _rounded(row.generated_tokens_per_s),
        "batch_fill": _rounded(row.batch_fill),
        "ttft_s": _percentiles(row.ttft_s),
        "itl_s": _percentiles(row.itl_s),
        "e2e_s": _percentiles(row.e2e_s),
    }


def _percentiles(found: Percentiles | None) -> dict[str, float | None] | None:
    return None if found is None else {name: _rounded(value) for name, value in asdict(found).items()}


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)
