"""Requests with several choices take as many rows: in a whole worker, on a real server."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from eventually import eventually
from gated_engine import SLOW, GatedEngine
from hired import Hired, end, ends, events
from hired_view import echo, polled_again, states
from streamfleet_common.broker import Broker
from streamfleet_common.schemas import Delta, End, Envelope, GenerateRequest, Start
from streamfleet_common.submissions import Submission
from streamfleet_worker.engine.base import EngineInfo

Hire = Callable[..., Awaitable[Hired]]


async def ask(broker: Broker, prompt: str, *, stream: bool = False, **fields: Any) -> str:
    """Submit a request; gives its rid."""
    request = GenerateRequest(**{"prompt": prompt, "max_tokens": 100, **fields})
    envelope = Envelope(request=request, stream=stream)
    (submitted,) = await broker.submit([Submission.of(envelope)])
    assert submitted.outcome == "accepted"
    return envelope.rid


def text_of_choice(count: int, index: int) -> str:
    return " ".join(f"tok{place}#{index}" for place in range(count))


async def test_rows_are_counted_and_not_requests(broker: Broker, hire: Hire) -> None:
    hired = await hire(GatedEngine(is_open=False, max_batch_size=8), block_ms=50)
    first = await ask(broker, "ECHO 3", n=4)
    await eventually(lambda: hired.engine.added == [first], "its turn")
    assert hired.worker._intake.room() == 1, "four rows, which is one more like it"
    more = [await ask(broker, "ECHO 3", n=4) for _ in range(5)]
    await eventually(lambda: len(hired.engine.added) == 2, "a full batch")
    await polled_again(hired)
    assert await states(broker, [first, *more]) == {"running": 2, "queued": 4}
    hired.engine.is_open = True
    for answer in await ends(broker, [first, *more]):
        assert [choice.text for choice in answer.choices] == [text_of_choice(3, index) for index in range(4)]
    assert hired.engine.most_held == 8
    await eventually(lambda: hired.worker._intake.room() == 2, "room again")
    # Nothing is left behind of what was counted: requests of one row fill it again.
    small = [await ask(broker, "ECHO 1") for _ in range(9)]
    await ends(broker, small)
    await eventually(lambda: hired.worker._intake.room() == 8, "all its room again")


class Sorting(GatedEngine):
    """An engine that sorts what waits: it holds three batches."""

    @property
    def info(self) -> EngineInfo:
        return replace(super().info, window=3)


async def test_a_worker_holds_a_window_of_batches(broker: Broker, hire: Hire) -> None:
    hired = await hire(Sorting(is_open=False, max_batch_size=4), block_ms=50)
    assert hired.worker._intake.room() == 12
    rids = [await ask(broker, "ECHO 1") for _ in range(20)]
    await eventually(lambda: len(hired.engine.added) == 12, "three batches")
    await polled_again(hired)
    assert await states(broker, rids) == {"running": 12, "queued": 8}
    assert hired.worker._intake.room() == 0
    hired.engine.is_open = True
    assert [answer.text for answer in await ends(broker, rids)] == [echo(1)] * 20
    await eventually(lambda: hired.worker._intake.room() == 12, "room again")


async def test_rows_that_are_being_prepared_count_too(broker: Broker, hire: Hire) -> None:
    hired = await hire(GatedEngine(max_batch_size=4))
    slow = await ask(broker, SLOW, n=3)
    await eventually(hired.engine.preparing.is_set, "a prompt that is slow")
    assert hired.worker._intake.room() == 1
    hired.engine.prepared.set()
    assert len((await end(broker, slow)).choices) == 3


async def test_more_choices_than_rows_run_one_after_the_other(broker: Broker, hire: Hire) -> None:
    hired = await hire(GatedEngine(max_batch_size=4))
    rid = await ask(broker, "ECHO 3", n=10, stream=True, logprobs=True, top_logprobs=2)
    answer = await end(broker, rid)
    assert [choice.text for choice in answer.choices] == [text_of_choice(3, index) for index in range(10)]
    assert answer.usage.completion_tokens == 30
    told = [event for event in await events(broker, rid) if isinstance(event, Delta)]
    for choice in answer.choices:
        mine = [event for event in told if event.index == choice.index]
        assert "".join(event.text for event in mine) == choice.text
        assert sum((event.token_ids for event in mine), ()) == choice.token_ids
        assert sum((event.logprobs for event in mine), ()) == choice.logprobs
        assert sum((event.top_logprobs for event in mine), ()) == choice.top_logprobs
    assert (await end(broker, await ask(broker, "ECHO 2"))).text == echo(2)
    await hired.drained()
    assert hired.metric("time_to_first_token_seconds_count") == 2, "once a request"


async def test_a_cancelled_request_frees_all_its_rows(broker: Broker, hire: Hire) -> None:
    hired = await hire(GatedEngine(is_open=False, max_batch_size=4), lease_s=2.0)
    rid = await ask(broker, "ECHO 90", n=4)
    await eventually(lambda: hired.engine.added == [rid], "its turn")
    await broker.cancel([rid], "default")
    await eventually(lambda: hired.worker._intake.room() == 1, "room for another like it")


@pytest.mark.parametrize("kind", ["", "a kind of worker"])
async def test_each_start_and_end_says_whether_it_is_exact(broker: Broker, hire: Hire, kind: str) -> None:
    await hire(GatedEngine(exact=kind))
    rid = await ask(broker, "ECHO 2", stream=True)
    assert (await end(broker, rid)).exact == kind
    first, *_, last = await events(broker, rid)
    assert isinstance(first, Start)
    assert isinstance(last, End)
    assert (first.exact, last.exact) == (kind, kind)
