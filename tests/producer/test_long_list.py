"""Lists in several requests, when the queue is full of other people's."""

from __future__ import annotations

from typing import Any

import pytest

from streamfleet_common.errors import QueueFull
from streamfleet_common.one_shot import EmbedRequest
from streamfleet_common.schemas import End, Request
from streamfleet_producer.long_list import MAX_REFUSALS, LongList, size_of


class Stub:
    """Answers with the texts' number, and refuses the submissions that it is told to."""

    def __init__(self, refused: range, retry_after: float = 0.0) -> None:
        self.refused = refused
        self.retry_after = retry_after
        self.asked = 0

    async def run(self, request: Request, **_: Any) -> End:
        self.asked += 1
        if self.asked - 1 in self.refused:
            raise QueueFull("full", limit=8, retry_after=self.retry_after, reason="requests", position=1)
        assert isinstance(request, EmbedRequest)
        return End(state="done", outputs=(len(request.texts),))

    async def max_bytes(self, request: Request) -> int:
        return 256 * 1024


def texts(count: int) -> LongList[str]:
    """A list of which one request holds a single text."""
    return LongList([f"t{n}" for n in range(count)], lambda part: EmbedRequest(texts=part), size_of, most=1)


async def test_a_list_that_has_answers_waits_while_others_fill_the_queue() -> None:
    stub = Stub(range(35, 50))
    answered = await texts(80).answers(stub, None, {})
    assert [part.start for part in answered] == list(range(80))
    assert stub.asked == 80 + 15


async def test_it_asks_so_often_and_no_more() -> None:
    stub = Stub(range(35, 10_000))
    with pytest.raises(QueueFull):
        await texts(80).answers(stub, None, {})
    # Each of the 45 others once at most; then one asks again alone.
    assert 35 + MAX_REFUSALS < stub.asked <= 35 + 45 + MAX_REFUSALS + 1


async def test_one_that_has_none_is_told_at_once() -> None:
    stub = Stub(range(10_000))
    with pytest.raises(QueueFull):
        await texts(3).answers(stub, None, {})
    assert stub.asked == 3
