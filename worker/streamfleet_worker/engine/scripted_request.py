"""A request while it is in the scripted engine, and its rows."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from streamfleet_common.schemas import Choice, FinishReason, Prefill, Timing, Usage
from streamfleet_worker.engine.base import Arrival, Finished, Key, Launch, Tokens
from streamfleet_worker.engine.script import Answer, Script, likeliest, logprob

if TYPE_CHECKING:
    from streamfleet_common.errors import StreamfleetError

Outcome = Literal["done", "failed", "expired"]
_CUT_SHORT: dict[Outcome, FinishReason] = {"done": "eos", "failed": "error", "expired": "expired"}


@dataclass(slots=True)
class ScriptedRequest:
    """All choices of a request. Times are seconds on the engine's clock; 0 is not yet."""

    key: Key
    arrival: Arrival
    added_at: float
    rows: list[ScriptedRow] = field(default_factory=list)
    left: int = 0
    """Rows that have not brought forth all of their answers."""
    prefill: Prefill | None = None
    started_at: float = 0.0
    first_at: float = 0.0
    launch: Launch | None = None
    """The last one that let a row of it in."""

    @classmethod
    def of(cls, key: Key, arrival: Arrival, now: float) -> ScriptedRequest:
        made = cls(key, arrival, now)
        made.rows = [ScriptedRow(made, index, answer) for index, answer in enumerate(made.script.answers)]
        made.left = len(made.rows)
        return made

    @property
    def script(self) -> Script:
        script: Script = self.arrival.prepared
        return script

    def begin(self, now: float) -> None:
        """Read the prompt; sets `prefill` if it was asked for."""
        self.started_at = now
        script = self.script
        if not script.prompt_logprobs:
            return
        later = range(1, len(script.words))
        first = bool(script.words)
        self.prefill = Prefill(
            token_ids=tuple(range(len(script.words))),
            texts=script.words,
            logprobs=(None,) * first + tuple(map(logprob, later)),
            top_logprobs=((),) * first + tuple(likeliest(place, script.top_logprobs) for place in later)
            if script.top_logprobs
            else (),
        )

    def finished(self, state: Outcome, now: float, error: StreamfleetError | None) -> Finished:
        """Its last output."""
        script = self.script
        started = self.started_at or now
        first = self.first_at or now
        return Finished(
            state=state,
            choices=tuple([row.choice(state) for row in self.rows]),
            prefill=self.prefill,
            usage=Usage(
                prompt_tokens=len(script.words) if self.started_at else 0,
                completion_tokens=sum([len(row.texts) for row in self.rows]),
                cut_tokens=script.cut_tokens,
                truncated=int(script.cut_tokens > 0),
            ),
            seed=script.seed,
            timing=Timing(
                wait_ms=max(0.0, (started - self.added_at) * 1000),
                prefill_ms=max(0.0, (first - started) * 1000),
                decode_ms=max(0.0, (now - first) * 1000),
            ),
            error=error,
            launch=self.launch,
        )


@dataclass(slots=True)
class ScriptedRow:
    """One choice of a request."""

    request: ScriptedRequest
    index: int
    answer: Answer
    texts: list[str] = field(default_factory=list)
    """What it has brought forth."""
    due_at: float = 0.0
    """When its next token comes."""

    @property
    def place(self) -> tuple[Key, int]:
        return self.request.key, self.index

    @property
    def is_done(self) -> bool:
        return len(self.texts) >= len(self.answer.texts)

    def advance(self) -> Tokens:
        """Its next token."""
        script, place = self.request.script, len(self.texts)
        text = self.answer.texts[place]
        if script.command.signed_from is not None and place >= script.command.signed_from:
            text += f"~{self.request.key[1]}.{os.getpid()}"
        self.texts.append(text)
        return Tokens(
            self.index,
            [place],
            [text],
            [logprob(place)] if script.logprobs else [],
            [likeliest(place, script.top_logprobs)] if script.top_logprobs else [],
        )

    def choice(self, state: Outcome) -> Choice:
        """What it has come to, if the request ends in this state."""
        script, places = self.request.script, range(len(self.texts))
        is_whole = state == "done" or (bool(self.texts) and self.is_done)
        return Choice(
            index=self.index,
            text="".join(self.texts),
            token_ids=tuple(places),
            logprobs=tuple(map(logprob, places)) if script.logprobs else (),
            top_logprobs=tuple([likeliest(place, script.top_logprobs) for place in places])
            if script.top_logprobs
            else (),
            finish_reason=self.answer.reason if is_whole else _CUT_SHORT[state],
            last_token_id=places[-1] if places else None,
            seed=script.seed + self.index,
        )
