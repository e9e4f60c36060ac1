"""The publisher: what the engine brings forth becomes emit and finish calls, one of each for many requests.

It never holds the engine up. While a call is under way, new tokens of a request join those that wait.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import structlog

from streamfleet_common import codec
from streamfleet_common.broker import Broker, Delivery, Emission, Finish
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.schemas import Delta, End, Failure, Prefill
from streamfleet_worker.engine.base import Finished, Key, Output, Tokens

CHECK_S = 1.0
"""How often the fence of a request that shows nothing (one-shot, or still waiting) is looked at."""
MAX_BACKOFF_S = 2.0

log = structlog.get_logger()


@dataclass(slots=True)
class Held:
    """A request this worker answers for, from its start to its end."""

    delivery: Delivery
    tenant: str
    stream: bool
    seq: int = 0
    """Number of the last event made."""
    prefill: Prefill | None = None
    tokens: list[Tokens] | None = None
    finished: Finished | None = None
    held_at: float = 0.0
    """Loop time at which it was begun."""
    checked_at: float = 0.0


class Publisher:
    """Owns what is held.

    `on_lost` is told of keys that are no longer ours, `on_done` of requests that have ended.
    """

    def __init__(
        self,
        broker: Broker,
        identity: End,
        on_lost: Callable[[list[Key]], None],
        on_done: Callable[[list[tuple[Held, End]]], None],
    ) -> None:
        self._broker = broker
        self._identity = identity
        self._on_lost = on_lost
        self._on_done = on_done
        self._held: dict[Key, Held] = {}
        self._dirty: dict[Key, Held] = {}
        self._work = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def held(self) -> int:
        """Requests begun and not yet ended."""
        return len(self._held)

    def hold(self, delivery: Delivery, *, tenant: str, stream: bool) -> None:
        """Answer for a request from now on."""
        now = asyncio.get_running_loop().time()
        self._held[delivery.key] = Held(delivery, tenant, stream, held_at=now, checked_at=now)
        self._empty.clear()

    def take(self, outputs: list[Output]) -> None:
        """Take what a step brought forth; returns at once."""
        for output in outputs:
            held = self._held.get(output.key)
            if held is None or held.finished is not None:
                continue  # lost meanwhile
            event = output.event
            if isinstance(event, Finished):
                held.finished = event
            elif not held.stream:
                continue  # the end will tell it all
            elif isinstance(event, Tokens):
                if held.tokens is None:
                    held.tokens = []
                _merge(held.tokens, event)
            else:
                held.prefill = event
            self._dirty[output.key] = held
        if self._dirty:
            self._work.set()

    def give_up(self, finished: Finished) -> None:
        """End everything held in this way."""
        self.take([Output(key, finished) for key in self._held])

    async def wait_empty(self) -> None:
        """Until every request held has ended."""
        await self._empty.wait()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            try:
                async with asyncio.timeout(CHECK_S):
                    await self._work.wait()
            except TimeoutError:
                pass
            self._work.clear()
            await self._publish()

    async def _publish(self) -> None:
        dirty, self._dirty = self._dirty, {}
        emissions, finishes = [], []
        for held in dirty.values():
            if held.stream:
                emissions += self._emissions(held)
            if held.finished is not None:
                finishes.append((held, self._end(held, held.finished)))
        emissions += self._checks()
        if emissions:
            await self._emit(emissions)
        finishes = [(held, end) for held, end in finishes if held.delivery.key in self._held]
        if finishes:
            await self._finish(finishes)

    def _emissions(self, held: Held) -> list[Emission]:
        events: list[Prefill | Delta] = []
        if held.prefill is not None:
            events.append(held.prefill)
        events += [
            Delta(
                index=tokens.index,
                token_ids=tuple(tokens.token_ids),
                texts=tuple(tokens.texts),
                logprobs=tuple(tokens.logprobs),
            )
            for tokens in held.tokens or ()
        ]
        held.prefill = held.tokens = None
        held.checked_at = asyncio.get_running_loop().time()
        first = held.seq + 1
        held.seq += len(events)
        return [
            Emission(held.delivery, held.tenant, seq, codec.encode(event))
            for seq, event in enumerate(events, first)
        ]

    def _checks(self) -> list[Emission]:
        now = asyncio.get_running_loop().time()
        checks = []
        for held in self._held.values():
            if held.finished is None and now - held.checked_at >= CHECK_S:
                held.checked_at = now
                checks.append(held)
        return [Emission(held.delivery, held.tenant, held.seq, b"") for held in checks]

    async def _emit(self, emissions: list[Emission]) -> None:
        # Repeated until answered, with the same events: the log drops what it has already.
        ours = await _insist(lambda: self._broker.emit(emissions))
        lost = [
            emission.delivery.key
            for emission, ok in zip(emissions, ours, strict=True)
            if not ok and emission.delivery.key in self._held
        ]
        if lost:
            self._drop(lost)

    async def _finish(self, finishes: list[tuple[Held, End]]) -> None:
        calls = [Finish(held.delivery, end) for held, end in finishes]
        await _insist(lambda: self._broker.finish(calls))
        for held, _ in finishes:
            self._held.pop(held.delivery.key, None)
        self._on_done(finishes)
        self._settle()

    def _drop(self, keys: list[Key]) -> None:
        keys = list(dict.fromkeys(keys))
        for key in keys:
            self._held.pop(key, None)
            self._dirty.pop(key, None)
        self._on_lost(keys)
        self._settle()

    def _settle(self) -> None:
        if not self._held:
            self._empty.set()

    def _end(self, held: Held, finished: Finished) -> End:
        return self._identity.model_copy(
            update={
                "state": finished.state,
                "choices": finished.choices,
                # A stream has told it already.
                "prefill": None if held.stream else finished.prefill,
                "error": Failure.of(finished.error) if finished.error is not None else None,
                "usage": finished.usage,
                "seed": finished.seed,
                "timing": finished.timing,
                "of": held.delivery.epoch if finished.choices else 0,
                "last_seq": held.seq,
            }
        )


async def _insist(call: Callable[[], Awaitable[list[bool]]]) -> list[bool]:
    failures = 0
    while True:
        try:
            return await call()
        except BrokerUnavailable as error:
            failures += 1
            pause_s = random.uniform(0, min(MAX_BACKOFF_S, 0.1 * 2**failures))
            log.warning("nothing can be published", error=str(error), retry_in_s=round(pause_s, 2))
            await asyncio.sleep(pause_s)


def _merge(waiting: list[Tokens], new: Tokens) -> None:
    for tokens in waiting:
        if tokens.index == new.index:
            tokens.token_ids += new.token_ids
            tokens.texts += new.texts
            tokens.logprobs += new.logprobs
            return
    waiting.append(new)
