"""The function that an RQ job names: one run of a bulk job, its first or one that goes on with it.

It runs in a process that RQ forks for it. When that process or its parent dies, the files say how far the job
is, RQ gives it to another worker, and requests that were under way are joined by their keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rq import get_current_job

from streamfleet_common.errors import Conflict, InvalidRequest, StreamfleetError
from streamfleet_producer.bulk.batch import Counts, Progress
from streamfleet_producer.bulk.batches import cancel_key
from streamfleet_producer.bulk.connection import AWAY, REFUSING, RedisError
from streamfleet_producer.bulk.dialects import dialect
from streamfleet_producer.bulk.feeder import Feeder
from streamfleet_producer.bulk.input_file import InputFile
from streamfleet_producer.bulk.jobs import BulkJob
from streamfleet_producer.bulk.result_files import ResultFiles
from streamfleet_producer.bulk.settings import BulkSettings
from streamfleet_producer.bulk.spec import Spec
from streamfleet_producer.client import Client

TOLD_EVERY_S = 0.5
"""How often progress is told, and a cancellation asked for."""
SYNC_EVERY_S = 1.0
ORPHAN_CHECK_S = 0.25
LOCK_CHECK_S = 0.2
TEMPFAIL = 75
"""The exit status of a run that shall be gone on with elsewhere."""

_log = logging.getLogger("streamfleet.bulk")
_T = TypeVar("_T")


def run_batch(told: BulkSettings, fields: dict[str, Any]) -> str:
    """Answer what is not answered of a bulk job; gives its status then.

    Args:
        told: the worker's settings.
        fields: a `Spec` as JSON.

    Raises:
        InvalidRequest: that is no spec, or names files that this worker may not touch.
    """
    job = get_current_job()
    assert isinstance(job, BulkJob)  # noqa: S101 - `BulkWorker` knows no other
    spec = Spec.read(fields)
    if spec.id != job.id:
        raise InvalidRequest("not a bulk job: its id is another's")
    run = _Run(job, spec, told)
    try:
        spec.refuse_outside(told.folders)
        asyncio.run(run.to_end())
    except (StreamfleetError, OSError) as error:
        run.failed(error)
    except Exception as error:  # noqa: BLE001 - a fault of ours: whoever went on would meet it again
        # Without its message, which may have a part of somebody's line.
        _log.error("bulk job %s broke:\n%s", spec.id, "".join(traceback.format_tb(error.__traceback__)))
        run.failed(StreamfleetError(f"the job broke ({type(error).__name__}): see the log of its RQ worker"))
    return run.progress.status


@dataclass
class _Control:
    """Ends the process at once, leaving the files whole and the requests alone."""

    results: ResultFiles

    def leave(self) -> None:
        # Not by the way of an exception: a client that is closed in order cancels what it has under way.
        with contextlib.suppress(OSError):
            self.results.sync()
        os._exit(TEMPFAIL)


class _Run:
    def __init__(self, job: BulkJob, spec: Spec, told: BulkSettings) -> None:
        self._job = job
        self._spec = spec
        self._settings = told
        self._parent = os.getppid()
        self._told: dict[str, Any] = {}
        self.progress = Progress.of(job.meta)

    async def to_end(self) -> None:
        _, output, errors = self._spec.paths
        results = await self._opened(lambda: ResultFiles.open(output, errors))
        try:
            # Whoever had the files until now may have told more than this job knew when it was taken.
            self.progress = Progress.of(await self._surely(self._job.get_meta))
            if self.progress.status not in ("completed", "cancelled", "expired"):
                await self._answer(results)
        finally:
            await asyncio.to_thread(results.close)

    async def _answer(self, results: ResultFiles) -> None:
        spec = self._spec
        source = InputFile(spec.paths[0], max_lines=spec.max_lines, max_bytes=spec.max_bytes)
        self.progress.counts = Counts(
            await asyncio.to_thread(source.count), results.completed, results.failed
        )
        self.progress.runs += 1
        self.progress.error = None
        self.progress.reach("in_progress", time.time())
        async with Client(
            self._settings.redis_url,
            spec.queue,
            tenant=spec.tenant,
            durability=self._settings.durability,
        ) as fleet:
            feeder = Feeder(
                fleet,
                spec.id,
                dialect(spec.dialect, spec.queue),
                results,
                window=spec.window,
                result_ttl_s=spec.result_ttl_s,
            )
            async with self._watched(feeder, results):
                await feeder.run(source.lines())
        self._count(results, 0)
        if await self._surely(self._cancel_asked):
            self.progress.reach("cancelled", time.time())
        elif self._is_expired:
            self.progress.reach("expired", time.time())
        else:
            self.progress.reach("finalizing", time.time())
            await asyncio.to_thread(results.sync)
            self.progress.reach("completed", time.time())
        await self._tell_surely()

    def failed(self, error: StreamfleetError | OSError) -> None:
        """Say why the job as a whole ended; the files keep what they have."""
        if isinstance(error, OSError):
            error = InvalidRequest(f"the files cannot be read or written: {error.strerror}")
        _log.warning("bulk job %s failed: %s", self._spec.id, error.code)
        self.progress.error = error
        self.progress.reach("failed", time.time())
        asyncio.run(self._tell_surely())

    # --- what goes on beside

    @asynccontextmanager
    async def _watched(self, feeder: Feeder, results: ResultFiles) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        control = _Control(results)
        loop.add_signal_handler(signal.SIGTERM, control.leave)
        tasks = [
            asyncio.create_task(one)
            for one in (
                self._end_with_parent(control),
                self._tell(feeder, results),
                self._sync(results),
                self._expire(feeder),
            )
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            loop.remove_signal_handler(signal.SIGTERM)
            for one in ended:
                if isinstance(one, OSError):
                    raise one

    async def _end_with_parent(self, control: _Control) -> None:
        # A killed RQ worker leaves this process behind, and nobody would renew its claim to the job.
        while True:
            await asyncio.sleep(ORPHAN_CHECK_S)
            if os.getppid() != self._parent:
                control.leave()

    async def _tell(self, feeder: Feeder, results: ResultFiles) -> None:
        while True:
            self._count(results, feeder.in_flight)
            # Whatever it is: a cancellation must still be heard when it is over.
            with contextlib.suppress(RedisError):
                await asyncio.to_thread(self._told_once)
            with contextlib.suppress(RedisError):
                if await asyncio.to_thread(self._cancel_asked):
                    self.progress.reach("cancelling", time.time())
                    await feeder.cancel()
                    return
            await asyncio.sleep(TOLD_EVERY_S)

    async def _sync(self, results: ResultFiles) -> None:
        while True:
            await asyncio.sleep(SYNC_EVERY_S)
            await asyncio.to_thread(results.sync)

    async def _expire(self, feeder: Feeder) -> None:
        if not self._spec.expires_at:
            return
        await asyncio.sleep(max(0.0, self._spec.expires_at - time.time()))
        await feeder.expire()

    async def _opened(self, opening: Callable[[], ResultFiles]) -> ResultFiles:
        """The files, once whoever else writes them has ended.

        That may be an orphan of a killed worker, which ends soon. Or one that was missed though it lives, as
        after a pause, or a long time without Redis: it goes on to the end of the job.
        """
        while True:
            try:
                return await asyncio.to_thread(opening)
            except Conflict:
                if os.getppid() != self._parent:
                    os._exit(TEMPFAIL)
                await asyncio.sleep(LOCK_CHECK_S)

    # --- what is told

    @property
    def _is_expired(self) -> bool:
        return bool(self._spec.expires_at) and time.time() >= self._spec.expires_at

    def _count(self, results: ResultFiles, in_flight: int) -> None:
        total = self.progress.counts.total
        self.progress.counts = Counts(total, results.completed, results.failed, in_flight)

    def _told_once(self) -> None:
        meta = self.progress.meta()
        # A Redis that has lost the job must not get a part of it back.
        if meta != self._told and self._job.connection.exists(self._job.key):
            self._job.meta = meta
            self._job.save_meta()  # type: ignore[no-untyped-call]
            self._told = meta

    def _cancel_asked(self) -> bool:
        return bool(self._job.connection.exists(cancel_key(self._spec.id)))

    async def _tell_surely(self) -> None:
        # What RQ notes of the job's end comes after it.
        await self._surely(self._told_once)

    async def _surely(self, asked: Callable[[], _T]) -> _T:
        """Ask the jobs' Redis, however long it is away, or takes nothing."""
        while True:
            try:
                return await asyncio.to_thread(asked)
            except (*AWAY, *REFUSING):
                await asyncio.sleep(TOLD_EVERY_S)
