"""RQ's job and queue, narrowed: JSON alone, and no function but ours.

An RQ job names its function by import path, and whoever may write to Redis may write any. So nothing is ever
imported because a job says so: a name is looked up in a list of ours, and refused if it is not there. Of
callbacks and webhooks there are none.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

from rq.intermediate_queue import IntermediateQueue
from rq.job import Job
from rq.queue import Queue
from rq.serializers import JSONSerializer
from rq.utils import now

from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.bulk.connection import AWAY, Connection
from streamfleet_producer.bulk.settings import LEASE_S

RUN = "streamfleet_producer.bulk.run.run_batch"
UPKEEP = "streamfleet_producer.bulk.upkeep."
"""What the names of upkeep begin with."""
FUNCTIONS: dict[str, Callable[..., Any]] = {}
"""What a job may name; filled by the process that runs jobs, with `allow`."""


class ForeignJob(InvalidRequest):
    """A job that names something else than a function of ours."""

    code = "foreign_job"


def allow(name: str, function: Callable[..., Any]) -> None:
    """Let jobs of this process name a function; the name is one of ours, and need not lead to it."""
    FUNCTIONS[name] = function


class BulkJob(Job):
    """A job whose function is one of `FUNCTIONS`; its arguments are JSON."""

    def __init__(self, id: str | None = None, connection: Any = None, serializer: Any = None) -> None:  # noqa: A002
        # Whoever forgets the serializer gets JSON, never RQ's own default, which is pickle.
        super().__init__(id, connection, serializer or JSONSerializer)

    @property
    def is_ours(self) -> bool:
        """Whether it may run."""
        callbacks = (self._success_callback_name, self._failure_callback_name, self._stopped_callback_name)
        try:
            return self.func_name in FUNCTIONS and self.instance is None and not any(callbacks)
        except Exception:  # noqa: BLE001 - whatever its bytes are, they are no job of ours
            return False

    @property
    def func(self) -> Callable[..., Any]:
        """The function, from our own list.

        Raises:
            ForeignJob: it is not on it.
        """
        if not self.is_ours:
            raise ForeignJob("this RQ worker runs the jobs of streamfleet alone: this names something else")
        return FUNCTIONS[str(self.func_name)]

    @property
    def success_callback(self) -> None:
        """None: a name in Redis is never imported."""

    @property
    def failure_callback(self) -> None:
        """None, as above."""

    @property
    def stopped_callback(self) -> None:
        """None, as above."""

    @property
    def should_retry(self) -> bool:
        """Whether it may be tried again; a foreign one never."""
        return self.is_ours and bool(super().should_retry)

    def retry(self, queue: Queue, pipeline: Any) -> None:
        """Let another worker go on with it, from what the last one told."""
        self.get_meta()  # what this process knows of it is older, and would be written
        super().retry(queue, pipeline)

    def send_webhooks(self, *_: Any, **__: Any) -> None:
        """Send none: a job must not choose whom this machine talks to."""


class _Intermediate(IntermediateQueue):  # type: ignore[misc, unused-ignore]
    lease_s = LEASE_S

    def should_be_cleaned_up(self, job_id: str) -> bool:
        # RQ's own minute is longer than anything that a job has to wait for here.
        first_seen = self.get_first_seen(job_id)
        return first_seen is not None and now() - first_seen > timedelta(seconds=self.lease_s)


class BulkQueue(Queue):
    """RQ's queue of our jobs."""

    job_class = BulkJob
    lease_s = LEASE_S

    def __init__(self, name: str = "default", connection: Any = None, **options: Any) -> None:
        options |= {"serializer": JSONSerializer, "job_class": BulkJob}
        options.pop("default_timeout", None)
        super().__init__(name, connection, default_timeout=-1, **options)

    def fetch_job(self, job_id: str) -> Job | None:
        """The job, or None for one that is gone, or whose fields are none of a job's."""
        try:
            return super().fetch_job(job_id)
        except AWAY:
            raise
        except Exception:  # noqa: BLE001 - anybody may have written it: it must not end the worker
            return None

    @classmethod
    def _fetch_dequeued_job(  # type: ignore[override]
        cls, connection: Any, queue_key: str, job_id: str, **options: Any
    ) -> Any:
        """The job that was just taken; None, for the next one, if its fields are none of a job's."""
        try:
            return super()._fetch_dequeued_job(connection, queue_key, job_id, **options)
        except AWAY:
            raise
        except Exception:  # noqa: BLE001 - as above
            connection.lrem(IntermediateQueue.get_intermediate_queue_key(queue_key), 1, job_id)
            return None

    @property
    def intermediate_queue(self) -> IntermediateQueue:
        """Jobs that a worker took and has not begun."""
        queue = _Intermediate(self.key, connection=self.connection)
        queue.lease_s = self.lease_s
        return queue

    def acquire_maintenance_lock(self) -> bool:
        """Whether this worker may clean up now. A killed one keeps the lock for a lease, not 15 minutes."""
        return bool(self.connection.set(self.registry_cleaning_key, 1, nx=True, ex=self.lease_s))


def queue(connection: Connection, name: str) -> BulkQueue:
    """The RQ queue of this name."""
    return BulkQueue(name, connection)
