"""Upkeep: what is removed, swept, trimmed, sent again; and when."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import redis

from hand_worker import HandWorker
from hired import submit
from streamfleet_common import codec
from streamfleet_common.cards import Card, Limits
from streamfleet_common.connections import Connections
from streamfleet_common.errors import InvalidRequest, QueueFull
from streamfleet_common.schemas import Choice
from streamfleet_producer.bulk.batch import Progress
from streamfleet_producer.bulk.batches import Batches
from streamfleet_producer.bulk.connection import connect
from streamfleet_producer.bulk.dead_broker import DeadBroker
from streamfleet_producer.bulk.dead_replay import DeadReplay, Replayed
from streamfleet_producer.bulk.plan import Plan
from streamfleet_producer.bulk.schedule import JsonCron
from streamfleet_producer.bulk.settings import RQ_QUEUE, BulkSettings
from streamfleet_producer.bulk.upkeep import Upkeep

LIMITS = Limits(max_batch_size=1, max_seq_len=1000, max_queue_depth=10, max_request_bytes=9999)


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
async def hand(redis_url: str) -> AsyncIterator[HandWorker]:
    async with HandWorker(redis_url) as made:
        card = Card(worker="w1", queue="q", model="m", tasks=("generate",), limits=LIMITS)
        await made.broker.announce(card, keep_payload=True)
        yield made


@pytest.fixture
async def broker(redis_url: str) -> AsyncIterator[DeadBroker]:
    connections = Connections.open(redis_url)
    yield DeadBroker(connections, "q")
    await connections.close()


def upkeep(redis_url: str, folder: Path) -> Upkeep:
    return Upkeep(BulkSettings(redis_url=redis_url, bulk_folder=str(folder)))


async def bury(hand: HandWorker, *prompts: str) -> None:
    """Let each of these be the death of four workers."""
    for prompt in prompts:
        await submit(hand.broker, [prompt], tenant="t")
        for _ in range(4):
            entries = await hand.broker.read("w1", ("normal", "normal:again", "solo"), 1, block_ms=1000)
            assert await hand.begin(entries)
            await hand.broker.hand_back("w1", crashed=True)


async def test_a_dead_letter_is_sent_again_and_is_dead_no_more(hand: HandWorker, broker: DeadBroker) -> None:
    await bury(hand, "poison")
    (letter,) = await broker.dead_letters()
    sent = await DeadReplay(broker).replay(letter)
    assert await broker.dead_letters() == []
    (work,) = await hand.take()
    assert (work.rid, work.prompt, work.envelope.tenant) == (sent.rid, "poison", "t")
    assert work.rid != letter.rid
    # Somebody who was killed before it was dropped sends it once more: it is the same request.
    assert await DeadReplay(broker).replay(letter) == sent
    assert (await broker.depth()).queued == 0


async def test_letters_are_sent_again_slowly(
    hand: HandWorker, broker: DeadBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    await bury(hand, "a", "b", "c")
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    monkeypatch.setattr("streamfleet_producer.bulk.dead_replay.asyncio.sleep", sleep)
    sent = await DeadReplay(broker, per_minute=30).replay_all(most=2)
    assert (len(sent), slept) == (2, [2.0])
    assert [letter.rid != "" for letter in await broker.dead_letters()] == [True]
    assert {work.prompt for work in await hand.take(2)} == {"a", "b"}


async def test_a_letter_without_its_request_stays(broker: DeadBroker, raw: Any) -> None:
    raw.xadd(broker.keys.dead, {"rid": "r", "why": "w"}, id="1-0")
    raw.xadd(broker.keys.dead, {"rid": "r", "why": "w", "payload": b"\xc1"}, id="2-0")
    for letter in await broker.dead_letters():
        with pytest.raises(InvalidRequest):
            await DeadReplay(broker).replay(letter)
    replayer = DeadReplay(broker)
    assert await replayer.replay_all(most=5) == []
    assert replayer.passed_over == 2
    assert len(await broker.dead_letters()) == 2


async def test_a_full_queue_keeps_its_dead(hand: HandWorker, broker: DeadBroker, raw: Any) -> None:
    await bury(hand, "poison")
    raw.hset(broker.keys.control, "paused", 1)
    (letter,) = await broker.dead_letters()
    with pytest.raises(QueueFull, match="resume"):
        await DeadReplay(broker).replay(letter)
    assert await broker.dead_letters() == [letter]


async def test_what_was_sent_is_told_at_once_whatever_comes_then(
    hand: HandWorker, broker: DeadBroker
) -> None:
    await bury(hand, "a", "b")
    first, second = await broker.dead_letters()
    told: list[Replayed] = []
    replayer = DeadReplay(broker, per_minute=60_000, told=told.append)
    with pytest.raises(InvalidRequest):
        await replayer.replay_each([first, replace(second, payload=None)])
    assert [one.letter for one in told] == [first.id]
    assert {work.rid for work in await hand.take(1)} == {told[0].rid}


async def test_a_tenant_without_room_keeps_nobody_else_from_being_sent_again(
    hand: HandWorker, broker: DeadBroker, raw: Any
) -> None:
    await bury(hand, "first", "second")
    first, second = await broker.dead_letters()
    assert second.payload is not None
    others = codec.decode_envelope(second.payload).changed({"tenant": "other"})
    await broker.drop_dead([second.id])
    payload, _ = codec.encode_envelope(others)
    raw.xadd(broker.keys.dead, {"rid": second.rid, "why": "w", "payload": payload})
    raw.hset(broker.keys.shares, "t", "0|0|1")
    sent = await DeadReplay(broker, per_minute=60_000).replay_all(most=5)
    assert len(sent) == 1
    assert [letter.id for letter in await broker.dead_letters()] == [first.id]


@pytest.mark.parametrize("rate", [0, -1, 10**6])
def test_a_rate_has_bounds(broker: DeadBroker, rate: float) -> None:
    with pytest.raises(InvalidRequest, match="rate"):
        DeadReplay(broker, per_minute=rate)


def test_old_letters_are_trimmed_everywhere(redis_url: str, raw: Any, tmp_path: Path) -> None:
    raw.hset("streamfleet:queues", mapping={"q": 1, "p": 1})
    for queue in "qp":
        raw.xadd(f"{{q:{queue}:0}}:dead", {"rid": "r", "why": "w"}, id="1000-0")
        raw.xadd(f"{{q:{queue}:0}}:dead", {"rid": "r", "why": "w"})
    assert upkeep(redis_url, tmp_path).trim_dead(30) == 2
    assert raw.xlen("{q:q:0}:dead") == 1


def test_queues_are_swept_where_nobody_else_does(redis_url: str, raw: Any, tmp_path: Path) -> None:
    raw.hset("streamfleet:queues", "q", 1)
    raw.zadd("{q:q:0}:open", {"00" + "a" * 32: 1})
    assert upkeep(redis_url, tmp_path).sweep_queues() == 1
    assert raw.zcard("{q:q:0}:open") == 0


def test_files_go_when_they_are_kept_no_longer(redis_url: str, raw: Any, tmp_path: Path) -> None:
    with Batches(redis_url) as jobs:
        for number, (kept_s, status, age_s) in enumerate(
            [(60, "completed", 61), (60, "completed", 59), (0, "completed", 10**6), (60, "in_progress", 61)]
        ):
            source = tmp_path / f"in{number}"
            source.write_text("x\n")
            paths = [tmp_path / f"{kind}{number}" for kind in ("out", "err")]
            batch = jobs.create(source, *paths, fleet_queue="q", files_kept_s=kept_s)
            progress = Progress(status=status)  # type: ignore[arg-type]
            progress.times = {status: batch.created_at - age_s}
            raw.hset(f"rq:job:{batch.id}", "meta", json.dumps(progress.meta()))
    # A worker of other folders leaves them alone.
    assert upkeep(redis_url, tmp_path / "other").remove_files() == 0
    assert upkeep(redis_url, tmp_path).remove_files() == 2
    left = sorted(name for name in os.listdir(tmp_path) if not name.startswith("in"))  # noqa: PTH208
    assert left == ["err1", "err2", "err3", "out1", "out2", "out3"]
    assert upkeep(redis_url, tmp_path).remove_files() == 0


def test_the_cron_does_not_pile_up_what_nobody_works_off(redis_url: str, raw: Any) -> None:
    plan = Plan(warm_up_queues=("q",), replay_queues=("q", "p"))
    with connect(redis_url) as connection:
        for _ in range(3):
            enqueued = JsonCron(connection, RQ_QUEUE, plan).enqueue_jobs()
            assert len(enqueued) == 6
    waiting = sorted(name.decode() for name in raw.lrange(f"rq:queue:{RQ_QUEUE}", 0, -1))
    assert waiting == [
        "upkeep_remove-files",
        "upkeep_replay-dead-p",
        "upkeep_replay-dead-q",
        "upkeep_sweep-queues",
        "upkeep_trim-dead",
        "upkeep_warm-up-q",
    ]


async def test_a_queue_is_asked_for_next_to_nothing(redis_url: str, hand: HandWorker, tmp_path: Path) -> None:
    choice = Choice(text="x", token_ids=(1,), finish_reason="length")
    async with hand.serving(lambda _: {"choices": (choice,)}) as asked:
        assert await asyncio.to_thread(upkeep(redis_url, tmp_path).warm_up, "q") == 1
    (request,) = asked
    assert (request.kind, request.max_tokens) == ("generate", 1)
