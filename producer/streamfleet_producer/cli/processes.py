"""Processes that the command line starts, and that never outlive it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType

ORPHAN_GRACE_S = 2.0
"""What a process gets to end once it has been told; a second longer than a supervisor gives its workers."""
KILL_LIMIT_S = 5.0
LINES_KEPT = 200


class TiedProcess:
    """A command that ends with this program, whatever ends that: it watches its standard input for it.

    To be told so it finds `STREAMFLEET_SUPERVISED={}` in its environment. What it says on stdout and stderr
    comes line by line to `on_line`, on a thread of its own; the last lines are kept in memory, so that
    nothing is left on the disk.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        on_line: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._on_line = on_line
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            # A Ctrl-C is for this program, which then ends the others in order.
            start_new_session=True,
            # Output to a pipe, which Python would otherwise fill in blocks.
            env={**env, "PYTHONUNBUFFERED": "1", "STREAMFLEET_SUPERVISED": "{}"},
        )
        self._reader = threading.Thread(target=self._read, name="process-output", daemon=True)
        self._reader.start()

    @property
    def status(self) -> int | None:
        """The exit status, 128 + n for a death by signal n; None while it runs."""
        status = self._process.poll()
        return status if status is None or status >= 0 else 128 - status

    def lines(self) -> list[str]:
        """The last lines it said; all of them if it has ended."""
        if self.status is not None:
            self._reader.join(KILL_LIMIT_S)
        return list(self._lines)

    def terminate(self) -> None:
        """Ask it to end in its own time."""
        self._process.terminate()

    def wait(self, limit_s: float) -> bool:
        """Whether it has ended within `limit_s` seconds."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(limit_s)
        return self.status is not None

    def close(self) -> None:
        """End it now, with a short grace, and wait until it is gone."""
        assert self._process.stdin is not None  # noqa: S101 - the type checker cannot know it
        self._process.stdin.close()
        if not self.wait(ORPHAN_GRACE_S):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._reader.join(KILL_LIMIT_S)

    def _read(self) -> None:
        assert self._process.stdout is not None  # noqa: S101
        with self._process.stdout as pipe:
            unread = b""
            while received := pipe.read(65536):
                *lines, unread = (unread + received).split(b"\n")
                for line in lines:
                    self._take(line)
            if unread:
                self._take(unread)

    def _take(self, raw: bytes) -> None:
        line = raw.decode(errors="replace").rstrip()
        self._lines.append(line)
        self._on_line(line)


class Ending:
    """Which signal asked this program to end, if one did."""

    def __init__(self) -> None:
        self.number = signal.SIGINT

    @property
    def exit_code(self) -> int:
        """What a shell expects of a program that a signal ended."""
        return 128 + self.number


@contextlib.contextmanager
def ending() -> Iterator[Ending]:
    """Make SIGTERM and SIGHUP end the program as Ctrl-C does: with `KeyboardInterrupt`, in order.

    A second signal ends it at once: what it has started is watched by others.
    """
    state = Ending()

    def end(number: int, _frame: FrameType | None) -> None:
        state.number = signal.Signals(number)
        signal.raise_signal(signal.SIGINT)

    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As a shell starts its background jobs: SIGTERM, which comes this way too, has to work all the same.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield state
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
