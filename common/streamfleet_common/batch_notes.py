"""Notes of the batches that a queue's workers launched: which requests ran together, for operators alone.

They are in no answer, since the ids are those of other tenants' requests too.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamfleet_common.steps import Steps

MOST_NOTES = 10_000
"""The queue keeps so many, or a few more: 12 MB where each names `MOST_RIDS` requests."""
MOST_RIDS = 64
LIFE_MS = 6 * 3600 * 1000
"""For so long after the last one, all are kept."""
PAGE = 500
RID_BYTES = 17
_HEAD = re.compile(rb"([^|]{1,200})\|([a-z]{1,32})\|(\d{1,9})\|([01](?:\.\d{1,6})?)\|(\d{1,9})\|", re.DOTALL)


@dataclass(frozen=True, slots=True)
class BatchNote:
    """A batch, and whose items or rows were in it."""

    id: str
    """As the `Batch` in the answers has it."""
    reason: str
    size: int
    padded_ratio: float
    requests: int
    """How many there were."""
    rids: tuple[str, ...] = field(repr=False)
    """Theirs: the first `MOST_RIDS`."""
    noted_at_ms: int = 0
    """Server ms; a moment after the launch."""

    def encode(self) -> bytes:
        """As it stands in the stream: text up to the last bar, then the ids, 17 bytes each."""
        head = f"{self.id}|{self.reason}|{self.size}|{self.padded_ratio:.4f}|{self.requests}|"
        return head.encode() + bytes.fromhex("".join(self.rids[:MOST_RIDS]))

    @classmethod
    def parse(cls, data: bytes, noted_at_ms: int = 0) -> BatchNote | None:
        """Read one; None if it is none."""
        found = _HEAD.match(data)
        if found is None:
            return None
        ids = data[found.end() :]
        try:
            name, reason = found[1].decode(), found[2].decode()
        except UnicodeDecodeError:
            return None
        rids = tuple([ids[at : at + RID_BYTES].hex() for at in range(0, len(ids), RID_BYTES)])
        return cls(name, reason, int(found[3]), float(found[4]), int(found[5]), rids, noted_at_ms)


class BatchNotes(Steps):
    """Write such notes, and look one up."""

    async def note_batches(self, notes: Sequence[BatchNote]) -> None:
        """Add these. One whose reply was lost may be there twice.

        Raises:
            BrokerUnavailable: at once, since nobody should wait for it.
        """

        def commands() -> Awaitable[list[Any]]:
            pipe = self._commands.pipeline(transaction=False)
            for note in notes:
                pipe.xadd(self.keys.batches, {"b": note.encode()}, maxlen=MOST_NOTES, approximate=True)
            pipe.pexpire(self.keys.batches, LIFE_MS)
            return pipe.execute()

        await self._calls.ask(commands, budget_s=0)

    async def batch_note(self, batch: str, *, since_ms: int, until_ms: int) -> BatchNote | None:
        """The note of a batch that was made between two times (server ms); None if there is none any more."""
        after: str = str(since_ms)
        while True:
            first = after

            def page(first: str = first) -> Awaitable[Any]:
                return self._commands.xrange(self.keys.batches, min=first, max=str(until_ms), count=PAGE)

            entries: list[tuple[bytes, dict[bytes, bytes]]] = await self._calls.ask(page)
            for eid, fields in entries:
                note = BatchNote.parse(fields.get(b"b", b""), int(eid.partition(b"-")[0]))
                if note is not None and note.id == batch:
                    return note
            if len(entries) < PAGE:
                return None
            after = f"({entries[-1][0].decode()}"
