"""A supervisor's side of the socket by which it asks one worker process for its tally."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable

from streamfleet_worker.tally import Tally
from streamfleet_worker.tally_server import LENGTH_BYTES, QUESTION

MAX_BYTES = 16 << 20
"""A longer tally is none."""


class TallyClient:
    """Asks over `wire`, which is its own. To be made on an event loop; all methods are called there.

    `heard` is called with each tally, also with a late one, and with the last one, which comes unasked.
    """

    def __init__(self, wire: socket.socket, heard: Callable[[Tally], None] = lambda _: None) -> None:
        self.heard = heard
        self._wire = wire
        wire.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(wire, self.hear)
        self._unread = bytearray()
        self._answer: asyncio.Future[Tally] | None = None

    async def ask(self, limit_s: float) -> Tally | None:
        """The tally as of now; None if it does not come within `limit_s`.

        A process that has not answered is not asked again until it has: a late answer is nobody else's.
        """
        answer = self._answer
        if answer is None:
            if self._wire.fileno() < 0:
                return None
            answer = self._answer = self._loop.create_future()
            with contextlib.suppress(OSError):  # it is about to be found closed
                self._wire.send(QUESTION)
        await asyncio.wait([answer], timeout=limit_s)
        return answer.result() if answer.done() and not answer.cancelled() else None

    def hear(self) -> None:
        """Take in what has come; to be called once more when the process has ended."""
        while self._wire.fileno() >= 0:
            try:
                received = self._wire.recv(1 << 20)
            except BlockingIOError:
                return
            except ConnectionError:
                received = b""
            if not received:
                self.close()
                return
            self._unread += received
            self._parse()

    def close(self) -> None:
        """Hear no more."""
        if self._wire.fileno() < 0:
            return
        self._loop.remove_reader(self._wire)
        self._wire.close()
        if self._answer is not None:
            self._answer.cancel()

    def _parse(self) -> None:
        while len(self._unread) >= LENGTH_BYTES:
            end = LENGTH_BYTES + int.from_bytes(self._unread[:LENGTH_BYTES])
            if end > MAX_BYTES:
                self.close()
                return
            if len(self._unread) < end:
                return
            tally = Tally.read(bytes(self._unread[LENGTH_BYTES:end]))
            del self._unread[:end]
            answer, self._answer = self._answer, None
            if answer is not None and not answer.done():
                answer.set_result(tally)
            self.heard(tally)
