"""A fleet under chaos: every request is answered once, whatever breaks. `make chaos` runs more of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.plan import Plan
from chaos.run import Outcome, report, run
from chaos.server import binaries


def judged(outcome: Outcome, folder: Path) -> Outcome:
    report(outcome, folder)
    assert outcome.violations == [], f"all that happened is in {folder}"
    poison = {rid for rid, order in outcome.history.orders.items() if order.is_poison}
    dead = {rid for rid, record in outcome.history.remains.records.items() if record.state == "dead"}
    assert dead == poison & outcome.history.accepted()
    return outcome


def test_a_seed_draws_the_same_plan_again() -> None:
    assert Plan.draw(3, 100) == Plan.draw(3, 100)
    assert Plan.draw(3, 100) != Plan.draw(4, 100)
    assert Plan.draw(3, 100, only_poison=True).faults == []


@pytest.mark.timeout(240)
async def test_what_is_accepted_ends_once_whatever_breaks(tmp_path: Path) -> None:
    # Of this seed: workers killed, paused and drained, Redis killed, lines that flap, black out and go deaf,
    # waiting requests moved around, two requests that kill their workers.
    plan = Plan.draw(2118, 160, rate=12.0, fault_every_s=1.2)

    outcome = judged(await run(plan, tmp_path), tmp_path)

    assert len(outcome.history.accepted()) >= 150
    assert outcome.faults.total() >= 15
    # What is judged was seen: nothing passes because nobody looked.
    history = outcome.history
    heard = {seen.rid for seen in history.sightings if seen.frame.is_end}
    assert len(heard) >= 0.8 * len(history.accepted())
    assert len(history.remains.logs) >= 50
    assert len(history.readings) >= 150
    assert min(len(history.glimpses), len(history.losses), len(history.probes)) >= 5
    # How many a kill frees is a matter of when it strikes.
    assert sum(len(loss.freed_ms) for loss in history.losses) >= 1
    assert {"kill worker", "pause worker", "drain worker", "move waiting", "kill redis"} <= set(
        outcome.faults
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
async def test_nobody_but_the_poison_dies_of_it(tmp_path: Path) -> None:
    plan = Plan.draw(2, 400, only_poison=True)

    outcome = judged(await run(plan, tmp_path), tmp_path)

    assert {loss.cause for loss in outcome.history.losses} == {"poison"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(1, 11))
async def test_a_thousand_requests(seed: int, tmp_path: Path) -> None:
    judged(await run(Plan.draw(seed, 1000), tmp_path), tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", sorted(binaries()))
async def test_on_every_server(name: str, tmp_path: Path) -> None:
    judged(await run(Plan.draw(21, 300), tmp_path, binaries()[name]), tmp_path)
