"""Equal items: computed once while they are in flight, and remembered for a while if that is wanted."""

from __future__ import annotations

from item_models import BYTES, Bench, ElsewhereRunner, ListRunner, equal, text
from streamfleet_worker.engine.answer_cache import AnswerCache
from streamfleet_worker.engine.item import Done, Part

# --- in flight


def test_equal_items_that_wait_are_computed_once_and_each_has_its_own_answer() -> None:
    fleet = Bench(ListRunner(), size=8, delay=1.0)
    fleet.ask("a", equal("x"), equal("y"))
    fleet.ask("b", equal("y"), equal("z"), equal("x"))
    fleet.ask("c", equal("x"))
    assert fleet.engine.room().waiting == 3
    assert fleet.engine.memory["items"] == 3 * BYTES
    fleet.run()
    assert fleet.runner.values == [["x", "y", "z"]]
    assert fleet.outputs("a") == [("result", "x"), ("result", "y")]
    assert fleet.outputs("b") == [("result", "y"), ("result", "z"), ("result", "x")]
    assert fleet.outputs("c") == [("result", "x")]
    assert [fleet.ends[name].timing.batches for name in "abc"] == [1, 1, 1]
    assert fleet.engine.counts["coalesced_items"] == 3
    fleet.assert_empty()


def test_a_request_may_share_with_itself() -> None:
    fleet = Bench(ListRunner(), size=8, delay=0.0)
    fleet.ask("a", equal("x"), equal("y"), equal("x"), equal("x"))
    fleet.run()
    assert fleet.runner.values == [["x", "y"]]
    assert fleet.outputs("a") == [("result", value) for value in "xyxx"]
    fleet.assert_empty()


def test_what_fails_twice_in_a_request_fails_it_once() -> None:
    runner = ListRunner(fails=lambda values: ValueError("odd") if "x" in values else None)
    fleet = Bench(runner, size=8, delay=0.0)
    fleet.ask("a", equal("x"), equal("y"), equal("x"))
    fleet.ask("b", equal("y"))
    fleet.ask("c", equal("x"))
    fleet.run()
    assert {name: end.state for name, end in fleet.ends.items()} == {
        "a": "failed",
        "b": "done",
        "c": "failed",
    }
    fleet.assert_empty()


def test_others_are_of_another_group_or_like_nobody() -> None:
    fleet = Bench(ListRunner(), size=8, delay=0.0)
    fleet.ask("a", equal("x"), equal("x", group="cls"), text("x"), text("x"))
    fleet.run()
    assert fleet.runner.values == [["x", "x", "x"], ["x"]]
    assert fleet.engine.counts["coalesced_items"] == 0


def test_one_that_runs_is_shared_too() -> None:
    runner = ElsewhereRunner()
    fleet = Bench(runner, size=1, delay=0.0)
    fleet.ask("a", equal("x"))
    fleet.step()
    fleet.clock.now += 2
    fleet.ask("b", equal("x"))
    assert fleet.engine.room().waiting == 0
    fleet.clock.now += 3
    runner.running[0].tell(Done("X"))
    fleet.run_now()
    assert [fleet.outputs(name) for name in "ab"] == [["X"], ["X"]]
    # It waited for no batch, and none was run for it.
    assert (fleet.ends["b"].timing.wait_ms, fleet.ends["b"].timing.batches) == (0, 0)
    fleet.assert_empty()


def test_an_owner_that_goes_leaves_it_to_the_others() -> None:
    for is_running in (False, True):
        runner = ElsewhereRunner()
        fleet = Bench(runner, size=2, delay=1.0)
        fleet.ask("a", equal("x"))
        fleet.ask("late", equal("x"), life=0.5)
        fleet.ask("b", equal("x"))
        fleet.clock.now += 1.0 if is_running else 0.6
        fleet.step()
        fleet.cancel("a")
        assert fleet.ends["late"].state == "expired"
        fleet.clock.now += 1.0
        fleet.run_now()
        runner.running[0].tell(Done("X"))
        fleet.run_now()
        assert runner.values == [["x"]]
        assert fleet.outputs("b") == ["X"]
        fleet.assert_empty()


def test_what_all_have_left_is_computed_anew_for_the_next() -> None:
    runner = ElsewhereRunner(slots=2)
    fleet = Bench(runner, size=2, delay=0.0)
    fleet.ask("a", equal("x"))
    fleet.ask("company", equal("y"))
    fleet.step()
    fleet.cancel("a")
    fleet.ask("b", equal("x"))
    fleet.step()
    assert runner.values == [["x", "y"], ["x"]]
    runner.running[0].tell(Done("too late"), Done("Y"))
    fleet.run_now()
    assert sorted(fleet.ends) == ["company"]
    runner.running[1].tell(Done("X"))
    fleet.run_now()
    assert fleet.outputs("b") == ["X"]
    fleet.assert_empty()


def test_what_has_begun_to_give_parts_is_not_shared_any_more() -> None:
    runner = ElsewhereRunner(slots=2)
    fleet = Bench(runner, size=1, delay=0.0)
    fleet.ask("a", equal("x"))
    fleet.step()
    fleet.ask("with it", equal("x"))
    runner.running[0].tell(Part(0), ended=False)
    fleet.step()
    fleet.ask("too late", equal("x"))
    fleet.step()
    assert len(runner.running) == 2
    runner.running[0].tell(Part(1), ended=False)
    runner.running[0].tell(Done())
    runner.running[1].tell(Part("anew"), ended=False)
    runner.running[1].tell(Done())
    fleet.run_now()
    assert fleet.parts == {"a": [0, 1], "with it": [0, 1], "too late": ["anew"]}
    assert [fleet.outputs(name) for name in fleet.parts] == [[[0, 1]], [[0, 1]], [["anew"]]]
    fleet.assert_empty()


def test_a_backlog_hastens_what_it_shares() -> None:
    """Its own delay is over, though that of the item is not."""
    fleet = Bench(ListRunner(), size=8, delay=10.0)
    fleet.ask("young", equal("x"))
    fleet.ask("old", equal("x"), age=8.0)
    fleet.run()
    assert fleet.ended_at == {"young": 102.0, "old": 102.0}
    fleet.assert_empty()


# --- remembered


def remembering(max_bytes: int = 1 << 20, ttl_s: float = 60.0) -> Bench:
    return Bench(ListRunner(), size=8, delay=1.0, answers=AnswerCache(max_bytes, ttl_s))


def test_a_remembered_result_is_an_answer_at_once() -> None:
    fleet = remembering()
    fleet.ask("a", equal("x"), equal("y"))
    fleet.run()
    assert fleet.engine.memory["answers"] > 0
    fleet.ask("b", equal("y"), equal("x"))
    assert fleet.engine.due_in() == 0
    fleet.step()
    assert fleet.outputs("b") == [("result", "y"), ("result", "x")]
    fleet.ask("half", equal("x"), equal("z"))
    fleet.run()
    assert fleet.outputs("half") == [("result", "x"), ("result", "z")]
    assert fleet.runner.values == [["x", "y"], ["z"]]
    counts = fleet.engine.counts
    assert (counts["answer_cache_queries"], counts["answer_cache_hits"]) == (6, 3)
    assert fleet.ends["b"].timing.batches == 0
    fleet.assert_empty()


def test_for_so_long_and_no_longer() -> None:
    fleet = remembering(ttl_s=60.0)
    fleet.ask("a", equal("x"))
    fleet.run()
    fleet.clock.now += 59.9
    fleet.ask("b", equal("x"))
    fleet.run()
    assert len(fleet.runner.batches) == 1
    fleet.clock.now += 0.1
    fleet.ask("c", equal("x"))
    fleet.run()
    assert len(fleet.runner.batches) == 2


def test_neither_failures_nor_what_is_like_nobody_are_remembered() -> None:
    fleet = remembering()
    fleet.runner.fails = lambda values: ValueError("today")
    fleet.ask("a", equal("x"))
    fleet.run()
    fleet.runner.fails = lambda values: None
    fleet.ask("b", equal("x"), text("t"))
    fleet.run()
    fleet.ask("c", equal("x", group="other"), text("t"))
    fleet.run()
    assert fleet.runner.values == [["x"], ["x", "t"], ["x"], ["t"]]
    assert fleet.outputs("b") == [("result", "x"), ("result", "t")]


def test_nothing_is_remembered_unless_it_is_wanted() -> None:
    fleet = Bench(ListRunner(), delay=0.0)
    for name in "ab":
        fleet.ask(name, equal("x"))
        fleet.run()
    assert fleet.runner.values == [["x"], ["x"]]
    assert fleet.engine.counts["answer_cache_queries"] == 0
    assert fleet.engine.memory["answers"] == 0
    fleet.assert_empty()


def test_what_came_in_parts_is_remembered_whole() -> None:
    runner = ElsewhereRunner()
    fleet = Bench(runner, delay=0.0, answers=AnswerCache(1 << 20))
    fleet.ask("a", equal("x"))
    fleet.step()
    runner.running[0].tell(Part(1), ended=False)
    runner.running[0].tell(Part(2), ended=False)
    runner.running[0].tell(Done())
    fleet.run_now()
    fleet.ask("b", equal("x"))
    fleet.run_now()
    assert fleet.outputs("b") == [[1, 2]]
    assert len(runner.running) == 1
