"""What waits, as it is told to whoever asks."""

from __future__ import annotations

from typing import Any

from broker_parts import submission, take_all
from server_view import T
from streamfleet_common.backlog import Backlog, Line
from streamfleet_common.broker import Broker

PROTOCOLS = ("resp2", "resp3")


async def test_only_what_nobody_has_read_is_told_in_its_order(broker: Broker, raw: Any) -> None:
    assert await broker.backlog() == Backlog(())
    many = [submission(str(number), lane=lane) for number in range(3) for lane in ("normal", "high")]
    await broker.submit(many)
    normal, high = many[::2], many[1::2]
    backlog = await broker.backlog()
    assert [(line.letter, line.rids) for line in backlog.lines] == [
        ("h", tuple(one.envelope.rid for one in high)),
        ("n", tuple(one.envelope.rid for one in normal)),
    ]
    ((first, _),) = raw.xrange(f"{T}:s:normal", count=1)
    since_ms = int(first.split(b"-")[0])
    now = raw.time()
    waited_ms = now[0] * 1000 + now[1] // 1000 - since_ms
    assert 0 <= backlog.oldest_ms <= waited_ms
    assert backlog.positions()[normal[2].envelope.rid] == 3
    (cut,) = [line for line in (await broker.backlog(2)).lines if line.letter == "n"]
    assert len(cut.rids) == 2

    await take_all(broker)
    assert (await broker.backlog()).lines == ()
    late = submission("late")
    await broker.submit([late])
    assert (await broker.backlog()).positions() == {late.envelope.rid: 1}


async def test_a_line_that_nobody_has_ever_read_is_told(broker: Broker, raw: Any) -> None:
    raw.xgroup_destroy(f"{T}:s:normal", "w")
    one = submission()
    await broker.submit([one])
    assert (await broker.backlog()).positions() == {one.envelope.rid: 1}


def test_sub_lanes_have_their_turns() -> None:
    backlog = Backlog(
        (
            Line("N", 0, 5, ("back",)),
            Line("n", 0, 9, ("a1", "a2", "a3", "a4")),
            Line("n", 2, 7, ("b1",)),
            Line("n", 5, 8, ("c1", "c2")),
            Line("b", 0, 3, ("bulk",)),
            Line("S", 0, 1, ("suspect",)),
        )
    )
    order = ["back", "a1", "b1", "c1", "a2", "c2", "a3", "a4"]
    assert backlog.positions() == {
        **{rid: place for place, rid in enumerate(order, 1)},
        "bulk": 1,
        "suspect": 1,
    }
    assert backlog.oldest_ms == 9
