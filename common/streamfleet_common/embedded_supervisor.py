"""The process between a program and its embedded server: no server outlives its program.

Run by `embedded_link.py` by file path, in a session of its own, on the standard library alone
(`python -I -S`). From its start to its end it owns three things: the lock on the data folder, the
folder itself when it is temporary, and the server. It stays when the server ends by itself, since
the program may want it back on the same data.

It is driven over two pipes, one JSON object a line. The settings come as its only argument:
`{"folder": path or null, "temporary": bool, "unix_socket": path or null, "grace_s": seconds}`.

====================================  =======================================================
orders, on stdin                      reports, on stdout
====================================  =======================================================
(at its start)                        `{"event": "ready", "folder": path}`
`{"order": "start", "command": []}`   `{"event": "started", "pid": number}`
`{"order": "stop"}`                   `{"event": "ended", "status": number}`, at any end
`{"order": "kill"}`                   the same
(instead of the first two)            `{"event": "failed", "reason": text}`
end of file: the program is gone      none; ends the server, removes the temporary folder
====================================  =======================================================
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

PR_SET_PDEATHSIG = 1  # from <linux/prctl.h>
LOCK_WAIT_S = 1.0  # the server of a program that ended just now may not be gone yet
POLL_S = 0.01


class EmbeddedSupervisor:
    """Holds one server and its data folder until stdin ends or SIGTERM comes."""

    def __init__(self, folder: str | None, temporary: bool, unix_socket: str | None, grace_s: float) -> None:
        self._temporary = temporary
        self._unix_socket = unix_socket
        self._grace_s = grace_s
        self._server: subprocess.Popen[bytes] | None = None
        self._has_served = False
        self._ending = False
        self._orders = b""
        self._before_exec = _before_exec()
        # Made here and not by the program: at no moment would nobody remove it.
        self.folder = Path(folder or tempfile.mkdtemp(prefix="streamfleet-"))
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock_fd = self._lock()

    def run(self) -> None:
        """Serve orders until the program is gone; then leave nothing behind."""
        woken, waker = os.pipe()
        for end in (woken, waker):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, _ignore)
        signal.signal(signal.SIGTERM, self._end)
        try:
            report(event="ready", folder=str(self.folder))
            while not self._ending:
                readable, _, _ = select.select([0, woken], [], [])
                if woken in readable:
                    with contextlib.suppress(BlockingIOError):
                        os.read(woken, 4096)
                self._reap()
                if 0 in readable:
                    self._read_orders()
        finally:
            self._stop()
            if self._unix_socket and self._has_served:
                # A killed server leaves its socket file behind.
                Path(self._unix_socket).unlink(missing_ok=True)
            if self._temporary:
                shutil.rmtree(self.folder, ignore_errors=True)

    def _read_orders(self) -> None:
        received = os.read(0, 65536)
        self._ending = not received
        *lines, self._orders = (self._orders + received).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order["order"] == "start":
                self._start(order["command"])
            elif order["order"] == "kill":
                self._kill()
            else:
                self._stop()

    def _start(self, command: list[str]) -> None:
        log = self.folder / "server.log"
        try:
            if log.exists():
                log.replace(log.with_suffix(".log.1"))
            with log.open("wb") as output:
                # The server holds the lock too: should this process be killed, the folder stays
                # taken until the server is gone as well.
                self._server = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(self._lock_fd,),
                    preexec_fn=self._before_exec,  # noqa: PLW1509 - one thread only
                    # A locale that this machine lacks would stop the server.
                    env={**os.environ, "LC_ALL": "C"},
                )
        except (OSError, subprocess.SubprocessError) as error:
            report(event="failed", reason=f"{command[0]} did not start: {error}")
            return
        self._has_served = True
        report(event="started", pid=self._server.pid)

    def _stop(self) -> None:
        """SIGTERM, and SIGKILL after the grace."""
        if self._server is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self._server.terminate()
        patience_s = time.monotonic() + self._grace_s
        while self._server.poll() is None and time.monotonic() < patience_s:
            time.sleep(POLL_S)
        self._kill()

    def _kill(self) -> None:
        """Kill the server's process group (a child may rewrite its file), and reap the server."""
        if self._server is None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._server.pid, signal.SIGKILL)
        self._server.kill()
        self._server.wait()
        self._reap()

    def _reap(self) -> None:
        if self._server is not None and self._server.poll() is not None:
            status, self._server = self._server.returncode, None
            report(event="ended", status=status)

    def _lock(self) -> int:
        lock_fd = os.open(self.folder / "broker.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        give_up_s = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > give_up_s:
                    holder = os.read(lock_fd, 32).decode(errors="replace").strip() or "unknown"
                    raise RuntimeError(
                        f"the data folder {self.folder} is in use by another broker (process "
                        f"{holder}): stop that one or choose another folder"
                    ) from None
                time.sleep(POLL_S)
            else:
                os.truncate(lock_fd, 0)
                os.write(lock_fd, b"%d\n" % os.getpid())
                return lock_fd

    def _end(self, _number: int, _frame: FrameType | None) -> None:
        self._ending = True


def report(**event: Any) -> None:
    """Tell the program what happened, if it is still there to read it."""
    with contextlib.suppress(BrokenPipeError):
        os.write(1, json.dumps(event).encode() + b"\n")


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """A handler in Python makes the signal write its wake-up byte; SIG_IGN would not."""


def _before_exec() -> Callable[[], None]:
    """What the server's process does before it becomes the server."""
    supervisor_pid = os.getpid()
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None

    def before_exec() -> None:
        os.setpgid(0, 0)
        if libc is not None:
            # Linux sends it when the *thread* that forked ends; this process has only one.
            libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL))
            if os.getppid() != supervisor_pid:  # killed before the request above was in force
                os._exit(1)

    return before_exec


def main() -> None:
    """Run one supervisor with the settings in the first argument."""
    # The mask is inherited across exec: a program that blocks signals would make this process deaf.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    settings = json.loads(sys.argv[1])
    try:
        supervisor = EmbeddedSupervisor(**settings)
    except (OSError, RuntimeError) as error:
        reason = str(error)
        if isinstance(error, OSError):
            reason = f"the data folder cannot be used: {error}; choose a folder that can be written"
        report(event="failed", reason=reason)
        sys.exit(1)
    supervisor.run()


if __name__ == "__main__":
    main()
