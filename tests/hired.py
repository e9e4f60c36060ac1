"""A worker in this process, with its engine at hand, and ways to see what became of requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from gated_engine import GatedEngine
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.errors import StreamfleetError
from streamfleet_common.records import Record
from streamfleet_common.schemas import Delta, End, Envelope, Event, GenerateRequest
from streamfleet_common.submissions import Submission
from streamfleet_worker.worker import Worker

PATIENCE_S = 60.0  # as in `eventually`


class Hired:
    """One worker on the queue `q`, from `start` to `dismiss`."""

    def __init__(self, url: str, name: str, engine: GatedEngine, **options: Any) -> None:
        self.engine = engine
        self.connections = Connections.open(url)
        settings: dict[str, Any] = {
            "max_queue_depth": 1000,
            "version": "0",
            "drain_timeout_s": 10.0,
            "block_ms": 100,
        }
        self.worker = Worker(Broker(self.connections, "q"), lambda: engine, name=name, **settings | options)
        self.running: asyncio.Task[None] | None = None

    async def start(self) -> Hired:
        assert await self.worker.start()
        self.running = asyncio.create_task(self.worker.run())
        return self

    async def drained(self) -> None:
        """Ask for a drain and wait for its end; raises what `run` raises."""
        self.worker.stop()
        await self.ended()

    async def ended(self) -> None:
        assert self.running is not None
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.shield(self.running)

    def metric(self, name: str, **labels: str) -> float:
        found = self.worker.metrics.registry.get_sample_value(f"streamfleet_{name}", {"queue": "q", **labels})
        assert found is not None, name
        return found

    async def dismiss(self) -> None:
        self.engine.is_open = True
        self.engine.prepared.set()
        if self.running is not None:
            self.worker.stop()
            with contextlib.suppress(StreamfleetError):
                await self.ended()
        await self.connections.close()


async def submit(broker: Broker, prompts: Sequence[str], *, n: int = 1, **fields: Any) -> list[str]:
    """Submit prompts, each for n answers; gives their rids."""
    envelopes = [
        Envelope(request=GenerateRequest(prompt=prompt, max_tokens=2000, n=n), **fields) for prompt in prompts
    ]
    for submitted in await broker.submit([Submission.of(envelope) for envelope in envelopes]):
        assert submitted.outcome == "accepted"
    return [envelope.rid for envelope in envelopes]


async def record(broker: Broker, rid: str) -> Record:
    (found,) = await broker.status([rid], "default")
    assert found is not None
    return found


async def ends(broker: Broker, rids: Sequence[str]) -> list[End]:
    """Wait until all these requests have ended; gives their ends."""
    records: list[Record | None] = []

    async def over() -> bool:
        records[:] = await broker.status(rids, "default")
        return all(found is not None and found.end is not None for found in records)

    await eventually_so(over, "an end for all")
    return [_end(found) for found in records]


async def end(broker: Broker, rid: str) -> End:
    return (await ends(broker, [rid]))[0]


def _end(found: Record | None) -> End:
    assert found is not None
    assert found.end is not None
    event = found.end.event()
    assert isinstance(event, End)
    return event


async def events(broker: Broker, rid: str) -> list[Event]:
    """All logged events of a streaming request, whose places must have no holes."""
    frames = await broker.events(rid)
    inner = [frame for frame in frames if not frame.is_end]
    assert [frame.seq for frame in inner] == list(range(len(inner)))
    assert len({frame.epoch for frame in inner}) <= 1
    return [frame.event() for frame in frames]


def text_of(logged: Sequence[Event]) -> str:
    """All deltas, joined."""
    return "".join(event.text for event in logged if isinstance(event, Delta))


async def eventually_so(happened: Callable[[], Coroutine[Any, Any, object]], what: str) -> None:
    """As `eventually`, for what has to be asked for."""
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await happened():  # noqa: ASYNC110 (the server has no event for it)
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"{what} did not come within {PATIENCE_S:.0f} s") from None
