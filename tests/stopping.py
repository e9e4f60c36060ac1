"""Ending tasks that would go on for ever."""

from __future__ import annotations

import asyncio
from typing import Any


async def stopped(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks until they have ended: a call whose reply comes at that moment swallows the first try."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.5)
    for task in tasks:
        if not task.cancelled():
            task.result()
