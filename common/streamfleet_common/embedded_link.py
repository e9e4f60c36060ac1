"""A program's end of the two pipes to the supervisor of its embedded server."""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from streamfleet_common.errors import BrokerUnavailable

SUPERVISOR = Path(__file__).with_name("embedded_supervisor.py")
ANSWER_LIMIT_S = 15.0  # longer than the supervisor's grace for a server
POLL_S = 0.005


class SupervisorLink:
    """Starts one supervisor, gives it orders and keeps what it reports.

    `folder` is the data folder, `server_pid` the server's process id or None while none runs. The
    supervisor ends when this link is closed, or when the program ends without closing it.

    Raises:
        BrokerUnavailable: the supervisor did not start, or cannot have the folder.
    """

    def __init__(
        self, folder: Path | None, *, temporary: bool, unix_socket: Path | None, grace_s: float
    ) -> None:
        self.server_pid: int | None = None
        self.is_open = True
        self._unread = b""
        self._last_words = ""
        settings = {
            "folder": None if folder is None else str(folder),
            "temporary": temporary,
            "unix_socket": None if unix_socket is None else str(unix_socket),
            "grace_s": grace_s,
        }
        try:
            # Unbuffered, and both pipes close on exec: another child of this program must not keep
            # the server alive by holding the end whose closing the supervisor waits for.
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), json.dumps(settings)],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                cwd="/",
            )
        except OSError as error:
            raise BrokerUnavailable(
                f"the embedded broker's supervisor did not start with {sys.executable!r}: {error}"
            ) from error
        assert self._process.stdin is not None  # noqa: S101 - the type checker cannot know it
        assert self._process.stdout is not None  # noqa: S101
        self._orders, self._reports = self._process.stdin, self._process.stdout
        try:
            self.folder = Path(self._answer()["folder"])
        except BaseException:
            self.close()
            raise

    def start(self, command: Sequence[str]) -> int:
        """Start the server and return its process id; raises `BrokerUnavailable` if that fails."""
        self._order("start", command=list(command))
        pid = int(self._answer()["pid"])
        # An end reported right behind the start is still unread: it comes with the next `runs`.
        self.server_pid = pid
        return pid

    def end(self, order: Literal["stop", "kill"]) -> None:
        """End the server, with SIGTERM and a grace or with SIGKILL, and wait until it is gone."""
        if not self.runs():
            return
        self._order(order)
        limit_s = time.monotonic() + ANSWER_LIMIT_S
        while self.runs(POLL_S) and time.monotonic() < limit_s:
            pass

    def runs(self, wait_s: float = 0.0) -> bool:
        """Whether the server runs; waits up to `wait_s` seconds for its end."""
        while self.server_pid is not None and self._next_report(wait_s) is not None:
            pass
        return self.server_pid is not None

    def close(self) -> None:
        """End the supervisor, and with it the server, and wait until both are gone."""
        if not self.is_open:
            return
        self.is_open, self.server_pid = False, None
        self._orders.close()
        try:
            self._process.wait(ANSWER_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()  # where the system allows it, the server dies with it
            self._process.wait()
        self._reports.close()

    def disown(self) -> None:
        """In a forked child: let go of the supervisor, which belongs to the parent."""
        if self.is_open:
            self.is_open, self.server_pid = False, None
            self._orders.close()
            self._reports.close()
            self._process.returncode = 0  # not a child of this process: nothing to wait for

    def _order(self, order: str, **details: Any) -> None:
        if self.is_open:
            with contextlib.suppress(BrokenPipeError):  # the missing report tells
                self._orders.write(json.dumps({"order": order, **details}).encode() + b"\n")

    def _answer(self) -> dict[str, Any]:
        """The report that answers an order; raises `BrokerUnavailable` with the reason it names."""
        limit_s = time.monotonic() + ANSWER_LIMIT_S
        while self.is_open and time.monotonic() < limit_s:
            report = self._next_report(POLL_S)
            if report is None or report["event"] == "ended":
                continue
            if report["event"] == "failed":
                raise BrokerUnavailable(f"the embedded broker did not start: {report['reason']}")
            return report
        words = self._last_words or "(nothing)"
        raise BrokerUnavailable(
            f"the embedded broker's supervisor ended or hangs, start again; it said:\n{words}"
        )

    def _next_report(self, wait_s: float) -> dict[str, Any] | None:
        """The next report, if one comes within `wait_s` seconds."""
        while True:
            while b"\n" not in self._unread:
                if not self._receive(wait_s):
                    return None
            line, self._unread = self._unread.split(b"\n", 1)
            try:
                report: dict[str, Any] = json.loads(line)
            except ValueError:  # a traceback of the supervisor
                self._last_words += line.decode(errors="replace") + "\n"
                continue
            if report["event"] == "ended":
                self.server_pid = None
            return report

    def _receive(self, wait_s: float) -> bool:
        if not self.is_open:
            return False
        poller = select.poll()  # not select: a busy program has more than 1,024 files open
        poller.register(self._reports, select.POLLIN)
        if not poller.poll(wait_s * 1000):
            return False
        received = os.read(self._reports.fileno(), 65536)
        if not received:
            self.close()
        self._unread += received
        return bool(received)
