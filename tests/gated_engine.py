"""An engine that steps when a test lets it, and keeps what it was told."""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping
from typing import Any

from streamfleet_common.errors import GenerationFailed
from streamfleet_common.schemas import Request
from streamfleet_worker.engine.base import Arrival, Finished, Key, Output, Step, Tokens
from streamfleet_worker.engine.scripted import ScriptedEngine
from streamfleet_worker.intake import INLINE_BYTES

POLL_S = 0.002
SLOW = "SLOW " + "x" * INLINE_BYTES
"""Large enough to be prepared on a thread of its own."""


class GatedEngine(ScriptedEngine):
    """A scripted engine behind a gate.

    ==========  ==============================================================
    prompt      besides what the scripted engine does
    ==========  ==============================================================
    ``SLOW …``  `prepare` waits for `prepared`; see `SLOW`
    ``BREAK``   `prepare` raises what no engine should raise
    ``FAIL``    fails in its first step, the others go on
    ``ODD``     its text holds half a character, which has no bytes
    ==========  ==============================================================
    """

    def __init__(self, *, is_open: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.allowed = 0
        """Steps that may be taken in all while the gate is closed."""
        self.is_open = is_open
        self.taken = 0
        self.broken: BaseException | None = None
        """Raised by the next step."""
        self.prepared = threading.Event()
        self.preparing = threading.Event()
        self.added: list[str] = []
        self.cancelled: list[str] = []
        self.closed = threading.Event()
        self.freed = threading.Event()
        """A step that hangs goes on once this is set."""
        self.freed.set()
        self.most_held = 0

    def hang(self) -> None:
        """Let the next step, and all after it, take until `freed` is set."""
        self.freed.clear()

    def prepare(self, request: Request, scope: str = "") -> Any:
        prompt = getattr(request, "prompt", None) or ""
        if prompt.startswith("SLOW"):
            self.preparing.set()
            assert self.prepared.wait(60)
        if prompt == "BREAK":
            raise KeyError(prompt)
        return super().prepare(request, scope)

    def add(self, arrivals: Mapping[Key, Arrival]) -> None:
        super().add(arrivals)
        self.added += [rid for rid, _ in arrivals]
        room = self.room()
        self.most_held = max(self.most_held, room.running + room.waiting)

    def cancel(self, keys: Collection[Key]) -> None:
        super().cancel(keys)
        self.cancelled += [rid for rid, _ in keys]

    def due_in(self) -> float | None:
        due = super().due_in()
        if self.broken is not None:
            return 0.0
        if due is None or self.is_open or self.taken < self.allowed:
            return due
        return max(due, POLL_S)

    def step(self) -> Step:
        if self.broken is not None:
            raise self.broken
        assert self.freed.wait(60)
        self.taken += 1
        step = super().step()
        step.outputs = [self._twisted(output) for output in step.outputs]
        return step

    def close(self) -> None:
        super().close()
        self.closed.set()

    def _twisted(self, output: Output) -> Output:
        event = output.event
        if isinstance(event, Tokens) and event.texts == ["ODD"]:
            return Output(output.key, Tokens(event.index, event.token_ids, ["\ud83d"]))
        if isinstance(event, Finished) and event.choices and event.choices[0].text == "FAIL":
            return Output(output.key, Finished("failed", error=GenerationFailed("told to fail")))
        if isinstance(event, Finished) and event.choices and event.choices[0].text == "ODD":
            choice = event.choices[0].model_copy(update={"text": "\ud83d"})
            return Output(output.key, Finished("done", choices=(choice,)))
        return output
