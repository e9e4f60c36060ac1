"""The thread that a handler runs on: the same for its context objects and for every batch."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from streamfleet_worker.engine.item import Progress


class Job:
    """Something that the thread does in its turn, and what it came to."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._work = work
        self._done = threading.Lock()  # held until it is done; an Event would cost as much as a small batch
        self._done.acquire()
        self._error: BaseException | None = None
        self._given: Any = None
        self._dropped = False
        self.seconds = 0.0
        """How long it took."""

    @property
    def is_done(self) -> bool:
        return not self._done.locked()

    def run(self) -> None:
        """Do it, unless nobody wants it any more."""
        began = time.perf_counter()
        try:
            if not self._dropped:
                self._given = self._work()
        except BaseException as error:  # noqa: BLE001  it is raised again where it is asked for
            self._error = error
        self.seconds = time.perf_counter() - began
        self._done.release()

    @property
    def exit_status(self) -> int:
        """What a process ends with that comes out of it: 0, or what it asked for, or 1 after an error."""
        if self._error is None:
            return 0
        # What a handler raises comes as the cause of an error of ours.
        asked = self._error.__cause__
        if not isinstance(asked, SystemExit):
            return 1
        return asked.code & 0xFF if isinstance(asked.code, int) else int(asked.code is not None)

    def result(self) -> Any:
        """What it gave; waits for that. Raises what it raised."""
        with self._done:  # which nobody takes again
            pass
        if self._error is not None:
            raise self._error
        return self._given

    def drop(self) -> None:
        """Do not begin it, if it has not begun."""
        self._dropped = True


class HandlerThread:
    """Runs jobs in their order. `done` is called there after each.

    A process that a job forks ends here, should it come out of the job: nobody waits for it there.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self.done: Callable[[], None] = _nobody
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="handler", daemon=True)
        self._thread.start()

    def put(self, job: Job) -> None:
        """Have a job done when those before it are."""
        self._jobs.put(job)

    def call(self, work: Callable[[], Any]) -> Any:
        """Have something done, and wait for it. Raises what it raises."""
        job = Job(work)
        self.put(job)
        return job.result()

    def close(self) -> None:
        """End it after the job that it is at, however long that takes."""
        self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            if os.getpid() != self._pid:
                os._exit(job.exit_status)
            self.done()


class Called:
    """A batch that one job computes: it gives an outcome for each item."""

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def is_ready(self) -> bool:
        return self._job.is_done

    def advance(self) -> Progress:
        return Progress(self._job.result(), device_s=self._job.seconds)

    def close(self) -> None:
        self._job.drop()


def _nobody() -> None:
    pass
