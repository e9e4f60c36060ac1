"""The scripted engine: emits what the prompt tells it to, without a model.

It stands in for a model wherever only the way there and back counts: the shell's tests, and
benchmarks of the fleet itself.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from streamfleet_common.errors import DeadlineExceeded, ModelNotFound, TooLong
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

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping


@dataclass(frozen=True, slots=True)
class Script:
    """What a request will bring forth, all known beforehand."""

    words: tuple[str, ...]
    """The prompt's words: its tokens, as far as this engine knows any."""
    texts: tuple[str, ...]
    """One text a token; the token's id is its place in the list."""
    reason: FinishReason
    seed: int
    logprobs: bool
    prompt_logprobs: bool


@dataclass(slots=True)
class _Row:
    script: Script
    arrival: Arrival
    added_at: float
    started_at: float = 0.0
    first_at: float = 0.0
    done: int = 0
    prefill: Prefill | None = None


def _prompt_of(request: Request) -> str:
    if request.messages is not None:
        return request.messages[-1].content
    if request.prompt_token_ids is not None:
        return " ".join(map(str, request.prompt_token_ids))
    return request.prompt or ""


def _texts_of(prompt: str) -> list[str]:
    match prompt.split():
        case ["ECHO", count] if count.isdecimal():
            return [f"tok{i}" if i == 0 else f" tok{i}" for i in range(int(count))]
    return [prompt]


def _cut(texts: list[str], stops: Collection[str], include: bool) -> tuple[list[str], bool]:
    """The texts up to the first stop string, and whether there was one."""
    whole = "".join(texts)
    # As in real engines: the first to be complete, and of those complete at once the longest.
    ends = [(whole.find(stop) + len(stop), -len(stop)) for stop in stops if stop in whole]
    if not ends:
        return texts, False
    end, negative_length = min(ends)
    keep = end if include else end + negative_length
    kept, start = [], 0
    for text in texts:
        kept.append(text[: max(0, keep - start)])
        start += len(text)
        if start >= end:
            break
    return kept, True


class ScriptedEngine:
    """An `Engine` whose prompts are commands.

    ======================  ==========================================================
    prompt                  answer
    ======================  ==========================================================
    ``ECHO n``              n tokens, "tok0 tok1 …", one a step
    anything else           the prompt itself as a single token: the no-op engine
    ======================  ==========================================================

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
        texts, stopped = _cut(_texts_of(prompt), request.stop, request.include_stop)
        reason: FinishReason = "stop" if stopped else "eos"
        if len(texts) > request.max_tokens:
            texts, reason = texts[: request.max_tokens], "length"
        return Script(
            words=tuple(words),
            texts=tuple(texts),
            reason=reason,
            seed=request.sampling.seed or 0,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs,
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
        """Give every running row its next token."""
        now = self._clock()
        step = Step(outputs=[])
        self._expire(now, step)
        self._admit(now, step)
        step.rows = len(self._running)
        for key, row in list(self._running.items()):
            script = row.script
            if row.done < len(script.texts):
                logprobs: list[float | None] = [0.0] if script.logprobs else []
                tokens = Tokens(0, [row.done], [script.texts[row.done]], logprobs)
                step.outputs.append(Output(key, tokens))
                step.generated_tokens += 1
                row.done += 1
                row.first_at = row.first_at or self._clock()
            if row.done >= len(script.texts):
                del self._running[key]
                step.outputs.append(Output(key, self._finished(row, "done")))
        return step

    def due_in(self) -> float | None:
        """Seconds until `step` has something to do."""
        if self._running:
            return 0.0
        if not self._waiting:
            return None
        if len(self._waiting) >= self._info.max_batch_size:
            return 0.0
        rows = self._waiting.values()
        due = min(row.arrival.accepted_at for row in rows) + self._max_delay_s
        due = min(due, *(row.arrival.deadline_at for row in rows))
        return max(0.0, due - self._clock())

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
                    step.outputs.append(Output(key, self._finished(row, "expired")))

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
            row.started_at = now
            step.prompt_tokens += len(row.script.words)
            if row.script.prompt_logprobs:
                count = len(row.script.words)
                row.prefill = Prefill(
                    token_ids=tuple(range(count)),
                    texts=row.script.words,
                    logprobs=(None, *[0.0] * (count - 1)) if count else (),
                )
                step.outputs.append(Output(key, row.prefill))

    def _finished(self, row: _Row, state: Literal["done", "expired"]) -> Finished:
        script, now = row.script, self._clock()
        started = row.started_at or now
        first = row.first_at or now
        expired = state == "expired"
        choice = Choice(
            text="".join(script.texts[: row.done]),
            token_ids=tuple(range(row.done)),
            logprobs=(0.0,) * row.done if script.logprobs else (),
            finish_reason="expired" if expired else script.reason,
            last_token_id=row.done - 1 if row.done else None,
        )
        return Finished(
            state="expired" if expired else "done",
            choices=(choice,),
            prefill=row.prefill,
            usage=Usage(
                prompt_tokens=len(script.words) if row.started_at else 0,
                completion_tokens=row.done,
            ),
            seed=script.seed,
            timing=Timing(
                wait_ms=max(0.0, (started - row.added_at) * 1000),
                prefill_ms=max(0.0, (first - started) * 1000),
                decode_ms=max(0.0, (now - first) * 1000),
            ),
            error=DeadlineExceeded("the deadline passed before the answer was complete") if expired else None,
        )
