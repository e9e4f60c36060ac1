"""Runs a handler's batches in processes of their own, for handlers that hold the interpreter."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

from streamfleet_common.errors import GenerationFailed
from streamfleet_worker.engine.item import ItemBatch
from streamfleet_worker.handlers.handler import Handler
from streamfleet_worker.handlers.pool_batch import PoolBatch
from streamfleet_worker.handlers.pool_member import PoolMember

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class ProcessPool:
    """A runner over `handler.processes` processes, each with context objects of its own; one batch in each.

    A process that dies in a batch fails the batch, and is replaced.

    Raises:
        ModelLoadFailed: a process cannot build what the handler needs.
    """

    ahead = 0

    def __init__(self, handler: Handler) -> None:
        self.slots = handler.processes
        self._changed = threading.Condition()
        self._waiting: deque[PoolBatch] = deque()
        self._numbers = itertools.count()
        self._wake: Callable[[], None] = _nobody
        self._members = [PoolMember(handler, self) for _ in range(handler.processes)]
        for member in self._members:
            member.start()
        with self._changed:
            self._changed.wait_for(
                lambda: self._lost() is not None or all(member.ready for member in self._members)
            )
        lost = self._lost()
        if lost is not None:
            self.close()
            raise lost

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes of memory that the processes have in use, where the system tells."""
        pages = 0
        for pid in self.pids:
            try:
                pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except (OSError, IndexError):
                continue
        return {"processes": pages * PAGE_BYTES} if pages else {}

    @property
    def pids(self) -> list[int]:
        """Of the processes that run now."""
        return [pid for member in self._members if (pid := member.pid) is not None]

    def launch(self, batch: ItemBatch) -> PoolBatch:
        """Begin a batch of `CallInput`s as soon as a process is free.

        One that no process is left for fails by its `advance`.
        """
        again = any(value.was_given for value in batch.values)
        texts = [value.take_text() for value in batch.values]
        running = PoolBatch(next(self._numbers), texts, again, self._ring)
        with self._changed:
            self._waiting.append(running)
        self._ring()
        self._fail_if_lost()
        return running

    def listen(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, from any thread, whenever a batch becomes ready."""
        self._wake = wake

    def is_broken(self) -> bool:
        """Whether one of the processes has died, and could not be started again."""
        return self._lost() is not None

    def close(self) -> None:
        """End all processes; their batches fail."""
        for member in self._members:
            member.stop()
        for member in self._members:
            member.join()

    # --- for the members, on their threads

    def take(self) -> PoolBatch | None:
        """The batch that waits longest."""
        with self._changed:
            while self._waiting:
                batch = self._waiting.popleft()
                if not batch.closed.is_set():
                    return batch
                batch.put(GenerationFailed("nobody wanted it any more"))
        return None

    def told(self) -> None:
        """A batch or a member has news."""
        self._fail_if_lost()
        with self._changed:
            self._changed.notify_all()
        self._wake()

    def _ring(self) -> None:
        for member in self._members:
            member.ring()

    def _lost(self) -> Exception | None:
        return next((member.lost for member in self._members if member.lost is not None), None)

    def _fail_if_lost(self) -> None:
        """Fail what waits once nobody is left to run it."""
        if any(member.lost is None for member in self._members):
            return
        with self._changed:
            waiting = list(self._waiting)
            self._waiting.clear()
        lost = self._lost()
        for batch in waiting:
            if lost is not None:
                batch.put(lost)


def _nobody() -> None:
    pass
