"""Which queue serves what: the model of an HTTP request names one."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamfleet_common.broker import Broker
from streamfleet_common.cards import Card
from streamfleet_common.errors import BrokerUnavailable, InvalidRequest, ModelNotFound
from streamfleet_producer.hub import Hub

LIFE_S = 3.0
"""How long what was read is believed."""
STALE_S = 60.0
"""How long it is believed while Redis is away."""
SLOW_S = 1.0
"""So long a reading is waited for by whoever could do with what was read before."""
MOST_QUEUES = 1024


@dataclass(frozen=True, slots=True)
class Served:
    """A queue, and what the model of its requests is to be called there; None if the name is the queue's."""

    queue: str
    model: str | None
    cards: tuple[Card, ...]
    """Of the live workers that serve it; none while it waits for a worker."""


class Directory:
    """The queues of one Redis with their workers' cards, read when they are needed, at most every `LIFE_S`.

    `queues` are those that can be reached; none names all.
    """

    def __init__(self, hub: Hub, queues: Sequence[str] = (), *, life_s: float = LIFE_S) -> None:
        self._hub = hub
        self._only = tuple(queues)
        self._life_s = life_s
        self._read_at = -math.inf
        self._cards: dict[str, tuple[Card, ...]] = {}
        self._brokers: dict[str, Broker] = {}
        self._reading: asyncio.Task[None] | None = None
        self._reading_since = -math.inf
        self._now = asyncio.get_running_loop().time

    async def find(self, name: str | None, kind: str, default: str | None = None) -> Served:
        """The queue that does this kind of work by the model, handler or queue of this name.

        Without a name it is `default`, or the only queue that does such work.

        Raises:
            ModelNotFound: there is none; `known` lists what there is.
            InvalidRequest: there is no name, and several queues would do.
            BrokerUnavailable: Redis cannot be reached, and nothing is known of it from before.
        """
        age_s = self._now() - self._read_at
        if age_s < self._life_s:
            if age_s > self._life_s / 2:
                self._read_on()  # ahead of need
            found = self._look(name or default, kind)
            if isinstance(found, Served):
                return found
        await self.refresh()
        found = self._look(name or default, kind)
        if isinstance(found, Served):
            return found
        raise found

    async def find_queue(self, name: str) -> Served:
        """The queue of this name, with all its workers.

        Raises:
            ModelNotFound: there is none; `known` lists what there is.
            BrokerUnavailable: as `find`.
        """
        if name not in self._cards or self._now() - self._read_at >= self._life_s:
            await self.refresh()
        if name not in self._cards:
            there = (
                f"there are: {', '.join(sorted(self._cards)[:16])}" if self._cards else "there is none yet"
            )
            raise self._nothing(f"no queue of this name; {there}", sorted(self._cards))
        return Served(name, None, self._cards[name])

    async def cards(self) -> Mapping[str, tuple[Card, ...]]:
        """The cards of the live workers of every queue that can be reached."""
        if self._now() - self._read_at >= self._life_s:
            await self.refresh()
        return self._cards

    def reaches(self, queue: str) -> bool:
        """Whether requests of this queue may be asked for here."""
        return not self._only or queue in self._only

    async def refresh(self) -> None:
        """Read it all anew; whoever asks while that is under way shares it.

        While Redis is away, or hangs, what was read before is left as it is.

        Raises:
            BrokerUnavailable: nothing was, or too long ago.
        """
        reading = self._read_on()
        now = self._now()
        left_s = None if now - self._read_at > STALE_S else max(0.0, self._reading_since + SLOW_S - now)
        await asyncio.wait([reading], timeout=left_s)
        if not reading.done():
            return
        if reading.cancelled():
            raise BrokerUnavailable("the gateway was closed", reason="closed")
        try:
            reading.result()
        except BrokerUnavailable:
            if self._now() - self._read_at > STALE_S:
                raise

    async def close(self) -> None:
        reading = self._reading
        if reading is not None:
            reading.cancel()
            await asyncio.wait([reading])

    # --- what was read

    def _look(self, name: str | None, kind: str) -> Served | InvalidRequest | ModelNotFound:
        if name is not None:
            return self._named(name, kind)
        doing = [queue for queue, cards in self._cards.items() if any(kind in card.tasks for card in cards)]
        names = doing or list(self._cards)
        if len(names) == 1:
            return Served(names[0], None, self._doing(names[0], kind))
        if names:
            why = "several queues would do" if doing else f"no live worker does {kind!r}"
            return InvalidRequest(f"{why}: name a queue as `model` ({', '.join(names[:16])})")
        return self._nothing("no worker has ever served a queue here: start one", ())

    def _named(self, name: str, kind: str) -> Served | ModelNotFound:
        for queue, cards in self._cards.items():
            suiting = tuple(card for card in cards if card.model == name and kind in card.tasks)
            if suiting:
                return Served(queue, name, suiting)
        if name in self._cards:
            return Served(name, None, self._doing(name, kind))
        for queue, cards in self._cards.items():
            if any(card.model == name for card in cards):
                # The client says best what it does instead.
                return Served(queue, name, tuple(card for card in cards if card.model == name))
        known = sorted({card.model for cards in self._cards.values() for card in cards} | set(self._cards))
        there = f"there are: {', '.join(known[:16])}" if known else "nothing is served here yet"
        return self._nothing(f"no model or queue of this name; {there}", known)

    def _doing(self, queue: str, kind: str) -> tuple[Card, ...]:
        return tuple(card for card in self._cards[queue] if kind in card.tasks)

    def _nothing(self, message: str, known: Sequence[str]) -> ModelNotFound:
        return ModelNotFound(message, known=list(known))

    # --- reading

    def _read_on(self) -> asyncio.Task[None]:
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(), name="directory")
            self._reading_since = self._now()
            self._reading.add_done_callback(_forget)
        return self._reading

    async def _read(self) -> None:
        try:
            names = self._only or tuple(await self.broker("default").queues())[:MOST_QUEUES]
            found = await asyncio.gather(*(self.broker(name).cards() for name in names))
            self._cards = {name: tuple(cards) for name, cards in zip(names, found, strict=True)}
            self._read_at = self._now()
            for name in self._brokers.keys() - set(names):
                del self._brokers[name]
        finally:
            self._reading = None

    def broker(self, queue: str) -> Broker:
        """What asks Redis about a queue."""
        broker = self._brokers.get(queue)
        if broker is None:
            broker = self._brokers[queue] = Broker(self._hub.connections, queue)
        return broker


def _forget(reading: asyncio.Task[None]) -> None:
    if not reading.cancelled():
        reading.exception()  # whoever needs it reads it himself, and is told what is wrong
