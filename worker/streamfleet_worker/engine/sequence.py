"""One choice of a request while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from streamfleet_common.schemas import Choice, FinishReason
from streamfleet_worker.engine.base import Arrival, Key, Tokens
from streamfleet_worker.engine.detokenizer import Detokenizer
from streamfleet_worker.engine.sampler import Row

if TYPE_CHECKING:
    from streamfleet_worker.engine.kv_cache import Slot
    from streamfleet_worker.engine.models import LoadedModel
    from streamfleet_worker.engine.prepared import Prepared
    from streamfleet_worker.engine.sampler import Sampled


@dataclass(slots=True)
class Scores:
    """Log-probabilities of a prompt's tokens from some place on, and the likeliest in their places."""

    logprobs: list[float] = field(default_factory=list)
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request in the engine. Times are seconds on the engine's clock; 0 is not yet."""

    key: Key
    index: int
    """Which choice it is, from 0."""
    prepared: Prepared
    arrival: Arrival
    seed: int | None
    """None if it draws nothing."""
    row: Row
    detokenizer: Detokenizer
    eos_token_ids: frozenset[int]
    scored_from: int
    """The first token of the prompt whose log-probability is asked for; past all of them if none is."""
    slot: Slot | None = None
    """Where its keys and values are; None while it waits."""
    computed: int = 0
    """Tokens of the prompt whose keys and values are in the cache."""
    cached: int = 0
    """Of those the ones that the prefix cache had."""
    blocks: list[Any] = field(default_factory=list)
    """What the prefix cache had of the prompt, as long as it must be kept."""
    scores: Scores = field(default_factory=Scores)
    token_ids: list[int] = field(default_factory=list)
    """Every token generated so far."""
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    """What has been shown, piece by piece."""
    finish_reason: FinishReason | None = None
    started_at: float = 0.0
    first_token_at: float = 0.0
    last_token_at: float = 0.0

    @classmethod
    def of(
        cls,
        loaded: LoadedModel,
        key: Key,
        index: int,
        prepared: Prepared,
        arrival: Arrival,
        *,
        scored_from: int,
        seed: int | None = None,
    ) -> Sequence:
        """A sequence that waits, for this model."""
        return cls(
            key=key,
            index=index,
            prepared=prepared,
            arrival=arrival,
            seed=seed,
            row=Row(prepared, seed or 0, loaded.eos_token_ids, loaded.vocab_size),
            detokenizer=Detokenizer.of(loaded.tokenizer, prepared),
            eos_token_ids=loaded.eos_token_ids,
            scored_from=scored_from,
        )

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self.prepared.prompt_token_ids

    @property
    def prompt_length(self) -> int:
        return len(self.prepared.prompt_token_ids)

    @property
    def max_tokens(self) -> int:
        return self.prepared.max_tokens

    @property
    def reusable(self) -> int:
        """Tokens of the prompt that need not be computed if their keys and values are there."""
        return min(self.scored_from, self.prompt_length) - 1

    @property
    def position(self) -> int:
        """Where the last generated token stands, counted from 0; the next pass feeds it."""
        return len(self.prepared.prompt_token_ids) + len(self.token_ids) - 1

    def append(self, sampled: Sampled, now: float) -> Tokens:
        """Take the next token; sets `finish_reason` when it is the last.

        An end-of-text token on the last allowed place counts as "eos", not as "length".
        """
        token_id = sampled.token_id
        # First what may raise, so that a failed choice holds what was told of it.
        self.row.append(token_id)
        text = self._read(token_id)
        tokens = Tokens(self.index, [token_id], [text])
        self.token_ids.append(token_id)
        self.texts.append(text)
        if sampled.logprob is not None:
            self.logprobs.append(sampled.logprob)
            tokens.logprobs.append(sampled.logprob)
        if self.prepared.top_logprobs:
            self.top_logprobs.append(sampled.top)
            tokens.top_logprobs.append(sampled.top)
        self.first_token_at = self.first_token_at or now
        self.last_token_at = now
        return tokens

    def _read(self, token_id: int) -> str:
        reason = self._ending(token_id)
        if reason is not None:
            self.finish_reason = reason
            return self.detokenizer.flush(token_id)[0]
        text, stopped = self.detokenizer.push(token_id)
        if not stopped and len(self.token_ids) + 1 >= self.prepared.max_tokens:
            self.finish_reason = "length"
            rest, stopped = self.detokenizer.flush()
            text += rest
        if stopped:
            self.finish_reason = "stop"
        return text

    def _ending(self, token_id: int) -> FinishReason | None:
        if token_id in self.eos_token_ids and not self.prepared.ignore_eos:
            return "eos"
        return "stop" if token_id in self.prepared.stop_token_ids else None

    def cut(self, reason: FinishReason) -> Tokens | None:
        """End from outside; gives the text that was still held back, if any, with no token of its own."""
        self.finish_reason = reason
        try:
            rest = self.detokenizer.end()
        except Exception:  # noqa: BLE001  it may be what ends the request
            rest = ""
        self.texts.append(rest)
        return Tokens(self.index, [], [rest]) if rest else None

    def choice(self) -> Choice:
        """What it has come to."""
        return Choice(
            index=self.index,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            top_logprobs=tuple(self.top_logprobs),
            finish_reason=self.finish_reason or "error",
            last_token_id=self.token_ids[-1] if self.token_ids else None,
            seed=self.seed,
        )
