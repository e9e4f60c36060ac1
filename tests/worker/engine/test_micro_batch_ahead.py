"""Batches that wait where they will run, and batches that never come back."""

from __future__ import annotations

import pytest

from item_models import Bench, ElsewhereRunner
from streamfleet_common.errors import GenerationFailed
from streamfleet_worker.engine.item import Done


def launched(runner: ElsewhereRunner) -> list[list[object]]:
    return [list(batch.values) for batch in runner.batches]


def test_a_full_batch_waits_behind_the_one_that_runs_and_no_other_does() -> None:
    runner = ElsewhereRunner(ahead=1)
    fleet = Bench(runner, size=2)
    for name in "abcdef":
        fleet.ask(name, name)
    fleet.run_now()
    assert launched(runner) == [["a", "b"], ["c", "d"]]
    runner.running[0].tell(Done("A"), Done("B"))
    fleet.run_now()
    assert (fleet.outputs("a"), fleet.outputs("b")) == (["A"], ["B"])
    assert launched(runner) == [["a", "b"], ["c", "d"], ["e", "f"]]


def test_one_that_could_still_be_filled_is_not_launched_ahead_however_old() -> None:
    runner = ElsewhereRunner(ahead=1)
    fleet = Bench(runner, size=2, delay=1.0)
    fleet.ask("a", "a")
    fleet.ask("b", "b")
    fleet.ask("old", "old", age=100.0)
    fleet.run_now()
    assert launched(runner) == [["old", "a"]]
    fleet.clock.now += 50
    fleet.run_now()
    assert len(runner.batches) == 1
    fleet.ask("c", "c")
    fleet.run_now()
    assert launched(runner) == [["old", "a"], ["b", "c"]]


def test_it_is_launched_alone_once_nothing_runs() -> None:
    runner = ElsewhereRunner(ahead=1)
    fleet = Bench(runner, size=2, delay=0.0)
    for name in "abc":
        fleet.ask(name, name)
    fleet.run_now()
    assert launched(runner) == [["a", "b"]]
    runner.running[0].tell(Done("A"), Done("B"))
    fleet.run_now()
    assert launched(runner) == [["a", "b"], ["c"]]


def test_a_batch_that_nobody_wants_makes_room_for_one_ahead() -> None:
    runner = ElsewhereRunner(ahead=1)
    fleet = Bench(runner, size=1)
    for name in "abc":
        fleet.ask(name, name)
    fleet.run_now()
    assert launched(runner) == [["a"], ["b"]]
    fleet.cancel("b")
    assert runner.running[1].closed == 1
    fleet.run_now()
    assert launched(runner) == [["a"], ["b"], ["c"]]


def test_a_batch_without_a_word_for_too_long_ends_the_engine() -> None:
    runner = ElsewhereRunner()
    fleet = Bench(runner, size=1, delay=0.0, batch_limit_s=10.0)
    fleet.ask("a", "a")
    fleet.step()
    assert fleet.engine.due_in() == 10.0
    fleet.clock.now += 9.9
    fleet.step()
    fleet.clock.now += 0.1
    assert fleet.engine.due_in() == 0.0
    with pytest.raises(GenerationFailed, match="over 10 s") as caught:
        fleet.step()
    assert caught.value.retryable


def test_what_waits_behind_another_has_its_own_time() -> None:
    runner = ElsewhereRunner(ahead=1)
    fleet = Bench(runner, size=1, delay=0.0, batch_limit_s=10.0)
    fleet.ask("a", "a")
    fleet.ask("b", "b")
    fleet.run_now()
    assert len(runner.batches) == 2
    fleet.clock.now += 9.0
    runner.running[0].tell(Done("A"))
    fleet.run_now()
    assert fleet.engine.due_in() == 10.0
    fleet.clock.now += 9.0
    runner.running[1].tell(Done("B"))
    fleet.run_now()
    assert fleet.outputs("b") == ["B"]
    fleet.assert_empty()


def test_a_batch_that_gives_parts_in_time_goes_on() -> None:
    runner = ElsewhereRunner()
    fleet = Bench(runner, size=1, delay=0.0, batch_limit_s=10.0)
    fleet.ask("a", "a")
    fleet.step()
    for _ in range(5):
        fleet.clock.now += 9.0
        runner.running[0].tell(None, ended=False)
        fleet.run_now()
    assert fleet.engine.due_in() == 10.0


def test_a_batch_that_nobody_wants_ends_the_engine_too_if_it_never_comes_back() -> None:
    runner = ElsewhereRunner()
    fleet = Bench(runner, size=1, delay=0.0, batch_limit_s=10.0)
    # Behind the first the others run into their deadlines, each before the limit.
    for name in "ab":
        fleet.ask(name, name, life=4.0)
        fleet.step()
        fleet.clock.now += 4.0
        fleet.step()
        assert fleet.ends[name].state == "expired"
    fleet.ask("c", "c")
    fleet.step()
    assert fleet.engine.due_in() == 2.0
    fleet.clock.now += 2.0
    with pytest.raises(GenerationFailed, match="over 10 s"):
        fleet.step()


def test_what_waits_behind_a_batch_that_nobody_wants_has_its_own_time() -> None:
    runner = ElsewhereRunner()
    fleet = Bench(runner, size=1, delay=0.0, batch_limit_s=10.0)
    fleet.ask("a", "a", life=4.0)
    fleet.step()
    fleet.clock.now += 4.0
    fleet.step()
    fleet.ask("b", "b")
    fleet.step()
    fleet.clock.now += 5.0
    runner.running[0].tell(Done("too late"))
    assert fleet.engine.due_in() == 10.0
    fleet.clock.now += 9.0
    runner.running[1].tell(Done("B"))
    fleet.run_now()
    assert fleet.outputs("b") == ["B"]
    assert fleet.engine.due_in() is None
    fleet.assert_empty()
