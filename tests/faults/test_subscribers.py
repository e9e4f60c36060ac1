"""F14: subscribers that never read, and clients that leave."""

from __future__ import annotations

import asyncio
import contextlib
import resource
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from faults.figures import keep
from faults.load import Load, ended, ended_at_ms, rid_of
from faults.scene import QUEUE, Scene, until
from hired import submit
from streamfleet_common.schemas import GenerateRequest
from streamfleet_producer import Client

LIMIT_BYTES = 256 * 1024
WORD = "w" * 5000
LEASE_S = 15.0
"""Long: where the machine is slow, workers lose shorter ones, and that is not what is asked here."""
READERS = 3
"""Subscriptions of clients that read: one each."""
REST_BYTES = 32 * 1024 * 1024
"""What all others may take of the server's memory meanwhile: their connections, the log, the answer."""


@contextlib.contextmanager
def deaf(port: int, channel: str, count: int) -> Iterator[list[socket.socket]]:
    """So many connections that subscribe, and never read."""
    sockets = []
    command = f"*2\r\n$9\r\nSUBSCRIBE\r\n${len(channel)}\r\n{channel}\r\n".encode()
    try:
        for _ in range(count):
            one = socket.socket()
            sockets.append(one)
            # Small pieces, or the system would hold megabytes for each, and the server would never notice.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
            one.connect(("127.0.0.1", port))
            one.sendall(command)
        yield sockets
    finally:
        for one in sockets:
            one.close()


@pytest.mark.parametrize(
    ("count", "words", "producers"),
    [
        pytest.param(40, 100, 4, id="quick"),
        pytest.param(1000, 300, 8, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(240)]),
    ],
)
async def test_subscribers_that_never_read_cost_their_limit_and_no_more(
    count: int, words: int, producers: int
) -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 2 * count + 200:
        pytest.skip(f"this process may not open {count} connections")
    flags = ("--client-output-buffer-limit", f"pubsub {LIMIT_BYTES} {LIMIT_BYTES} 1", "--maxclients", "4000")
    request = GenerateRequest(prompt=f"ECHO {words} AS {WORD} TICK 4", max_tokens=words)
    async with Scene(flags=flags, lease_s=LEASE_S) as scene:
        control: Any = scene.server.control
        channel = scene.broker.keys.channel("default", rid_of("watched"))

        async def listeners() -> int:
            # Not by NUMSUB, of which Valkey 9.1 makes a number of its own where a channel has many.
            return len(await control.client_list(_type="pubsub"))

        with deaf(scene.server.port, channel, count):
            await until(lambda: _is(listeners, count))
            before = int((await control.info("memory"))["used_memory"])
            async with (
                Load(scene.client_line.url, producers=producers) as load,
                Client(scene.server.url, QUEUE) as client,
            ):
                over = asyncio.Event()
                watching = asyncio.create_task(_most_used(control, over))
                async with client.stream(request, idempotency_key="watched") as tokens:
                    text = "".join([delta.text async for delta in tokens])

                async def is_noticed() -> bool:
                    # Where the machine is slow, much of the text comes at once, and goes by the log alone.
                    await control.publish(channel, WORD)
                    return await listeners() < count + READERS

                with contextlib.suppress(TimeoutError):
                    await until(is_noticed)
                left = await listeners() - READERS
                over.set()
                most = await watching
            account = await load.account(scene.broker)
    most -= before
    keep(
        f"F14 {count} deaf subscribers",
        f"they never read {words * len(WORD) / 1e6:.1f} MB of a stream, limit {LIMIT_BYTES >> 10} KiB each",
        f"{count - left} of them cut, at most {most / 1e6:.1f} MB more memory; a reader beside them got the "
        f"whole text; others: {account}, {load.latency()}",
        f"at most {count * LIMIT_BYTES / 1e6:.1f} MB for them, and the stream's own log; others unharmed",
    )
    assert text == " ".join(f"{WORD}{at}" for at in range(words))
    assert left < count, "nobody reached the limit"
    assert most < count * LIMIT_BYTES + REST_BYTES
    assert not account.lost
    assert set(account.states) == {"done"}


async def _is(found: Any, wanted: int) -> bool:
    return bool(await found() == wanted)


async def _most_used(control: Any, over: asyncio.Event) -> int:
    """The most memory that the server has used until it is over.

    Not until this is cancelled: a command whose reply comes at that moment swallows it, and this would go on.
    """
    most = 0
    while not over.is_set():
        most = max(most, int((await control.info("memory"))["used_memory"]))
        await asyncio.sleep(0.02)
    return most


@pytest.mark.parametrize("how", ["leaves", "is closed"])
async def test_the_place_of_a_request_whose_client_left_is_free_soon(how: str) -> None:
    lease_s, rows = 15.0, 8
    endless = GenerateRequest(prompt="ECHO 3000 TICK 50", max_tokens=3000)
    async with Scene(workers=1, rows=rows, lease_s=lease_s) as scene:
        client = await Client(scene.client_line.url, QUEUE).open()
        asked = [
            asyncio.create_task(client.run(endless, idempotency_key=f"a{at}")) for at in range(rows // 2)
        ]
        streams = [client.stream(endless, idempotency_key=f"s{at}") for at in range(rows // 2)]
        for stream in streams:
            await stream.__aenter__()
        rids = [rid_of(f"{kind}{at}") for kind in "as" for at in range(rows // 2)]
        await until(lambda: _is(lambda: _known(scene, rids), rows))
        await scene.running(rids)
        (next_rid,) = await submit(scene.broker, ["ECHO 1"])

        if how == "leaves":
            for task in asked:
                task.cancel()
            for stream in streams:
                await stream.__aexit__(None, None, None)
        else:
            await client.close()
        await asyncio.gather(*asked, return_exceptions=True)
        left = await ended(scene.broker, rids)
        (served,) = await ended(scene.broker, [next_rid])
        await client.close()
    freed_ms = served.started_at_ms - min(ended_at_ms(record) for record in left)
    keep(
        f"F14 a client {how}",
        f"{rows} requests run, another waits for a place, L = {lease_s:g} s",
        f"all {rows} cancelled, the place free {freed_ms} ms after that",
        f"within L/3 = {lease_s / 3:g} s",
    )
    assert {record.state for record in left} == {"cancelled"}
    assert served.state == "done"


async def _known(scene: Scene, rids: list[str]) -> int:
    return sum(record is not None for record in await scene.broker.status(rids, "default"))
