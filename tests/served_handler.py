"""A handler behind its engine, as a worker has it, driven by hand."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from streamfleet_common.one_shot import CallRequest
from streamfleet_worker.engine.answer_cache import AnswerCache
from streamfleet_worker.engine.base import Arrival, Finished, Key, Parts, Step
from streamfleet_worker.handlers.engine import handler_engine
from streamfleet_worker.handlers.handler import Handler

PATIENCE_S = 60.0


class ServedHandler:
    """Takes calls and steps the engine; no batch waits to be filled."""

    def __init__(self, handler: Handler, answers: AnswerCache | None = None) -> None:
        self.handler = handler
        self.engine = handler_engine(handler, max_delay_s=0.0, answers=answers)
        self.steps: deque[Step] = deque()
        self.parts: dict[Key, list[Any]] = {}
        self.ends: dict[Key, Finished] = {}
        self._numbers = itertools.count()
        self._woken = threading.Event()
        self.engine.listen(self._woken.set)

    def add(self, inputs: Iterable[Any]) -> list[Key]:
        """Put calls into the engine, all at once."""
        arrivals = {}
        for value in inputs:
            job = self.engine.prepare(CallRequest(handler=self.handler.name, input=value))
            arrivals[f"call-{next(self._numbers)}", 1] = Arrival(job, time.monotonic(), 1e12)
        self.engine.add(arrivals)
        return list(arrivals)

    def step(self) -> Step:
        step = self.engine.step()
        self.steps.append(step)
        for output in step.outputs:
            assert output.key not in self.ends, "nothing comes after an end"
            if isinstance(output.event, Parts):
                self.parts.setdefault(output.key, []).extend(output.event.values)
            elif isinstance(output.event, Finished):
                self.ends[output.key] = output.event
        return step

    def go_on(self) -> None:
        """Step, once there is something to do."""
        self._woken.clear()
        # What is due later is a deadline, far away.
        while self.engine.due_in() != 0:
            assert self._woken.wait(PATIENCE_S), "nothing happens any more"
            self._woken.clear()
        self.step()

    def run(self, keys: Iterable[Key]) -> list[Finished]:
        """Step until these calls have ended."""
        wanted = list(keys)
        while any(key not in self.ends for key in wanted):
            self.go_on()
        return [self.ends[key] for key in wanted]

    def ask(self, *inputs: Any) -> list[Finished]:
        """What these calls, which may share batches, end with."""
        return self.run(self.add(inputs))

    def close(self) -> None:
        self.engine.close()


def told(end: Finished) -> Any:
    """What a call ended with: its output or outputs, or the words of its error."""
    if end.state == "done":
        return end.outputs[0] if len(end.outputs) == 1 else end.outputs
    assert end.error is not None
    return end.error.message
