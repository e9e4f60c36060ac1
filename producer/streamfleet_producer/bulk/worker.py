"""BulkWorker: an RQ worker that runs bulk jobs alone, outlives a Redis that restarts, and is missed soon.

RQ's own worker ends with the first command that Redis does not answer, and leaves the process that it forked
for the job behind. Its claims to jobs last a minute longer than they need to.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from rq.exceptions import StopRequested
from rq.executions import Execution
from rq.job import Job
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.worker import Worker

from streamfleet_producer.bulk.connection import AWAY, REFUSING, RedisError, connect, reaching
from streamfleet_producer.bulk.jobs import RUN, UPKEEP, BulkJob, BulkQueue, allow
from streamfleet_producer.bulk.run import run_batch
from streamfleet_producer.bulk.settings import LEASE_S, BulkSettings
from streamfleet_producer.bulk.upkeep import Upkeep

AGAIN_S = 0.5
"""How long until a worker whose Redis is away is begun anew."""

_log = logging.getLogger("streamfleet.bulk")


class BulkWorker(Worker):
    """One RQ worker; a process of its own runs each job.

    `lease_s`: how long it may be silent before its job is given to another. RQ goes by the workers' own
    clocks: they may differ by a part of that.
    """

    job_class = BulkJob
    queue_class: type[Queue] = BulkQueue
    max_connection_wait_time = 2.0
    log_result_lifespan = False

    def __init__(
        self, queues: Any, name: str | None = None, *, lease_s: int = LEASE_S, **options: Any
    ) -> None:
        self.lease_s = lease_s
        options |= {
            "serializer": JSONSerializer,
            "job_class": BulkJob,
            "queue_class": BulkQueue,
            "log_job_description": False,
            "job_monitoring_interval": max(1, lease_s // 3),
            "maintenance_interval": max(1, lease_s // 3),
        }
        super().__init__(queues, name, **options)
        for queue in self.queues:
            if isinstance(queue, BulkQueue):
                queue.lease_s = lease_s

    @property
    def dequeue_timeout(self) -> int:
        """How long a wait for a job is, between two looks for those that others left; seconds."""
        return max(1, self.lease_s // 3)

    @property
    def was_told_to_end(self) -> bool:
        """Whether a signal asked it to."""
        return self._shutdown_requested_date is not None

    def get_heartbeat_ttl(self, job: Job, working_time: float = 0.0) -> int:  # noqa: ARG002
        return self.lease_s

    def handle_warm_shutdown_request(self) -> None:
        """Let the job go, too: another worker goes on with it, whatever it has left to do."""
        super().handle_warm_shutdown_request()  # type: ignore[no-untyped-call]
        if self.horse_pid:
            self.kill_horse(signal.SIGTERM)

    def maintain_heartbeats(self, job: Job, execution: Execution) -> None:
        try:
            super().maintain_heartbeats(job, execution)
        except (*AWAY, *REFUSING) as error:
            self.log.warning("Worker %s: no heartbeat: %s", self.name, type(error).__name__)

    def execute_job(self, job: Job, queue: Queue) -> None:
        try:
            super().execute_job(job, queue)
        except AWAY:
            # Nothing is lost: once it is missed, it is gone on with.
            if self._horse_pid:
                self.kill_horse()
                self.wait_for_horse()
                self._horse_pid = 0
            self.executions.clear()
            raise

    def _shutdown(self) -> None:
        try:
            super()._shutdown()  # type: ignore[no-untyped-call]
        except AWAY:
            self._stop_requested = True

    def _pubsub_exception_handler(self, exc: Exception, *_: Any) -> None:
        if not isinstance(exc, RedisError):
            raise exc
        time.sleep(AGAIN_S)


def serve(told: BulkSettings, *, burst: bool = False) -> None:
    """Run jobs until a signal asks to end, through restarts of Redis; with `burst` until none is left.

    Raises:
        BrokerUnavailable: Redis is not there to begin with.
    """
    allow(RUN, partial(run_batch, told))
    for name, job in Upkeep(told).jobs().items():
        allow(UPKEEP + name, job)
    url = told.jobs_url

    def made() -> BulkWorker:
        return BulkWorker([told.rq_queue], connection=connect(url), lease_s=told.rq_lease_s)

    with reaching(url):
        worker = made()
    while True:
        try:
            worker.work(burst=burst, logging_level="WARNING")
            if burst or worker.was_told_to_end:
                return
        except RedisError as error:
            if worker.was_told_to_end:
                return
            _log.warning("the Redis of bulk jobs is away (%s)", type(error).__name__)
        try:
            worker = _again(made)
        except StopRequested:
            return


def _again(made: Callable[[], BulkWorker]) -> BulkWorker:
    # The last worker's handlers would only tell a worker that is there no more.
    def end(_number: int, _frame: FrameType | None) -> None:
        raise StopRequested

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, end)
    while True:
        time.sleep(AGAIN_S)
        try:
            return made()
        except RedisError:
            continue
