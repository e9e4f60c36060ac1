"""Items and batches that fail: who fails with them, who does not, and what is told."""

from __future__ import annotations

import math
from typing import Any

import pytest

from item_models import Bench, ElsewhereRunner, ListRunner, text
from streamfleet_common.errors import GenerationFailed, InvalidRequest, StreamfleetError, TooLong
from streamfleet_worker.engine.item import Done, Progress, RetryLater
from streamfleet_worker.engine.item_line import RECOVERY


class OutOfMemoryError(RuntimeError):
    """As torch's."""


def bad_batch(bad: set[Any], error: Exception) -> Any:
    """A whole batch fails if one of these is in it."""
    return lambda values: error if bad.intersection(values) else None


def raises_for(bad: Any, error: Exception) -> Any:
    def result(value: Any) -> Any:
        if value == bad:
            raise error
        return ("result", value)

    return result


def ask_32(fleet: Bench, **fields: Any) -> None:
    for number in range(32):
        fleet.ask(f"r{number}", text(number, **fields))


def assert_alone(fleet: Bench, culprits: set[int]) -> None:
    failed = {int(name[1:]) for name, end in fleet.ends.items() if end.state == "failed"}
    assert failed == culprits
    for number in set(range(32)) - culprits:
        assert fleet.outputs(f"r{number}") == [("result", number)]
    fleet.assert_empty()


# --- one of 32


@pytest.mark.parametrize("culprit", range(32))
def test_what_makes_a_batch_raise_is_found_and_fails_alone(culprit: int) -> None:
    runner = ListRunner(fails=bad_batch({culprit}, ValueError("it is odd")))
    fleet = Bench(runner, size=32, delay=1.0)
    ask_32(fleet)
    fleet.run()
    assert_alone(fleet, {culprit})
    # Both halves of each that failed: 1 + 2 log2(32).
    assert len(runner.batches) == 11
    assert runner.asked == 0
    assert fleet.error(f"r{culprit}").message == "it failed on this request: ValueError: it is odd"
    assert not fleet.error(f"r{culprit}").retryable


@pytest.mark.parametrize("culprits", [{0, 31}, {7, 8}, set(range(0, 32, 8)), set(range(31))])
def test_several_culprits(culprits: set[int]) -> None:
    runner = ListRunner(fails=bad_batch(culprits, ValueError("odd")))
    fleet = Bench(runner, size=32, delay=1.0)
    ask_32(fleet)
    fleet.run()
    assert_alone(fleet, culprits)
    assert len(runner.batches) <= min(63, 1 + 2 * len(culprits) * int(math.log2(32)))
    assert runner.asked == 0, "one has come through"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("odd"), "generation_failed"),
        (GenerationFailed("the model gives no usable numbers (NaN or infinity)"), "generation_failed"),
        (TooLong(prompt_tokens=9, max_tokens=0, limit=8), "too_long"),
        (InvalidRequest("no", problems=["a", "b"]), "invalid_request"),
    ],
)
def test_an_outcome_that_is_an_error_is_its_items_own(error: Exception, code: str) -> None:
    runner = ListRunner(raises_for(13, error))
    fleet = Bench(runner, size=32, delay=1.0)
    ask_32(fleet)
    fleet.run()
    assert_alone(fleet, {13})
    assert len(runner.batches) == 1
    told = fleet.error("r13")
    assert told.code == code
    assert str(error) in told.message
    if isinstance(error, StreamfleetError):
        assert told.details == error.details


@pytest.mark.parametrize(
    "error",
    [
        OutOfMemoryError("CUDA"),
        MemoryError(),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA out of memory. Tried to allocate 1 GiB"),
    ],
)
def test_too_large_for_the_memory(error: Exception) -> None:
    """Above 320 padded tokens the device has no memory: 32 rows of 16 do not fit, and the long one never."""
    runner = ListRunner()
    fleet = Bench(runner, size=33, delay=1.0)

    def fails(values: list[Any]) -> Exception | None:
        batch = runner.batches[-1]
        return error if len(values) * batch.length > 320 else None

    runner.fails = fails
    ask_32(fleet, length=16)
    fleet.ask("long", text("long", length=400))
    fleet.run()
    assert fleet.error("long").retryable, "another worker may have more"
    del fleet.ends["long"]
    assert_alone(fleet, set())
    # Half of what failed, from now on; an item too large in any company does not lower it further.
    assert fleet.engine._line.budget == 256
    ask_then = len(runner.batches)
    for number in range(32):
        fleet.ask(f"then{number}", text(number, length=16))
    fleet.run()
    assert [len(batch.values) for batch in runner.batches[ask_then:]] == [16, 16]
    fleet.assert_empty()


def test_nobody_elses_words(caplog: pytest.LogCaptureFixture) -> None:
    """What a batch raises as a whole may quote any of its items."""
    runner = ListRunner(fails=lambda values: ValueError(f"cannot do {values}"))
    fleet = Bench(runner, size=4, delay=0.0, bisect=False)
    fleet.ask("a", "secret of a")
    fleet.ask("b", "secret of b")
    fleet.run()
    assert len(runner.batches) == 1, "not tried in parts, as was asked"
    for name in "ab":
        assert fleet.error(name).message == "the batch that it ran in failed (ValueError)"
    fleet.ask("c", "secret of c")
    fleet.run()
    assert "secret of c" in fleet.error("c").message, "its own"
    assert "secret" not in caplog.text
    fleet.assert_empty()


def test_all_items_of_a_request_fail_once() -> None:
    """In one batch, which is not tried in parts."""
    fleet = Bench(ListRunner(fails=lambda values: ValueError("no")), size=8, delay=0.0, bisect=False)
    fleet.ask("a", 1, 2, 3)
    fleet.ask("b", 4)
    fleet.run()
    assert [fleet.ends[name].state for name in "ab"] == ["failed", "failed"]
    fleet.assert_empty()


def test_with_time_batches_are_as_large_as_before() -> None:
    runner = ListRunner(fails=lambda values: MemoryError() if len(values) > 2 else None)
    fleet = Bench(runner, size=4, delay=0.0, max_batch_tokens=40)

    def sizes(requests: int) -> list[int]:
        before = len(runner.batches)
        for number in range(requests):
            fleet.ask(f"{before} {number}", text(number, length=10))
        fleet.run()
        return [len(values) for values in runner.values[before:]]

    assert sizes(4) == [4, 2, 2]
    runner.fails = lambda values: None
    # The two halves were good already.
    assert sizes(2 * (RECOVERY - 2)) == [2] * (RECOVERY - 2)
    assert sizes(4) == [4]
    fleet.assert_empty()


def test_a_whole_batch_may_say_what_its_senders_are_to_hear() -> None:
    runner = ListRunner(fails=lambda values: InvalidRequest("come back on Monday"))
    fleet = Bench(runner, size=4, delay=0.0, bisect=False)
    fleet.ask("a", 1)
    fleet.ask("b", 2)
    fleet.run()
    assert [(fleet.error(name).code, fleet.error(name).message) for name in "ab"] == [
        ("invalid_request", "come back on Monday")
    ] * 2


def test_the_culprit_is_named(caplog: pytest.LogCaptureFixture) -> None:
    runner = ListRunner(fails=bad_batch({"bad"}, KeyError("a secret")))
    fleet = Bench(runner, size=8, delay=0.0)
    fleet.ask("many", "a", "b", "bad", "c")
    fleet.ask("other", "d", "e")
    fleet.run()
    error = fleet.error("many")
    assert error.message == "item 2: it failed on this request: KeyError: 'a secret'"
    assert error.details["item"] == 2
    assert fleet.outputs("other") == [("result", "d"), ("result", "e")]
    assert "request many epoch 1 failed on item 2: KeyError at " in caplog.text
    assert "secret" not in caplog.text
    fleet.assert_empty()


@pytest.mark.parametrize("error", [TooLong(prompt_tokens=9, max_tokens=1, limit=8), InvalidRequest("no")])
def test_a_named_error_is_the_same_error(error: StreamfleetError) -> None:
    fleet = Bench(ListRunner(raises_for("bad", error)), delay=0.0)
    fleet.ask("a", "x", "bad")
    fleet.run()
    told = fleet.error("a")
    assert type(told) is type(error)
    assert told.message == f"item 1: {error.message}"
    assert told.details == {**error.details, "item": 1}


def test_two_items_of_one_request_fail_at_once() -> None:
    runner = ListRunner(lambda value: raises_for(value, ValueError(str(value)))(value))
    fleet = Bench(runner, size=8, delay=0.0)
    fleet.ask("a", 0, 1, 2)
    fleet.run()
    assert fleet.error("a").details["item"] == 0
    fleet.assert_empty()


class Silent(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class SilentRuntime(Silent, RuntimeError):
    pass


class Hollow(StreamfleetError):
    """It has never called the constructor of its parent."""

    def __init__(self) -> None:
        pass


@pytest.mark.parametrize("error", [Silent(), SilentRuntime(), Hollow()])
@pytest.mark.parametrize("is_whole", [True, False])
def test_errors_that_are_errors_themselves(error: Exception, is_whole: bool) -> None:
    runner = ListRunner(fails=bad_batch({"bad"}, error)) if is_whole else ListRunner(raises_for("bad", error))
    fleet = Bench(runner, delay=0.0)
    fleet.ask("a", "bad", "y")
    fleet.ask("b", "x")
    fleet.run()
    assert isinstance(fleet.error("a"), GenerationFailed)
    assert type(error).__name__ in fleet.error("a").message
    assert fleet.outputs("b") == [("result", "x")]
    fleet.assert_empty()


# --- whether anything works


@pytest.mark.parametrize("is_whole", [True, False])
def test_when_all_fail_the_runner_is_asked_whether_anything_works(is_whole: bool) -> None:
    error = RuntimeError("device-side assert")
    runner = ListRunner(fails=lambda values: error) if is_whole else ListRunner()
    if not is_whole:
        runner.result = lambda value: raises_for(value, error)(value)
    fleet = Bench(runner, size=4, delay=0.0)
    for number in range(4):
        fleet.ask(f"r{number}", number)
    fleet.run()
    assert runner.asked == 1
    assert len(fleet.ends) == 4
    fleet.assert_empty()
    runner.broken = True
    fleet.ask("last", "x")
    with pytest.raises(GenerationFailed, match="nothing can be run any more"):
        fleet.run()


def test_one_request_with_all_items_of_a_batch_is_no_cover_for_a_broken_model() -> None:
    """With its first failure it leaves, and its other items are never tried."""
    runner = ListRunner(fails=lambda values: RuntimeError("device-side assert"))
    runner.broken = True
    fleet = Bench(runner, size=32, delay=0.0)
    fleet.ask("a", *range(32))
    with pytest.raises(GenerationFailed, match="nothing can be run any more"):
        fleet.run()


def test_nothing_is_asked_when_they_all_shall_come_again() -> None:
    for runner in (
        ListRunner(fails=lambda values: RetryLater(1.0)),
        ListRunner(lambda value: raises_for(value, RetryLater(1.0))(value)),
    ):
        fleet = Bench(runner, delay=0.0)
        fleet.ask("a", 1)
        fleet.ask("b", 2)
        fleet.run()
        assert (runner.asked, len(runner.batches)) == (0, 1)


# --- come again


def test_an_item_that_is_to_come_again_takes_its_request_along() -> None:
    fleet = Bench(ListRunner(raises_for("busy", RetryLater(2.5))), size=8, delay=0.0)
    fleet.ask("a", "x", "busy")
    fleet.ask("b", "y")
    fleet.run()
    end = fleet.ends["a"]
    assert (end.state, end.retry_after_s, fleet.error("a").retryable) == ("failed", 2.5, True)
    assert fleet.outputs("b") == [("result", "y")]
    assert fleet.ends["b"].retry_after_s is None
    fleet.assert_empty()


@pytest.mark.parametrize("size", [1, 3])
def test_a_whole_batch_is_to_come_again(size: int) -> None:
    fleet = Bench(ListRunner(fails=lambda values: RetryLater(60)), size=size, delay=0.0)
    for number in range(3):
        fleet.ask(f"r{number}", number)
    fleet.run()
    assert [end.retry_after_s for end in fleet.ends.values()] == [60] * 3
    assert all(fleet.error(name).retryable for name in fleet.ends)
    assert len(fleet.runner.batches) == 3 // size, "not tried in halves"
    fleet.assert_empty()


# --- runners that break their word


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("ended", [True, False])
def test_a_wrong_number_of_outcomes_is_refused(count: int, ended: bool) -> None:
    runner = ElsewhereRunner()
    fleet = Bench(runner, size=2, delay=0.0)
    fleet.ask("a", 1)
    fleet.ask("b", 2)
    fleet.step()
    (batch,) = runner.running
    batch.tell(*[Done(1)] * count, ended=ended)
    fleet.run_now()
    for name in "ab":
        assert f"2 outcomes are wanted of the runner, and {count} came" in fleet.error(name).message
    assert batch.closed == (0 if ended else 1)
    fleet.assert_empty()


def test_an_end_without_an_answer_is_a_failure() -> None:
    runner = ElsewhereRunner()
    fleet = Bench(runner, size=3, delay=0.0)
    for name in "abc":
        fleet.ask(name, name)
    fleet.step()
    runner.running[0].news.append(Progress([Done("A"), None, "neither"]))  # type: ignore[list-item]
    fleet.run_now()
    assert fleet.outputs("a") == ["A"]
    assert [fleet.error(name).message for name in "bc"] == ["it ended without an answer to this item"] * 2
    fleet.assert_empty()


@pytest.mark.parametrize("bisect", [True, False])
def test_a_batch_that_fails_after_some_have_ended(bisect: bool) -> None:
    """These keep their ends; the others are run again, if that is allowed."""
    runner = ElsewhereRunner()
    fleet = Bench(runner, size=4, delay=0.0, bisect=bisect)
    for name in "abcd":
        fleet.ask(name, name)
    fleet.step()
    first = runner.running[0]
    first.tell(Done("A"), ValueError("b"), None, None, ended=False)
    fleet.run_now()
    assert sorted(fleet.ends) == ["a", "b"]
    if not bisect:
        fleet.cancel("c")
    first.news.append(RuntimeError("words about a"))
    fleet.run_now()
    if bisect:
        second = runner.running[1]
        assert second.batch.values == ["c", "d"]
        second.tell(Done("C"), Done("D"))
        fleet.run_now()
        assert [fleet.outputs(name) for name in "acd"] == [["A"], ["C"], ["D"]]
    else:
        assert fleet.outputs("a") == ["A"]
        assert fleet.error("d").message == "the batch that it ran in failed (RuntimeError)"
        assert len(runner.running) == 1
    fleet.assert_empty()
