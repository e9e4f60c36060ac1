"""A bulk job outlives whoever runs it, whoever answers it, and the server between them."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from chaos.server import ChaosServer
from command import descendants
from faults.bulk_kills import RQ_LEASE_S, VICTIMS, BulkKills, RqWorkers, Victim
from faults.figures import keep
from hand_worker import HandWorker
from streamfleet_producer.bulk.batches import Batches

LIMIT_S = 90.0
_LONG = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("lines", "kills", "victims", "appendfsync"),
    [
        pytest.param(60, 1, VICTIMS[:1], "always", id="quick"),
        pytest.param(300, 1, VICTIMS, "always", id="each", marks=_LONG),
        pytest.param(10_000, 6, VICTIMS, "always", id="long", marks=_LONG),
        pytest.param(10_000, 6, VICTIMS, "everysec", id="everysec", marks=_LONG),
    ],
)
async def test_each_line_is_answered_once_whoever_is_killed(
    lines: int, kills: int, victims: tuple[Victim, ...], appendfsync: str, tmp_path: Path
) -> None:
    judged = await BulkKills(lines, kills, victims=victims, appendfsync=appendfsync, folder=tmp_path).run()
    assert judged.faults(lines) == []
    assert judged.killed == dict.fromkeys(victims, kills)
    if kills > 1:
        found = (
            f"each answered once, {judged.batch.runs} runs, starts {dict(sorted(judged.attempts.items()))}"
        )
        keep(
            f"F90 bulk job, {appendfsync}",
            f"{lines} lines, {kills} kills each of RQ worker, job, fleet worker and Redis",
            f"{found}, {judged.took_s:.0f} s",
            "each once; starts at most 1 + owners lost",
        )


@pytest.mark.slow
async def test_a_worker_that_is_missed_though_its_job_runs_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "request": {"prompt": "p"}}\n')
    paths = [tmp_path / f"{kind}.jsonl" for kind in ("in", "out", "err")]
    async with ChaosServer() as server, HandWorker(server.url) as hand:
        await hand.announce()
        with Batches(server.url, lease_s=RQ_LEASE_S) as batches:
            batch = await asyncio.to_thread(batches.create, paths[0], paths[1], paths[2], fleet_queue="q")
            async with RqWorkers(server.url, tmp_path) as rq:
                (work,) = await hand.take(1)
                (busy,) = [pid for pid in rq.pids() if descendants(pid)]
                # Its heart stands still, the process of its job goes on.
                os.kill(busy, signal.SIGSTOP)
                try:
                    await until(lambda: _is_taken_by_two(rq))
                    assert await hand.finish(work, "re")
                    await until(lambda: _is_over(batches, batch.id))
                finally:
                    os.kill(busy, signal.SIGCONT)
                await until(lambda: _is_free(rq))
            ended = await asyncio.to_thread(batches.get, batch.id)
    assert (ended.status, ended.runs, ended.counts.completed) == ("completed", 1, 1)
    assert paths[1].read_text().count("\n") == 1


async def until(happened: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not await happened():  # noqa: ASYNC110 (processes have no event for us)
            await asyncio.sleep(0.05)


async def _is_taken_by_two(rq: RqWorkers) -> bool:
    return all(descendants(pid) for pid in rq.pids())


async def _is_free(rq: RqWorkers) -> bool:
    return not any(descendants(pid) for pid in rq.pids())


async def _is_over(batches: Batches, id: str) -> bool:  # noqa: A002
    return (await asyncio.to_thread(batches.get, id)).is_over
