"""The heart of a job: lines in, a bounded number of requests under way, answers out as they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

from streamfleet_common.errors import (
    BrokerUnavailable,
    Cancelled,
    GenerationFailed,
    IncompleteGeneration,
    InvalidRequest,
    QueueFull,
    StreamfleetError,
)
from streamfleet_common.schemas import MAX_DEADLINE_MS, End, Request
from streamfleet_producer.bulk.answered import id_digest, line_digest
from streamfleet_producer.bulk.dialects import Asked, Dialect
from streamfleet_producer.bulk.input_file import MAX_LINE_BYTES, Line
from streamfleet_producer.bulk.line_errors import (
    BadCustomId,
    BatchExpired,
    BrokenLine,
    DuplicateCustomId,
    LongLine,
)
from streamfleet_producer.bulk.result_files import ResultFiles, encoded
from streamfleet_producer.client import Client
from streamfleet_producer.intake import keyed_rid

WINDOW = 128
MAX_WINDOW = 4096
LEAST_PAUSE_S = 0.05
AWAY_PAUSE_S = 1.0
CANCEL_AGAIN_S = 0.5
LOST_TRIES = 5
"""So often a request whose record Redis has lost is sent again."""
MAX_CUSTOM_ID_CHARS = 512
_HOPELESS = {"bad_url", "forbidden", "cluster"}
"""Why Redis may be unavailable, where waiting mends nothing."""


@dataclass(frozen=True, slots=True)
class Item:
    """A line that is asked about."""

    custom_id: str
    asked: Asked
    keys: tuple[str, ...]
    """One for each request."""


class Feeder:
    """Feeds the fleet with the lines of one job; `run` it once, on a running event loop.

    Each request has a key that follows from the job and the line's id. A line that was submitted before a
    crash is so joined, not computed again. `window` bounds how many are under way; it shrinks to half of what
    the queue takes, so that others have room. While the queue is full, or Redis away, nothing is submitted.
    """

    def __init__(
        self,
        fleet: Client,
        job_id: str,
        dialect: Dialect,
        results: ResultFiles,
        *,
        window: int = WINDOW,
        result_ttl_s: float,
    ) -> None:
        self._fleet = fleet
        self._job_id = job_id
        self._dialect = dialect
        self._results = results
        self._window = window
        self._result_ttl_s = result_ttl_s
        self._open_at = 0.0
        self._under_way: dict[asyncio.Task[None], Item] = {}
        self._free = asyncio.Event()
        self._ending: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._is_cancelled = False
        self._is_expired = False
        self._faults: list[BaseException] = []

    @property
    def in_flight(self) -> int:
        """Lines that are asked about now."""
        return len(self._under_way)

    async def run(self, lines: AsyncIterator[Line]) -> None:
        """Answer all lines that are not answered; returns when all are, or after `cancel`.

        Raises:
            BrokerUnavailable: in a way that waiting does not mend.
            OSError: the results cannot be written.
        """
        await self._leave_room()
        try:
            async for line in lines:
                item = self._taken(line)
                if item is None:
                    await asyncio.sleep(0)  # a long run of lines that were answered before
                    continue
                await self._room()
                if self._is_cancelled or self._faults:
                    break
                task = asyncio.create_task(self._answer(item))
                self._under_way[task] = item
                task.add_done_callback(self._left)
            while self._under_way and not self._faults:
                await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
        finally:
            left = tuple(self._under_way)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        if self._faults:
            raise self._faults[0]

    async def cancel(self) -> None:
        """Feed no more, and cancel what is under way; what is answered by then is kept."""
        self._is_cancelled = True
        await self._end_requests()

    async def expire(self) -> None:
        """Cancel what is under way, and refuse all that is not answered, since its time is over."""
        self._is_expired = True
        await self._end_requests()

    # --- lines

    def _taken(self, line: Line) -> Item | None:
        """What a line asks; None if it was answered before, or has just been refused."""
        custom_id = None
        try:
            fields = _fields(line)
            custom_id = _custom_id(fields)
            is_new = self._results.answered.read(id_digest(custom_id))
            if is_new is None:
                custom_id = None  # it is the earlier line's
                raise DuplicateCustomId("an earlier line has the same custom_id: give each line its own")
            if not is_new:
                return None
            asked = self._parsed(fields)
        except StreamfleetError as error:
            self._refuse_line(line, custom_id, error)
            return None
        key = f"{self._job_id}:{id_digest(custom_id).hex()}"
        more = (f"{key}:{place}" for place in range(1, len(asked.requests)))
        return Item(custom_id, asked, (key, *more))

    def _parsed(self, fields: dict[str, Any]) -> Asked:
        try:
            return self._dialect.parse(fields)
        except StreamfleetError:
            raise
        except Exception as error:  # noqa: BLE001 - as above: one line must not end the job
            raise InvalidRequest(f"the request cannot be read ({type(error).__name__})") from None

    def _refuse_line(self, line: Line, custom_id: str | None, error: StreamfleetError) -> None:
        if custom_id is not None:
            self._results.refuse(encoded(self._dialect.refusal(custom_id, error)))
        elif self._results.answered.read(line_digest(line.number)):
            refusal = {**self._dialect.refusal(None, error), "line": line.number}
            self._results.refuse(encoded(refusal))

    # --- requests

    async def _answer(self, item: Item) -> None:
        ends: list[End] = []
        for request, key in zip(item.asked.requests, item.keys, strict=True):
            outcome = await self._outcome(request, key)
            if outcome is None:
                return
            if not isinstance(outcome, End):
                self._results.refuse(encoded(self._dialect.refusal(item.custom_id, outcome)))
                return
            ends.append(outcome)
        ids = [f"{self._fleet.queue}:{self._rid(key)}" for key in item.keys]
        try:
            line = encoded(item.asked.answer(item.custom_id, ids, ends))
        except Exception as error:  # noqa: BLE001 - whatever it is, it must not cost the other lines
            told = GenerationFailed(f"the answer cannot be told ({type(error).__name__})")
            self._results.refuse(encoded(self._dialect.refusal(item.custom_id, told)))
        else:
            self._results.answer(line)

    def _rid(self, key: str) -> str:
        return keyed_rid(self._fleet.tenant.encode(), key)

    async def _outcome(self, request: Request, key: str) -> End | StreamfleetError | None:
        """What a request comes to; None if the job is cancelled before it has come to anything."""
        tries = 0
        while True:
            await self._opened()
            if self._is_expired:
                return BatchExpired("the job's time was over before this line was answered")
            if self._is_cancelled:
                return None
            try:
                return await self._fleet.run(
                    request,
                    idempotency_key=key,
                    lane="bulk",
                    deadline_s=MAX_DEADLINE_MS / 1000,
                    result_ttl_s=self._result_ttl_s,
                )
            except QueueFull as error:
                self._pause(max(LEAST_PAUSE_S, error.retry_after))
            except BrokerUnavailable as error:
                if error.reason in _HOPELESS:
                    raise
                self._pause(AWAY_PAUSE_S)
            except StreamfleetError as error:
                tries += 1
                if isinstance(error, Cancelled) and self._ending.done():
                    continue
                if not isinstance(error, IncompleteGeneration) or tries >= LOST_TRIES:
                    return error

    async def _end_requests(self) -> None:
        self._free.set()
        if not self._ending.done():
            self._ending.set_result(None)
        doomed = dict(self._under_way)
        while doomed:
            # By their ids: those that a run before this one has submitted are not the client's own. And more
            # than once: one that is on its way to Redis is not known there yet.
            rids = [self._rid(key) for item in doomed.values() for key in item.keys]
            await asyncio.gather(*(self._fleet.cancel(rid) for rid in rids), return_exceptions=True)
            done, _ = await asyncio.wait(doomed, timeout=CANCEL_AGAIN_S)
            for task in done:
                del doomed[task]

    # --- the window

    async def _opened(self) -> None:
        """Wait until requests may be submitted again, or shall end."""
        while (pause_s := self._open_at - _now()) > 0 and not self._ending.done():
            await asyncio.wait([self._ending], timeout=pause_s)

    def _pause(self, seconds: float) -> None:
        self._open_at = max(self._open_at, _now() + seconds)

    async def _room(self) -> None:
        while len(self._under_way) >= self._window and not self._is_cancelled and not self._faults:
            self._free.clear()
            await self._free.wait()

    def _left(self, task: asyncio.Task[None]) -> None:
        del self._under_way[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._faults.append(error)
        self._free.set()

    async def _leave_room(self) -> None:
        try:
            depth = await self._fleet.depth()
        except StreamfleetError:
            return  # whatever it is, it is met again, and waited for, with the first line
        self._window = max(1, min(self._window, depth.limit // 2))


def _fields(line: Line) -> dict[str, Any]:
    if line.data is None:
        raise LongLine(
            f"the line is over {MAX_LINE_BYTES} bytes: no request may be that long", limit=MAX_LINE_BYTES
        )
    try:
        fields = from_json(line.data, allow_inf_nan=False)
    except ValueError:
        raise BrokenLine("the line is no JSON") from None
    if not isinstance(fields, dict):
        raise BrokenLine("the line is no JSON object")
    return fields


def _custom_id(fields: dict[str, Any]) -> str:
    custom_id = fields.get("custom_id")
    if not isinstance(custom_id, str) or not 1 <= len(custom_id) <= MAX_CUSTOM_ID_CHARS:
        raise BadCustomId(f"custom_id: a text of 1 to {MAX_CUSTOM_ID_CHARS} characters is wanted")
    return custom_id


def _now() -> float:
    return asyncio.get_running_loop().time()
