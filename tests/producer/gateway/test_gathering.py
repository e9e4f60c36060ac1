"""What is written in one turn of the loop goes out as one piece, in order, and before a close."""

from __future__ import annotations

import asyncio
from typing import Any

from streamfleet_producer.gateway.gathering import Gathering


class Wire(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bytes | str] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.seen.append(bytes(data))

    def close(self) -> None:
        self.seen.append("closed")

    def abort(self) -> None:
        self.seen.append("aborted")

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 1)}.get(name, default)


def gathering() -> tuple[Wire, Gathering]:
    wire = Wire()
    return wire, Gathering(wire, asyncio.get_running_loop())


async def test_pieces_of_one_turn_are_one() -> None:
    wire, transport = gathering()
    transport.write(b"head ")
    transport.write(b"event ")
    assert wire.seen == []
    await asyncio.sleep(0)
    transport.write(bytearray(b"end"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert wire.seen == [b"head event ", b"end"]


async def test_a_close_sends_what_was_written_and_an_abort_does_not() -> None:
    wire, transport = gathering()
    transport.write(b"last words")
    transport.close()
    await asyncio.sleep(0)
    assert wire.seen == [b"last words", "closed"]
    wire, transport = gathering()
    transport.write(b"never mind")
    transport.abort()
    await asyncio.sleep(0)
    assert wire.seen == ["aborted"]


async def test_the_rest_is_the_transports_own() -> None:
    _, transport = gathering()
    assert transport.get_extra_info("peername") == ("127.0.0.1", 1)
    assert transport.get_extra_info("sslcontext") is None
