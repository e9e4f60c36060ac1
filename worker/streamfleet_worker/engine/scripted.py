"""The scripted engine: emits what the prompt tells it to, without a model.

It stands in for a model wherever only the way there and back counts: the shell's tests, and
benchmarks of the fleet itself. What a prompt may ask for, faults included, is in `script.py`.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from streamfleet_common.errors import (
    DeadlineExceeded,
    GenerationFailed,
    ModelNotFound,
    StreamfleetError,
    TooLong,
    Unsupported,
)
from streamfleet_common.schemas import FinishReason, GenerateRequest, Request
from streamfleet_worker.engine.base import (
    Arrival,
    EngineInfo,
    Key,
    Launch,
    LaunchReason,
    Output,
    Room,
    Step,
    unsupported,
)
from streamfleet_worker.engine.script import Answer, Command, Script, cut
from streamfleet_worker.engine.scripted_request import Outcome, ScriptedRequest, ScriptedRow

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from streamfleet_worker.engine.script import Fault

__all__ = ["Script", "ScriptedEngine"]


def _prompt_of(request: GenerateRequest) -> str:
    if request.messages is not None:
        return request.messages[-1].content
    if request.prompt_token_ids is not None:
        return " ".join(map(str, request.prompt_token_ids))
    return request.prompt or ""


class ScriptedEngine:
    """An `Engine` whose prompts are commands: ``ECHO n`` for n tokens, one a step; see `script.py`.

    A prompt that is no command comes back as a single token: the no-op engine. `tick_s` is the time between
    the tokens of a request that does not say it itself. `exact` is the class of workers among which it says
    to be of one mind; it is, but for tokens that are signed.

    Of a chat, the last message is the prompt. The words of a prompt count as its tokens. Batches follow the
    engine's usual rule: a first batch starts when it is full or its oldest request is `max_delay_s` old;
    while rows run, newcomers join at once. Nothing is drawn, so how to draw is not looked at.
    """

    def __init__(
        self,
        *,
        model: str = "scripted",
        max_batch_size: int = 8,
        max_delay_s: float = 0.0,
        max_seq_len: int = 4096,
        tick_s: float = 0.0,
        exact: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._info = EngineInfo(
            model=model,
            revision="0",
            tasks=("generate",),
            device="no device (scripted)",
            precision="none",
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
            vocab_size=0,
            exact=exact,
        )
        self._max_delay_s = max_delay_s
        self._tick_s = tick_s
        self._clock = clock
        self._requests: dict[Key, ScriptedRequest] = {}
        self._waiting: dict[tuple[Key, int], ScriptedRow] = {}
        self._running: dict[tuple[Key, int], ScriptedRow] = {}
        self._launched = 0
        self._is_draining = False

    @property
    def info(self) -> EngineInfo:
        """What this engine serves."""
        return self._info

    @property
    def memory(self) -> Mapping[str, int]:
        """Nothing worth telling."""
        return {}

    @property
    def counts(self) -> Mapping[str, int]:
        """It has no caches."""
        return {}

    def listen(self, wake: Callable[[], None]) -> None:
        """Nothing happens but in a step."""

    def prepare(self, request: Request, _scope: str = "") -> Script:
        """Read the prompt's command.

        Raises:
            ModelNotFound: the request names another model.
            Unsupported: it is no generation, or has a guide.
            TooLong: words of the prompt plus `max_tokens` are over `max_seq_len`.
        """
        if request.model is not None and request.model != self._info.model:
            raise ModelNotFound(
                f"this worker serves {self._info.model!r}, not {request.model!r}",
                known=[self._info.model],
            )
        if not isinstance(request, GenerateRequest):
            raise unsupported(request, self._info.model, self._info.tasks)
        if request.guide is not None:
            raise Unsupported("a scripted worker knows no guides: leave `guide` out", feature="guide")
        prompt = _prompt_of(request)
        words = prompt.split()
        kept = words
        if request.truncate is not None:
            cut_left = request.truncate_side == "left"
            kept = words[-request.truncate :] if cut_left else words[: request.truncate]
        free = self._info.max_seq_len - len(kept)
        wanted = 1 if request.max_tokens == "fit" else request.max_tokens
        if wanted > free:
            raise TooLong(prompt_tokens=len(kept), max_tokens=wanted, limit=self._info.max_seq_len)
        limit = free if request.max_tokens == "fit" else wanted
        command = Command.read(prompt)
        texts = [command.texts]
        if request.n > 1:
            texts = [tuple(f"{text}#{index}" for text in command.texts) for index in range(request.n)]
        return Script(
            words=tuple(kept),
            answers=tuple([_answer(some, limit, request) for some in texts]),
            seed=request.sampling.seed or 0,
            logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            prompt_logprobs=request.prompt_logprobs,
            cut_tokens=len(words) - len(kept),
            command=command,
        )

    def add(self, arrivals: Mapping[Key, Arrival]) -> None:
        """Take requests in; a key already here is ignored."""
        now = self._clock()
        for key, arrival in arrivals.items():
            if key not in self._requests:
                request = self._requests[key] = ScriptedRequest.of(key, arrival, now)
                self._waiting.update({row.place: row for row in request.rows})

    def cancel(self, keys: Collection[Key]) -> None:
        """Forget these keys."""
        for key in keys:
            request = self._requests.pop(key, None)
            for row in request.rows if request else ():
                self._waiting.pop(row.place, None)
                self._running.pop(row.place, None)

    def drain(self) -> None:
        """Let nobody wait for company from now on."""
        self._is_draining = True

    def step(self) -> Step:
        """Give every running row its next token, if it is time for it."""
        now = self._clock()
        step = Step(outputs=[])
        self._expire(now, step)
        self._admit(now, step)
        for place, row in list(self._running.items()):
            if row.due_at <= now and place in self._running:
                step.rows += 1
                self._advance(row, now, step)
        return step

    def due_in(self) -> float | None:
        """Seconds until `step` has something to do."""
        now = self._clock()
        waiting, running = self._waiting.values(), self._running.values()
        if any(row.due_at <= now for row in running):
            return 0.0
        times = [request.arrival.deadline_at for request in self._requests.values()]
        times += [row.due_at for row in running]
        if waiting:
            free = self._info.max_batch_size - len(running)
            if free > 0 and (running or len(waiting) >= free or self._is_draining):
                return 0.0
            if not running:
                times.append(min(row.request.arrival.accepted_at for row in waiting) + self._max_delay_s)
        return max(0.0, min(times) - now) if times else None

    def room(self) -> Room:
        """What could be added now."""
        running, waiting = len(self._running), len(self._waiting)
        rows = max(0, self._info.max_batch_size - running - waiting)
        return Room(rows=rows, running=running, waiting=waiting)

    def close(self) -> None:
        """Forget everything."""
        self.cancel(list(self._requests))

    def _expire(self, now: float, step: Step) -> None:
        for request in list(self._requests.values()):
            if request.arrival.deadline_at <= now:
                late = DeadlineExceeded("the deadline passed before the answer was complete")
                self._finish(request, "expired", step, late)

    def _admit(self, now: float, step: Step) -> None:
        free = self._info.max_batch_size - len(self._running)
        if not self._waiting or free <= 0:
            return
        oldest = min(row.request.arrival.accepted_at for row in self._waiting.values())
        full = len(self._waiting) >= free
        would_wait = not self._running and not full and now < oldest + self._max_delay_s
        if would_wait and not self._is_draining:
            return
        # Those that join running ones are always enough.
        alone: LaunchReason = "drain" if would_wait else "delay"
        reason: LaunchReason = "full" if full else "ratio" if self._running else alone
        others = list(self._running.values())
        newcomers: dict[Key, ScriptedRequest] = {}
        tokens = len(others)
        for place in list(self._waiting)[:free]:
            row = self._running[place] = self._waiting.pop(place)
            row.due_at = now
            request = newcomers[row.request.key] = row.request
            tokens += len(request.script.words)
            if not request.started_at:
                request.begin(now)
                step.prompt_tokens += len(request.script.words)
                if request.prefill is not None:
                    step.outputs.append(Output(request.key, request.prefill))
        keys = tuple(dict.fromkeys([*newcomers, *[row.request.key for row in others]]))
        self._launched += 1
        launch = Launch(self._launched, reason, len(self._running), tokens, 0.0, keys)
        step.launches.append(launch)
        for request in newcomers.values():
            request.launch = launch

    def _advance(self, row: ScriptedRow, now: float, step: Step) -> None:
        request = row.request
        command = request.script.command
        for fault in command.faults:
            if fault.is_due(len(row.texts), epoch=request.key[1]):
                fault.strike()
                error = _failure(fault)
                if error is not None:
                    self._finish(request, "failed", step, error)
                    return
        if not row.is_done:
            step.outputs.append(Output(request.key, row.advance()))
            step.generated_tokens += 1
            request.first_at = request.first_at or self._clock()
            row.due_at = now + (self._tick_s if command.tick_s is None else command.tick_s)
        if row.is_done:
            del self._running[row.place]
            request.left -= 1
            if not request.left:
                self._finish(request, "done", step)

    def _finish(
        self, request: ScriptedRequest, state: Outcome, step: Step, error: StreamfleetError | None = None
    ) -> None:
        self.cancel([request.key])
        step.outputs.append(Output(request.key, request.finished(state, self._clock(), error)))


def _answer(texts: tuple[str, ...], limit: int, request: GenerateRequest) -> Answer:
    found, stopped = cut(texts, request.stop, request.include_stop)
    reason: FinishReason = "stop" if stopped else "eos"
    if len(found) > limit:
        found, reason = found[:limit], "length"
    if request.echo and found:
        found = (_prompt_of(request) + found[0], *found[1:])
    return Answer(found, reason)


def _failure(fault: Fault) -> GenerationFailed | None:
    if fault.kind == "RAISE":
        return GenerationFailed("told to fail")
    if fault.kind == "RETRY":
        return GenerationFailed("told to fail, for now", retryable=True)
    return None
