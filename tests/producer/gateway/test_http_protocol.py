"""Clients that mean harm, over bare sockets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from gateway_process import Gateway
from streamfleet_producer.gateway.listening import listen

NOWHERE = "redis://127.0.0.1:9/0"
PATIENCE_S = 45.0


@pytest.fixture
async def gateway() -> AsyncIterator[Gateway]:
    async with Gateway(NOWHERE, silence_s=0.2) as running:
        yield running


async def said_to(gateway: Gateway, *pieces: bytes, then_silent: bool = False) -> bytes:
    """All that the gateway answers to these pieces, until it closes."""
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
        async with asyncio.timeout(PATIENCE_S):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def test_a_head_without_an_end_is_refused(gateway: Gateway) -> None:
    pieces = [b"GET /healthz HTTP/1.1\r\nhost: x\r\nlong: "] + [b"a" * 4096] * 5
    assert (await said_to(gateway, *pieces)).startswith(b"HTTP/1.1 431 ")
    many = [b"GET /healthz HTTP/1.1\r\n", *[b"name-%d: value\r\n" % n for n in range(2000)]]
    assert (await said_to(gateway, *many)).startswith(b"HTTP/1.1 431 ")


async def test_who_still_sends_when_it_is_refused_is_heard_out_for_a_while(gateway: Gateway) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    async with asyncio.timeout(PATIENCE_S):
        writer.write(b"GET /healthz HTTP/1.1\r\nlong: " + b"a" * 20_000)
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 431 ")
        assert await reader.read() == b""
        # It has said all, and resets nothing all the same; but it does not listen for ever.
        for _ in range(4):
            writer.write(b"a" * 4096)
            await writer.drain()
        with pytest.raises(ConnectionError):
            await _send_for_ever(writer)
    writer.close()


async def _send_for_ever(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"a" * 65_536)
        await writer.drain()


async def test_too_many_fields_in_one_piece_are_refused(gateway: Gateway) -> None:
    fields = b"".join(b"n%d: v\r\n" % n for n in range(100))
    said = await said_to(gateway, b"GET /healthz HTTP/1.1\r\nconnection: close\r\n" + fields + b"\r\n")
    assert said.startswith(b"HTTP/1.1 431 ")
    assert b"header_too_large" in said


@pytest.mark.parametrize(
    "piece",
    [
        b"",
        b"GET /healthz HT",
        b"POST /v1/rerank HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n{",
    ],
    ids=["nothing", "half a head", "half a body"],
)
async def test_who_keeps_it_waiting_is_left(gateway: Gateway, piece: bytes) -> None:
    assert not (await said_to(gateway, piece)).startswith(b"HTTP/1.1 200")
    # Nobody is left waiting in it either.
    assert gateway.services.metrics.open_requests == 0


async def test_small_pieces_are_sent_at_once() -> None:
    # Otherwise each event of a stream waits for the acknowledgement of the one before, up to 40 ms.
    # Its writer, since a connection whose writer nobody holds is closed from Python 3.13 on.
    made: asyncio.Future[asyncio.StreamWriter] = asyncio.get_running_loop().create_future()

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        made.set_result(writer)

    listening = listen("127.0.0.1", 0)
    async with await asyncio.start_server(connected, sock=listening):
        _, writer = await asyncio.open_connection(*listening.getsockname())
        theirs = await made
        made_of = theirs.get_extra_info("socket")
        assert made_of.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1
        writer.close()
        theirs.close()


async def test_who_asks_and_waits_is_answered(gateway: Gateway) -> None:
    said = await said_to(gateway, b"GET /healthz HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 200 ")
    assert said.endswith(b"ok\n")


_CHUNKED = b"POST /v1/requests HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    "piece",
    [b"0\r\n" + b"name: value\r\n" * 1261, b"0\r\nname: " + b"a" * 16_384, b"1;name=" + b"a" * 16_384],
    ids=["many trailers", "one without an end", "an extension of a chunk"],
)
async def test_what_comes_beside_a_body_is_bounded_too(gateway: Gateway, piece: bytes) -> None:
    host, port = gateway.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(_CHUNKED + b"expect: 100-continue\r\n\r\n")
    async with asyncio.timeout(PATIENCE_S):
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(piece)
        assert (await reader.read()).startswith(b"HTTP/1.1 431 ")
    writer.close()


async def test_a_body_in_many_small_chunks_is_read(gateway: Gateway) -> None:
    chunks = [b"1\r\n \r\n" * 1000] * 8
    said = await said_to(gateway, _CHUNKED + b"\r\n", *chunks, b"2\r\n{}\r\n0\r\n\r\n")
    assert said.startswith(b"HTTP/1.1 400 ")


async def test_trailers_are_no_part_of_the_head(gateway: Gateway) -> None:
    # It was judged before they come; an endpoint that looks at it later must find the same.
    body = b'{"queue": "q", "request": {"prompt": "a"}}'
    last = b"%x\r\n%s\r\n0\r\nx-lane: nowhere\r\n\r\n" % (len(body), body)
    assert b"X-Lane" in await said_to(gateway, _CHUNKED + b"x-lane: nowhere\r\n\r\n", last)
    assert b"X-Lane" not in await said_to(gateway, _CHUNKED + b"\r\n", last)
