"""The continuous-batching engine: a new token for every running sequence at each step."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from streamfleet_common.decisions import DecideRequest
from streamfleet_common.errors import DeadlineExceeded, GenerationFailed, StreamfleetError
from streamfleet_common.schemas import EndState, FinishReason, GenerateRequest, Prefill, Request
from streamfleet_worker.engine.answer import Answer
from streamfleet_worker.engine.base import (
    Arrival,
    EngineInfo,
    Finished,
    Key,
    Launch,
    Output,
    Room,
    Step,
    unsupported,
)
from streamfleet_worker.engine.decision import PreparedDecision
from streamfleet_worker.engine.decision_answer import DecisionAnswer
from streamfleet_worker.engine.decision_preparer import DecisionPreparer
from streamfleet_worker.engine.exactness import Exactness
from streamfleet_worker.engine.faults import about, is_out_of_memory, place_of
from streamfleet_worker.engine.forward import Forward
from streamfleet_worker.engine.guide_compiler import GuideCompiler
from streamfleet_worker.engine.kv_cache import KVCache
from streamfleet_worker.engine.memory import ROW_WASTE, cache_tokens, peak_bytes
from streamfleet_worker.engine.model_runner import ModelRunner
from streamfleet_worker.engine.passes import Failed, Passed, Passes
from streamfleet_worker.engine.prefix_cache import BLOCK, PrefixCache
from streamfleet_worker.engine.preparer import Preparer
from streamfleet_worker.engine.sampler import Sampled
from streamfleet_worker.engine.scheduler import Chunk, Plan, Scheduler
from streamfleet_worker.engine.sequence import Scores, Sequence

if TYPE_CHECKING:
    from streamfleet_worker.engine.models import LoadedModel
    from streamfleet_worker.engine.prepared import Prepared

log = logging.getLogger(__name__)


class GenerationEngine:
    """Generates text for many requests at once; an `Engine`.

    Each step computes, in one pass over the model, the next token of every running sequence and a part of
    newcomers' prompts. Sequences join and leave between steps, and each gets the tokens it would get alone.

    Args:
        loaded: the model, from `models.load`.
        max_batch_size: sequences that run at once; each choice of a request is one.
        max_delay_s: how long the first request of a batch waits for company, counted from when the fleet
            accepted it.
        max_seq_len: tokens of prompt and answer together; the model's own limit may be lower.
        clock: seconds, monotonic.
        max_waiting_tokens: steps after which newcomers join, however few.
        max_waiting_s: age at which a newcomer joins, whatever else.
        max_prefill_tokens: prompt tokens computed in one step while nothing is decoded.
        prefill_chunk: prompt tokens computed in one step otherwise.
        cache_bytes: for the keys and values of running sequences; None takes what the machine has to spare.
        prefix_cache_bytes: for those of prompts' beginnings that may come again; 0 keeps none.
        exact: give a request the same bits in any company, where the machine can do it.
        cuda_graphs: on an NVIDIA GPU, replay recorded decode passes.
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
        prefill_chunk: int = 512,
        cache_bytes: int | None = None,
        prefix_cache_bytes: int = 256 << 20,
        exact: bool = True,
        cuda_graphs: bool = False,
    ) -> None:
        limit = min(max_seq_len, loaded.max_positions)
        token_bytes = loaded.cache_shape.bytes(loaded.dtype)
        tokens = cache_tokens(token_bytes, max_batch_size, limit, loaded.device, cache_bytes)
        limit = min(limit, tokens)
        self._loaded = loaded
        self._clock = clock
        self._cache = KVCache(
            loaded.cache_shape,
            limit,
            max_batch_size,
            int(tokens * ROW_WASTE),
            dtype=loaded.dtype,
            device=loaded.device,
        )
        self._runner = ModelRunner(loaded, graphs=cuda_graphs)
        self._passes = Passes(Forward(self._runner, self._cache), self._runner, self._make_room)
        self._prefix = PrefixCache(prefix_cache_bytes)
        self._scheduler = Scheduler(
            max_batch_size=max_batch_size,
            max_delay_s=max_delay_s,
            cache_tokens=tokens,
            max_waiting_tokens=max_waiting_tokens,
            max_waiting_s=max_waiting_s,
            max_prefill_tokens=max_prefill_tokens,
            # Whole blocks, as the prefix cache has them.
            prefill_chunk=-(-prefill_chunk // BLOCK) * BLOCK,
            prefix=self._prefix,
        )
        self._answers: dict[Key, Answer | DecisionAnswer] = {}
        self._unasked: list[Key] = []  # those without questions
        self._unborn: list[Output] = []  # ends of those that could not be taken in
        self._launched = 0
        self._decision_preparer = DecisionPreparer(loaded.tokenizer, loaded.name, limit)
        self._info = EngineInfo(
            model=loaded.name,
            revision=loaded.revision,
            tasks=("generate", "decide"),
            device=loaded.device_name,
            precision=loaded.precision,
            max_batch_size=max_batch_size,
            max_seq_len=limit,
            vocab_size=loaded.vocab_size,
            layout=self._decision_preparer.layout,
        )
        self._exact = exact
        guides = GuideCompiler(loaded.tokenizer, loaded.vocab_size, loaded.eos_token_ids)
        self._preparer = Preparer(loaded.tokenizer, self._info, guides.compile)

    @property
    def info(self) -> EngineInfo:
        """What this engine serves; `exact` is known once it is warm."""
        return self._info

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes taken now, by use; may be read from any thread.

        On a CPU the cache's rows take memory as they fill, and the peak is the process's; on a GPU torch's.
        Nothing once it is closed.
        """
        try:
            return {
                "weights": self._loaded.weights_bytes,
                "cache": self._cache.bytes,
                "prefix_cache": self._prefix.bytes,
                "peak": peak_bytes(self._loaded.device),
            }
        except AttributeError:  # closed, maybe just now
            return {}

    @property
    def counts(self) -> Mapping[str, int]:
        """Each step tells of the prefix cache, and it has no others."""
        return {}

    def listen(self, wake: Callable[[], None]) -> None:
        """Nothing happens but in a step."""

    def warm_up(self) -> None:
        """Run the model once as a batch and compare it with the model alone, before work depends on it.

        Raises:
            ModelLoadFailed: it gives other numbers in our cache than by itself.
        """
        with torch.inference_mode():
            self._runner.check(self._cache)
            if self._exact and not self._runner.records:
                exactness = Exactness.find(self._loaded, self._runner, self._cache)
                self._info = replace(self._info, exact=exactness.name)
            self._cache.trim()

    def prepare(self, request: Request, scope: str = "") -> Prepared | PreparedDecision:
        """Check a request and turn its prompt into tokens; callable from any thread.

        Raises:
            ModelNotFound: it names another model.
            TooLong: prompt and answer do not fit.
            Unsupported: it has messages, and the model no chat template; or a form, and there is no library
                to guide it.
            InvalidRequest: an empty prompt, a token id out of range, messages the template refuses.
        """
        if isinstance(request, DecideRequest):
            return self._decision_preparer.prepare(request)
        if not isinstance(request, GenerateRequest):
            raise unsupported(request, self._info.model, self._info.tasks)
        return self._preparer.prepare(request, scope)

    def add(self, arrivals: Mapping[Key, Arrival]) -> None:
        """Take requests in; a key that is here already is ignored."""
        now = self._clock()
        for key, arrival in arrivals.items():
            if key in self._answers:
                continue
            try:
                self._take_in(key, arrival, now)
            except Exception as error:  # noqa: BLE001
                self._answers.pop(key, None)
                self._withdraw(key)
                failed = Finished("failed", error=_failure(error))
                self._unborn.append(Output(key, failed))

    def _take_in(self, key: Key, arrival: Arrival, now: float) -> None:
        if isinstance(arrival.prepared, PreparedDecision):
            decision = self._answers[key] = DecisionAnswer.of(key, arrival, now)
            self._feed(decision)
            if not arrival.prepared.n:
                self._unasked.append(key)
            return
        answer = self._answers[key] = Answer.of(self._loaded, key, arrival, now)
        for sequence in answer.running.values():
            self._scheduler.add(sequence)

    def cancel(self, keys: Collection[Key]) -> None:
        """Forget these keys: they leave before the next forward pass."""
        self._unborn = [output for output in self._unborn if output.key not in keys]
        with torch.inference_mode():  # rows of the cache move
            for key in keys:
                if self._answers.pop(key, None) is not None:
                    self._withdraw(key)

    def drain(self) -> None:
        """Let nobody wait for company from now on."""
        self._scheduler.drain()

    def step(self) -> Step:
        """Compute the next token of every running sequence, and a part of newcomers' prompts.

        Raises:
            GenerationFailed: the model fails on any input; the engine is of no more use.
        """
        with torch.inference_mode():
            return self._step()

    def due_in(self) -> float | None:
        """Seconds until `step` has something to do."""
        return 0.0 if self._unasked or self._unborn else self._scheduler.due_in(self._clock())

    def room(self) -> Room:
        """What could be added now."""
        running, waiting = self._scheduler.running_count, self._scheduler.waiting
        free = max(0, self._info.max_batch_size - running - waiting)
        return Room(free, running, waiting, cache_used=self._scheduler.cache_used)

    def close(self) -> None:
        """Free the model and its cache."""
        del self._runner, self._scheduler, self._cache, self._passes, self._prefix, self._loaded

    # --- arrival ----------------------------------------------------------------------------

    def _feed(self, decision: DecisionAnswer) -> None:
        """Put parts of it into the line: so many that a batch of them waits, but not all at once."""
        for index, part in decision.next(2 * self._info.max_batch_size).items():
            sequence = decision.running[index] = Sequence.of(
                self._loaded,
                decision.key,
                index,
                part.prepared,
                decision.arrival,
                scored_from=part.scored_from,
            )
            self._scheduler.add(sequence)

    # --- a step -----------------------------------------------------------------------------

    def _step(self) -> Step:
        began = self._clock()
        step = Step(outputs=self._unborn)
        self._unborn = []
        for key in dict.fromkeys(sequence.key for sequence in self._scheduler.expire(began)):
            self._end(
                key, "expired", step, DeadlineExceeded("the deadline passed before the answer was complete")
            )
        for key in self._unasked:
            if key in self._answers:
                step.outputs.append(Output(key, self._answers.pop(key).finished("done", began)))
        self._unasked.clear()
        asked, found = self._prefix.tokens_asked, self._prefix.tokens_found
        todo = self._scheduler.schedule(began)
        self._launch(todo, began, step)
        asked, found = self._prefix.tokens_asked - asked, self._prefix.tokens_found - found
        step.asked_tokens, step.cached_tokens = asked, found
        for sequence in todo.admitted:
            self._try(sequence, partial(self._settle, sequence), step)
        for sequence in todo.decodes:
            self._try(sequence, partial(self._widen, sequence), step)
        decodes = [s for s in todo.decodes if s.slot is not None]
        chunks = [c for c in todo.chunks if c.sequence.slot is not None]
        if decodes or chunks:
            step.rows = len(decodes)
            step.prompt_tokens = sum(chunk.end - chunk.start for chunk in chunks)
            for part in self._passes.run(decodes, chunks):
                if isinstance(part, Failed):
                    self._fail(part.sequence, part.error, step)
                else:
                    self._take(part, step)
            self._scheduler.observe(self._clock() - began)
        return step

    def _launch(self, todo: Plan, now: float, step: Step) -> None:
        """Note who has joined the running batch."""
        if todo.reason is None:
            return
        running = self._scheduler.running
        newcomers = dict.fromkeys(sequence.key for sequence in todo.admitted)
        self._launched += 1
        launch = Launch(
            self._launched,
            todo.reason,
            len(running),
            len(running) + sum(s.prompt_length - s.computed - 1 for s in todo.admitted),
            0.0,
            tuple(dict.fromkeys([*newcomers, *(sequence.key for sequence in running)])),
        )
        step.launches.append(launch)
        for sequence in todo.admitted:
            sequence.started_at = now
        for key in newcomers:
            if key in self._answers:
                self._answers[key].launch = launch

    def _try(self, sequence: Sequence, act: Callable[[], None], step: Step) -> None:
        """Do something for a sequence, if it is still here; what it raises is its own fault."""
        if sequence.key not in self._answers:
            return
        try:
            act()
        except Exception as error:  # noqa: BLE001
            if is_out_of_memory(error):
                self._make_room()
            self._fail(sequence, error, step)

    def _settle(self, sequence: Sequence) -> None:
        """Give a newcomer a row, with what the prefix cache has of its prompt."""
        sequence.slot = self._cache.take(sequence.prompt_length + min(1, sequence.max_tokens))
        for number, block in enumerate(sequence.blocks):
            self._cache.write(sequence.slot, number * BLOCK, block.values)
        sequence.cached = len(sequence.blocks) * BLOCK
        self._prefix.release(sequence.blocks)
        sequence.blocks = []

    def _widen(self, sequence: Sequence) -> None:
        if sequence.slot is not None:
            self._cache.grow(sequence.slot, sequence.position + 1)

    def _make_room(self) -> None:
        """After the memory was exhausted: give back what can be had again, and compute less at once."""
        self._cache.trim()
        self._prefix.clear()
        self._scheduler.lower_budget()
        if self._loaded.device.type == "cuda":
            torch.cuda.empty_cache()

    def _take(self, part: Passed, step: Step) -> None:
        chunks, outcome = part.chunks, part.outcome
        for chunk in chunks:
            self._try(chunk.sequence, partial(self._advance, chunk), step)
        for sequence, scores in outcome.scores:
            self._try(sequence, partial(self._score, sequence, scores, step), step)
        for sequence, token in outcome.tokens:
            self._try(sequence, partial(self._append, sequence, token, step), step)
        for chunk in chunks:
            sequence = chunk.sequence
            if not sequence.max_tokens and sequence.computed == sequence.prompt_length:
                self._try(sequence, partial(self._leave, sequence, step), step)

    def _advance(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        if sequence.slot is None:
            return
        sequence.computed = chunk.end
        first, last = -(-chunk.start // BLOCK), chunk.end // BLOCK
        if self._prefix.max_bytes and first < last:
            values = [self._cache.read(sequence.slot, i * BLOCK, (i + 1) * BLOCK) for i in range(first, last)]
            # What one fault spoilt would spoil all that begin so.
            if torch.stack([part.isfinite().all() for block in values for part in block]).all():
                self._prefix.insert(sequence.prompt_token_ids, first, values, sequence.arrival.scope)
        if chunk.end == sequence.prompt_length and sequence.max_tokens:
            self._cache.start_decoding(sequence.slot)

    def _append(self, sequence: Sequence, token: Sampled | StreamfleetError, step: Step) -> None:
        if isinstance(token, StreamfleetError):
            raise token
        step.outputs.append(Output(sequence.key, sequence.append(token, self._clock())))
        step.generated_tokens += 1
        if sequence.finish_reason is not None:
            self._leave(sequence, step)

    def _score(self, sequence: Sequence, scores: Scores, step: Step) -> None:
        if not all(map(math.isfinite, scores.logprobs)):
            raise GenerationFailed("the model gave no usable numbers (NaN or infinity) for this request")
        sequence.scores.logprobs += scores.logprobs
        sequence.scores.top += scores.top
        answer = self._answers.get(sequence.key)
        if not isinstance(answer, Answer) or sequence.computed < sequence.prompt_length:
            return
        top = ((), *sequence.scores.top) if sequence.prepared.top_logprobs else ()
        answer.prefill = Prefill(
            token_ids=sequence.prompt_token_ids,
            texts=tuple(self._loaded.tokenizer.texts(sequence.prompt_token_ids)),
            logprobs=(None, *sequence.scores.logprobs),
            top_logprobs=top,
        )
        step.outputs.append(Output(sequence.key, answer.prefill))

    # --- ends -------------------------------------------------------------------------------

    def _leave(self, sequence: Sequence, step: Step) -> None:
        """One choice is complete."""
        self._release(self._scheduler.remove(sequence.key, sequence.index))
        answer = self._answers[sequence.key]
        if answer.end(sequence):
            del self._answers[sequence.key]
            step.outputs.append(Output(sequence.key, answer.finished("done", self._clock())))
        elif isinstance(answer, DecisionAnswer):
            self._feed(answer)

    def _fail(self, sequence: Sequence, error: Exception, step: Step) -> None:
        """A choice has failed, and with it its request."""
        # Without the error's own words, which may quote the prompt.
        where, key = place_of(error), sequence.key
        log.warning("request %s epoch %d failed: %s", *key, where, extra=about(key))
        self._end(sequence.key, "failed", step, _failure(error))

    def _end(self, key: Key, state: EndState, step: Step, error: StreamfleetError) -> None:
        """A request ends before its time."""
        answer = self._answers.pop(key, None)
        if answer is None:
            return
        reason: FinishReason = "expired" if state == "expired" else "error"
        for sequence in answer.running.values():
            rest = sequence.cut(reason)
            if rest is not None:
                step.outputs.append(Output(key, rest))
        step.outputs.append(Output(key, answer.finished(state, self._clock(), error)))
        self._withdraw(key, [*answer.running.values()])

    def _withdraw(self, key: Key, sequences: Collection[Sequence] = ()) -> None:
        self._release(dict.fromkeys([*self._scheduler.remove(key), *sequences]))

    def _release(self, sequences: Collection[Sequence]) -> None:
        for sequence in sequences:
            if sequence.slot is not None:
                self._cache.free(sequence.slot)
                sequence.slot = None
            if sequence.blocks:
                self._prefix.release(sequence.blocks)
                sequence.blocks = []


def _failure(error: Exception) -> StreamfleetError:
    if isinstance(error, StreamfleetError):
        return error
    return GenerationFailed(
        f"the model failed on this request: {type(error).__name__}: {error}"[:1000],
        retryable=is_out_of_memory(error),
    )
