"""A worker's side of the socket by which its supervisor asks for its tally.

It runs on a thread of its own, so that it answers, and tells the truth, when the event loop hangs.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from streamfleet_worker.tally import Tally

LAST_LIMIT_S = 1.0
"""How long the last tally may take to be told."""
QUESTION = b"?"
LENGTH_BYTES = 4
"""Before each tally stands its length, the highest byte first."""


class TallyServer:
    """Tells the tally when asked with a `?`, and at its end unasked. `read` is called from any thread."""

    def __init__(self, wire: socket.socket, read: Callable[[], Tally]) -> None:
        self._wire = wire
        self._read = read
        self._telling = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="tally", daemon=True)

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Tell what was counted last; nothing is answered afterwards."""
        with contextlib.suppress(OSError):
            self._wire.settimeout(LAST_LIMIT_S)
            self._tell()
        with contextlib.suppress(OSError):
            self._wire.shutdown(socket.SHUT_RDWR)
        self._wire.close()

    def _run(self) -> None:
        # An error is the supervisor's end, or ours.
        with contextlib.suppress(OSError):
            while asked := self._wire.recv(64):
                for _ in asked:
                    self._tell()

    def _tell(self) -> None:
        packed = self._read().packed()
        with self._telling:
            self._wire.sendall(len(packed).to_bytes(LENGTH_BYTES) + packed)
