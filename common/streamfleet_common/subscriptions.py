"""What the server knows of one connection's subscriptions, as far as it has been said and confirmed."""

from __future__ import annotations

from collections.abc import Container, Iterable


class Subscriptions:
    """The channels of one connection; begins anew with each."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        """Whose last command was SUBSCRIBE."""
        self.owed: dict[str, int] = {}
        """How many confirmations are still to come."""
        self.live: set[str] = set()
        """Asked for, and every confirmation has come."""

    def change(self, channels: Iterable[str], wanted: Container[str]) -> tuple[list[str], list[str]]:
        """Of these channels, those to be subscribed now and those to be left."""
        new, gone = [], []
        for channel in channels:
            if channel in wanted:
                if channel not in self.asked:
                    new.append(channel)
                    self.owed[channel] = self.owed.get(channel, 0) + 1
            elif channel in self.asked:
                gone.append(channel)
        self.asked.update(new)
        self.asked.difference_update(gone)
        self.live.difference_update(gone)
        return new, gone

    def confirm(self, channel: str) -> bool:
        """Take a confirmation. True if the channel is live now.

        One that was left and asked for again meanwhile has several to come, and the last one counts.
        """
        owed = self.owed.get(channel, 0) - 1
        if owed > 0:
            self.owed[channel] = owed
            return False
        self.owed.pop(channel, None)
        if channel not in self.asked:
            return False
        self.live.add(channel)
        return True

    def clear(self) -> None:
        self.asked.clear()
        self.owed.clear()
        self.live.clear()
