"""The door for probes: it answers whoever asks rightly, and lets nobody hold it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from streamfleet_worker.health import HealthServer, Probe
from streamfleet_worker.metrics import Metrics


class Door:
    def __init__(self) -> None:
        self.wrong: dict[str, str | None] = {"/healthz": None, "/readyz": "starting"}
        probes: dict[str, Probe] = {path: lambda path=path: self.wrong[path] for path in self.wrong}  # type: ignore[misc]
        self.registry = Metrics("q", "0").registry
        self.server = HealthServer("127.0.0.1", 0, self.registry, probes)
        self.port = self.server.start()

    def get(self, path: str, **headers: str) -> tuple[int, str, str]:
        request = Request(f"http://127.0.0.1:{self.port}{path}", headers=headers)
        try:
            with urlopen(request, timeout=60) as reply:
                return reply.status, reply.headers["Content-Type"], reply.read().decode()
        except HTTPError as error:
            return error.code, error.headers["Content-Type"], error.read().decode()


@pytest.fixture
def door() -> Iterator[Door]:
    made = Door()
    yield made
    made.server.close()


def test_probes_say_what_is_wrong(door: Door) -> None:
    assert door.get("/healthz") == (200, "text/plain; charset=utf-8", "ok\n")
    assert door.get("/readyz?verbose") == (503, "text/plain; charset=utf-8", "starting\n")
    door.wrong |= {"/healthz": "the engine is dead", "/readyz": None}
    assert door.get("/healthz")[::2] == (503, "the engine is dead\n")
    assert door.get("/readyz")[0] == 200


def test_metrics_in_both_formats(door: Door) -> None:
    status, kind, text = door.get("/metrics")
    assert (status, kind.partition(";")[0]) == (200, "text/plain")
    assert len(list(text_string_to_metric_families(text))) > 15
    _, kind, text = door.get("/metrics", Accept="application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text")
    assert text.endswith("# EOF\n")


def test_a_collector_that_asks_in_vain_fails_the_scrape_and_no_more(door: Door) -> None:
    class Deaf(Collector):
        def collect(self) -> Iterator[Metric]:
            raise TimeoutError

        def describe(self) -> Iterator[Metric]:
            return iter(())

    deaf = Deaf()
    door.registry.register(deaf)
    assert door.get("/metrics")[::2] == (503, "the metrics could not be read in time\n")
    door.registry.unregister(deaf)
    assert door.get("/metrics")[0] == 200


@pytest.mark.parametrize("path", ["/", "/metrics/", "/healthz/x", "/%2e%2e/etc/passwd"])
def test_anything_else_is_not_found_and_says_what_is(door: Door, path: str) -> None:
    status, _, text = door.get(path)
    assert status == 404
    assert "/healthz, /readyz or /metrics" in text


def test_other_methods_are_refused(door: Door) -> None:
    request = Request(f"http://127.0.0.1:{door.port}/healthz", data=b"x", method="POST")
    with pytest.raises(HTTPError) as caught:
        urlopen(request, timeout=60)
    assert caught.value.code == 501
    caught.value.close()


def test_slow_clients_hold_nobody_up(door: Door) -> None:
    slow = [socket.create_connection(("127.0.0.1", door.port)) for _ in range(20)]
    try:
        for connection in slow:
            connection.sendall(b"GET /healthz HTTP/1.1\r\nX-Half")
        assert door.get("/healthz")[0] == 200
    finally:
        for connection in slow:
            connection.close()


def test_a_client_that_goes_away_is_no_matter(door: Door, capfd: pytest.CaptureFixture[str]) -> None:
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", door.port)) as connection:
            # Reset instead of a polite close, as soon as the request is out.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")
    assert door.get("/healthz")[0] == 200
    assert "Traceback" not in capfd.readouterr().err


def test_a_taken_port_is_refused_and_a_closed_one_is_free(door: Door) -> None:
    second = HealthServer("127.0.0.1", door.port, Metrics("q", "0").registry, {})
    with pytest.raises(OSError, match="in use"):
        second.start()
    second.close()
    door.server.close()
    door.server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", door.port))


def test_no_thread_is_left(door: Door) -> None:
    assert door.get("/healthz")[0] == 200
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "health"]
    door.server.close()
    thread.join(60)
    assert not thread.is_alive()


def test_a_predecessor_and_a_successor_share_one_socket() -> None:
    probes: dict[str, Probe] = {"/healthz": lambda: None}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        port = int(listening.getsockname()[1])
        old, new = (
            HealthServer("unused", 1, Metrics("q", "0").registry, probes, listening.dup()) for _ in range(2)
        )
        assert (old.start(), new.start()) == (port, port)
        url = f"http://127.0.0.1:{port}/healthz"
        # Whoever of the two comes too late for a connection must not wait for the next one.
        for _ in range(20):
            with urlopen(url, timeout=60) as reply:
                assert reply.status == 200
        old.close()
        for _ in range(5):
            with urlopen(url, timeout=60) as reply:
                assert reply.status == 200
        new.close()
