"""Small parts of which the tests of the broker and the subscriber are made."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from streamfleet_common.broker import Broker
from streamfleet_common.cards import Card, Limits
from streamfleet_common.deliveries import Delivery, Emission, Entry, Finish
from streamfleet_common.keys import LETTERS, Stream
from streamfleet_common.schemas import Choice, Delta, End, Envelope, GenerateRequest, Start
from streamfleet_common.submissions import Submission

START = Start(worker="w1", model="m")
DONE = End(
    state="done", choices=(Choice(text="ab", token_ids=(1, 2), finish_reason="eos"),), of=1, last_seq=1
)
FAILED = End(state="failed")
STREAMS: tuple[Stream, ...] = tuple(LETTERS)
"""Every stream of work."""


def name_of(stream: Stream, sub_lane: int) -> str:
    """The end of a stream's key."""
    return f"{stream}:{sub_lane}" if sub_lane else stream


def submission(prompt: str = "Hi", max_tokens: int = 128, **fields: Any) -> Submission:
    return Submission.of(Envelope(request=GenerateRequest(prompt=prompt, max_tokens=max_tokens), **fields))


async def take_all(broker: Broker, owner: str = "w1", count: int = 1000) -> list[Entry]:
    """Read what waits in all streams."""
    return await broker.read(owner, STREAMS, count, block_ms=None)


async def begin(broker: Broker, *submissions: Submission, owner: str = "w1") -> list[Delivery]:
    """Submit, read and start; in the order of the submissions."""
    await broker.submit(submissions)
    by_rid = {delivery.entry.rid: delivery for delivery in await begin_waiting(broker, owner)}
    return [by_rid[one.envelope.rid] for one in submissions]


async def begin_waiting(broker: Broker, owner: str = "w1") -> list[Delivery]:
    """Read and start all that waits, suspects too."""
    started = await broker.start(owner, await take_all(broker, owner), START)
    return [delivery for delivery in started if isinstance(delivery, Delivery)]


def emission(delivery: Delivery, seq: int, body: bytes, tenant: str = "default") -> Emission:
    return Emission(delivery, tenant, seq, body)


def finish(delivery: Delivery, end: End = DONE) -> Finish:
    return Finish(delivery, end)


def retry(delivery: Delivery, end: End = FAILED, after_ms: int | None = None) -> Finish:
    return Finish(delivery, end, retry=True, retry_after_ms=after_ms)


def altered(delivery: Delivery, **changes: Any) -> Delivery:
    """The same delivery but for these fields; `eid` is its entry's."""
    eid = changes.pop("eid", None)
    if eid is not None:
        changes["entry"] = replace(delivery.entry, eid=eid)
    return replace(delivery, **changes)


def card(worker: str = "w1", max_queue_depth: int = 7, max_queue_tokens: int = 0, **fields: Any) -> Card:
    limits = Limits(
        max_batch_size=1,
        max_seq_len=128,
        max_queue_depth=max_queue_depth,
        max_queue_tokens=max_queue_tokens,
        max_request_bytes=1000,
    )
    return Card(worker=worker, queue="q", model="m", limits=limits, **fields)


def delta(text: str = "a") -> Delta:
    return Delta(token_ids=(1,), texts=(text,))


CARD = card(max_queue_depth=100)


class Recorder:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.messages: list[bytes] = []
        self.gaps = 0
        self.told = asyncio.Event()

    def heard(self, data: bytes) -> None:
        self.messages.append(data)
        self.told.set()

    def missed(self) -> None:
        self.gaps += 1
        self.told.set()
