"""Who listens on which channel, apart from the connection that makes it so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol


class Listener(Protocol):
    """Whoever waits on a channel. Called on the event loop; must return at once."""

    def heard(self, data: bytes) -> None:
        """A message came."""

    def missed(self) -> None:
        """The connection was lost and is back: messages may be missing."""


@dataclass(slots=True, eq=False)
class Ear:
    """One listener on one channel; `ready` is done once the server has confirmed the subscription."""

    listener: Listener
    ready: asyncio.Future[None]


class Ears:
    """The ears on every channel that is wanted."""

    def __init__(self) -> None:
        self._ears: dict[str, list[Ear]] = {}

    def __len__(self) -> int:
        return len(self._ears)

    def __contains__(self, channel: object) -> bool:
        return channel in self._ears

    def __iter__(self) -> Iterator[str]:
        return iter(self._ears)

    def of(self, channel: str) -> tuple[Ear, ...]:
        """Those on a channel, as they are now: they may come and go while they are told something."""
        return tuple(self._ears.get(channel, ()))

    def add(self, channel: str, listener: Listener) -> Ear:
        ear = Ear(listener, asyncio.get_running_loop().create_future())
        self._ears.setdefault(channel, []).append(ear)
        return ear

    def hand_over(self, channel: str, old: Listener, new: Listener) -> bool:
        """Let one listener take another's place. False if the other has none."""
        for ear in self._ears.get(channel, ()):
            if ear.listener is old:
                ear.listener = new
                return True
        return False

    def remove(self, channel: str, ear: Ear) -> bool:
        """Take one away. True if that leaves the channel without any."""
        ears = self._ears.get(channel, [])
        if ear not in ears:
            return False
        ears.remove(ear)
        if not ear.ready.done():
            # Somebody else took the channel down: whoever waits for it need not wait any longer.
            ear.ready.set_result(None)
        elif not ear.ready.cancelled():
            ear.ready.exception()  # raised for another channel of the same call already
        if not ears:
            del self._ears[channel]
        return not ears

    def fail(self, error: Exception) -> None:
        """Fail everybody who still waits for a confirmation."""
        for ears in self._ears.values():
            for ear in ears:
                if not ear.ready.done():
                    ear.ready.set_exception(error)

    def clear(self) -> None:
        self._ears.clear()


def give_up(ears: Iterable[Ear]) -> None:
    """Let whoever waits for these to be confirmed wait no longer."""
    for ear in ears:
        if not ear.ready.done():
            ear.ready.set_exception(TimeoutError())


def tell(method: Callable[..., None], *args: bytes) -> None:
    """Call a listener. Its fault must not silence all the others: the loop's handler is told of it."""
    try:
        method(*args)
    except Exception as error:  # noqa: BLE001 (see above)
        asyncio.get_running_loop().call_exception_handler(
            {"message": "a listener failed", "exception": error}
        )
