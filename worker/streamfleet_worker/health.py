"""The worker's HTTP door for probes and Prometheus: /healthz, /readyz, /metrics.

It runs on threads of its own, so that it answers, and tells the truth, when the event loop hangs.
"""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer

import structlog
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

Probe = Callable[[], str | None]
"""None if all is well, else what is wrong."""

TEXT = "text/plain; charset=utf-8"

log = structlog.get_logger()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections not yet accepted; the default of 5 makes others wait for a second
    registry: CollectorRegistry
    probes: dict[str, Probe]

    def server_bind(self) -> None:
        # Not as HTTPServer does it: that asks the name service who we are, which can take long.
        TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = int(self.server_address[1])

    def handle_error(self, *_: object) -> None:
        # A client that goes away in the middle is its own affair.
        log.debug("probe not answered", exc_info=sys.exc_info())


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # seconds; a client that sends nothing must not hold a thread

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            encode, kind = choose_encoder(self.headers.get("Accept", ""))
            try:
                page = encode(self.server.registry)
            except TimeoutError:  # of a collector that has to ask somebody
                self._answer(503, b"the metrics could not be read in time\n", TEXT)
            else:
                self._answer(200, page, kind)
        elif path in self.server.probes:
            wrong = self.server.probes[path]()
            body = (wrong or "ok") + "\n"
            self._answer(200 if wrong is None else 503, body.encode(), TEXT)
        else:
            self._answer(404, b"try /healthz, /readyz or /metrics\n", TEXT)

    def _answer(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (named by the standard library)
        """Probes come every few seconds: not worth a line each."""


class HealthServer:
    """Serves probes and metrics from `start` to `close`.

    `listening` is a non-blocking socket to use instead of one of its own at `host` and `port`.

    Raises:
        OSError: by `start`, when the port is taken.
    """

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        probes: dict[str, Probe],
        listening: socket.socket | None = None,
    ) -> None:
        self._address = (host, port)
        self._listening = listening
        self._registry = registry
        self._probes = probes
        self._server: _Server | None = None

    def start(self) -> int:
        """Listen; gives the port, which is a free one if 0 was asked for."""
        server = _Server(self._address, _Handler, bind_and_activate=self._listening is None)
        if self._listening is not None:
            server.socket.close()
            server.socket = self._listening
            server.server_address = self._listening.getsockname()
        server.registry = self._registry
        server.probes = self._probes
        # The poll interval is how long `close` may take.
        threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="health", daemon=True
        ).start()
        self._server = server
        return int(server.server_address[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None
