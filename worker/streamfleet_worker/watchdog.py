"""The watchdog: ends a process whose event loop does not move any more, whatever holds it up."""

from __future__ import annotations

import faulthandler

MARGIN_S = 1.0


class Watchdog:
    """Ends this process, with the stacks of its threads on standard error, unless it is stroked in time.

    It is a thread of C that needs no interpreter: model code that never gives the interpreter back cannot
    hold it up. `limit_s` is what the worker allows itself, and would notice itself if it could still run.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s + MARGIN_S

    def stroke(self) -> None:
        """The event loop moves."""
        faulthandler.dump_traceback_later(self._limit_s, exit=True)

    def close(self) -> None:
        """Nothing is to be watched any more."""
        faulthandler.cancel_dump_traceback_later()
