"""F15: workers are replaced one after the other while everybody works."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from chaos.crew import ChaosWorker
from faults.figures import keep
from faults.load import Load
from faults.processes import Fleet, settings
from faults.scene import until

WORKERS = 2


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(3, id="quick"),
        pytest.param(20, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    ],
)
async def test_workers_that_drain_one_after_the_other_cost_nobody_anything(times: int) -> None:
    async with Fleet(WORKERS) as fleet:
        async with Load(fleet.server.url, tokens=10, tick_ms=20) as load:
            for turn in range(times):
                worker = fleet.crew.workers[0]
                worker.drain()
                assert await worker.ended() == 0

                async def replaced(turn: int = turn) -> bool:
                    return fleet.crew.replaced == turn + 1 and len(fleet.crew.workers) == WORKERS

                await until(replaced)
                await load.served()
        account = await load.account(fleet.broker)
    keep(
        f"F15 {times} drains",
        f"SIGTERM to one of {WORKERS} workers after the other, under load",
        f"{account}; at most {account.most_attempts} starts; {load.latency()}",
        "0 crashes, 0 failed",
    )
    assert account.is_whole(), account
    assert set(account.states) == {"done"}
    assert account.crashes == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_supervisor_that_replaces_its_workers_costs_nobody_anything(tmp_path: Path) -> None:
    times, log = 20, tmp_path / "log"
    async with Fleet(0) as fleet:
        supervisor = ChaosWorker(fleet.server.url, settings(workers=WORKERS), log)
        try:
            await supervisor.ready()
            async with Load(fleet.server.url, tokens=10, tick_ms=20) as load:
                for turn in range(times):
                    os.kill(supervisor.pid, signal.SIGHUP)

                    async def replaced(turn: int = turn) -> bool:
                        return log.read_text().count("all workers are replaced") == turn + 1

                    await until(replaced)
                    await load.served()
            account = await load.account(fleet.broker)
            supervisor.drain()
            assert await supervisor.ended() == 0
        finally:
            supervisor.close()
    keep(
        f"F15 {times} replacements",
        f"SIGHUP to a supervisor of {WORKERS} workers, under load",
        f"{account}; at most {account.most_attempts} starts; {load.latency()}",
        "0 crashes, 0 failed",
    )
    assert account.is_whole(), account
    assert set(account.states) == {"done"}
    assert account.crashes == 0
