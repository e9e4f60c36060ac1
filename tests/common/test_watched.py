"""What those who may read no request can still watch: since when somebody waits, and how many tokens run."""

from __future__ import annotations

from typing import Any
from unittest.mock import ANY

import pytest

from broker_parts import START, altered, begin, finish, retry, submission
from server_view import RID, T
from streamfleet_common.broker import Broker
from streamfleet_common.schemas import Retry

COST = submission().tokens


def oldest(raw: Any, lane: str) -> int | None:
    noted = raw.hget(f"{T}:sweep", f"oldest:{lane}")
    return None if noted is None else int(noted)


def running(raw: Any) -> int:
    return int(raw.hget(f"{T}:tenants", "*|r") or 0)


async def accepted(broker: Broker, rid: str) -> int:
    (record,) = await broker.status([rid], "default")
    assert record is not None
    return record.accepted_at_ms


async def test_a_submission_notes_that_it_is_the_oldest_of_its_lane(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID), submission(lane="bulk")])
    first = await accepted(broker, RID)
    assert [oldest(raw, lane) for lane in ("high", "normal", "bulk")] == [None, first, first]
    await broker.submit([submission(lane="high"), submission()])
    assert oldest(raw, "normal") == first
    assert oldest(raw, "high") == int(raw.xinfo_stream(f"{T}:s:high")["first-entry"][0].partition(b"-")[0])


async def test_after_a_sweep_that_found_nobody_the_next_one_notes_itself(broker: Broker, raw: Any) -> None:
    await begin(broker, submission())
    await broker.sweep()
    assert oldest(raw, "normal") == 0
    await broker.submit([submission(rid=RID)])
    assert oldest(raw, "normal") == await accepted(broker, RID)


async def test_what_came_back_is_as_old_as_its_acceptance(broker: Broker, raw: Any) -> None:
    (one,) = await begin(broker, submission(rid=RID))
    since = one.accepted_at_ms
    await broker.sweep()
    assert oldest(raw, "normal") == 0
    await broker.release([one])
    await broker.submit([submission()])
    await broker.sweep()
    assert oldest(raw, "normal") == since


async def test_a_stream_that_nobody_has_ever_read_has_an_oldest(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    await broker.sweep()
    assert oldest(raw, "normal") == await accepted(broker, RID)


async def test_what_is_refused_notes_nothing(broker: Broker, raw: Any) -> None:
    raw.hset(f"{T}:control", "max_queue_depth", 1)
    await broker.submit([submission()])
    raw.hdel(f"{T}:sweep", "oldest:normal")
    await broker.submit([submission()])
    assert oldest(raw, "normal") is None


@pytest.mark.parametrize("way", ["finish", "cancel", "release", "retry", "retry later", "hand back"])
async def test_tokens_run_from_the_start_until_the_request_leaves(broker: Broker, raw: Any, way: str) -> None:
    policy = Retry(backoff_ms=60_000) if way == "retry later" else Retry()
    one, _ = await begin(broker, submission(rid=RID, retry=policy), submission(max_tokens=8))
    other = submission(max_tokens=8).tokens
    await broker.submit([submission()])  # waits
    assert running(raw) == COST + other
    if way == "finish":
        await broker.finish([finish(one)])
    elif way == "cancel":
        await broker.cancel([RID], "default")
    elif way == "release":
        await broker.release([one])
    elif way.startswith("retry"):
        await broker.finish([retry(one)])
    else:
        await broker.hand_back("w1", crashed=True)
    assert running(raw) == (0 if way == "hand back" else other)
    assert raw.hexists(f"{T}:tenants", "*|r") == (way != "hand back")


async def test_a_start_that_is_asked_for_again_counts_once(broker: Broker, raw: Any) -> None:
    (one,) = await begin(broker, submission(rid=RID))
    assert await broker.start("w1", [one.entry], START) == [altered(one, now_ms=ANY)]
    assert running(raw) == COST
