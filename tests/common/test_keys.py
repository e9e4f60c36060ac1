"""The names in Redis, as other languages and operators know them."""

from __future__ import annotations

from datetime import date

import pytest
from redis.crc import key_slot

from streamfleet_common.keys import AGAIN, GROUP, LETTERS, QUEUES, STREAMS, Keys
from streamfleet_common.schemas import LANES, new_rid

RID = "07" + "0123456789abcdef" * 2


def test_names() -> None:
    keys = Keys("chat", 7)
    assert keys.tag == "{q:chat:7}"
    assert keys.open == "{q:chat:7}:open"
    assert keys.dead == "{q:chat:7}:dead"
    assert keys.workers == "{q:chat:7}:workers"
    assert keys.control == "{q:chat:7}:control"
    assert keys.later == "{q:chat:7}:later"
    assert keys.sweep == "{q:chat:7}:sweep"
    assert keys.stream("bulk") == "{q:chat:7}:s:bulk"
    assert keys.stream("bulk:again") == "{q:chat:7}:s:bulk:again"
    assert keys.stream("solo") == "{q:chat:7}:s:solo"
    assert keys.stream("bulk", 5) == "{q:chat:7}:s:bulk:5"
    assert keys.stream("bulk", 0) == "{q:chat:7}:s:bulk"
    assert keys.tenants == "{q:chat:7}:tenants"
    assert keys.shares == "{q:chat:7}:shares"
    assert keys.usage(date(2026, 3, 9)) == "{q:chat:7}:usage:20260309"
    assert keys.record(RID) == f"{{q:chat:7}}:r:{RID}"
    assert keys.log(RID) == f"{{q:chat:7}}:ev:{RID}"
    assert keys.channel("acme", RID) == f"{{q:chat:7}}:c:acme:{RID}"
    assert GROUP == "w"
    assert QUEUES == "streamfleet:queues"


@pytest.mark.parametrize("queue", ["a", "A.b_c-9", "q" * 64, "-"])
@pytest.mark.parametrize("shard", [0, 1, 255])
def test_all_names_of_a_shard_lie_in_one_slot(queue: str, shard: int) -> None:
    keys = Keys(queue, shard)
    names = {keys.tag, keys.open, keys.later, keys.sweep, keys.dead, keys.workers, keys.control}
    names |= {keys.stream(stream) for stream in LETTERS}
    names |= {keys.record(RID), keys.log(RID), keys.channel("a.b", RID)}
    names |= {keys.stream("high", 63), keys.tenants, keys.shares, keys.usage(date(2026, 3, 9))}
    assert len(names) == 7 + 7 + 3 + 4
    assert len({key_slot(name.encode()) for name in names}) == 1


def test_queues_and_shards_do_not_share_names() -> None:
    tags = [Keys(queue, shard).tag for queue in ("a", "a:1", "b") for shard in (0, 1, 10)]
    assert len(set(tags)) == len(tags)


@pytest.mark.parametrize("shard", [0, 1, 16, 255])
def test_a_rid_names_its_shard(shard: int) -> None:
    assert int(new_rid(shard)[:2], 16) == shard


def test_every_stream_has_a_letter_of_its_own() -> None:
    assert len(set(LETTERS.values())) == len(LETTERS) == 7
    assert {letter: STREAMS[letter] for letter in "hnbHNBS"} == STREAMS
    for lane, again in zip(LANES, AGAIN, strict=True):
        assert again == f"{lane}:again"
        # The scripts find the way back from a lane by it.
        assert LETTERS[again] == LETTERS[lane].upper()
