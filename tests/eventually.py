"""Waiting for what happens elsewhere, at most so long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE_S = 10.0


async def eventually(happened: Callable[[], object], what: str = "it") -> None:
    """Return once `happened()` is true; fail if it is still not after `PATIENCE_S`."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not happened():  # noqa: ASYNC110 (the server has no event for it)
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"{what} did not happen within {PATIENCE_S:.0f} s") from None
