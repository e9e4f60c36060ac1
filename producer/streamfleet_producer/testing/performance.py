"""The worker of a scripted fleet: plays the script of one request, step by step, in the fleet's time."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, cast

from streamfleet_common.errors import GenerationFailed, InvalidRequest, StreamfleetError
from streamfleet_common.one_shot import CallRequest
from streamfleet_common.schemas import End, Failure, FinishReason, GenerateRequest, Parts, Start, Usage
from streamfleet_producer.testing.memory_queue import MemoryQueue, MemoryRequest
from streamfleet_producer.testing.one_shot_answers import one_shot_end
from streamfleet_producer.testing.script import Lost, Rule, Wait
from streamfleet_producer.testing.virtual_time import VirtualTime
from streamfleet_producer.testing.writing import Writing


class Performance:
    """One request and its rule. `fault` is told what is wrong with the script itself."""

    def __init__(
        self,
        memory: MemoryQueue,
        time: VirtualTime,
        request: MemoryRequest,
        rule: Rule,
        *,
        start: Start,
        fault: Callable[[str], None],
    ) -> None:
        self._memory = memory
        self._time = time
        self._request = request
        self._asked = request.envelope.request
        self._rule = rule
        self._start = start
        self._fault = fault
        self._steps: Iterator[Any] = iter(rule.steps)
        self._writing: Writing | None = None
        self._parts: list[Any] = []

    def begin(self) -> None:
        """Start, and go on until the script waits, or is over."""
        if not self._request.is_open:
            return
        self._memory.start(self._request, self._start)
        self._writing = Writing(self._asked) if isinstance(self._asked, GenerateRequest) else None
        self._parts = []
        self._go_on()

    def _go_on(self) -> None:
        while self._request.is_open:
            step = next(self._steps, None)
            try:
                if step is None:
                    self._finish(self._last())
                elif isinstance(step, Wait):
                    self._time.call_at(self._time.time() + step.seconds, self._go_on)
                    return
                elif isinstance(step, Lost):
                    self._memory.lose(self._request)
                    self._time.call_at(self._time.time(), self.begin)
                    return
                else:
                    self._take(step)
            except (ValueError, TypeError, InvalidRequest) as error:
                self._blame(f"the script of a {self._asked.kind} request cannot be played: {error}")

    def _take(self, step: Any) -> None:
        if callable(step) and not inspect.isclass(step):
            step = step(self._asked)
            if isinstance(step, Iterator) or (
                isinstance(self._asked, GenerateRequest) and isinstance(step, list)
            ):
                for one in step:
                    self._take(one)
                return
        if isinstance(step, StreamfleetError):
            self._finish(End(state="failed", error=Failure.of(step)))
        elif isinstance(step, End):
            self._finish(step)
        elif self._writing is not None:
            for event in self._writing.take(step):
                self._memory.emit(self._request, event)
            if self._writing.is_full:
                self._finish(self._last())
        elif isinstance(self._asked, CallRequest):
            self._parts.append(step)
            if self._rule.streams:
                self._memory.emit(self._request, Parts(values=(step,)))
        else:
            self._finish(one_shot_end(self._asked, step))

    def _last(self) -> End:
        if self._writing is not None:
            return self._writing.end(cast("FinishReason", self._rule.finish_reason))
        if isinstance(self._asked, CallRequest):
            outputs = tuple(self._parts) if self._rule.streams else tuple(self._parts[-1:])
            return End(state="done", outputs=outputs, usage=Usage())
        raise ValueError("it ends without an answer")

    def _finish(self, end: End) -> None:
        streamed = self._request.envelope.stream
        fields: dict[str, Any] = {
            "worker": end.worker or self._start.worker,
            "model": end.model or self._start.model,
            "exact": end.exact or self._start.exact,
            "attempt": self._request.attempts,
            "of": self._request.epoch if end.state == "done" else end.of,
            "last_seq": self._request.seq,
        }
        if streamed:
            fields["prefill"] = None  # a stream has had it as an event
        self._memory.finish(self._request, end.changed(fields))

    def _blame(self, what: str) -> None:
        self._fault(what)
        self._finish(End(state="failed", error=Failure.of(GenerationFailed(what))))
