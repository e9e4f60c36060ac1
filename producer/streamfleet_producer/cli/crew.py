"""The workers of `streamfleet up`: started together, and started again when one ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from streamfleet_producer.cli.worker_process import WorkerProcess

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 30.0
SOUND_S = 60.0
"""A worker that has lived for so long did not fail at its start: the pauses begin anew."""


@dataclass(slots=True)
class Post:
    """One worker's place, and who fills it."""

    number: int
    settings: dict[str, object]
    worker: WorkerProcess
    started_at: float
    is_ready: bool = False
    failures: int = 0
    again_at: float | None = None
    """When the next worker starts, on the clock; None while one runs."""


@dataclass(slots=True)
class Crew:
    """`count` workers with the same settings. `tick` does what is due; `say` is told what happened."""

    count: int
    settings: Mapping[str, object]
    say: Callable[[str], None]
    start_worker: Callable[[Mapping[str, object]], WorkerProcess] = WorkerProcess
    clock: Callable[[], float] = time.monotonic
    posts: list[Post] = field(default_factory=list)
    has_served: bool = False
    """Some worker has been ready."""

    def start(self) -> None:
        """Start all workers."""
        for number in range(1, self.count + 1):
            settings = dict(self.settings)
            self.posts.append(Post(number, settings, self.start_worker(settings), self.clock()))

    @property
    def workers(self) -> Sequence[WorkerProcess]:
        return [post.worker for post in self.posts]

    @property
    def all_ready(self) -> bool:
        return all(post.is_ready for post in self.posts)

    def hopeless(self) -> WorkerProcess | None:
        """A worker that ended before any was ever ready: the next would fare no better."""
        if self.has_served:
            return None
        return next((worker for worker in self.workers if worker.status is not None), None)

    def tick(self) -> None:
        """Notice who is ready and who has ended, and fill the posts that are due."""
        for post in self.posts:
            if post.again_at is not None:
                if self.clock() >= post.again_at:
                    post.worker, post.started_at = self.start_worker(post.settings), self.clock()
                    post.again_at = None
            elif post.worker.status is not None:
                self._ended(post)
            elif post.worker.ready and not post.is_ready:
                self._ready(post)

    def terminate(self) -> None:
        """Let all drain."""
        for worker in self.workers:
            worker.terminate()

    @property
    def gone(self) -> bool:
        return all(worker.status is not None for worker in self.workers)

    def kill(self) -> None:
        """End all now."""
        for worker in self.workers:
            worker.kill()

    def _ready(self, post: Post) -> None:
        post.is_ready = self.has_served = True
        # Whoever scrapes its metrics should find its successor at the same place.
        post.settings["http_port"] = post.worker.port
        self.say(f"worker {post.number}  {post.worker.description}")
        self.say(f"          metrics {post.worker.metrics_url}")

    def _ended(self, post: Post) -> None:
        if self.clock() - post.started_at > SOUND_S:
            post.failures = 0
        pause_s = min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2.0**post.failures)
        post.failures += 1
        post.is_ready = False
        post.again_at = self.clock() + pause_s
        why = post.worker.why_ended()
        post.worker.kill()  # its keeper's pipes
        self.say(f"worker {post.number}  ended: {why}; another starts in {pause_s:.0f} s")
