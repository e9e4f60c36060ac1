"""What the scripted engine answers."""

from __future__ import annotations


def echo(count: int) -> str:
    """The answer to `ECHO count`."""
    return " ".join(f"tok{i}" for i in range(count))
