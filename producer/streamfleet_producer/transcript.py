"""What a reader was shown of a request, and what the next event adds to it. No Redis, no asyncio."""

from __future__ import annotations

from typing import Literal

from streamfleet_common.frames import Frame
from streamfleet_common.schemas import Delta, End, Event, Parts, Prefill, Restart, Start
from streamfleet_producer.replay import Replay
from streamfleet_producer.shown import Shown

Verdict = Literal["next", "old", "gap"]
StreamEvent = Start | Prefill | Delta | Parts | Restart
LOST = "the worker was lost, or failed and the request is tried again"
"""Why a text begins anew, where nobody says so: a reader sees the new attempt alone."""
DIFFERS = f"{LOST}; this attempt was to be like the last one to the bit, and is not"
GONE = "the log of the events is gone, so that nothing proves what was shown: this is the whole answer"


class Transcript:
    """The position reached in a request's events: `epoch`, and `seq` within it.

    An event follows iff it is the next of its epoch, or opens a higher one; so none is taken twice, and none
    of an attempt that has been given up.

    A higher epoch begins the text anew. Where both attempts were made by workers that promise each other's
    bits, nobody need see that: the new one is compared with what was shown, and shown itself from where that
    ended. If they do not, or it differs after all, there is a `Restart`, and then all that it has said.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.seq = 0
        self.said = Shown()
        """What the attempt of this epoch has said, shown or not."""
        self.void: Shown | None = Shown()
        """What was shown before the last restart; None if that is not known."""
        self.hole = False
        """An event is missing that the log does not have: only the end can help."""
        self._is_blind = False
        """What was shown so far is not known."""
        self._exact = ""
        self._start: Start | None = None
        self._prefill: Prefill | None = None
        self._replay: Replay | None = None
        """While it goes on, more was shown than the attempt of this epoch has said."""
        self._shown_prefill: Prefill | None = None

    def begin_behind(self, epoch: int, seq: int) -> None:
        """Go on behind an event that was shown to a reader before, where the log no longer tells what was.

        What follows it in its epoch is shown. Otherwise all is void, and the whole answer comes.
        """
        self.epoch, self.seq, self._is_blind = epoch, seq, True

    def judge(self, frame: Frame, *, logged: bool = False) -> Verdict:
        """Whether a frame (no end) follows. One that leaves a gap is "gap".

        A `logged` frame may open an epoch without its start: all that the log has has been read before it.
        """
        if frame.epoch == self.epoch:
            if frame.seq == self.seq + 1:
                return "next"
            return "old" if frame.seq <= self.seq else "gap"
        if frame.epoch < self.epoch:
            return "old"
        return "next" if frame.seq <= int(logged) else "gap"

    def apply(self, frame: Frame, event: Event) -> list[StreamEvent]:
        """Go on to a frame that follows. Gives what is to be shown for it."""
        shown: list[StreamEvent] = []
        if frame.epoch > self.epoch:
            reason = event.reason if isinstance(event, Restart) else LOST
            shown += self._open(frame.epoch, event.exact if isinstance(event, Start) else "", reason)
        self.seq = frame.seq
        return shown + self._take(event)

    def proves(self, end: End) -> bool:
        """Whether the end says that nothing is missing, and of another attempt.

        A server that lost data counts epochs anew, so that two attempts may bear the same number.
        """
        counted = end.of == self.epoch > 0 and self.seq == end.last_seq
        if self._is_blind and self.seq:
            return counted
        return counted and all(map(self.said.agree_with, end.choices)) and self.said.begin(end.outputs)

    def complete(self, end: End) -> list[StreamEvent]:
        """The events that are missing before an end, made of the whole text, or output, that it carries.

        Raises:
            ValueError: what was said is not how the answer begins, so nothing can make it whole.
        """
        made: list[StreamEvent] = []
        if self._is_blind and end.last_seq:
            self._open(end.of, end.exact, GONE)
            self.void = None
            made.append(Restart(reason=GONE))
        elif end.of != self.epoch and self.epoch:
            made += self._open(end.of, end.exact, LOST)
        indices = {choice.index for choice in end.choices}
        if not indices.issuperset(self.said.lines):
            raise ValueError("a choice that was shown is not in the answer")
        for choice in end.choices:
            rest = self.said.rest_of(choice)
            if rest is not None:
                made += self._take(rest)
        return made + self.close(end)

    def close(self, end: End) -> list[StreamEvent]:
        """What is to be shown before the end of the attempt of this epoch, whose events have all come.

        That is a handler's output, if it did not come in parts.

        Raises:
            ValueError: what was said is not how the output begins.
        """
        if self._is_blind and self.seq:
            return []
        missing = self.said.parts_missing_of(end.outputs)
        made = [] if missing is None else self._take(missing)
        return made if self._replay is None or self._replay.caught_up() else made + self._differ()

    def _open(self, epoch: int, exact: str, reason: str) -> list[StreamEvent]:
        shown, prefill = self._shown(), (self._replay and self._shown_prefill) or self._prefill
        # An attempt of which nothing but the start was seen takes nothing back.
        is_empty = self.seq == 0 and self._replay is None and not (self._is_blind and self.epoch > 1)
        is_same = exact == self._exact != ""
        is_blind, self._is_blind = self._is_blind, False
        self.epoch, self.seq, self.hole = epoch, 0, False
        self.said, self._exact, self._start, self._prefill = Shown(), exact, None, None
        self._replay, self._shown_prefill = None, prefill
        if is_empty:
            return []
        if is_same:
            self._replay = Replay(shown, to_the_bit=True)
            return []
        self.void = None if is_blind else shown
        return [Restart(reason=reason)]

    def _shown(self) -> Shown:
        return self.said if self._replay is None else self._replay.shown

    def _take(self, event: Event) -> list[StreamEvent]:
        match event:
            case Delta() | Parts():
                return self._compare(event, self._replay)
            case Start():
                self._start = event
                return [event] if self._replay is None else []
            case Prefill():
                self._prefill = event
                if self._replay is None or self._shown_prefill is None:
                    return [event]
                return [] if event == self._shown_prefill else self._differ()
            case _:
                return []

    def _compare(self, event: Delta | Parts, replay: Replay | None) -> list[StreamEvent]:
        try:
            new = event if replay is None else replay.take(event)
        except ValueError:
            return self._differ(event)
        self.said.add(event)
        if replay is not None and replay.caught_up():
            self._replay = None
        return [] if new is None else [new]

    def _differ(self, last: Delta | Parts | None = None) -> list[StreamEvent]:
        """Take back what was shown, and show what this attempt has said, the last event included."""
        self.void, self._replay = self._shown(), None
        if last is not None:
            self.said.add(last)
        openings = [event for event in (self._start, self._prefill) if event is not None]
        return [Restart(reason=DIFFERS), *openings, *self.said.events()]
