"""F7: the server stands still for a while, and nobody loses what he runs for that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from faults.figures import keep
from faults.load import ended
from faults.scene import Scene, pause, until
from hired import submit

ROWS = 8


async def sleep(scene: Scene, seconds: float) -> None:
    await scene.server.stall(seconds)


async def pause_writes(scene: Scene, seconds: float) -> None:
    await scene.server.pause_writes(round(seconds * 1000))
    await pause(seconds)


STALLS: dict[str, Callable[[Scene, float], Awaitable[None]]] = {
    "DEBUG SLEEP": sleep,
    "CLIENT PAUSE WRITE": pause_writes,
}


@pytest.mark.parametrize(
    ("lease_s", "lengths"),
    [
        pytest.param(0.8, (1.5,), id="quick"),
        pytest.param(
            1.5, (0.5, 1.5, 5.0, 0.5, 1.5, 5.0), id="long", marks=[pytest.mark.slow, pytest.mark.timeout(180)]
        ),
    ],
)
@pytest.mark.parametrize("kind", STALLS)
async def test_a_stall_of_the_server_takes_nothing_from_anybody(
    kind: str, lease_s: float, lengths: tuple[float, ...]
) -> None:
    async with Scene(rows=ROWS, lease_s=lease_s) as scene:
        rids = await submit(scene.broker, ["ECHO 20 TICK 10"] * 2 * ROWS)
        scene.hold(steps=4)
        before = await scene.running(rids)
        for length in lengths:
            await STALLS[kind](scene, length * lease_s)
            # The first of them would take everything, were it not for the grace.
            for _ in range(3):
                await _swept(scene)
            assert await scene.running(rids) == before
        scene.let_go()
        records = await ended(scene.broker, rids)
    crashes = sum(one.crashes for one in records)
    keep(
        f"F7 {kind}, {', '.join(f'{length:g}' for length in lengths)} L",
        f"{len(rids)} running requests of two workers, L = {lease_s:g} s",
        f"{sum(one.attempts > 1 for one in records)} started again, {crashes} crashes counted",
        "0 started again, 0 crashes",
    )
    assert {one.state for one in records} == {"done"}
    assert {one.attempts for one in records} == {1}
    assert crashes == 0


async def _swept(scene: Scene) -> None:
    """Wait for the next sweep of anybody."""
    last = await _last_sweep(scene)

    async def swept() -> bool:
        return await _last_sweep(scene) != last

    await until(swept)


async def _last_sweep(scene: Scene) -> object:
    return await scene.server.control.hget(scene.broker.keys.sweep, "last")
