"""Lines of a log in JSON, as processes of ours write it, in words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

SERIOUS = ("warning", "error", "critical")
_NO_DETAIL = ("event", "level", "timestamp", "worker", "supervisor", "exception")


def read_record(line: str) -> dict[str, Any] | None:
    """What a line says; None if it is no line of a log."""
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) and "event" in found else None


def worded(said: Mapping[str, Any]) -> str:
    """A record in words; below them its traceback, if it has one."""
    details = " ".join(f"{name}={value}" for name, value in said.items() if name not in _NO_DETAIL)
    words = f"{said.get('level', ''):<8} {said['event']} {details}".rstrip()
    return "\n".join([words, *str(said.get("exception", "")).splitlines()])
