"""Every fault of the table is noticed by the test that it names, and most of them by the model as well."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from broker_mutants import CLIENT, EQUIVALENT, MUTANTS, Mutant, table
from queue_machine import Fleet
from script_changes import change, changed
from streamfleet_common.broker import Broker
from streamfleet_common.errors import BrokerUnavailable

NOTICED = (AssertionError, ValueError, KeyError, TypeError)
QUICK = {"start twice in a batch"}
"""The others take the model some seconds each."""
BEYOND = {
    "one token too few",
    "a large request never comes in",
    "a paused queue goes on",
    "a crowded server takes more",
    "a group is made at $",
    "the pause grows without end",
    "nobody is asked to drain",
    "dead letters keep every payload",
    "a consumer goes with what it holds",
    "the lease of the workers is not known",
    "the audit robs the living",
    "the audit is impatient",
    "idle consumers go with what they hold",
    "one token under the share",
    "the ledger has no life",
    "a ledger that begins with a bill has no life",
    "a result is gone before its bill",
    "a deleted record keeps what it counted for",
    "a lost note of the sub-lanes stays lost",
    "a lost note stays lost where nobody splits",
    "a sweep takes as many of each sub-lane",
    "who is lazy leaves what one call cannot take",
    "each submission is the oldest",
    "after a sweep nobody is the oldest",
    "what was moved is noted as young",
    "a sweep takes what was moved for young",
}
"""What the model does not know: it has no cards, notes for watchers, consumers, limits of tokens for all,
operators, deleted records, long pauses and hundreds of lost requests, and its clock moves in steps that are
longer than the audit's patience."""


async def run(mutant: Mutant, broker: Broker, raw: Any) -> None:
    """The test that should notice, with the fault in place."""
    change(broker, mutant.script, (mutant.right, mutant.wrong))
    fixtures = {"broker": broker, "raw": raw}
    wanted = inspect.signature(mutant.caught_by).parameters
    await mutant.caught_by(**{name: mutant.values.get(name, fixtures.get(name)) for name in wanted})


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
async def test_each_fault_is_noticed(broker: Broker, raw: Any, mutant: Mutant) -> None:
    try:
        await run(mutant, broker, raw)
    except BrokerUnavailable as error:
        pytest.fail(f"no fault, but a script that cannot run: {error}")
    except NOTICED:
        return
    pytest.fail(f"{mutant.witness} does not notice it")


@pytest.mark.parametrize("mutant", EQUIVALENT, ids=lambda mutant: mutant.name)
async def test_some_faults_make_no_difference(broker: Broker, raw: Any, mutant: Mutant) -> None:
    await run(mutant, broker, raw)


def test_the_table_names_each_fault_once() -> None:
    names = [mutant.name for mutant in (*MUTANTS, *EQUIVALENT)]
    assert len(set(names)) == len(names)
    assert len(table().splitlines()) == len(MUTANTS) + len(CLIENT) + 2
    assert set(names) >= QUICK | BEYOND


def by_the_model() -> list[Any]:
    slow = [pytest.mark.slow, pytest.mark.timeout(600)]
    return [
        pytest.param(one, id=one.name, marks=[] if one.name in QUICK else slow)
        for one in MUTANTS
        if one.name not in BEYOND
    ]


@pytest.mark.timeout(180)  # some are hard to find
@pytest.mark.parametrize("mutant", by_the_model())
def test_the_model_notices_it_too(redis_url: str, mutant: Mutant) -> None:
    class Mutated(Fleet):
        url = redis_url
        scripts = {mutant.script: changed(mutant.script, (mutant.right, mutant.wrong))}  # noqa: RUF012

    # Off the way that the test of the table takes, a faulty script may come to where it cannot run at all.
    with pytest.raises((*NOTICED, BrokerUnavailable)):
        run_state_machine_as_test(
            Mutated,
            settings=settings(
                max_examples=300,
                stateful_step_count=40,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                derandomize=True,
                report_multiple_bugs=False,
                suppress_health_check=list(HealthCheck),
            ),
        )
