"""Lines that break, servers that go away: nothing is lost or done twice, and everybody comes back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import redis

from chaos.proxy import ChaosProxy
from chaos.server import ChaosServer
from eventually import eventually
from gated_engine import GatedEngine
from hired import Hired, ends, eventually_so, record, submit
from hired_view import echo
from streamfleet_common import calls
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.errors import Cancelled
from streamfleet_common.keys import LETTERS, Keys
from streamfleet_common.schemas import GenerateRequest
from streamfleet_common.scripts import Script
from streamfleet_producer import Client
from streamfleet_worker import vitals

Hire = Callable[..., Awaitable[Hired]]
LEASE_S = 2.0


@pytest.fixture
async def server_of_ours() -> AsyncIterator[ChaosServer]:
    """A server to be broken."""
    async with ChaosServer() as server:
        yield server


@pytest.fixture
async def onlooker(server_of_ours: ChaosServer) -> AsyncIterator[Broker]:
    """The queue `q` on it."""
    connections = Connections.open(server_of_ours.url)
    yield Broker(connections, "q")
    await connections.close()


async def no_crashes(broker: Broker, rids: list[str]) -> None:
    for rid in rids:
        assert (await record(broker, rid)).crashes == 0, "nobody was lost"


def still_runs(hired: Hired) -> bool:
    return hired.running is not None and not hired.running.done() and hired.worker.vitals.fault is None


async def test_a_submission_whose_reply_is_lost_is_there_once(
    broker: Broker, hire: Hire, redis_url: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "BACKOFF_S", 0.001)
    hired = await hire()
    before = entries_ever(raw)
    async with ChaosProxy(int(redis_url.rpartition(":")[2].partition("/")[0])) as proxy:
        async with Client(proxy.url, queue="q") as client:
            await client.run(GenerateRequest(prompt="known"))  # from now on the script goes by its name
            for number in range(50):
                proxy.drop_next_reply(Script.load("submit").sha.encode())
                answer = await client.run(GenerateRequest(prompt=f"prompt {number}"))
                assert answer.text == f"prompt {number}"
        assert proxy.lost == 50
    assert entries_ever(raw) - before == 51
    assert len(hired.engine.added) == len(set(hired.engine.added)) == 51
    await eventually(lambda: hired.metric("request_success_total", finished_reason="eos") == 51, "all counts")


def entries_ever(raw: redis.Redis) -> int:
    """How many entries the work streams have ever had."""
    streams = [raw.xinfo_stream(Keys("q").stream(stream)) for stream in LETTERS]
    return sum(int(stream["entries-added"]) for stream in streams)


@pytest.mark.parametrize("rounds", [8, pytest.param(34, marks=pytest.mark.slow)])
async def test_a_crowd_of_streams_leaves_no_connection_behind(
    broker: Broker,
    hire: Hire,
    redis_url: str,
    raw: redis.Redis,
    capsys: pytest.CaptureFixture[str],
    *,
    rounds: int,
) -> None:
    await hire(GatedEngine(max_batch_size=64), lease_s=15.0)
    before = 0
    rids: list[str] = []

    async def read(client: Client, number: int) -> None:
        request = GenerateRequest(prompt="ECHO 4" if number % 3 else "ECHO 100 TICK 1000")
        async with client.stream(request) as tokens:
            rids.append(tokens.id)
            async for _ in tokens:
                if number % 3 == 0:
                    return  # in the middle of it
            assert tokens.result.text == echo(4)

    for round_ in range(rounds):
        if round_ == 1:  # the worker has opened what it needs
            before = raw.info("clients")["connected_clients"]
        clients = [Client(redis_url, queue="q", max_connections=50) for _ in range(4)]
        async with contextlib.AsyncExitStack() as stack:
            for client in clients:
                await stack.enter_async_context(client)
            await asyncio.gather(*(read(client, number) for client in clients for number in range(15)))

    async def is_back() -> bool:
        return abs(int(raw.info("clients")["connected_clients"]) - int(before)) <= 10

    await eventually_so(is_back, "the connections of before")
    found = [one for one in await broker.status(rids, "default") if one is not None]
    states = [one.state for one in found]
    assert len(states) == 60 * rounds
    assert states.count("cancelled") == 20 * rounds
    assert states.count("done") == 40 * rounds
    # Heartbeats went on, and nobody was taken for dead.
    said = capsys.readouterr().out
    assert "leases cannot be renewed" not in said
    assert {one.attempts for one in found} == {1}


@pytest.mark.parametrize("kills", [10, pytest.param(50, marks=pytest.mark.slow)])
async def test_connections_killed_again_and_again_and_then_the_server(
    server_of_ours: ChaosServer, onlooker: Broker, hire: Hire, kills: int
) -> None:
    server = server_of_ours
    crew = [await hire(url=server.url, lease_s=LEASE_S) for _ in range(2)]
    rids = await submit(onlooker, ["ECHO 20 TICK 20"] * 8 * kills, stream=True)
    for round_ in range(1, kills + 1):
        await server.kill_clients("normal")
        await eventually(lambda: sum(h.engine.taken for h in crew) >= 8 * round_, "steps")  # noqa: B023
    await server.kill()
    # What runs comes to its end, and can be told to nobody; nothing else can be read.
    await eventually(lambda: sum(h.worker._publisher.held for h in crew) > 0, "untold work")
    await eventually(lambda: not any(h.worker._publisher.unfinished() for h in crew), "their ends")
    await server.start()
    assert {(answer.state, answer.text) for answer in await ends(onlooker, rids)} == {("done", echo(20))}
    assert all(still_runs(hired) for hired in crew), "nobody needed a new start"
    await no_crashes(onlooker, rids)


@pytest.mark.parametrize("flaps", [6, pytest.param(20, marks=pytest.mark.slow)])
async def test_a_flapping_line_makes_the_worker_unready_and_loses_nothing(
    server_of_ours: ChaosServer, onlooker: Broker, hire: Hire, flaps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vitals, "STALE_S", 0.3)
    monkeypatch.setattr(vitals, "BEAT_S", 0.02)
    async with ChaosProxy(server_of_ours.port) as proxy:
        hired = await hire(url=proxy.url, lease_s=LEASE_S, block_ms=50)
        said: set[str] = set()

        async def listen() -> None:
            while True:
                said.add(str(hired.worker.vitals.unready()).partition(" for")[0])
                await asyncio.sleep(0.01)

        listening = asyncio.create_task(listen())
        flapping = asyncio.create_task(proxy.flap(flaps, down_s=0.3, up_s=0.1))
        rids = await submit(onlooker, ["ECHO 10 TICK 10"] * 100)
        await flapping
        assert {answer.text for answer in await ends(onlooker, rids)} == {echo(10)}
        await eventually(lambda: hired.worker.vitals.unready() is None, "readiness")
        listening.cancel()
        assert "no work could be read" in said
        assert still_runs(hired)
        await no_crashes(onlooker, rids)
        await hired.dismiss()


async def test_a_cancellation_needs_no_channel(
    broker: Broker, hire: Hire, redis_url: str, raw: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewals = 0
    plain = Broker.renew

    async def renew(self: Broker, *args: Any) -> Any:
        nonlocal renewals
        renewals += 1
        return await plain(self, *args)

    monkeypatch.setattr(Broker, "renew", renew)
    hired = await hire(GatedEngine(is_open=False, max_batch_size=1), lease_s=LEASE_S)
    async with Client(redis_url, queue="q") as client:
        running = asyncio.create_task(client.run(GenerateRequest(prompt="ECHO 1000")))
        await eventually(lambda: len(hired.engine.added) == 1, "its turn")
        (rid,) = hired.engine.added
        raw.client_kill_filter(_type="pubsub")
        assert await client.cancel(rid) == "cancelled"
        renewals = 0
        await eventually(lambda: hired.engine.cancelled == [rid], "the engine forgets it")
        assert renewals <= 2, "it learns it from its heartbeat"
        with pytest.raises(Cancelled):
            await running


async def test_whatever_happens_to_a_waiting_read_it_waits_again(hire: Hire) -> None:
    # So slow a start that commands come while it loads.
    slow = ("--key-load-delay", "4000", "--loading-process-events-interval-bytes", "1024")
    async with ChaosServer(flags=slow) as server:
        hired = await hire(url=server.url, lease_s=LEASE_S)
        connections = Connections.open(server.url)
        onlooker = Broker(connections, "q")
        keys, control = onlooker.keys, server.control

        async def serves() -> None:
            (answer,) = await ends(onlooker, await submit(onlooker, ["still here"]))
            assert answer.text == "still here"

        async def waits() -> None:
            async def is_waiting() -> bool:
                return int((await control.info("clients"))["blocked_clients"]) == 1

            await eventually_so(is_waiting, "a waiting read")

        await serves()
        for stream in LETTERS:
            await waits()
            await control.delete(keys.stream(stream))
            await serves()
        await waits()
        await control.flushall()
        await serves()
        for stream in LETTERS:
            groups: Any = await control.xinfo_groups(keys.stream(stream))
            assert [group["name"] for group in groups] == [b"w"]
        await waits()
        await control.replicaof("127.0.0.1", "1")
        waiting = asyncio.create_task(onlooker.ping())
        await eventually(lambda: hired.worker._consumer._unsure, "a look that fails")
        await control.replicaof("NO", "ONE")
        await waiting
        await serves()
        for number in range(500):
            await control.set(f"ballast:{number}", "x" * 100)
        await waits()
        await server.kill()
        await server.start()
        await serves()
        assert still_runs(hired)
        await hired.dismiss()
        await connections.close()
