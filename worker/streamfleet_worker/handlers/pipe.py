"""Messages between a worker and the processes of its pool: msgpack, each with its length in front."""

from __future__ import annotations

import socket
import struct
import time
from typing import Any

import msgpack

MAX_FRAME_BYTES = 1 << 30
"""Of one message: a batch's inputs, or what its items have come to. A batch over it fails, and is halved."""
_LENGTH = struct.Struct(">I")


class Pipe:
    """One end; one thread writes to it, one reads.

    Args:
        wire: a stream socket, which it closes.
    """

    def __init__(self, wire: socket.socket) -> None:
        self._wire = wire

    def fileno(self) -> int:
        return self._wire.fileno()

    def send(self, message: Any, until: float | None = None) -> None:
        """Send a message, at most until then on `time.monotonic`.

        Raises:
            ValueError: it is too large.
            OSError: the other end is gone, or does not take it; `TimeoutError` among them.
        """
        body = msgpack.packb(message)
        if len(body) > MAX_FRAME_BYTES:
            raise ValueError(f"{len(body)} bytes for one batch are over the limit of {MAX_FRAME_BYTES}")
        self._limit(until)
        self._wire.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self, until: float | None = None) -> Any:
        """The next message, waited for at most until then on `time.monotonic`.

        Raises:
            EOFError: the other end is gone, or sends what is no message.
            OSError: it cannot be read; `TimeoutError` among them.
        """
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size, until))
        if length > MAX_FRAME_BYTES:
            raise EOFError(f"a message of {length} bytes is none of ours")
        try:
            return msgpack.unpackb(self._read(length, until), max_str_len=length, max_bin_len=length)
        except (ValueError, msgpack.UnpackException) as error:
            raise EOFError(f"what came is no message: {error}") from None

    def close(self) -> None:
        self._wire.close()

    def _read(self, length: int, until: float | None) -> bytes:
        data = bytearray(length)
        rest = memoryview(data)
        while rest:
            self._limit(until)
            read = self._wire.recv_into(rest)
            if not read:
                raise EOFError("the other end is gone")
            rest = rest[read:]
        return bytes(data)

    def _limit(self, until: float | None) -> None:
        # 0 would mean "do not wait at all", which is another thing than "too late".
        self._wire.settimeout(None if until is None else max(1e-6, until - time.monotonic()))
