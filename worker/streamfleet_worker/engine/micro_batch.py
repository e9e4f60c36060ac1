"""The micro-batch engine: items of many requests in shared batches, and an answer for each request.

It serves whatever is done in one go: vectors, labels, ranks, decisions, and handlers that somebody wrote.
What an item is, and how a batch of them is run, is its task's and its runner's to say.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from streamfleet_common.errors import GenerationFailed, StreamfleetError
from streamfleet_common.schemas import Request
from streamfleet_worker.engine.answer_cache import AnswerCache
from streamfleet_worker.engine.asked import Asked, Shared
from streamfleet_worker.engine.base import Arrival, EngineInfo, Key, Launch, LaunchReason, Output, Room, Step
from streamfleet_worker.engine.faults import is_out_of_memory, of_company, place_of
from streamfleet_worker.engine.item import (
    Done,
    ItemBatch,
    Job,
    Outcome,
    Part,
    Progress,
    RetryLater,
    Runner,
    Running,
    Task,
)
from streamfleet_worker.engine.item_line import ItemLine
from streamfleet_worker.engine.pending import Pending

WINDOW = 4
"""Batches of items that a worker holds, so that they can be sorted by length."""

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Trial:
    """A batch that failed as a whole, and what its parts come to when they are tried again."""

    left: int
    """Items that are still to be tried, or running."""
    reason: LaunchReason
    """Why the batch was launched, which is told of its parts too."""
    good: int = 0
    """Items that have come to their end."""
    was_told: bool = False
    """The log has it that it failed."""


@dataclass(eq=False, slots=True)
class _Batch:
    items: list[Shared]
    running: Running
    trial: _Trial | None
    askers: list[Asked]
    """Whose items it has, each once."""
    heard_at: float
    """When it was launched, or last gave something."""
    reason: LaunchReason
    device_s: float = 0.0
    good: int = 0
    """Items that have come to their end."""

    @property
    def is_wanted(self) -> bool:
        return any(item.owners for item in self.items)


class MicroBatchEngine:
    """Runs what waits, batch by batch.

    Equal items of one scope that wait or run at one time are computed once, if their task says what makes
    them equal; the answer of each request is its own. A batch that fails is halved until the items are found
    that make it fail; these fail alone, the others are run again.

    Args:
        task: requests to items, results to answers.
        runner: items to results.
        info: what it serves; `window` batches of items may wait here.
        max_delay_s: how long the oldest item may wait, since its acceptance, for a batch to fill.
        max_batch_tokens: tokens in one batch, those that fill rows up included.
        length_step: lengths are rounded up to a multiple of it.
        uniform: all rows of a batch have the same rounded length, as exactness takes it.
        bisect: find out which items make a batch fail, by running the others again.
        answers: results that are kept.
        batch_limit_s: a batch that runs elsewhere and has nothing to give for so long ends the engine.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        task: Task,
        runner: Runner,
        info: EngineInfo,
        *,
        max_delay_s: float,
        max_batch_tokens: int = 1 << 40,
        length_step: int = 1,
        uniform: bool = False,
        bisect: bool = True,
        answers: AnswerCache | None = None,
        batch_limit_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._task = task
        self._batch_limit_s = batch_limit_s
        self._runner = runner
        self._info = info
        self._bisect = bisect
        self._answers = AnswerCache() if answers is None else answers
        self._clock = clock
        self._line: ItemLine[Shared] = ItemLine(
            max_batch_size=info.max_batch_size,
            max_batch_tokens=max_batch_tokens,
            max_delay_s=max_delay_s,
            length_step=length_step,
            exact=uniform,
        )
        self._pending = Pending(self._line, self._answers, clock)
        self._running: list[_Batch] = []
        self._left: list[_Batch] = []  # those that nobody wants, as long as they are under way
        self._halves: deque[tuple[list[Shared], _Trial]] = deque()
        self._unborn: list[Output] = []  # ends of those that need no batch
        self._launched = 0

    @property
    def info(self) -> EngineInfo:
        """What this engine serves."""
        return self._info

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes taken now, by use; may be read from any thread."""
        taken = dict(self._runner.memory)
        if taken or self._answers.bytes:
            taken |= {"items": self._pending.item_bytes, "answers": self._answers.bytes}
        return taken

    @property
    def counts(self) -> Mapping[str, int]:
        """What was asked of the caches so far; may be read from any thread."""
        return {
            **self._task.counts,
            "answer_cache_queries": self._answers.queries,
            "answer_cache_hits": self._answers.hits,
            "coalesced_items": self._pending.coalesced,
        }

    def listen(self, wake: Callable[[], None]) -> None:
        """Have `wake` called, from any thread, when a batch that runs elsewhere has something to give."""
        self._runner.listen(wake)

    def prepare(self, request: Request, scope: str = "") -> Job:
        """Check a request and make it ready; callable from any thread. Raises as `Task.prepare` does."""
        return self._task.prepare(request, scope)

    def add(self, arrivals: Mapping[Key, Arrival]) -> None:
        """Take requests in; a key that is here already is ignored."""
        now = self._clock()
        for key, arrival in arrivals.items():
            self._pending.add(key, arrival, now, self._unborn)

    def cancel(self, keys: Collection[Key]) -> None:
        """Forget these keys. What runs goes on, unless nobody wants any of it."""
        self._unborn = [output for output in self._unborn if output.key not in keys]
        self._pending.forget(keys)
        self._drop_unwanted()

    def drain(self) -> None:
        """Let nothing wait for company from now on."""
        self._line.is_draining = True

    def step(self) -> Step:
        """Launch a batch that is due, and go on with one that is ready.

        Raises:
            GenerationFailed: nothing can be run any more; the engine is of no more use.
        """
        now = self._clock()
        step = Step(outputs=self._unborn)
        self._unborn = []
        self._look_after_left(now)
        if now >= self._pending.next_deadline:
            self._pending.expire(now, step.outputs)
            self._drop_unwanted()
        free = self._runner.slots - len(self._running)
        if free > -self._runner.ahead:
            self._launch(now, step, full=free <= 0)
        # One a step, so that its report is of one batch; each in its turn.
        batch = next((batch for batch in self._running if batch.running.is_ready), None)
        if batch is not None:
            self._running.remove(batch)
            self._running.append(batch)
            self._advance(batch, step)
            batch.heard_at = self._clock()
            self._drop_unwanted()
        elif now >= self._silent_until():
            raise GenerationFailed(
                f"a batch has run for over {self._batch_limit_s:g} s without a word", retryable=True
            )
        return step

    def due_in(self) -> float | None:
        """Seconds until `step` has something to do."""
        if self._unborn or any(batch.running.is_ready for batch in self._running):
            return 0.0
        now = self._clock()
        self._look_after_left(now)
        # Of what runs elsewhere `listen` tells.
        due_in = min(self._pending.next_deadline, self._silent_until()) - now
        free = self._runner.slots - len(self._running)
        if free > -self._runner.ahead and (self._halves or (free <= 0 and self._line.is_full)):
            return 0.0
        if free > 0:
            line_due_in = self._line.due_in(now)
            due_in = due_in if line_due_in is None else min(due_in, line_due_in)
        return None if due_in == math.inf else max(0.0, due_in)

    def room(self) -> Room:
        """What could be added now."""
        running = sum(len(batch.items) for batch in self._running)
        waiting = self._line.waiting + sum(len(half) for half, _ in self._halves)
        return Room(rows=max(0, self._info.max_rows - running - waiting), running=running, waiting=waiting)

    def close(self) -> None:
        """Free what the runner holds."""
        for batch in self._running:
            _close(batch)
        self._runner.close()

    # --- batches ----------------------------------------------------------------------------

    def _silent_until(self) -> float:
        """When the batch that runs longest without a word should have given something.

        One that nobody wants counts as long as it is under way: the next ones may be behind it.
        """
        heard_at = (batch.heard_at for batch in (*self._left, *self._running[:1]))
        return min(heard_at, default=math.inf) + self._batch_limit_s

    def _look_after_left(self, now: float) -> None:
        """Strike off what is over of the batches that nobody wanted."""
        left = [batch for batch in self._left if not batch.running.is_ready]
        if len(left) < len(self._left):
            self._left = left
            if self._running:
                # It may have waited for this one.
                self._running[0].heard_at = now

    def _launch(self, now: float, step: Step, *, full: bool) -> None:
        """Begin a batch, if there is one to begin; with `full` none but a full one."""
        trial: _Trial | None = None
        if self._halves:
            half, trial = self._halves.popleft()
            items = [item for item in half if item.owners]
            self._tried(trial, len(half) - len(items), 0)
            reason = trial.reason
        else:
            items = self._line.take(now, full=full)
            reason = self._line.reason
        if not items:
            return
        length = max(item.bucket for item in items)
        lengths = tuple(item.spec.length for item in items)
        values = ItemBatch([item.spec.value for item in items], items[0].spec.group, length, lengths)
        askers = list({id(asked): asked for item in items for asked, _ in item.owners}.values())
        tokens, padded = sum(lengths), length * len(items)
        self._launched += 1
        launch = Launch(
            self._launched,
            reason,
            len(items),
            padded,
            1 - tokens / padded if padded else 0.0,
            tuple([asked.key for asked in askers]),
        )
        for asked in askers:
            asked.start(now)
            asked.batches += 1
            asked.launch = launch
        for item in items:
            item.launch = launch
        step.launches.append(launch)
        step.rows += len(items)
        step.prompt_tokens += tokens
        step.padded_tokens += padded
        try:
            running = self._runner.launch(values)
        except Exception as error:  # noqa: BLE001  whatever a model or a handler raises is its items' fault
            self._split(items, error, trial or self._trial(items, error, reason), step)
        else:
            self._running.append(_Batch(items, running, trial, askers, now, reason))

    def _advance(self, batch: _Batch, step: Step) -> None:
        began = time.perf_counter()
        try:
            progress = batch.running.advance()
        except Exception as error:  # noqa: BLE001
            self._charge(batch, time.perf_counter() - began)
            self._end_batch(batch, step)
            self._give_up(batch, error, step)
            return
        self._charge(batch, progress.device_s)
        if len(progress.outcomes) != len(batch.items):
            if not progress.ended:
                _close(batch)
            fault = f"{len(batch.items)} outcomes are wanted of the runner, and {len(progress.outcomes)} came"
            progress = Progress([GenerationFailed(fault)] * len(batch.items))
        self._take(batch, progress.outcomes, ended=progress.ended, step=step)
        if progress.ended:
            self._end_batch(batch, step)
            self._line.fared_well()
            self._tried(batch.trial or _Trial(len(batch.items), batch.reason), len(batch.items), batch.good)

    def _charge(self, batch: _Batch, seconds: float) -> None:
        batch.device_s += seconds
        for asked in batch.askers:
            asked.device_s += seconds

    def _end_batch(self, batch: _Batch, step: Step) -> None:
        self._running.remove(batch)
        step.device_s += batch.device_s
        if self._runner.ahead and self._running:
            # It has waited for this one.
            self._running[0].heard_at = self._clock()

    def _take(self, batch: _Batch, outcomes: Sequence[Outcome], *, ended: bool, step: Step) -> None:
        for item, outcome in zip(batch.items, outcomes, strict=True):
            if isinstance(outcome, Done):
                batch.good += 1
            if item.ended:
                continue
            if isinstance(outcome, Part):
                self._pending.give(item, outcome.value, step.outputs)
            elif isinstance(outcome, Done):
                self._pending.end(item, outcome.value, step.outputs)
            elif isinstance(outcome, Exception):
                self._pending.fail(item, outcome, step.outputs)
                # To be asked to come again is no sign of ruin.
                batch.good += isinstance(outcome, RetryLater)
            if ended and not item.ended:
                self._pending.fail(
                    item, GenerationFailed("it ended without an answer to this item"), step.outputs
                )

    def _give_up(self, batch: _Batch, error: Exception, step: Step) -> None:
        """A batch that ran has failed as a whole: run its items again, but for what cannot be taken back."""
        trial = batch.trial or self._trial(batch.items, error, batch.reason)
        is_final = isinstance(error, RetryLater) or not self._bisect
        lost = [item for item in batch.items if not item.ended and (item.parts or is_final)]
        for item in lost:
            self._pending.fail(item, of_company(error, len(batch.items)), step.outputs)
        left = [item for item in batch.items if not item.ended]
        good = batch.good + (len(lost) if isinstance(error, RetryLater) else 0)
        self._tried(trial, len(batch.items) - len(left), good)
        if len(left) == len(batch.items):
            self._split(left, error, trial, step)
        elif left:
            # Whoever it was may be gone.
            self._halves.appendleft((left, trial))

    def _trial(self, items: list[Shared], error: Exception, reason: LaunchReason) -> _Trial:
        # Once a batch: its halves may fail again for an item that is too large in any company.
        if is_out_of_memory(error) and len(items) > 1:
            self._line.lower_budget(items)
        return _Trial(len(items), reason)

    def _split(self, items: list[Shared], error: Exception, trial: _Trial, step: Step) -> None:
        """Find out which items make a batch fail: each half is tried by itself."""
        if isinstance(error, RetryLater) or not self._bisect or len(items) == 1:
            for item in items:
                self._pending.fail(item, of_company(error, len(items)), step.outputs)
            # To be asked to come again is no sign of ruin.
            self._tried(trial, len(items), len(items) if isinstance(error, RetryLater) else 0)
            return
        # Once a batch, and of an error of ours whoever has made it of another has told.
        level = logging.DEBUG if trial.was_told or isinstance(error, StreamfleetError) else logging.WARNING
        trial.was_told = True
        log.log(level, "a batch of %d failed, and is tried in halves: %s", len(items), place_of(error))
        middle = len(items) // 2
        self._halves.extendleft([(items[middle:], trial), (items[:middle], trial)])

    def _tried(self, trial: _Trial, tried: int, good: int) -> None:
        """So many items of a trial have ended, of which so many were good."""
        trial.left -= tried
        trial.good += good
        if tried and not trial.left and not trial.good and self._runner.is_broken():
            raise GenerationFailed("nothing can be run any more: every item failed, and so does a trial")

    def _drop_unwanted(self) -> None:
        """End the batches of which nobody wants anything any more."""
        for batch in [batch for batch in self._running if not batch.is_wanted]:
            self._running.remove(batch)
            _close(batch)
            if self._batch_limit_s < math.inf:
                self._left.append(batch)


def _close(batch: _Batch) -> None:
    try:
        batch.running.close()
    except Exception as error:  # noqa: BLE001  nobody wants it, and it must not end the others
        log.warning("a batch could not be closed: %s", place_of(error))
