"""The load generator: when it sends, what it counts from, and what it records."""

from __future__ import annotations

import asyncio
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from streamfleet_common.depth import Depth
from streamfleet_common.errors import (
    BrokerUnavailable,
    Cancelled,
    DeadlineExceeded,
    GenerationFailed,
    InvalidRequest,
    QueueFull,
)
from streamfleet_common.one_shot import EmbedRequest
from streamfleet_common.schemas import End
from streamfleet_producer.cli.app import app
from streamfleet_producer.load import LoadRun, Plan
from streamfleet_producer.report.records import RequestLine, SampleLine

REQUEST = EmbedRequest(texts=("a text",))
LIMIT_S = 90.0


class StandIn:
    """A client whose answers come when `gate` is open."""

    def __init__(self, outcome: Exception | None = None) -> None:
        self.gate = asyncio.Event()
        self.asked = 0
        self.outcome = outcome

    async def run(self, request: Any, **options: Any) -> End:
        self.asked += 1
        await self.gate.wait()
        if self.outcome is not None:
            raise self.outcome
        return End(state="done", queued_at_ms=1000, started_at_ms=1004)

    async def depth(self) -> Depth:
        raise BrokerUnavailable("away")

    async def models(self) -> list[Any]:
        return []


async def recorded(fleet: Any, plan: Plan) -> list[RequestLine]:
    lines: list[RequestLine | SampleLine] = []
    async with asyncio.timeout(LIMIT_S):
        await LoadRun(fleet, [REQUEST], plan, lines.append).run()
    return [line for line in lines if isinstance(line, RequestLine)]


async def test_latencies_count_from_when_a_request_was_due_however_late_it_is_sent() -> None:
    fleet = StandIn()
    plan = Plan(seconds=0.01, rate=1000, most_open=1)
    running = asyncio.ensure_future(recorded(fleet, plan))
    async with asyncio.timeout(LIMIT_S):
        while not fleet.asked:  # noqa: ASYNC110 (it has no event for it)
            await asyncio.sleep(0)
    # All ten are due before the first is answered.
    await asyncio.sleep(0.02)
    assert fleet.asked == 1
    fleet.gate.set()

    lines = sorted(await running, key=lambda line: line.submitted_ms)

    assert [line.submitted_ms for line in lines] == [float(n) for n in range(10)]
    first, *others = lines
    assert first.ended_ms >= 20
    for line in others:
        assert line.sent_ms is not None
        assert line.sent_ms >= first.ended_ms
        assert line.ended_ms - line.submitted_ms >= first.ended_ms - line.submitted_ms
        assert line.started_ms is None or line.started_ms <= line.ended_ms


async def test_each_caller_waits_for_his_answer() -> None:
    fleet = StandIn()
    running = asyncio.ensure_future(recorded(fleet, Plan(seconds=0.05, callers=3)))
    async with asyncio.timeout(LIMIT_S):
        while fleet.asked < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
    await asyncio.sleep(0.06)
    assert fleet.asked == 3
    fleet.gate.set()

    lines = await running

    assert len(lines) == 3
    assert {line.outcome for line in lines} == {"done"}
    assert all(line.ended_ms >= 60 for line in lines)


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (QueueFull("full", limit=1, retry_after=1.0), "refused"),
        (InvalidRequest("no"), "refused"),
        (DeadlineExceeded("late"), "expired"),
        (Cancelled("gone"), "cancelled"),
        (GenerationFailed("broken"), "failed"),
        (BrokerUnavailable("away"), "failed"),
    ],
)
async def test_what_goes_wrong_is_recorded_with_its_code_and_does_not_end_the_load(
    error: Any, outcome: str
) -> None:
    fleet = StandIn(error)
    fleet.gate.set()

    lines = await recorded(fleet, Plan(seconds=0.01, rate=500))

    assert len(lines) == 5
    assert {(line.outcome, line.error, line.kind) for line in lines} == {(outcome, error.code, "embed")}


async def test_a_disk_that_is_full_ends_the_load_with_its_own_error() -> None:
    fleet = StandIn()
    fleet.gate.set()

    def full(_line: object) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        async with asyncio.timeout(LIMIT_S):
            await LoadRun(fleet, [REQUEST], Plan(seconds=3600, callers=3), full).run()  # type: ignore[arg-type]


def test_arrivals_are_even_or_random_as_is_wanted() -> None:
    assert list(Plan(seconds=1, rate=4).arrivals()) == [0.0, 0.25, 0.5, 0.75]
    drawn = list(Plan(seconds=100, rate=100, poisson=True, seed=3).arrivals())
    assert drawn == sorted(drawn)
    assert drawn == list(Plan(seconds=100, rate=100, poisson=True, seed=3).arrivals())
    # Five standard deviations of a Poisson count of mean 10,000.
    assert abs(len(drawn) - 10_000) < 500
    gaps = [b - a for a, b in pairwise(drawn)]
    # Of an exponential distribution 1 - 1/e lies below the mean.
    assert sum(gap < 0.01 for gap in gaps) / len(gaps) == pytest.approx(0.632, abs=0.03)
    assert len(list(islice(Plan(seconds=86_400, rate=1e5).arrivals(), 3))) == 3


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "either a rate"),
        ({"rate": 1.0, "callers": 1}, "either a rate"),
        ({"rate": 0.0}, "above 0"),
        ({"rate": float("nan")}, "above 0"),
        ({"callers": 0}, "from 1 to 10,000"),
        ({"callers": 1, "poisson": True}, "need a rate"),
        ({"callers": 1, "seconds": 0.0}, "more than 0 seconds"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        Plan(**{"seconds": 1.0, **wrong})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no lines"),
        ("{", "line 1: it is no JSON"),
        ('{"prompt": "a"}\n{"promt": "SECRET"}\n', "line 2: the request is not valid"),
    ],
)
def test_prompts_that_are_none_are_told_before_anything_is_sent(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "p.jsonl").write_text(text)

    done = CliRunner().invoke(app, ["load", "--prompts", str(tmp_path / "p.jsonl"), "--rate", "1"])

    assert done.exit_code == 2
    assert says in done.stderr
    assert "SECRET" not in done.stderr
