"""The `streamfleet` command as a process, seen from outside, for tests."""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

LIMIT_S = 90.0  # generous: what is waited for takes a second
POLL_S = 0.02
PROGRAM = (sys.executable, "-c", "from streamfleet_producer.cli import main; main()")


def environment(**settings: str) -> dict[str, str]:
    """This process's environment without settings of its own, and with the scripted engine."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STREAMFLEET_")}
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS", "LINES"):
        kept.pop(name, None)
    return {**kept, "STREAMFLEET_ENGINE": "scripted", **settings}


def streamfleet(
    *arguments: str, env: Mapping[str, str] | None = None, limit_s: float = LIMIT_S
) -> subprocess.CompletedProcess[str]:
    """Run the command to its end."""
    return subprocess.run(
        [*PROGRAM, *arguments],
        capture_output=True,
        text=True,
        timeout=limit_s,
        env=dict(env or environment()),
        check=False,
    )


class Running:
    """A command that runs, in a session of its own, with its lines as they come (stderr among them)."""

    def __init__(self, arguments: tuple[str, ...], env: Mapping[str, str] | None) -> None:
        self.process = subprocess.Popen(
            [*PROGRAM, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            env=dict(env or environment()),
        )
        self.said: list[str] = []
        self._lines: queue.Queue[str | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, text: str) -> str:
        """The next line that holds `text`."""
        while True:
            line = self._lines.get(timeout=LIMIT_S)
            assert line is not None, f"ended without saying {text!r}: {self.said}"
            self.said.append(line)
            if text in line:
                return line

    def end(self) -> tuple[int, list[str]]:
        """Wait for its end; gives its exit status and all it said."""
        status = self.process.wait(LIMIT_S)
        self._reader.join(LIMIT_S)
        while (line := self._lines.get(timeout=LIMIT_S)) is not None:
            self.said.append(line)
        return status, self.said

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)


@contextmanager
def running(*arguments: str, env: Mapping[str, str] | None = None) -> Iterator[Running]:
    """A running command, killed at the end of the context if need be."""
    command = Running(arguments, env)
    try:
        yield command
    finally:
        command.process.kill()
        command.process.wait()
        command._reader.join(LIMIT_S)
        assert command.process.stdout is not None
        command.process.stdout.close()


def _processes() -> dict[int, tuple[int, str, str]]:
    """Parent, state and command line of every process."""
    listed = subprocess.check_output(["ps", "-A", "-ww", "-o", "pid=,ppid=,stat=,args="], text=True)
    rows = (line.split(None, 3) for line in listed.splitlines())
    return {int(row[0]): (int(row[1]), row[2], row[3] if len(row) > 3 else "") for row in rows}


def descendants(pid: int) -> dict[int, str]:
    """The command lines of all processes that `pid` has started, and that those have started."""
    table = _processes()
    found: dict[int, str] = {}
    parents = {pid}
    while parents:
        parents = {child for child, (parent, _, _) in table.items() if parent in parents}
        found |= {child: table[child][2] for child in parents}
    return found


def wait_gone(pids: Mapping[int, str]) -> None:
    """Wait until none of the processes runs any more."""
    limit = time.monotonic() + LIMIT_S
    while True:
        table = _processes()
        left = {
            pid: args
            for pid, args in pids.items()
            # The number may have gone to another process since.
            if pid in table and table[pid][2] == args and not table[pid][1].startswith("Z")
        }
        if not left:
            return
        assert time.monotonic() < limit, f"still there: {left}"
        time.sleep(POLL_S)
