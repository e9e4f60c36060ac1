"""Redis behind TLS: who is let in, and what is said of certificates that are wrong."""

from __future__ import annotations

import re
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from broker_parts import submission
from gated_engine import GatedEngine
from gateway_process import Gateway
from hired import Hired
from papers import Papers
from streamfleet_common import calls as calls_module
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.schemas import GenerateRequest
from streamfleet_producer.bulk.batches import Batches
from streamfleet_producer.client import Client
from topology.nodes import HOST, REDIS, Node, free_port

REQUEST = GenerateRequest(prompt="a b c", max_tokens=8)


def _has_tls() -> bool:
    if not REDIS.exists():
        return False
    linked = subprocess.run(["ldd", REDIS], capture_output=True, text=True, check=False)
    return "libssl" in linked.stdout


pytestmark = pytest.mark.skipif(not _has_tls(), reason="no redis-server with TLS on this machine")


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls_module, "BACKOFF_S", 0.01)


class Server:
    """A node that speaks TLS on a port of its own, and asks clients for certificates if `clients`."""

    def __init__(self, papers: Papers, paper: tuple[Path, Path], *, clients: str = "no") -> None:
        self.port = free_port()
        self._papers = papers
        self.node = Node(
            REDIS,
            tls_port=str(self.port),
            tls_cert_file=str(paper[0]),
            tls_key_file=str(paper[1]),
            tls_ca_cert_file=str(papers.ca_file),
            tls_auth_clients=clients,
        )

    def url(
        self, *, ca: Path | None = None, client: tuple[Path, Path] | None = None, host: str = HOST
    ) -> str:
        options = [f"ssl_ca_certs={ca or self._papers.ca_file}"]
        if client is not None:
            options += [f"ssl_certfile={client[0]}", f"ssl_keyfile={client[1]}"]
        return f"rediss://{host}:{self.port}/0?{'&'.join(options)}"


@pytest.fixture
def server(papers: Papers) -> Iterator[Server]:
    made = Server(papers, papers.server)
    with made.node:
        yield made


async def test_all_sides_work_over_tls(papers: Papers) -> None:
    made = Server(papers, papers.server, clients="yes")
    with made.node:
        url = made.url(client=papers.client)
        hired = await Hired(url, "w0", GatedEngine()).start()
        async with Client(url, "q") as fleet:
            assert (await fleet.run(REQUEST)).text == "a b c"
            async with fleet.stream(REQUEST) as tokens:
                assert "".join([event.text async for event in tokens]) == "a b c"
        async with Gateway(url) as gateway:
            assert "q" in await gateway.services.directory.cards()
        with Batches(url, "jobs") as batches:
            assert batches.workers() == 0
        await hired.dismiss()
        # Nobody has spoken in clear: that is the test's own line alone.
        listed: Any = made.node.raw.client_list()
        assert {client["laddr"].rpartition(":")[2] for client in listed} <= {
            str(made.node.port),
            str(made.port),
        }


async def refused(url: str) -> BrokerUnavailable:
    """Nothing gets through, and it is said why."""
    connections = Connections.open(url)
    try:
        with pytest.raises(BrokerUnavailable) as caught:
            await Broker(connections, "q").submit([submission()])
        with pytest.raises(BrokerUnavailable) as plain:
            await Broker(connections, "q").queues()
        assert plain.value.reason == caught.value.reason
    finally:
        await connections.close()
    return caught.value


@pytest.mark.parametrize(
    ("paper", "words"),
    [
        ("expired", "expired"),
        ("elsewhere", "mismatch"),
        ("stranger", "self-signed|unable to get local issuer"),
    ],
)
async def test_a_server_that_is_not_who_it_should_be(papers: Papers, paper: str, words: str) -> None:
    made = Server(papers, papers.server if paper == "stranger" else getattr(papers, paper))
    with made.node:
        error = await refused(made.url(ca=papers.stranger_file if paper == "stranger" else None))
        assert error.reason == "tls"
        assert "ssl_ca_certs" in str(error)
        assert re.search(words, str(error)), error
        with Batches(made.url(ca=papers.stranger_file), "jobs") as batches, pytest.raises(BrokerUnavailable):
            batches.workers()


async def test_a_client_without_a_certificate(papers: Papers) -> None:
    made = Server(papers, papers.server, clients="yes")
    with made.node:
        connections = Connections.open(made.url())
        with pytest.raises(BrokerUnavailable) as caught:
            await Broker(connections, "q").submit([submission()])
        await connections.close()
        # Of TLS 1.3 the server's word comes after the handshake, and its closing may overtake it.
        assert caught.value.reason in ("tls", "unreachable")


async def test_a_subscription_fails_as_clearly(server: Server, papers: Papers) -> None:
    async with Client(server.url(ca=papers.stranger_file), "q") as fleet:
        with pytest.raises(BrokerUnavailable) as caught:
            await fleet.run(REQUEST, timeout=20)
    assert caught.value.reason == "tls"


async def test_a_file_that_is_not_there(server: Server, papers: Papers) -> None:
    error = await refused(server.url(ca=papers.folder / "nowhere.pem"))
    assert "nowhere.pem" in str(error)


async def test_plain_words_to_a_port_of_tls(server: Server) -> None:
    assert (await refused(f"redis://{HOST}:{server.port}/0")).reason == "unreachable"


async def test_a_new_certificate_of_the_server_needs_no_restart(server: Server, papers: Papers) -> None:
    connections = Connections.open(server.url())
    broker = Broker(connections, "q")
    await broker.ping()
    certificate, key = papers.issue("renewed", HOST)
    server.node.raw.config_set("tls-cert-file", str(certificate), "tls-key-file", str(key))
    server.node.raw.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
    await broker.ping()
    assert ssl.get_server_certificate((HOST, server.port)).encode().strip() in certificate.read_bytes()
    await connections.close()


def test_the_default_checks_names_and_signatures(server: Server, papers: Papers) -> None:
    """What we rely on: of the library, nobody has to ask for it."""
    with (
        redis.Redis.from_url(server.url(ca=papers.stranger_file)) as client,
        pytest.raises(redis.ConnectionError),
    ):
        client.ping()
