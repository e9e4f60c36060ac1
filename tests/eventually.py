"""Waiting for what happens elsewhere, at most so long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE_S = 60.0
"""Far more than anything here takes: it bounds a failure, on a machine that does ten things at once."""


async def eventually(
    happened: Callable[[], object], what: str = "it", *, patience_s: float | None = None
) -> None:
    """Return once `happened()` is true; fail if it is still not after `patience_s` (`PATIENCE_S`)."""
    patience_s = PATIENCE_S if patience_s is None else patience_s
    try:
        async with asyncio.timeout(patience_s):
            while not happened():  # noqa: ASYNC110 (the server has no event for it)
                await asyncio.sleep(0.002)
    except TimeoutError:
        raise AssertionError(f"{what} did not happen within {patience_s:.0f} s") from None
