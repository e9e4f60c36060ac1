"""The intake: what was delivered is decoded, prepared and put into the engine."""

from __future__ import annotations

import asyncio
import math
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import structlog

from streamfleet_common import codec
from streamfleet_common.decisions import DecideRequest
from streamfleet_common.deliveries import Delivery
from streamfleet_common.errors import GenerationFailed, StreamfleetError
from streamfleet_common.one_shot import CallRequest, RerankRequest
from streamfleet_common.schemas import Envelope, GenerateRequest, Prefill
from streamfleet_common.trace_context import trace_of
from streamfleet_worker.engine.base import Arrival, Finished, Key, Output, Tokens
from streamfleet_worker.engine_thread import EngineThread, Report
from streamfleet_worker.metrics import Metrics
from streamfleet_worker.publisher import Publisher

INLINE_BYTES = 16 * 1024
"""Requests so small together are prepared at once: that takes a few milliseconds at most, while to hand them
to a thread and back costs more than the preparation of one. A guide may take seconds to compile, however
small it is."""
INLINE_CALL_BYTES = 128 * 1024
"""The same of calls, which are read and not turned into tokens."""
COPIED = 16
"""So many characters that are copied, in tokens, into one more row take as long as one that is turned into
them. A query stands in the row of each of its documents, a state in that of each option."""

log = structlog.get_logger()


@dataclass(slots=True)
class Admitted:
    """A request that was handed to the engine and has not come back finished."""

    rows: int
    accepted_at: float | None
    """None once it has its first token."""
    last_at: dict[int, float] = field(default_factory=dict)
    """When each of its choices had its last token, on the clock of the engine's steps."""


class Intake:
    """Knows how many rows the requests fill that are here, and so how many more requests it would run now.

    How many rows a request takes shows only once it is here. So the next ones are thought to be like the last
    ones, and what comes beyond the free rows waits in the engine.

    Large prompts are turned into tokens on a thread of its own, so that neither the event loop nor the engine
    waits for it.
    """

    def __init__(
        self,
        engine_thread: EngineThread,
        publisher: Publisher,
        metrics: Metrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine_thread = engine_thread
        self._publisher = publisher
        self._metrics = metrics
        self._clock = clock
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="prepare")
        self._job: Future[list[Any]] | None = None
        self._preparing = 0
        """Rows of what is being prepared."""
        self._admitted: dict[Key, Admitted] = {}
        self._rows = 0
        """What they take, together."""
        self._rows_each = 1.0
        """What each of the last ones took."""

    @property
    def preparing(self) -> bool:
        """Whether the thread that prepares is at work, wanted or not."""
        return self._job is not None and not self._job.done()

    @property
    def admitted(self) -> int:
        """Requests that were put into the engine, and have neither ended there nor been dropped."""
        return len(self._admitted)

    def room(self) -> int:
        """How many more requests would run now, if they are like the last ones."""
        size = self._engine_thread.info.max_rows
        free = math.ceil((size - self._rows - self._preparing) / self._rows_each)
        # Answers that wait for Redis fill no row, but memory: one more batch of them, and no more.
        return min(free, 2 * size - self._publisher.held)

    async def take(self, deliveries: list[Delivery]) -> None:
        """Put deliveries into the engine; what cannot be run is answered with its error."""
        now = self._clock()
        wanted: list[tuple[Delivery, Envelope]] = []
        # The server may come back without its last second, and give one out again under the same number: what
        # runs goes on, and its events are counted on.
        new = [delivery for delivery in deliveries if not self._publisher.answers_for(delivery.key)]
        self._metrics.delivered(new)
        for delivery in new:
            try:
                envelope = codec.decode_envelope(delivery.entry.payload)
            except StreamfleetError as error:
                # Nobody checked it at the door, and nothing but its record says who waits for it.
                self._publisher.hold(delivery, tenant="", stream=False)
                self._fail(delivery, error)
                continue
            self._publisher.hold(
                delivery,
                tenant=envelope.tenant,
                stream=envelope.stream,
                kind=envelope.request.kind,
                traceparent=envelope.traceparent,
            )
            wanted.append((delivery, envelope))
        if not wanted:
            return
        envelopes = [envelope for _, envelope in wanted]
        rows = sum(envelope.request.n for envelope in envelopes)
        self._rows_each = max(1.0, rows / len(envelopes))
        size = sum(len(delivery.entry.payload) + _copied(envelope) for delivery, envelope in wanted)
        if size <= _inline_bytes(envelopes):
            prepared = self._prepare_all(envelopes)
        else:
            self._preparing = rows
            self._job = self._pool.submit(self._prepare_all, envelopes)
            try:
                prepared = await asyncio.wrap_future(self._job)
            finally:
                self._preparing = 0
        arrivals: dict[Key, Arrival] = {}
        for (delivery, envelope), outcome in zip(wanted, prepared, strict=True):
            if not self._publisher.holds(delivery.key):
                continue  # cancelled, lost or given up meanwhile: the engine would work for nobody
            if isinstance(outcome, StreamfleetError):
                self._fail(delivery, outcome)
                continue
            accepted_at = now - (delivery.now_ms - delivery.accepted_at_ms) / 1000
            deadline_at = now + (delivery.deadline_at_ms - delivery.now_ms) / 1000
            arrival = Arrival(outcome, accepted_at, deadline_at, scope=envelope.tenant)
            arrivals[delivery.key] = arrival
            self._admitted[delivery.key] = Admitted(arrival.rows, accepted_at)
            self._rows += arrival.rows
        if arrivals:
            self._publisher.prepared(arrivals)
            self._engine_thread.add(arrivals)

    def stepped(self, report: Report) -> None:
        """Note which requests have their first token or further ones, and which have left the engine."""
        now = self._clock()
        waits_s: list[float] = []
        gaps: dict[float, int] = {}  # how many tokens came after others of such a step
        for output in report.step.outputs:
            event = output.event
            if isinstance(event, Finished):
                self._leave(output.key)
                continue
            admitted = self._admitted.get(output.key)
            if admitted is None or isinstance(event, Prefill):
                continue
            if admitted.accepted_at is not None:
                waits_s.append(max(0.0, now - admitted.accepted_at))
                admitted.accepted_at = None
            if isinstance(event, Tokens):
                _follow(admitted, event, report.ended_at, gaps)
        if waits_s:
            self._metrics.first_tokens(waits_s)
        for before, count in gaps.items():
            self._metrics.more_tokens(report.ended_at - before, count)

    def drop(self, keys: list[Key]) -> None:
        """Have the engine forget these requests."""
        for key in keys:
            self._leave(key)
        self._engine_thread.cancel(keys)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _leave(self, key: Key) -> None:
        admitted = self._admitted.pop(key, None)
        if admitted is not None:
            self._rows -= admitted.rows

    def _fail(self, delivery: Delivery, error: StreamfleetError) -> None:
        self._publisher.take([Output(delivery.key, Finished("failed", error=error))])

    def _prepare_all(self, envelopes: list[Envelope]) -> list[Any]:
        prepared: list[Any] = []
        for envelope in envelopes:
            try:
                prepared.append(self._engine_thread.prepare(envelope.request, envelope.tenant))
            except StreamfleetError as error:
                prepared.append(error)
            except Exception as error:  # noqa: BLE001 (one request's fault, whatever it is, fails it alone)
                kind = type(error).__name__
                # Without the error's own words, which may quote the prompt.
                place = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{place.filename}:{place.lineno}"
                about = {"rid": envelope.rid, **trace_of(envelope.traceparent)}
                log.error("request cannot be prepared", **about, error=kind, where=where)
                message = f"the worker cannot prepare this request ({kind}): its log names the place"
                prepared.append(GenerationFailed(message))
        return prepared


def _follow(admitted: Admitted, tokens: Tokens, at: float, gaps: dict[float, int]) -> None:
    """Add to the gaps what new tokens came after: the first of them the last one, the others that."""
    count = len(tokens.token_ids)
    if not count:
        return  # the rest of a text
    last_at = admitted.last_at
    before = last_at.get(tokens.index)
    last_at[tokens.index] = at
    if before is not None:
        gaps[before] = gaps.get(before, 0) + 1
    if count > 1:
        gaps[at] = gaps.get(at, 0) + count - 1


def _copied(envelope: Envelope) -> int:
    """How many characters more a request is worth, for what stands in many rows."""
    match envelope.request:
        case RerankRequest(query=text, n=rows) | DecideRequest(text=text, n=rows):
            return len(text) * rows // COPIED
    return 0


def _inline_bytes(envelopes: list[Envelope]) -> int:
    """How large these may be to be prepared at once."""
    requests = [envelope.request for envelope in envelopes]
    if any(isinstance(request, GenerateRequest) and request.guide is not None for request in requests):
        return 0
    are_calls = all(isinstance(request, CallRequest) for request in requests)
    return INLINE_CALL_BYTES if are_calls else INLINE_BYTES
