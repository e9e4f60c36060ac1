"""Requests whose items share batches: when they run, what they get, and who is left alone."""

from __future__ import annotations

from typing import Any

import pytest

from item_models import Bench, ListRunner, equal, text
from streamfleet_common.errors import GenerationFailed, TooLong
from streamfleet_common.schemas import Usage
from streamfleet_worker.engine.item import ItemBatch


def bench(**options: Any) -> Bench:
    return Bench(ListRunner(), **options)


# --- when


def test_a_lone_request_leaves_at_its_delay_since_acceptance() -> None:
    fleet = bench(delay=1.0)
    fleet.ask("a", "x", age=0.25)
    assert fleet.engine.due_in() == 0.75
    fleet.step()
    assert fleet.ends == {}, "a step before its time launches nothing"
    fleet.run()
    assert fleet.ended_at == {"a": 100.75}
    assert fleet.outputs("a") == [("result", "x")]
    fleet.assert_empty()


def test_a_backlog_never_waits() -> None:
    fleet = bench(size=4, delay=1.0)
    for number in range(50):
        fleet.ask(f"r{number}", number, age=1.0 + number)
    fleet.run_now()
    assert set(fleet.ended_at.values()) == {100.0}
    assert [len(values) for values in fleet.runner.values] == [4] * 12 + [2]
    # The oldest first.
    assert fleet.runner.values[0] == [49, 48, 47, 46]
    fleet.assert_empty()


def test_a_full_batch_starts_at_once_and_the_rest_waits() -> None:
    fleet = bench(size=4, delay=1.0)
    fleet.ask("a", 0, 1, 2)
    assert fleet.engine.due_in() == 1.0
    fleet.ask("b", 3, 4)
    assert fleet.engine.due_in() == 0
    fleet.run_now()
    assert fleet.runner.values == [[0, 1, 2, 3]]
    assert sorted(fleet.ends) == ["a"]
    fleet.run()
    assert fleet.runner.values == [[0, 1, 2, 3], [4]]
    assert fleet.ended_at == {"a": 100.0, "b": 101.0}


def test_a_step_is_of_one_batch() -> None:
    fleet = bench(size=4, delay=0.0)
    for number in range(6):
        fleet.ask(f"r{number}", text(number, length=3))
    first, second = fleet.step(), fleet.step()
    assert [(step.rows, step.prompt_tokens, step.padded_tokens) for step in (first, second)] == [
        (4, 12, 12),
        (2, 6, 6),
    ]
    assert fleet.engine.due_in() is None


def test_what_the_runner_is_given() -> None:
    fleet = bench(size=8, delay=0.0, length_step=16)
    fleet.ask("a", text("x", length=33, group="g"), text("y", length=40, group="g"))
    fleet.ask("b", text("z", length=30, group="g"), text("other", length=30))
    step = fleet.step()
    (batch,) = fleet.runner.batches
    assert batch == ItemBatch(["x", "y", "z"], "g", 48, (33, 40, 30))
    assert (step.rows, step.prompt_tokens, step.padded_tokens) == (3, 103, 144)
    fleet.run()
    assert fleet.runner.batches[1] == ItemBatch(["other"], None, 32, (30,))


# --- what


def test_answers_are_put_together_of_different_batches_and_orders() -> None:
    fleet = bench(size=2, delay=0.0, length_step=10, uniform=True)
    fleet.ask("a", text("a0", length=30), text("a1", length=5), text("a2", length=25), text("a3", length=1))
    fleet.ask("b", text("b0", length=5), text("b1", length=30))
    fleet.run()
    assert sorted(map(sorted, fleet.runner.values)) == [["a0", "a2"], ["a1", "a3"], ["b0"], ["b1"]]
    assert fleet.outputs("a") == [("result", f"a{place}") for place in range(4)]
    assert fleet.outputs("b") == [("result", "b0"), ("result", "b1")]
    assert [fleet.ends[name].timing.batches for name in "ab"] == [2, 2]
    fleet.assert_empty()


def test_a_request_without_items_has_an_answer() -> None:
    fleet = bench()
    fleet.ask("a", usage=Usage(prompt_tokens=3))
    assert fleet.engine.due_in() == 0
    fleet.run()
    assert fleet.ends["a"].outputs == ()
    assert fleet.ends["a"].usage.prompt_tokens == 3
    assert fleet.runner.batches == []
    fleet.ask("b")
    fleet.cancel("b")
    fleet.run()
    fleet.assert_empty()


def test_usage_and_times() -> None:
    fleet = bench(delay=1.0)
    usage = Usage(prompt_tokens=9, cut_tokens=4, truncated=1)
    fleet.ask("a", "x", age=0.5, usage=usage, tokenize_s=0.25)
    fleet.run()
    end = fleet.ends["a"]
    assert end.usage == usage
    assert (end.timing.wait_ms, end.timing.tokenize_ms, end.timing.batches) == (500, 250, 1)
    assert end.timing.device_ms > 0


def test_an_answer_that_cannot_be_made_fails_alone(caplog: pytest.LogCaptureFixture) -> None:
    fleet = bench(delay=0.0)
    too_long = TooLong(prompt_tokens=9, max_tokens=0, limit=8)
    fleet.ask("odd", "x", fault=ValueError("a secret"))
    fleet.ask("known", "x", fault=too_long)
    fleet.ask("good", "y")
    fleet.ask("empty", fault=KeyError("k"))
    fleet.run()
    assert (type(fleet.error("odd")), fleet.error("odd").retryable) == (GenerationFailed, False)
    assert isinstance(fleet.error("known"), TooLong)
    assert fleet.error("known").details == too_long.details
    assert isinstance(fleet.error("empty"), GenerationFailed)
    assert fleet.outputs("good") == [("result", "y")]
    assert "request odd epoch 1" in caplog.text
    assert "a secret" not in caplog.text
    fleet.assert_empty()


def test_a_key_that_is_here_is_not_taken_twice() -> None:
    fleet = bench(delay=0.0)
    fleet.ask("a", "x")
    fleet.ask("a", "y")
    fleet.run()
    assert fleet.runner.values == [["x"]]
    fleet.assert_empty()


# --- leaving


def test_cancelled_in_the_delay_and_in_the_run_then_ten_more() -> None:
    fleet = bench(size=8, delay=1.0)
    for number in range(8):
        fleet.ask(f"r{number}", number, text("more", length=500))

    def cancels(value: Any) -> Any:
        if value == 2:
            fleet.cancel("r2", "r7")
        return ("result", value)

    fleet.runner.result = cancels
    fleet.cancel("r0", "r3", "r5", "unknown")
    fleet.run()
    assert sorted(fleet.ends) == ["r1", "r4", "r6"]
    assert all(0 not in values and 3 not in values for values in fleet.runner.values)
    for name in ("r1", "r4", "r6"):
        assert fleet.outputs(name) == [("result", int(name[1:])), ("result", "more")]
    fleet.assert_empty()
    for number in range(10):
        fleet.ask(f"then{number}", "ok")
    fleet.run()
    assert [fleet.outputs(f"then{number}") for number in range(10)] == [[("result", "ok")]] * 10
    fleet.assert_empty()


def test_a_deadline_ends_a_request_wherever_it_is() -> None:
    fleet = bench(size=2, delay=10.0)
    fleet.ask("late", "x", life=3.0)
    fleet.ask("later", text("y", length=900), life=4.0)
    assert fleet.engine.due_in() == 3.0
    fleet.run()
    assert fleet.ended_at == {"late": 103.0, "later": 104.0}
    assert [(end.state, fleet.error(name).code) for name, end in fleet.ends.items()] == [
        ("expired", "deadline_exceeded")
    ] * 2
    assert fleet.runner.batches == [], "nothing is computed for nobody"
    fleet.assert_empty()


def test_a_deadline_that_went_with_its_request_wakes_nobody_for_long() -> None:
    fleet = bench(delay=0.0)
    fleet.ask("a", "x", life=5.0)
    fleet.run_now()
    assert fleet.engine.due_in() is None
    fleet.ask("b", "x", life=50.0)
    fleet.run()
    assert fleet.ended_at["b"] == 100.0


def test_room_counts_what_waits_and_runs() -> None:
    fleet = bench(size=4, window=3, delay=1.0)
    assert fleet.engine.room().rows == 12
    fleet.ask("a", 0, 1, 2)
    room = fleet.engine.room()
    assert (room.rows, room.running, room.waiting) == (9, 0, 3)
    for number in range(12):
        fleet.ask(f"r{number}", number)
    assert fleet.engine.room().rows == 0
    assert fleet.engine.memory["items"] == 150
    fleet.run()
    fleet.assert_empty()


def test_the_engine_tells_what_its_parts_tell() -> None:
    fleet = bench()
    assert fleet.engine.info is fleet.info
    assert fleet.engine.counts == {
        "tokenization_cache_hits": 7,
        "answer_cache_queries": 0,
        "answer_cache_hits": 0,
        "coalesced_items": 0,
    }
    assert fleet.engine.memory == {"weights": 1, "items": 0, "answers": 0}
    fleet.engine.close()
    assert fleet.runner.closed


@pytest.mark.parametrize("delay", [0.1, 0.3, 1 / 3, 0.7])
@pytest.mark.parametrize("start", [0.1, 100.3, 12345.678901, 1e7 + 1 / 3])
def test_the_time_that_is_told_is_the_time_that_is_meant(start: float, delay: float) -> None:
    """Sleeping as long as it says, one comes neither too early for ever nor spins."""
    fleet = bench(delay=delay)
    fleet.clock.now = start
    fleet.ask("a", equal("x"))
    steps = 0
    while (due_in := fleet.engine.due_in()) is not None:
        fleet.clock.now += due_in
        fleet.step()
        steps += 1
        assert steps < 4
    assert fleet.ended_at["a"] == pytest.approx(start + delay)
