"""The same scripts on two stages: a scripted fleet, and a worker played by hand beside a real server."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any, Protocol

from hand_worker import HandWorker, Work
from stopping import stopped
from streamfleet_common.one_shot import Embedding, HandlerCard
from streamfleet_common.schemas import Choice, Delta, Parts, Prefill, Start
from streamfleet_producer import Client, StreamfleetError
from streamfleet_producer.testing import ANYTHING, NEVER, Lost, ScriptedFleet


class Stage(Protocol):
    """Where a script is played: `on` says how a prompt is answered, `serve` does so of a handler."""

    def on(self, prompt: str, *steps: Any) -> None: ...

    def on_embed(self, vectors: list[list[float]]) -> None: ...

    async def serve(self, handler: str, *steps: Any, streams: bool = False) -> None: ...

    def client(self, **settings: Any) -> Client: ...

    async def limit(self, depth: int) -> None:
        """Let the queue hold so many requests."""

    def let_time_pass(self) -> None:
        """From now on deadlines come."""


class ScriptedStage:
    def __init__(self, exact: str) -> None:
        self.fleet = ScriptedFleet("q", model="m", time="stands", exact=exact, max_seq_len=1000)

    def on(self, prompt: str, *steps: Any) -> None:
        self.fleet.on_generate(prompt, *steps)

    def on_embed(self, vectors: list[list[float]]) -> None:
        self.fleet.on_embed(ANYTHING, vectors)

    async def serve(self, handler: str, *steps: Any, streams: bool = False) -> None:
        self.fleet.on_call(handler, *steps, streams=streams)

    def client(self, **settings: Any) -> Client:
        return self.fleet.client(**settings)

    async def limit(self, depth: int) -> None:
        self.fleet.memory.max_queue_depth = depth

    def let_time_pass(self) -> None:
        self.fleet.time.jumps = True


class RealStage:
    def __init__(self, url: str, worker: HandWorker, exact: str) -> None:
        self._url = url
        self._worker = worker
        worker.start = Start(worker="w1", model="m", exact=exact)
        self._exact = exact
        self._scripts: dict[str, tuple[Any, ...]] = {}
        self._played: dict[str, Iterator[Any]] = {}
        self._streams = False

    async def announce(self, **announced: Any) -> None:
        await self._worker.announce(tasks=("generate", "embed"), **announced)

    def on(self, prompt: str, *steps: Any) -> None:
        self._scripts[prompt] = steps

    def on_embed(self, vectors: list[list[float]]) -> None:
        self._scripts["embed"] = (vectors,)

    async def serve(self, handler: str, *steps: Any, streams: bool = False) -> None:
        self._scripts["call"], self._streams = steps, streams
        about = HandlerCard(streams=streams)
        await self._worker.announce(tasks=("call",), model=handler, handler=about)

    def client(self, **settings: Any) -> Client:
        # What is expected must come by itself, and not because the record was asked after a silence.
        return Client(self._url, "q", silence_s=60, **settings)

    async def limit(self, depth: int) -> None:
        await self.announce(max_queue_depth=depth)

    def let_time_pass(self) -> None:
        """It does."""

    async def play(self) -> None:
        """Play what comes, one request after the other; what never ends is left as it is."""
        while True:
            (work,) = await self._worker.take()
            if work.rid not in self._played:
                request = work.envelope.request
                self._played[work.rid] = iter(self._scripts[work.prompt or request.kind])
            await self._perform(work, self._played[work.rid])

    async def _perform(self, work: Work, steps: Iterator[Any]) -> None:
        texts: list[str] = []
        said: list[Any] = []
        for step in steps:
            if step is NEVER:
                return
            if isinstance(step, Lost):
                await self._worker.lose(work)
                return
            if isinstance(step, StreamfleetError):
                await self._worker.fail(work, step)
                return
            if work.envelope.request.kind == "generate":
                event: Delta | Prefill = (
                    Delta(token_ids=(len(texts),), texts=(step,)) if isinstance(step, str) else step
                )
                if isinstance(event, Delta):
                    texts += event.texts
                if work.envelope.stream:
                    await self._worker.emit(work, event)
            else:
                said.append(step)
                if self._streams and work.envelope.stream:
                    await self._worker.emit(work, Parts(values=(step,)))
        await self._end(work, texts, said)

    async def _end(self, work: Work, texts: list[str], said: list[Any]) -> None:
        about: dict[str, Any] = {"worker": "w1", "model": "m", "exact": self._exact}
        match work.envelope.request.kind:
            case "generate":
                ids = tuple(range(len(texts)))
                choice = Choice(
                    text="".join(texts), token_ids=ids, finish_reason="eos", last_token_id=ids[-1], seed=0
                )
                await self._worker.answer(work, choices=(choice,), seed=0, **about)
            case "embed":
                data = [Embedding(data=struct.pack(f"<{len(one)}f", *one)) for one in said[0]]
                await self._worker.answer(work, embeddings=tuple(data), **about)
            case _:
                outputs = tuple(said) if self._streams else (said[-1],)
                await self._worker.answer(work, outputs=outputs, **about)


@asynccontextmanager
async def scripted(exact: str = "") -> AsyncIterator[Stage]:
    stage = ScriptedStage(exact)
    yield stage
    stage.fleet.check()


@asynccontextmanager
async def real(url: str, exact: str = "") -> AsyncIterator[Stage]:
    async with HandWorker(url) as worker:
        stage = RealStage(url, worker, exact)
        await stage.announce()
        playing = asyncio.create_task(stage.play())
        try:
            yield stage
        finally:
            await stopped(playing)
