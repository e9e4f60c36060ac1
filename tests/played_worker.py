"""A hand-played worker in a thread, for tests whose own thread is busy with a command."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hand_worker import HandWorker

LIMIT_S = 60.0


@contextmanager
def played(
    url: str, answer: Callable[[Any], dict[str, Any]], queue: str = "q", **announced: Any
) -> Iterator[list[Any]]:
    """A worker that announces itself and answers as `HandWorker.serving`; gives the requests as they come."""
    asked: list[Any] = []
    ready = threading.Event()
    failures: list[BaseException] = []
    loop = asyncio.new_event_loop()
    end = asyncio.Event()

    def noted(request: Any) -> dict[str, Any]:
        asked.append(request)
        return answer(request)

    async def play() -> None:
        async with HandWorker(url, queue) as worker:
            await worker.announce(**announced)
            async with worker.serving(noted):
                ready.set()
                await end.wait()

    def run() -> None:
        try:
            loop.run_until_complete(play())
        except BaseException as error:  # noqa: BLE001 - told in the test's own thread
            failures.append(error)
        finally:
            ready.set()
            loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(LIMIT_S)
        yield asked
    finally:
        if thread.is_alive():
            loop.call_soon_threadsafe(end.set)
        thread.join(LIMIT_S)
        assert not failures, failures
