"""Handlers that yield: parts for each item, through the engine."""

import asyncio
import contextvars
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import pytest

from served_handler import ServedHandler, told
from streamfleet_common.codec import MAX_RESULT_BYTES
from streamfleet_worker import END, Retry, handler

Serve = Callable[..., ServedHandler]

Parts = Iterator[list[str | Exception | None]]


def test_parts_come_as_they_are_made_and_the_end_has_them_all(serve: Serve) -> None:
    @handler("h")
    def spell(batch: list[str]) -> Parts:
        for place in range(max(map(len, batch))):
            yield [text[place] if place < len(text) else END for text in batch]

    served = serve(spell.handler)
    long, short = served.add(["abc", "x"])
    said: list[Any] = []
    while served.ends.keys() != {long, short}:
        served.step()
        said.append((list(served.parts[long]), served.parts.get(short), short in served.ends))

    assert said == [
        (["a"], ["x"], False),
        (["a", "b"], ["x"], True),
        (["a", "b", "c"], ["x"], True),
        (["a", "b", "c"], ["x"], True),
    ]
    assert served.ends[long].outputs == ("a", "b", "c")
    assert served.ends[short].outputs == ("x",)


def test_none_is_nothing_now_and_what_follows_an_end_is_not_looked_at(serve: Serve) -> None:
    @handler("h")
    def slowly(batch: list[str]) -> Parts:
        yield [None, END]
        yield ["a", cast("str", 7)]
        yield [None, ValueError("too late")]

    first, second = serve(slowly.handler).ask("x", "y")

    assert (first.state, first.outputs) == ("done", ("a",))
    assert (second.state, second.outputs) == ("done", ())


def test_an_async_generator_streams_too(serve: Serve) -> None:
    @handler("h")
    async def spell(batch: list[str]) -> AsyncIterator[list[str | None]]:
        for place in range(2):
            await asyncio.sleep(0)
            yield [text[place] for text in batch]

    served = serve(spell.handler)

    assert [end.outputs for end in served.ask("ab", "cd")] == [("a", "b"), ("c", "d")]
    assert [end.outputs for end in served.ask("ef")] == [("e", "f")]


def test_an_async_generator_lives_in_one_task(serve: Serve) -> None:
    """Timeouts, task groups and context variables belong to a task, and are open across parts."""
    tasks = set()
    variable = contextvars.ContextVar("variable", default=0)

    @handler("h")
    async def count(batch: list[str]) -> AsyncIterator[list[int | None]]:
        async with asyncio.timeout(60), asyncio.TaskGroup() as group:
            for _ in range(3):
                tasks.add(asyncio.current_task())
                variable.set(variable.get() + 1)
                done = group.create_task(asyncio.sleep(0, variable.get()))
                yield [await done for _ in batch]

    assert [end.outputs for end in serve(count.handler).ask("a", "b")] == [(1, 2, 3), (1, 2, 3)]
    assert len(tasks) == 1


# --- errors -----------------------------------------------------------------------------------


def test_an_async_generator_whose_task_is_cancelled_fails(serve: Serve) -> None:
    @handler("h")
    async def count(batch: list[int]) -> AsyncIterator[list[int | None]]:
        for turn in range(max(batch)):
            yield [turn for _ in batch]
            for task in asyncio.all_tasks():
                task.cancel()

    served = serve(count.handler)
    assert [end.state for end in served.ask(3)] == ["failed"]

    @handler("h")
    async def before(batch: list[int]) -> AsyncIterator[list[int | None]]:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        yield [1 for _ in batch]
        yield [2 for _ in batch]

    (end,) = serve(before.handler).ask(3)
    assert (end.state, end.outputs) == ("failed", ())
    assert told(end) == "handler 'h' failed: CancelledError: "


def test_an_item_fails_alone_amid_its_parts(serve: Serve) -> None:
    @handler("h")
    def spell(batch: list[str]) -> Parts:
        yield ["1" for _ in batch]
        yield [
            {"bad": ValueError("bad"), "odd": cast("Exception", 5), "later": Retry(2)}.get(text, "2")
            for text in batch
        ]
        yield ["3" for _ in batch]

    ends = serve(spell.handler).ask("a", "bad", "odd", "later", "b")

    assert [end.state for end in ends] == ["done", "failed", "failed", "failed", "done"]
    assert ends[0].outputs == ends[4].outputs == ("1", "2", "3")
    assert told(ends[1]) == "handler 'h' failed on this input: ValueError: bad"
    words = "handler 'h' gave an output that does not fit str: the output should be a valid string"
    assert told(ends[2]) == words
    assert ends[3].retry_after_s == 2.0


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["a"], "handler 'h' yielded 1 place for 3 inputs: one is wanted for each, in their order"),
        ("abc", "handler 'h' yielded str: a list with 3 places is wanted, one for each input"),
        (None, "handler 'h' yielded NoneType: a list with 3 places is wanted, one for each input"),
    ],
)
def test_parts_of_another_form_fail_all_that_have_not_ended(serve: Serve, given: Any, words: str) -> None:
    closed = []

    @handler("h")
    def spell(batch: list[str]) -> Parts:
        try:
            yield ["a", END, "b"]
            yield given
        finally:
            closed.append(True)

    served = serve(spell.handler)
    first, second, third = served.ask("x", "y", "z")

    assert second.state == "done"
    assert first.state == third.state == "failed"
    assert told(first) == told(third) == words
    assert closed == [True]


def test_a_function_said_to_yield_that_returns_fails_all(serve: Serve) -> None:
    @handler("h")
    def spell(batch: list[str]) -> Parts:
        return cast("Parts", list(batch))

    ends = serve(spell.handler).ask("a", "b")

    assert {told(end) for end in ends} == {"handler 'h' gave list, and is said to yield lists"}


def test_what_raises_before_any_part_is_found_out(serve: Serve) -> None:
    for asynchronous in (False, True):

        @handler("h", max_batch_size=8)
        def spell(batch: list[str]) -> Parts:
            if "bad" in batch:
                raise ValueError("bad")
            yield list(batch)

        @handler("h", max_batch_size=8)
        async def later(batch: list[str]) -> AsyncIterator[list[str | None]]:
            if "bad" in batch:
                raise SystemExit(1)
            yield list(batch)

        served = serve(later.handler if asynchronous else spell.handler)
        ends = served.ask("a", "b", "c", "bad", "d")

        assert [end.state for end in ends] == ["done", "done", "done", "failed", "done"]
        assert [end.outputs for end in ends] == [("a",), ("b",), ("c",), (), ("d",)]


def test_parts_are_never_given_twice(serve: Serve) -> None:
    """One that raises later fails those that have parts already."""

    @handler("h")
    def spell(batch: list[str]) -> Parts:
        yield [None if text == "none yet" else "1" for text in batch]
        if "bad" in batch:
            raise ValueError("bad")
        yield ["2" for _ in batch]

    served = serve(spell.handler)
    keys = served.add(["a", "bad", "none yet"])
    ends = served.run(keys)

    assert [end.state for end in ends] == ["failed", "failed", "done"]
    assert [served.parts[key] for key in keys] == [["1"], ["1"], ["2"]]


def test_all_parts_of_an_item_together_are_bounded(serve: Serve) -> None:
    part = "x" * (MAX_RESULT_BYTES // 4)

    @handler("h")
    def fill(batch: list[int]) -> Parts:
        for turn in range(max(batch)):
            yield [part if turn < count else END for count in batch]

    ends = serve(fill.handler).ask(3, 4, 100)

    assert [end.state for end in ends] == ["done", "failed", "failed"]
    assert [len(output) for output in ends[0].outputs] == [len(part)] * 3
    assert "bytes of output for one input, and a result holds" in told(ends[1])


# --- nobody waits -----------------------------------------------------------------------------


def test_it_stops_when_nobody_wants_the_rest(serve: Serve) -> None:
    heard: list[str] = []

    @handler("h")
    def forever(batch: list[str]) -> Parts:
        try:
            while True:
                yield ["more" for _ in batch]
        finally:
            heard.append("closed")

    @handler("h")
    async def forever_async(batch: list[str]) -> AsyncIterator[list[str | None]]:
        try:
            while True:
                yield ["more" for _ in batch]
        finally:
            await asyncio.sleep(0)
            heard.append("closed")

    for made in (forever.handler, forever_async.handler):
        heard.clear()
        served = serve(made)
        first, second = served.add(["a", "b"])
        served.step()
        served.engine.cancel([first])
        served.step()
        assert heard == []
        assert served.parts[second] == ["more", "more"]
        served.engine.cancel([second])
        assert heard == ["closed"]
        assert served.engine.due_in() is None
        assert served.engine.room().running == 0


def test_one_that_will_not_close_does_no_harm(serve: Serve) -> None:
    @handler("h")
    def stubborn(batch: list[str]) -> Parts:
        try:
            while True:
                yield [END if text == "end" else "more" for text in batch]
        finally:
            raise ValueError("not yet")

    @handler("h")
    async def failing(batch: list[str]) -> AsyncIterator[list[str | None]]:
        try:
            while True:
                yield [END if text == "end" else "more" for text in batch]
        finally:
            raise SystemExit(1)

    for made in (stubborn.handler, failing.handler):
        served = serve(made)
        (key,) = served.add(["a"])
        served.step()
        served.engine.cancel([key])
        assert [end.state for end in served.ask("end")] == ["done"]
