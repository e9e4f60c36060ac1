"""A worker process as its supervisor sees it: started, heard, told, and missed at once when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from streamfleet_worker.supervised import VARIABLE
from streamfleet_worker.tally_client import TallyClient

LINES_KEPT = 50
LOG_LIMIT_S = 1.0
"""How long after a death its last lines are waited for; a process it has left behind may hold the pipe."""
LINE_BYTES = 65_536
_CONSOLE_LINE = re.compile(r"\S+ \[(\w+) *\] (.*)")
_writing = threading.Lock()


class Child:
    """One worker process in a session of its own, from its start to its end.

    Its standard error is passed on in whole lines, of which the last are kept. To be made on an event loop.

    Args:
        command: what to run.
        name: unique to this process; its work can be handed back under it.
        environment: of the process, but for what makes it a supervised one.
        slot: which of its supervisor's workers it is, as its metrics have it.
        tells: whether it is to tell its tally, which is then asked for through `tally`.
        served: called once it has answered its first request.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        name: str,
        environment: Mapping[str, str],
        slot: str,
        *,
        tells: bool = False,
        served: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.told_to_stop = False
        self.killed = False
        """By us."""
        self.ready = asyncio.Event()
        """It has loaded its model and takes work."""
        self.no_broker = False
        """It ends since it cannot reach Redis, which is not its fault."""
        self.tally: TallyClient | None = None
        self._served = served
        self._loop = asyncio.get_running_loop()
        self._status: asyncio.Future[int] = self._loop.create_future()
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._unheard = b""
        with contextlib.ExitStack() as theirs:
            wire, their_wire = socket.socketpair()
            theirs.callback(their_wire.close)
            log, their_log = os.pipe()
            theirs.callback(os.close, their_log)
            passed = {"log_fd": os.dup(2)}
            theirs.callback(os.close, passed["log_fd"])
            tally, their_tally = socket.socketpair() if tells else (None, None)
            if their_tally is not None:
                theirs.callback(their_tally.close)
                passed["tally_fd"] = their_tally.fileno()
            told = json.dumps({"name": name, "slot": slot, **passed})
            try:
                self._process = subprocess.Popen(
                    command,
                    stdin=their_wire.fileno(),
                    stderr=their_log,
                    pass_fds=tuple(passed.values()),
                    # A Ctrl-C is for the supervisor, which then ends the others in order.
                    start_new_session=True,
                    env={**environment, VARIABLE: told},
                )
            except OSError:
                wire.close()
                os.close(log)
                if tally is not None:
                    tally.close()
                raise
        self.pid = self._process.pid
        if tally is not None:
            self.tally = TallyClient(tally)
        self._wire = wire
        wire.setblocking(False)
        self._loop.add_reader(wire, self._hear)
        self._log = threading.Thread(target=self._pass_on, args=(log,), name="child-log", daemon=True)
        self._log.start()
        threading.Thread(target=self._wait, name="child-wait", daemon=True).start()

    async def wait(self) -> int:
        """Its exit status, or minus the number of the signal that ended it. May be awaited by many."""
        return await asyncio.shield(self._status)

    @property
    def ended(self) -> bool:
        return self._status.done()

    def stop(self) -> None:
        """Tell it to drain; told twice, it gives up what it runs."""
        self.told_to_stop = True
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it now, with what it has started."""
        self.killed = True
        self._signal(signal.SIGKILL)

    async def reason(self) -> str:
        """Why it has ended, in a line: what it complained of last, or how it ended."""
        await asyncio.to_thread(self._log.join, LOG_LIMIT_S)
        return _complaint(self._lines) or self.how()

    def how(self) -> str:
        """How it has ended."""
        status = self._status.result()
        return f"it was killed by signal {-status}" if status < 0 else f"it ended with status {status}"

    def last_line(self) -> str:
        """The last line it wrote."""
        return next((line for line in reversed(self._lines) if line.strip()), "")

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if not self.ended:
                os.kill(self.pid, number)

    def _hear(self) -> None:
        try:
            received = self._wire.recv(4096)
        except BlockingIOError:
            return
        except ConnectionError:
            received = b""
        if not received:
            self._loop.remove_reader(self._wire)
            self._wire.close()
            return
        *words, self._unheard = (self._unheard + received).split(b"\n")
        for word in words:
            if word == b"ready":
                self.ready.set()
            elif word == b"served":
                self._served()
            elif word == b"no_broker":
                self.no_broker = True

    # --- on threads of their own

    def _wait(self) -> None:
        status = self._process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)  # what it has started ends with it
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits
            self._loop.call_soon_threadsafe(self._set_status, status)

    def _set_status(self, status: int) -> None:
        # What it said before it died counts, also where the loop has not come to it yet.
        if self._wire.fileno() >= 0:
            self._hear()
        if self.tally is not None:
            self.tally.hear()
            self.tally.close()
        if not self._status.done():
            self._status.set_result(status)

    def _pass_on(self, log: int) -> None:
        with open(log, "rb") as pipe:
            while line := pipe.readline(LINE_BYTES):
                self._lines.append(line.decode(errors="replace").rstrip())
                # A log that nobody reads any more is no reason to stop listening.
                with _writing, contextlib.suppress(OSError):
                    left = memoryview(line)
                    while left:
                        left = left[os.write(2, left) :]


def _complaint(lines: Sequence[str]) -> str | None:
    """The last error, or the last line that is none of the log's (a traceback's, say)."""
    for line in reversed(lines):
        level, event = _parsed(line)
        if event.strip() and level in (None, "error", "critical"):
            return event.strip()
    return None


def _parsed(line: str) -> tuple[str | None, str]:
    """Level and event of a line of the log, in either format; no level if it is something else."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            return str(record.get("level")), str(record.get("event"))
    if found := _CONSOLE_LINE.match(line):
        return found[1], found[2]
    return None, line
