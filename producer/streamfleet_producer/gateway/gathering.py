"""A transport that sends together what is written at the same moment."""

from __future__ import annotations

import asyncio
from typing import Any


class Gathering(asyncio.Transport):
    """Passes on what was written once the loop is back: head, first event and end of an answer in one piece.

    A system call for each costs more than all else that is done for a small event. Nothing waits for it: what
    is written in one turn of the loop goes out at its end.
    """

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes | bytearray | memoryview] = []

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._parts:
            self._loop.call_soon(self._flush)
        self._parts.append(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def write_eof(self) -> None:
        self._flush()
        self._transport.write_eof()

    def can_write_eof(self) -> bool:
        return self._transport.can_write_eof()

    def abort(self) -> None:
        self._parts.clear()
        self._transport.abort()

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._transport.set_protocol(protocol)

    def _flush(self) -> None:
        parts = self._parts
        if parts:
            self._parts = []
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))
