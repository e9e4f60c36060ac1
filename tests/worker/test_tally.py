"""What workers tell their supervisor, over the socket and in sum."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator

import pytest

from eventually import eventually
from streamfleet_worker.metrics import Metrics
from streamfleet_worker.tally import Family, Series, Tally, Totals
from streamfleet_worker.tally_client import MAX_BYTES, TallyClient
from streamfleet_worker.tally_server import TallyServer

LIMIT_S = 60.0


def counted(value: float, *, name: str = "c", kind: str = "counter", **labels: str) -> Tally:
    series = (f"{name}_total", tuple(labels.items()))
    return Tally(None, None, [Family(name, kind, "words", {series: value})])


def sums(totals: Totals) -> dict[Series, float]:
    return {series: value for family in totals.families() for series, value in family.samples.items()}


def test_a_tally_crosses_as_it_is() -> None:
    metrics = Metrics("q", "1", "3")
    metrics.delivered([])
    metrics.more_tokens(0.5, 2)
    tally = Tally.of("it hangs", None, metrics.registry.collect())
    assert Tally.read(tally.packed()) == tally
    (gaps,) = [family for family in tally.families if family.name.endswith("inter_token_latency_seconds")]
    assert gaps.kind == "histogram"
    assert gaps.samples[f"{gaps.name}_count", (("queue", "q"),)] == 2
    assert gaps.samples[f"{gaps.name}_bucket", (("queue", "q"), ("le", "0.5"))] == 2


def test_sums_go_over_all_that_count_and_keep_what_the_dead_have_counted() -> None:
    totals = Totals()
    series, other = ("c_total", (("reason", "a"),)), ("c_total", (("reason", "b"),))
    totals.take("one", counted(5, reason="a"))
    totals.take("two", counted(7, reason="a"))
    assert sums(totals) == {series: 12}
    totals.take("one", counted(6, reason="a"))
    assert sums(totals) == {series: 13}
    totals.end("one")
    totals.end("one")
    totals.end("nobody")
    assert sums(totals) == {series: 13}
    totals.take("three", counted(0, reason="a"))
    totals.take("four", counted(2, reason="b"))
    assert sums(totals) == {series: 13, other: 2}


def test_what_is_measured_has_no_sum() -> None:
    totals = Totals()
    totals.take("one", counted(5, kind="gauge"))
    totals.take("one", counted(5, kind="info"))
    assert sums(totals) == {}


class Pair:
    """Both ends of the socket. The worker's count is how often it was asked, unless it holds."""

    def __init__(self) -> None:
        wire, theirs = socket.socketpair()
        self.theirs = theirs
        self.asked = 0
        self.going = threading.Event()
        self.going.set()
        self.server = TallyServer(theirs, self._read)
        self.heard: list[Tally] = []
        self.client = TallyClient(wire, self.heard.append)

    def _read(self) -> Tally:
        self.asked += 1
        assert self.going.wait(LIMIT_S)
        return counted(self.asked)


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    yield made
    made.going.set()
    made.client.close()
    made.theirs.close()


async def test_it_is_asked_and_answers(pair: Pair) -> None:
    pair.server.start()
    assert await pair.client.ask(LIMIT_S) == counted(1)
    both = await asyncio.gather(pair.client.ask(LIMIT_S), pair.client.ask(LIMIT_S))
    assert [*both] == [counted(2)] * 2, "who asks meanwhile gets the same"
    assert pair.heard == [counted(1), counted(2)]


async def test_who_does_not_answer_is_not_asked_again_before_it_has(pair: Pair) -> None:
    pair.server.start()
    pair.going.clear()
    for _ in range(3):
        assert await pair.client.ask(0.0) is None
    pair.going.set()
    await eventually(lambda: len(pair.heard) == 1, "the late answer")
    assert pair.asked == 1
    assert await pair.client.ask(LIMIT_S) == counted(2)


async def test_the_last_tally_comes_unasked(pair: Pair) -> None:
    pair.server.start()
    pair.server.close()
    pair.client.hear()
    assert pair.heard == [counted(1)]
    assert await pair.client.ask(LIMIT_S) is None
    pair.client.hear()
    pair.client.close()


async def test_a_death_is_no_answer(pair: Pair) -> None:
    asking = asyncio.create_task(pair.client.ask(LIMIT_S))
    await asyncio.sleep(0)
    pair.theirs.close()
    assert await asking is None
    assert pair.heard == []


async def test_parts_of_tallies_are_put_together_and_what_is_none_is_not_waited_for(pair: Pair) -> None:
    packed = counted(4).packed()
    framed = len(packed).to_bytes(4) + packed
    for byte in framed * 2:
        pair.theirs.send(bytes([byte]))
        pair.client.hear()
    assert pair.heard == [counted(4)] * 2
    asking = asyncio.create_task(pair.client.ask(LIMIT_S))
    await asyncio.sleep(0)
    pair.theirs.send(MAX_BYTES.to_bytes(4))
    assert await asking is None
    assert len(pair.heard) == 2
