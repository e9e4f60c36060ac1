"""Whatever the order of all steps: the promises hold."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from queue_machine import Fleet

QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


@pytest.mark.parametrize(
    ("examples", "steps"),
    [
        pytest.param(25, 30, id="quick"),
        pytest.param(600, 60, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(1800)]),
    ],
)
def test_any_interleaving_keeps_the_promises(redis_url: str, examples: int, steps: int) -> None:
    Fleet.url = redis_url
    run_state_machine_as_test(
        Fleet,
        settings=settings(
            max_examples=examples, stateful_step_count=steps, deadline=None, suppress_health_check=QUIET
        ),
    )
