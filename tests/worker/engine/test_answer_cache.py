"""The answer cache: how long, how much, and what goes first."""

from __future__ import annotations

import array
import sys
import tracemalloc
from typing import Any

import pytest

from streamfleet_worker.engine.answer_cache import AnswerCache, size_of


def filled(count: int, each: int = 800, **options: Any) -> AnswerCache:
    cache = AnswerCache(**{"max_bytes": 10_000, "ttl_s": 60.0, **options})
    for key in range(count):
        cache.put(key, bytes(each), now=0.0)
    return cache


def test_it_keeps_what_was_used_last() -> None:
    cache = filled(9)
    kept = [key for key in range(9) if cache.get(key, 1.0) is not None]
    assert kept == list(range(9))
    cache.get(0, 1.0)
    cache.put(9, bytes(800), 1.0)
    assert cache.get(1, 1.0) is None, "the one that was used longest ago"
    assert cache.get(0, 1.0) == bytes(800)
    assert cache.bytes <= 10_000


def test_a_result_ends_at_its_time_and_frees_its_bytes() -> None:
    cache = filled(1)
    before = cache.bytes
    assert before > 800
    assert cache.get(0, 59.999) is not None
    assert cache.get(0, 60.0) is None
    assert cache.bytes == 0
    cache.put(0, bytes(800), 60.0)
    assert cache.get(0, 119.9) is not None
    assert cache.bytes == before


def test_being_asked_for_lengthens_no_life() -> None:
    cache = filled(1)
    for now in range(60):
        assert cache.get(0, float(now)) is not None
    assert cache.get(0, 60.0) is None


def test_the_same_again_is_counted_once() -> None:
    cache = filled(1)
    before = cache.bytes
    cache.put(0, bytes(700), 30.0)
    assert cache.bytes == before - 100
    assert cache.get(0, 89.0) == bytes(700)


def test_what_would_push_out_too_much_is_not_kept() -> None:
    cache = filled(9)
    cache.put("large", bytes(5000), 0.0)
    assert cache.get("large", 0.0) is None
    assert all(cache.get(key, 0.0) is not None for key in range(9))


def test_no_bytes_keep_nothing_and_ask_nothing() -> None:
    cache = filled(3, max_bytes=0)
    assert [cache.get(key, 0.0) for key in range(3)] == [None] * 3
    assert (cache.bytes, cache.queries, cache.hits) == (0, 0, 0)


def test_it_counts_what_it_was_asked() -> None:
    cache = filled(2)
    for key, now in ((0, 1.0), (1, 1.0), (2, 1.0), (0, 99.0)):
        cache.get(key, now)
    assert (cache.queries, cache.hits) == (4, 2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: array.array("f", range(5000)),
        lambda: "x" * 20_000,
        lambda: b"x" * 20_000,
        lambda: [{"label": f"number {n}", "score": n / 7} for n in range(300)],
        lambda: (tuple({"nested": [str(n) * 20, n / 7]} for n in range(200)),),
    ],
    ids=["array", "text", "bytes", "objects", "nested"],
)
def test_sizes_are_about_right(make: Any) -> None:
    """Beside what Python itself has taken for it."""
    kept = [make() for _ in range(4)]  # or it would be made of what Python has kept of others like it
    tracemalloc.start()
    try:
        value = make()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    del kept
    assert taken >= sys.getsizeof(value) * 0.9
    assert taken / 2 < size_of(value) < taken * 2


def test_it_stays_within_its_bytes_whatever_comes() -> None:
    cache = AnswerCache(max_bytes=50_000, ttl_s=1.0)
    for number in range(20_000):
        cache.put(number % 777, "x" * (number * 37 % 4000), number / 1000)
        cache.get(number % 555, number / 1000)
        assert 0 <= cache.bytes <= 50_000
    assert cache.bytes == sum(kept.bytes for kept in cache._kept.values())
