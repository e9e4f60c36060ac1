"""When upkeep is done, and what of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """When what is done; intervals are seconds."""

    sweep_s: int = 600
    files_s: int = 3600
    trim_s: int = 86_400
    dead_kept_days: float = 30.0
    warm_up_queues: tuple[str, ...] = ()
    warm_up_s: int = 300
    replay_queues: tuple[str, ...] = ()
    """Queues whose dead letters are sent again. Nobody should do that before the cause is mended."""
    replay_s: int = 600
    replay_per_minute: float = 6.0
    replay_most: int = 10
