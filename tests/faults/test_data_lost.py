"""F9: somebody empties the server, deletes the streams, or trims them."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from faults.figures import keep
from faults.load import Load, at_rest, ended
from faults.scene import QUEUE, Scene, until
from hired import submit
from streamfleet_common.errors import IncompleteGeneration
from streamfleet_common.keys import LETTERS
from streamfleet_common.schemas import GenerateRequest
from streamfleet_producer import Client

ROWS = 4
REST_S = 30.0


async def groups_back(scene: Scene) -> float:
    """Wait for the groups of all streams; gives how long it took, in seconds."""

    async def back() -> bool:
        return await scene.groups() == len(LETTERS)

    return await until(back)


async def test_after_flushall_whoever_waits_is_told_and_later_requests_are_served() -> None:
    now = asyncio.get_running_loop().time
    async with (
        Scene(rows=ROWS, workers=1) as scene,
        Client(scene.client_line.url, QUEUE, silence_s=1.0) as client,
    ):
        # Some run, and some wait for a place.
        asked = [
            asyncio.create_task(client.run(GenerateRequest(prompt="ECHO 1000 TICK 50", max_tokens=2000)))
            for _ in range(2 * ROWS)
        ]
        streams = [
            client.stream(GenerateRequest(prompt="ECHO 1000 TICK 50", max_tokens=2000)) for _ in range(2)
        ]
        for stream in streams:
            await stream.__aenter__()

        async def taken() -> bool:
            return (await scene.broker.depth()).open == 2 * ROWS + 2

        await until(taken)

        await scene.server.control.flushall()
        flushed_at = now()
        back_s = await groups_back(scene)
        told = await asyncio.gather(*asked, return_exceptions=True)
        for stream in streams:
            try:
                await stream.wait()
            except IncompleteGeneration as error:
                told.append(error)
        told_s = now() - flushed_at
        async with Load(scene.client_line.url) as load:
            served_s = now() - flushed_at
        account = await load.account(scene.broker)
    kinds = {type(error).__name__ for error in told}
    keep(
        "F9 FLUSHALL",
        f"{len(told)} requests running and waiting, silence_s 1",
        f"groups back after {back_s:.2f} s, all {len(told)} callers told ({', '.join(kinds)}) after "
        f"{told_s:.1f} s, later requests: {account}, served after {served_s:.1f} s",
        "groups within 2 s, failures visible, later requests served",
    )
    assert kinds == {"IncompleteGeneration"}
    assert account.is_whole(), account


@pytest.mark.parametrize("how", ["DEL", "XTRIM"])
async def test_requests_whose_entries_are_gone_fail_visibly_or_finish(how: str) -> None:
    async with Scene(rows=ROWS, workers=1) as scene:
        control: Any = scene.server.control
        scene.hold()
        run = await submit(scene.broker, ["ECHO 4"] * ROWS, deadline_ms=20_000)
        await scene.running(run)
        wait = await submit(scene.broker, ["ECHO 2"] * ROWS, deadline_ms=20_000)

        stream = scene.broker.keys.stream("normal")
        if how == "DEL":
            await control.delete(stream)
        else:
            await control.xtrim(stream, maxlen=0, approximate=False)
        # Nobody has room: it is the audit that finds them.
        records = await ended(scene.broker, wait, REST_S)
        scene.let_go()
        records = [*await ended(scene.broker, run), *records]
        async with Load(scene.client_line.url) as load:
            pass
        await at_rest(scene.broker)
        account = await load.account(scene.broker)
    running = {record.state for record in records[:ROWS]}
    waiting = {record.state for record in records[ROWS:]}
    late_ms = [_ended_at(record) - record.accepted_at_ms for record in records[ROWS:]]
    keep(
        f"F9 {how}",
        f"{how} of a lane's stream: {ROWS} requests run, {ROWS} wait",
        f"those that ran: {', '.join(running)}; those that waited: {', '.join(waiting)}, told "
        f"{max(late_ms) / 1000:.1f} s after their acceptance; later requests: {account}",
        "failures visible by the deadline, later requests served",
    )
    assert running == {"done"}
    assert waiting == {"failed"}
    assert not account.lost
    assert set(account.states) == {"done"}


def _ended_at(record: Any) -> int:
    at: int = record.end.times[2]
    return at


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(1, id="quick"),
        pytest.param(20, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(180)]),
    ],
)
async def test_under_load_the_loops_survive_streams_that_vanish(times: int) -> None:
    slowest_s = 0.0
    async with Scene() as scene:
        async with Load(scene.client_line.url) as load:
            for _ in range(times):
                for stream in LETTERS:
                    await scene.server.control.delete(scene.broker.keys.stream(stream))
                slowest_s = max(slowest_s, await groups_back(scene))
                await load.served()
        account = await load.account(scene.broker)
    keep(
        f"F9 DEL under load, {times} times",
        "all streams deleted",
        f"groups back within {slowest_s:.2f} s; {account}",
        "groups within 2 s, 0 lost: each has an end",
    )
    assert not account.lost
    assert not account.doubled
    assert set(account.states) <= {"done", "failed"}
