"""What an attacker sends: ambiguous requests, bombs, paths that climb, and pages of other sites."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from gateway_process import Gateway

NOWHERE = "redis://127.0.0.1:9/0"
PATIENCE_S = 45.0
POST = b"POST /v1/rerank HTTP/1.1\r\nhost: x\r\n"
SMUGGLED = b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n"


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[Gateway]:
    async with Gateway(NOWHERE, files_dir=tmp_path / "files", max_file_bytes=100_000) as running:
        yield running


@pytest.fixture
async def http(gateway: Gateway) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=gateway.url, timeout=PATIENCE_S) as client:
        yield client


async def said_to(gateway: Gateway, sent: bytes, *, is_all: bool = False) -> bytes:
    """All that the gateway answers, until it closes; `is_all` tells it that there will be no more."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(sent)
        if is_all:
            writer.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


@pytest.mark.parametrize(
    "head",
    [
        b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\ncontent-length: 4\r\n\r\n0\r\n\r\n",
        b"content-length: 4\r\ncontent-length: 40\r\n\r\n{}  ",
        b"content-length: 4, 40\r\n\r\n{}  ",
        b"content-length: +4\r\n\r\n{}  ",
        b"content-length: -1\r\n\r\n",
        b"content-length: 0x4\r\n\r\n{}  ",
        b"content-length: 99999999999999999999999\r\n\r\n{}",
        b"transfer-encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\n-1\r\n\r\n",
        b"transfer-encoding: chunked\r\n\r\nffffffffffffffff1\r\n",
        b"x: a\r\n b\r\ncontent-length\x00: 4\r\n\r\n",
        b"x: a\nb\rc: d\r\n\r\n",
    ],
)
async def test_a_request_that_two_servers_would_read_differently(gateway: Gateway, head: bytes) -> None:
    said = await said_to(gateway, POST + head + SMUGGLED, is_all=True)
    # One answer at most, and what is behind the doubtful request is none.
    assert said.count(b"HTTP/1.1 ") <= 1, said
    assert b"HTTP/1.1 200" not in said
    assert b"\r\nok\n" not in said


NESTED = "[" * 100_000 + "]" * 100_000
DIGITS = "9" * 100_000


@pytest.mark.parametrize(
    "value", [NESTED, NESTED[:100_000], DIGITS, f"-{DIGITS}", f"1e{DIGITS}", "1e99999", '"\\ud800"']
)
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", '{"model": "q", "messages": [], "temperature": %s}'),
        ("/v1/chat/completions", '{"model": "q", "messages": %s}'),
        ("/v1/completions", '{"model": "q", "prompt": %s}'),
        ("/v1/embeddings", '{"model": "q", "input": %s}'),
        ("/v1/rerank", "%s"),
        ("/v1/decide", '{"state_json": %s, "questions": %s}'),
        ("/v1/handlers/h", '{"input": %s}'),
        ("/v1/requests", '{"queue": "q", "request": %s}'),
        ("/generate", '{"inputs": "x", "parameters": {"seed": %s}}'),
        ("/v1/batches", '{"metadata": %s}'),
    ],
)
async def test_bombs_of_json(http: httpx.AsyncClient, path: str, body: str, value: str) -> None:
    answer = await http.post(
        path, content=body.replace("%s", value), headers={"content-type": "application/json"}
    )
    assert answer.status_code in (400, 404, 422, 503), answer.text[:300]
    if answer.status_code == 503:
        assert "broker_unavailable" in answer.text  # well-formed; Redis is not there
    assert len(answer.content) < 20_000


async def test_bodies_are_never_unpacked(http: httpx.AsyncClient) -> None:
    for coding in ("gzip", "br", "deflate", "zstd", "identity, gzip"):
        for path in ("/v1/completions", "/v1/files"):
            answer = await http.post(path, content=b"\x1f\x8b", headers={"content-encoding": coding})
            assert answer.status_code == 400, (coding, answer.text)
            assert "Content-Encoding" in answer.text
    plain = await http.post("/v1/rerank", content=b"{}", headers={"content-encoding": "identity"})
    assert "Content-Encoding" not in plain.text


@pytest.mark.parametrize(
    "path",
    [
        "/static/..%2f..%2fsettings.py",
        "/static/%2e%2e/settings.py",
        "/static/....//settings.py",
        "/v1/files/..%2f..%2f..%2fetc%2fpasswd",
        "/v1/files/..%2fdefault/content",
        "/v1/files/%00/content",
        "/v1/files/file-0000/content",
        "/v1/batches/..%2f..%2fx",
    ],
)
async def test_paths_that_climb(gateway: Gateway, path: str) -> None:
    said = await said_to(gateway, b"GET %s HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n" % path.encode())
    assert said.split(b" ", 2)[1] in (b"404", b"503"), said
    assert b"root:" not in said


def form(*parts: tuple[str, str]) -> tuple[bytes, dict[str, str]]:
    body = "".join(
        f"--b\r\ncontent-disposition: form-data; {head}\r\n\r\n{value}\r\n" for head, value in parts
    )
    return (body + "--b--\r\n").encode(), {"content-type": "multipart/form-data; boundary=b"}


@pytest.mark.parametrize(
    ("parts", "status"),
    [
        ([(f'name="f{number}"', "x") for number in range(100)], 400),
        ([(f'name="f{number}"; filename="f{number}"', "x") for number in range(50)], 400),
        ([('name="purpose"', "x" * 80_000)], 400),
        ([('name="file"; filename="a"', "x" * 300_000)], 413),
        ([(f'name="{"n" * 9000}"', "x"), ('name="purpose"', "batch")], 400),
    ],
    ids=["fields", "files", "a long field", "a long file", "a long name"],
)
async def test_bombs_of_forms(
    gateway: Gateway, http: httpx.AsyncClient, parts: list[tuple[str, str]], status: int
) -> None:
    content, headers = form(*parts)
    answer = await http.post("/v1/files", content=content, headers=headers)
    assert answer.status_code == status, answer.text
    assert gateway.services.files is not None
    assert gateway.services.files.total_bytes() == 0


async def test_the_name_of_a_file_is_a_word_and_no_path(gateway: Gateway, http: httpx.AsyncClient) -> None:
    name = "../../../etc/passwd"
    content, headers = form(('name="purpose"', "batch"), (f'name="file"; filename="{name}"', "{}"))
    made = (await http.post("/v1/files", content=content, headers=headers)).json()
    assert made["filename"] == name
    files = gateway.services.settings.files_dir
    assert files is not None
    assert all(path.resolve().is_relative_to(files.resolve()) for path in files.parent.rglob("*"))
    got = await http.get(f"/v1/files/{made['id']}/content")
    assert got.content == b"{}"
    assert "attachment" in got.headers["content-disposition"]


# --- browsers


async def test_no_other_site_may_read(http: httpx.AsyncClient) -> None:
    origin = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    asked = await http.options("/v1/completions", headers=origin)
    assert asked.status_code == 405
    for answer in (asked, await http.get("/healthz", headers=origin), await http.get("/", headers=origin)):
        assert not [name for name in answer.headers if name.startswith("access-control")]


async def test_the_host_is_never_sent_back(gateway: Gateway) -> None:
    for path in (b"/healthz/", b"/docs/", b"//x/", b"/v1/fleet/"):
        said = await said_to(gateway, b"GET %s HTTP/1.1\r\nhost: evil\r\nconnection: close\r\n\r\n" % path)
        assert said.startswith(b"HTTP/1.1 404 "), said
        assert b"evil" not in said.lower()


@pytest.mark.parametrize(
    ("host", "origin", "is_taken"),
    [
        ("127.0.0.1:8000", None, True),
        ("localhost:8000", None, True),
        ("[::1]:8000", "http://[::1]:8000", True),
        ("gateway:8000", None, True),
        ("app.localhost", "http://app.localhost", True),
        ("localhost:8000", "http://localhost:8000", True),
        # A name of somebody else's that leads here.
        ("evil.example", None, False),
        ("evil.example:8000", "http://evil.example:8000", False),
        ("127.0.0.1.evil.example", None, False),
        # A page of another site that sends a form here.
        ("127.0.0.1:8000", "https://evil.example", False),
        ("127.0.0.1:8000", "http://127.0.0.1:9000", False),
        ("localhost", "null", False),
    ],
)
async def test_without_keys_pages_of_other_sites_are_refused(
    http: httpx.AsyncClient, host: str, origin: str | None, is_taken: bool
) -> None:
    headers = {"host": host} | ({"origin": origin} if origin else {})
    answer = await http.post("/v1/rerank", json={}, headers=headers)
    assert answer.status_code == (400 if is_taken else 403), answer.text
    if not is_taken:
        assert answer.json()["error"]["code"] == "foreign_site"
        assert (await http.get("/healthz", headers=headers)).status_code == 200, "probes ask by whatever name"


async def status_of(gateway: Gateway, host: str) -> int:
    """What is said to a request that reached it by this name."""
    async with httpx.AsyncClient(base_url=gateway.url) as client:
        return (await client.post("/v1/rerank", json={}, headers={"host": host})).status_code


async def test_names_that_it_goes_by(tmp_path: Path) -> None:
    async with Gateway(NOWHERE, gateway_names=("api.example",)) as running:
        for host, status in (("api.example:443", 400), ("API.example", 400), ("other.example", 403)):
            assert await status_of(running, host) == status, host
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"tenants": {}}))
    async with Gateway(NOWHERE, keys_file=keys) as running:
        assert await status_of(running, "other.example") == 401  # a key is something that no page has
