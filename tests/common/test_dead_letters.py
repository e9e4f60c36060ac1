"""Dead letters: read, dropped, trimmed; and what stands in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from hand_worker import HandWorker
from hired import submit
from streamfleet_common import codec
from streamfleet_common.cards import Card, Limits
from streamfleet_common.connections import Connections
from streamfleet_common.dead_letters import DeadLetters
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.keys import Keys


@pytest.fixture
async def letters(connections: Connections) -> DeadLetters:
    return DeadLetters(connections, "q")


@pytest.fixture
async def worker(redis_url: str) -> AsyncIterator[HandWorker]:
    async with HandWorker(redis_url) as made:
        yield made


async def kill_thrice(worker: HandWorker) -> str:
    """A request under which workers die until it is buried: in company, for all we know, then alone."""
    (rid,) = await submit(worker.broker, ["poison"], tenant="t", lane="bulk")
    for _ in range(4):
        entries = await worker.broker.read(worker.name, ("bulk", "bulk:again", "solo"), 1, block_ms=1000)
        assert await worker.begin(entries)
        await worker.broker.hand_back(worker.name, crashed=True)
    return rid


async def test_a_letter_says_of_whom_it_is(letters: DeadLetters, worker: HandWorker) -> None:
    rid = await kill_thrice(worker)
    (letter,) = await letters.dead_letters()
    assert (letter.rid, letter.tenant, letter.lane, letter.worker) == (rid, "t", "bulk", "w1")
    assert (letter.attempts, letter.crashes, letter.solo_losses) == (4, 4, 2)
    assert letter.why
    assert letter.payload is None
    assert letter.size > 40
    assert letter.accepted_at_ms <= letter.buried_at_ms
    assert await letters.dead_letter(letter.id) == letter


async def test_the_payload_is_there_where_workers_keep_it(letters: DeadLetters, worker: HandWorker) -> None:
    limits = Limits(max_batch_size=1, max_seq_len=1000, max_queue_depth=10, max_request_bytes=9999)
    card = Card(worker="w1", queue="q", model="m", tasks=("generate",), limits=limits)
    await worker.broker.announce(card, keep_payload=True)
    rid = await kill_thrice(worker)
    (letter,) = await letters.dead_letters()
    assert letter.payload is not None
    assert len(letter.payload) == letter.size
    assert codec.decode_envelope(letter.payload).rid == rid


async def test_pages_drops_and_trims(letters: DeadLetters, raw: Any, keys: Keys) -> None:
    ids = [f"{at}-0" for at in (1000, 2000, 3000, 4000)]
    for number, place in enumerate(ids):
        raw.xadd(keys.dead, {"rid": f"{number}", "why": "w"}, id=place)
    assert [one.id for one in await letters.dead_letters(count=2)] == ids[:2]
    assert [one.id for one in await letters.dead_letters(after=ids[1])] == ids[2:]
    assert await letters.drop_dead([ids[1], "9-9"]) == 1
    assert await letters.dead_letter(ids[1]) is None
    assert await letters.trim_dead(3500) == 2
    assert [one.id for one in await letters.dead_letters()] == ids[3:]


async def test_a_stray_entry_is_a_letter_too(letters: DeadLetters, raw: Any, keys: Keys) -> None:
    raw.xadd(keys.dead, {"rid": b"\xff", "why": "no record", "attempts": "x"}, id="5-0")
    (letter,) = await letters.dead_letters()
    assert (letter.rid, letter.attempts, letter.tenant) == ("\ufffd", 0, "")


@pytest.mark.parametrize("id", ["", "5", "-", "+", "(1-1", "1-1 2-2", "1" * 30 + "-0"])
async def test_what_is_no_id_is_refused(letters: DeadLetters, id: str) -> None:  # noqa: A002
    with pytest.raises(InvalidRequest):
        await letters.dead_letter(id)
