"""A batch that a process of the pool runs, or is to run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from streamfleet_worker.engine.item import Progress


class PoolBatch:
    """What the engine holds of it. What its process sends is put here by the thread that keeps the process.

    Args:
        number: its own among those of the pool.
        texts: its inputs as JSON.
        again: it is a part of a batch that has failed.
        ring: has those who keep the processes look at it.
    """

    def __init__(self, number: int, texts: list[bytes], again: bool, ring: Callable[[], None]) -> None:
        self.number = number
        self.texts = texts
        self.again = again
        self.closed = threading.Event()
        """Nobody wants the rest of it."""
        self._ring = ring
        self._news: queue.SimpleQueue[Progress | Exception] = queue.SimpleQueue()

    def put(self, news: Progress | Exception) -> None:
        """Something has come of it; or it has failed as a whole, and nothing more comes."""
        self._news.put(news)

    @property
    def is_ready(self) -> bool:
        return not self._news.empty()

    def advance(self) -> Progress:
        """Its next news, waited for if there are none yet.

        Raises:
            Exception: the batch as a whole has failed.
        """
        news = self._news.get()
        if isinstance(news, Exception):
            raise news
        return news

    def close(self) -> None:
        self.closed.set()
        self._ring()
