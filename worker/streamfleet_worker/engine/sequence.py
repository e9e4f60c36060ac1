"""One generate request while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from streamfleet_common.errors import StreamfleetError
from streamfleet_common.schemas import Choice, EndState, FinishReason, Prefill, Timing, Usage
from streamfleet_worker.engine.base import Arrival, Finished, Key, Tokens

if TYPE_CHECKING:
    from streamfleet_worker.engine.detokenizer import Detokenizer
    from streamfleet_worker.engine.prepared import Prepared


@dataclass(slots=True)
class Sequence:
    """A request while it is in the engine. Times are seconds on the engine's clock; 0 is not yet."""

    key: Key
    prepared: Prepared
    arrival: Arrival
    added_at: float
    seed: int | None
    detokenizer: Detokenizer
    eos_token_ids: frozenset[int]
    slot: int = -1
    """The cache slot that holds its keys and values; -1 while it waits."""
    cached: int = 0
    """Tokens of it whose keys and values are in the cache."""
    token_ids: list[int] = field(default_factory=list)
    """Every token generated so far."""
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    """What has been shown."""
    prefill: Prefill | None = None
    finish_reason: FinishReason | None = None
    started_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    @property
    def prefill_length(self) -> int:
        """Prompt tokens computed before the first decode pass: all but the last."""
        return len(self.prepared.prompt_token_ids) - 1

    @property
    def next_input(self) -> int:
        """The token to feed next: the last generated, or the last of the prompt."""
        return self.token_ids[-1] if self.token_ids else self.prepared.prompt_token_ids[-1]

    @property
    def position(self) -> int:
        """Where that token stands, counted from 0."""
        return len(self.prepared.prompt_token_ids) + len(self.token_ids) - 1

    def append(self, token_id: int, logprob: float | None, now: float) -> Tokens:
        """Take the next token; sets `finish_reason` when it is the last.

        An end-of-text token on the last allowed place counts as "eos", not as "length".
        """
        self.token_ids.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        self.first_token_at = self.first_token_at or now
        self.last_token_at = now
        text = self._read(token_id)
        self.text += text
        return Tokens(0, [token_id], [text], [] if logprob is None else [logprob])

    def _read(self, token_id: int) -> str:
        if token_id in self.eos_token_ids:
            self.finish_reason = "eos"
            return self.detokenizer.flush()[0]
        if token_id in self.prepared.stop_token_ids:
            self.finish_reason = "stop"
            return self.detokenizer.flush()[0]
        text, stopped = self.detokenizer.push(token_id)
        if stopped:
            self.finish_reason = "stop"
        elif len(self.token_ids) >= self.prepared.max_tokens:
            rest, stopped = self.detokenizer.flush()
            self.finish_reason = "stop" if stopped else "length"
            text += rest
        return text

    def finished(self, state: EndState, now: float, error: StreamfleetError | None = None) -> Finished:
        """Its last output.

        Cut off from outside (deadline, failure), its text is what was shown: characters still held back
        as part of an unfinished character or a possible stop string are left out.
        """
        reason: FinishReason
        if state == "done":
            reason = self.finish_reason or "length"
        else:
            reason = "expired" if state == "expired" else "error"
        choice = Choice(
            index=0,
            text=self.text,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=reason,
            last_token_id=self.token_ids[-1] if self.token_ids else None,
        )
        return Finished(
            state=state,
            choices=(choice,),
            prefill=self.prefill,
            usage=Usage(
                prompt_tokens=len(self.prepared.prompt_token_ids) if self.started_at else 0,
                completion_tokens=len(self.token_ids),
            ),
            seed=self.seed,
            timing=self._timing(now),
            error=error,
        )

    def _timing(self, now: float) -> Timing:
        started = self.started_at or now
        first = self.first_token_at or now
        last = self.last_token_at or first
        return Timing(
            wait_ms=max(0.0, started - self.added_at) * 1000,
            prefill_ms=max(0.0, first - started) * 1000,
            decode_ms=max(0.0, last - first) * 1000,
        )
