"""The cron of bulk jobs: RQ's own scheduler, which puts the jobs of `Upkeep` into the queue in time.

RQ's scheduler writes jobs with pickle, whatever its workers read; this one writes JSON, and names.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import Any

from rq.cron import CronJob, CronScheduler
from rq.exceptions import DuplicateJobError
from rq.job import Job
from rq.serializers import JSONSerializer

from streamfleet_producer.bulk.connection import Connection, RedisError, connect, reaching
from streamfleet_producer.bulk.jobs import UPKEEP, BulkJob, queue
from streamfleet_producer.bulk.plan import Plan
from streamfleet_producer.bulk.settings import BulkSettings

KEPT_S = 3600
"""How long the outcome of such a job is known; shorter than its interval."""
LIMIT_S = 3600
AGAIN_S = 1.0

_log = logging.getLogger("streamfleet.bulk")


class JsonCronJob(CronJob):
    """A job of the cron, written as JSON; not again while the last one waits or runs."""

    def enqueue(self, connection: Connection) -> Job:
        job_id = "upkeep_" + "".join(char if char.isalnum() else "-" for char in self.name)
        with contextlib.suppress(DuplicateJobError):
            return queue(connection, self.queue_name).enqueue_call(
                self.func_name,
                args=self.args,
                timeout=LIMIT_S,
                result_ttl=min(KEPT_S, (self.interval or KEPT_S) // 2),
                failure_ttl=min(KEPT_S, (self.interval or KEPT_S) // 2),
                description=self.name,
                job_id=job_id,
                unique=True,
            )
        return BulkJob(job_id, connection)


class JsonCron(CronScheduler):
    """RQ's scheduler with the jobs of a plan."""

    def __init__(self, connection: Connection, rq_queue: str, plan: Plan) -> None:
        super().__init__(connection, logging_level=logging.WARNING)
        self.serializer = JSONSerializer
        self._rq_queue = rq_queue
        self._add("sweep_queues", plan.sweep_s)
        self._add("remove_files", plan.files_s)
        self._add("trim_dead", plan.trim_s, plan.dead_kept_days)
        for name in plan.warm_up_queues:
            self._add("warm_up", plan.warm_up_s, name)
        for name in plan.replay_queues:
            self._add("replay_dead", plan.replay_s, name, plan.replay_per_minute, plan.replay_most)

    def _add(self, name: str, interval_s: int, *args: Any) -> None:
        called = "-".join([name, *(arg for arg in args if isinstance(arg, str))])
        self._cron_jobs.append(
            JsonCronJob(
                self._rq_queue, func_name=UPKEEP + name, args=args, interval=max(2, interval_s), name=called
            )
        )


def serve_cron(told: BulkSettings, plan: Plan) -> None:
    """Put jobs into the queue in time, until a signal asks to end; through restarts of Redis.

    Raises:
        BrokerUnavailable: Redis is not there to begin with.
    """
    connection = connect(told.jobs_url)
    with reaching(told.jobs_url):
        connection.ping()
    cron = JsonCron(connection, told.rq_queue, plan)
    while True:
        try:
            cron.start()  # type: ignore[no-untyped-call]
        except RedisError as error:
            _log.warning("the Redis of bulk jobs is away (%s)", type(error).__name__)
            time.sleep(AGAIN_S)
        else:
            return
