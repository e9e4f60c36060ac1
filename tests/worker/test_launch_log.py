"""Which requests shared a batch: told to Redis, and never waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, cast

import pytest
import redis

from gated_engine import GatedEngine
from hired import Hired, ends, eventually_so, submit
from stopping import stopped
from streamfleet_common.batch_notes import BatchNote, BatchNotes
from streamfleet_common.broker import Broker
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_worker import launch_log
from streamfleet_worker.engine.base import Launch
from streamfleet_worker.launch_log import MOST_A_ROUND, Batches, LaunchLog, batch_id, batch_of

Hire = Callable[..., Awaitable[Hired]]


class Notebook:
    """Takes notes, or is away; `wrote` is set after each try."""

    def __init__(self) -> None:
        self.is_away = False
        self.rounds: list[list[BatchNote]] = []
        self.wrote = asyncio.Event()

    async def note_batches(self, notes: list[BatchNote]) -> None:
        self.rounds.append(notes)
        self.wrote.set()
        if self.is_away:
            raise BrokerUnavailable("away")

    async def told(self) -> list[BatchNote]:
        async with asyncio.timeout(60):
            await self.wrote.wait()
        self.wrote.clear()
        return self.rounds[-1]


def launch(number: int, requests: int = 1) -> Launch:
    return Launch(number, "full", 4, 40, 0.126, tuple((f"{rid:034x}", 1) for rid in range(requests)))


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch_log, "ROUND_S", 0.001)


def log_of(notebook: Notebook) -> tuple[LaunchLog, asyncio.Task[None]]:
    made = LaunchLog(cast(BatchNotes, notebook), "w1")
    return made, asyncio.create_task(made.run())


async def test_a_round_is_told_at_once_and_no_more_than_it_may_hold() -> None:
    notebook = Notebook()
    log, running = log_of(notebook)
    for number in range(3 * MOST_A_ROUND):
        log.take([launch(number)])
    assert [note.id for note in await notebook.told()] == [f"w1/{number}" for number in range(MOST_A_ROUND)]
    log.take([launch(7, requests=100)])
    (note,) = await notebook.told()
    assert (note.id, note.requests, len(note.rids)) == ("w1/7", 100, 64)
    assert len(notebook.rounds) == 2
    await stopped(running)


async def test_what_nobody_wanted_is_not_told() -> None:
    notebook = Notebook()
    log, running = log_of(notebook)
    log.take([launch(1, requests=0), launch(2)])
    assert [note.id for note in await notebook.told()] == ["w1/2"]
    await stopped(running)


async def test_it_goes_on_after_redis_was_away_and_drops_what_it_had() -> None:
    notebook = Notebook()
    log, running = log_of(notebook)
    notebook.is_away = True
    log.take([launch(1)])
    await notebook.told()
    notebook.is_away = False
    log.take([launch(2)])
    assert [note.id for note in await notebook.told()] == ["w1/2"]
    await stopped(running)


def test_what_answers_say_of_a_batch() -> None:
    batch = batch_of("w1", launch(9))
    assert batch.model_dump() == {"id": "w1/9", "size": 4, "padded_ratio": 0.126, "reason": "full"}
    assert type(batch).model_validate(batch.model_dump()) == batch
    assert len(batch_id("w" * 500, launch(10**12))) <= 200


async def test_answers_and_notes_of_a_real_worker_agree(broker: Broker, raw: redis.Redis, hire: Hire) -> None:
    hired = await hire(GatedEngine(max_batch_size=2, max_delay_s=60.0))
    rids = await submit(broker, ["ECHO 2"] * 2)
    first, second = await ends(broker, rids)
    assert first.batch is not None
    assert first.batch == second.batch
    assert (first.batch.id, first.batch.size, first.batch.reason) == ("w1/1", 2, "full")
    notes: list[BatchNote] = []

    async def noted() -> bool:
        entries: Any = await asyncio.to_thread(raw.xrange, "{q:q:0}:batches")
        notes[:] = [note for _, fields in entries if (note := BatchNote.parse(fields[b"b"])) is not None]
        return bool(notes)

    await eventually_so(noted, "a note")
    (note,) = notes
    assert (note.id, note.reason, note.size, note.requests) == ("w1/1", "full", 2, 2)
    assert set(note.rids) == set(rids)
    assert hired.metric("batch_launch_total", reason="full") == 1


async def test_a_draining_worker_waits_for_no_company(broker: Broker, hire: Hire) -> None:
    hired = await hire(GatedEngine(max_batch_size=4, max_delay_s=3600.0), drain_timeout_s=60.0)
    rids = await submit(broker, ["ECHO 2"])
    await eventually_so(lambda: _true(hired.engine.room().waiting == 1), "a row that waits")
    await hired.drained()
    (end,) = await ends(broker, rids)
    assert end.batch is not None
    assert (end.state, end.batch.reason) == ("done", "drain")


async def _true(value: bool) -> bool:
    return value


def test_answers_of_one_batch_share_what_is_said_of_it() -> None:
    batches, first, second = Batches(), launch(1), launch(2)
    told = [batches.of("w1", one) for one in (first, first, second, None, second)]
    assert [batch and batch.id for batch in told] == ["w1/1", "w1/1", "w1/2", None, "w1/2"]
    assert told[0] is told[1]
