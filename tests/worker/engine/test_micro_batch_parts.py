"""Batches that go on: those that give parts, and those that run elsewhere."""

from __future__ import annotations

from typing import Any

import pytest

from item_models import Bench, Elsewhere, ElsewhereRunner, text
from streamfleet_worker.engine.base import Parts
from streamfleet_worker.engine.item import Done, Part, RetryLater


def streaming(*names: str, slots: int = 1, **options: Any) -> tuple[Bench, ElsewhereRunner]:
    """A request of one item for each name, in one batch that is under way."""
    runner = ElsewhereRunner(slots)
    fleet = Bench(runner, size=max(2, len(names)), delay=0.0, **options)
    for name in names:
        fleet.ask(name, name)
    fleet.step()
    return fleet, runner


# --- parts


def test_parts_are_told_as_they_come_and_all_of_them_are_the_answer() -> None:
    fleet, runner = streaming("a", "b", "c")
    (batch,) = runner.running
    batch.tell(Part("a0"), None, Part("c0"), ended=False)
    step = fleet.step()
    assert [(output.key[0], output.event) for output in step.outputs] == [
        ("a", Parts(["a0"])),
        ("c", Parts(["c0"])),
    ]
    batch.tell(Part("a1"), Part("b0"), Done("not among the parts"), ended=False)
    fleet.step()
    assert fleet.outputs("c") == [["c0"]]
    batch.tell(Done(), Done("b1"), None, ended=False)
    fleet.step()
    assert fleet.outputs("a") == [["a0", "a1"]]
    assert fleet.outputs("b") == [["b0"]]
    assert fleet.parts == {"a": ["a0", "a1"], "b": ["b0"], "c": ["c0"]}
    # All have ended, and so nobody wants the rest.
    assert batch.closed == 1
    fleet.assert_empty()


def test_one_that_gives_nothing_has_an_end_without_parts() -> None:
    fleet, runner = streaming("a")
    runner.running[0].tell(Done(()))
    fleet.step()
    assert fleet.outputs("a") == [()]
    assert fleet.parts == {}


def test_each_hears_how_long_it_was_computed_until_its_end() -> None:
    fleet, runner = streaming("a", "b")
    runner.running[0].tell(Part(1), Done(), ended=False, device_s=0.5)
    assert fleet.step().device_s == 0
    runner.running[0].tell(Done(), None, device_s=0.25)
    assert fleet.step().device_s == 0.75
    assert [fleet.ends[name].timing.device_ms for name in "ab"] == [750, 500]
    assert [fleet.ends[name].timing.batches for name in "ab"] == [1, 1]


def test_what_fails_after_parts_cannot_be_run_again_but_others_can() -> None:
    fleet, runner = streaming("shown", "hidden", "bad", "done")
    first = runner.running[0]
    first.tell(Part(1), None, None, Done("done"), ended=False)
    fleet.step()
    first.news.append(ValueError("a secret"))
    fleet.run_now()
    assert fleet.error("shown").message == "the batch that it ran in failed (ValueError)"
    assert fleet.outputs("done") == ["done"]
    assert fleet.parts == {"shown": [1]}
    second = runner.running[1]
    assert second.batch.values == ["hidden", "bad"]
    second.news.append(ValueError("a secret"))
    fleet.run_now()
    runner.running[2].tell(Done("hidden"))
    fleet.run_now()
    runner.running[3].news.append(ValueError("its own"))
    fleet.run_now()
    assert fleet.outputs("hidden") == ["hidden"]
    assert "its own" in fleet.error("bad").message
    assert runner.asked == 0
    fleet.assert_empty()


def test_a_broken_model_is_found_out_amid_parts() -> None:
    fleet, runner = streaming("a", "b")
    runner.running[0].tell(Part(1), Part(1), ended=False)
    fleet.step()
    runner.broken = True
    runner.running[0].news.append(RuntimeError("device-side assert"))
    with pytest.raises(Exception, match="nothing can be run any more"):
        fleet.run_now()


@pytest.mark.parametrize("parts", [(None, None), (Part(1), None), (Part(1), Part(1))])
def test_a_whole_batch_comes_again_also_after_parts(parts: tuple[Part | None, ...]) -> None:
    fleet, runner = streaming("a", "b")
    runner.running[0].tell(*parts, ended=False)
    fleet.step()
    runner.running[0].news.append(RetryLater(3))
    fleet.run_now()
    assert [end.retry_after_s for end in fleet.ends.values()] == [3, 3]
    assert (len(runner.running), runner.asked) == (1, 0)
    fleet.assert_empty()


def test_the_last_one_that_fails_closes_its_batch_once() -> None:
    fleet, runner = streaming("a", "b")
    runner.running[0].tell(ValueError("a"), ValueError("b"), ended=False)
    fleet.step()
    assert runner.running[0].closed == 1
    fleet.assert_empty()
    fleet.ask("then", "x")
    fleet.step()
    runner.running[1].tell(Done("X"))
    fleet.run_now()
    assert fleet.outputs("then") == ["X"]


# --- nobody wants it


def test_a_batch_is_closed_when_the_last_who_wanted_it_has_gone() -> None:
    fleet, runner = streaming("a", "b")
    (batch,) = runner.running
    batch.tell(Part(1), Part(1), ended=False)
    fleet.step()
    fleet.cancel("a")
    assert batch.closed == 0
    batch.tell(Part(2), Part(2), ended=False)
    fleet.step()
    assert fleet.parts == {"a": [1], "b": [1, 2]}
    batch.tell(Part(3), Part(3), ended=False)
    fleet.cancel("b")
    assert batch.closed == 1
    fleet.run_now()
    assert not batch.advanced_after_close
    fleet.assert_empty()


def test_a_batch_whose_requests_expire_is_closed() -> None:
    runner = ElsewhereRunner()
    fleet = Bench(runner, size=2, delay=0.0)
    fleet.ask("a", 1, life=5.0)
    fleet.step()
    assert fleet.engine.due_in() == 5.0
    fleet.run()
    assert (fleet.ends["a"].state, runner.running[0].closed) == ("expired", 1)
    fleet.assert_empty()


def test_a_close_that_raises_ends_nobody() -> None:
    fleet, runner = streaming("a")
    runner.running[0].fault_of_close = RuntimeError("generator ignored GeneratorExit")
    fleet.cancel("a")
    fleet.ask("b", 1)
    fleet.step()
    runner.running[1].fault_of_close = RuntimeError("again")
    runner.running[1].tell(Done("B"))
    fleet.run_now()
    assert fleet.outputs("b") == ["B"]
    fleet.ask("c", 1)
    fleet.step()
    fleet.engine.close()
    assert (runner.running[2].closed, runner.closed) == (1, True)


def test_ten_more_after_a_batch_was_left() -> None:
    fleet, runner = streaming("a", "b", "c", "d")
    fleet.cancel("a", "b", "c", "d")
    for number in range(10):
        fleet.ask(f"r{number}", number)
    done = 1
    while len(fleet.ends) < 10:
        fleet.step()
        for batch in runner.running[done:]:
            batch.tell(*(Done(value * 2) for value in batch.batch.values))
            done += 1
    assert [fleet.outputs(f"r{number}") for number in range(10)] == [[2 * number] for number in range(10)]
    fleet.assert_empty()


# --- elsewhere


def run_and_say(fleet: Bench, runner: ElsewhereRunner, batch: Elsewhere) -> None:
    batch.tell(*(Done(f"of {value}") for value in batch.batch.values))
    runner.wake()
    fleet.run_now()


def test_so_many_batches_run_as_there_are_slots() -> None:
    runner = ElsewhereRunner(slots=3)
    fleet = Bench(runner, size=2, window=9, delay=0.0)
    woken: list[int] = []
    fleet.engine.listen(lambda: woken.append(1))
    for number in range(10):
        fleet.ask(f"r{number}", number)
    fleet.run_now()
    assert runner.values == [[0, 1], [2, 3], [4, 5]]
    assert fleet.engine.due_in() == pytest.approx(1e9), "until one is ready nothing but a deadline comes"
    room = fleet.engine.room()
    assert (room.running, room.waiting) == (6, 4)
    # They end in any order, and each end makes room for another.
    for place in (1, 3, 0, 2, 4):
        run_and_say(fleet, runner, runner.running[place])
    assert woken == [1] * 5
    assert [fleet.outputs(f"r{number}") for number in range(10)] == [[f"of {number}"] for number in range(10)]
    assert [fleet.runner.values[place] for place in (3, 4)] == [[6, 7], [8, 9]]
    fleet.assert_empty()


def test_a_batch_that_is_always_ready_holds_up_no_other() -> None:
    runner = ElsewhereRunner(slots=2)
    fleet = Bench(runner, size=1, delay=0.0)
    fleet.ask("long", 0)
    fleet.ask("short", 1)
    fleet.step()
    fleet.step()
    long, short = runner.running
    for number in range(9):
        long.tell(Part(number), ended=False)
    short.tell(Done("soon"))
    fleet.step()
    fleet.step()
    assert fleet.outputs("short") == ["soon"]
    assert len(fleet.parts["long"]) == 1


def test_an_end_here_that_closes_a_batch_there() -> None:
    """Both are ready in one step, and the first ends the only request that the second is for."""
    runner = ElsewhereRunner(slots=2)
    fleet = Bench(runner, size=1, delay=0.0)
    fleet.ask("a", "bad", "good")
    fleet.step()
    fleet.step()
    first, second = runner.running
    first.tell(ValueError("bad"))
    second.tell(Done("good"))
    fleet.run_now()
    assert fleet.ends["a"].state == "failed"
    assert (second.closed, second.advanced_after_close) == (1, False)
    fleet.assert_empty()


def test_halves_of_a_batch_run_side_by_side() -> None:
    runner = ElsewhereRunner(slots=2)
    fleet = Bench(runner, size=4, delay=0.0)
    for number in range(4):
        fleet.ask(f"r{number}", number)
    fleet.step()
    runner.running[0].news.append(ValueError("one of them"))
    fleet.run_now()
    assert runner.values[1:] == [[0, 1], [2, 3]]
    # Somebody leaves while its half waits or runs.
    fleet.cancel("r2")
    runner.running[2].news.append(ValueError("it was 2"))
    run_and_say(fleet, runner, runner.running[1])
    assert runner.values[3:] == [[3]]
    run_and_say(fleet, runner, runner.running[3])
    assert [fleet.outputs(f"r{number}") for number in (0, 1, 3)] == [["of 0"], ["of 1"], ["of 3"]]
    assert runner.asked == 0
    fleet.assert_empty()


def test_what_cannot_even_be_launched() -> None:
    runner = ElsewhereRunner()
    fleet = Bench(runner, size=4, delay=0.0)
    launch = runner.launch

    def refuses(batch: Any) -> Elsewhere:
        if "bad" in batch.values:
            raise OSError("a broken pipe")
        return launch(batch)

    runner.launch = refuses  # type: ignore[method-assign]
    for name in ("a", "bad", "c", "d"):
        fleet.ask(name, text(name))
    fleet.run_now()
    while runner.running and len(fleet.ends) < 4:
        batch = next(one for one in runner.running if not one.news and one.batch.values[0] not in fleet.ends)
        run_and_say(fleet, runner, batch)
    assert [fleet.outputs(name) for name in "acd"] == [["of a"], ["of c"], ["of d"]]
    assert "OSError: a broken pipe" in fleet.error("bad").message
    fleet.assert_empty()
