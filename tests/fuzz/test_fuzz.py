"""Some hostile inputs each time; the scripts beside this have many."""

from __future__ import annotations

import pytest
import structlog

import codec_inputs
import route_inputs


def test_the_codec_takes_messages_and_refuses_the_rest() -> None:
    found = codec_inputs.run(3000, seed=11)
    assert found["taken"] > 0
    assert found["grown_kib"] < 300_000


@pytest.mark.timeout(180)
async def test_routes_answer_whatever_comes(redis_url: str) -> None:
    try:
        found = await route_inputs.run(redis_url, 700, seed=11)
    finally:
        structlog.reset_defaults()
    assert found["failures"] == []
    assert (found["open_http"], found["open_requests"]) == (0, 0)
    assert found["new_tasks"] <= 5
    assert found["statuses"].keys() >= {200, 400, 404}


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_routes_answer_ten_thousand(redis_url: str) -> None:
    try:
        found = await route_inputs.run(redis_url, 10_000, seed=12)
    finally:
        structlog.reset_defaults()
    assert found["failures"] == []
    assert (found["open_http"], found["open_requests"]) == (0, 0)
    assert found["new_tasks"] <= 5
    assert found["grown_kib"] < 300_000


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_codec_takes_a_million() -> None:
    found = codec_inputs.run(1_000_000, seed=13)
    assert found["taken"] > 1000
    assert found["grown_kib"] < 500_000
