"""Channels within a process, in place of pub/sub."""

from __future__ import annotations

from collections.abc import Iterable

from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.listeners import Ear, Ears, Listener, tell
from streamfleet_common.subscriber import Subscriber


class MemoryChannels:
    """Who listens on which channel. While it `is_down` nothing arrives, and what is said is lost."""

    def __init__(self) -> None:
        self.ears = Ears()
        self.is_down = False

    def publish(self, channel: str, data: bytes) -> None:
        for ear in () if self.is_down else self.ears.of(channel):
            tell(ear.listener.heard, data)

    def come_back(self) -> None:
        """Let messages arrive again, and tell everybody that some may be missing."""
        self.is_down = False
        for channel in tuple(self.ears):
            for ear in self.ears.of(channel):
                tell(ear.listener.missed)


class MemorySubscriber(Subscriber):
    """One client's subscriptions on such channels. A subscription is confirmed at once."""

    def __init__(self, channels: MemoryChannels) -> None:
        self._channels = channels
        self._mine: list[tuple[str, Ear]] = []

    async def subscribe(self, listeners: Iterable[tuple[str, Listener]], timeout_s: float = 5.0) -> None:  # noqa: ARG002
        if self._channels.is_down:
            raise BrokerUnavailable("the scripted fleet's Redis is down, as the test has told it to be")
        for channel, listener in listeners:
            ear = self._channels.ears.add(channel, listener)
            ear.ready.set_result(None)
            self._mine.append((channel, ear))

    def hand_over(self, channel: str, old: Listener, new: Listener) -> bool:
        return not self._channels.is_down and self._channels.ears.hand_over(channel, old, new)

    def listens(self, channel: str, listener: Listener) -> bool:
        return any(ear.listener is listener for ear in self._channels.ears.of(channel))

    def unsubscribe(self, channels: Iterable[str], listener: Listener | None = None) -> None:
        left = set(channels)
        gone = [
            (channel, ear)
            for channel, ear in self._mine
            if channel in left and (listener is None or ear.listener is listener)
        ]
        for channel, ear in gone:
            self._mine.remove((channel, ear))
            self._channels.ears.remove(channel, ear)

    async def close(self) -> None:
        for channel, ear in self._mine:
            self._channels.ears.remove(channel, ear)
        self._mine.clear()
