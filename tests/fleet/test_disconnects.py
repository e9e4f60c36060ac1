"""HTTP clients by the thousand that leave at random moments: nothing of them is left."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from leaving_clients import MOMENTS, leave_nothing
from streamfleet_common.embedded import EmbeddedBroker


@pytest.mark.parametrize(
    "count",
    [100, pytest.param(2000, marks=[pytest.mark.slow, pytest.mark.timeout(300)])],
)
async def test_clients_that_leave_leave_nothing_behind(
    server: EmbeddedBroker, redis_url: str, count: int
) -> None:
    before, after, left = await leave_nothing(redis_url, count)
    figures = [f"{count} clients left: {dict(left)}"]
    for name, number in asdict(before).items():
        figures.append(f"  {name:18} {number:4} before, {asdict(after)[name]:4} after")
    print("\n".join(figures))  # noqa: T201 (for whoever wants the numbers: pytest -s)
    assert after.beyond(before) == {}
    assert (after.open_requests, after.http_requests, after.http_connections) == (0, 0, 0)
    assert (after.channels, after.rows) == (0, 0)
    assert set(left) == set(MOMENTS)
    assert sum(left.values()) == count
