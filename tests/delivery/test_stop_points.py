"""F1 and F2: a worker is killed, or sleeps for three leases, between any two steps of the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest

from chaos import observer
from chaos.server import ChaosServer
from delivery.stop_point_run import Play, Run
from delivery.stopping_worker import Moment, Point, Step
from delivery.workers import Nursery
from hired import eventually_so

PLACES: list[tuple[Step, int, Moment]] = [
    ("read", 1, "after"),
    ("take", 1, "after"),
    ("emit", 1, "before"),
    ("emit", 1, "after"),
    ("emit", 7, "before"),
    ("finish", 1, "before"),
    ("finish", 1, "after"),
    ("renew", 3, "before"),
    ("renew", 3, "after"),
    ("sweep", 1, "before"),
    ("sweep", 1, "after"),
]
pytestmark = pytest.mark.timeout(600)  # the first of them plays all
POINTS = [Point(*place, signal) for signal in ("KILL", "STOP") for place in PLACES]


@pytest.fixture(scope="module")
def runs(nursery: Nursery) -> Iterator[dict[str, Run]]:
    """All points, each on a queue of its own, at the same time: most of it is waiting for leases."""

    async def play() -> dict[str, Run]:
        async with ChaosServer() as server:
            plays = [Play(server, nursery, point) for point in POINTS]
            for one in plays:
                await one.observer.__aenter__()

            async def all_listen() -> bool:
                return int(await server.control.pubsub_numpat()) == len(plays)

            await eventually_so(all_listen, "an ear for each queue")
            played = await asyncio.gather(*(one.play() for one in plays))
            return {str(run.point): run for run in played}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(observer, "GLIMPSE_S", 0.3)  # there are many of them
        yield asyncio.run(play())


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_a_worker_lost_between_two_steps(
    point: Point, runs: dict[str, Run], record_property: Callable[[str, object], None]
) -> None:
    run = runs[str(point)]
    record_property("slowest_ms", round(run.slowest_ms))
    assert [str(violation) for violation in run.violations] == []
    assert {end.state for end in run.ends.values()} == {"done"}
    for rid, end in run.ends.items():
        # What was begun by the lost worker was begun once more, and by the other one.
        record = run.history.remains.record(rid)
        assert record is not None
        attempts = 2 if rid in run.begun else 1
        assert (record.attempts, record.crashes, record.solo_losses) == (attempts, attempts - 1, 0)
        if rid in run.begun:
            assert (end.worker, end.of) == (run.survivor, run.begun[rid] + 2)
    if point.step == "renew":  # a finish may be on its way beside it
        assert run.begun.keys() <= set(run.last)
    if point.step in ("take", "emit", "sweep") or (point.step, point.moment) == ("finish", "before"):
        assert run.begun.keys() == set(run.last), "all were in its hands"
    if (point.step, point.moment) == ("finish", "after"):
        assert not run.begun, "all were told"
        assert {end.worker for end in run.ends.values()} == {run.victim}
    # Killed; or alive after its sleep, and none the worse for it.
    assert run.victim_status == (-9 if point.signal == "KILL" else 0)
    assert run.survivor_status == 0
