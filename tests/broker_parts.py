"""Small parts of which the tests of the broker and the subscriber are made."""

from __future__ import annotations

import asyncio
from typing import Any

from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery, Emission, Entry, Finish
from streamfleet_common.schemas import LANES, Choice, Delta, End, Envelope, GenerateRequest, Start
from streamfleet_common.submissions import Submission

START = Start(worker="w1", model="m")
DONE = End(
    state="done", choices=(Choice(text="ab", token_ids=(1, 2), finish_reason="eos"),), of=1, last_seq=1
)


def submission(prompt: str = "Hi", **fields: Any) -> Submission:
    return Submission.of(Envelope(request=GenerateRequest(prompt=prompt), **fields))


async def take_all(broker: Broker, owner: str = "w1", count: int = 100) -> list[Entry]:
    """Read what waits in all lanes."""
    return await broker.read(owner, LANES, count, block_ms=None)


async def begin(broker: Broker, *submissions: Submission, owner: str = "w1") -> list[Delivery]:
    """Submit, read and start; in the order of the submissions."""
    await broker.submit(submissions)
    started = await broker.start(owner, await take_all(broker, owner), START)
    by_rid = {delivery.entry.rid: delivery for delivery in started if isinstance(delivery, Delivery)}
    return [by_rid[one.envelope.rid] for one in submissions]


def emission(delivery: Delivery, seq: int, body: bytes, tenant: str = "default") -> Emission:
    return Emission(delivery, tenant, seq, body)


def finish(delivery: Delivery, end: End = DONE) -> Finish:
    return Finish(delivery, end)


def delta(text: str = "a") -> Delta:
    return Delta(token_ids=(1,), texts=(text,))


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
