"""The live view does all it can with the rights of an operator, and the server refuses it nothing."""

from __future__ import annotations

import asyncio
import json

import pytest

from broker_parts import card, submission
from command import PROGRAM, environment, streamfleet
from deploy.guarded import Guarded
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_producer.cli.top_reading import FleetReader
from terminal_process import on_terminal

HOUR_MS = 3_600_000
DEAD = "{q:q:0}:dead"
CONTROL = "{q:q:0}:control"


async def _begin(guarded: Guarded) -> None:
    """A queue with a worker, three requests that wait, and a dead letter."""
    connections = Connections.open(guarded.url("default"))
    try:
        broker = Broker(connections, "q", script_flags=True)
        await broker.create_groups()
        await broker.announce(card("w1"), life_ms=HOUR_MS)
        await broker.submit([submission() for _ in range(3)])
    finally:
        await connections.close()
    guarded.raw.xadd(DEAD, {"rid": "00" + "a" * 32, "why": "workers die of it", "tenant": "acme"})


async def test_an_operator_may_read_all_that_is_shown(guarded: Guarded) -> None:
    await _begin(guarded)
    guarded.forget()
    connections = Connections.open(guarded.url("operator"))
    try:
        reader = FleetReader(connections, ["q"])
        await reader.check()
        reading = await reader.read()
    finally:
        await connections.close()
    assert guarded.refusals() == []
    assert (reading.unread, reading.refusal) == (0, None)
    (queue,) = reading.queues
    assert (queue.queued, queue.dead_letters, queue.ready) == (3, 1, 1)
    assert queue.oldest_s["normal"] >= 0
    assert [member.card.worker for member in reading.workers] == ["w1"]


@pytest.mark.slow
def test_an_operator_may_do_all_that_keys_do(guarded: Guarded) -> None:
    asyncio.run(_begin(guarded))
    guarded.forget()
    url = guarded.url("operator")
    found = streamfleet("top", "--once", "--json", "--redis-url", url)
    document = json.loads(found.stdout)
    assert document["redis"].startswith("redis://operator:***@")
    assert document["queues"][0]["queued"] == 3
    with on_terminal(*PROGRAM, "top", "--redis-url", url, env=environment()) as top:
        top.wait_for_line("QUEUE", "WAIT")
        top.press("py")
        top.wait_for_line("queue q is paused")
        top.press("\tDy")
        top.wait_for_line("asked to drain", "w1")
        top.press("d")
        top.wait_for_line("workers die of it")
        top.press("q")
        assert top.end() == 0
        assert "pass-of-operator" not in top.written
    assert guarded.raw.hget(CONTROL, "paused") == b"1"
    assert guarded.raw.hexists(CONTROL, "drain:w1")
    assert guarded.refusals() == []
