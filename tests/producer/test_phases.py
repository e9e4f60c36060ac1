"""Where the time of a request went: the parts are all of it, whatever the clocks say."""

from __future__ import annotations

import random
from typing import Any

import pytest

from streamfleet_common.schemas import End, Timing
from streamfleet_producer.operations.phases import bars, duration, percentages, phases_of


def ended(queued_ms: int, held_ms: int, **timing: Any) -> End:
    times: dict[str, Any] = {"queued_at_ms": 1000, "started_at_ms": 1000 + queued_ms}
    return End(state="done", **times, ended_at_ms=1000 + queued_ms + held_ms, timing=Timing(**timing))


def shown(end: End) -> dict[str, float]:
    return {phase.name: phase.ms for phase in phases_of(end)}


def test_of_a_generation_what_no_phase_explains_is_the_rest() -> None:
    end = ended(40, 100, wait_ms=10.0, prefill_ms=20.0, decode_ms=65.0)
    assert shown(end) == {"queued": 40, "wait": 10, "prefill": 20, "decode": 65, "rest": 5}


def test_of_one_shot_work_the_computing_is_told() -> None:
    end = ended(0, 50, wait_ms=5.0, tokenize_ms=1.0, device_ms=30.0, batches=2)
    assert shown(end) == {"queued": 0, "tokenize": 1, "wait": 5, "device": 30, "rest": 14}


def test_batches_side_by_side_take_no_longer_than_the_request() -> None:
    end = ended(0, 50, wait_ms=5.0, device_ms=160.0, batches=4)
    assert shown(end) == {"queued": 0, "wait": 5, "device": 45}


def test_whole_milliseconds_of_the_server_shorten_nothing() -> None:
    # Begun at 1.9 ms and ended at 4.1 ms by its clock: two whole milliseconds, of which the worker took 2.2.
    assert shown(ended(1, 2, prefill_ms=1.2, decode_ms=1.0)) == {"queued": 1, "prefill": 1.2, "decode": 1.0}


def test_what_no_worker_began_has_only_waited() -> None:
    end = End(state="expired", queued_at_ms=1000, ended_at_ms=4000)
    assert shown(end) == {"queued": 3000}


def test_time_before_the_last_attempt_was_not_all_in_line() -> None:
    end = ended(40, 10, wait_ms=10.0).model_copy(update={"attempt": 2})
    assert shown(end) == {"earlier": 40, "wait": 10}


def test_of_a_lost_worker_nothing_is_known_but_how_long_it_ran() -> None:
    assert shown(ended(40, 10)) == {"queued": 40, "run": 10}


def test_a_clock_that_went_back_takes_no_time_away() -> None:
    assert shown(ended(-50, -10, wait_ms=3.0)) == {"queued": 0, "wait": 3}


@pytest.mark.parametrize(
    ("amounts", "shares"),
    [
        ([1.0, 1.0, 1.0], [34, 33, 33]),
        ([1.0, 2.0], [33, 67]),
        ([0.4, 99.6], [0, 100]),
        ([0.0, 0.0], [0, 0]),
        ([5.0], [100]),
        ([], []),
    ],
)
def test_percentages_add_up(amounts: list[float], shares: list[int]) -> None:
    assert percentages(amounts) == shares


def test_percentages_and_bars_of_many_requests() -> None:
    draw = random.Random(7)
    for _ in range(2000):
        amounts = [draw.choice([0.0, draw.random(), draw.random() * 1e6]) for _ in range(draw.randint(1, 7))]
        if not sum(amounts):
            continue
        shares = percentages(amounts)
        assert sum(shares) == 100
        assert all(
            abs(share - 100 * one / sum(amounts)) < 1 for share, one in zip(shares, amounts, strict=True)
        )
        drawn = bars(amounts, 40)
        for (first, length), amount in zip(drawn, amounts, strict=True):
            assert (length > 0) == (amount > 0)
            assert 0 <= first <= first + length <= 40
            assert abs(length - 40 * amount / sum(amounts)) <= 1
        assert [first for first, _ in drawn] == sorted(first for first, _ in drawn)
        assert max(first + length for first, length in drawn) == 40


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 ms"),
        (0.254, "0.25 ms"),
        (12.34, "12.3 ms"),
        (250.4, "250 ms"),
        (999.4, "999 ms"),
        (999.6, "1.00 s"),
        (12_340, "12.3 s"),
        (99_900, "99.9 s"),
        (125_000, "2 m 05 s"),
        (3_720_000, "1 h 02 m"),
        (10 * 86_400_000 + 3_600_000, "10 d 01 h"),
    ],
)
def test_times_for_people(ms: float, text: str) -> None:
    assert duration(ms) == text
