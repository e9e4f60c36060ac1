"""One reading of Redis for the page, shared by all who ask while it is made."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import structlog

from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.figures import Figures, Unread
from streamfleet_common.figures_reader import FiguresReader

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Reading:
    """What Redis said; `figures` are None where it did not answer."""

    figures: Figures | None
    seconds: float
    """How long it took."""


class Readings:
    """Reads when asked, once for all who ask at a time.

    Args:
        reader: of the figures.
        queues: those to read; none names all.
        timeout_s: how long one reading may take.
    """

    def __init__(self, reader: FiguresReader, queues: Sequence[str], *, timeout_s: float) -> None:
        self._reader = reader
        self._queues = queues
        self._timeout_s = timeout_s
        self._under_way: asyncio.Task[Reading] | None = None
        self._is_up = True
        self._unread: Mapping[Unread, int] = {}

    async def check(self) -> None:
        """Ask Redis whether there would be a page. Raises BrokerUnavailable."""
        await self._reader.check(self._queues, within_s=self._timeout_s)

    async def read(self) -> Reading:
        """What Redis says now, or did when a reading that is under way began."""
        if self._under_way is None or self._under_way.done():
            self._under_way = asyncio.create_task(self._read(), name="reading")
        # Whoever goes away does not end it for the others.
        return await asyncio.shield(self._under_way)

    async def close(self) -> None:
        """End the reading under way."""
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.wait([self._under_way])

    async def _read(self) -> Reading:
        clock = asyncio.get_running_loop().time
        began = clock()
        try:
            figures = await self._reader.read(self._queues, within_s=self._timeout_s)
        except BrokerUnavailable as error:
            if self._is_up:  # said once, not at every scrape
                log.warning("Redis does not answer", reason=error.message)
            self._is_up = False
            return Reading(None, clock() - began)
        if not self._is_up:
            log.info("Redis answers again")
        self._is_up = True
        self._tell_unread(figures)
        return Reading(figures, clock() - began)

    def _tell_unread(self, figures: Figures) -> None:
        counts = {reason: count for reason, count in figures.unread.items() if count}
        if counts != self._unread and counts:
            log.warning("queues not read", **counts, refusal=figures.refusal)
        self._unread = counts
