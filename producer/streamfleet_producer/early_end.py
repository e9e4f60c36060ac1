"""What Ctrl-C, or an order to end, does to a server's process that only begins: it ends at once, in peace.

Python's own answer to Ctrl-C is a traceback of whatever was being imported, for a second or two.
"""

from __future__ import annotations

import os
import signal

ENDINGS = (signal.SIGTERM, signal.SIGINT)


def hold() -> None:
    """Keep such signals for the program that takes this process over, until it calls `Beginning.watch`."""
    if hasattr(signal, "pthread_sigmask"):  # Windows has none
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDINGS)


class Beginning:
    """From `watch` to `is_over` such a signal ends the process, with status 0; after that it does nothing.

    A server has its own handlers while it serves. When it has ended in peace it raises the signal once
    more, for whoever was before it.
    """

    def __init__(self) -> None:
        self.is_over = False

    def watch(self) -> None:
        """Take such signals from now on, those that were held back first."""
        for ending in ENDINGS:
            signal.signal(ending, self._end)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDINGS)

    def _end(self, *_: object) -> None:
        if not self.is_over:
            os._exit(0)  # nothing is open yet that wants an orderly end
