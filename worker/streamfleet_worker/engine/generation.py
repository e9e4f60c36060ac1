"""The continuous-batching engine: a new token for every running sequence at each step."""

from __future__ import annotations

import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Mapping
from itertools import groupby
from typing import TYPE_CHECKING

from streamfleet_common.errors import (
    DeadlineExceeded,
    GenerationFailed,
    StreamfleetError,
)
from streamfleet_common.schemas import EndState, Prefill, Request
from streamfleet_worker.engine import sampler
from streamfleet_worker.engine.base import Arrival, EngineInfo, Key, Output, Room, Step
from streamfleet_worker.engine.detokenizer import Detokenizer, IncrementalDecoder
from streamfleet_worker.engine.model_runner import ModelRunner
from streamfleet_worker.engine.preparer import Preparer
from streamfleet_worker.engine.scheduler import Scheduler, padded
from streamfleet_worker.engine.sequence import Sequence

if TYPE_CHECKING:
    from streamfleet_worker.engine.models import LoadedModel
    from streamfleet_worker.engine.prepared import Prepared

log = logging.getLogger(__name__)

Token = tuple[int, float | None] | None
"""A sampled token with its log-probability if asked for; None where the logits were unusable."""


class GenerationEngine:
    """Generates text for many requests at once; an `Engine`.

    Each step computes the prompts of newcomers, then one token for every running sequence. Sequences
    join and leave between steps, and each gets the tokens it would get alone.

    Args:
        loaded: the model, from `models.load`.
        max_batch_size: sequences that run at once.
        max_delay_s: how long the first request of a batch waits for company, counted from when the fleet
            accepted it.
        max_seq_len: tokens of prompt and answer together; the model's own limit may be lower.
        clock: seconds, monotonic.
        max_waiting_tokens: steps after which newcomers join, however few.
        max_waiting_s: age at which a newcomer joins, whatever else.
        max_prefill_tokens: padded prompt tokens computed in one step; a longer prompt goes alone.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        max_batch_size: int = 8,
        max_delay_s: float = 0.02,
        max_seq_len: int = 4096,
        clock: Callable[[], float] = time.monotonic,
        max_waiting_tokens: int = 16,
        max_waiting_s: float = 1.0,
        max_prefill_tokens: int = 2048,
    ) -> None:
        limit = min(max_seq_len, loaded.max_positions)
        self._info = EngineInfo(
            model=loaded.name,
            revision=loaded.revision,
            tasks=("generate",),
            device=loaded.device_name,
            precision=loaded.precision,
            max_batch_size=max_batch_size,
            max_seq_len=limit,
            vocab_size=loaded.vocab_size,
        )
        self._preparer = Preparer(loaded.tokenizer, self._info)
        self._tokenizer = loaded.tokenizer
        self._eos_token_ids = loaded.eos_token_ids
        self._clock = clock
        self._runner = ModelRunner(loaded, max_batch_size=max_batch_size, max_len=limit)
        self._scheduler = Scheduler(
            max_batch_size=max_batch_size,
            max_delay_s=max_delay_s,
            max_waiting_tokens=max_waiting_tokens,
            max_waiting_s=max_waiting_s,
            max_prefill_tokens=max_prefill_tokens,
        )
        self.weights_bytes = loaded.weights_bytes
        self.cache_bytes = self._runner.cache.bytes

    @property
    def info(self) -> EngineInfo:
        """What this engine serves."""
        return self._info

    def warm_up(self) -> None:
        """Run the model once as a batch and compare it with the model alone, before work depends on it.

        Raises:
            ModelLoadFailed: it gives other numbers in our cache than by itself.
        """
        self._runner.check()

    def prepare(self, request: Request) -> Prepared:
        """Check a request and turn its prompt into tokens; callable from any thread.

        Raises:
            ModelNotFound: it names another model.
            TooLong: prompt and answer do not fit.
            Unsupported: it has messages, and the model no chat template.
            InvalidRequest: an empty prompt, a token id out of range, messages the template refuses.
        """
        return self._preparer.prepare(request)

    def add(self, arrivals: Mapping[Key, Arrival]) -> None:
        """Take requests in; a key that is here already is ignored."""
        now = self._clock()
        for key, arrival in arrivals.items():
            if key not in self._scheduler:
                self._scheduler.add(self._sequence(key, arrival, now))

    def cancel(self, keys: Collection[Key]) -> None:
        """Forget these keys: they leave before the next forward pass."""
        for key in keys:
            self._scheduler.remove(key)

    def step(self) -> Step:
        """Compute the prompts of newcomers, then the next token of every running sequence.

        Raises:
            GenerationFailed: the model fails on any input; the engine is of no more use.
        """
        began = self._clock()
        step = Step(outputs=[])
        for sequence in self._scheduler.expire(began):
            error = DeadlineExceeded("the deadline passed before the answer was complete")
            self._finish(sequence, "expired", step, error)
        self._prefill(self._scheduler.admit(began), step)
        for move in self._scheduler.compact():
            self._runner.move(move)
        running = self._scheduler.running
        if running:
            step.rows = len(running)
            self._decode(running, step)
            self._scheduler.observe(self._clock() - began)
        return step

    def due_in(self) -> float | None:
        """Seconds until `step` has something to do."""
        return self._scheduler.due_in(self._clock())

    def room(self) -> Room:
        """What could be added now."""
        running, waiting = self._scheduler.running_count, self._scheduler.waiting
        free = max(0, self._info.max_batch_size - running - waiting)
        return Room(rows=free, running=running, waiting=waiting)

    def close(self) -> None:
        """Free the model and its cache."""
        del self._runner, self._scheduler

    # --- arrival ----------------------------------------------------------------------------

    def _sequence(self, key: Key, arrival: Arrival, now: float) -> Sequence:
        prepared: Prepared = arrival.prepared
        seed = prepared.sampling.seed
        if seed is None and prepared.sampling.temperature > 0:
            # 53 bits: any JSON reader gives the number back unharmed.
            seed = secrets.randbits(53)
        detokenizer = Detokenizer(
            self._tokenizer.decode,
            self._tokenizer.context(prepared.prompt_token_ids),
            prepared.stop,
            prepared.include_stop,
        )
        return Sequence(key, prepared, arrival, now, seed, detokenizer, self._eos_token_ids)

    # --- forward passes ---------------------------------------------------------------------

    def _prefill(self, newcomers: list[Sequence], step: Step) -> None:
        now = self._clock()
        for sequence in newcomers:
            sequence.started_at = now
            step.prompt_tokens += len(sequence.prepared.prompt_token_ids)
        scored = [s for s in newcomers if s.prepared.prompt_logprobs]
        for sequence in scored:
            self._prefill_scored(sequence, step)
        rest = [s for s in newcomers if not s.prepared.prompt_logprobs]
        rest.sort(key=_bucket)
        for _, same in groupby(rest, key=_bucket):
            group = list(same)
            try:
                self._prefill_group(group)
            except Exception as error:  # noqa: BLE001  one row's fault must not touch the others
                self._isolate(group, error, step, lambda s: self._prefill_group([s]))

    def _prefill_group(self, group: list[Sequence]) -> None:
        self._runner.prefill([s.slot for s in group], [s.prepared.prompt_token_ids for s in group])
        for sequence in group:
            sequence.cached = sequence.prefill_length

    def _prefill_scored(self, sequence: Sequence, step: Step) -> None:
        ids = sequence.prepared.prompt_token_ids
        try:
            scores = self._runner.prefill_scored(sequence.slot, ids)
            if not all(map(math.isfinite, scores)):
                raise _unusable()
            texts = self._texts(ids)
        except Exception as error:  # noqa: BLE001
            self._fail(sequence, error, step)
            self._probe(error)
            return
        sequence.cached = sequence.prefill_length
        sequence.prefill = Prefill(token_ids=ids, texts=tuple(texts), logprobs=(None, *scores))
        step.outputs.append(Output(sequence.key, sequence.prefill))

    def _texts(self, ids: tuple[int, ...]) -> list[str]:
        """The prompt's text by token, control tokens included: the prompt as the model sees it."""
        decoder = IncrementalDecoder(lambda i: self._tokenizer.decode(i, skip_special=False))
        texts = [decoder.push(token_id) for token_id in ids]
        texts[-1] += decoder.flush()
        return texts

    def _decode(self, running: list[Sequence], step: Step) -> None:
        try:
            tokens = self._next_tokens(running)
        except Exception as error:  # noqa: BLE001  one row's fault must not touch the others
            self._isolate(running, error, step, lambda s: self._decode_alone(s, step))
            return
        for sequence, token in zip(running, tokens, strict=True):
            try:
                self._advance(sequence, token, step)
            except Exception as error:  # noqa: BLE001
                self._fail(sequence, error, step)

    def _decode_alone(self, sequence: Sequence, step: Step) -> None:
        (token,) = self._next_tokens([sequence], sequence.slot)
        self._advance(sequence, token, step)

    def _next_tokens(self, rows: list[Sequence], only_slot: int | None = None) -> list[Token]:
        logits = self._runner.decode([s.next_input for s in rows], [s.position for s in rows], only_slot)
        draws = [sampler.Draw(s.prepared.sampling, s.seed or 0, len(s.token_ids)) for s in rows]
        token_ids = sampler.sample(logits, draws)
        tokens: list[Token] = [None if i is None else (i, None) for i in token_ids]
        asked = [
            (row, token_id)
            for row, (s, token_id) in enumerate(zip(rows, token_ids, strict=True))
            if s.prepared.logprobs and token_id is not None
        ]
        if asked:
            scores = sampler.logprobs(logits[[row for row, _ in asked]], [i for _, i in asked])
            for (row, token_id), score in zip(asked, scores, strict=True):
                tokens[row] = (token_id, score)
        return tokens

    def _advance(self, sequence: Sequence, token: Token, step: Step) -> None:
        if token is None:
            raise _unusable()
        token_id, logprob = token
        sequence.cached = sequence.position + 1
        event = sequence.append(token_id, logprob, self._clock())
        step.outputs.append(Output(sequence.key, event))
        step.generated_tokens += 1
        if sequence.finish_reason is not None:
            self._finish(sequence, "done", step)

    # --- ends -------------------------------------------------------------------------------

    def _isolate(
        self,
        rows: list[Sequence],
        error: Exception,
        step: Step,
        run: Callable[[Sequence], None],
    ) -> None:
        """After a pass failed: run its rows one by one, so that only the guilty fail."""
        log.warning("a forward pass of %d rows failed, running them one by one: %s", len(rows), error)
        failed = False
        for sequence in rows:
            try:
                run(sequence)
            except Exception as own:  # noqa: BLE001
                failed = True
                self._fail(sequence, own, step)
        if failed:
            self._probe(error)

    def _probe(self, error: Exception) -> None:
        """Find out whether the model still works at all."""
        try:
            self._runner.probe()
        except Exception as own:
            raise GenerationFailed(
                f"the model fails on any input ({error}): the worker must start anew", retryable=True
            ) from own

    def _fail(self, sequence: Sequence, error: Exception, step: Step) -> None:
        log.warning("request %s epoch %d failed: %s", *sequence.key, error)
        if not isinstance(error, StreamfleetError):
            error = GenerationFailed(
                f"the model failed on this request: {type(error).__name__}: {error}"[:1000]
            )
        self._runner.clear(sequence.slot)
        self._finish(sequence, "failed", step, error)

    def _finish(
        self,
        sequence: Sequence,
        state: EndState,
        step: Step,
        error: StreamfleetError | None = None,
    ) -> None:
        self._scheduler.remove(sequence.key)
        step.outputs.append(Output(sequence.key, sequence.finished(state, self._clock(), error)))


def _unusable() -> GenerationFailed:
    return GenerationFailed("the model gave no usable numbers (NaN or infinity) for this request")


def _bucket(sequence: Sequence) -> int:
    return padded(sequence.prefill_length)
