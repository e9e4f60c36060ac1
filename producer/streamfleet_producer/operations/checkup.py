"""What a check found, and how that is mended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "warning", "fault", "unseen"]
"""* `ok`: as it should be
* `warning`: works, and may hurt one day
* `fault`: something does not work, or work may be lost
* `unseen`: this user or this server does not tell
"""
LEVELS: tuple[Level, ...] = ("ok", "warning", "fault", "unseen")


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at."""

    about: str
    """"client", "server", or "queue NAME"."""
    name: str
    """Of what was looked at, the same in every run: scripts go by it."""
    level: Level
    words: str
    """What was found."""
    mend: str = ""
    """The command or line that mends it; empty where there is nothing to mend."""


def counts(checks: Sequence[Check]) -> dict[Level, int]:
    """How many checks ended how."""
    return {level: sum(check.level == level for check in checks) for level in LEVELS}


def seconds(ms: float) -> str:
    """A time in words: the largest unit of which there are two or more."""
    for unit, size in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000)):
        if ms >= 2 * size:
            return f"{ms / size:.0f} {unit}"
    return f"{ms / 1000:.0f} s" if ms >= 10_000 else f"{ms / 1000:.1f} s" if ms >= 1000 else f"{ms:.0f} ms"


def size(bytes_: float) -> str:
    """Bytes in words."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if bytes_ < 1024:
            return f"{bytes_:.0f} {unit}" if unit == "B" else f"{bytes_:.1f} {unit}"
        bytes_ /= 1024
    return f"{bytes_:.1f} TiB"
