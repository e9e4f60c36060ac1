"""What a killed worker ran is begun anew soon, and in company."""

from __future__ import annotations

import pytest

from faults.recovery import run, say

_LONG = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(
    ("rounds", "lease_s", "supervised"),
    [
        pytest.param(2, 1.0, False, id="quick"),
        # Nobody's lease runs out here.
        pytest.param(1, 60.0, True, id="supervised-quick"),
        pytest.param(20, 2.0, False, id="long", marks=_LONG),
        pytest.param(20, 60.0, True, id="supervised-long", marks=_LONG),
    ],
)
async def test_what_a_killed_worker_ran_is_begun_anew_in_company(
    rounds: int, lease_s: float, supervised: bool
) -> None:
    found = await run(rounds, lease_s, supervised=supervised)
    say(found, rounds)
    assert found.is_whole(), found
    if rounds > 2:  # the figures of a few rounds are those of the machine
        assert found.is_prompt(), found
