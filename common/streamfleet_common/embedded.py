"""A real Valkey server that lives exactly as long as the program that started it.

For the demo, for `streamfleet up` and for the tests. The server is a child of a supervisor process
(`embedded_supervisor.py`) that notices the end of this program, whatever ends it, and takes the
server and the temporary data with it. It listens on this machine only and asks for no password: on
a shared machine give it a `unix_socket` in a private folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
import urllib.parse
import weakref
from collections.abc import Sequence
from pathlib import Path

from streamfleet_common.embedded_binary import ServerBinary
from streamfleet_common.embedded_link import SupervisorLink
from streamfleet_common.errors import BrokerUnavailable

HOST = "127.0.0.1"
READY_LIMIT_S = 15.0  # without a sign of life; loading a large file counts as one
GRACE_S = 5.0  # for the last write of data that is kept
TEMPORARY_GRACE_S = 0.5  # a regular end takes 0.1 s, and there is nothing to save
PORT_TRIES = 5
PORT_PAUSE_S = 0.2
POLL_S = 0.005
ASK_LIMIT_S = 0.25  # a stranger on the port may say nothing; a slow server is asked again
SOCKET_PATH_LIMIT_BYTES = 103  # macOS; Linux allows 107
LOG_LINES = 12


class EmbeddedBroker:
    """One server; a context manager, or `start` and `stop`.

    `data_dir=None` keeps the data in a temporary folder, removed at the end even if this program
    is killed; a path keeps it there for the next start. `port=None` picks a free one, unless there
    is a `unix_socket`: then the server listens there, and on TCP only if a port is given too.
    `extra_args` come last on the server's command line and win.

    All calls block, for about 0.1 s each (a stuck server is killed 5 s into `stop`, or 0.5 s if its
    data is temporary); call them from one thread at a time. A forked child of this program may use
    the `url` but does not own the broker.
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
        self._link: SupervisorLink | None = None
        self._folder = self._data_dir
        self._port: int | None = None
        self._hooked = False

    def __enter__(self) -> EmbeddedBroker:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """What clients connect to: `redis://…` or `unix://…`, still the same after `kill`.

        Raises:
            BrokerUnavailable: the broker is not started.
        """
        if self._port is None:
            raise BrokerUnavailable("the embedded broker is not started: call start() first")
        if self._unix_socket is not None:
            return f"unix://{urllib.parse.quote(str(self._unix_socket))}"
        return f"redis://{HOST}:{self._port}/0"

    @property
    def pid(self) -> int:
        """The server's process id; raises `BrokerUnavailable` while no server runs."""
        if self._link is None or not self._link.runs() or self._link.server_pid is None:
            raise BrokerUnavailable("the embedded broker is not running: call start() first")
        return self._link.server_pid

    @property
    def version(self) -> str:
        """The server's version, like `9.1.2`; raises `BrokerUnavailable` if there is no server."""
        return self._program().version

    def is_alive(self) -> bool:
        """Whether the server's process runs."""
        return self._link is not None and self._link.runs()

    def start(self) -> EmbeddedBroker:
        """Start the server and return once it answers; nothing happens if it runs already.

        Raises:
            BrokerUnavailable: with the last lines of the server's log in the message.
        """
        if self.is_alive():
            return self
        try:
            self._start_server(self._open_link())
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """End the server in order, and remove the data if it is temporary; may be called twice."""
        if self._link is not None:
            self._link.close()
        if self._data_dir is None and self._folder is not None:
            # Done already, unless somebody killed the supervisor.
            shutil.rmtree(self._folder, ignore_errors=True)
        self._folder, self._port, self._link = self._data_dir, None, None

    def kill(self) -> None:
        """Kill the server with SIGKILL, as a crash would; its data stays for `restart`."""
        if self._link is not None:
            self._link.end("kill")

    def restart(self) -> None:
        """Start the server again on the same port and data, ending it in order first if it runs.

        Raises:
            BrokerUnavailable: as `start` does; the broker is stopped then.
        """
        if self._link is not None:
            self._link.end("stop")
        self.start()

    def _program(self) -> ServerBinary:
        if self._binary is None:
            self._binary = ServerBinary.find()
        return self._binary

    def _open_link(self) -> SupervisorLink:
        if self._link is not None and self._link.is_open:
            return self._link
        # After a killed supervisor this hands its folder, and so the data, to the next one.
        self._link = SupervisorLink(
            self._folder,
            temporary=self._data_dir is None,
            unix_socket=self._unix_socket,
            grace_s=GRACE_S if self._data_dir else TEMPORARY_GRACE_S,
        )
        self._folder = self._link.folder
        if not self._hooked:
            # A fork without exec (multiprocessing) copies the pipe in spite of close-on-exec, and
            # the copy would keep the server alive.
            disown = weakref.WeakMethod(self._disown)
            os.register_at_fork(after_in_child=lambda: (method := disown()) and method())
            self._hooked = True
        return self._link

    def _disown(self) -> None:
        if self._link is not None:
            self._link.disown()
        self._link = self._folder = None

    def _start_server(self, link: SupervisorLink) -> None:
        self._check_socket()
        tries_left = PORT_TRIES
        while True:
            # A port that clients know may be held for a moment by a dying server, or by a client
            # that connected to itself; while nobody knows it, it can simply be another.
            port = self._port if self._port is not None else self._wanted_port
            port = _free_port() if port is None else port
            pid = link.start(self._command(link.folder, port))
            if self._wait_until_ready(link, pid, port):
                self._port = port
                return
            log = self._log(link)
            tries_left -= 1
            if "Address already in use" not in log:
                raise BrokerUnavailable(
                    f"the embedded broker ended while starting; the end of its log:\n{log}"
                )
            if tries_left == 0:
                raise BrokerUnavailable(
                    f"port {port} is taken: stop what listens there or choose another port"
                )
            time.sleep(PORT_PAUSE_S)

    def _command(self, folder: Path, port: int) -> list[str]:
        binary = self._program()
        where = ["--bind", HOST, "--port", str(port), "--dir", str(folder)]
        if self._unix_socket is not None:
            where += ["--unixsocket", str(self._unix_socket), "--unixsocketperm", "700"]
        return [str(binary.path), *where, *binary.flags, *self._extra_args]

    def _wait_until_ready(self, link: SupervisorLink, pid: int, port: int) -> bool:
        """True once the server answers, False if it ended."""
        limit_s = time.monotonic() + READY_LIMIT_S
        while link.runs(POLL_S):
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
                    f"the end of its log:\n{self._log(link)}"
                )
        return False

    def _ask(self, port: int) -> bytes:
        family = socket.AF_INET if self._unix_socket is None else socket.AF_UNIX
        address = (HOST, port) if self._unix_socket is None else str(self._unix_socket)
        answer = b""
        try:
            with socket.socket(family, socket.SOCK_STREAM) as connection:
                connection.settimeout(ASK_LIMIT_S)
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
                f"the unix socket's path {self._unix_socket} is longer than "
                f"{SOCKET_PATH_LIMIT_BYTES} bytes: choose a shorter one"
            )
        # A starting server removes whatever has this path, even from under another server.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            is_taken = probe.connect_ex(str(self._unix_socket)) == 0
        if is_taken or (self._unix_socket.exists() and not self._unix_socket.is_socket()):
            raise BrokerUnavailable(f"the unix socket's path {self._unix_socket} is in use: choose another")

    @staticmethod
    def _log(link: SupervisorLink) -> str:
        text = (link.folder / "server.log").read_text(errors="replace")
        return "\n".join(text.splitlines()[-LOG_LINES:]) or "(the log is empty)"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
