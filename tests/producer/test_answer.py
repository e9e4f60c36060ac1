"""When an answer asks the record, told without Redis."""

from __future__ import annotations

import asyncio
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from streamfleet_common import codec
from streamfleet_common.errors import BrokerUnavailable, DeadlineExceeded, IncompleteGeneration
from streamfleet_common.frames import Frame
from streamfleet_common.records import Record
from streamfleet_common.schemas import End
from streamfleet_producer.answer import Answer
from streamfleet_producer.link import Patience
from streamfleet_producer.watch import Watch

OPEN = Record(
    state="running",
    epoch=1,
    tenant="default",
    accepted_at_ms=1,
    started_at_ms=2,
    attempts=1,
    crashes=0,
    solo_losses=0,
    deadline_at_ms=600_001,
    owner="w",
    digest="d",
    end=None,
)
ENDED = dataclasses.replace(
    OPEN,
    state="done",
    epoch=2,
    deadline_at_ms=0,
    owner="",
    end=Frame(2, 1, codec.encode(End(state="done")), (1, 2, 3, 1)),
)


class Records:
    """Questions to the record, answered by the test."""

    def __init__(self) -> None:
        self.asked: list[asyncio.Future[Record | None]] = []

    def put(self, rid: str) -> asyncio.Future[Record | None]:
        self.asked.append(asyncio.get_running_loop().create_future())
        return self.asked[-1]


class Setting:
    """An answer and all that it touches; the clock stands at `time_s`."""

    def __init__(self, outage_s: float = 30) -> None:
        self.time_s = 0.0
        self.records = Records()
        link: Any = SimpleNamespace(
            now=lambda: self.time_s,
            records=self.records,
            watch=Watch(3, lambda: None),
            patience=Patience(3, 5, outage_s),
            is_closed=False,
            future=asyncio.get_running_loop().create_future,
        )
        self.answer = Answer(link, "00" + "1" * 32)

    def arm(self) -> None:
        self.answer.arm(deadline_at=1e9, late_at=1e9, doubtful=False)

    async def tell(self, number: int, record: Record | Exception | None) -> None:
        future = self.records.asked[number]
        if isinstance(record, Exception):
            future.set_exception(record)
        else:
            future.set_result(record)
        await asyncio.sleep(0)


async def test_nothing_is_asked_before_the_request_exists() -> None:
    setting = Setting()
    setting.answer.missed()
    assert setting.records.asked == []
    setting.arm()
    assert len(setting.records.asked) == 1  # the doubt was kept


async def test_a_doubt_that_comes_while_asking_is_asked_again() -> None:
    setting = Setting()
    setting.arm()
    setting.answer.missed()
    setting.answer.missed()
    assert len(setting.records.asked) == 1
    await setting.tell(0, OPEN)
    assert len(setting.records.asked) == 2
    await setting.tell(1, OPEN)
    assert len(setting.records.asked) == 2
    setting.answer.silent()
    await setting.tell(2, ENDED)
    end = await setting.answer.future
    assert (end.state, end.attempt, end.ended_at_ms) == ("done", 1, 3)


async def test_a_record_that_is_gone_is_an_incomplete_answer() -> None:
    setting = Setting()
    setting.arm()
    setting.answer.silent()
    await setting.tell(0, None)
    with pytest.raises(IncompleteGeneration):
        await setting.answer.future


async def test_redis_may_be_away_for_a_while() -> None:
    setting = Setting(outage_s=30)
    setting.arm()
    for number, now in enumerate((0.0, 10.0, 29.0)):
        setting.time_s = now
        setting.answer.silent()
        await setting.tell(number, BrokerUnavailable("away"))
    assert not setting.answer.future.done()
    setting.answer.silent()
    await setting.tell(3, OPEN)  # back, and away once more: the time begins anew
    for number, now in enumerate((40.0, 69.0, 70.0), start=4):
        assert not setting.answer.future.done()
        setting.time_s = now
        setting.answer.silent()
        await setting.tell(number, BrokerUnavailable("away"))
    with pytest.raises(BrokerUnavailable):
        await setting.answer.future


@pytest.mark.parametrize("last", [OPEN, BrokerUnavailable("away")])
async def test_the_record_has_the_last_word_on_being_late(last: Record | Exception) -> None:
    setting = Setting()
    setting.arm()
    setting.answer.late()
    assert not setting.answer.future.done()
    await setting.tell(0, last)
    with pytest.raises(DeadlineExceeded):
        await setting.answer.future


async def test_an_end_in_time_beats_being_late() -> None:
    setting = Setting()
    setting.arm()
    setting.answer.late()
    await setting.tell(0, ENDED)
    assert (await setting.answer.future).state == "done"
