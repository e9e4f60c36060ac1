"""The handlers of `one_shot.py` as our worker takes them; its settings say how batches are made."""

from __future__ import annotations

import one_shot_handlers
from streamfleet_worker import handler

Item = dict[str, str]


@handler("noop")
def noop(batch: list[Item]) -> list[Item]:
    """Give each item back."""
    return one_shot_handlers.noop(batch)


@handler("sleep")
def sleep(batch: list[Item]) -> list[Item]:
    """Give each item back, a while later."""
    return one_shot_handlers.sleep(batch)
