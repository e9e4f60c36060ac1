"""The steps of both sides by hand, a batch at a time and without an engine: for the server's own cost.

Requests and results are of a given number of bytes, deltas too, and cost the client as little as possible.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import redis.asyncio

from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.deliveries import Delivery, Emission, Finish
from streamfleet_common.keys import AGAIN
from streamfleet_common.schemas import LANES, Choice, End, Envelope, GenerateRequest, Start
from streamfleet_common.submissions import Submission
from streamfleet_common.subscriber import LEAVE_AFTER_S, Subscriber

OWNER = "bench-host:1:00000000"
DEADLINE_MS = 86_400_000
ALL = 10_000_000
"""More than are ever open at once."""


def submission(size: int, *, stream: bool) -> Submission:
    """A request of `size` bytes; `fresh` makes others of it."""
    envelope = Envelope(
        rid=f"00{uuid.uuid4().hex}",
        stream=stream,
        deadline_ms=DEADLINE_MS,
        request=GenerateRequest(prompt="x" * size),
    )
    over = len(Submission.of(envelope).payload) - size
    shorter = envelope.request.model_copy(update={"prompt": "x" * (size - over)})
    made = Submission.of(envelope.model_copy(update={"request": shorter}))
    if len(made.payload) > size:
        raise ValueError(f"no request is as small as {size} bytes")
    return made


def fresh(template: Submission, count: int, tenants: int = 1) -> list[Submission]:
    """As many requests like this one, under ids of their own, of so many tenants in turn."""
    old = template.envelope.rid
    made = []
    for number in range(count):
        rid = f"00{uuid.uuid4().hex}"
        tenant = f"t{number % tenants}" if tenants > 1 else template.envelope.tenant
        envelope = template.envelope.model_copy(update={"rid": rid, "tenant": tenant})
        payload = template.payload.replace(old.encode(), rid.encode())
        made.append(replace(template, envelope=envelope, payload=payload))
    return made


def result(size: int) -> End:
    """An end of about `size` bytes."""

    def end(length: int) -> End:
        choice = Choice(text="x" * length, token_ids=(7,), finish_reason="eos")
        return End(state="done", choices=(choice,), of=1)

    return end(max(1, size - (len(codec.encode(end(size))) - size)))


class Ear:
    """A listener that drops what it hears."""

    def heard(self, data: bytes) -> None: ...

    def missed(self) -> None: ...


class BrokerHand:
    """Producer and worker of one queue. Every step takes lists and is one call of the protocol."""

    def __init__(self, url: str, queue: str = "bench", sub_lanes: int = 1) -> None:
        self._url = url
        self._sub_lanes = sub_lanes
        self.redis: redis.asyncio.Redis = redis.asyncio.Redis.from_url(url)
        self._connections = Connections.open(url)
        self._broker = Broker(self._connections, queue)
        self._subscriber = Subscriber(self._connections)
        self._start = Start(worker=OWNER, model="none")
        self._ear = Ear()

    async def __aenter__(self) -> Self:
        await self.prepare()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._subscriber.close()
        await self._connections.close()
        await self.redis.aclose()

    def another(self, queue: str) -> BrokerHand:
        """For another queue on the same server."""
        return BrokerHand(self._url, queue)

    async def prepare(self) -> None:
        """Make the queue's groups."""
        if self._sub_lanes > 1:
            numbers: Mapping[Any, Any] = {"sub_lanes": self._sub_lanes, "sub_lanes_top": self._sub_lanes}
            await self.redis.hset(self._broker.keys.control, mapping=numbers)
        await self._broker.create_groups()

    # --- the steps

    async def listen(self, submissions: Sequence[Submission]) -> None:
        await self._subscriber.subscribe([(self._channel(one), self._ear) for one in submissions])

    async def submit(self, submissions: Sequence[Submission]) -> None:
        outcomes = await self._broker.submit(submissions, max_queue_depth=ALL)
        _expect(all(one.outcome == "accepted" for one in outcomes), "a request was refused")

    async def take(self, count: int) -> list[Delivery]:
        """Exactly so many, which must be there."""
        taken = await self._broker.take(OWNER, self._start, streams=(*AGAIN, *LANES), count=count)
        deliveries = [one for _, one in taken.started if isinstance(one, Delivery)]
        _expect(len(deliveries) == count, "not all requests could be taken")
        return deliveries

    async def emit(self, deliveries: Sequence[Delivery], seq: int, body: bytes) -> None:
        emitted = await self._broker.emit([Emission(one, "default", seq, body) for one in deliveries])
        _expect(all(emitted), "a delta was refused")

    async def finish(self, deliveries: Sequence[Delivery], end: End) -> None:
        finished = await self._broker.finish([Finish(one, end) for one in deliveries])
        _expect(all(finished), "an end was refused")

    async def leave(self, submissions: Sequence[Submission]) -> None:
        """Returns before the server has dealt with it: see `settle`."""
        self._subscriber.unsubscribe([self._channel(one) for one in submissions])
        # It is sent in the background; without a pause, all batches would go as one.
        for _ in range(3):
            await asyncio.sleep(0)

    async def settle(self) -> None:
        """Wait until the server has dealt with all that was sent on the subscriptions' connection."""
        # What was left is told to the server together, after a while.
        await asyncio.sleep(2 * LEAVE_AFTER_S)
        await self._subscriber.subscribe([("bench-settled", self._ear)])
        self._subscriber.unsubscribe(["bench-settled"])

    # --- the server

    async def flush(self) -> None:
        """An empty server, but for the queue's groups."""
        await self.redis.flushall()
        await self.prepare()

    async def cpu_us(self) -> float:
        """CPU time that the server has used so far; in microseconds, which /proc would round to 10,000."""
        used: dict[str, Any] = await self.redis.info("cpu")
        return 1e6 * (float(used["used_cpu_user"]) + float(used["used_cpu_sys"]))

    async def memory(self) -> int:
        """Bytes that the server holds, without the buffers of its clients and of its append-only file."""
        held: dict[str, Any] = await self.redis.info("memory")
        # INFO's own sum over the clients lags behind by a buffer or two, which shows in small queues.
        clients: list[dict[str, Any]] = await self.redis.client_list()
        of_clients = sum(int(client["tot-mem"]) for client in clients)
        return int(held["used_memory"]) - of_clients - int(held["mem_aof_buffer"])

    def _channel(self, one: Submission) -> str:
        return self._broker.keys.channel(one.envelope.tenant, one.envelope.rid)


def _expect(held: bool, otherwise: str) -> None:
    if not held:
        raise AssertionError(otherwise)
