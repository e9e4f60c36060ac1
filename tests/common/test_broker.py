"""Every step of the protocol on the real server, looked at with a plain client."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import pytest

from broker_parts import DONE, START, begin, delta, emission, finish, submission, take_all
from eventually import eventually
from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.depth import MAX_QUEUE_DEPTH, Depth
from streamfleet_common.housekeeping import AT_ONCE
from streamfleet_common.calls import BATCH, BATCH_BYTES
from streamfleet_common.cards import Card, Limits
from streamfleet_common.connections import Connections
from streamfleet_common.deliveries import Delivery, Entry
from streamfleet_common.errors import BrokerUnavailable, InvalidRequest, Undecodable
from streamfleet_common.keys import Keys
from streamfleet_common.schemas import Choice, End, Envelope, GenerateRequest, Prefill
from streamfleet_common.scripts import Script
from streamfleet_common.submissions import Submission, Submitted

T = "{q:q:0}"
RID = "00" + "ab" * 16
OTHER = "00" + "cd" * 16


@pytest.fixture(params=["resp2", "resp3"])
async def connections(request: pytest.FixtureRequest, redis_url: str) -> AsyncIterator[Connections]:
    opened = Connections.open(f"{redis_url}?protocol={request.param[-1]}")
    yield opened
    await opened.close()


def now_ms(raw: Any) -> int:
    seconds, micros = raw.time()
    return int(seconds) * 1000 + int(micros) // 1000


def fields_of(raw: Any, rid: str) -> list[str]:
    """The head of a record, split."""
    head: bytes = raw.get(f"{T}:r:{rid}").partition(b"\n")[0]
    return head.decode().split("|")


def log_of(raw: Any, rid: str) -> list[tuple[str, bytes]]:
    return [(id_.decode(), fields[b"f"]) for id_, fields in raw.xrange(f"{T}:ev:{rid}")]


def everything(raw: Any) -> dict[bytes, bytes | None]:
    """All there is, to see that a call changed nothing."""
    return {key: raw.dump(key) for key in raw.keys("*")}


def assert_drained(raw: Any) -> None:
    assert raw.zcard(f"{T}:open") == 0
    for lane in ("high", "normal", "bulk"):
        assert raw.xlen(f"{T}:s:{lane}") == 0
        assert raw.xpending(f"{T}:s:{lane}", "w")["pending"] == 0
    for key in (*raw.keys(f"{T}:r:*"), *raw.keys(f"{T}:ev:*")):
        assert raw.pttl(key) > 0, key


class Channel:
    """A plain subscription, confirmed; `messages` reads what has come."""

    def __init__(self, raw: Any, rid: str, tenant: str = "default") -> None:
        self._pubsub = raw.pubsub(ignore_subscribe_messages=True)
        self._pubsub.subscribe(f"{T}:c:{tenant}:{rid}")
        self._pubsub.get_message(timeout=5)  # the confirmation

    def messages(self) -> list[bytes]:
        # A publish goes out before the reply of the script that made it; a ping on this line comes behind it.
        self._pubsub.ping("end")
        found: list[bytes] = []
        while True:
            message = self._pubsub.get_message(timeout=5)
            assert message is not None, "the server does not answer"
            if message["type"] == "pong":
                return found
            found.append(message["data"])


# --- submit


async def test_submit_writes_an_entry_a_record_and_a_place(broker: Broker, raw: Any) -> None:
    one = submission(rid=RID, tenant="acme", lane="bulk", stream=True, deadline_ms=60_000, result_ttl_ms=5000)
    before = now_ms(raw)
    assert await broker.submit([one]) == [Submitted("accepted", state="queued", depth=1, limit=0)]
    after = now_ms(raw)

    ((eid, fields),) = raw.xrange(f"{T}:s:bulk")
    assert fields == {b"r": RID.encode(), b"p": one.payload}
    assert codec.decode_envelope(fields[b"p"]) == one.envelope
    accepted = int(fields_of(raw, RID)[8])
    assert before <= accepted <= after
    digest = hashlib.sha256(msgpack.packb({"prompt": "Hi", "kind": "generate"})).hexdigest()[:32]
    assert raw.get(f"{T}:r:{RID}").decode() == (
        f"Q{accepted + 60_000}|0|{eid.decode()}||0|0|0|0|{accepted}|bulk|s|5000|acme|{digest}"
    )
    assert raw.zrange(f"{T}:open", 0, -1, withscores=True) == [(RID.encode(), accepted + 60_000)]
    assert raw.ttl(f"{T}:r:{RID}") == -1
    assert not raw.exists(f"{T}:ev:{RID}")
    assert raw.xlen(f"{T}:s:normal") == raw.xlen(f"{T}:s:high") == 0


async def test_a_batch_is_taken_in_order(broker: Broker, raw: Any) -> None:
    batch = [submission(str(number)) for number in range(5)]
    assert [answer.depth for answer in await broker.submit(batch)] == [1, 2, 3, 4, 5]
    rids = [fields[b"r"].decode() for _, fields in raw.xrange(f"{T}:s:normal")]
    assert rids == [one.envelope.rid for one in batch]
    assert (await broker.submit([submission()]))[0].depth == 6


async def test_the_same_again_is_a_duplicate(broker: Broker, raw: Any) -> None:
    one = submission(rid=RID)
    assert [answer.outcome for answer in await broker.submit([one, one])] == ["accepted", "duplicate"]
    before = everything(raw)
    assert await broker.submit([one]) == [Submitted("duplicate", state="queued")]
    # What is asked for counts, not how it travels.
    again = submission(rid=RID, lane="high", stream=True, deadline_ms=5)
    assert await broker.submit([again]) == [Submitted("duplicate", state="queued")]
    assert everything(raw) == before

    (delivery,) = await broker.start("w1", await take_all(broker), START)
    assert await broker.submit([one]) == [Submitted("duplicate", state="running")]
    assert isinstance(delivery, Delivery)
    await broker.finish([finish(delivery)])
    assert await broker.submit([one]) == [Submitted("duplicate", state="done")]
    assert_drained(raw)


@pytest.mark.parametrize(
    "other", [submission("Bye", rid=RID), submission(rid=RID, tenant="acme")], ids=["another body", "tenant"]
)
async def test_the_same_rid_for_something_else_is_a_conflict(
    broker: Broker, raw: Any, other: Submission
) -> None:
    one = submission(rid=RID)
    answers = await broker.submit([one, other, one])
    assert [answer.outcome for answer in answers] == ["accepted", "conflict", "duplicate"]
    assert await broker.submit([other]) == [Submitted("conflict", state="queued")]
    assert raw.xlen(f"{T}:s:normal") == raw.zcard(f"{T}:open") == 1
    await broker.cancel([RID], "default")
    assert await broker.submit([other]) == [Submitted("conflict", state="cancelled")]


async def test_full_at_exactly_the_limit(broker: Broker, raw: Any) -> None:
    batch = [submission(str(number)) for number in range(5)]
    answers = await broker.submit(batch, max_queue_depth=3)
    assert [answer.outcome for answer in answers] == ["accepted"] * 3 + ["full"] * 2
    assert answers[3] == Submitted("full", depth=3, limit=3)
    assert raw.zcard(f"{T}:open") == raw.xlen(f"{T}:s:normal") == 3
    assert not raw.exists(f"{T}:r:{batch[3].envelope.rid}")

    # What is in already is answered all the same.
    answers = await broker.submit([batch[0], batch[3]], max_queue_depth=3)
    assert [answer.outcome for answer in answers] == ["duplicate", "full"]
    # An end makes room for one.
    await broker.cancel([batch[1].envelope.rid], "default")
    answers = await broker.submit(batch[3:], max_queue_depth=3)
    assert [answer.outcome for answer in answers] == ["accepted", "full"]


async def test_the_limit_that_a_worker_announced_counts(broker: Broker) -> None:
    await broker.announce(card(max_queue_depth=1))
    answers = await broker.submit([submission(), submission()], max_queue_depth=100)
    assert answers[1] == Submitted("full", depth=1, limit=1)
    await broker.announce(card(max_queue_depth=2))
    answers = await broker.submit([submission(), submission()], max_queue_depth=1)
    assert [answer.outcome for answer in answers] == ["accepted", "full"]


async def test_a_rid_that_was_full_once_may_come_again(broker: Broker) -> None:
    one = submission(rid=RID)
    assert (await broker.submit([one], max_queue_depth=0))[0].outcome == "full"
    assert (await broker.submit([one]))[0].outcome == "accepted"


async def test_nothing_is_nothing(broker: Broker, raw: Any) -> None:
    before = everything(raw)
    assert await broker.submit([]) == []
    assert await broker.cancel([], "default") == []
    assert await broker.status([], "default") == []
    assert await broker.start("w1", [], START) == []
    assert await broker.emit([]) == []
    assert await broker.finish([]) == []
    assert await broker.read("w1", [], 5, block_ms=None) == []
    assert await broker.read("w1", ["normal"], 0, block_ms=None) == []
    assert everything(raw) == before


def calls_of(raw: Any, command: str) -> int:
    return int(raw.info("commandstats").get(f"cmdstat_{command}", {"calls": 0})["calls"])


async def test_large_batches_go_out_in_pieces(broker: Broker, raw: Any) -> None:
    count = 2 * BATCH + 1
    batch = [submission(stream=True) for _ in range(count)]
    rids = [one.envelope.rid for one in batch]
    await broker.ping()
    raw.config_resetstat()
    answers = await broker.submit(batch, max_queue_depth=count)
    assert [answer.depth for answer in answers] == list(range(1, count + 1))
    # 3 pieces, the first of which may have had to bring the script along.
    assert calls_of(raw, "evalsha") == 3
    assert raw.zcard(f"{T}:open") == count

    entries = await take_all(broker, count=count)
    assert [entry.rid for entry in entries] == rids
    deliveries = [one for one in await broker.start("w1", entries, START) if isinstance(one, Delivery)]
    assert [delivery.entry.rid for delivery in deliveries] == rids
    assert await broker.emit([emission(one, 1, b"x") for one in deliveries]) == [True] * count
    assert await broker.finish([finish(one) for one in deliveries[:600]]) == [True] * 600
    assert await broker.cancel(rids, "default") == ["done"] * 600 + ["cancelled"] * (count - 600)
    states = [record.state for record in await broker.status(rids, "default") if record]
    assert states == ["done"] * 600 + ["cancelled"] * (count - 600)
    assert calls_of(raw, "evalsha") <= 3 * 5
    assert_drained(raw)


async def test_large_payloads_go_out_in_pieces(broker: Broker, raw: Any) -> None:
    size = 200_000
    count = BATCH_BYTES // size + 2
    raw.config_resetstat()
    answers = await broker.submit([submission("a" * size) for _ in range(count)])
    assert {answer.outcome for answer in answers} == {"accepted"}
    assert calls_of(raw, "evalsha") == 2


def test_a_request_over_the_limit_is_not_sent() -> None:
    envelope = Envelope(rid=RID, request=GenerateRequest(prompt="a" * 1000))
    size = len(codec.encode(envelope))
    assert len(Submission.of(envelope, limit=size).payload) == size
    with pytest.raises(Undecodable, match="max_request_bytes") as caught:
        Submission.of(envelope, limit=size - 1)
    assert (caught.value.bytes, caught.value.limit) == (size, size - 1)


def test_the_digest_tells_requests_apart() -> None:
    digests = {
        Submission.of(Envelope(request=request)).digest
        for request in (
            GenerateRequest(prompt="a"),
            GenerateRequest(prompt="b"),
            GenerateRequest(prompt="a", max_tokens=1),
            GenerateRequest(prompt="a", stop=("a",)),
            GenerateRequest(prompt_token_ids=(1, 2)),
        )
    }
    assert len(digests) == 5
    assert submission(rid=RID).digest == submission(rid=OTHER, tenant="x", stream=True).digest
    assert GenerateRequest(prompt="a", max_tokens=128) == GenerateRequest(prompt="a")
    assert (
        submission("a").digest
        == Submission.of(Envelope(request=GenerateRequest(prompt="a", max_tokens=128))).digest
    )


BY_HAND: list[Any] = [RID, "normal", "-", 60_000, 5000, "acme", "0123abcd", b"payload"]


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (0, ""),
        (0, RID.upper()),
        (0, RID + "0"),
        (0, RID[:-1] + "|"),
        (1, "solo"),
        (1, ""),
        (2, ""),
        (2, "x"),
        (2, "s|"),
        (3, 0),
        (3, -1),
        (3, "1.5"),
        (3, "1e3"),
        (3, 86_400_001),
        (3, "soon"),
        (4, 0),
        (4, "1.5"),
        (4, 604_800_001),
        (4, "x"),
        (5, ""),
        (5, "a|b"),
        (5, "a\nb"),
        (5, "a b"),
        (6, ""),
        (6, "a|b"),
        (6, "\n"),
    ],
)
def test_submit_by_hand_is_held_to_the_bounds(raw: Any, at: int, value: object) -> None:
    text = Script.load("submit").text
    good = [OTHER, *BY_HAND[1:]]
    bad = [*BY_HAND[:at], value, *BY_HAND[at + 1 :]]
    before = everything(raw)
    with pytest.raises(Exception, match="request 2 are not valid"):
        raw.eval(text, 1, T, 100, *good, *bad)
    assert everything(raw) == before


def test_submit_by_hand(raw: Any) -> None:
    text = Script.load("submit").text
    assert raw.eval(text, 1, T, 1, *BY_HAND, *BY_HAND, OTHER, *BY_HAND[1:]) == [
        [b"accepted", 1],
        [b"duplicate", b"Q"],
        [b"full", 1, 1],
    ]
    with pytest.raises(Exception, match="not valid"):
        raw.eval(text, 1, T, 1, *BY_HAND[:-1])


# --- read


async def test_read_takes_lanes_and_counts(broker: Broker) -> None:
    batch = [submission(lane=lane) for lane in ("bulk", "high", "bulk", "high", "bulk")]
    await broker.submit(batch)
    entries = await broker.read("w1", ["high", "bulk"], 2, block_ms=None)
    assert [(entry.lane, entry.rid) for entry in entries] == [
        ("high", batch[1].envelope.rid),
        ("high", batch[3].envelope.rid),
        ("bulk", batch[0].envelope.rid),
        ("bulk", batch[2].envelope.rid),
    ]
    assert entries[0].payload == batch[1].payload
    assert await broker.read("w1", ["high", "normal"], 5, block_ms=None) == []
    assert [entry.rid for entry in await take_all(broker, "w2")] == [batch[4].envelope.rid]
    assert await take_all(broker) == []


async def test_what_was_submitted_before_the_groups_is_read(connections: Connections) -> None:
    broker = Broker(connections, "early")
    await broker.submit([submission(rid=RID)])
    await broker.create_groups()
    await broker.create_groups()
    assert [entry.rid for entry in await take_all(broker)] == [RID]


async def test_read_without_groups_makes_them(connections: Connections) -> None:
    broker = Broker(connections, "early")
    await broker.submit([submission(rid=RID)])
    assert await take_all(broker) == []
    assert [entry.rid for entry in await take_all(broker)] == [RID]


@pytest.mark.parametrize("block_ms", [None, 0])
async def test_read_need_not_wait(broker: Broker, block_ms: int | None) -> None:
    assert await broker.read("w1", ["normal"], 5, block_ms=block_ms) == []


async def test_given_shows_what_an_owner_has_not_ended(broker: Broker, raw: Any) -> None:
    assert await broker.given("w1") == []
    first, second = await begin(broker, submission(lane="bulk"), submission(lane="high"))
    await broker.submit([submission(rid=RID)])
    await take_all(broker, "w2")
    assert await broker.given("w1") == [second.entry, first.entry]
    assert [entry.rid for entry in await broker.given("w2")] == [RID]
    await broker.finish([finish(first)])
    assert await broker.given("w1") == [second.entry]
    # An entry that somebody deleted has no body any more; what is left is to let go of it.
    raw.xdel(f"{T}:s:high", second.entry.eid)
    (bare,) = await broker.given("w1")
    assert (bare.rid, bare.eid, bare.payload) == ("", second.entry.eid, b"")
    assert await broker.start("w1", [bare], START) == ["stray"]
    assert await broker.given("w1") == []
    assert raw.xlen(f"{T}:dead") == 0


@pytest.mark.parametrize("owner", ["", "a|b", "a\nb", "w" * 201])
async def test_an_owner_that_no_record_can_hold(broker: Broker, owner: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot name a worker"):
        await broker.read(owner, ["normal"], 1, block_ms=None)
    with pytest.raises(InvalidRequest, match="cannot name a worker"):
        await broker.start(owner, [], START)


# --- start


async def test_start_claims_and_announces(broker: Broker, raw: Any) -> None:
    one = submission(rid=RID, tenant="acme", stream=True, deadline_ms=60_000, result_ttl_ms=5000)
    await broker.submit([one])
    queued = fields_of(raw, RID)
    channel = Channel(raw, RID, "acme")
    (entry,) = await take_all(broker)
    before = now_ms(raw)
    (delivery,) = await broker.start("w1", [entry], START)
    after = now_ms(raw)

    accepted = int(queued[8])
    assert isinstance(delivery, Delivery)
    assert before <= delivery.now_ms <= after
    assert delivery == Delivery(
        entry=Entry(RID, queued[2], "normal", one.payload),
        owner="w1",
        epoch=1,
        now_ms=delivery.now_ms,
        accepted_at_ms=accepted,
        deadline_at_ms=accepted + 60_000,
        attempts=1,
        crashes=0,
    )
    assert delivery.key == (RID, 1)
    assert fields_of(raw, RID) == [
        f"R{accepted + 60_000}", "1", queued[2], "w1", str(delivery.now_ms), "1", "0", "0", *queued[8:]
    ]  # fmt: skip
    now = delivery.now_ms
    frame = f"1-0,{accepted},{now},{now},1 ".encode() + codec.encode(START)
    assert log_of(raw, RID) == [("1-0", frame)]
    assert channel.messages() == [frame]
    # The log lives until the deadline and the result's time to live after it.
    assert (
        0 < accepted + 65_000 - raw.pexpiretime(f"{T}:ev:{RID}") + (now - accepted) <= 1000 + now - accepted
    )
    assert raw.xpending(f"{T}:s:normal", "w")["pending"] == raw.zcard(f"{T}:open") == 1


async def test_a_request_that_does_not_stream_has_no_log(broker: Broker, raw: Any) -> None:
    channel = Channel(raw, RID)
    (delivery,) = await begin(broker, submission(rid=RID))
    assert delivery.epoch == 1
    assert not raw.exists(f"{T}:ev:{RID}")
    assert channel.messages() == []


async def test_start_again_gives_the_same_epoch(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID, stream=True)])
    entries = await take_all(broker)
    (first,) = await broker.start("w1", entries, START)
    before = everything(raw)
    (second,) = await broker.start("w1", entries, START)
    assert isinstance(first, Delivery)
    assert isinstance(second, Delivery)
    assert (second.epoch, second.attempts, second.fence) == (first.epoch, first.attempts, first.fence)
    assert everything(raw) == before


async def test_the_same_entry_twice_in_a_batch_is_started_once(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID, stream=True)])
    (entry,) = await take_all(broker)
    first, second = await broker.start("w1", [entry, entry], START)
    assert first == second
    assert [id_ for id_, _ in log_of(raw, RID)] == ["1-0"]


async def test_another_owner_is_told_that_it_lost(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    before = everything(raw)
    assert await broker.start("w2", [delivery.entry], START) == ["lost"]
    assert everything(raw) == before


async def test_an_entry_of_an_ended_request_is_gone(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    entries = await take_all(broker)
    await broker.cancel([RID], "default")
    assert await broker.start("w1", entries * 2, START) == ["gone", "gone"]
    assert_drained(raw)


async def test_a_superseded_entry_is_gone(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID)])
    eid = raw.xadd(f"{T}:s:normal", {"r": RID, "p": b"x"}).decode()
    first, second = await take_all(broker)
    assert second.eid == eid
    started, gone = await broker.start("w1", [first, second], START)
    assert isinstance(started, Delivery)
    assert gone == "gone"
    assert [id_.decode() for id_, _ in raw.xrange(f"{T}:s:normal")] == [first.eid]
    assert raw.xpending(f"{T}:s:normal", "w")["pending"] == 1


async def test_a_late_start_expires(broker: Broker, raw: Any) -> None:
    one = submission(rid=RID, stream=True, deadline_ms=1, result_ttl_ms=5000)
    channel = Channel(raw, RID)
    await broker.submit([one])
    accepted = int(fields_of(raw, RID)[8])
    entries = await take_all(broker)
    await eventually(lambda: now_ms(raw) > accepted + 1)
    assert await broker.start("w1", entries * 2, START) == ["expired", "expired"]

    (record,) = await broker.status([RID], "default")
    assert record is not None
    assert (record.state, record.epoch, record.attempts, record.started_at_ms) == ("expired", 1, 0, 0)
    assert record.end is not None
    event = record.end.event()
    assert isinstance(event, End)
    assert (event.state, event.finish_reason, event.attempt) == ("expired", "expired", 0)
    assert (event.queued_at_ms, event.started_at_ms) == (accepted, 0)
    assert event.ended_at_ms > accepted
    assert event.error is not None
    assert event.error.code == "deadline_exceeded"
    assert [id_ for id_, _ in log_of(raw, RID)] == ["1-1"]
    assert len(channel.messages()) == 1
    assert_drained(raw)
    assert await broker.start("w1", entries, START) == ["gone"]


GARBAGE: list[dict[Any, Any]] = [
    {"x": "y"},
    {"r": RID},
    {"r": b"\xff\xfe", "p": b""},
    {"r": "", "p": b""},
    {"r": "a" * 10_000, "p": b"x"},
    {b"\x00": b"\xff"},
]


@pytest.mark.parametrize("lane", ["high", "normal", "bulk"])
async def test_garbage_in_a_lane_goes_to_the_dead_letter_once(broker: Broker, raw: Any, lane: str) -> None:
    ids = [raw.xadd(f"{T}:s:{lane}", fields) for fields in GARBAGE]
    entries = await take_all(broker)
    assert len(entries) == len(GARBAGE)
    assert [entry.rid for entry in entries[:2]] == ["", RID]
    assert await broker.start("w1", entries, START) == ["stray"] * len(GARBAGE)
    dead = [fields for _, fields in raw.xrange(f"{T}:dead")]
    assert [fields[b"entry"] for fields in dead] == ids
    assert {fields[b"lane"] for fields in dead} == {lane.encode()}
    assert {fields[b"why"] for fields in dead} == {b"no record of this request"}
    assert dead[1][b"rid"] == RID.encode()
    # Asked once more, after a lost reply.
    assert await broker.start("w1", entries, START) == ["stray"] * len(GARBAGE)
    assert raw.xlen(f"{T}:dead") == len(GARBAGE)
    assert (await broker.depth()).dead == len(GARBAGE)
    assert_drained(raw)
    assert await take_all(broker, "w2") == []


async def test_entries_of_one_id_in_two_lanes_are_two(broker: Broker, raw: Any) -> None:
    for lane in ("high", "bulk"):
        raw.xadd(f"{T}:s:{lane}", {"x": "y"}, id="5-5")
    assert await broker.start("w1", await take_all(broker), START) == ["stray", "stray"]
    assert raw.xlen(f"{T}:dead") == 2
    assert_drained(raw)


async def test_garbage_does_not_hold_up_the_rest_of_a_batch(broker: Broker, raw: Any) -> None:
    raw.xadd(f"{T}:s:normal", {"x": "y"})
    batch = [submission(stream=True) for _ in range(3)]
    await broker.submit(batch)
    raw.set(f"{T}:r:{batch[1].envelope.rid}", b"garbage")
    raw.set(f"{T}:ev:{batch[2].envelope.rid}", b"no stream")
    stray, ours, gone, logless = await broker.start("w1", await take_all(broker), START)
    assert (stray, gone) == ("stray", "gone")
    assert isinstance(ours, Delivery)
    assert isinstance(logless, Delivery)
    assert await broker.emit([emission(ours, 1, b"x"), emission(logless, 1, b"x")]) == [True, True]
    assert await broker.finish([finish(logless), finish(ours)]) == [True, True]


# --- emit


async def test_emit_logs_and_publishes(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, tenant="acme", stream=True))
    channel = Channel(raw, RID, "acme")
    bodies = [codec.encode(delta(text)) for text in "abc"]
    events = [emission(delivery, seq, body, "acme") for seq, body in enumerate(bodies, 1)]
    assert await broker.emit(events[:2]) == [True, True]
    assert await broker.emit(events[2:]) == [True]
    frames = [f"1-{seq} ".encode() + body for seq, body in enumerate(bodies, 1)]
    assert log_of(raw, RID)[1:] == [("1-1", frames[0]), ("1-2", frames[1]), ("1-3", frames[2])]
    assert channel.messages() == frames


async def test_emit_again_doubles_nothing(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    channel = Channel(raw, RID)
    events = [emission(delivery, seq, b"body") for seq in (1, 2)]
    assert await broker.emit(events) == [True, True]
    before = everything(raw)
    assert await broker.emit(events) == [True, True]
    assert await broker.emit(events[:1] * 3) == [True, True, True]
    assert everything(raw) == before
    assert channel.messages() == [b"1-1 body", b"1-2 body"]


def altered(delivery: Delivery, **changes: Any) -> Delivery:
    values = {name: getattr(delivery, name) for name in Delivery.__slots__}
    entry = changes.pop("eid", None)
    if entry is not None:
        values["entry"] = Entry(delivery.entry.rid, entry, delivery.entry.lane, b"")
    return Delivery(**{**values, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {"owner": "w2"},
        {"owner": "w"},
        {"owner": "w11"},
        {"epoch": 0},
        {"epoch": 2},
        {"epoch": 11},
        {"eid": "1-1"},
        {"eid": ""},
    ],
)
async def test_the_fence(broker: Broker, raw: Any, changes: dict[str, Any]) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    stranger = altered(delivery, **changes)
    before = everything(raw)
    assert await broker.emit([emission(stranger, 1, b"x"), emission(stranger, 1, b"")]) == [False, False]
    assert await broker.finish([finish(stranger)]) == [False]
    assert everything(raw) == before
    # The owner itself is not disturbed.
    assert await broker.emit([emission(delivery, 1, b"")]) == [True]
    assert await broker.finish([finish(delivery)]) == [True]


async def test_the_fence_before_and_after_a_run(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    record = raw.get(f"{T}:r:{RID}")
    raw.set(f"{T}:r:{RID}", record.replace(b"R", b"Q", 1).replace(b"|w1|", b"||", 1))
    assert await broker.emit([emission(delivery, 1, b"x")]) == [False]
    assert await broker.finish([finish(delivery)]) == [False]
    raw.set(f"{T}:r:{RID}", record)
    await broker.finish([finish(delivery)])
    before = everything(raw)
    assert await broker.emit([emission(delivery, 1, b"x"), emission(delivery, 1, b"")]) == [False, False]
    assert everything(raw) == before
    raw.delete(f"{T}:r:{RID}")
    assert await broker.emit([emission(delivery, 1, b"x")]) == [False]
    assert await broker.finish([finish(delivery)]) == [False]


async def test_an_emission_without_a_body_is_a_question(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    channel = Channel(raw, RID)
    before = everything(raw)
    assert await broker.emit([emission(delivery, 0, b""), emission(delivery, 5, b"")]) == [True, True]
    assert everything(raw) == before
    assert channel.messages() == []


async def test_a_large_event_is_announced_and_read_from_the_log(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    channel = Channel(raw, RID)
    largest = b"x" * (16 * 1024 - len(b"1-1 "))
    large = b"x" * 20_000
    assert (
        await broker.emit([emission(delivery, 1, largest), emission(delivery, 2, largest + b"x")])
        == [True] * 2
    )
    assert await broker.emit([emission(delivery, 3, large)]) == [True]
    assert channel.messages() == [b"1-1 " + largest, b"1-2 ", b"1-3 "]
    frames = await broker.events(RID)
    assert [frame.id for frame in frames] == ["1-0", "1-1", "1-2", "1-3"]
    assert [frame.body for frame in frames[1:]] == [largest, largest + b"x", large]


async def test_a_log_that_nobody_asked_for_does_not_stay(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, deadline_ms=5000, result_ttl_ms=1000))
    await broker.emit([emission(delivery, 1, b"x")])
    assert 0 < raw.pttl(f"{T}:ev:{RID}") <= 6000
    await broker.finish([finish(delivery)])
    assert_drained(raw)


async def test_a_deleted_log_does_not_come_back_for_good(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True, deadline_ms=5000, result_ttl_ms=1000))
    raw.delete(f"{T}:ev:{RID}")
    await broker.emit([emission(delivery, 1, b"x"), emission(delivery, 2, b"x")])
    assert 0 < raw.pttl(f"{T}:ev:{RID}") <= 6000


# --- finish


@pytest.mark.parametrize("stream", [False, True])
async def test_finish_makes_the_record_the_result(broker: Broker, raw: Any, stream: bool) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, tenant="acme", stream=stream, result_ttl_ms=90_000))
    channel = Channel(raw, RID, "acme")
    running = fields_of(raw, RID)
    before = now_ms(raw)
    assert await broker.finish([finish(delivery)]) == [True]
    after = now_ms(raw)

    head, _, frame = raw.get(f"{T}:r:{RID}").partition(b"\n")
    assert head.decode().split("|") == ["ED", "2", running[4], "1", "0", "0", *running[8:]]
    place, _, body = frame.partition(b" ")
    id_, queued, started, ended, attempts = place.decode().split(",")
    assert (id_, int(queued), int(started), attempts) == (
        "2-1",
        delivery.accepted_at_ms,
        delivery.now_ms,
        "1",
    )
    assert before <= int(ended) <= after
    assert body == codec.encode(DONE)
    assert channel.messages() == [frame]
    if stream:
        assert log_of(raw, RID)[-1] == ("2-1", frame)
        assert 0 < raw.pttl(f"{T}:ev:{RID}") <= 60_000
    else:
        assert not raw.exists(f"{T}:ev:{RID}")
    assert 60_000 < raw.pttl(f"{T}:r:{RID}") <= 90_000
    assert_drained(raw)

    (record,) = await broker.status([RID], "acme")
    assert record is not None
    assert record.end is not None
    event = record.end.event()
    assert isinstance(event, End)
    assert (event.text, event.token_ids, event.of, event.last_seq) == ("ab", (1, 2), 1, 1)
    assert (event.queued_at_ms, event.started_at_ms, event.ended_at_ms, event.attempt) == (
        delivery.accepted_at_ms,
        delivery.now_ms,
        int(ended),
        1,
    )


@pytest.mark.parametrize(
    ("state", "letter"),
    [("done", b"D"), ("failed", b"F"), ("cancelled", b"C"), ("expired", b"X"), ("dead", b"P")],
)
async def test_every_end(broker: Broker, raw: Any, state: Any, letter: bytes) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    assert await broker.finish([finish(delivery, End(state=state))]) == [True]
    assert raw.get(f"{T}:r:{RID}")[:2] == b"E" + letter
    (record,) = await broker.status([RID], "default")
    assert record is not None
    assert record.state == state
    assert_drained(raw)


async def test_finish_again_is_the_same_answer_and_no_second_end(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    channel = Channel(raw, RID)
    assert await broker.finish([finish(delivery)]) == [True]
    before = everything(raw)
    assert await broker.finish([finish(delivery)]) == [True]
    # Another end comes too late.
    assert await broker.finish([finish(delivery, End(state="failed"))]) == [False]
    assert await broker.finish([finish(delivery, DONE.model_copy(update={"of": 2}))]) == [False]
    # So does the same end by somebody of another epoch.
    assert await broker.finish([finish(altered(delivery, epoch=2))]) == [False]
    assert everything(raw) == before
    assert len(channel.messages()) == 1


async def test_finish_twice_in_a_batch_ends_once(broker: Broker, raw: Any) -> None:
    one, two = await begin(broker, submission(rid=RID, stream=True), submission(rid=OTHER))
    channel = Channel(raw, RID)
    ends = [finish(one), finish(two), finish(one, End(state="failed")), finish(one)]
    assert await broker.finish(ends) == [True, True, False, False]
    assert raw.get(f"{T}:r:{RID}")[:2] == b"ED"
    assert len(channel.messages()) == 1
    assert_drained(raw)


async def test_finish_after_a_cancel_is_too_late(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    assert await broker.cancel([RID], "default") == ["cancelled"]
    before = everything(raw)
    assert await broker.emit([emission(delivery, 1, b"x")]) == [False]
    assert await broker.finish([finish(delivery)]) == [False]
    assert await broker.finish([finish(delivery, End(state="cancelled"))]) == [False]
    assert everything(raw) == before


async def test_a_large_end_is_announced_and_read_from_the_record(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    channel = Channel(raw, RID)
    text = "a" * 100_000
    end = End(state="done", choices=(Choice(text=text, token_ids=(1,), finish_reason="eos"),))
    await broker.finish([finish(delivery, end)])
    (message,) = channel.messages()
    assert message.startswith(b"2-1,")
    assert message.endswith(b",1 ")
    (record,) = await broker.status([RID], "default")
    assert record is not None
    assert record.end is not None
    got = record.end.event()
    assert isinstance(got, End)
    assert got.text == text


async def test_an_end_that_no_reader_would_take_is_a_failure(broker: Broker) -> None:
    (delivery,) = await begin(broker, submission(rid=RID))
    end = End(
        state="done",
        model="m",
        of=1,
        last_seq=3,
        choices=(Choice(text="a" * codec.MAX_RESULT_BYTES, token_ids=(1,), finish_reason="eos"),),
        prefill=Prefill(token_ids=(1,), texts=("a",), logprobs=(None,)),
    )
    assert await broker.finish([finish(delivery, end)]) == [True]
    (record,) = await broker.status([RID], "default")
    assert record is not None
    assert record.end is not None
    got = record.end.event()
    assert isinstance(got, End)
    assert (record.state, got.state, got.model, got.choices, got.of) == ("failed", "failed", "m", (), 0)
    assert got.error is not None
    assert "max_result_bytes" in got.error.message
    assert got.error.error().retryable is False


# --- cancel


async def test_cancel_in_every_state(broker: Broker, raw: Any) -> None:
    running, done = await begin(broker, submission(stream=True), submission())
    await broker.finish([finish(done)])
    queued = submission(stream=True, tenant="default")
    foreign = submission(tenant="acme")
    await broker.submit([queued, foreign])
    rids = [
        queued.envelope.rid,
        running.entry.rid,
        done.entry.rid,
        foreign.envelope.rid,
        OTHER,
        "no|rid",
    ]
    channels = [Channel(raw, rid) for rid in rids[:3]]
    assert await broker.cancel(rids, "default") == ["cancelled", "cancelled", "done", None, None, None]
    assert [len(channel.messages()) for channel in channels] == [1, 1, 0]
    # Once more, and twice in a batch: the same answers, and nothing new.
    before = everything(raw)
    assert await broker.cancel(rids[:3] * 2, "default") == ["cancelled", "cancelled", "done"] * 2
    assert everything(raw) == before

    for rid, epoch, attempts in ((rids[0], 1, 0), (rids[1], 2, 1)):
        (record,) = await broker.status([rid], "default")
        assert record is not None
        assert (record.state, record.epoch, record.attempts) == ("cancelled", epoch, attempts)
        assert record.end is not None
        event = record.end.event()
        assert isinstance(event, End)
        assert (event.state, event.attempt, event.finish_reason) == ("cancelled", attempts, "cancelled")
        assert event.error is not None
        assert event.error.code == "cancelled"
        assert log_of(raw, rid)[-1][0] == f"{epoch}-1"
    # The stranger's request stands, and nobody else's is left.
    assert [entry.rid for entry in await take_all(broker)] == [foreign.envelope.rid]
    assert raw.zrange(f"{T}:open", 0, -1) == [foreign.envelope.rid.encode()]
    assert await broker.cancel([foreign.envelope.rid], "acme") == ["cancelled"]
    assert_drained(raw)


async def test_cancel_twice_in_a_batch(broker: Broker, raw: Any) -> None:
    await broker.submit([submission(rid=RID, stream=True)])
    channel = Channel(raw, RID)
    assert await broker.cancel([RID, RID], "default") == ["cancelled", "cancelled"]
    assert len(channel.messages()) == 1
    assert_drained(raw)


# --- expire


async def test_expire_takes_what_is_due(broker: Broker, raw: Any) -> None:
    (running,) = await begin(broker, submission(stream=True))
    queued = submission()
    later = submission(rid=RID)
    await broker.submit([queued, later])
    assert await broker.expire() == 0
    rids = [running.entry.rid, queued.envelope.rid]
    raw.zadd(f"{T}:open", dict.fromkeys(rids, now_ms(raw)))
    assert await broker.expire() == 2
    assert await broker.expire() == 0
    records = await broker.status([*rids, RID], "default")
    assert [record.state for record in records if record] == ["expired", "expired", "queued"]
    assert [record.attempts for record in records if record] == [1, 0, 0]
    assert records[0] is not None
    assert records[0].end is not None
    assert records[0].started_at_ms == running.now_ms
    assert [id_ for id_, _ in log_of(raw, rids[0])] == ["1-0", "2-1"]
    assert await broker.finish([finish(running)]) == [False]
    await broker.cancel([RID], "default")
    assert_drained(raw)


async def test_expire_takes_all_a_bite_at_a_time(broker: Broker, raw: Any) -> None:
    count = 2 * AT_ONCE + 1
    await broker.submit([submission(deadline_ms=1) for _ in range(count)])
    latest = raw.zrange(f"{T}:open", -1, -1, withscores=True)[0][1]
    await eventually(lambda: now_ms(raw) > latest)
    raw.config_resetstat()
    assert await broker.expire() == count
    assert raw.info("commandstats")["cmdstat_zrangebyscore"]["calls"] == 3
    assert await broker.expire() == 0
    assert_drained(raw)


async def test_expire_frees_the_places_of_lost_and_broken_records(broker: Broker, raw: Any) -> None:
    batch = [submission(deadline_ms=1) for _ in range(4)]
    await broker.submit(batch)
    rids = [one.envelope.rid for one in batch]
    raw.delete(f"{T}:r:{rids[0]}")
    raw.set(f"{T}:r:{rids[1]}", b"garbage")
    raw.delete(f"{T}:r:{rids[2]}")
    raw.hset(f"{T}:r:{rids[2]}", "a", "b")
    await eventually(lambda: now_ms(raw) > raw.zrange(f"{T}:open", -1, -1, withscores=True)[0][1])
    assert await broker.expire() == 4
    assert raw.zcard(f"{T}:open") == 0
    (record,) = await broker.status(rids[3:], "default")
    assert record is not None
    assert record.state == "expired"


# --- status and events


async def test_status_is_for_the_tenant_only(broker: Broker) -> None:
    running, other = await begin(broker, submission(rid=RID), submission(rid=OTHER, tenant="acme"))
    assert other.entry.rid == OTHER
    mine, foreign, unknown = await broker.status([RID, OTHER, "00" + "ee" * 16], "default")
    assert mine is not None
    assert (mine.state, mine.owner, mine.epoch) == ("running", "w1", 1)
    assert (mine.accepted_at_ms, mine.deadline_at_ms) == (running.accepted_at_ms, running.deadline_at_ms)
    assert foreign is None
    assert unknown is None


async def test_a_result_disappears_after_its_time(broker: Broker, raw: Any) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, result_ttl_ms=1000))
    await broker.finish([finish(delivery)])
    raw.pexpire(f"{T}:r:{RID}", 1)
    await eventually(lambda: not raw.exists(f"{T}:r:{RID}"))
    assert await broker.status([RID], "default") == [None]
    assert await broker.cancel([RID], "default") == [None]
    # Then the rid is as good as new.
    assert (await broker.submit([submission("other", rid=RID)]))[0].outcome == "accepted"


async def test_a_record_written_by_hand_is_named(broker: Broker, raw: Any) -> None:
    raw.set(f"{T}:r:{RID}", b"garbage")
    with pytest.raises(Undecodable, match="by hand"):
        await broker.status([RID], "default")
    assert await broker.cancel([RID], "default") == [None]
    with pytest.raises(Undecodable, match="by hand"):
        await broker.submit([submission(rid=RID)])


async def test_events_from_a_place_on(broker: Broker) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    await broker.emit([emission(delivery, seq, b"x") for seq in range(1, 12)])
    await broker.finish([finish(delivery)])
    ids = ["1-0", *(f"1-{seq}" for seq in range(1, 12)), "2-1"]
    assert [frame.id for frame in await broker.events(RID)] == ids
    assert [frame.id for frame in await broker.events(RID, "1-9")] == ["1-10", "1-11", "2-1"]
    assert [frame.id for frame in await broker.events(RID, "1-11")] == ["2-1"]
    assert await broker.events(RID, "2-1") == []
    assert await broker.events(OTHER) == []


async def test_at_most_a_thousand_events_at_once(broker: Broker) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, stream=True))
    await broker.emit([emission(delivery, seq, b"x") for seq in range(1, 1101)])
    first = await broker.events(RID)
    assert len(first) == 1000
    rest = await broker.events(RID, first[-1].id)
    assert [frame.seq for frame in first + rest] == list(range(1101))


# --- cards, queues, depth


def card(worker: str = "w1", max_queue_depth: int = 7, **fields: Any) -> Card:
    limits = Limits(
        max_batch_size=1, max_seq_len=128, max_queue_depth=max_queue_depth, max_request_bytes=1000
    )
    return Card(worker=worker, queue="q", model="m", limits=limits, **fields)


async def test_cards_are_shown_and_taken_down(broker: Broker, raw: Any) -> None:
    assert await broker.cards() == []
    await broker.announce(card("w2"))
    await broker.announce(card("w1"))
    assert await broker.cards() == [card("w1"), card("w2")]
    await broker.announce(card("w1", capacity=5, state="draining"))
    assert (await broker.cards())[0] == card("w1", capacity=5, state="draining")
    await broker.announce(card("w1"), life_ms=0)
    assert await broker.cards() == [card("w2")]
    assert raw.hkeys(f"{T}:workers") == [b"w2"]


async def test_a_card_that_is_not_refreshed_disappears(broker: Broker, raw: Any) -> None:
    await broker.announce(card("w2"))
    await broker.announce(card("w1"), life_ms=1)
    until = int(raw.hget(f"{T}:workers", "w1").partition(b"|")[0])
    await eventually(lambda: now_ms(raw) > until)
    assert await broker.cards() == [card("w2")]
    await broker.announce(card("w2"))
    assert raw.hkeys(f"{T}:workers") == [b"w2"]


async def test_a_card_that_cannot_be_read_is_left_out(broker: Broker, raw: Any) -> None:
    far = now_ms(raw) + 60_000
    await broker.announce(card("w1"))
    good = raw.hget(f"{T}:workers", "w1").partition(b"|")[2]
    for name, value in {
        "far version": f"{far}|".encode() + msgpack.packb({**msgpack.unpackb(good), "v": 9}),
        "garbage": f"{far}|".encode() + b"\xc1",
        "invalid": f"{far}|".encode() + msgpack.packb({"v": 1, "worker": "x"}),
    }.items():
        raw.hset(f"{T}:workers", name, value)
    assert await broker.cards() == [card("w1")]
    raw.hset(f"{T}:workers", "no time", b"soon|" + good)
    raw.hset(f"{T}:workers", "nothing", b"")
    assert await broker.cards() == [card("w1")]


async def test_a_card_without_a_time_is_swept(broker: Broker, raw: Any) -> None:
    raw.hset(f"{T}:workers", "no time", b"garbage")
    await broker.announce(card("w1"))
    assert raw.hkeys(f"{T}:workers") == [b"w1"]


async def test_queues_are_known_once_announced(broker: Broker, connections: Connections, raw: Any) -> None:
    assert await broker.queues() == []
    await Broker(connections, "b").announce(card())
    before = now_ms(raw)
    await Broker(connections, "a").announce(card())
    assert await broker.queues() == ["a", "b"]
    assert before <= int(raw.hget("streamfleet:queues", "a")) <= now_ms(raw)


async def test_queues_and_shards_keep_apart(connections: Connections, raw: Any) -> None:
    brokers = [Broker(connections, "a"), Broker(connections, "b"), Broker(connections, "a", shard=1)]
    for broker in brokers:
        await broker.create_groups()
        assert (await broker.submit([submission(rid=RID)]))[0].depth == 1
    assert await brokers[0].cancel([RID], "default") == ["cancelled"]
    assert [(await broker.depth()).open for broker in brokers] == [0, 1, 1]


async def test_depth(broker: Broker, connections: Connections) -> None:
    assert await Broker(connections, "nobody").depth() == Depth(0, 0, MAX_QUEUE_DEPTH, 0)
    await begin(broker, submission(lane="high"), submission(), submission(lane="bulk"))
    await broker.submit([submission(), submission()])
    await broker.announce(card(max_queue_depth=9))
    depth = await broker.depth()
    assert depth == Depth(queued=2, running=3, limit=9, dead=0)
    assert depth.open == 5


async def test_depth_of_a_key_of_another_kind(broker: Broker, raw: Any) -> None:
    raw.set(f"{T}:control", "x")
    with pytest.raises(BrokerUnavailable) as caught:
        await broker.depth()
    assert caught.value.reason == "refused"


async def test_names_belong_to_the_shard(broker: Broker, raw: Any, keys: Keys) -> None:
    (delivery,) = await begin(broker, submission(stream=True))
    raw.xadd(keys.lane("high"), {"x": "y"})
    await broker.start("w1", await take_all(broker), START)
    await broker.finish([finish(delivery)])
    await broker.announce(card())
    others = [key for key in raw.keys("*") if not key.startswith(keys.tag.encode() + b":")]
    assert others == [b"streamfleet:queues"]
