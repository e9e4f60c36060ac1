"""Ends."""

from __future__ import annotations

from typing import Any

import pytest

from broker_parts import DONE, altered, begin, emission, finish, submission
from server_view import (
    OTHER,
    RID,
    Channel,
    T,
    assert_drained,
    everything,
    fields_of,
    log_of,
    now_ms,
)
from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.schemas import Choice, End, Prefill

PROTOCOLS = ("resp2", "resp3")


@pytest.mark.parametrize("stream", [False, True])
async def test_finish_makes_the_record_the_result(broker: Broker, raw: Any, stream: bool) -> None:
    (delivery,) = await begin(broker, submission(rid=RID, tenant="acme", stream=stream, result_ttl_ms=90_000))
    channel = Channel(raw, RID, "acme")
    running = fields_of(raw, RID)
    before = now_ms(raw)
    assert await broker.finish([finish(delivery)]) == [True]
    after = now_ms(raw)

    head, _, frame = raw.get(f"{T}:r:{RID}").partition(b"\n")
    assert head.decode().split("|") == ["ED", "0", "0", *running[-2:]]
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
