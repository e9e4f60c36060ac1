"""A worker moved by hand: a test takes every step of the protocol itself, in the order it wants."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Self

import redis.asyncio

from stopping import stopped
from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.cards import Card, Limits
from streamfleet_common.connection_kinds import Plain
from streamfleet_common.connections import Connections
from streamfleet_common.deliveries import Delivery, Emission, Entry, Finish
from streamfleet_common.errors import StreamfleetError
from streamfleet_common.keys import LETTERS
from streamfleet_common.one_shot import HandlerCard
from streamfleet_common.schemas import Choice, Delta, End, Envelope, Event, Failure, Start
from streamfleet_common.token_layout import TokenLayout

_LONG_MS = 24 * 3600 * 1000


@dataclass
class Work:
    """A request that this worker runs."""

    delivery: Delivery
    envelope: Envelope
    seq: int = 0

    @property
    def rid(self) -> str:
        return self.envelope.rid

    @property
    def prompt(self) -> str:
        """Its text; empty if it has none."""
        return getattr(self.envelope.request, "prompt", None) or ""


def delta(text: str, first_id: int = 0) -> Delta:
    """A delta with a token for each character, counted up from `first_id`."""
    ids = tuple(range(first_id, first_id + len(text)))
    return Delta(token_ids=ids, texts=tuple(text))


def done(text: str, *, of: int, last_seq: int) -> End:
    choice = Choice(text=text, token_ids=tuple(range(len(text))), finish_reason="length")
    return End(state="done", of=of, last_seq=last_seq, choices=(choice,))


class HandWorker:
    def __init__(self, url: str, queue: str = "q", name: str = "w1") -> None:
        self.queue = queue
        self.name = name
        self._connections = Connections.open(url)
        self.broker = Broker(self._connections, queue)
        self.redis: redis.asyncio.Redis = redis.asyncio.Redis.from_url(url, connection_class=Plain)
        self.start = Start(worker=name, model="m")

    async def __aenter__(self) -> Self:
        await self.broker.create_groups()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._connections.close()
        await self.redis.aclose()

    async def announce(
        self,
        *,
        life_ms: int = 60_000,
        model: str = "m",
        tasks: Sequence[str] = ("generate",),
        max_seq_len: int = 1000,
        max_queue_depth: int = 1000,
        max_request_bytes: int = codec.MAX_REQUEST_BYTES,
        vocab_size: int = 0,
        layout: TokenLayout | None = None,
        handler: HandlerCard | None = None,
    ) -> None:
        limits = Limits(
            max_batch_size=32,
            max_seq_len=max_seq_len,
            max_queue_depth=max_queue_depth,
            max_request_bytes=max_request_bytes,
            vocab_size=vocab_size,
        )
        card = Card(
            worker=self.name,
            queue=self.queue,
            model=model,
            tasks=tuple(tasks),
            limits=limits,
            layout=layout,
            handler=handler,
        )
        await self.broker.announce(card, life_ms=life_ms)

    async def take(self, count: int = 1) -> list[Work]:
        """Read and start exactly `count` requests; waits for them."""
        taken: list[Work] = []
        while len(taken) < count:
            taken += await self.begin(
                await self.broker.read(self.name, tuple(LETTERS), count - len(taken), block_ms=1000)
            )
        return taken

    async def begin(self, entries: Sequence[Entry]) -> list[Work]:
        """Start what was read, but for what has been cancelled meanwhile."""
        begun: list[Work] = []
        for started in await self.broker.start(self.name, entries, self.start) if entries else ():
            if started == "gone":
                continue
            assert isinstance(started, Delivery)
            begun.append(Work(started, codec.decode_envelope(started.entry.payload)))
        return begun

    async def emit(self, work: Work, event: Event) -> bool:
        """Publish and log an event, as a worker does."""
        work.seq += 1
        emission = Emission(work.delivery, work.envelope.tenant, work.seq, codec.encode(event))
        return (await self.broker.emit([emission]))[0]

    async def log(self, work: Work, event: Event) -> None:
        """Log an event, but lose its message."""
        work.seq += 1
        place = f"{work.delivery.epoch}-{work.seq}"
        frame = place.encode() + b" " + codec.encode(event)
        await self.redis.xadd(self.broker.keys.log(work.rid), {"f": frame}, id=place)

    async def publish(self, work: Work, frame: bytes) -> None:
        """Send any bytes at all to a request's listeners."""
        await self.redis.publish(self.broker.keys.channel(work.envelope.tenant, work.rid), frame)

    async def finish(self, work: Work, text: str, **fields: Any) -> bool:
        end = done(text, of=work.delivery.epoch, last_seq=work.seq)
        return (await self.broker.finish([Finish(work.delivery, end.model_copy(update=fields))]))[0]

    async def answer(self, work: Work, **fields: Any) -> bool:
        """End a one-shot request with these fields of its end."""
        end = End(state="done", of=work.delivery.epoch, last_seq=work.seq, **fields)
        return (await self.broker.finish([Finish(work.delivery, end)]))[0]

    @asynccontextmanager
    async def serving(self, answer: Callable[[Any], dict[str, Any]]) -> AsyncIterator[list[Any]]:
        """Answer whatever comes with the fields that `answer` makes of it, or with the error that it raises.

        Gives the requests, as they come. Once for each worker: its last read is given up, and what that had
        taken by then with it.
        """
        asked: list[Any] = []

        async def serve() -> None:
            while True:
                (work,) = await self.take()
                asked.append(work.envelope.request)
                try:
                    fields = answer(work.envelope.request)
                except StreamfleetError as error:
                    await self.fail(work, error)
                else:
                    await self.answer(work, **fields)

        task = asyncio.create_task(serve())
        try:
            yield asked
        finally:
            await stopped(task)

    async def fail(
        self, work: Work, error: StreamfleetError, state: Literal["failed", "dead"] = "failed"
    ) -> bool:
        end = End(state=state, error=Failure.of(error), last_seq=work.seq)
        return (await self.broker.finish([Finish(work.delivery, end)]))[0]

    async def lose(self, work: Work) -> None:
        """Let a sweep take back a running request, as if its worker had fallen silent; see its policy."""
        keys, entry = self.broker.keys, work.delivery.entry
        # Silent for longer than any lease: what a sweep goes by.
        await self.redis.xclaim(
            keys.stream(entry.stream), "w", self.name, 0, [entry.eid], idle=_LONG_MS, justid=True
        )
        now = int((await self.redis.time())[0]) * 1000
        await self.redis.hset(keys.sweep, mapping={"last": now, "grace_until": 0})
        swept = await self.broker.sweep(lease_ms=_LONG_MS - 1)
        assert swept.requeued + swept.failed == 1, swept

    async def cut_subscribers(self) -> None:
        """Cut every pub/sub connection."""
        await self.redis.client_kill_filter(_type="pubsub")

    async def channels(self) -> list[bytes]:
        """What anybody listens to."""
        names: Any = await self.redis.pubsub_channels()
        return list(names)
