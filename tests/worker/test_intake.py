"""The intake by itself: what it counts of what the engine brings forth."""

from __future__ import annotations

import threading
from typing import Any, cast

import pytest

from engine_driver import Clock
from item_models import Bench, ListJob, ListRunner, text
from streamfleet_common.decisions import DecideRequest, Question
from streamfleet_common.deliveries import Delivery, Entry
from streamfleet_common.one_shot import CallRequest, RerankRequest
from streamfleet_common.schemas import Envelope, Request
from streamfleet_common.submissions import Submission
from streamfleet_worker.engine.base import Arrival, Finished, Key, Output, Parts, Room, Step, Tokens
from streamfleet_worker.engine_thread import Report
from streamfleet_worker.intake import Intake
from streamfleet_worker.metrics import Metrics


class Door:
    """An engine that takes all and does nothing, and a publisher that holds all."""

    def __init__(self, items: int) -> None:
        self.info = Bench(ListRunner(), size=4, window=3).info
        self.items = items
        self.arrivals: dict[Key, Arrival] = {}
        self.held = 0
        self.outputs: list[Output] = []
        self.threads: list[str] = []
        """Where each request was prepared."""
        self.scopes: list[str] = []

    def prepare(self, request: Any, scope: str) -> ListJob:
        self.threads.append(threading.current_thread().name)
        self.scopes.append(scope)
        return ListJob([text(number) for number in range(self.items)])

    def add(self, arrivals: dict[Key, Arrival]) -> None:
        self.arrivals |= arrivals

    def answers_for(self, key: Key) -> bool:
        return False

    def holds(self, key: Key) -> bool:
        return True

    def hold(self, delivery: Delivery, **_: Any) -> None:
        self.held += 1

    def prepared(self, arrivals: Any) -> None:
        assert len(arrivals) <= self.held

    def take(self, outputs: list[Output]) -> None:
        self.outputs += outputs


def delivery(number: int, request: Request | None = None, tenant: str = "default") -> Delivery:
    envelope = Envelope(request=request or CallRequest(handler="h", input=number), tenant=tenant)
    entry = Entry(envelope.rid, f"{number}-0", "normal", Submission.of(envelope).payload)
    return Delivery(entry, "w1", 1, 10_000, 9_250, 40_000, 1, 0)


def made(items: int = 1) -> tuple[Intake, Door, Metrics, Clock]:
    door, metrics, clock = Door(items), Metrics("q", "0"), Clock()
    return Intake(cast(Any, door), cast(Any, door), metrics, clock), door, metrics, clock


def report(*outputs: Output, ended_at: float = 0.0) -> Report:
    return Report(Step([*outputs]), 0.01, Room(0, 0, 0), ended_at)


def token(key: Key, index: int = 0, count: int = 1) -> Output:
    return Output(key, Tokens(index, [7] * count, ["x"] * count))


async def test_ages_and_deadlines_are_on_the_engines_clock() -> None:
    intake, door, _, _ = made()
    await intake.take([delivery(1)])
    (arrival,) = door.arrivals.values()
    # Accepted 750 ms before it was given out, and 30 s before its deadline then.
    assert (arrival.accepted_at, arrival.deadline_at) == (99.25, 130.0)
    intake.close()


async def test_the_engine_is_told_whose_each_request_is() -> None:
    intake, door, _, _ = made()
    await intake.take([delivery(1), delivery(2, tenant="acme"), delivery(3, tenant="acme")])
    assert door.scopes == ["default", "acme", "acme"]
    assert [arrival.scope for arrival in door.arrivals.values()] == door.scopes
    intake.close()


async def test_the_first_part_is_the_first_output_and_no_other() -> None:
    intake, door, metrics, clock = made()
    await intake.take([delivery(1)])
    (key,) = door.arrivals
    clock.now += 0.5
    intake.stepped(report(Output(key, Parts([1])), Output(key, Parts([2]))))
    clock.now += 0.5
    intake.stepped(report(Output(key, Parts([3])), Output(key, Finished("done"))))
    name = "streamfleet_time_to_first_token_seconds"
    assert metrics.registry.get_sample_value(f"{name}_count", {"queue": "q"}) == 1
    assert metrics.registry.get_sample_value(f"{name}_sum", {"queue": "q"}) == 1.25
    assert intake.admitted == 0
    intake.close()


async def test_gaps_are_those_between_tokens_of_one_choice_by_the_steps_that_made_them() -> None:
    intake, door, metrics, clock = made()
    await intake.take([delivery(1), delivery(2)])
    one, other = door.arrivals
    # The loop hears of all steps at once, and late: what counts is when each was over.
    clock.now += 5.0
    intake.stepped(report(token(one), token(one, 1), ended_at=10.0))
    intake.stepped(report(token(one), token(other), ended_at=10.03))  # 30 ms, for one
    intake.stepped(report(token(one), token(one, 1), token(other), ended_at=10.04))  # 10, 40 and 10 ms
    intake.stepped(report(ended_at=11.0))
    # 2 s and twice nothing; the rest of a text is no token.
    intake.stepped(report(token(one, count=3), Output(other, Tokens(0, [], ["rest"])), ended_at=12.04))
    intake.stepped(report(Output(one, Finished("done")), token(("gone", 1)), ended_at=13.0))
    name = "streamfleet_inter_token_latency_seconds"

    def found(suffix: str, **labels: str) -> float:
        value = metrics.registry.get_sample_value(f"{name}_{suffix}", {"queue": "q", **labels})
        assert value is not None
        return value

    assert found("count") == 7
    assert found("sum") == pytest.approx(0.03 + 0.01 + 0.04 + 0.01 + 2.0)
    assert [found("bucket", le=le) for le in ("0.0001", "0.005", "0.025", "0.05", "1.0", "2.5")] == [
        2, 2, 4, 6, 6, 7,
    ]  # fmt: skip
    intake.close()


async def test_room_is_the_window_in_requests_like_the_last_ones() -> None:
    intake, door, _, _ = made(items=5)
    assert intake.room() == 12
    await intake.take([delivery(1)])
    # 5 rows of 12 are taken; a call is thought to be one row before it is here.
    assert intake.room() == 7
    (key,) = door.arrivals
    intake.stepped(report(Output(key, Finished("done"))))
    assert intake.room() == 12
    intake.close()


LONG = "a " * 3000
COUNTED = Question(id="q", criteria="?", options=[str(number) for number in range(256)])


@pytest.mark.parametrize(
    ("request_", "is_inline"),
    [
        (RerankRequest(query="a " * 30, documents=["b"] * 100), True),
        (RerankRequest(query=LONG, documents=["b"] * 10), True),
        (RerankRequest(query=LONG, documents=["b"] * 1000), False),
        (DecideRequest(state=LONG, questions=[COUNTED]), False),
        (DecideRequest(state="short", questions=[COUNTED]), True),
    ],
)
async def test_what_fills_many_rows_is_not_prepared_on_the_event_loop(
    request_: Request, is_inline: bool
) -> None:
    intake, door, _, _ = made()
    await intake.take([delivery(1, request_)])
    (thread,) = door.threads
    assert (thread == threading.current_thread().name) == is_inline
    intake.close()
