"""The dead letters of a queue: requests that killed their workers, and entries that were no request."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamfleet_common.errors import InvalidRequest
from streamfleet_common.steps import Steps

AT_ONCE = 1000
_ID = re.compile(r"\d{1,20}-\d{1,20}")


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One of them. Numbers are 0 and names "" where the letter says nothing, as for a stray entry."""

    id: str
    """Of its entry in the stream of dead letters; begins with the time of burial (server ms)."""
    rid: str
    why: str
    tenant: str
    lane: str
    accepted_at_ms: int
    attempts: int
    crashes: int
    """Workers that were lost while they ran it."""
    solo_losses: int
    """Those of them that ran nothing else."""
    worker: str
    """The last of them."""
    digest: str
    size: int
    """Bytes of the payload, whether it was kept or not."""
    payload: bytes | None
    """The envelope; None unless the workers keep it (`dead_payload`)."""

    @property
    def buried_at_ms(self) -> int:
        return int(self.id.partition("-")[0])


class DeadLetters(Steps):
    """Read, drop, trim."""

    async def dead_letters(self, *, after: str = "", count: int = 100) -> list[DeadLetter]:
        """The oldest letters, or those behind the id `after`; at most `count`."""
        first = f"({checked_id(after)}" if after else "-"
        entries: Any = await self._calls.ask(
            lambda: self._commands.xrange(self.keys.dead, min=first, count=min(count, AT_ONCE))
        )
        return [_letter(entry, fields) for entry, fields in entries]

    async def dead_letter(self, id: str) -> DeadLetter | None:  # noqa: A002 (the word of the whole API)
        """One letter; None if there is none of this id."""
        place = checked_id(id)
        entries: Any = await self._calls.ask(
            lambda: self._commands.xrange(self.keys.dead, min=place, max=place, count=1)
        )
        return _letter(*entries[0]) if entries else None

    async def drop_dead(self, ids: Sequence[str]) -> int:
        """Delete letters; gives how many there were."""
        places = [checked_id(one) for one in ids]
        total = 0
        for start in range(0, len(places), AT_ONCE):
            some = places[start : start + AT_ONCE]
            # Repeated without harm: what is deleted is deleted.
            dropped: Any = await self._calls.ask(lambda some=some: self._commands.xdel(self.keys.dead, *some))  # type: ignore[misc]
            total += int(dropped)
        return total

    async def trim_dead(self, before_ms: int) -> int:
        """Delete the letters buried before this time (server ms); gives how many."""
        trimmed: Any = await self._calls.ask(
            lambda: self._commands.xtrim(self.keys.dead, minid=f"{before_ms}-0", approximate=False)
        )
        return int(trimmed)


def checked_id(id: str) -> str:  # noqa: A002
    """The id, if it has the form of one.

    Raises:
        InvalidRequest: it has not.
    """
    if _ID.fullmatch(id) is None:
        raise InvalidRequest("id: that of a dead letter is wanted, like 1795964645359-0")
    return id


def _letter(entry: bytes, fields: dict[bytes, bytes]) -> DeadLetter:
    def text(name: bytes) -> str:
        return fields.get(name, b"").decode("utf-8", "replace")

    def number(name: bytes) -> int:
        found = text(name)
        return int(found) if found.isascii() and found.isdigit() else 0

    return DeadLetter(
        id=entry.decode(),
        rid=text(b"rid"),
        why=text(b"why"),
        tenant=text(b"tenant"),
        lane=text(b"lane"),
        accepted_at_ms=number(b"accepted"),
        attempts=number(b"attempts"),
        crashes=number(b"crashes"),
        solo_losses=number(b"solo"),
        worker=text(b"worker"),
        digest=text(b"digest"),
        size=number(b"bytes"),
        payload=fields.get(b"payload"),
    )
