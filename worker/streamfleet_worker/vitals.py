"""The vitals: whether this process is alive, and whether it would take work now."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from streamfleet_common.errors import GenerationFailed, StreamfleetError
from streamfleet_worker.consumer import Consumer
from streamfleet_worker.engine_thread import EngineThread

BEAT_S = 0.5
STALE_S = 10.0
"""A loop that has not moved for so long is not alive; one that has not looked for work is not ready."""


class Vitals:
    """Measured by what was done last, not by what a connection or a thread says of itself.

    `unhealthy` and `unready` may be called from any thread, so that they answer when the event loop hangs.
    No single step of the engine takes as long as `step_limit_s`. `moved` is called while the loop moves.
    """

    def __init__(
        self,
        engine_thread: EngineThread,
        consumer: Consumer,
        step_limit_s: float,
        moved: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine_thread = engine_thread
        self._consumer = consumer
        self._step_limit_s = step_limit_s
        self._moved = moved
        self._clock = clock
        self._beat_at = clock()
        self._step_seen = (0, clock())
        self.state = "starting"
        """starting, ready, draining or stopped."""
        self.fault: StreamfleetError | None = None
        """What has died, if anything has."""

    async def run(self) -> None:
        """Feel the pulse until cancelled.

        Raises:
            GenerationFailed: the engine hangs.
        """
        while True:
            self.beat()
            if self.hung():
                raise GenerationFailed(
                    f"the engine has been in one step for over {self._step_limit_s:g} s", retryable=True
                )
            await asyncio.sleep(min(BEAT_S, self._step_limit_s / 4))

    def beat(self) -> None:
        """The event loop moves; note whether the engine does."""
        self._beat_at = self._clock()
        self._moved()
        if self._engine_thread.steps != self._step_seen[0] or not self._engine_thread.stepping:
            self._step_seen = (self._engine_thread.steps, self._beat_at)

    def since_poll_s(self) -> float:
        """How long ago a look for work was last completed."""
        return self._clock() - self._consumer.polled_at

    def unhealthy(self) -> str | None:
        """Why this process should be restarted, or None."""
        if self.state in ("starting", "stopped"):
            return None
        if self.fault is not None:
            return self.fault.message
        if not self._engine_thread.alive:
            return "the engine's thread has ended"
        now = self._clock()
        if now - self._beat_at > STALE_S:
            return f"the event loop has not moved for {now - self._beat_at:.0f} s"
        if self.hung():
            return f"the engine has been in one step for {now - self._step_seen[1]:.0f} s"
        return None

    def hung(self) -> bool:
        """Whether the engine is in a step that takes too long."""
        steps, since = self._step_seen
        return (
            self._engine_thread.stepping
            and steps == self._engine_thread.steps
            and self._clock() - since > self._step_limit_s
        )

    def unready(self) -> str | None:
        """Why no work would be taken now, or None."""
        if self.state != "ready":
            return self.state
        if self.since_poll_s() > STALE_S:
            return f"no work could be read for {self.since_poll_s():.0f} s"
        return self.unhealthy()
