"""Calls that gather while one is in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from streamfleet_common.errors import BrokerUnavailable
from streamfleet_producer.coalescer import Coalescer


class Calls:
    """A call that waits to be let through."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.gate = asyncio.Semaphore(0)
        self.error: BaseException | None = None

    async def __call__(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        await self.gate.acquire()
        if self.error is not None:
            raise self.error
        return [10 * item for item in items]


async def test_what_comes_while_one_is_in_flight_goes_together() -> None:
    calls = Calls()
    coalescer = Coalescer(calls, limit=3)
    first = coalescer.put(1)
    await asyncio.sleep(0)
    others = [coalescer.put(item) for item in range(2, 7)]
    for _ in range(3):
        calls.gate.release()
    assert await first == 10
    assert await asyncio.gather(*others) == [20, 30, 40, 50, 60]
    assert calls.batches == [[1], [2, 3, 4], [5, 6]]


async def test_an_item_may_be_taken_back_before_it_is_sent() -> None:
    calls = Calls()
    coalescer = Coalescer(calls)
    first = coalescer.put(1)
    await asyncio.sleep(0)
    second, third = coalescer.put(2), coalescer.put(3)
    second.cancel()
    first.cancel()
    calls.gate.release()
    calls.gate.release()
    assert await third == 30
    assert calls.batches == [[1], [3]]


async def test_a_failure_comes_to_each_as_its_own() -> None:
    calls = Calls()
    calls.error = BrokerUnavailable("gone", reason="unreachable")
    coalescer = Coalescer(calls)
    coalescer.post(0)
    futures = [coalescer.put(item) for item in (1, 2)]
    calls.gate.release()
    errors = await asyncio.gather(*futures, return_exceptions=True)
    assert all(isinstance(error, BrokerUnavailable) and error.reason == "unreachable" for error in errors)
    assert errors[0] is not errors[1]
    calls.error = None
    calls.gate.release()
    assert await coalescer.put(4) == 40


async def test_an_error_of_ours_is_not_swallowed() -> None:
    calls = Calls()
    calls.error = ZeroDivisionError()
    coalescer = Coalescer(calls)
    future = coalescer.put(1)
    calls.gate.release()
    with pytest.raises(ZeroDivisionError):
        await future


async def test_flush_waits_for_all() -> None:
    calls = Calls()
    coalescer = Coalescer(calls, limit=1)
    for item in range(3):
        coalescer.post(item)
        calls.gate.release()
    await coalescer.flush()
    assert calls.batches == [[0], [1], [2]]


async def test_whoever_waits_for_what_is_given_up_is_told_why() -> None:
    calls = Calls()
    coalescer = Coalescer(calls, limit=1)
    futures = [coalescer.put(item) for item in (1, 2)]
    await asyncio.sleep(0)
    await coalescer.close(BrokerUnavailable("closed", reason="closed"))
    errors = await asyncio.gather(*futures, return_exceptions=True)
    assert all(isinstance(error, BrokerUnavailable) for error in errors)
    assert calls.batches == [[1]]


async def test_whoever_sends_is_told_at_once() -> None:
    calls = Calls()
    coalescer = Coalescer(calls)
    told: list[int | BaseException] = []
    coalescer.send(1, lambda: False, told.append)
    coalescer.send(2, lambda: True, told.append)  # taken back
    calls.gate.release()
    await coalescer.flush()
    assert told == [10]
    calls.error = BrokerUnavailable("gone")
    calls.gate.release()
    coalescer.send(3, lambda: False, told.append)
    await coalescer.flush()
    assert isinstance(told[1], BrokerUnavailable)


async def test_what_comes_after_the_close_is_given_up_too() -> None:
    calls = Calls()
    coalescer = Coalescer(calls)
    await coalescer.close(BrokerUnavailable("closed", reason="closed"))
    with pytest.raises(BrokerUnavailable):
        await coalescer.put(1)
    coalescer.post(2)
    assert calls.batches == []
