"""The events of one request as they follow each other, whatever the channel loses, repeats or disorders."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from typing import Literal

from streamfleet_common.errors import (
    BrokerUnavailable,
    GenerationFailed,
    IncompleteGeneration,
    InvalidRequest,
    StreamfleetError,
    Undecodable,
)
from streamfleet_common.frames import Frame
from streamfleet_common.records import Record
from streamfleet_common.schemas import End, Restart
from streamfleet_common.submissions import Submitted
from streamfleet_producer.answer import end_of, too_late, vanished
from streamfleet_producer.link import Link, closed
from streamfleet_producer.place import Place, unknown
from streamfleet_producer.shown import Shown
from streamfleet_producer.ticket import failure_of
from streamfleet_producer.transcript import StreamEvent, Transcript

MAX_FRAMES = 1024
MAX_BYTES = 4 * 1024 * 1024
"""What is kept for a slow reader. Beyond it the frames are dropped and read from the log when he comes."""


class EventReader:
    """Listens on a request's channel, and reads the log and the record whenever something may be missing.

    A message only ever rings: it is kept as it came, up to the two bounds, and opened when somebody reads.
    """

    def __init__(
        self,
        link: Link,
        *,
        on_restart: Literal["restart", "fail"] = "restart",
        max_frames: int = MAX_FRAMES,
        max_bytes: int = MAX_BYTES,
    ) -> None:
        self.id = ""
        self.heard_at = 0.0
        self.deadline_at = math.inf
        self.late_at = math.inf
        self.end: End | None = None
        self.error: StreamfleetError | None = None
        """What stands in place of any further event, once those in `_ready` are read."""
        self.voids: deque[Shown | None] = deque()
        """What each restart that is still to be read takes back; None if that is not known."""
        self._link = link
        self._on_restart = on_restart
        self._max_frames = max_frames
        self._max_bytes = max_bytes
        self._owned = False
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._waiter: asyncio.Future[None] | None = None
        self._doubt = False
        """Something may be missing: the log and the record are to be read before anything else."""
        self._gap = False
        """The doubt is about an event that must have come before one that did."""
        self._is_late = False
        self._ended = False
        """The record has its end: the log is complete, and will be read once more."""
        self._outage_since = math.inf
        self._transcript = Transcript()
        self._log_at = (0, 0)
        self._ready: deque[tuple[StreamEvent, Frame | Place | None]] = deque()
        self._at: Frame | Place | None = None
        self.is_over = False
        """Nothing follows the place behind which it was to go on."""
        self._after: Place | None = None
        """What was shown up to there is not shown again."""
        self._end_place: Place | None = None

    @property
    def place(self) -> Place | None:
        """Behind what `next` has given another reader may go on; None before the first event."""
        at = self._at
        return Place(at.epoch, at.seq) if isinstance(at, Frame) else at

    # --- from the submit to the end

    async def listen(self, rid: str) -> None:
        """Listen for a request; confirmed by the server on return."""
        self.id = rid
        if not self._link.hear(rid, self):
            await self._link.listen([(rid, self)])

    def accepted(self, submitted: Submitted, *, keyed: bool, deadline_s: float) -> None:
        """Begin to worry: the request exists. It is ours to cancel, unless its key was used before."""
        joined = submitted.outcome == "duplicate"
        self._owned = not (joined and keyed)
        if not self._owned:
            self._link.sharing.join(self.id, self)
        self.arm(deadline_at=self._link.now() + deadline_s, doubtful=joined)

    def arm(self, *, deadline_at: float, doubtful: bool) -> None:
        """Begin to worry. The time is the loop's, in seconds; `doubtful` reads the log at once."""
        if self._link.is_closed:
            self.abandon()
            return
        self.heard_at = self._link.now()
        self.deadline_at, self.late_at = deadline_at, deadline_at + self._link.patience.grace_s
        self._doubt = self._doubt or doubtful
        self._link.watch.add(self)
        self._link.waiting.add(self)

    async def resume(self, after: Place, record: Record) -> None:
        """Let nothing come but what follows a place that a reader was given before.

        What he was shown is read from the log, so that later attempts can be compared with it. To be called
        before `arm`; `record` is one that was just read.

        Raises:
            InvalidRequest: no event of the request has this place.
        """
        self._after = self._at = after
        self.is_over = record.end is not None and after == Place(record.end.epoch, record.end.seq)
        if after.part and not _is_part_of(after, record):
            raise unknown()
        first: tuple[int, int] | None = None
        found = False
        while self._log_at < after.at:
            page = await self._link.broker.events(self.id, "{}-{}".format(*self._log_at) if first else "-")
            if not page:
                break
            first = first or (page[0].epoch, page[0].seq)
            found = found or any((frame.epoch, frame.seq) == after.at for frame in page)
            self._take_page(page)
        if not found:
            self._begin_behind(after, record, is_logged=first is not None)

    def _begin_behind(self, after: Place, record: Record, *, is_logged: bool) -> None:
        """Begin at a place that the log does not have; it may have been deleted, or have lost what it had."""
        last = self._log_at
        if not is_logged:
            # The record alone can tell that this is no place of this request.
            last = (record.epoch, after.seq if record.end is None else record.end.seq)
        if after.at > last:
            raise unknown()
        if not is_logged and record.end is not None and after.at == last:
            return  # nothing is missing, or what is made of the end alone
        self._ready.clear()
        self.voids.clear()
        self.end = self.error = self._end_place = None
        self._transcript = Transcript()
        self._transcript.begin_behind(*after.at)
        self._log_at = after.at

    async def leave(self) -> None:
        """Stop listening; cancel the request if it is ours, has not ended, and nobody shares it."""
        self._link.waiting.discard(self)
        self._link.watch.discard(self)
        self._link.leave(self.id, self)
        self._frames.clear()
        self._link.sharing.leave(self.id, self)
        if self._owned and self.end is None and not self._link.sharing.pass_on(self.id):
            await self._link.cancel_quietly(self.id)

    def abandon(self) -> None:
        self._link.sharing.leave(self.id, self)
        if self._owned and self.end is None and not self._link.sharing.pass_on(self.id):
            self._link.cancels.post(self.id)
        self._owned = False
        self.error = self.error or closed()
        self._wake()

    def inherit(self) -> None:
        self._owned = True

    def fail(self, error: StreamfleetError) -> StreamfleetError:
        """Let nothing but this error come from now on."""
        self.error = error
        self._ready.clear()
        return error

    # --- a Listener, and Watched

    def heard(self, data: bytes) -> None:
        self.heard_at = self._link.now()
        self._frames.append(data)
        self._bytes += len(data)
        if len(self._frames) > self._max_frames or self._bytes > self._max_bytes:
            self._frames.clear()
            self._bytes = 0
            self._doubt = True
        self._wake()

    def missed(self) -> None:
        self._doubt = True
        self._wake()

    def silent(self) -> None:
        self._doubt = True
        self._wake()

    def late(self) -> None:
        self._is_late = self._doubt = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- the order of things

    async def next(self) -> StreamEvent | None:
        """The next event; None when there are no more. Raises as `TokenStream` says."""
        while True:
            if self._ready:
                event, at = self._ready.popleft()
                if at is not None:
                    self._at = at
                return event
            if self.end is not None:
                self._at = self._end_place
            if self.error is not None:
                raise self.error
            if self.end is not None:
                return None
            if self._doubt:
                await self._catch_up()
            elif self._frames:
                data = self._frames.popleft()
                self._bytes -= len(data)
                self._take_live(data)
            else:
                self._waiter = asyncio.get_running_loop().create_future()
                try:
                    await self._waiter
                finally:
                    self._waiter = None

    def _take_live(self, data: bytes) -> None:
        try:
            frame = Frame.parse(data)
            verdict = "next" if frame.is_end else self._transcript.judge(frame)
            if verdict == "old" or (verdict == "gap" and self._transcript.hole):
                return
            if verdict == "gap":
                self._doubt = self._gap = True
            elif not frame.body:
                self._doubt = True  # too large for a channel: the log has it, or the record
            elif frame.is_end:
                self._take_end(frame, last_word=False)
            else:
                self._apply(frame)
        except (Undecodable, InvalidRequest):
            self._doubt = True  # noise on the channel; should the log say the same, it is raised there

    def _apply(self, frame: Frame) -> None:
        events = self._transcript.apply(frame, frame.event())
        if len(events) == 1 and self._after is None and not isinstance(events[0], Restart):
            self._ready.append((events[0], frame))  # as nearly always
        elif events:
            at = Place(frame.epoch, frame.seq)
            # A restart and all that it brings again is one step: who comes back amid it begins it anew.
            self._show(events, [*[None] * (len(events) - 1), at], at)

    def _show_last(self, events: Sequence[StreamEvent], end: End, at: Place) -> None:
        """Show what comes with the end."""
        places: list[Place | None] = [None] * len(events)
        if not end.last_seq and not any(isinstance(event, Restart) for event in events):
            # All of it is made of the end, for every reader alike, so that it can be counted.
            places = [Place(*at.at, number) for number in range(1, len(events) + 1)]
        if self._after is not None and self._after.at == at.at and self._after.part:
            events, places = events[self._after.part :], places[self._after.part :]
        self._show(events, places, at)

    def _show(self, events: Sequence[StreamEvent], places: Sequence[Place | None], at: Place) -> None:
        if self._after is not None and self._after.covers(at):
            return  # it was shown before
        for event, place in zip(events, places, strict=True):
            if self.error is not None:
                return
            if isinstance(event, Restart):
                if self._on_restart == "fail":
                    self.error = GenerationFailed(
                        f"{event.reason}, and the request asked to fail rather than begin its text again: "
                        "send it again",
                        retryable=True,
                    )
                    return
                self.voids.append(self._transcript.void)
            self._ready.append((event, place))

    def _take_end(self, frame: Frame, *, last_word: bool) -> None:
        if frame.epoch < self._transcript.epoch and not last_word:
            # Noise, or the server lost what came after it: only the record can tell.
            self._doubt = True
            return
        end, at = end_of(frame), Place(frame.epoch, frame.seq)
        failure = failure_of(end)
        if failure is None:
            try:
                if self._transcript.proves(end):
                    self._show_last(self._transcript.close(end), end, at)
                elif last_word:
                    self._show_last(self._transcript.complete(end), end, at)
                else:
                    self._doubt = True  # read the log up to its own copy of this end
                    return
            except ValueError:
                failure = IncompleteGeneration(
                    "part of the text is lost, and what was shown is not how the answer begins: "
                    "read the whole answer from `result`, or send the request again"
                )
        self.end, self._end_place = end, at
        self.error = self.error or failure

    async def _catch_up(self) -> None:
        """Read a page of the log; when it has no more, the record."""
        self._doubt = False  # first, so that a doubt that comes meanwhile is not lost
        try:
            after = max(self._log_at, (self._transcript.epoch, self._transcript.seq))
            page = await self._link.broker.events(self.id, "{}-{}".format(*after) if any(after) else "-")
            self._take_page(page)
            if page:
                self._doubt = True  # there may be more
            else:
                await self._ask_record()
            self._outage_since = math.inf
        except BrokerUnavailable as error:
            now = self._link.now()
            self._outage_since = min(self._outage_since, now)
            if self._is_late:
                self.error = too_late()
            elif now - self._outage_since >= self._link.patience.outage_s:
                self.error = error
            # Otherwise the watch, or the subscriber when it is back, comes again.
        except InvalidRequest as error:
            self.error = error  # the log or the record holds what no peer of this version wrote
        except asyncio.CancelledError:
            self._doubt = True  # whoever gave up waiting has learned nothing; the next one asks again
            raise

    def _take_page(self, page: Sequence[Frame]) -> None:
        for frame in page:
            self._log_at = (frame.epoch, frame.seq)
            self._take_logged(frame)

    def _take_logged(self, frame: Frame) -> None:
        if self.end is not None or self.error is not None:
            return
        if frame.is_end:
            self._take_end(frame, last_word=True)
            return
        verdict = self._transcript.judge(frame, logged=True)
        if verdict == "next":
            self._apply(frame)
        elif verdict == "gap":
            self._transcript.hole = True

    async def _ask_record(self) -> None:
        record = await self._link.record(self.id)
        if record is None:
            self._owned = False  # whoever submits it again under its key must not meet a cancellation of ours
            self.error = vanished()
        elif record.end is not None:
            if self._ended:
                self._take_end(record.end, last_word=True)
            else:
                # Events may have come between the log's last page and the end.
                self._ended = self._doubt = True
        elif self._is_late:
            self.error = too_late()
        elif self._gap:
            self._transcript.hole = True  # the log does not have what is missing
        self._gap = False


def _is_part_of(place: Place, record: Record) -> bool:
    """Whether the end in a record comes with events that are counted by part, at this place."""
    if record.end is None or place.at != (record.end.epoch, record.end.seq):
        return False
    return end_of(record.end).last_seq == 0
