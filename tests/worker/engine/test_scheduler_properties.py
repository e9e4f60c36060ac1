"""What the scheduler promises, whatever comes and goes: checked at each step of a scripted model.

The model computes what it is told, keeps what it computed in the prefix cache, and ends each answer after a
given number of tokens. Times are multiples of an eighth of a second, so that sums of them are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hypothesis import given, settings
from hypothesis import strategies as st

from stand_in_sequence import FOREVER, stand_in
from streamfleet_worker.engine.prefix_cache import BLOCK, PrefixCache, chain
from streamfleet_worker.engine.scheduler import Plan, Scheduler

if TYPE_CHECKING:
    from streamfleet_worker.engine.sequence import Sequence

EIGHTH = 0.125


@dataclass(frozen=True)
class Limits:
    max_batch_size: int
    max_delay_s: float
    cache_tokens: int
    max_waiting_tokens: int
    max_waiting_s: float
    max_prefill_tokens: int
    prefill_chunk: int
    max_overtakes: int
    prefix_blocks: int


@dataclass(frozen=True)
class Coming:
    """A request that arrives; `shared` tokens of its prompt are its family's, `own` are nobody else's."""

    family: int
    shared: int
    own: int
    max_tokens: int
    length: int
    """Tokens after which it ends."""
    age: int
    life: int
    """Eighths of a second: since it was accepted, and until its deadline."""
    choices: int


@dataclass(frozen=True)
class Moment:
    pause: int
    """Eighths of a second since the step before."""
    coming: list[Coming]
    cancelled: int | None
    """Which of those that are here, counted around."""


@dataclass(frozen=True)
class Values:
    prompt: tuple[int, ...]
    """All tokens up to the block's end."""
    bytes: int = 1


class World:
    """A scheduler, the model, and what the promises are checked against: a record of what happened."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.prefix = PrefixCache(limits.prefix_blocks)
        self.made = Scheduler(
            max_batch_size=limits.max_batch_size,
            max_delay_s=limits.max_delay_s,
            cache_tokens=limits.cache_tokens,
            max_waiting_tokens=limits.max_waiting_tokens,
            max_waiting_s=limits.max_waiting_s,
            max_prefill_tokens=limits.max_prefill_tokens,
            prefill_chunk=limits.prefill_chunk,
            max_overtakes=limits.max_overtakes,
            prefix=self.prefix,
        )
        self.now = 0.0
        self.count = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.tokens_left: dict[Sequence, int] = {}
        self.steps: dict[Sequence, int] = {}
        """Steps of running rows since it came."""
        self.steps_since_admission = 0
        self.passed: dict[Sequence, int] = {}
        """How many went before it for want of room alone,"""
        self.gone_before: dict[Sequence, int] = {}
        """and for whatever reason."""
        self.computed: dict[Sequence, int] = {}

    # --- events ---

    def add(self, coming: Coming) -> None:
        own = stand_in("", prompt=coming.own).prompt_token_ids
        shared = range(1000 * coming.family, 1000 * coming.family + coming.shared)
        for index in range(coming.choices):
            at = self.now - coming.age * EIGHTH
            sequence = stand_in(
                str(self.count),
                index=index,
                prompt=(*shared, *own),
                max_tokens=coming.max_tokens,
                at=at,
                deadline=self.now + coming.life * EIGHTH if coming.life else FOREVER,
            )
            self.made.add(sequence)
            self.waiting.append(sequence)
            self.tokens_left[sequence] = min(coming.length, coming.max_tokens)
            self.steps[sequence] = self.passed[sequence] = self.gone_before[sequence] = 0
        self.count += 1

    def cancel(self, number: int) -> None:
        everybody = self.waiting + self.running
        if everybody:
            key = everybody[number % len(everybody)].key
            gone = self.made.remove(key)
            assert set(gone) == {s for s in everybody if s.key == key}
            self.forget(gone)

    def forget(self, gone: list[Sequence]) -> None:
        self.waiting = [s for s in self.waiting if s not in gone]
        self.running = [s for s in self.running if s not in gone]

    # --- what is known of a sequence ---

    def tokens(self, sequence: Sequence) -> int:
        return math.ceil((sequence.prompt_length + sequence.max_tokens) / 64) * 64

    def reserved(self) -> int:
        return sum(self.tokens(s) for s in self.running)

    def fits(self, sequence: Sequence) -> bool:
        return self.reserved() + self.tokens(sequence) <= self.limits.cache_tokens

    def age(self, sequence: Sequence) -> float:
        return self.now - sequence.arrival.accepted_at

    def may_share(self, sequence: Sequence, *, next_block: bool) -> bool:
        """Whether a running one is computing a block that it could use: the next one, or any."""
        if not self.prefix.max_bytes:
            return False
        held = self.prefix.held(chain(sequence.prompt_token_ids)[: sequence.reusable // BLOCK])
        for other in self.running:
            same = 0
            for mine, its in zip(
                sequence.prompt_token_ids[: sequence.reusable], other.prompt_token_ids, strict=False
            ):
                if mine != its:
                    break
                same += 1
            blocks = same // BLOCK
            if blocks > held and other.computed < (held + 1 if next_block else blocks) * BLOCK:
                return True
        return False

    # --- a step ---

    def step(self) -> None:
        late = self.made.expire(self.now)
        everybody = self.waiting + self.running
        assert set(late) == {s for s in everybody if s.arrival.deadline_at <= self.now}
        self.forget(late)
        due = self.made.due_in(self.now)
        assert (due is None) == (not self.waiting and not self.running)
        if self.running:
            self.steps_since_admission += 1
            for sequence in self.waiting:
                self.steps[sequence] += 1
        opened = self.opened()
        plan = self.made.schedule(self.now)
        if not self.prefix.max_bytes:
            assert opened or not plan.admitted
        self.check_admitted(plan)
        self.check_left_waiting(opened)
        self.check_rows(plan)
        self.run(plan)
        if due == 0.0:
            assert plan.chunks or plan.decodes, "a step that was due did nothing"
        elif due is not None:
            assert not plan.admitted
            self.now += due
            assert self.made.due_in(self.now) == 0.0

    def opened(self) -> bool:
        """The rule, as it stands in the documentation of `Admission`."""
        free, running, waiting = (
            self.limits.max_batch_size - len(self.running),
            len(self.running),
            len(self.waiting),
        )
        if not free or not waiting:
            return False
        oldest = max(map(self.age, self.waiting))
        if oldest >= self.limits.max_waiting_s:
            return True
        steps = self.steps[self.waiting[0]]
        if running:
            steps = max(steps, self.steps_since_admission)
        if steps >= self.limits.max_waiting_tokens:
            return True
        if running:
            return waiting >= min(free, math.ceil(0.3 * running))
        return waiting >= free or oldest >= self.limits.max_delay_s

    def check_admitted(self, plan: Plan) -> None:
        """First come, first served, but for bounded overtaking and for those that stand back."""
        for sequence in plan.admitted:
            ahead = self.waiting[: self.waiting.index(sequence)]
            assert self.fits(sequence)
            assert not self.may_share(sequence, next_block=True), "computed twice"
            for earlier in ahead:
                if earlier in plan.admitted:
                    raise AssertionError("not in order of arrival")
                back = self.may_share(earlier, next_block=False)
                assert back or not self.fits(earlier)
                self.gone_before[earlier] += 1
                self.passed[earlier] += not back
                assert self.passed[earlier] <= self.limits.max_overtakes
            self.waiting.remove(sequence)
            self.running.append(sequence)
            self.computed[sequence] = BLOCK * len(sequence.blocks)
            assert sequence.computed == self.computed[sequence] < sequence.prompt_length
            for number, block in enumerate(sequence.blocks):
                assert block.values.prompt == sequence.prompt_token_ids[: (number + 1) * BLOCK]
            self.steps_since_admission = 0

    def check_left_waiting(self, opened: bool) -> None:
        """Nobody waits past the bound while a row and budget are free."""
        assert len(self.running) <= self.limits.max_batch_size
        if len(self.running) == self.limits.max_batch_size:
            return
        shut = False
        for sequence in self.waiting:
            pressing = (
                self.steps[sequence] >= self.limits.max_waiting_tokens
                or self.age(sequence) >= self.limits.max_waiting_s
                or (opened and not self.prefix.max_bytes)
            )
            if pressing and not shut and self.fits(sequence):
                assert self.may_share(sequence, next_block=False)
            # While one that does not fit has been passed by as many as may, nobody is let past it.
            shut = shut or (
                self.gone_before[sequence] >= self.limits.max_overtakes and not self.fits(sequence)
            )

    def check_rows(self, plan: Plan) -> None:
        """Budgets are kept, whoever can decode does, and each prompt goes on where it stopped."""
        assert self.made.running == self.running
        assert self.made.reserved == self.reserved() <= self.limits.cache_tokens
        assert plan.decodes == [s for s in self.running if s.computed == s.prompt_length]
        size, chunk = sum(c.end - c.start for c in plan.chunks), self.limits.prefill_chunk
        budget = (
            min(chunk, self.limits.max_prefill_tokens) if plan.decodes else self.limits.max_prefill_tokens
        )
        assert size <= budget or (len(plan.chunks) == 1 and size <= chunk)
        assert bool(plan.chunks) == any(s.computed < s.prompt_length for s in self.running)
        assert len({c.sequence for c in plan.chunks}) == len(plan.chunks)
        for c in plan.chunks:
            assert c.start == self.computed[c.sequence]
            assert c.end == min(c.sequence.prompt_length, (c.start // chunk + 1) * chunk)

    def run(self, plan: Plan) -> None:
        for sequence in plan.admitted:
            self.prefix.release(sequence.blocks)
        sampled = list(plan.decodes)
        for c in plan.chunks:
            sequence = c.sequence
            sequence.computed = self.computed[sequence] = c.end
            first, last = c.start // BLOCK, c.end // BLOCK
            ends = [sequence.prompt_token_ids[: (i + 1) * BLOCK] for i in range(first, last)]
            self.prefix.insert(sequence.prompt_token_ids, first, [Values(prompt) for prompt in ends])
            if c.end == sequence.prompt_length:
                sampled.append(sequence)
        for sequence in sampled:
            self.tokens_left[sequence] -= 1
            if self.tokens_left[sequence] <= 0:
                assert self.made.remove(sequence.key, sequence.index) == [sequence]
                self.forget([sequence])


limits = st.builds(
    Limits,
    max_batch_size=st.integers(1, 6),
    max_delay_s=st.integers(0, 8).map(lambda n: n * EIGHTH),
    cache_tokens=st.integers(4, 12).map(lambda n: n * 64),
    max_waiting_tokens=st.integers(1, 8),
    max_waiting_s=st.integers(1, 16).map(lambda n: n * EIGHTH),
    max_prefill_tokens=st.integers(1, 200),
    prefill_chunk=st.sampled_from([7, 32, 40, 64]),
    max_overtakes=st.integers(0, 4),
    prefix_blocks=st.sampled_from([0, 1, 4, 100]),
)
coming = st.builds(
    Coming,
    family=st.integers(0, 1),
    shared=st.sampled_from([0, 20, 64, 110]),
    own=st.one_of(st.integers(1, 20), st.integers(1, 100)),
    max_tokens=st.one_of(st.just(0), st.integers(1, 40)),
    length=st.integers(1, 12),
    age=st.integers(0, 10),
    life=st.one_of(st.just(0), st.integers(1, 40)),
    choices=st.sampled_from([1, 1, 1, 3]),
)
moments = st.builds(
    Moment,
    pause=st.sampled_from([0, 1, 1, 8]),
    coming=st.lists(coming, max_size=3),
    cancelled=st.one_of(st.none(), st.none(), st.none(), st.integers(0, 100)),
)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(limits=limits, moments=st.lists(moments, min_size=1, max_size=25))
def test_every_promise_holds_at_every_step_and_everybody_is_served(
    limits: Limits, moments: list[Moment]
) -> None:
    world = World(limits)
    for moment in moments:
        world.now += moment.pause * EIGHTH
        for each in moment.coming:
            world.add(each)
        if moment.cancelled is not None:
            world.cancel(moment.cancelled)
        world.step()
    # A step that is due computes something of a bounded amount of work, so this comes to an end.
    while world.waiting or world.running:
        world.step()
    assert world.made.due_in(world.now) is None
    assert (world.made.reserved, world.made.free) == (0, limits.max_batch_size)
    world.prefix.clear()
    assert world.prefix.bytes == 0, "something is still pinned"
