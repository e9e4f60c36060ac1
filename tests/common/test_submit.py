"""Submissions: what the server takes in, and what it refuses."""

from __future__ import annotations

import hashlib
from typing import Any

import msgpack
import pytest

from broker_parts import START, card, emission, finish, submission, take_all
from server_view import (
    OTHER,
    RID,
    T,
    assert_drained,
    calls_of,
    everything,
    fields_of,
    now_ms,
)
from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.calls import BATCH, BATCH_BYTES
from streamfleet_common.deliveries import Delivery
from streamfleet_common.errors import Undecodable
from streamfleet_common.schemas import Envelope, GenerateRequest
from streamfleet_common.scripts import Script
from streamfleet_common.submissions import Submission, Submitted

PROTOCOLS = ("resp2", "resp3")


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
        f"Q{accepted + 60_000}|0|b{eid.decode()}||0|0|0|0|{accepted}|b|s|5000|0.0.r|129|acme|{digest}"
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
    assert answers[3] == Submitted("full", depth=3, limit=3, reason="requests", retry_after_s=1.0)
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
    assert answers[1] == Submitted("full", depth=1, limit=1, reason="requests", retry_after_s=1.0)
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


def by_hand(rid: object = RID, deadline: object = 60_000, **changes: object) -> list[object]:
    """The values of one request, as another language would send them."""
    about = {
        "lane": "n",
        "stream": "-",
        "ttl": 5000,
        "policy": "0.0.r",
        "tokens": 9,
        "tenant": "acme",
        "digest": "0123abcd",
    }
    return [rid, deadline, "|".join(str(value) for value in {**about, **changes}.values()), b"payload"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("rid", value) for value in ("", RID.upper(), RID + "0", RID[:-1] + "|", RID[:-1] + "\n")),
        *(("deadline", value) for value in ("", 0, -1, "1.5", "1e3", 86_400_001, "soon", "060")),
        *(("lane", value) for value in ("", "normal", "N", "S", "n|n")),
        *(("stream", value) for value in ("", "x", "s|", "ss")),
        *(("ttl", value) for value in ("", 0, -1, "1.5", 604_800_001, "x")),
        *(("policy", value) for value in ("", "0.0", "0.0.x", "0.0.rf", "0..r", ".0.r", "1000.0.r")),
        *(("policy", value) for value in ("1.1.1.r", "-1.0.r", "0.0.r|", "a.b.r")),
        *(("tokens", value) for value in ("", "-1", "1.5", "1e3", "1000000000")),
        *(("tenant", value) for value in ("", "a|b", "a\nb", "a b", "a:b")),
        *(("digest", value) for value in ("", "a|b", "\n", "a" * 500)),
    ],
)
def test_submit_by_hand_is_held_to_the_bounds(raw: Any, name: str, value: object) -> None:
    text = Script.load("submit").text
    before = everything(raw)
    with pytest.raises(Exception, match="request 2 are not valid"):
        raw.eval(text, 1, T, 100, *by_hand(OTHER), *by_hand(**{name: value}))
    assert everything(raw) == before


def test_submit_by_hand(raw: Any) -> None:
    text = Script.load("submit").text
    assert raw.eval(text, 1, T, 1, *by_hand(), *by_hand(), *by_hand(digest="x"), *by_hand(OTHER)) == [
        b"accepted|1",
        b"duplicate|Q",
        b"conflict|Q",
        b"full|1|1|requests|1000",
    ]
    for values in (by_hand()[:-1], [*by_hand(), "more"], by_hand()[:1]):
        with pytest.raises(Exception, match="not valid"):
            raw.eval(text, 1, T, 1, *values)
