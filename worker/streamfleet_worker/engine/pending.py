"""The requests that are here, the items that they wait for, and what comes of both."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from streamfleet_common.errors import DeadlineExceeded
from streamfleet_worker.engine.asked import Asked, Shared
from streamfleet_worker.engine.base import Finished, Output, Parts
from streamfleet_worker.engine.faults import about, failure_of, place_of
from streamfleet_worker.engine.item import RetryLater

if TYPE_CHECKING:
    from streamfleet_worker.engine.answer_cache import AnswerCache
    from streamfleet_worker.engine.base import Arrival, Key
    from streamfleet_worker.engine.item_line import ItemLine

log = logging.getLogger(__name__)


class Pending:
    """Puts the items of requests into the line, and the answers of requests together.

    Args:
        line: where items wait.
        answers: results that are kept.
        clock: seconds, monotonic.
    """

    def __init__(self, line: ItemLine[Shared], answers: AnswerCache, clock: Callable[[], float]) -> None:
        self._line = line
        self._answers = answers
        self._clock = clock
        self._asked: dict[Key, Asked] = {}
        self._shared: dict[object, Shared] = {}
        self.next_deadline = math.inf
        """When `expire` has something to do, or before."""
        self.item_bytes = 0
        """Memory of the items that are here."""
        self.coalesced = 0
        """Items that were here already when they were asked for."""

    def add(self, key: Key, arrival: Arrival, now: float, outputs: list[Output]) -> None:
        """Take a request in; one that is here already is ignored."""
        if key in self._asked:
            return
        asked = self._asked[key] = Asked.of(key, arrival, now)
        self.next_deadline = min(self.next_deadline, arrival.deadline_at)
        for place, spec in enumerate(asked.job.items):
            # Of one scope: how long an answer takes must not tell what others ask for.
            like = None if spec.digest is None else (arrival.scope, spec.group, spec.digest)
            if like is not None:
                result = self._answers.get(like, now)
                if result is not None:
                    asked.give(place, result)
                    continue
                item = self._shared.get(like)
                if item is not None:
                    self._join(item, asked, place, now)
                    continue
            item = Shared(spec, arrival.accepted_at, key=like, owners=[(asked, place)])
            asked.items[place] = item
            self.item_bytes += spec.bytes
            if like is not None:
                self._shared[like] = item
            self._line.add(item)
        if not asked.missing:
            self._answer(asked, outputs)

    def forget(self, keys: Collection[Key]) -> None:
        """Requests go, and nobody is told."""
        for key in keys:
            if key in self._asked:
                self._leave(self._asked[key])

    def expire(self, now: float, outputs: list[Output]) -> None:
        """End those whose deadline has come."""
        late = [asked for asked in self._asked.values() if now >= asked.arrival.deadline_at]
        for asked in late:
            error = DeadlineExceeded("the deadline passed before the answer was complete")
            self._end(asked, asked.failed("expired", now, error), outputs)
        deadlines = (asked.arrival.deadline_at for asked in self._asked.values())
        self.next_deadline = min(deadlines, default=math.inf)

    def give(self, item: Shared, value: object, outputs: list[Output]) -> None:
        """A part of an item has come."""
        item.parts.append(value)
        # Whoever asks for the same from now on has missed it.
        self._unshare(item)
        for asked, _ in item.owners:
            outputs.append(Output(asked.key, Parts([value])))

    def end(self, item: Shared, value: object, outputs: list[Output]) -> None:
        """An item has its result, or the last of its parts."""
        owners = self._close(item)
        result = item.parts or value
        if item.key is not None and result is not None:
            self._answers.put(item.key, result, self._clock())
        for asked, place in owners:
            if asked.give(place, result):
                self._answer(asked, outputs)

    def fail(self, item: Shared, error: Exception, outputs: list[Output]) -> None:
        """An item has failed, and with it whoever waits for it."""
        if item.ended:
            return  # with its request, of which another item has failed
        after_s = error.after_s if isinstance(error, RetryLater) else None
        for asked, place in self._close(item):
            asked.items.pop(place, None)
            if asked.key not in self._asked:
                continue  # it has this item twice
            # Without the error's own words, which may quote the item.
            where = place_of(error)
            log.warning(
                "request %s epoch %d failed on item %d: %s", *asked.key, place, where, extra=about(asked.key)
            )
            cause = failure_of(error, place if asked.job.n > 1 else None)
            self._end(asked, asked.failed("failed", self._clock(), cause, after_s), outputs)

    # --- inner steps

    def _join(self, item: Shared, asked: Asked, place: int, now: float) -> None:
        """Let a request wait for an item that is there already."""
        self.coalesced += 1
        item.owners.append((asked, place))
        asked.items[place] = item
        if not item.waits:
            asked.start(now)
            asked.launch = item.launch
        elif asked.arrival.accepted_at < item.accepted_at:
            self._line.hasten(item, asked.arrival.accepted_at)

    def _answer(self, asked: Asked, outputs: list[Output]) -> None:
        now = self._clock()
        try:
            finished = asked.answer(now)
        except Exception as error:  # noqa: BLE001  results that make no answer fail their request alone
            where = place_of(error)
            log.warning("request %s epoch %d has no answer: %s", *asked.key, where, extra=about(asked.key))
            finished = asked.failed("failed", now, failure_of(error))
        self._end(asked, finished, outputs)

    def _close(self, item: Shared) -> list[tuple[Asked, int]]:
        """End an item; gives who waited for it."""
        owners, item.owners, item.ended = item.owners, [], True
        self.item_bytes -= item.spec.bytes
        self._unshare(item)
        return owners

    def _unshare(self, item: Shared) -> None:
        if item.key is not None and self._shared.get(item.key) is item:
            del self._shared[item.key]

    def _end(self, asked: Asked, finished: Finished, outputs: list[Output]) -> None:
        outputs.append(Output(asked.key, finished))
        self._leave(asked)

    def _leave(self, asked: Asked) -> None:
        """A request goes; what only it wanted goes with it, but for what runs."""
        del self._asked[asked.key]
        if not self._asked:
            self.next_deadline = math.inf
        for item in asked.items.values():
            item.owners = [owner for owner in item.owners if owner[0] is not asked]
            if not item.owners and not item.ended:
                if item.waits:
                    self._line.remove(item)
                self._close(item)
        asked.items.clear()
