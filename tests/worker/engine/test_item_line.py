"""The rules by which a batch is launched, by hand and beside a slow and plain reading of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from streamfleet_worker.engine.item import ItemSpec
from streamfleet_worker.engine.item_line import RECOVERY, Item, ItemLine


def line(*, size: int = 4, tokens: int = 1000, delay: float = 10, **options: Any) -> ItemLine[Item]:
    return ItemLine(max_batch_size=size, max_batch_tokens=tokens, max_delay_s=delay, **options)


def item(length: int = 0, at: float = 0, group: str = "") -> Item:
    return Item(ItemSpec(None, length, group), at)


def added(to: ItemLine[Item], *items: Item) -> list[Item]:
    for one in items:
        to.add(one)
    return list(items)


# --- when


@pytest.mark.parametrize("accepted_at", [0.0, 0.1, 1e9 + 0.3])
def test_a_lone_item_waits_for_its_age_and_no_longer(accepted_at: float) -> None:
    waiting = line(delay=0.05)
    (one,) = added(waiting, item(at=accepted_at))
    due_at = accepted_at + 0.05
    assert waiting.due_in(accepted_at) == pytest.approx(0.05)
    before = due_at - 1e-6
    assert waiting.take(before) == []
    assert 0 < (waiting.due_in(before) or 0) <= 1.2e-6
    assert waiting.due_in(due_at) == 0
    assert waiting.take(due_at) == [one]
    assert waiting.due_in(due_at) is None


def test_what_has_waited_elsewhere_waits_no_more() -> None:
    waiting = line(delay=10)
    items = added(waiting, *(item(at=0) for _ in range(6)))
    assert waiting.take(10) == items[:4]
    assert waiting.due_in(10) == 0
    assert waiting.take(10) == items[4:], "a batch that is not full, at once"


def test_a_full_bucket_starts_at_once() -> None:
    waiting = line(size=3)
    items = added(waiting, item(), item(), item(50), item(group="other"))
    assert (waiting.take(0), waiting.due_in(0)) == ([], 10)
    items += added(waiting, item())
    assert waiting.due_in(0) == 0
    assert waiting.take(0) == [items[0], items[1], items[4]]


def test_no_delay_is_no_wait() -> None:
    waiting = line(delay=0)
    items = added(waiting, item(at=3))
    assert waiting.due_in(3) == 0
    assert waiting.take(3) == items


# --- what


def test_the_oldest_of_all_goes_first_and_chooses_the_bucket() -> None:
    waiting = line(size=2, length_step=10, exact=True)
    old = added(waiting, item(95, at=1))
    young = added(waiting, item(5, at=2), item(5, at=2), item(5, at=2))
    assert waiting.take(2) == young[:2], "a full one, while nobody is of age"
    assert waiting.take(11) == old
    assert waiting.take(11) == []
    assert waiting.take(12) == young[2:]


def test_of_full_buckets_that_with_the_oldest() -> None:
    waiting = line(size=2, exact=True)
    first = added(waiting, item(5, at=3), item(5, at=4))
    second = added(waiting, item(9, at=2), item(9, at=5))
    assert [waiting.take(5), waiting.take(5)] == [second, first]


@pytest.mark.parametrize(
    ("length", "others", "takes"),
    [
        # By a quarter, and by 16 tokens where that is more.
        (100, [75, 74, 100, 101], [75, 100]),
        (40, [24, 23, 39], [24, 39]),
        (16, [0, 1, 17], [0, 1]),
        (0, [1], []),
    ],
)
def test_a_row_may_be_filled_up_so_far(length: int, others: list[int], takes: list[int]) -> None:
    waiting = line(size=9, delay=10)
    first = added(waiting, item(length, at=0))
    rest = added(waiting, *(item(other, at=5) for other in others))
    batch = waiting.take(10)
    assert batch[0] is first[0]
    assert sorted(one.spec.length for one in batch[1:]) == takes
    assert waiting.waiting == len(rest) - len(takes)


def test_the_nearest_lengths_fill_up_first() -> None:
    waiting = line(size=3, delay=10)
    added(waiting, item(100, at=0), item(80, at=1), item(90, at=2), item(95, at=3))
    assert [one.spec.length for one in waiting.take(10)] == [100, 95, 90]


def test_exactly_one_rounded_length() -> None:
    waiting = line(size=3, delay=10, length_step=16, exact=True)
    items = added(waiting, item(33, at=0), item(48, at=1), item(32, at=2), item(49, at=3))
    assert waiting.take(10) == items[:2]
    assert [one.bucket for one in items] == [48, 48, 32, 64]


def test_groups_never_meet() -> None:
    waiting = line(size=9, delay=0)
    items = added(waiting, *(item(5, group=group) for group in "aba"))
    assert [waiting.take(0), waiting.take(0)] == [[items[0], items[2]], [items[1]]]


# --- how many


def test_tokens_are_counted_with_what_fills_the_rows_up() -> None:
    waiting = line(size=8, tokens=100, delay=0, length_step=10)
    items = added(waiting, item(31), item(30), item(30))
    # 40 tokens a row, filled up to: two rows.
    assert waiting.take(0) == items[:2]


def test_one_item_may_always_run() -> None:
    waiting = line(size=8, tokens=100, delay=10)
    items = added(waiting, item(250), item(250))
    assert waiting.due_in(0) == 0, "more than one will never come"
    assert [waiting.take(0), waiting.take(0)] == [[items[0]], [items[1]]]


def test_a_budget_that_is_lowered_comes_back() -> None:
    waiting = line(size=64, tokens=100, delay=0)
    too_much = added(waiting, *(item(10) for _ in range(10)))
    assert waiting.take(0) == too_much
    waiting.lower_budget(too_much)
    assert waiting.budget == 50
    waiting.lower_budget(too_much[:2])
    assert waiting.budget == 10
    budgets = [waiting.budget]
    for _ in range(5 * RECOVERY):
        waiting.fared_well()
        if waiting.budget != budgets[-1]:
            budgets.append(waiting.budget)
    assert budgets == [10, 20, 40, 80, 100]
    for expected in (50, 25):
        waiting.lower_budget(too_much)
        for _ in range(RECOVERY - 1):
            waiting.fared_well()
        assert waiting.budget == expected, "a fault starts the count anew"


def test_without_lengths_a_budget_is_of_items() -> None:
    waiting = line(size=64, tokens=1 << 40, delay=0)
    items = added(waiting, *(item() for _ in range(20)))
    waiting.lower_budget(items)
    assert [len(waiting.take(0)) for _ in range(2)] == [10, 10]


# --- leaving


def test_what_has_left_is_not_waited_for() -> None:
    waiting = line(delay=10)
    items = added(waiting, item(at=0), item(at=1))
    waiting.remove(items[0])
    waiting.remove(items[0])
    assert (waiting.waiting, waiting.due_in(1)) == (1, 10)
    assert waiting.take(11) == [items[1]]
    waiting.remove(items[1])
    assert waiting.waiting == 0


def test_what_has_left_takes_no_memory() -> None:
    waiting = line(size=1000)
    added(waiting, item(at=0))
    for number in range(5000):
        (one,) = added(waiting, item(at=1 + number))
        waiting.remove(one)
    ((_, bucket),) = waiting._buckets.items()
    assert len(bucket.heap) < 50


def test_an_item_that_is_older_than_was_thought_goes_sooner() -> None:
    waiting = line(size=2, delay=10)
    items = added(waiting, item(at=5), item(5, at=6), item(at=7))
    waiting.hasten(items[2], 1)
    assert waiting.take(11) == [items[2], items[0]]
    assert waiting.waiting == 1
    waiting.hasten(items[1], 2)
    waiting.remove(items[1])
    assert (waiting.waiting, waiting.due_in(99)) == (0, None)


def test_nobody_is_passed_over_for_ever() -> None:
    """A long text among ever new short ones, which fill a batch at every moment."""
    waiting = line(size=4, delay=10)
    (odd,) = added(waiting, item(500, at=0))
    launched_at = None
    for now in range(30):
        added(waiting, *(item(5, at=now) for _ in range(8)))
        if odd in waiting.take(now):
            launched_at = now
            break
        waiting.take(now)
    assert launched_at == 10


# --- beside the plain reading


class Reading:
    """The rules, read off plainly: everything is looked at each time."""

    def __init__(self, size: int, tokens: int, delay: int, step: int, is_exact: bool) -> None:
        self.size, self.budget, self.delay, self.step, self.is_exact = size, tokens, delay, step, is_exact
        self.waiting: list[Item] = []

    def width(self, one: Item) -> int:
        while_short = one.spec.length
        while while_short % self.step:
            while_short += 1
        return while_short

    def rows(self, width: int) -> int:
        fitting = [n for n in range(1, self.size + 1) if n * max(width, 1) <= self.budget]
        return max(fitting, default=1)

    def company(self, home: Item) -> list[Item]:
        """Who may run with it when it is the longest, in the order of being taken."""
        width = self.width(home)
        may_lack = 0 if self.is_exact or not width else max(16, width / 4)
        found = [
            one
            for one in self.waiting
            if one.spec.group == home.spec.group and 0 <= width - self.width(one) <= may_lack
        ]
        # By age among equals, since the list is in the order of arrival.
        return sorted(found, key=lambda one: (-self.width(one), one.accepted_at))

    def batch(self, now: int) -> list[Item]:
        by_age = sorted(self.waiting, key=lambda one: one.accepted_at)
        for one in by_age:
            is_of_age = one is by_age[0] and one.accepted_at + self.delay <= now
            if is_of_age or len(self.company(one)) >= self.rows(self.width(one)):
                return self.company(one)[: self.rows(self.width(one))]
        return []

    def due_in(self, now: int) -> int | None:
        if not self.waiting:
            return None
        if self.batch(now):
            return 0
        return min(one.accepted_at for one in self.waiting) + self.delay - now  # type: ignore[return-value]


AT = st.integers(0, 1000)


class Lines(RuleBasedStateMachine):
    """The line does at each moment what the plain reading says."""

    @initialize(
        size=st.integers(1, 6),
        tokens=st.sampled_from([20, 100, 300]),
        step=st.sampled_from([1, 8, 16]),
        is_exact=st.booleans(),
        delay=st.sampled_from([0, 5, 20]),
    )
    def begin(self, size: int, tokens: int, step: int, is_exact: bool, delay: int) -> None:
        self.now = 100
        self.tokens = tokens
        self.read = Reading(size, tokens, delay, step, is_exact)
        self.line = line(size=size, tokens=tokens, delay=delay, length_step=step, exact=is_exact)
        self.taken: list[Item] = []
        self.added = self.removed = 0

    @rule(
        many=st.lists(
            st.tuples(
                st.one_of(st.integers(0, 60), st.sampled_from([0, 16, 16, 64, 80, 90, 100, 400])),
                st.sampled_from("ab"),
                st.integers(0, 30),
            ),
            min_size=1,
            max_size=5,
        )
    )
    def add(self, many: list[tuple[int, str, int]]) -> None:
        for length, group, age in many:
            # Ages are all different, so that the order is the rules' alone.
            self.added += 1
            one = item(length, self.now - age + self.added / 1024, group)
            self.line.add(one)
            self.read.waiting.append(one)

    @precondition(lambda self: self.read.waiting)
    @rule(at=AT)
    def remove(self, at: int) -> None:
        one = self.read.waiting.pop(at % len(self.read.waiting))
        self.line.remove(one)
        self.removed += 1

    @precondition(lambda self: self.read.waiting)
    @rule(at=AT, by=st.integers(1, 9))
    def hasten(self, at: int, by: int) -> None:
        one = self.read.waiting[at % len(self.read.waiting)]
        self.line.hasten(one, one.accepted_at - by)

    @rule(by=st.integers(1, 30))
    def advance(self, by: int) -> None:
        self.now += by

    @rule()
    def take(self) -> None:
        expected = self.read.batch(self.now)
        batch = self.line.take(self.now)
        assert batch == expected
        if len(batch) > 1:
            assert len(batch) * max(self.read.width(one) for one in batch) <= max(
                self.read.budget, len(batch)
            )
        self.read.waiting = [one for one in self.read.waiting if one not in batch]
        self.taken += batch

    @precondition(lambda self: self.taken)
    @rule(rows=st.integers(1, 4))
    def lower(self, rows: int) -> None:
        batch = self.taken[-rows:]
        self.line.lower_budget(batch)
        widest = max(1, *(self.read.width(one) for one in batch))
        self.read.budget = max(1, min(self.read.budget, len(batch) * widest) // 2)

    @rule()
    def fare_well(self) -> None:
        for _ in range(RECOVERY):
            self.line.fared_well()
        self.read.budget = min(2 * self.read.budget, self.tokens)

    @invariant()
    def counts(self) -> None:
        if not hasattr(self, "line"):
            return
        assert self.line.waiting == len(self.read.waiting)
        assert self.line.budget == self.read.budget
        assert self.line.due_in(self.now) == self.read.due_in(self.now)

    def teardown(self) -> None:
        """All that is left leaves, each once, and no take is for nothing."""
        if not hasattr(self, "line"):
            return
        self.now += 1000
        while self.read.waiting:
            left = len(self.read.waiting)
            oldest = min(self.read.waiting, key=lambda one: one.accepted_at)
            self.take()
            assert len(self.read.waiting) < left
            assert oldest in self.taken, "the oldest of age goes first"
        assert len({id(one) for one in self.taken}) == len(self.taken) == self.added - self.removed
        assert (self.line.take(self.now), self.line.due_in(self.now), self.line._buckets) == ([], None, {})


TestLines = Lines.TestCase
TestLines.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
