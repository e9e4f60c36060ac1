"""Callers of the gateway for `gateway.py --records`, which tell the times of each request; wrk does not.

    BENCH_LOAD=… BENCH_URL=… BENCH_BODY=… BENCH_WANTED=… python tests/bench/gateway_caller.py

As little HTTP as there may be, over connections that stay open: what it costs counts as latency.
"""

from __future__ import annotations

import asyncio
import json
import os
from urllib.parse import urlsplit

from load import TEXT, Load, measure

_LIMIT_BYTES = 1024 * 1024


class Caller:
    """One connection, one request at a time."""

    def __init__(self, url: str, body: bytes) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "127.0.0.1", parts.port or 80
        head = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        )
        self._request = head.encode() + body
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def call(self) -> bytes:
        """The body of an answer.

        Raises:
            AssertionError: its status is not 200.
        """
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=_LIMIT_BYTES)
        reader, writer = self._streams
        writer.write(self._request)
        head = await reader.readuntil(b"\r\n\r\n")
        status, *lines = head.decode("latin-1").split("\r\n")
        assert status.split()[1] == "200", status
        fields = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        if "content-length" in fields:
            return await reader.readexactly(int(fields["content-length"]))
        parts = []
        while size := int(await reader.readline(), 16):
            parts.append(await reader.readexactly(size))
            await reader.readexactly(2)
        await reader.readexactly(2)
        return b"".join(parts)


async def main() -> None:
    """One round."""
    load = Load.read()
    body, wanted = os.environ["BENCH_BODY"].encode(), os.environ["BENCH_WANTED"].encode()
    idle: asyncio.LifoQueue[Caller] = asyncio.LifoQueue()
    # Twice as many warm it up at once.
    for _ in range(2 * load.in_flight):
        idle.put_nowait(Caller(os.environ["BENCH_URL"], body))

    async def call() -> str:
        caller = await idle.get()
        answer = await caller.call()
        idle.put_nowait(caller)
        if wanted not in answer:
            raise AssertionError("another answer than was asked for")
        return TEXT

    print(json.dumps(await measure(load, call)))


if __name__ == "__main__":
    asyncio.run(main())
