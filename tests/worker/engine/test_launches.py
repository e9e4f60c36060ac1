"""Why a batch was launched just then, how large it was, and who was in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine_driver import Clock, Driver
from item_models import Bench, ElsewhereRunner, ListRunner, equal, text
from scheduler_driver import compute, fill, scheduler
from stand_in_sequence import stand_in
from streamfleet_worker.engine.base import Launch, Step
from streamfleet_worker.engine.item import Done
from streamfleet_worker.engine.models import LoadedModel
from streamfleet_worker.engine.prefix_cache import PrefixCache
from streamfleet_worker.engine.scripted import ScriptedEngine

Make = Callable[..., Driver]


def told(step: Step) -> list[tuple[str, int, list[str]]]:
    """Reason, size and requests of each launch."""
    return [(one.reason, one.size, [rid for rid, _ in one.keys]) for one in step.launches]


# --- micro-batches


def test_a_micro_batch_is_full_or_its_oldest_item_is_of_age() -> None:
    fleet = Bench(ListRunner(), size=4, delay=1.0)
    fleet.ask("a", 0, 1)
    fleet.ask("b", 2, 3, 4)
    full = fleet.step()
    assert told(full) == [("full", 4, ["a", "b"])]
    assert told(fleet.step()) == [], "one item is left, and may wait"
    fleet.clock.now += 1.0
    assert told(fleet.step()) == [("delay", 1, ["b"])]


def test_a_full_batch_is_full_at_any_age() -> None:
    fleet = Bench(ListRunner(), size=2, delay=1.0)
    fleet.ask("a", 0, age=5.0)
    fleet.ask("b", 1, age=5.0)
    assert told(fleet.step()) == [("full", 2, ["a", "b"])]


def test_a_micro_batch_that_is_drained_waits_for_nobody() -> None:
    fleet = Bench(ListRunner(), size=4, delay=60.0)
    fleet.ask("a", 0)
    fleet.step()
    assert fleet.engine.due_in() == 60.0
    fleet.engine.drain()
    assert fleet.engine.due_in() == 0.0
    assert told(fleet.step()) == [("drain", 1, ["a"])]
    fleet.ask("old", 1, age=60.0)
    assert told(fleet.step()) == [("delay", 1, ["old"])]


def test_what_fills_rows_up_is_the_padded_share() -> None:
    fleet = Bench(ListRunner(), size=8, delay=0.0, length_step=16)
    fleet.ask("a", text("x", length=33, group="g"), text("y", length=40, group="g"))
    fleet.ask("b", text("z", length=30, group="g"))
    (launch,) = fleet.step().launches
    # Three rows of 48 tokens, of which 33 + 40 + 30 are text.
    assert launch.tokens == 144
    assert launch.padded_ratio == pytest.approx(41 / 144)
    assert fleet.ends["a"].launch is fleet.ends["b"].launch is launch


def test_items_without_length_are_not_filled_up() -> None:
    fleet = Bench(ListRunner(), size=8, delay=0.0)
    fleet.ask("a", 1, 2)
    (launch,) = fleet.step().launches
    assert (launch.tokens, launch.padded_ratio) == (0, 0.0)


def test_a_request_of_several_batches_tells_the_last() -> None:
    fleet = Bench(ListRunner(), size=2, delay=0.0)
    fleet.ask("a", 0, 1, 2)
    fleet.run_now()
    launch = fleet.ends["a"].launch
    assert launch == Launch(2, "delay", 1, 0, 0.0, (("a", 1),))
    assert fleet.ends["a"].timing.batches == 2


def test_the_halves_of_a_batch_that_failed_have_its_reason() -> None:
    runner = ListRunner(fails=lambda values: ValueError("odd") if 0 in values else None)
    fleet = Bench(runner, size=2, delay=1.0)
    fleet.ask("bad", 0)
    fleet.ask("good", 1)
    steps = [fleet.step(), fleet.step(), fleet.step()]
    assert [told(step) for step in steps] == [
        [("full", 2, ["bad", "good"])],
        [("full", 1, ["bad"])],
        [("full", 1, ["good"])],
    ]
    assert fleet.ends["bad"].launch == steps[1].launches[0]
    assert fleet.ends["good"].launch == steps[2].launches[0]


def test_who_joins_an_item_that_runs_is_in_its_batch() -> None:
    runner = ElsewhereRunner()
    fleet = Bench(runner, size=4, delay=0.0)
    fleet.ask("first", equal("x"))
    (launch,) = fleet.step().launches
    fleet.ask("second", equal("x"))
    runner.running[0].tell(Done("x"))
    fleet.step()
    assert fleet.ends["second"].launch is launch
    assert fleet.ends["second"].timing.batches == 0


def test_what_needs_no_batch_names_none() -> None:
    fleet = Bench(ListRunner(), size=4, delay=0.0)
    fleet.ask("nothing")
    fleet.ask("late", 1, life=0.0)
    fleet.step()
    assert {name: end.launch for name, end in fleet.ends.items()} == {"nothing": None, "late": None}


# --- when newcomers join running rows


def test_the_first_rows_are_full_or_of_age() -> None:
    made = scheduler(max_batch_size=2, max_delay_s=0.5)
    made.add(stand_in("a", at=10.0))
    assert made.schedule(10.4).reason is None
    assert made.schedule(10.5).reason == "delay"
    made = scheduler(max_batch_size=2, max_delay_s=0.5)
    made.add(stand_in("a", at=10.0))
    made.add(stand_in("b", at=10.0))
    assert made.schedule(10.0).reason == "full"


def test_newcomers_join_when_they_fill_the_batch_or_are_enough() -> None:
    made = scheduler(max_batch_size=8)
    fill(made, 6)  # two rows are free, and ceil(0.3 x 6) = 2
    made.add(stand_in("a"))
    assert compute(made.schedule(0.0)).reason is None
    made.add(stand_in("b"))
    assert compute(made.schedule(0.0)).reason == "full"
    made = scheduler(max_batch_size=8)
    fill(made, 4)  # four are free, and ceil(0.3 x 4) = 2
    made.add(stand_in("a"))
    assert compute(made.schedule(0.0)).reason is None
    made.add(stand_in("b"))
    assert compute(made.schedule(0.0)).reason == "ratio"


def test_newcomers_join_when_they_have_waited_so_many_steps_or_so_long() -> None:
    made = scheduler(max_batch_size=8, max_waiting_tokens=3)
    fill(made, 4)
    made.add(stand_in("a"))
    assert [compute(made.schedule(0.0)).reason for _ in range(3)] == [None, None, "waited"]
    made = scheduler(max_batch_size=8, max_waiting_s=1.0)
    fill(made, 4)
    made.add(stand_in("a", at=5.0))
    assert compute(made.schedule(5.9)).reason is None
    assert compute(made.schedule(6.0)).reason == "waited"


def test_a_deadline_lets_them_join() -> None:
    made = scheduler(max_batch_size=8, max_waiting_s=100.0)
    made.observe(1.0)  # seconds a step
    fill(made, 4)
    # A chunk and four more tokens take five steps: at 15 it would be late.
    made.add(stand_in("a", at=10.0, deadline=20.0, max_tokens=5))
    assert compute(made.schedule(14.9)).reason is None
    assert compute(made.schedule(15.0)).reason == "deadline"


def test_who_stood_back_for_a_prompt_has_waited_for_it() -> None:
    prefix = PrefixCache(1000)
    made = scheduler(prefix=prefix, prefill_chunk=64, max_prefill_tokens=64, max_batch_size=2)
    prompt = tuple(range(100))
    for index in range(2):
        made.add(stand_in("a", prompt=prompt, index=index))
    # Of the 100 tokens 12 blocks of 8 can be shared; a step computes 64.
    reasons = [compute(made.schedule(1.0), prefix).reason for _ in range(3)]
    assert reasons == ["full", None, "waited"]


def test_nobody_waits_once_it_drains() -> None:
    made = scheduler(max_batch_size=8)
    made.drain()
    made.add(stand_in("a"))
    assert made.due_in(0.0) == 0.0
    assert compute(made.schedule(0.0)).reason == "drain"
    made.add(stand_in("b"))
    made.add(stand_in("c", at=-100.0))
    plan = compute(made.schedule(0.0))
    assert (plan.reason, len(plan.admitted)) == ("ratio", 2)


# --- what is told of them


def test_newcomers_and_those_that_run_are_one_batch(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, max_batch_size=4, max_delay_s=1.0)
    driver.add("a", prompt_token_ids=list(range(40, 50)), max_tokens=8, ignore_eos=True)
    assert driver.step().launches == []
    driver.clock.now += 1.0
    (first,) = driver.step().launches
    assert first == Launch(1, "delay", 1, 10, 0.0, (("a", 1),))
    driver.add("b", prompt_token_ids=list(range(60, 67)), max_tokens=8, n=2, ignore_eos=True)
    (second,) = driver.step().launches
    # The second choice stands back until the first has computed the prompt, if that has a whole block.
    assert second == Launch(2, "ratio", 3, 15, 0.0, (("b", 1), ("a", 1)))
    heard = driver.run()
    assert heard["a"].finished.launch is first
    assert heard["b"].finished.launch is second


def test_what_expires_in_line_was_in_no_batch(llama: LoadedModel, drive: Make) -> None:
    driver = drive(llama, max_delay_s=1.0)
    driver.add("a", prompt_token_ids=[40, 50], deadline=driver.clock.now + 0.5)
    driver.clock.now += 0.5
    driver.step()
    assert driver.heard["a"].finished.launch is None


def test_a_scripted_engine_tells_the_same() -> None:
    clock = Clock()
    driver = Driver(ScriptedEngine(max_batch_size=3, max_delay_s=1.0, clock=clock), clock)
    driver.add("a", prompt="ECHO 5")
    assert told(driver.step()) == []
    clock.now += 1.0
    assert told(driver.step()) == [("delay", 1, ["a"])]
    driver.add("b", prompt="ECHO 5")
    (launch,) = driver.step().launches
    assert launch == Launch(2, "ratio", 2, 3, 0.0, (("b", 1), ("a", 1)))
    driver.add("c", prompt="ECHO 5")
    assert told(driver.step()) == [("full", 3, ["c", "a", "b"])]
    heard = driver.run()
    assert heard["b"].finished.launch is launch
    driver.engine.drain()
    driver.add("d", prompt="ECHO 1")
    assert driver.engine.due_in() == 0.0
    assert told(driver.step()) == [("drain", 1, ["d"])]
