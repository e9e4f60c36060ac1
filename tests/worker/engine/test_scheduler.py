"""The batching policy, told by its promises."""

import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamfleet_common.schemas import Sampling
from streamfleet_worker.engine.base import Arrival
from streamfleet_worker.engine.detokenizer import Detokenizer
from streamfleet_worker.engine.prepared import Prepared
from streamfleet_worker.engine.scheduler import Move, Scheduler
from streamfleet_worker.engine.sequence import Sequence

FOREVER = 1e9


def sequence(
    name: str, *, prompt: int = 10, max_tokens: int = 5, at: float = 0.0, deadline: float = FOREVER
) -> Sequence:
    prepared = Prepared(tuple(range(prompt)), max_tokens, Sampling())
    return Sequence(
        key=(name, 1),
        prepared=prepared,
        arrival=Arrival(prepared, accepted_at=at, deadline_at=deadline),
        added_at=at,
        seed=None,
        detokenizer=Detokenizer(lambda _: ""),
        eos_token_ids=frozenset(),
    )


def scheduler(**settings: Any) -> Scheduler:
    return Scheduler(**{"max_batch_size": 8, "max_delay_s": 0.5, **settings})


def fill(made: Scheduler, count: int) -> None:
    """Make `count` sequences run."""
    for number in range(count):
        made.add(sequence(f"running{number}", at=-100.0))
    assert len(made.admit(0.0)) == count


def names(sequences: list[Sequence]) -> list[str]:
    return [s.key[0] for s in sequences]


def test_a_lone_request_waits_for_company_from_its_acceptance_on() -> None:
    made = scheduler()
    assert made.due_in(0.0) is None
    made.add(sequence("a", at=1.0))
    assert made.due_in(1.2) == pytest.approx(0.3)
    assert made.admit(1.2) == []
    assert names(made.admit(1.5)) == ["a"]
    assert made.due_in(1.5) == 0.0


def test_a_full_batch_and_an_old_backlog_wait_for_nothing() -> None:
    made = scheduler(max_batch_size=2)
    made.add(sequence("a", at=0.0))
    made.add(sequence("b", at=0.0))
    assert made.due_in(0.0) == 0.0
    assert names(made.admit(0.0)) == ["a", "b"]
    made = scheduler()
    made.add(sequence("old", at=0.0))
    assert made.due_in(60.0) == 0.0
    assert names(made.admit(60.0)) == ["old"]


def test_while_rows_run_newcomers_join_in_groups() -> None:
    made = scheduler(max_waiting_s=FOREVER)
    fill(made, 5)
    made.add(sequence("a", at=0.0))
    assert made.admit(0.0) == []  # 1 < ceil(0.3 * 5)
    made.add(sequence("b", at=0.0))
    assert names(made.admit(0.0)) == ["a", "b"]
    made.add(sequence("c", at=0.0))
    assert names(made.admit(0.0)) == ["c"]  # the last free slot


def test_a_newcomer_never_waits_longer_than_max_waiting_tokens_steps() -> None:
    made = scheduler(max_waiting_tokens=4, max_waiting_s=FOREVER)
    fill(made, 6)
    made.add(sequence("a", at=0.0))
    assert [names(made.admit(0.0)) for _ in range(4)] == [[], [], [], ["a"]]


def test_nor_longer_than_max_waiting_s() -> None:
    made = scheduler(max_waiting_s=2.0)
    fill(made, 6)
    made.add(sequence("a", at=1.0))
    assert made.admit(2.9) == []
    assert names(made.admit(3.0)) == ["a"]


def test_a_deadline_that_would_be_missed_is_not_waited_for() -> None:
    made = scheduler(max_waiting_s=FOREVER)
    fill(made, 6)
    made.observe(0.1)
    made.add(sequence("a", max_tokens=50, at=0.0, deadline=6.0))
    assert made.admit(0.9) == []
    assert names(made.admit(1.0)) == ["a"]


def test_no_slot_no_admission_and_first_come_first_served() -> None:
    made = scheduler(max_batch_size=2)
    fill(made, 2)
    for name in "abc":
        made.add(sequence(name, at=0.0))
    assert made.admit(100.0) == []
    made.remove(("running0", 1))
    assert names(made.admit(100.0)) == ["a"]


def test_one_admission_takes_a_bounded_number_of_prompt_tokens_but_at_least_one_prompt() -> None:
    made = scheduler(max_prefill_tokens=128)
    made.add(sequence("long", prompt=1000, at=0.0))
    made.add(sequence("short", at=0.0))
    assert names(made.admit(1.0)) == ["long"]
    made = scheduler(max_prefill_tokens=128)
    for name in "abcde":
        made.add(sequence(name, prompt=34, at=0.0))  # 33 of them are prefilled: 64 when padded
    assert names(made.admit(1.0)) == ["a", "b"]
    assert names(made.admit(1.0)) == ["c", "d"]


def test_a_hole_is_closed_by_one_move_and_a_newcomer_needs_none() -> None:
    made = scheduler(max_batch_size=4)
    fill(made, 4)
    for running in made.running:
        running.cached = 7
    made.remove(("running1", 1))
    made.add(sequence("a", at=0.0))
    made.admit(10.0)
    assert names(made.running) == ["running0", "a", "running2", "running3"]
    assert made.compact() == []
    made.remove(("running0", 1))
    assert made.compact() == [Move(source=3, target=0, length=7)]
    assert names(made.running) == ["running3", "a", "running2"]
    assert [s.slot for s in made.running] == [0, 1, 2]


def test_expired_ones_leave_wherever_they_are() -> None:
    made = scheduler(max_batch_size=1)
    made.add(sequence("running", at=-10.0, deadline=5.0))
    made.admit(0.0)
    made.add(sequence("waiting", at=0.0, deadline=5.0))
    assert made.expire(4.9) == []
    assert set(names(made.expire(5.0))) == {"running", "waiting"}
    assert made.due_in(5.0) is None
    assert made.free == 1


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 3),  # arrivals at this step
            st.integers(1, 300),  # their prompts' length
            st.integers(1, 12),  # their answers' length
        ),
        min_size=1,
        max_size=40,
    ),
    st.integers(1, 9),
    st.integers(1, 20),
)
def test_once_added_nobody_waits_past_the_bound_while_a_slot_and_budget_are_free(
    steps: list[tuple[int, int, int]], batch: int, patience: int
) -> None:
    made = scheduler(max_batch_size=batch, max_waiting_tokens=patience, max_waiting_s=FOREVER)
    waited: dict[str, int] = {}
    order: list[str] = []
    admitted: list[str] = []
    left: dict[str, int] = {}
    now, count = 0.0, 0
    plan = iter(steps)
    while (arrivals_now := next(plan, None)) or made.waiting:
        arrivals, prompt, answer = arrivals_now or (0, 1, 1)
        for _ in range(arrivals):
            made.add(sequence(str(count), prompt=prompt, max_tokens=answer, at=now))
            waited[str(count)], left[str(count)] = 0, answer
            order.append(str(count))
            count += 1
        free, running, now = made.free, made.running_count, now + 0.1
        joined = names(made.admit(now))
        admitted += joined
        made.compact()
        assert [s.slot for s in made.running] == list(range(made.running_count))
        for name in joined:
            waited.pop(name)
        if free and not joined and waited:
            for name in waited:
                waited[name] += 1
            assert max(waited.values()) < max(patience, math.ceil(0.5 / 0.1) + 1)
            if running:
                assert len(waited) < min(free, math.ceil(0.3 * running))
        for row in made.running:
            left[row.key[0]] -= 1
            if not left[row.key[0]]:
                made.remove(row.key)
    assert admitted == order, "first come, first served, and nobody is forgotten"
