"""One process of a pool, and the thread that keeps it: starts it, feeds it, hears it, and replaces it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import subprocess
import sys
import threading
import time
from typing import Protocol

from streamfleet_common.errors import GenerationFailed, ModelLoadFailed
from streamfleet_worker.engine.item import Progress
from streamfleet_worker.handlers.handler import Handler
from streamfleet_worker.handlers.pipe import Pipe
from streamfleet_worker.handlers.pool_batch import PoolBatch
from streamfleet_worker.handlers.report import failure_of, from_report

START_TRIES = 5
"""Starts that fail in a row until a process that was ready once is given up; until it was, one."""
FIRST_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
UNWANTED_S = 30.0
"""How long a batch that nobody wants may go on before its process is ended."""
STOP_S = 5.0
"""How long a process may take to clean up at the end."""

log = logging.getLogger(__name__)


class Work(Protocol):
    """Where a member finds what to do, and tells what came of it; callable from any thread."""

    def take(self) -> PoolBatch | None:
        """A batch that waits, if there is one."""

    def told(self) -> None:
        """Something has changed: with a batch, or with the member."""


class PoolMember:
    """Keeps one process running, from `start` to `stop`.

    Args:
        handler: what it runs.
        work: where its batches come from.
    """

    def __init__(self, handler: Handler, work: Work) -> None:
        self._handler = handler
        self._work = work
        self._bell, self._ringer = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ringer, False)
        self._closing = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._failed_starts = 0
        self._barren = 0
        """Processes in a row that finished no batch."""
        self.ready = False
        """It has been ready once."""
        self.lost: Exception | None = None
        """Why it was given up."""
        self._thread = threading.Thread(target=self._keep, name="pool-member", daemon=True)

    @property
    def pid(self) -> int | None:
        """Of its process, if one runs."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Begin; `ready`, or `lost`, tells when that is done."""
        self._thread.start()

    def ring(self) -> None:
        """Have it look whether there is something to do."""
        with contextlib.suppress(BlockingIOError):  # it has enough to hear
            os.write(self._ringer, b"\0")

    def stop(self) -> None:
        """Have it end, once its process has cleaned up; one that is in a batch is ended at once."""
        self._closing.set()
        self.ring()

    def join(self) -> None:
        """Wait for the end after a `stop`."""
        self._thread.join()
        os.close(self._bell)
        os.close(self._ringer)

    # --- on the thread

    def _keep(self) -> None:
        while not self._closing.is_set() and self.lost is None:
            self._barren += 1
            self._live()
            if self._barren > 1 and self.lost is None:
                self._pause(min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (self._barren - 2)))
        self._work.told()

    def _live(self) -> None:
        """One process, from its start to its end."""
        ours, theirs = socket.socketpair()
        pipe = Pipe(ours)
        try:
            with theirs:
                # `-P`: a file called like one of our imports, beside the handler's, is none of ours.
                command = [sys.executable, "-P", "-m", "streamfleet_worker.handlers.pool_process"]
                self._process = subprocess.Popen(
                    [*command, self._handler.path, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                )
            if self._begin(pipe):
                self._serve(pipe)
        except OSError as error:
            self._fail_start(ModelLoadFailed(f"no process can be started for {self._handler}: {error}"))
        finally:
            pipe.close()
            if self._process is not None:
                self._process.kill()
                self._process.wait()
                self._process = None

    def _begin(self, pipe: Pipe) -> bool:
        """Wait until the process is ready; whether it is."""
        while not self._wait(pipe, None):
            if self._closing.is_set():
                return False
        try:
            message = pipe.receive()
        except (EOFError, OSError):
            how = f"the process of {self._handler} {self._how()} before it was ready"
            self._fail_start(ModelLoadFailed(how))
            return False
        if message != ["ready"]:
            self._fail_start(failure_of(message[-1]))
            return False
        self._failed_starts = 0
        self.ready = True
        self._work.told()
        return True

    def _fail_start(self, error: Exception) -> None:
        self._failed_starts += 1
        log.warning("a process of %s did not start: %s", self._handler, error)
        if self._failed_starts >= (START_TRIES if self.ready else 1):
            self.lost = error

    def _serve(self, pipe: Pipe) -> None:
        while not self._closing.is_set():
            batch = self._work.take()
            if batch is None:
                if self._wait(pipe, None):
                    # It has nothing to say now: it is gone.
                    log.warning("a process of %s %s between batches", self._handler, self._how())
                    return
                continue
            try:
                self._run(pipe, batch)
            except (EOFError, OSError) as error:
                how = f"took longer than {self._handler.timeout_s} s for a batch, and was ended"
                if self._closing.is_set():
                    how = "ends with the worker"
                elif not isinstance(error, TimeoutError):
                    how = f"{self._how()} in this batch"
                failure = GenerationFailed(f"the process of {self._handler} {how}")
                level = logging.DEBUG if batch.again or self._closing.is_set() else logging.WARNING
                log.log(level, "%s", failure)
                failure.__cause__ = error
                batch.put(failure)
                self._work.told()
                return
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            pipe.send(["stop"], time.monotonic() + STOP_S)
            if self._process is not None:
                self._process.wait(STOP_S)

    def _run(self, pipe: Pipe, batch: PoolBatch) -> None:
        """Run a batch to its end.

        Raises:
            EOFError, OSError: the process is gone, or has to go.
        """
        limit_s = self._handler.timeout_s
        until = None if limit_s is None else time.monotonic() + limit_s
        try:
            pipe.send(["run", batch.number, batch.texts, batch.again], until)
        except ValueError as error:
            batch.put(GenerationFailed(f"{self._handler}: {error}"))
            self._work.told()
            return
        unwanted = False
        while True:
            if self._closing.is_set():
                raise EOFError("nobody waits for it any more")
            if batch.closed.is_set() and not unwanted:
                unwanted = True
                grace = time.monotonic() + UNWANTED_S
                until = grace if until is None else min(until, grace)
                pipe.send(["close", batch.number], until)
            if not self._wait(pipe, until):
                continue
            ended = True
            match pipe.receive(until):
                case ["news", int(), list(reports), bool(ended), float(device_s)]:
                    batch.put(Progress([from_report(one) for one in reports], ended, device_s))
                case ["failed", int(), report]:
                    batch.put(failure_of(report))
                case _:
                    raise EOFError("it says what is none of our words")
            if ended:
                self._barren = 0
            self._work.told()
            if ended:
                return

    def _wait(self, pipe: Pipe, until: float | None) -> bool:
        """Wait until the process says something, or the bell rings; whether the process does.

        Raises:
            TimeoutError: neither, by then.
        """
        wire = pipe.fileno()
        heard = _readable(wire, self._bell, until=until)
        if self._bell in heard:
            self._hear_bell()
        if wire not in heard and until is not None and time.monotonic() >= until:
            raise TimeoutError("it takes too long")
        return wire in heard

    def _hear_bell(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._bell, 4096):
                pass

    def _pause(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while not self._closing.is_set() and time.monotonic() < until:
            _readable(self._bell, until=until)
            self._hear_bell()

    def _how(self) -> str:
        """How the process has ended, or is ended now."""
        try:
            status = 0 if self._process is None else self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "has closed its pipe"
        return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def _readable(*files: int, until: float | None) -> list[int]:
    """Those that can be read from, or have ended; none if that is so at `until`."""
    poll = select.poll()  # unlike select, it takes any number of a file
    for file in files:
        poll.register(file, select.POLLIN)
    left = None if until is None else max(0.0, until - time.monotonic())
    return [file for file, _ in poll.poll(None if left is None else math.ceil(left * 1000))]
