"""The exporter tells all it can as a user of the role `metrics`, who can read no payload."""

from __future__ import annotations

import pytest
import redis

from broker_parts import card, submission
from deploy.guarded import Guarded
from exporter_page import Exporter, series
from hand_worker import HandWorker
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections

T = "{q:q:0}"
SECRET = "what nobody else may read"
RUNNING, QUEUED = 2, 3


async def test_as_its_user_it_reads_the_figures_and_no_payload(guarded: Guarded) -> None:
    connections = Connections.open(guarded.node.url)
    anybody = Broker(connections, "q")
    async with HandWorker(guarded.url("worker")) as hand:
        await hand.broker.announce(card(max_queue_depth=9), sub_lanes=2)
        sent = [submission(SECRET, stream=True) for _ in range(RUNNING + QUEUED)]
        await anybody.submit(sent)
        await hand.take(RUNNING)
        await anybody.sweep()
        await _refused_all(guarded, sent[0].envelope.rid)
        guarded.forget()
        async with Exporter(guarded.url("metrics")) as exporter:
            page = await exporter.page()
            seen = await exporter.samples()
            assert (await exporter.http.get("/readyz")).status_code == 200
    await connections.close()

    assert seen[series("queue_depth", queue="q", state="queued")] == QUEUED
    assert seen[series("queue_depth", queue="q", state="running")] == RUNNING
    assert seen[series("queue_oldest_age_seconds", queue="q", lane="normal")] >= 0
    assert seen[series("queue_workers", queue="q", state="ready")] == 1
    assert seen[series("broker_memory_used_bytes")] > 0
    assert seen[series("exporter_queues_unread", reason="refused")] == 0
    assert SECRET not in page
    assert guarded.refusals() == []


async def _refused_all(guarded: Guarded, rid: str) -> None:
    """As the exporter's user, try what would show a prompt or an answer; each is there to be read."""
    streams = [name for name in guarded.raw.scan_iter(f"{T}:s:*") if guarded.raw.xlen(name)]
    assert streams
    assert SECRET.encode() in str(guarded.raw.xrange(streams[0])).encode()
    tries: list[tuple[str | bytes | int, ...]] = [
        *(("XRANGE", name, "-", "+") for name in streams),
        *(("XREVRANGE", name, "+", "-") for name in streams),
        *(("XREAD", "STREAMS", name, 0) for name in streams),
        *(("XREADGROUP", "GROUP", "w", "me", "STREAMS", name, ">") for name in streams),
        *(("XCLAIM", name, "w", "me", 0, "1-1") for name in streams),
        *(("XAUTOCLAIM", name, "w", "me", 0, "0") for name in streams),
        *(("XINFO", "STREAM", name, "FULL") for name in streams),
        *(("GET", f"{T}:r:{rid}"), ("MGET", f"{T}:r:{rid}"), ("GETRANGE", f"{T}:r:{rid}", 0, -1)),
        *(("XRANGE", f"{T}:ev:{rid}", "-", "+"), ("XRANGE", f"{T}:dead", "-", "+")),
        *(("DUMP", streams[0]), ("EVAL", f"return redis.call('XRANGE', '{T}:s:normal', '-', '+')", 0)),
    ]
    with redis.Redis.from_url(guarded.url("metrics"), protocol=3) as user:
        for words in tries:
            with pytest.raises(redis.exceptions.NoPermissionError):
                user.execute_command(*words)


async def test_a_queue_that_it_may_not_read_is_counted_and_the_others_are_told(guarded: Guarded) -> None:
    connections = Connections.open(guarded.node.url)
    await Broker(connections, "q").announce(card())
    await Broker(connections, "other").announce(card())
    async with Exporter(guarded.url("metrics")) as exporter:
        seen = await exporter.samples()
    await connections.close()

    assert {dict(labels)["queue"] for name, labels in seen if name == "queue_depth"} == {"q"}
    assert seen[series("exporter_queues_unread", reason="refused")] == 1
    assert seen[series("broker_up")] == 1


@pytest.mark.parametrize(
    "rights", ["+ping +info", "+ping +info +time ~other", "+ping +info +hgetall allkeys"]
)
async def test_a_user_who_may_ask_too_little_is_not_ready(guarded: Guarded, rights: str) -> None:
    words = ["on", ">p", "+auth", "+hello", *rights.split()]
    guarded.raw.execute_command("ACL", "SETUSER", "asker", "reset", *words)
    async with Exporter(guarded.node.url.replace("//", "//asker:p@")) as exporter:
        assert (await exporter.samples())[series("broker_up")] == 0
        assert (await exporter.http.get("/readyz")).status_code == 503
        guarded.raw.execute_command("ACL", "SETUSER", "asker", "+time", "+hgetall", "allkeys")
        assert (await exporter.samples())[series("broker_up")] == 1
        assert (await exporter.http.get("/readyz")).status_code == 200


async def test_a_user_who_may_not_log_in_is_told_by_broker_up(guarded: Guarded) -> None:
    async with Exporter(guarded.url("metrics").replace("pass-of", "not-of")) as exporter:
        seen = await exporter.samples()

    assert seen[series("broker_up")] == 0
