"""A real Valkey server that lives exactly as long as the program that started it.

For the demo, for `streamfleet up` and for the tests. The server is a child of a supervisor process
(`embedded_supervisor.py`) that notices the end of this program, whatever ends it, and takes the server
and the temporary data with it. It listens on this machine only and asks for no password: on a shared
machine give it a `unix_socket` in a private folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamfleet_common.embedded_binary import ServerBinary
from streamfleet_common.errors import BrokerUnavailable

HOST = "127.0.0.1"
SUPERVISOR = Path(__file__).with_name("embedded_supervisor.py")
READY_LIMIT_S = 15.0  # without a sign of life; loading a large file counts as one
END_LIMIT_S = 15.0
GRACE_S = 5.0  # for the last write of data that is kept
TEMPORARY_GRACE_S = 0.5  # a regular end takes 0.1 s, and there is nothing to save
PORT_TRIES = 5
PORT_PAUSE_S = 0.2
POLL_S = 0.005
SOCKET_PATH_LIMIT_BYTES = 103  # macOS; Linux allows 107
LOG_LINES = 12


class EmbeddedBroker:
    """One server; a context manager, or `start` and `stop`.

    `data_dir=None` keeps the data in a temporary folder, removed at the end even if this program is
    killed; a path keeps it there for the next start. `port=None` picks a free one, unless there is a
    `unix_socket`: then the server listens there, and on TCP only if a port is given too. `extra_args`
    come last on the server's command line and win.

    All calls block, for about 0.1 s each; call them from one thread at a time. A forked child of this
    program may use the `url` but does not own the broker.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str] | None = None,
        port: int | None = None,
        unix_socket: str | os.PathLike[str] | None = None,
        extra_args: Sequence[str] = (),
    ) -> None:
        # Absolute, since the supervisor and the server work in other folders.
        self._data_dir = None if data_dir is None else Path(data_dir).expanduser().absolute()
        self._unix_socket = None if unix_socket is None else Path(unix_socket).absolute()
        self._wanted_port = port or (None if unix_socket is None else 0)
        self._extra_args = tuple(extra_args)
        self._binary: ServerBinary | None = None
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._last_words = ""
        self._folder: Path | None = None
        self._port: int | None = None
        self._pid: int | None = None
        self._hooked = False

    def __enter__(self) -> EmbeddedBroker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """What clients connect to, `redis://…` or `unix://…`; raises `BrokerUnavailable` before the start."""
        if self._port is None:
            raise BrokerUnavailable("the embedded broker is not started: call start() first")
        if self._unix_socket is not None:
            return f"unix://{urllib.parse.quote(str(self._unix_socket))}"
        return f"redis://{HOST}:{self._port}/0"

    @property
    def pid(self) -> int:
        """The server's process id; raises `BrokerUnavailable` while no server runs."""
        if not self.alive or self._pid is None:
            raise BrokerUnavailable("the embedded broker is not running: call start() first")
        return self._pid

    @property
    def version(self) -> str:
        """The server's version, like `9.1.2`; raises `BrokerUnavailable` where there is no server program."""
        return self._program().version

    @property
    def alive(self) -> bool:
        """Whether the server's process runs."""
        while self._pid is not None and self._next_report(0.0) is not None:
            pass
        return self._pid is not None

    def start(self) -> EmbeddedBroker:
        """Start the server and return once it answers; nothing happens if it runs already.

        Raises:
            BrokerUnavailable: with the last lines of the server's log in the message.
        """
        if self.alive:
            return self
        try:
            self._open_supervisor()
            self._start_server()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server in order, and remove the data if it is temporary; may be called twice."""
        self._close_supervisor()
        if self._data_dir is None and self._folder is not None:
            # Done already, unless somebody killed the supervisor.
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder = self._port = None

    def kill(self) -> None:
        """Kill the server with SIGKILL, as a crash would; its data stays for `restart`."""
        self._end_server("kill")

    def restart(self) -> None:
        """Start the server again on the same port and data, ending it in order first if it runs.

        Raises:
            BrokerUnavailable: as `start` does; the broker is stopped then.
        """
        self._end_server("stop")
        self.start()

    def _program(self) -> ServerBinary:
        if self._binary is None:
            self._binary = ServerBinary.find()
        return self._binary

    # --- the server ------------------------------------------------------------------------------

    def _start_server(self) -> None:
        self._check_socket()
        # A port that clients know already may be held for a moment by a dying server, or by a client of
        # the dead one that connected to itself; a port nobody knows yet can simply be another.
        tries_left = PORT_TRIES
        while True:
            port = self._port if self._port is not None else self._wanted_port
            port = _free_port() if port is None else port
            self._order("start", command=self._command(port))
            self._pid = int(self._report()["pid"])
            if self._wait_until_ready(self._pid, port):
                self._port = port
                return
            log = self._log()
            tries_left -= 1
            if "Address already in use" not in log:
                raise BrokerUnavailable(
                    f"the embedded broker ended while starting; the end of its log:\n{log}"
                )
            if tries_left == 0:
                raise BrokerUnavailable(
                    f"port {port} is taken: stop what listens there or choose another port "
                    f"(port=None finds a free one); the end of the server's log:\n{log}"
                )
            time.sleep(PORT_PAUSE_S)

    def _command(self, port: int) -> list[str]:
        binary = self._program()
        where = ["--bind", HOST, "--port", str(port), "--dir", str(self._folder)]
        if self._unix_socket is not None:
            where += ["--unixsocket", str(self._unix_socket), "--unixsocketperm", "700"]
        return [str(binary.path), *where, *binary.flags, *self._extra_args]

    def _wait_until_ready(self, pid: int, port: int) -> bool:
        """True once the server answers, False if it ended."""
        limit_s = time.monotonic() + READY_LIMIT_S
        while self.alive:
            answer = self._ask(port)
            if answer.startswith(b"-NOAUTH"):
                return True  # `extra_args` asked for a password
            # The process id tells our server from a stranger that took the port before it.
            if answer.startswith(b"+PONG") and b"process_id:%d\r" % pid in answer:
                return True
            if answer.startswith(b"-LOADING"):
                limit_s = time.monotonic() + READY_LIMIT_S
            elif time.monotonic() > limit_s:
                raise BrokerUnavailable(
                    f"the embedded broker did not answer for {READY_LIMIT_S:.0f} s; "
                    f"the end of its log:\n{self._log()}"
                )
            self._next_report(POLL_S)  # wakes at once if the server ends
        return False

    def _ask(self, port: int) -> bytes:
        family = socket.AF_INET if self._unix_socket is None else socket.AF_UNIX
        address = (HOST, port) if self._unix_socket is None else str(self._unix_socket)
        answer = b""
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(1.0)
                connection.connect(address)
                connection.sendall(b"PING\r\nINFO server\r\nQUIT\r\n")
                while received := connection.recv(65536):
                    answer += received
        except OSError:
            pass  # not there yet, or gone again: what came so far says all
        return answer

    def _check_socket(self) -> None:
        if self._unix_socket is None:
            return
        if len(os.fsencode(self._unix_socket)) > SOCKET_PATH_LIMIT_BYTES:
            raise BrokerUnavailable(
                f"the unix socket's path {self._unix_socket} is longer than {SOCKET_PATH_LIMIT_BYTES} "
                f"bytes: choose a shorter one"
            )
        # A starting server would take the path away from one that listens there.
        if self._ask(0):
            raise BrokerUnavailable(
                f"another server listens on {self._unix_socket}: stop it or choose another path"
            )

    def _end_server(self, order: str) -> None:
        if self.alive:
            self._order(order)
            limit_s = time.monotonic() + END_LIMIT_S
            while self._pid is not None and time.monotonic() < limit_s:
                self._next_report(POLL_S)

    def _log(self) -> str:
        if self._folder is None:
            return "(no log)"
        text = (self._folder / "server.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-LOG_LINES:]) or "(the log is empty)"

    # --- the supervisor --------------------------------------------------------------------------

    def _open_supervisor(self) -> None:
        if self._supervisor is not None:
            return
        settings = {
            "folder": None if (folder := self._data_dir or self._folder) is None else str(folder),
            "temporary": self._data_dir is None,
            "unix_socket": None if self._unix_socket is None else str(self._unix_socket),
            "grace_s": TEMPORARY_GRACE_S if self._data_dir is None else GRACE_S,
        }
        try:
            # Unbuffered, and both pipes close on exec: another child of this program must not keep the
            # server alive by holding the end whose closing the supervisor waits for.
            self._supervisor = subprocess.Popen(
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
        if not self._hooked:
            # A fork without exec (multiprocessing) copies that end in spite of close-on-exec.
            forked = weakref.WeakMethod(self._disown)
            os.register_at_fork(after_in_child=lambda: (disown := forked()) and disown())
            self._hooked = True
        self._folder = Path(self._report()["folder"])

    def _close_supervisor(self) -> None:
        supervisor, self._supervisor = self._supervisor, None
        self._pid, self._unread = None, b""
        if supervisor is None or supervisor.stdin is None or supervisor.stdout is None:
            return
        supervisor.stdin.close()
        try:
            supervisor.wait(END_LIMIT_S)
        except subprocess.TimeoutExpired:
            supervisor.kill()  # where the system allows it, the server dies with it
            supervisor.wait()
        supervisor.stdout.close()

    def _disown(self) -> None:
        """In a forked child: let go of the supervisor, which belongs to the parent."""
        supervisor, self._supervisor = self._supervisor, None
        self._pid = self._folder = None
        if (
            supervisor is not None
            and supervisor.stdin is not None
            and supervisor.stdout is not None
        ):
            supervisor.stdin.close()
            supervisor.stdout.close()
            supervisor.returncode = 0  # not this process's child: nothing to wait for

    def _order(self, order: str, **details: Any) -> None:
        if self._supervisor is not None and self._supervisor.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # the missing report tells
                self._supervisor.stdin.write(
                    json.dumps({"order": order, **details}).encode() + b"\n"
                )

    def _report(self) -> dict[str, Any]:
        """The supervisor's answer to an order; raises `BrokerUnavailable` with its reason if it failed."""
        limit_s = time.monotonic() + END_LIMIT_S
        while self._supervisor is not None and time.monotonic() < limit_s:
            report = self._next_report(POLL_S)
            if report is None or report["event"] == "ended":
                continue
            if report["event"] == "failed":
                raise BrokerUnavailable(f"the embedded broker did not start: {report['reason']}")
            return report
        raise BrokerUnavailable(
            f"the embedded broker's supervisor ended or did not answer; it said:\n{self._last_words}"
        )

    def _next_report(self, wait_s: float) -> dict[str, Any] | None:
        """The next report, if one comes within `wait_s` seconds; notes that the server has ended."""
        if b"\n" not in self._unread:
            if self._supervisor is None or self._supervisor.stdout is None:
                return None
            poller = select.poll()  # not select: a busy program has more than 1,024 files open
            poller.register(self._supervisor.stdout, select.POLLIN)
            if not poller.poll(wait_s * 1000):
                return None
            received = os.read(self._supervisor.stdout.fileno(), 65536)
            if not received:
                self._close_supervisor()
                return None
            self._unread += received
            return self._next_report(0.0)
        line, self._unread = self._unread.split(b"\n", 1)
        try:
            report: dict[str, Any] = json.loads(line)
        except ValueError:
            # A traceback of the supervisor; its end follows.
            self._last_words += line.decode(errors="replace") + "\n"
            return self._next_report(wait_s)
        if report["event"] == "ended":
            self._pid = None
        return report


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
