"""F11: requests that crash their worker, hang it, exhaust it or fail, in one batch with innocents."""

from __future__ import annotations

import pytest

from faults.figures import keep
from faults.load import ended
from faults.processes import Fleet
from hired import submit

WORKERS = 3
STEP_LIMIT_S = 0.6
POISON = ("CRASH@2", "HANG@2", "OOM@2")
INNOCENTS = 9
COMPANY, ALONE = 2, 2


@pytest.mark.parametrize(
    "rounds",
    [
        pytest.param(1, id="quick"),
        pytest.param(20, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
async def test_poison_dies_alone_and_takes_nobody_along(rounds: int) -> None:
    dead, failed, done = 0, 0, 0
    statuses: list[int | None] = []
    for _ in range(rounds):
        async with Fleet(WORKERS, hand_back=True, step_limit_s=STEP_LIMIT_S, max_batch_size=16) as fleet:
            pids = {worker.pid for worker in fleet.crew.workers}
            (alone,) = await submit(fleet.broker, ["ECHO 4 RAISE@2"], stream=True)
            (raised,) = await ended(fleet.broker, [alone])
            # Nobody ended of it.
            assert pids == {worker.pid for worker in fleet.crew.workers}
            assert not fleet.ended

            innocent = ["ECHO 12 TICK 30"] * INNOCENTS
            prompts = [f"ECHO 4 TICK 30 {poison}" for poison in POISON] + innocent
            rids = await submit(fleet.broker, prompts, stream=True)
            records = await ended(fleet.broker, rids, limit_s=120)
            poisoned, others = records[: len(POISON)], records[len(POISON) :]
            letters = await fleet.server.control.xlen(fleet.broker.keys.dead)
            statuses += [worker.status for worker in fleet.ended]
        assert raised.state == "failed"
        assert raised.crashes == 0
        for record in poisoned:
            assert (record.state, record.crashes, record.solo_losses) == ("dead", COMPANY + ALONE, ALONE)
        assert {record.state for record in others} == {"done"}
        assert letters == len(POISON)
        dead += len(poisoned)
        failed += raised.state == "failed"
        done += len(others)
    by_signal = sum(status == -9 for status in statuses)
    by_itself = sum(status == 1 for status in statuses)
    keep(
        f"F11 {rounds} rounds",
        f"CRASH, HANG and OOM with {INNOCENTS} innocents in company, RAISE alone, {WORKERS} workers, a step "
        f"limit of {STEP_LIMIT_S:g} s, no other kills",
        f"{dead} of {len(POISON) * rounds} dead, each after {COMPANY} losses in company and {ALONE} alone; "
        f"{done} of {INNOCENTS * rounds} innocents done, 0 dead; {failed} of {rounds} failed alone, and its "
        f"worker went on; workers lost: {by_signal} crashed, {by_itself} ended themselves",
        "dead after 2 and 2, 0 innocents dead, a hang ends its process",
    )
    assert by_signal + by_itself == len(statuses)
    # Two of the three end the process by themselves, and each of them at least twice while alone.
    assert by_itself >= 2 * ALONE * rounds
