"""The scripted engine: emits what the prompt tells it to, without a model.

It stands in for a model wherever only the way there and back counts: the shell's tests, and
benchmarks of the fleet itself. What a prompt may ask for, faults included, is in `script.py`.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from streamfleet_common.errors import (
    DeadlineExceeded,
    GenerationFailed,
    ModelNotFound,
    StreamfleetError,
    TooLong,
)
from streamfleet_common.schemas import Choice, FinishReason, Prefill, Request, Timing, Usage
from streamfleet_worker.engine.base import (
    Arrival,
    EngineInfo,
    Finished,
    Key,
    Output,
    Room,
    Step,
    Tokens,
)
from streamfleet_worker.engine.script import Command, Script, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

    from streamfleet_worker.engine.script import Fault

__all__ = ["Script", "ScriptedEngine"]


@dataclass(slots=True)
class _Row:
    script: Script
    arrival: Arrival
    added_at: float
    due_at: float = 0.0
    """When its next token comes."""
    started_at: float = 0.0
    first_at: float = 0.0
    texts: list[str] = field(default_factory=list)
    """What it has brought forth."""
    prefill: Prefill | None = None


def _prompt_of(request: Request) -> str:
    if request.messages is not None:
        return request.messages[-1].content
    if request.prompt_token_ids is not None:
        return " ".join(map(str, request.prompt_token_ids))
    return request.prompt or ""


class ScriptedEngine:
    """An `Engine` whose prompts are commands: ``ECHO n`` for n tokens, one a step; see `script.py`.

    A prompt that is no command comes back as a single token: the no-op engine. `tick_s` is the time between
    the tokens of a request that does not say it itself.

    Of a chat, the last message is the prompt. The words of a prompt count as its tokens,
    log-probabilities are 0. Batches follow the engine's usual rule: a first batch starts when it is
    full or its oldest request is `max_delay_s` old; while rows run, newcomers join at once.
    """

    def __init__(
        self,
        *,
        model: str = "scripted",
        max_batch_size: int = 8,
        max_delay_s: float = 0.0,
        max_seq_len: int = 4096,
        tick_s: float = 0.0,
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
        )
        self._max_delay_s = max_delay_s
        self._tick_s = tick_s
        self._clock = clock
        self._waiting: dict[Key, _Row] = {}
        self._running: dict[Key, _Row] = {}

    @property
    def info(self) -> EngineInfo:
        """What this engine serves."""
        return self._info

    def prepare(self, request: Request) -> Script:
        """Read the prompt's command.

        Raises:
            ModelNotFound: the request names another model.
            TooLong: words of the prompt plus `max_tokens` are over `max_seq_len`.
        """
        if request.model is not None and request.model != self._info.model:
            raise ModelNotFound(
                f"this worker serves {self._info.model!r}, not {request.model!r}",
                known=[self._info.model],
            )
        prompt = _prompt_of(request)
        words = prompt.split()
        if len(words) + request.max_tokens > self._info.max_seq_len:
            raise TooLong(
                prompt_tokens=len(words),
                max_tokens=request.max_tokens,
                limit=self._info.max_seq_len,
            )
        command = Command.read(prompt)
        texts, stopped = cut(command.texts, request.stop, request.include_stop)
        reason: FinishReason = "stop" if stopped else "eos"
        if len(texts) > request.max_tokens:
            texts, reason = texts[: request.max_tokens], "length"
        return Script(
            words=tuple(words),
            texts=texts,
            reason=reason,
            seed=request.sampling.seed or 0,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
            tick_s=self._tick_s if command.tick_s is None else command.tick_s,
            is_signed=command.is_signed,
            faults=command.faults,
        )

    def add(self, arrivals: Mapping[Key, Arrival]) -> None:
        """Take requests in; a key already here is ignored."""
        now = self._clock()
        for key, arrival in arrivals.items():
            if key not in self._waiting and key not in self._running:
                self._waiting[key] = _Row(arrival.prepared, arrival, now)

    def cancel(self, keys: Collection[Key]) -> None:
        """Forget these keys."""
        for key in keys:
            self._waiting.pop(key, None)
            self._running.pop(key, None)

    def step(self) -> Step:
        """Give every running row its next token, if it is time for it."""
        now = self._clock()
        step = Step(outputs=[])
        self._expire(now, step)
        self._admit(now, step)
        for key, row in list(self._running.items()):
            if row.due_at <= now:
                step.rows += 1
                self._advance(key, row, now, step)
        return step

    def due_in(self) -> float | None:
        """Seconds until `step` has something to do."""
        now = self._clock()
        waiting, running = self._waiting.values(), self._running.values()
        if any(row.due_at <= now for row in running):
            return 0.0
        times = [row.arrival.deadline_at for row in (*waiting, *running)]
        times += [row.due_at for row in running]
        if waiting:
            free = self._info.max_batch_size - len(running)
            if free > 0 and (running or len(waiting) >= free):
                return 0.0
            if not running:
                times.append(min(row.arrival.accepted_at for row in waiting) + self._max_delay_s)
        return max(0.0, min(times) - now) if times else None

    def room(self) -> Room:
        """What could be added now."""
        running, waiting = len(self._running), len(self._waiting)
        rows = max(0, self._info.max_batch_size - running - waiting)
        return Room(rows=rows, running=running, waiting=waiting)

    def close(self) -> None:
        """Forget everything."""
        self._waiting.clear()
        self._running.clear()

    def _expire(self, now: float, step: Step) -> None:
        for rows in (self._waiting, self._running):
            for key, row in list(rows.items()):
                if row.arrival.deadline_at <= now:
                    del rows[key]
                    late = DeadlineExceeded("the deadline passed before the answer was complete")
                    step.outputs.append(Output(key, self._finished(row, "expired", late)))

    def _advance(self, key: Key, row: _Row, now: float, step: Step) -> None:
        script, done = row.script, len(row.texts)
        for fault in script.faults:
            if fault.is_due(done, epoch=key[1]):
                fault.strike()
                error = _failure(fault)
                if error is not None:
                    del self._running[key]
                    step.outputs.append(Output(key, self._finished(row, "failed", error)))
                    return
        if done < len(script.texts):
            text = script.texts[done]
            if script.is_signed:
                text += f"~{key[1]}.{os.getpid()}"
            row.texts.append(text)
            logprobs: list[float | None] = [0.0] if script.logprobs else []
            step.outputs.append(Output(key, Tokens(0, [done], [text], logprobs)))
            step.generated_tokens += 1
            row.first_at = row.first_at or self._clock()
            row.due_at = now + script.tick_s
        if len(row.texts) >= len(script.texts):
            del self._running[key]
            step.outputs.append(Output(key, self._finished(row, "done")))

    def _admit(self, now: float, step: Step) -> None:
        free = self._info.max_batch_size - len(self._running)
        if not self._waiting or free <= 0:
            return
        oldest = min(row.arrival.accepted_at for row in self._waiting.values())
        full = len(self._waiting) >= free
        if not self._running and not full and now < oldest + self._max_delay_s:
            return
        for key in list(self._waiting)[:free]:
            row = self._running[key] = self._waiting.pop(key)
            row.started_at = row.due_at = now
            step.prompt_tokens += len(row.script.words)
            if row.script.prompt_logprobs:
                count = len(row.script.words)
                row.prefill = Prefill(
                    token_ids=tuple(range(count)),
                    texts=row.script.words,
                    logprobs=(None, *[0.0] * (count - 1)) if count else (),
                )
                step.outputs.append(Output(key, row.prefill))

    def _finished(
        self,
        row: _Row,
        state: Literal["done", "failed", "expired"],
        error: StreamfleetError | None = None,
    ) -> Finished:
        script, now, done = row.script, self._clock(), len(row.texts)
        started = row.started_at or now
        first = row.first_at or now
        reasons: dict[str, FinishReason] = {"done": script.reason, "failed": "error", "expired": "expired"}
        choice = Choice(
            text="".join(row.texts),
            token_ids=tuple(range(done)),
            logprobs=(0.0,) * done if script.logprobs else (),
            finish_reason=reasons[state],
            last_token_id=done - 1 if done else None,
        )
        return Finished(
            state=state,
            choices=(choice,),
            prefill=row.prefill,
            usage=Usage(
                prompt_tokens=len(script.words) if row.started_at else 0,
                completion_tokens=done,
            ),
            seed=script.seed,
            timing=Timing(
                wait_ms=max(0.0, (started - row.added_at) * 1000),
                prefill_ms=max(0.0, (first - started) * 1000),
                decode_ms=max(0.0, (now - first) * 1000),
            ),
            error=error,
        )


def _failure(fault: Fault) -> GenerationFailed | None:
    if fault.kind == "RAISE":
        return GenerationFailed("told to fail")
    if fault.kind == "RETRY":
        return GenerationFailed("told to fail, for now", retryable=True)
    return None
