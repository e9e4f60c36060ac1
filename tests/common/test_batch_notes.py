"""Notes of batches: as they lie in Redis, written and found again."""

from __future__ import annotations

from typing import Any

import pytest

from streamfleet_common.batch_notes import LIFE_MS, MOST_RIDS, PAGE, BatchNote, BatchNotes
from streamfleet_common.broker import Broker

RIDS = tuple(f"{number:034x}" for number in range(100))


def note(number: int, *rids: str) -> BatchNote:
    return BatchNote(f"host:7:ab/{number}", "full", 32, 0.25, len(rids), rids)


def test_as_docs_say() -> None:
    data = note(3, RIDS[1], RIDS[2]).encode()
    assert data == b"host:7:ab/3|full|32|0.2500|2|" + b"\0" * 16 + b"\1" + b"\0" * 16 + b"\2"
    assert BatchNote.parse(data, 5) == BatchNote("host:7:ab/3", "full", 32, 0.25, 2, RIDS[1:3], 5)


def test_ids_are_read_whatever_bytes_they_have() -> None:
    rid = "7c" * 17  # 17 bars
    assert BatchNote.parse(note(1, rid).encode()) == note(1, rid)


def test_of_many_requests_some_are_named_and_all_counted() -> None:
    found = BatchNote.parse(note(1, *RIDS).encode())
    assert found is not None
    assert (found.requests, found.rids) == (100, RIDS[:MOST_RIDS])


@pytest.mark.parametrize("data", [b"", b"a|b", b"a|full|x|0.1|1|", b"\xff|full|1|0|1|", b"a|full|1|7|1|"])
def test_what_is_none(data: bytes) -> None:
    assert BatchNote.parse(data) is None


async def test_it_is_found_among_others_by_time_and_name(broker: Broker, raw: Any) -> None:
    assert isinstance(broker, BatchNotes)
    raw.xadd("{q:q:0}:batches", {"something": "else"})
    await broker.note_batches([note(number, RIDS[number % 100]) for number in range(PAGE + 10)])
    (first, _), *_ = raw.xrange("{q:q:0}:batches", count=1)
    (last, _), *_ = raw.xrevrange("{q:q:0}:batches", count=1)
    times = {"since_ms": int(first.split(b"-")[0]), "until_ms": int(last.split(b"-")[0])}
    found = await broker.batch_note(f"host:7:ab/{PAGE + 5}", **times)
    assert found is not None
    assert found.rids == (RIDS[(PAGE + 5) % 100],)
    assert times["since_ms"] <= found.noted_at_ms <= times["until_ms"]
    assert await broker.batch_note("host:7:ab/9999", **times) is None
    assert await broker.batch_note("host:7:ab/1", since_ms=0, until_ms=times["since_ms"] - 1) is None
    assert 0 < raw.pttl("{q:q:0}:batches") <= LIFE_MS


async def test_the_newest_are_kept(broker: Broker, raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamfleet_common.batch_notes.MOST_NOTES", 100)
    for _ in range(5):
        await broker.note_batches([note(number, RIDS[0]) for number in range(100)])
    # Redis drops whole nodes of a hundred entries.
    assert 100 <= raw.xlen("{q:q:0}:batches") <= 300
