"""Clients that leave, that take nothing, or whose server ends: each stream is cleaned up, once."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, cast

import httpx
import pytest
from starlette.requests import Request as HttpRequest

from eventually import eventually
from gateway_process import Gateway
from hand_worker import HandWorker, Work, delta
from hired import eventually_so
from streamfleet_common import codec
from streamfleet_common.deliveries import Emission
from streamfleet_common.errors import QueueFull
from streamfleet_producer import Cancelled, Choice, Client, Delta, GenerateRequest, Hub
from streamfleet_producer.event_reader import MAX_FRAMES
from streamfleet_producer.gateway.call import Call, ClientGone
from streamfleet_producer.gateway.clients import Clients
from streamfleet_producer.gateway.dialects import OPENAI
from streamfleet_producer.gateway.event_stream import HEARTBEAT, OPENED, EventStream
from streamfleet_producer.gateway.http_protocol import BoundedProtocol
from streamfleet_producer.gateway.keys import ANYBODY

# --- one response, without a server


class Peer:
    """A client, as an ASGI application sees it."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.takes = asyncio.Event()
        self.takes.set()
        self.sent: list[dict[str, Any]] = []
        self.sending = 0

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sending += 1
        try:
            await self.takes.wait()
            self.sent.append(message)
        finally:
            self.sending -= 1

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self.sent)

    @property
    def is_complete(self) -> bool:
        return bool(self.sent) and self.sent[-1].get("more_body") is False


class Source:
    """Gives chunks as it is told to, and knows how often it was cleaned up."""

    def __init__(self) -> None:
        self.chunks: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()
        self.cleaning = asyncio.Event()
        self.may_end = asyncio.Event()
        self.may_end.set()
        self.cleaned = 0

    async def read(self) -> AsyncGenerator[bytes]:
        try:
            while (chunk := await self.chunks.get()) is not None:
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
        finally:
            self.cleaning.set()
            await self.may_end.wait()
            self.cleaned += 1


@pytest.fixture
def peer() -> Peer:
    return Peer()


@pytest.fixture
def source() -> Source:
    return Source()


async def answered(peer: Peer, source: Source, **options: Any) -> asyncio.Task[int]:
    """The task that sends a stream which was opened; its outcome is how often it is still to be cancelled."""
    source.chunks.put_nowait(OPENED)
    stream = await EventStream(source.read(), OPENAI, **options).opened()

    async def respond() -> int:
        await stream({}, cast(Any, peer.receive), peer.send)
        return cast("asyncio.Task[object]", asyncio.current_task()).cancelling()

    return asyncio.create_task(respond())


async def test_a_stream_is_sent_to_its_end(peer: Peer, source: Source) -> None:
    sending = await answered(peer, source, headers=lambda: {"x-request-id": "q:1"})
    for chunk in (b"data: 1\n\n", b"data: 2\n\n", None):
        source.chunks.put_nowait(chunk)
    assert await sending == 0
    assert peer.body == b"data: 1\n\ndata: 2\n\n"
    assert peer.is_complete
    assert (b"x-request-id", b"q:1") in peer.sent[0]["headers"]
    assert source.cleaned == 1


async def test_what_refuses_a_stream_is_raised_before_it_begins(source: Source) -> None:
    source.chunks.put_nowait(QueueFull("full", limit=1, retry_after=1.0))
    with pytest.raises(QueueFull):
        await EventStream(source.read(), OPENAI).opened()
    assert source.cleaned == 1


@pytest.mark.parametrize("error", [QueueFull("full", limit=1, retry_after=1.0), KeyError("a secret prompt")])
async def test_an_error_amid_a_stream_is_a_chunk(
    peer: Peer, source: Source, error: Exception, capsys: pytest.CaptureFixture[str]
) -> None:
    sending = await answered(peer, source)
    source.chunks.put_nowait(error)
    assert await sending == 0
    assert peer.body.startswith(b'data: {"error":{')
    assert b"secret" not in peer.body
    assert "secret" not in "".join(capsys.readouterr())
    assert peer.is_complete
    assert source.cleaned == 1


@pytest.mark.parametrize("when", ["opening", "waiting", "sending", "ended"])
async def test_a_client_that_leaves_ends_its_stream_once(peer: Peer, source: Source, when: str) -> None:
    gone: list[int] = []
    if when == "opening":
        peer.gone.set()
    sending = await answered(peer, source, gone=lambda: gone.append(1))
    if when == "sending":
        peer.takes.clear()
        await eventually(lambda: peer.sending)
    if when == "ended":
        source.chunks.put_nowait(None)
        await sending
    peer.gone.set()
    assert await sending == 0
    assert source.cleaned == 1
    assert len(gone) == (when != "ended")
    assert len(asyncio.all_tasks()) == 1


async def test_what_a_stream_cleans_up_is_not_cut_short(peer: Peer, source: Source) -> None:
    source.may_end.clear()
    sending = await answered(peer, source, stalled_s=0.01, heartbeat_s=0.01)
    peer.gone.set()
    await source.cleaning.wait()
    await asyncio.sleep(0.05)  # longer than whatever might strike
    assert not sending.done()
    source.may_end.set()
    assert await sending == 0
    assert source.cleaned == 1


async def test_a_server_that_ends_says_so(peer: Peer, source: Source) -> None:
    sending = await answered(peer, source)
    await eventually(lambda: peer.sent)
    sending.cancel()
    await sending
    assert b'"gateway_ending"' in peer.body
    assert peer.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}
    assert source.cleaned == 1


async def test_a_server_that_ends_is_not_mistaken_for_a_client(peer: Peer, source: Source) -> None:
    sending = await answered(peer, source)
    await eventually(lambda: peer.sent)
    peer.gone.set()
    await asyncio.sleep(0)  # he is noticed, and nothing is done about it yet
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
    assert source.cleaned == 1


async def test_silence_is_filled_and_who_takes_nothing_is_given_up(peer: Peer, source: Source) -> None:
    sending = await answered(peer, source, heartbeat_s=0.02, stalled_s=0.2)
    await eventually(lambda: peer.body.count(HEARTBEAT) > 2)
    source.chunks.put_nowait(b"data: 1\n\n")
    await eventually(lambda: peer.body.endswith(b"data: 1\n\n" + HEARTBEAT))
    peer.takes.clear()
    most = 0
    async with asyncio.timeout(60):
        while not sending.done():
            most = max(most, peer.sending)
            await asyncio.sleep(0.005)
    assert await sending == 0
    assert most == 1  # not one heartbeat on top of the other
    assert source.cleaned == 1


async def test_who_takes_no_chunk_is_given_up(peer: Peer, source: Source) -> None:
    sending = await answered(peer, source, stalled_s=0.05)
    await eventually(lambda: peer.sent)
    peer.takes.clear()
    for _ in range(3):
        source.chunks.put_nowait(b"data: 1\n\n")
    async with asyncio.timeout(60):
        assert await sending == 0
    assert source.chunks.qsize() == 2  # nor was more asked for than he took
    assert source.cleaned == 1


# --- one call, without a server


def call_of(peer: Peer) -> Call[None]:
    scope = {"type": "http", "headers": []}
    http = HttpRequest(scope)
    return Call(cast(Any, None), http, cast(Any, peer.receive), tenant=ANYBODY, dialect=OPENAI, body=None)


async def test_what_nobody_waits_for_is_cancelled(peer: Peer) -> None:
    ended: list[str] = []

    async def ask(swallow: bool) -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            if not swallow:
                raise
        return 7

    async def asked(swallow: bool) -> tuple[int | None, int]:
        value = None
        with contextlib.suppress(ClientGone):
            value = await call_of(peer).answer(ask(swallow))
        return value, cast("asyncio.Task[object]", asyncio.current_task()).cancelling()

    for swallow in (False, True):
        asking = asyncio.create_task(asked(swallow))
        await asyncio.sleep(0)
        peer.gone.set()
        assert await asking == (7 if swallow else None, 0)
    assert ended == ["cancelled"] * 2
    # Whatever is there at once is given, though the client is gone by then.
    asking = asyncio.create_task(asked(swallow=False))
    await asyncio.sleep(0)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking


# --- over a real connection


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Client]:
    async with Client(redis_url, queue="q") as client:
        yield client


def post(path: str, body: bytes, *, length: int | None = None) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body) if length is None else length}\r\n\r\n".encode() + body


PIECE = Delta(token_ids=(1,), texts=("x" * 12_000,))
"""About as much as a message of a channel may hold."""
STREAM = b'{"model":"q","prompt":"x","stream":true,"max_tokens":100}'


async def connected(gateway: Gateway, **options: Any) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = gateway.url.removeprefix("http://").split(":")
    return await asyncio.open_connection(host, int(port), **options)


async def emit(hand: HandWorker, work: Work, count: int) -> None:
    """Tell so many pieces at once."""
    body = codec.encode(PIECE)
    tenant, first = work.envelope.tenant, work.seq + 1
    work.seq += count
    await hand.broker.emit([Emission(work.delivery, tenant, first + place, body) for place in range(count)])


def reset(writer: asyncio.StreamWriter) -> None:
    """Break a connection off, as a machine that goes away does."""
    writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


async def is_cancelled(client: Client, work: Work) -> None:
    async def so() -> bool:
        return (await client.status(work.rid)).state == "cancelled"

    await eventually_so(so, "the cancellation")


async def test_a_gateway_that_ends_cancels_what_its_streams_wait_for(
    redis_url: str, hand: HandWorker, client: Client
) -> None:
    async with Hub(redis_url) as hub:
        clients = Clients(hub, durability="fast", tokenizers={})
        async with clients.of(ANYBODY, "q") as lent, lent.stream(GenerateRequest(prompt="x")) as tokens:
            [work] = await hand.take()
            await clients.close()
            with pytest.raises(Cancelled):
                await anext(tokens)
        await is_cancelled(client, work)


async def test_a_second_request_behind_a_stream_waits_and_does_not_hide_that_the_client_left(
    hand: HandWorker, gateway: Gateway, client: Client
) -> None:
    reader, writer = await connected(gateway)
    writer.write(post("/v1/completions", STREAM) + b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
    [work] = await hand.take()
    await hand.emit(work, delta("abc"))
    await reader.readuntil(b"abc")
    reset(writer)

    async def noticed() -> bool:
        # Nobody reads the connection; only that it cannot be written to tells.
        await hand.emit(work, delta("x" * 50))
        return (await client.status(work.rid)).state == "cancelled"

    await eventually_so(noticed, "the cancellation")
    await eventually(lambda: gateway.services.metrics.open_requests == 0)


async def test_a_connection_serves_further_requests_after_a_stream(
    hand: HandWorker, gateway: Gateway
) -> None:
    reader, writer = await connected(gateway)
    writer.write(post("/v1/completions", STREAM) * 2)
    for _ in range(2):
        [work] = await hand.take()
        await hand.emit(work, delta("abc"))
        await hand.finish(work, "abc")
        assert b"[DONE]" in await reader.readuntil(b"0\r\n\r\n")
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: x\r\n\r\n")
    assert (await reader.readuntil(b"ok\n")).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_half_a_body_is_no_request(hand: HandWorker, gateway: Gateway, client: Client) -> None:
    for close in (reset, asyncio.StreamWriter.close):
        _, writer = await connected(gateway)
        writer.write(post("/v1/completions", STREAM[:20], length=len(STREAM)))
        await eventually(lambda: gateway.services.metrics.open_requests == 1)
        # The scrape that tells of it is none itself.
        async with httpx.AsyncClient(base_url=gateway.url) as http:
            told = (await http.get("/metrics")).text
        assert "\nstreamfleet_gateway_open_requests 1.0\n" in told
        close(writer)
        await eventually(lambda: gateway.services.metrics.open_requests == 0)
    assert (await client.depth()).open == 0


async def test_a_client_that_takes_nothing_is_given_up_and_its_connection_closed(
    hand: HandWorker, gateway: Gateway, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BoundedProtocol, "stall_s", 0.3)
    protocol = cast(Any, gateway._server.config.http_protocol_class)
    monkeypatch.setattr(protocol, "look_s", 0.05)
    reader, writer = await connected(gateway, limit=1024)
    writer.write(post("/v1/completions", STREAM))
    [work] = await hand.take()
    await reader.readuntil(b"\r\n\r\n")
    connections = gateway._server.server_state.connections
    assert len(connections) == 1

    async def given_up() -> bool:
        # More than all buffers on the way hold.
        await emit(hand, work, 100)
        return (await client.status(work.rid)).state == "cancelled"

    await eventually_so(given_up, "the cancellation")
    await eventually(lambda: not connections, "the end of the connection")
    writer.close()


async def test_a_slow_client_catches_up_from_the_log(
    hand: HandWorker, gateway: Gateway, client: Client
) -> None:
    reader, writer = await connected(gateway, limit=1024)
    writer.write(post("/v1/completions", STREAM))
    [work] = await hand.take()
    count = MAX_FRAMES // 100 * 100 + 200  # more than are kept for a reader, and more than the line holds
    for _ in range(0, count, 100):
        await emit(hand, work, 100)
    choice = Choice(text="", token_ids=PIECE.token_ids * count, finish_reason="length")
    await hand.answer(work, choices=(choice,))
    said = bytearray()
    while b"[DONE]" not in said[-200:]:
        said += await reader.read(65536)
        assert not reader.at_eof()
    assert said.count(PIECE.text.encode()) == count
    writer.close()
