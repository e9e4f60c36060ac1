"""Files of records for the tests of reports."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HEAD = {"type": "head", "version": 1, "label": "a run"}


def request(at_ms: float, took_ms: float, **more: Any) -> dict[str, Any]:
    return {"type": "request", "submitted_ms": at_ms, "ended_ms": at_ms + took_ms, **more}


def write(path: Path, lines: Iterable[dict[str, Any]], **head: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in [{**HEAD, **head}, *lines]))
    return path


def streamed(count: int = 10, *, slower: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    """Requests a second apart; of the number n the queue took n+1 ms, the first token 10 times that."""
    return [
        request(
            1000.0 * n,
            100.0 * (n + 1) * slower,
            started_ms=1000.0 * n + (n + 1) * slower,
            first_token_ms=1000.0 * n + 10 * (n + 1) * slower,
            gaps_ms=[5.0 * slower, 7.0 * slower],
            prompt_tokens=4,
            completion_tokens=3,
            batch_size=1 + n % 3,
            **more,
        )
        for n in range(count)
    ]


def samples(count: int = 20) -> list[dict[str, Any]]:
    return [
        {"type": "sample", "at_ms": 500.0 * n, "queued": n, "running": 2, "rows": 2, "max_rows": 4}
        for n in range(count)
    ]
