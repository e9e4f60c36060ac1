"""A gateway that speaks HTTPS: who it lets in, and how its certificate is renewed under way."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import httpx
import pytest

from command import environment, running
from papers import HOST, Papers
from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.gateway.settings import GatewaySettings
from streamfleet_producer.gateway.tls import Certificate


@pytest.fixture(scope="module")
def papers(tmp_path_factory: pytest.TempPathFactory) -> Papers:
    return Papers(tmp_path_factory.mktemp("papers"))


def serving(papers: Papers) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Both sides' contexts."""
    client = ssl.create_default_context(cafile=str(papers.ca_file))
    return Certificate(*papers.server).context, client


def shaken(server: ssl.SSLContext, client: ssl.SSLContext) -> str | None:
    """Shake hands in memory; gives the version that was agreed on."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    one = client.wrap_bio(to_client, to_server, server_hostname=HOST)
    other = server.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (one, other):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return other.version()


@pytest.mark.parametrize(
    ("version", "is_taken"),
    [
        (ssl.TLSVersion.TLSv1_3, True),
        (ssl.TLSVersion.TLSv1_2, True),
        (ssl.TLSVersion.TLSv1_1, False),
        (ssl.TLSVersion.TLSv1, False),
    ],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion:DeprecationWarning")
def test_no_version_that_is_too_old(papers: Papers, version: ssl.TLSVersion, is_taken: bool) -> None:
    server, client = serving(papers)
    client.set_ciphers("ALL:@SECLEVEL=0")
    client.minimum_version = client.maximum_version = version
    if is_taken:
        assert shaken(server, client) == version.name.replace("_", ".")
    else:
        with pytest.raises(ssl.SSLError):
            shaken(server, client)


def test_no_cipher_without_forward_secrecy(papers: Papers) -> None:
    server, client = serving(papers)
    client.maximum_version = ssl.TLSVersion.TLSv1_2
    client.set_ciphers("AES256-GCM-SHA384:AES128-SHA")
    with pytest.raises(ssl.SSLError):
        shaken(server, client)


@pytest.mark.parametrize(
    ("certificate", "key", "words"),
    [
        ("nowhere.pem", "server.key", "No such file"),
        ("server.pem", "nowhere.key", "No such file"),
        ("garbage.pem", "server.key", "PEM"),
        ("server.pem", "client.key", "MISMATCH"),
        ("server.pem", "locked.key", "without a password"),
        ("server.pem", None, "PEM"),
    ],
)
def test_files_of_no_use(papers: Papers, certificate: str, key: str | None, words: str) -> None:
    (papers.folder / "garbage.pem").write_text("no certificate")
    locked = papers.locked(papers.server[1])
    (papers.folder / "locked.key").write_bytes(locked)
    settings = GatewaySettings(
        tls_certificate=papers.folder / certificate, tls_key=papers.folder / key if key else None
    )
    with pytest.raises(InvalidRequest, match=words) as caught:
        Certificate.of(settings)
    assert certificate in str(caught.value)


def test_a_key_alone(papers: Papers) -> None:
    with pytest.raises(InvalidRequest, match="STREAMFLEET_TLS_CERTIFICATE"):
        Certificate.of(GatewaySettings(tls_key=papers.server[1]))
    assert Certificate.of(GatewaySettings()) is None


def env_of(certificate: Path, key: Path) -> dict[str, str]:
    return environment(
        STREAMFLEET_REDIS_URL="redis://127.0.0.1:9/0",
        STREAMFLEET_GATEWAY_PORT="0",
        STREAMFLEET_TLS_CERTIFICATE=str(certificate),
        STREAMFLEET_TLS_KEY=str(key),
    )


def test_a_certificate_is_renewed_and_no_connection_is_lost(papers: Papers) -> None:
    live = [papers.folder / "live.pem", papers.folder / "live.key"]
    for file, source in zip(live, papers.server, strict=True):
        file.write_bytes(source.read_bytes())
    trusting = ssl.create_default_context(cafile=str(papers.ca_file))
    with running("gateway", env=env_of(*live)) as gateway:
        url = gateway.wait_for("gateway listens").partition("url=")[2].split()[0]
        assert url.startswith("https://")
        port = int(url.rpartition(":")[2])
        with httpx.Client(base_url=url, verify=trusting) as first:
            assert first.get("/healthz").text == "ok\n"
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{url}/healthz")  # who does not know our signer
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"http://{HOST}:{port}/healthz")  # in clear
            renewed = papers.issue("renewed", HOST)
            for file, source in zip(live, renewed, strict=True):
                file.write_bytes(source.read_bytes())
            gateway.process.send_signal(1)
            gateway.wait_for("new certificate taken")
            assert shown(port) == in_bytes(renewed[0])
            live[0].write_text("torn")
            gateway.process.send_signal(1)
            gateway.wait_for("new certificate not taken")
            assert shown(port) == in_bytes(renewed[0])
            assert first.get("/healthz").text == "ok\n"  # over the connection it had


def in_bytes(file: Path) -> bytes:
    """The first certificate of a chain."""
    first, mark, _ = file.read_text().partition("-----END CERTIFICATE-----")
    return ssl.PEM_cert_to_DER_cert(first + mark + "\n")


def shown(port: int) -> bytes | None:
    """The certificate that a new connection is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection((HOST, port), 10) as plain, context.wrap_socket(plain) as wrapped:
        return wrapped.getpeercert(binary_form=True)
