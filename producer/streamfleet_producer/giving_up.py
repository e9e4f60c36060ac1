"""When a caller has waited long enough, whatever Redis does: it may hang for longer than that."""

from __future__ import annotations

import asyncio
import math
from types import TracebackType

from streamfleet_producer.answer import too_late
from streamfleet_producer.link import Link
from streamfleet_producer.ticket import Options

LAST_LOOK_S = 1.0
"""How long the time to give up leaves for asking the record once more."""


def given_up_at(link: Link, options: Options) -> float:
    """When a request that is submitted now is given up, on the link's clock: its deadline and the grace.

    Never, where no deadline is said: that Redis is away is told long before it.
    """
    if "deadline_s" not in options:
        return math.inf
    try:
        deadline_s = float(options["deadline_s"])
    except (TypeError, ValueError, OverflowError):
        return math.inf  # no deadline has such a value, and that is told before anything is waited for
    return link.now() + deadline_s + link.patience.grace_s if 0 < deadline_s < math.inf else math.inf


class Until:
    """Bounds what asks Redis: `async with Until(link, late_at)`, with a time on the link's clock.

    Raises:
        DeadlineExceeded: there is no outcome yet `LAST_LOOK_S` after it.
    """

    __slots__ = ("_clock",)

    def __init__(self, link: Link, late_at: float) -> None:
        left_s = None if late_at == math.inf else late_at - link.now() + LAST_LOOK_S
        self._clock = asyncio.timeout(left_s)

    async def __aenter__(self) -> None:
        await self._clock.__aenter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self._clock.__aexit__(kind, error, trace)
        except TimeoutError:
            raise too_late() from None
