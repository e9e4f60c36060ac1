"""Context objects: built once, where the handler runs, and cleaned up at the end."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from served_handler import ServedHandler, told
from streamfleet_common.errors import BrokerUnavailable, ModelLoadFailed
from streamfleet_worker import handler

Serve = Callable[..., ServedHandler]


def here(function: Callable[..., Any]) -> str:
    """Where a function's second line is, and the function, as a log says it."""
    code = function.__code__
    return f"{code.co_filename.removeprefix(f'{Path.cwd()}/')}:{code.co_firstlineno + 1} in {code.co_name})"


def echo(batch: list[str], **contexts: Any) -> list[str]:
    return [f"{one}{''.join(contexts.values())}" for one in batch]


def test_each_is_built_once_and_given_by_name(serve: Serve) -> None:
    built = []

    def letter(name: str) -> Callable[[], str]:
        def build() -> str:
            built.append(name)
            return name.upper()

        return build

    @handler("h", max_batch_size=1, context={"y": letter("y"), "x": letter("x")})
    def join(batch: list[str], x: str, y: str) -> list[str]:
        return [f"{one}{x}{y}" for one in batch]

    assert built == [], "writing a handler builds nothing"
    served = serve(join.handler)
    assert built == ["y", "x"]
    assert [told(end) for end in served.ask("1", "2")] == ["1XY", "2XY"]
    assert built == ["y", "x"]


def test_all_kinds_are_cleaned_up_in_reverse(serve: Serve) -> None:
    said: list[str] = []
    loops = set()

    def plain() -> str:
        return "p"

    async def later() -> str:
        loops.add(asyncio.get_running_loop())
        return "l"

    def kept() -> Iterator[str]:
        yield "k"
        said.append("kept")  # without a `finally`, as it is written most often

    async def kept_later() -> AsyncIterator[str]:
        async with asyncio.timeout(60):
            loops.add(asyncio.get_running_loop())
            yield "K"
            loops.add(asyncio.get_running_loop())
            said.append("kept later")

    @handler("h", context={"plain": plain, "later": later, "kept": kept, "kept_later": kept_later})
    async def run(batch: list[str], plain: str, later: str, kept: str, kept_later: str) -> list[str]:
        loops.add(asyncio.get_running_loop())
        return [f"{one}{plain}{later}{kept}{kept_later}" for one in batch]

    served = ServedHandler(run.handler)
    assert told(served.ask("1")[0]) == "1plkK"
    assert said == []
    served.close()
    assert said == ["kept later", "kept"]
    assert len(loops) == 1, "one event loop for all of them: connections can be shared"


def test_one_that_fails_is_named_and_those_before_it_are_cleaned_up() -> None:
    def library_that_exits() -> str:
        raise SystemExit("no licence")

    def no_broker() -> str:
        raise BrokerUnavailable("no Redis")

    async def no_file() -> str:
        raise FileNotFoundError("weights.bin")

    def yields_nothing() -> Iterator[str]:
        yield from ()

    for factory, words in (
        (library_that_exits, f"SystemExit: no licence (at {here(library_that_exits)}"),
        (no_broker, f"BrokerUnavailable: no Redis (at {here(no_broker)}"),
        (no_file, f"FileNotFoundError: weights.bin (at {here(no_file)}"),
        (yields_nothing, "TypeError: it yields nothing"),
    ):
        said: list[str] = []

        def kept(said: list[str] = said) -> Iterator[str]:
            yield "k"
            said.append("closed")

        made = handler("h", context={"kept": kept, "model": factory})(echo).handler
        with pytest.raises(ModelLoadFailed) as caught:
            ServedHandler(made)
        assert f"context 'model' of handler 'h' could not be built: {words}" in str(caught.value)
        assert said == ["closed"]


def test_a_factory_may_be_a_class(serve: Serve) -> None:
    @handler("h", context={"seen": dict})
    def count(batch: list[str], seen: dict[str, int]) -> list[int]:
        for one in batch:
            seen[one] = seen.get(one, 0) + 1
        return [seen[one] for one in batch]

    served = serve(count.handler)
    assert [told(end) for end in (*served.ask("a"), *served.ask("a"), *served.ask("b"))] == [1, 2, 1]


def test_the_thread_ends_though_a_clean_up_fails() -> None:
    def build() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    @handler("h", context={"model": build})
    def predict(batch: list[str], model: int) -> list[int]:
        return [model for _ in batch]

    def threads() -> int:
        return sum(thread.name == "handler" for thread in threading.enumerate())

    before = threads()
    served = ServedHandler(predict.handler)
    assert threads() == before + 1
    with pytest.raises(OSError, match="the disk is gone"):
        served.close()
    assert threads() == before
