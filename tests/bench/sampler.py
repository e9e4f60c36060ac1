"""Where a process spends its CPU time: a look at its stack every so often of it.

The system looks at its clock 100 to 1000 times a second, and no more often does this: 10 s give some 2,000
samples.

A sampler disturbs less than a profiler that hooks every call, which makes small functions look dear. What a C
function does (msgpack, hiredis, a system call) counts for the Python line that called it. Python shows the
main thread's stack alone to a signal; where that one only waits, the stack of another thread that does not is
taken, which can be wrong by one of the short ones.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections import Counter
from types import FrameType

INTERVAL_S = 0.001
"""Of CPU time, all threads together."""
WAITING = {"selectors.py", "threading.py", "queue.py"}
OURS = ("streamfleet_common", "streamfleet_producer", "streamfleet_worker")
OTHER = "other threads, while all waited when looked at"


class Sampler:
    """Counts samples by package, and by the innermost function of ours on the stack."""

    def __init__(self) -> None:
        self.packages: Counter[str] = Counter()
        self.functions: Counter[str] = Counter()

    def start(self) -> None:
        """On the main thread; takes SIGPROF."""
        signal.signal(signal.SIGPROF, self._look)
        # Or every sample would interrupt a system call, which Python then calls again.
        signal.siginterrupt(signal.SIGPROF, False)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def stop(self) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)

    def _look(self, number: int, frame: FrameType | None) -> None:
        if frame is None or _name(frame) in WAITING:
            main = threading.main_thread().ident
            others = (other for ident, other in sys._current_frames().items() if ident != main)
            frame = next((other for other in others if _name(other) not in WAITING), None)
        self.packages[_package(frame)] += 1
        self.functions[_function(frame)] += 1


def _name(frame: FrameType) -> str:
    return frame.f_code.co_filename.rpartition("/")[2]


def _package(frame: FrameType | None) -> str:
    """The top package of the code itself; modules of ours one by one."""
    if frame is None:
        return OTHER
    module = str(frame.f_globals.get("__name__", "?"))
    return module if module.startswith(OURS) else module.partition(".")[0]


def _function(frame: FrameType | None) -> str:
    """The innermost function of ours that is on the stack."""
    if frame is None:
        return OTHER
    while frame is not None:
        module = str(frame.f_globals.get("__name__", "?"))
        if module.startswith(OURS):
            return f"{module.partition('.')[2] or module}.{frame.f_code.co_qualname}"
        frame = frame.f_back
    return "outside of ours"
