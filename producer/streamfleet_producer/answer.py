"""The end of one request, for a caller who wants nothing before it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from types import TracebackType

from streamfleet_common.errors import (
    BrokerUnavailable,
    DeadlineExceeded,
    IncompleteGeneration,
    InvalidRequest,
    Undecodable,
)
from streamfleet_common.frames import Frame
from streamfleet_common.records import Record
from streamfleet_common.schemas import End
from streamfleet_common.submissions import Submission, Submitted
from streamfleet_producer.link import Link, closed
from streamfleet_producer.ticket import failure_of


class Answer:
    """Listens on a request's channel for its end, and asks the record whenever a message may be missing.

    `future` gives the `End`, or fails with the error that the end stands for; with DeadlineExceeded,
    IncompleteGeneration (the record vanished), Cancelled (the client was closed) or BrokerUnavailable.
    """

    # What most answers never change is said once, of all of them.
    heard_at = 0.0
    deadline_at = math.inf
    late_at = math.inf
    _owned = False
    _ended = False
    _armed = False
    _doubtful = False
    _asking = False
    _is_late = False
    _outage_since = math.inf

    def __init__(self, link: Link, rid: str) -> None:
        self.rid = rid
        self.future = link.future()
        self._link = link
        self._keyed = False
        self._deadline_s = 0.0

    def submit(self, submission: Submission, *, keyed: bool, deadline_s: float, late_at: float) -> None:
        """Submit the request, with whatever else is waiting to be; a refusal comes from `future`."""
        if self._link.is_closed:
            self._fail(closed())  # while its channel was subscribed
            return
        self._keyed, self._deadline_s, self.late_at = keyed, deadline_s, late_at
        self._link.submits.send(submission, self.future.done, self._submitted)

    def _submitted(self, outcome: Submitted | BaseException) -> None:
        self._link.told(self.rid)
        if isinstance(outcome, Submitted):
            refusal = self._link.refusal(outcome)
            if refusal is None:
                self.accepted(outcome, keyed=self._keyed, deadline_s=self._deadline_s, late_at=self.late_at)
            else:
                self._fail(refusal)
        elif isinstance(outcome, asyncio.CancelledError):
            self.future.cancel()
        else:
            self._fail(outcome)

    def accepted(self, submitted: Submitted, *, keyed: bool, deadline_s: float, late_at: float) -> None:
        """Begin to worry: the request exists. It is ours to cancel, unless its key was used before."""
        joined = submitted.outcome == "duplicate"
        self._owned = not (joined and keyed)
        if self.future.done():
            self._cancel()  # whoever asked for it has left meanwhile, unless it has ended already
            return
        if not self._owned:
            self._link.sharing.join(self.rid, self)
        deadline_at = self._link.now() + deadline_s
        late_at = min(late_at, deadline_at + self._link.patience.grace_s)
        self.arm(deadline_at=deadline_at, late_at=late_at, doubtful=joined)

    def arm(self, *, deadline_at: float, late_at: float, doubtful: bool) -> None:
        """Begin to worry. Times are the loop's, in seconds; `doubtful` asks the record at once."""
        if self._link.is_closed:
            self.abandon()
            return
        self._armed = True
        self.heard_at = self._link.now()
        self.deadline_at, self.late_at = deadline_at, late_at
        self._link.watch.add(self)
        if doubtful or self._doubtful:
            self._ask()

    def leave(self) -> None:
        """Stop waiting; cancel the request if it is ours, has not ended, and nobody shares it."""
        self._link.waiting.discard(self)
        self._link.watch.discard(self)
        self._link.leave(self.rid, self)
        self._link.sharing.leave(self.rid, self)
        self._cancel()
        if not self.future.cancel() and not self.future.cancelled():
            self.future.exception()  # nobody may have asked, and that is no news

    def abandon(self) -> None:
        self._link.sharing.leave(self.rid, self)
        self._cancel()
        self._fail(closed())

    def inherit(self) -> None:
        self._owned = True

    def _cancel(self) -> None:
        if self._owned and not self._ended:
            self._owned = False
            if not self._link.sharing.pass_on(self.rid):
                self._link.cancels.post(self.rid)

    # --- a Listener

    def heard(self, data: bytes) -> None:
        if self.future.done():
            return
        self.heard_at = self._link.now()
        try:
            frame = Frame.parse(data)
        except Undecodable:
            self._ask()  # whatever that was: the record tells
            return
        if frame.is_end:
            if frame.body:
                self._take(frame)
            else:
                self._ask()  # too large for a channel

    def missed(self) -> None:
        self._ask()

    # --- Watched

    def silent(self) -> None:
        self._ask()

    def late(self) -> None:
        self._is_late = True
        self._ask()

    # --- outcomes

    def _take(self, frame: Frame) -> None:
        self._ended = True
        try:
            end = end_of(frame)
        except InvalidRequest as error:
            self._fail(error)
            return
        failure = failure_of(end)
        if failure is None:
            self.future.set_result(end)
        else:
            self._fail(failure)

    def _fail(self, error: BaseException) -> None:
        if not self.future.done():
            self.future.set_exception(error)

    def _ask(self) -> None:
        if self.future.done():
            return
        self._doubtful = True
        if self._armed and not self._asking:
            self._asking, self._doubtful = True, False
            self._link.records.put(self.rid).add_done_callback(self._told)

    def _told(self, told: asyncio.Future[Record | None]) -> None:
        self._asking = False
        if told.cancelled():
            return
        error = told.exception()
        if self.future.done():
            return
        if isinstance(error, BrokerUnavailable):
            self._outage(error)
        elif error is not None:
            self.future.set_exception(error)
        else:
            self._outage_since = math.inf
            record = told.result()
            if record is None:
                # Whoever submits it again under its key must not meet a cancellation of ours.
                self._ended = True
                self._fail(vanished())
            elif record.end is not None:
                self._take(record.end)
            elif self._is_late:
                self._fail(too_late())
            elif self._doubtful:
                self._ask()  # a doubt that came while the answer was on its way

    def _outage(self, error: BrokerUnavailable) -> None:
        now = self._link.now()
        self._outage_since = min(self._outage_since, now)
        if self._is_late:
            self._fail(too_late())
        elif now - self._outage_since >= self._link.patience.outage_s:
            self._fail(error)
        # Otherwise the watch, or the subscriber when it is back, asks again.


class Answers:
    """Answers that are waited for together: one round trip to listen, and none left behind."""

    def __init__(self, link: Link, rids: Sequence[str]) -> None:
        self._link = link
        self._answers = [Answer(link, rid) for rid in rids]

    async def __aenter__(self) -> list[Answer]:
        await self._link.listen([(answer.rid, answer) for answer in self._answers])
        self._link.waiting.update(self._answers)
        return self._answers

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for answer in self._answers:
            answer.leave()


def end_of(frame: Frame) -> End:
    """The end in a frame.

    Raises:
        Undecodable, InvalidRequest: there is none.
    """
    end = frame.event()
    if not isinstance(end, End):
        raise Undecodable("the last event of a request is no end: was the record written by hand?")
    return end


def vanished() -> IncompleteGeneration:
    """The error of a request whose record is gone before its end was read."""
    return IncompleteGeneration(
        "Redis no longer knows this request: it lost data, or the result's time ran out before it was read. "
        "Send the request again"
    )


def too_late() -> DeadlineExceeded:
    """The error of a request that was given up."""
    return DeadlineExceeded("no answer in time: allow more time, or start more workers")
