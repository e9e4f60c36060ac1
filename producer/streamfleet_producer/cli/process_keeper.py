"""The process between the command line and a worker it started: no worker outlives its command.

Run by `processes.py` by file path, in a session of its own, on the standard library alone
(`python -I -S`). Its only argument is `{"command": [...], "grace_s": seconds}`. It starts the command,
stands in for it (same output, same exit status, or 128 + the signal's number), and ends it

* on SIGTERM, by passing that on: the command ends in its own time;
* at the end of its stdin, which says that the program on the other side is gone, whatever ended it:
  SIGTERM, and SIGKILL for its whole process group after the grace.

Where the system allows it (Linux), the command dies with its keeper too.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from types import FrameType

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
POLL_S = 0.01
CANNOT_START = 127  # what a shell says then


class ProcessKeeper:
    """Holds one child until it ends, or until stdin does."""

    def __init__(self, command: list[str], grace_s: float) -> None:
        self._grace_s = grace_s
        self._woken, waker = os.pipe()
        for end in (self._woken, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.signal(signal.SIGTERM, self._pass_on)
        self._told_to_end = False
        self._child: subprocess.Popen[bytes] | None = None
        child = self._child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=2,
            stderr=2,
            preexec_fn=_before_exec(),  # noqa: PLW1509 - one thread only
        )
        if self._told_to_end:  # while it started
            child.terminate()

    def run(self) -> int:
        """Wait for the child's end, or bring it about; gives its exit status."""
        child = self._child
        assert child is not None  # noqa: S101 - the type checker cannot know it
        while child.poll() is None:
            readable, _, _ = select.select([0, self._woken], [], [])
            if self._woken in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._woken, 4096)
            if 0 in readable and not os.read(0, 4096):
                child.terminate()
                patience_s = time.monotonic() + self._grace_s
                while child.poll() is None and time.monotonic() < patience_s:
                    time.sleep(POLL_S)
                _kill_group(child.pid)
                child.wait()
        _kill_group(child.pid)  # what the child has started ends with it
        return child.returncode if child.returncode >= 0 else 128 - child.returncode

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self._told_to_end = True
        if self._child is not None:
            self._child.send_signal(number)


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """A handler in Python makes the signal write its wake-up byte; SIG_IGN would not."""


def _before_exec() -> Callable[[], None]:
    """What the child's process does before it becomes the command."""
    keeper_pid = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def before_exec() -> None:
        os.setpgid(0, 0)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        if libc is not None:
            # Linux sends it when the *thread* that forked ends; this process has only one.
            libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
            if os.getppid() != keeper_pid:  # killed before the request above was in force
                os._exit(1)

    return before_exec


def main() -> int:
    """Keep one process, as the first argument says."""
    # The mask is inherited across exec: a program that blocks signals would make this process deaf.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.argv[1])
    try:
        keeper = ProcessKeeper(**settings)
    except (OSError, subprocess.SubprocessError) as error:
        sys.stderr.write(f"{settings['command'][0]} did not start: {error}\n")
        return CANNOT_START
    return keeper.run()


if __name__ == "__main__":
    sys.exit(main())
