"""Frames: what goes over a channel, lies in a log and closes a record.

``epoch-seq`` (for `start` and `end` also ``,queued,started,now,attempts``), a space, and the event as the
codec made it. The scripts write the head, since only they know the order and the server's time; the body
is the worker's. A frame without a body announces an event too large for a channel: it is read from the log,
or from the record.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from streamfleet_common import codec
from streamfleet_common.errors import Undecodable
from streamfleet_common.schemas import Event

_HEAD = re.compile(rb"(\d+)-(\d+)(?:,(\d+),(\d+),(\d+),(\d+))? ")


class Frame(NamedTuple):
    """One event and its place; epochs and, within one, `seq` count from 1 (a `start` has seq 0)."""

    epoch: int
    seq: int
    body: bytes
    times: tuple[int, ...] = ()
    """queued, started, now (server ms; started 0 if it never was) and attempts; () but for start and end."""

    @property
    def id(self) -> str:
        """The place as text, as the log has it: `epoch-seq`."""
        return f"{self.epoch}-{self.seq}"

    @property
    def is_end(self) -> bool:
        """Told without opening the body: only starts (seq 0) and ends carry times."""
        return self.seq > 0 and bool(self.times)

    @classmethod
    def parse(cls, data: bytes) -> Frame:
        """Take a frame apart.

        Raises:
            Undecodable: no frame.
        """
        head = _HEAD.match(data)
        try:
            if head is None:
                raise ValueError
            epoch, seq, *times = head.groups()
            # More digits than Python's limit are a ValueError as well.
            return cls(int(epoch), int(seq), data[head.end() :], tuple(map(int, times)) if times[0] else ())
        except ValueError:
            raise Undecodable("not a frame: want `epoch-seq`, a space and an event") from None

    def event(self) -> Event:
        """The event, with the times of the head.

        Raises:
            Undecodable, InvalidRequest: the body is no event.
        """
        return codec.decode_event(self.body, times=self.times)
