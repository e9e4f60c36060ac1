"""Batches: the face of bulk jobs for whoever starts, watches and cancels them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rq.exceptions import DeserializationError, DuplicateJobError, InvalidJobOperation, NoSuchJobError
from rq.job import Job, JobStatus, Retry
from rq.utils import as_text
from rq.worker import Worker

from streamfleet_common.errors import Conflict, InvalidRequest, QueueFull, RequestNotFound, StreamfleetError
from streamfleet_producer.bulk.batch import ENDED, Batch, BatchStatus, Counts, Progress
from streamfleet_producer.bulk.connection import Connection, connect, reaching
from streamfleet_producer.bulk.dialects import DialectName
from streamfleet_producer.bulk.feeder import WINDOW
from streamfleet_producer.bulk.input_file import MAX_BYTES, MAX_LINES, InputFile
from streamfleet_producer.bulk.jobs import RUN, BulkJob, queue
from streamfleet_producer.bulk.result_files import create as create_file
from streamfleet_producer.bulk.settings import LEASE_S, RQ_QUEUE
from streamfleet_producer.bulk.spec import RESULT_TTL_S, Spec
from streamfleet_producer.intake import keyed_rid

KEPT_S = 30 * 86_400
"""How long a job is known after its end."""
MAX_WAITING = 1000
"""Jobs that may wait for an RQ worker."""
MAX_RUNS = 1000
"""So often a job is gone on with after its worker was lost; a bound, not a policy."""
RETRY_AFTER_S = 60.0
SCANNED = 1000


class Batches:
    """Bulk jobs of all tenants; each sees its own. Blocking: from an event loop call it on a thread.

    `url` is the Redis that RQ keeps jobs in, `rq_queue` the queue that `streamfleet bulk worker` serves,
    `lease_s` what its workers are told.

    Raises:
        BrokerUnavailable: from every method, if that Redis cannot be reached.
    """

    def __init__(self, url: str, rq_queue: str = RQ_QUEUE, *, lease_s: int = LEASE_S) -> None:
        self._url = url
        self._redis: Connection = connect(url)
        self._queue = queue(self._redis, rq_queue)
        self._lease_s = lease_s

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- their life

    def create(
        self,
        input_path: Path,
        output_path: Path,
        error_path: Path,
        *,
        fleet_queue: str,
        tenant: str = "default",
        dialect: DialectName = "streamfleet",
        window: int = WINDOW,
        result_ttl_s: int = RESULT_TTL_S,
        max_lines: int = MAX_LINES,
        max_bytes: int = MAX_BYTES,
        expires_in_s: int = 0,
        files_kept_s: int = 0,
        endpoint: str = "",
        metadata: Mapping[str, str] | None = None,
        key: str | None = None,
        secret: bytes | None = None,
    ) -> Batch:
        """Hand a file in. `fleet_queue` answers it; `expires_in_s` is 0 for no end.

        Output and errors are made, empty. `window`, `result_ttl_s`, `files_kept_s`, `endpoint` and `metadata`
        are explained at `Spec`. `key` and `secret` are those of `created`: a job that was created under this
        key is answered again, with the files that it writes.

        Raises:
            InvalidRequest: an argument, or the input as a whole: not there, empty, too many lines or bytes.
                Or the output or the error file has something in it.
            QueueFull: too many jobs wait for an RQ worker.
            Conflict: as `created`.
            BrokerUnavailable: the job may have been created all the same. With a key the same call tells.
        """
        now = time.time()
        paths = [path.absolute() for path in (input_path, output_path, error_path)]
        if len({path.resolve() for path in paths}) != len(paths):
            raise InvalidRequest("input, output and errors must be three files")
        spec = Spec(
            id=f"batch_{secrets.token_hex(16)}" if key is None else _keyed_id(key, tenant, secret),
            tenant=tenant,
            queue=fleet_queue,
            input_path=str(paths[0]),
            output_path=str(paths[1]),
            error_path=str(paths[2]),
            dialect=dialect,
            window=window,
            result_ttl_s=result_ttl_s,
            max_lines=max_lines,
            max_bytes=max_bytes,
            expires_at=int(now) + expires_in_s if expires_in_s else 0,
            files_kept_s=files_kept_s,
            endpoint=endpoint,
            metadata=dict(metadata or {}),
        )
        about: Any = {"tenant": tenant, "secret": secret, "endpoint": endpoint, "metadata": metadata}
        if key is not None and (first := self.created(key, paths[0], **about)) is not None:
            return first
        progress = Progress()
        progress.counts = Counts(InputFile(paths[0], max_lines=max_lines, max_bytes=max_bytes).count())
        progress.reach("validating", now)
        with reaching(self._url):
            waiting = self._queue.count
            if waiting >= MAX_WAITING:
                raise QueueFull(
                    f"{waiting} bulk jobs wait for an RQ worker: start more of them, or wait",
                    limit=MAX_WAITING,
                    retry_after=RETRY_AFTER_S,
                    reason="requests",
                    position=waiting,
                )
            create_file(paths[1])
            create_file(paths[2])
            # First into the list: a job that runs and that nobody can find would be worse than the reverse.
            self._redis.zadd(_list_key(tenant), {spec.id: now})
            self._redis.zremrangebyscore(_list_key(tenant), 0, now - 2 * KEPT_S)
            try:
                job = self._queue.enqueue_call(
                    RUN,
                    args=(spec.model_dump(mode="json"),),
                    timeout=-1,
                    result_ttl=KEPT_S,
                    failure_ttl=KEPT_S,
                    description=spec.id,
                    job_id=spec.id,
                    meta=progress.meta(),
                    retry=Retry(max=MAX_RUNS),
                    # One script makes it and puts it into the queue: whoever dies has done both or neither.
                    unique=key is not None,
                )
            except DuplicateJobError:  # by another call, or by this one, whose answer was lost
                return self.created(key or "", paths[0], **about) or self.get(spec.id, tenant)
        return self._batch(job, spec, is_cancelled=False)

    def created(
        self,
        key: str,
        input_path: Path,
        *,
        tenant: str = "default",
        secret: bytes | None = None,
        endpoint: str = "",
        metadata: Mapping[str, str] | None = None,
    ) -> Batch | None:
        """The job that was created under an idempotency key, as long as it is known; None if there is none.

        Its id follows from the key and the tenant's `secret`, or the tenant's name if it has none.

        Raises:
            Conflict: that was with another input, endpoint or metadata.
        """
        try:
            first = self.get(_keyed_id(key, tenant, secret), tenant)
        except RequestNotFound:
            return None
        asked = (str(input_path.absolute()), endpoint, dict(metadata or {}))
        if asked != (first.spec.input_path, first.spec.endpoint, first.spec.metadata):
            raise Conflict(
                "this idempotency key was used for another bulk job before: "
                "use a new key, or name the same input, endpoint and metadata"
            )
        return first

    def get(self, id: str, tenant: str = "default") -> Batch:  # noqa: A002 (the word of the whole API)
        """Where a job stands.

        Raises:
            RequestNotFound: the tenant has no such job, or it ended too long ago.
        """
        with reaching(self._url):
            job, spec = self._found(id, tenant)
            return self._batch(job, spec, is_cancelled=self._is_cancelled(id))

    def list(self, tenant: str = "default", *, after: str | None = None, limit: int = 20) -> list[Batch]:
        """The tenant's jobs, newest first; those behind `after`, at most `limit` (1 to 100).

        Raises:
            RequestNotFound: the tenant has no job `after`.
        """
        if not 1 <= limit <= 100:
            raise InvalidRequest("limit: 1 to 100 is wanted")
        key = _list_key(tenant)
        found: list[Batch] = []
        with reaching(self._url):
            place = 0
            if after is not None:
                rank: Any = self._redis.zrevrank(key, after)
                if rank is None:
                    raise _not_found()
                place = int(rank) + 1
            while len(found) < limit:
                ids: Any = self._redis.zrevrange(key, place, place + limit - 1)
                if not ids:
                    break
                place += len(ids)
                for raw in ids:
                    try:
                        found.append(self.get(as_text(raw), tenant))
                    except RequestNotFound:
                        continue
        return found[:limit]

    def cancel(self, id: str, tenant: str = "default") -> Batch:  # noqa: A002
        """Feed no more of a job, cancel what is under way, keep what is done. Once it has ended, nothing.

        Raises:
            RequestNotFound: the tenant has no such job.
        """
        with reaching(self._url):
            job, spec = self._found(id, tenant)
            batch = self._batch(job, spec, is_cancelled=self._is_cancelled(id))
            if batch.is_over:
                return batch
            self._redis.set(cancel_key(id), "1", ex=KEPT_S, nx=True)
            if self._redis.lrem(self._queue.key, 1, id):
                # Nobody had taken it, and nobody will.
                progress = Progress.of(job.meta)
                progress.reach("cancelled", time.time())
                job.meta = progress.meta()
                job.save_meta()  # type: ignore[no-untyped-call]
                job.set_status(JobStatus.CANCELED)
                self._redis.expire(job.key, KEPT_S)
        return self.get(id, tenant)

    def workers(self) -> int:
        """How many RQ workers have shown within three leases that they serve this queue."""
        with reaching(self._url):
            since = time.time() - 3 * self._lease_s
            return sum(
                worker.last_heartbeat is not None and worker.last_heartbeat.timestamp() >= since
                for worker in Worker.all(queue=self._queue)
            )

    def ended_files(self) -> Iterator[Batch]:
        """Jobs of all tenants that have ended, and whose files are not kept for ever."""
        with reaching(self._url):
            for raw in self._redis.scan_iter(match=_list_key("*"), count=SCANNED):
                tenant = as_text(raw).rpartition(":")[2]
                ids: Any = self._redis.zrange(raw, 0, -1)
                for id_ in ids:
                    try:
                        batch = self.get(as_text(id_), tenant)
                    except RequestNotFound:
                        continue
                    if batch.is_over and batch.spec.files_kept_s:
                        yield batch

    # --- parts

    def _found(self, id: str, tenant: str) -> tuple[Job, Spec]:  # noqa: A002
        try:
            job = BulkJob.fetch(id, connection=self._redis)
            spec = Spec.read(job.args[0])
        except (NoSuchJobError, DeserializationError, TypeError, ValueError, IndexError, StreamfleetError):
            raise _not_found() from None
        if job.func_name != RUN or spec.id != job.id or spec.tenant != tenant:
            raise _not_found()
        return job, spec

    def _is_cancelled(self, id: str) -> bool:  # noqa: A002
        return bool(self._redis.exists(cancel_key(id)))

    def _batch(self, job: Job, spec: Spec, *, is_cancelled: bool) -> Batch:
        progress = Progress.of(job.meta)
        status: BatchStatus = progress.status
        if status not in ENDED:
            state = _state(job)
            if state in (JobStatus.FAILED, JobStatus.STOPPED):
                status = "failed"
            elif state == JobStatus.CANCELED:
                status = "cancelled"
            elif is_cancelled:
                status = "cancelling"
        error = progress.error
        if status == "failed" and error is None:
            error = StreamfleetError("the job's RQ workers were lost again and again, or somebody stopped it")
        return Batch(
            spec.id,
            status,
            spec,
            progress.counts,
            job.created_at.timestamp(),
            progress.times,
            error,
            progress.runs,
        )


def cancel_key(id: str) -> str:  # noqa: A002
    """The key that tells whoever runs a job to end it."""
    return f"streamfleet:batch:{id}:cancel"


def _keyed_id(key: str, tenant: str, secret: bytes | None) -> str:
    # No request can have this key, so a job's id tells none of a request's.
    rid = keyed_rid(tenant.encode() if secret is None else secret, f"batch\0{key}")
    return f"batch_{rid[2:]}"


def _list_key(tenant: str) -> str:
    return f"streamfleet:batches:{tenant}"


def _state(job: Job) -> JobStatus | None:
    try:
        return job.get_status(refresh=False)
    except InvalidJobOperation:
        return None


def _not_found() -> RequestNotFound:
    return RequestNotFound("no such bulk job: it was never created, or it ended too long ago")
