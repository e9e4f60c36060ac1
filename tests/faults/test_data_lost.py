"""F9: somebody empties the server, deletes the streams, or trims them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from faults.figures import keep
from faults.load import Load, ended, ended_at_ms
from faults.scene import QUEUE, Scene, until
from hired import submit
from streamfleet_common.errors import IncompleteGeneration
from streamfleet_common.keys import LETTERS
from streamfleet_common.records import Record
from streamfleet_common.schemas import GenerateRequest, Lane, State
from streamfleet_producer import Client
from streamfleet_worker import presence

ROWS = 4


async def groups_back(scene: Scene) -> float:
    """Wait for the groups of all streams; gives how long it took, in seconds."""

    async def back() -> bool:
        return await scene.groups() == len(LETTERS)

    return await until(back)


@pytest.mark.parametrize(
    "announce_s",
    [pytest.param(0.5, id="quick"), pytest.param(5.0, id="as it comes", marks=pytest.mark.slow)],
)
async def test_after_flushall_whoever_waits_is_told_and_later_requests_are_served(
    announce_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "ANNOUNCE_S", announce_s)
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
        f"F9 FLUSHALL, cards every {announce_s:g} s",
        f"{len(told)} requests running and waiting, silence_s 1",
        f"groups back after {back_s:.2f} s, all {len(told)} callers told ({', '.join(kinds)}) after "
        f"{told_s:.1f} s, later requests: {account}, served after {served_s:.1f} s",
        "groups within 2 s, failures visible, later requests served",
    )
    assert kinds == {"IncompleteGeneration"}
    assert account.is_whole(), account


@pytest.mark.parametrize("streams", [False, True], ids=["answer", "stream"])
async def test_a_request_that_redis_forgot_is_not_cancelled_when_its_caller_is_told(streams: bool) -> None:
    endless = GenerateRequest(prompt="ECHO 1000 TICK 50", max_tokens=2000)
    cancelled: list[str] = []
    async with Scene(workers=1) as scene, Client(scene.client_line.url, QUEUE, silence_s=0.3) as client:
        link = client._open_link()
        cancel = link.broker.cancel

        async def noting(rids: Sequence[str], tenant: str) -> list[State | None]:
            cancelled.extend(rids)
            return await cancel(rids, tenant)

        link.broker.cancel = noting  # type: ignore[method-assign]

        async def ask() -> None:
            if streams:
                async with client.stream(endless, idempotency_key="k") as tokens:
                    await tokens.wait()
            else:
                await client.run(endless, idempotency_key="k")

        asked = asyncio.create_task(ask())
        await until(lambda: _is_open(scene))
        await scene.server.control.flushall()
        with pytest.raises(IncompleteGeneration):
            await asked
        await link.cancels.flush()
    # Its key may be in use again by now, and the cancellation would hit the new request.
    assert cancelled == []


async def _is_open(scene: Scene) -> bool:
    return (await scene.broker.depth()).open > 0


async def test_requests_whose_entries_are_gone_fail_visibly_or_finish() -> None:
    lanes: dict[str, Lane] = {"DEL": "normal", "XTRIM": "bulk"}
    async with Scene(rows=2 * ROWS, workers=1) as scene:
        control: Any = scene.server.control
        scene.hold()
        run, wait = {}, {}
        for how, lane in lanes.items():
            run[how] = await submit(scene.broker, ["ECHO 4"] * ROWS, deadline_ms=20_000, lane=lane)
        for rids in run.values():
            await scene.running(rids)
        for how, lane in lanes.items():
            wait[how] = await submit(scene.broker, ["ECHO 2"] * ROWS, deadline_ms=20_000, lane=lane)

        await control.delete(scene.broker.keys.stream(lanes["DEL"]))
        await control.xtrim(scene.broker.keys.stream(lanes["XTRIM"]), maxlen=0, approximate=False)
        # Into a stream without a group, or one that has forgotten what was there.
        later = [await submit(scene.broker, ["ECHO 2"] * ROWS, lane=lane) for lane in lanes.values()]
        # Nobody has room: it is the audit that finds what is gone.
        waited = {how: await ended(scene.broker, rids) for how, rids in wait.items()}
        scene.let_go()
        ran = {how: await ended(scene.broker, rids) for how, rids in run.items()}
        served = [record for rids in later for record in await ended(scene.broker, rids)]
    for how in lanes:
        late_ms = max(ended_at_ms(record) - record.accepted_at_ms for record in waited[how])
        keep(
            f"F9 {how}",
            f"{how} of a lane's stream: {ROWS} requests run, {ROWS} wait",
            f"those that ran: {_states(ran[how])}; those that waited: {_states(waited[how])}, told "
            f"{late_ms / 1000:.1f} s after their acceptance; {ROWS} later ones: {_states(served)}",
            "failures visible by the deadline, later requests served",
        )
        assert _states(ran[how]) == "done"
        assert _states(waited[how]) == "failed"
    assert _states(served) == "done"


def _states(records: list[Record]) -> str:
    return ", ".join(sorted({record.state for record in records}))


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
