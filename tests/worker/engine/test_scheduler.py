"""The batching policy, told by its promises."""

from __future__ import annotations

import pytest

from scheduler_driver import admit, chunks, compute, fill, scheduler
from stand_in_sequence import FOREVER, names, stand_in

# --- when newcomers join ---------------------------------------------------------------------


def test_a_lone_request_waits_for_company_from_its_acceptance_on() -> None:
    made = scheduler()
    assert made.due_in(0.0) is None
    made.add(stand_in("a", at=1.0))
    assert made.due_in(1.2) == pytest.approx(0.3)
    assert admit(made, 1.2) == []
    assert admit(made, 1.5) == ["a"]
    assert made.due_in(1.5) == 0.0


def test_a_full_batch_and_an_old_backlog_wait_for_nothing() -> None:
    made = scheduler(max_batch_size=2)
    made.add(stand_in("a", at=0.0))
    made.add(stand_in("b", at=0.0))
    assert made.due_in(0.0) == 0.0
    assert admit(made) == ["a", "b"]
    made = scheduler()
    made.add(stand_in("old", at=0.0))
    assert made.due_in(60.0) == 0.0
    assert admit(made, 60.0) == ["old"]


def test_while_rows_run_newcomers_join_in_groups() -> None:
    made = scheduler(max_waiting_s=FOREVER)
    fill(made, 5)
    made.add(stand_in("a"))
    assert admit(made) == []  # 1 < ceil(0.3 * 5)
    made.add(stand_in("b"))
    assert admit(made) == ["a", "b"]
    made.add(stand_in("c"))
    assert admit(made) == ["c"]  # the last free row


def test_rows_whose_prompt_is_being_computed_count_as_running() -> None:
    made = scheduler(max_waiting_s=FOREVER)
    for number in range(4):
        made.add(stand_in(f"long{number}", prompt=5000, at=-1.0))
    assert len(admit(made)) == 4
    made.add(stand_in("a"))
    assert admit(made) == []  # 1 < ceil(0.3 * 4)
    made.add(stand_in("b"))
    assert admit(made) == ["a", "b"]


def test_a_newcomer_never_waits_longer_than_max_waiting_tokens_steps() -> None:
    made = scheduler(max_waiting_tokens=4, max_waiting_s=FOREVER)
    fill(made, 6)
    made.add(stand_in("a"))
    assert [admit(made) for _ in range(4)] == [[], [], [], ["a"]]


def test_steps_without_a_newcomer_count_too() -> None:
    made = scheduler(max_waiting_tokens=4, max_waiting_s=FOREVER)
    fill(made, 6)
    for _ in range(4):
        admit(made)
    made.add(stand_in("a"))
    assert admit(made) == ["a"]


def test_steps_are_counted_from_the_last_admission_on() -> None:
    made = scheduler(max_waiting_tokens=4, max_waiting_s=FOREVER)
    fill(made, 5)
    for _ in range(4):
        admit(made)
    made.add(stand_in("a"))
    assert admit(made) == ["a"]
    made.add(stand_in("b"))
    assert [admit(made) for _ in range(4)] == [[], [], [], ["b"]]


def test_steps_waited_for_room_are_not_counted_anew_when_others_join() -> None:
    made = scheduler(max_waiting_tokens=4, max_waiting_s=FOREVER, max_batch_size=20, cache_tokens=64 * 8)
    fill(made, 7)
    made.add(stand_in("large", max_tokens=100))  # 128 tokens, of which 64 are free
    admit(made)
    admit(made)
    made.add(stand_in("small"))
    assert [admit(made) for _ in range(2)] == [[], ["small"]]
    made.remove(("running0", 1))
    made.remove(("running1", 1))
    assert admit(made) == ["large"]


def test_nor_longer_than_max_waiting_s() -> None:
    made = scheduler(max_waiting_s=2.0)
    fill(made, 6)
    made.add(stand_in("a", at=1.0))
    assert admit(made, 2.9) == []
    assert admit(made, 3.0) == ["a"]


def test_max_waiting_s_holds_when_nothing_runs_too() -> None:
    made = scheduler(max_delay_s=9.0, max_waiting_s=2.0)
    made.add(stand_in("a", at=1.0))
    assert made.due_in(1.0) == pytest.approx(2.0)
    assert admit(made, 3.0) == ["a"]


def test_a_deadline_that_would_be_missed_is_not_waited_for() -> None:
    made = scheduler(max_waiting_s=FOREVER)
    fill(made, 6)
    made.observe(0.1)
    # Two steps for the prompt, the second of which gives the first of 49 tokens: 50 steps, 5 seconds.
    made.add(stand_in("a", prompt=600, max_tokens=49, deadline=6.0))
    assert admit(made, 0.9) == []
    assert admit(made, 1.0) == ["a"]


def test_the_pace_of_steps_is_a_running_mean() -> None:
    made = scheduler(max_delay_s=FOREVER, max_waiting_s=FOREVER)
    made.observe(0.1)
    made.observe(0.2)
    made.add(stand_in("a", max_tokens=100, deadline=100.0))
    assert made.due_in(0.0) == pytest.approx(100.0 - 100 * 0.11)


def test_no_row_no_admission_and_first_come_first_served() -> None:
    made = scheduler(max_batch_size=2)
    fill(made, 2)
    for name in "abc":
        made.add(stand_in(name))
    assert admit(made, 100.0) == []
    made.remove(("running0", 1))
    assert admit(made, 100.0) == ["a"]


# --- room in the cache -----------------------------------------------------------------------


def test_prompt_and_answer_are_reserved_for_life_in_steps_of_64() -> None:
    made = scheduler(cache_tokens=1000)
    made.add(stand_in("a", prompt=100, max_tokens=29))
    made.add(stand_in("b", prompt=1, max_tokens=63))
    assert admit(made, 1.0) == ["a", "b"]
    assert made.reserved == 192 + 64
    for _ in range(5):
        made.schedule(1.0)
    assert (made.reserved, made.cache_used) == (192 + 64, 0.256)
    made.remove(("a", 1))
    assert (made.reserved, made.cache_used) == (64, 0.064)


def test_what_never_fits_is_refused_at_the_door() -> None:
    made = scheduler(cache_tokens=640)
    assert made.fits(600, 40)
    assert not made.fits(600, 41)
    with pytest.raises(ValueError, match="600 \\+ 41 tokens never fit 640"):
        made.add(stand_in("a", prompt=600, max_tokens=41))
    assert ("a", 1) not in made
    made.add(stand_in("a", prompt=600, max_tokens=40))
    assert admit(made, 1.0) == ["a"]


def test_at_most_four_pass_one_that_does_not_fit() -> None:
    made = scheduler(cache_tokens=640, max_batch_size=20)
    made.add(stand_in("running", max_tokens=300))  # 320
    assert admit(made, 1.0) == ["running"]
    for name, tokens in ("big", 400), ("a", 1), ("b", 1), ("vast", 600), ("c", 1), ("d", 1), ("e", 1):
        made.add(stand_in(name, max_tokens=tokens))
    assert admit(made, 2.0) == ["a", "b", "c", "d"]
    assert admit(made, 3.0) == []
    for gone in "abcd":
        made.remove((gone, 1))
    assert admit(made, 4.0) == []  # now 320 are free, and no longer for everybody
    made.remove(("running", 1))
    # Two have passed the second one so far: so may two more.
    assert admit(made, 5.0) == ["big", "e"]
    made.add(stand_in("f"))
    made.add(stand_in("g"))
    assert admit(made, 6.0) == ["f"]
    for gone in "big", "e", "f":
        made.remove((gone, 1))
    assert admit(made, 7.0) == ["vast"]


def test_after_memory_ran_out_less_is_taken_at_once_for_a_while() -> None:
    made = scheduler(cache_tokens=640, max_prefill_tokens=1000, prefill_chunk=100)
    made.lower_budget()
    for name in "abcdefgh":
        made.add(stand_in(name, prompt=90))  # 128 each
    plan = made.schedule(1.0)
    assert names(plan.admitted) == ["a", "b"]
    assert len(plan.chunks) == 2
    for _ in range(128):
        made.schedule(1.0)
    assert made.running_count == 5
    for name in "abcdefgh":
        made.remove((name, 1))
    for _ in range(100):
        made.lower_budget()
    made.add(stand_in("whole", prompt=640, max_tokens=0))
    assert admit(made, 2.0) == ["whole"]


# --- what a step computes --------------------------------------------------------------------


def test_a_long_prompt_delays_streams_by_one_chunk_a_step() -> None:
    made = scheduler(max_batch_size=9)
    streams = fill(made, 8)
    made.add(stand_in("long", prompt=4000))
    for step in range(8):
        plan = compute(made.schedule(1.0))
        assert plan.decodes == streams
        assert chunks(plan) == [("long", step * 512, min(4000, (step + 1) * 512))]
    plan = made.schedule(1.0)
    assert plan.chunks == []
    assert names(plan.decodes) == [*names(streams), "long"]


def test_fifty_short_prompts_do_not_wait_for_the_long_one_before_them() -> None:
    made = scheduler(max_batch_size=64)
    fill(made, 8)
    made.add(stand_in("long", prompt=4000))
    assert admit(made, 1.0) == ["long"]
    for number in range(50):
        made.add(stand_in(f"short{number}", prompt=30))
    first: dict[str, int] = {}
    for step in range(1, 12):
        for name, _, end in chunks(compute(made.schedule(1.0))):
            if end == 30 or end == 4000:
                first[name] = step
    # 512 tokens are 17 prompts of 30; 50 of them fill three steps, and the long one has seven chunks left.
    assert [first[f"short{number}"] for number in (0, 16, 17, 33, 34, 49)] == [1, 1, 3, 3, 5, 5]
    assert first["long"] == 10


def test_while_nothing_decodes_a_step_takes_more() -> None:
    made = scheduler(max_prefill_tokens=1000)
    for name in "abc":
        made.add(stand_in(name, prompt=400))
    assert chunks(compute(made.schedule(1.0))) == [("a", 0, 400), ("b", 0, 400)]
    made.add(stand_in("d", prompt=400))
    assert chunks(compute(made.schedule(1.0))) == [("c", 0, 400)]
    assert chunks(compute(made.schedule(2.0))) == [("d", 0, 400)]


def test_a_prompt_that_is_only_scored_never_decodes() -> None:
    made = scheduler()
    made.add(stand_in("a", max_tokens=0))
    plan = compute(made.schedule(1.0))
    assert chunks(plan) == [("a", 0, 10)]
    assert made.schedule(1.0).decodes == []


# --- leaving ---------------------------------------------------------------------------------


def test_one_choice_or_all_of_a_request_leave() -> None:
    made = scheduler(max_batch_size=2)
    for index in range(4):
        made.add(stand_in("a", index=index))
    with pytest.raises(ValueError, match="here already"):
        made.add(stand_in("a", index=3))
    assert admit(made, 1.0) == ["a", "a"]
    assert [s.index for s in made.remove(("a", 1), 1)] == [1]
    assert made.remove(("a", 1), 1) == []
    assert (made.running_count, made.waiting, made.free) == (1, 2, 1)
    assert ("a", 1) in made
    assert [s.index for s in made.remove(("a", 1))] == [0, 2, 3]
    assert (made.running_count, made.waiting, made.reserved) == (0, 0, 0)
    assert ("a", 1) not in made
    assert made.due_in(1.0) is None


def test_expired_ones_leave_wherever_they_are() -> None:
    made = scheduler(max_batch_size=1)
    made.add(stand_in("running", at=-10.0, deadline=5.0))
    admit(made)
    made.add(stand_in("waiting", deadline=5.0))
    made.add(stand_in("later", deadline=6.0))
    assert made.expire(4.9) == []
    assert set(names(made.expire(5.0))) == {"running", "waiting"}
    assert made.free == 1
    assert names(made.expire(6.0)) == ["later"]
    assert made.due_in(6.0) is None
