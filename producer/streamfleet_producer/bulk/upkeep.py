"""What is done now and then, as RQ jobs: old files and letters removed, queues swept, letters sent again.

None of it is ever on the way of a token, and a fleet works without: workers and clients sweep too.
These jobs matter where neither is there for a while, and where nobody looks after what is kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.errors import InvalidRequest, QueueFull, StreamfleetError
from streamfleet_common.one_shot import EmbedRequest
from streamfleet_common.schemas import GenerateRequest, Request
from streamfleet_producer.bulk.batches import Batches
from streamfleet_producer.bulk.dead_broker import DeadBroker
from streamfleet_producer.bulk.dead_replay import DeadReplay
from streamfleet_producer.bulk.settings import BulkSettings
from streamfleet_producer.client import Client

DAY_S = 86_400
WARM_UP_LIMIT_S = 300.0
_WARM_UPS: dict[str, Request] = {
    "generate": GenerateRequest(prompt=".", max_tokens=1),
    "embed": EmbedRequest(texts=(".",)),
}


class Upkeep:
    """The jobs, for one fleet. Each gives how much it has done."""

    def __init__(self, told: BulkSettings) -> None:
        self._told = told

    def jobs(self) -> dict[str, Callable[..., int]]:
        """All of them by name."""
        jobs = (self.sweep_queues, self.trim_dead, self.replay_dead, self.remove_files, self.warm_up)
        return {job.__name__: job for job in jobs}

    def sweep_queues(self) -> int:
        """Sweep every queue: overdue requests, silent workers, old consumers. Gives the requests met."""

        async def sweep() -> int:
            met = 0
            async with self._connected() as connections:
                for queue in await Broker(connections, "default").queues():
                    swept = await Broker(connections, queue).sweep()
                    met += swept.expired + swept.requeued + swept.failed + swept.dead + swept.stray
            return met

        return asyncio.run(sweep())

    def trim_dead(self, older_than_days: float) -> int:
        """Delete dead letters of all queues that are older than this."""

        async def trim() -> int:
            before_ms = int((time.time() - older_than_days * DAY_S) * 1000)
            async with self._connected() as connections:
                queues = await Broker(connections, "default").queues()
                return sum([await DeadBroker(connections, queue).trim_dead(before_ms) for queue in queues])

        return asyncio.run(trim())

    def replay_dead(self, queue: str, per_minute: float, most: int) -> int:
        """Send dead letters of a queue again, at this rate, at most so many."""

        async def replay() -> int:
            async with self._connected() as connections:
                replayer = DeadReplay(DeadBroker(connections, queue), per_minute=per_minute)
                with contextlib.suppress(QueueFull):  # the next time then
                    return len(await replayer.replay_all(most=most))
            return 0

        return asyncio.run(replay())

    def remove_files(self) -> int:
        """Remove the results of jobs whose files are kept no longer; gives how many files."""
        removed = 0
        with Batches(self._told.jobs_url, self._told.rq_queue) as batches:
            for batch in batches.ended_files():
                ended_at = batch.times.get(batch.status, batch.created_at)
                if time.time() - ended_at < batch.spec.files_kept_s:
                    continue
                try:
                    batch.spec.refuse_outside(self._told.folders)
                except InvalidRequest:
                    continue
                for path in (batch.spec.output_path, batch.spec.error_path):
                    with contextlib.suppress(OSError):
                        Path(path).unlink()
                        removed += 1
        return removed

    def warm_up(self, queue: str) -> int:
        """Ask a queue for next to nothing, so that its model and caches are warm; gives 1 if it did."""

        async def warm() -> int:
            async with Client(self._told.redis_url, queue) as fleet:
                tasks = {task for card in await fleet.models() for task in card.tasks}
                for task, request in _WARM_UPS.items():
                    if task in tasks:
                        with contextlib.suppress(StreamfleetError):
                            await fleet.run(request, lane="bulk", timeout=WARM_UP_LIMIT_S)
                            return 1
            return 0

        return asyncio.run(warm())

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[Connections]:
        connections = Connections.open(self._told.redis_url)
        try:
            yield connections
        finally:
            await connections.close()
