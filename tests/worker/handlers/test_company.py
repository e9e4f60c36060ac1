"""Whatever the company, each item comes to what the function makes of it alone."""

from collections.abc import Iterator
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from served_handler import ServedHandler
from streamfleet_worker import END, Retry, handler
from streamfleet_worker.engine.base import Finished

KINDS = st.sampled_from(["fine", "error", "retry", "raise", "exit", "memory", "null", "invalid", "size"])
INPUTS = st.lists(st.fixed_dictionaries({"kind": KINDS, "value": st.integers(0, 5)}), min_size=1, max_size=40)

# What one item comes to, said by hand: how it ends, its outputs, in how long it is to be tried again.
ALONE: dict[str, Any] = {
    "fine": lambda value: ("done", ([value, value],), None),
    "null": lambda value: ("done", (None,), None),
    "size": lambda value: ("done", (["x"] * value,), None),
    "retry": lambda value: ("failed", (), float(value)),
    "error": lambda value: ("failed", (), None),
    "raise": lambda value: ("failed", (), None),
    "exit": lambda value: ("failed", (), None),
    "memory": lambda value: ("failed", (), None),
    "invalid": lambda value: ("failed", (), None),
}


def place(item: dict[str, Any]) -> Any:
    """What a handler puts in the item's place."""
    value = item["value"]
    return {
        "fine": [value, value],
        "null": None,
        "size": ["x"] * value,
        "error": ValueError(f"no {value}"),
        "retry": Retry(value),
        "invalid": float("nan"),
    }[item["kind"]]


def explode(batch: list[dict[str, Any]]) -> None:
    for item in batch:
        if item["kind"] == "raise":
            raise ValueError(f"no {item['value']}")
        if item["kind"] == "exit":
            raise SystemExit(item["value"])
        if item["kind"] == "memory":
            raise MemoryError


def seen(end: Finished) -> tuple[Any, ...]:
    return end.state, end.outputs, end.retry_after_s


def expected(items: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [ALONE[item["kind"]](item["value"]) for item in items]


@given(items=INPUTS, size=st.integers(1, 16), deterministic=st.booleans())
@settings(deadline=None)
def test_a_handler_that_returns(items: list[dict[str, Any]], size: int, deterministic: bool) -> None:
    @handler("h", max_batch_size=size, deterministic=deterministic)
    def run(batch: list[dict[str, Any]]) -> list[Any]:
        explode(batch)
        return [place(item) for item in batch]

    served = ServedHandler(run.handler)
    assert [seen(end) for end in served.ask(*items)] == expected(items)
    served.close()


@given(items=INPUTS, size=st.integers(1, 16))
@settings(deadline=None)
def test_an_async_handler(items: list[dict[str, Any]], size: int) -> None:
    @handler("h", max_batch_size=size)
    async def run(batch: list[dict[str, Any]]) -> list[Any]:
        explode(batch)
        return [place(item) for item in batch]

    served = ServedHandler(run.handler)
    assert [seen(end) for end in served.ask(*items)] == expected(items)
    served.close()


@given(counts=st.lists(st.integers(-1, 6), min_size=1, max_size=20), size=st.integers(1, 8))
@settings(deadline=None)
def test_a_handler_that_yields(counts: list[int], size: int) -> None:
    """Item `n` has `n` parts, then ends; one below 0 fails amid them."""

    @handler("h", max_batch_size=size)
    def count(batch: list[int]) -> Iterator[list[Any]]:
        for turn in range(3 * max(map(abs, batch))):
            if turn % 3 == 1:
                yield [None] * len(batch)
            else:
                part, half = turn // 3, turn % 3
                yield [
                    END if part >= n >= 0 else KeyError(n) if n < 0 else part if half else None for n in batch
                ]

    served = ServedHandler(count.handler)
    keys = served.add(counts)
    ends = served.run(keys)
    for key, n, end in zip(keys, counts, ends, strict=True):
        wanted = list(range(max(n, 0)))
        assert served.parts.get(key, []) == wanted
        assert (end.state, list(end.outputs)) == (("done", wanted) if n >= 0 else ("failed", []))
    served.close()
