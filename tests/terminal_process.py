"""A command on a terminal of its own, as somebody at a keyboard has it, for tests."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from command import LIMIT_S

# The terminal becomes the one that keys of the new session's processes, and their signals, come from.
_IN_FRONT = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""
_STYLE = re.compile(r"\x1b\[[0-9;]*m")
_HOME = "\x1b[H"


class TerminalProcess:
    """A running command, what it has written, and keys for it."""

    def __init__(self, arguments: tuple[str, ...], env: Mapping[str, str], width: int, height: int) -> None:
        self._keys, theirs = os.openpty()
        self.resize(width, height)
        self.before = termios.tcgetattr(self._keys)
        self.process = subprocess.Popen(
            [sys.executable, "-c", _IN_FRONT, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            env={**env, "TERM": "xterm-256color"},
        )
        os.close(theirs)
        self._written = ""
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def written(self) -> str:
        """All of it so far, with what is meant for the terminal."""
        with self._news:
            return self._written

    @property
    def settings(self) -> list[object]:
        """Of the terminal, now."""
        return termios.tcgetattr(self._keys)

    def lines(self) -> list[str]:
        """The screen as it was drawn last, without colours."""
        last = self.written.rpartition(_HOME)[2]
        return _STYLE.sub("", last).replace("\r", "").split("\n")

    def press(self, keys: str) -> None:
        os.write(self._keys, keys.encode())

    def resize(self, width: int, height: int) -> None:
        fcntl.ioctl(self._keys, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))

    def wait_for(self, seen: Callable[[TerminalProcess], object], what: str) -> None:
        """Wait until this is so of what it wrote."""
        limit = time.monotonic() + LIMIT_S
        with self._news:
            while not seen(self):
                left = limit - time.monotonic()
                assert left > 0, f"{what} did not come; last on the screen: {self.lines()}"
                self._news.wait(min(left, 0.1))

    def wait_for_line(self, *parts: str) -> str:
        """A line of the screen that holds all of these, once there is one."""

        def found() -> list[str]:
            return [line for line in self.lines() if all(part in line for part in parts)]

        self.wait_for(lambda _: found(), f"a line with {parts}")
        return found()[0]

    def end(self) -> int:
        """Wait for its end; gives its exit status."""
        status = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        return status

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        os.close(self._keys)

    def _read(self) -> None:
        pending = b""
        while True:
            try:
                data = os.read(self._keys, 65536)
            except OSError:  # nobody has the terminal any more
                return
            pending += data
            text = pending.decode("utf-8", "ignore")
            pending = b"" if text.encode() == pending else pending[len(text.encode()) :]
            with self._news:
                self._written += text
                self._news.notify_all()


@contextmanager
def on_terminal(
    *arguments: str, env: Mapping[str, str], width: int = 80, height: int = 24
) -> Iterator[TerminalProcess]:
    """A command on a terminal of this size, killed at the end of the context if need be."""
    running = TerminalProcess(arguments, env, width, height)
    try:
        yield running
    finally:
        running.close()
