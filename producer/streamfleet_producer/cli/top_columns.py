"""The columns of both tables of `streamfleet top`; 78 cells beside the mark of the chosen row."""

from __future__ import annotations

from streamfleet_producer.cli.terminal import in_one_line
from streamfleet_producer.cli.top_rows import Percentiles, QueueRow, WorkerRow
from streamfleet_producer.cli.top_table import Cell, Column, Table
from streamfleet_producer.cli.top_values import count, duration, percent, rate

NEARLY_FULL = 0.9
"""A cache or a queue that is so full is shown in yellow."""


def _plain(text: str) -> Cell:
    return text, ""


def _name(text: str) -> str:
    return in_one_line(text, None) or "?"  # by hand, anything may be written into Redis


def _device(row: WorkerRow) -> str:
    return _name(row.device.partition(" (")[0])  # what follows is for a log


def _queue_style(row: QueueRow) -> str:
    if row.is_unserved:
        return "bold red"
    return "yellow" if row.figures.is_paused else "bold"


def _depth(row: QueueRow) -> Cell:
    figures = row.figures
    limit = figures.max_depth
    is_full = limit is not None and figures.queued + figures.running >= NEARLY_FULL * limit
    return count(figures.queued), "yellow" if is_full else ""


def _workers(row: QueueRow) -> Cell:
    return count(row.figures.ready), "bold red" if row.is_unserved else ""


def _dead(row: QueueRow) -> Cell:
    dead = row.figures.dead_letters
    return count(dead), "red" if dead else ""


def _failed(row: QueueRow | WorkerRow) -> Cell:
    return rate(row.failed_per_s), "red" if row.failed_per_s else ""


def _p50(found: Percentiles | None) -> float | None:
    return None if found is None else found.p50


def _p95(found: Percentiles | None) -> float | None:
    return None if found is None else found.p95


QUEUES: Table[QueueRow] = Table(
    [
        Column(
            "QUEUE",
            10,
            lambda row: (_name(row.queue), _queue_style(row)),
            lambda row: row.queue,
            is_left=True,
            grows=True,
        ),
        Column("WAIT", 5, _depth, lambda row: row.figures.queued),
        Column("RUN", 4, lambda row: _plain(count(row.figures.running)), lambda row: row.figures.running),
        Column("OLD", 5, lambda row: _plain(duration(row.oldest_s)), lambda row: row.oldest_s),
        Column("WRK", 3, _workers, lambda row: row.figures.ready),
        Column("END/S", 5, lambda row: _plain(rate(row.ended_per_s)), lambda row: row.ended_per_s),
        Column(
            "TOK/S",
            5,
            lambda row: _plain(rate(row.generated_tokens_per_s)),
            lambda row: row.generated_tokens_per_s,
        ),
        Column("TTFT", 5, lambda row: _plain(duration(_p50(row.ttft_s))), lambda row: _p50(row.ttft_s)),
        Column("p95", 5, lambda row: _plain(duration(_p95(row.ttft_s)))),
        Column("ITL", 5, lambda row: _plain(duration(_p50(row.itl_s))), lambda row: _p50(row.itl_s)),
        Column("p95", 5, lambda row: _plain(duration(_p95(row.itl_s)))),
        Column("FILL", 4, lambda row: _plain(percent(row.batch_fill)), lambda row: row.batch_fill),
        Column("DEAD", 5, _dead, lambda row: row.figures.dead_letters),
        Column("FAIL/S", 6, _failed, is_extra=True),
        Column("E2E95", 6, lambda row: _plain(duration(_p95(row.e2e_s))), is_extra=True),
        Column("LIMIT", 6, lambda row: _plain(count(row.figures.max_depth)), is_extra=True),
        Column("RETRY", 6, lambda row: _plain(count(row.figures.retrying)), is_extra=True),
        Column(
            "MODEL",
            24,
            lambda row: _plain(", ".join(map(_name, row.models)) or "-"),
            is_left=True,
            is_extra=True,
        ),
    ]
)
WORKERS: Table[WorkerRow] = Table(
    [
        Column(
            "WORKER",
            19,
            lambda row: (_name(row.worker), "bold" if row.state == "ready" else "yellow"),
            lambda row: row.worker,
            is_left=True,
            grows=True,
        ),
        Column(
            "QUEUE", 7, lambda row: _plain(_name(row.queue)), lambda row: row.queue, is_left=True, grows=True
        ),
        Column(
            "STATE",
            5,
            lambda row: (
                {"draining": "drain"}.get(row.state, row.state),
                "" if row.state == "ready" else "yellow",
            ),
            lambda row: row.state,
            is_left=True,
        ),
        Column("RUN", 4, lambda row: _plain(count(row.running)), lambda row: row.running),
        Column("WAIT", 4, lambda row: _plain(count(row.waiting)), lambda row: row.waiting),
        Column("FILL", 4, lambda row: _plain(percent(row.batch_fill)), lambda row: row.batch_fill),
        Column(
            "KV",
            4,
            lambda row: (percent(row.kv_usage), "yellow" if (row.kv_usage or 0) >= NEARLY_FULL else ""),
            lambda row: row.kv_usage,
        ),
        Column("END/S", 5, lambda row: _plain(rate(row.ended_per_s)), lambda row: row.ended_per_s),
        Column(
            "TOK/S",
            5,
            lambda row: _plain(rate(row.generated_tokens_per_s)),
            lambda row: row.generated_tokens_per_s,
        ),
        Column("TTFT95", 6, lambda row: _plain(duration(_p95(row.ttft_s))), lambda row: _p95(row.ttft_s)),
        Column("ITL95", 5, lambda row: _plain(duration(_p95(row.itl_s))), lambda row: _p95(row.itl_s)),
        Column("FAIL/S", 6, _failed, is_extra=True),
        Column("E2E95", 6, lambda row: _plain(duration(_p95(row.e2e_s))), is_extra=True),
        Column("MODEL", 24, lambda row: _plain(_name(row.model)), is_left=True, is_extra=True),
        Column("DEVICE", 12, lambda row: _plain(_device(row)), is_left=True, is_extra=True),
    ]
)
