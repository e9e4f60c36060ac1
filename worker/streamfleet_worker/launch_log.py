"""Which requests shared a batch, told to Redis where that costs nothing that matters."""

from __future__ import annotations

import asyncio

import structlog

from streamfleet_common.batch_notes import MOST_RIDS, BatchNote, BatchNotes
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.schemas import Batch
from streamfleet_worker.engine.base import Launch

ROUND_S = 0.5
MOST_A_ROUND = 50
"""So many batches are noted in a round; at the hundreds a second that tiny models do, not all are."""
_BLANK = Batch(id="")

log = structlog.get_logger()


def batch_id(worker: str, launch: Launch) -> str:
    """Its name, which no other batch of the fleet has: a worker's name is that of one process alone."""
    return f"{worker[-180:]}/{launch.number}"


def batch_of(worker: str, launch: Launch) -> Batch:
    """What an answer says of the batch that it ran in."""
    return _BLANK.changed(
        {
            "id": batch_id(worker, launch),
            "size": launch.size,
            # Digits cost bytes and time in every answer.
            "padded_ratio": round(launch.padded_ratio, 4) if launch.padded_ratio else 0.0,
            "reason": launch.reason,
        }
    )


class Batches:
    """The same for answers of one batch after the other, made once for all of a batch."""

    def __init__(self) -> None:
        self._launch: Launch | None = None
        self._batch: Batch | None = None

    def of(self, worker: str, launch: Launch | None) -> Batch | None:
        """What an answer says of this launch; None if there was none."""
        if launch is not self._launch:
            self._launch, self._batch = launch, None if launch is None else batch_of(worker, launch)
        return self._batch


class LaunchLog:
    """Notes launches with the ids of their requests.

    Nobody ever waits for it: what it cannot tell in time, since Redis is away or there are too many, it
    drops.
    """

    def __init__(self, broker: BatchNotes, worker: str) -> None:
        self._broker = broker
        self._worker = worker
        self._launches: list[Launch] = []
        self._work = asyncio.Event()
        self._has_failed = False

    def take(self, launches: list[Launch]) -> None:
        """Note these, if there is room."""
        if not launches or len(self._launches) >= MOST_A_ROUND:
            return
        self._launches += launches
        self._work.set()

    async def run(self) -> None:
        """Tell Redis, round by round, until cancelled."""
        while True:
            await self._work.wait()
            # First, so that a burst makes one round.
            await asyncio.sleep(ROUND_S)
            self._work.clear()
            launches, self._launches = self._launches[:MOST_A_ROUND], []
            notes = [self._note(launch) for launch in launches if launch.keys]
            if notes:
                await self._tell(notes)

    async def _tell(self, notes: list[BatchNote]) -> None:
        try:
            await self._broker.note_batches(notes)
        except BrokerUnavailable as error:
            if not self._has_failed:
                log.info("batches cannot be noted", error=str(error))
            self._has_failed = True
        else:
            self._has_failed = False

    def _note(self, launch: Launch) -> BatchNote:
        return BatchNote(
            batch_id(self._worker, launch),
            launch.reason,
            launch.size,
            launch.padded_ratio,
            len(launch.keys),
            tuple([rid for rid, _ in launch.keys[:MOST_RIDS]]),
        )
