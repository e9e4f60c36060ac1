"""Where requests stand that wait: read once for all who wait in a queue."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field

from streamfleet_common.errors import BrokerUnavailable
from streamfleet_producer.gateway.directory import Directory

LIFE_S = 2.0
"""How long a reading is told, and how often whoever waits asks."""


@dataclass(slots=True)
class _Reading:
    read_at: float
    positions: Mapping[str, int] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None


class WaitingLines:
    """The lines of the queues that somebody waits in; a reading is told for `life_s`."""

    def __init__(self, directory: Directory, *, life_s: float = LIFE_S) -> None:
        self._directory = directory
        self.life_s = life_s
        self._readings: dict[str, _Reading] = {}
        self._now = asyncio.get_running_loop().time

    async def position(self, queue: str, rid: str) -> int | None:
        """The place of a request in its lane, the next one being 1; None if it does not wait there.

        That is so, too, of one that is far behind, and while Redis is away.
        """
        reading = self._readings.get(queue)
        if reading is None or (reading.task is None and self._now() - reading.read_at >= self.life_s):
            self._forget_old()
            reading = self._readings[queue] = _Reading(self._now())
            reading.task = asyncio.create_task(self._read(queue, reading), name="waiting-lines")
        if reading.task is not None:
            await asyncio.wait([reading.task])  # which leaves it alone if this caller is cancelled
        return reading.positions.get(rid)

    async def close(self) -> None:
        tasks = [reading.task for reading in self._readings.values() if reading.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    async def _read(self, queue: str, reading: _Reading) -> None:
        try:
            with contextlib.suppress(BrokerUnavailable):
                reading.positions = (await self._directory.broker(queue).backlog()).positions()
        finally:
            reading.read_at, reading.task = self._now(), None

    def _forget_old(self) -> None:
        old = self._now() - self.life_s
        for queue in [name for name, one in self._readings.items() if one.task is None and one.read_at < old]:
            del self._readings[queue]
