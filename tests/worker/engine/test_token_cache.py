"""The cache of tokens: what it finds, what it lets go, and that threads may share it."""

import threading
from collections import Counter

from streamfleet_worker.engine.token_cache import OVERHEAD, TokenCache


class Spelling:
    """A tokenizer whose tokens are characters; it counts what it is asked for."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()

    def __call__(self, text: str) -> list[int]:
        self.asked[text] += 1
        return [ord(character) for character in text]


def test_a_text_is_turned_into_tokens_once() -> None:
    spelling = Spelling()
    cache = TokenCache(spelling, 10_000)
    assert [cache.encode(text) for text in ("ab", "", "ab", "ab")] == [(97, 98), (), (97, 98), (97, 98)]
    assert spelling.asked == {"ab": 1, "": 1}
    assert cache.counts == {"tokenization_cache_queries": 4, "tokenization_cache_hits": 2}


def test_what_was_used_longest_ago_goes_first_and_the_bound_holds() -> None:
    spelling = Spelling()
    entry = OVERHEAD + 8 * 8
    cache = TokenCache(spelling, 10 * entry)
    for number in range(10):
        cache.encode(f"text {number:3}")
    assert cache.bytes == 10 * entry
    cache.encode("text   0")
    cache.encode("text  10")
    assert cache.bytes == 10 * entry
    for number in (0, 10, 1):
        cache.encode(f"text {number:3}")
    # The first was used again, so the second had to go.
    assert [spelling.asked[f"text {number:3}"] for number in (0, 1, 2, 10)] == [1, 2, 1, 1]


def test_one_large_text_does_not_push_all_others_out() -> None:
    spelling = Spelling()
    cache = TokenCache(spelling, 8 * (OVERHEAD + 8 * 100))
    for text in ("a" * 100, "b" * 101, "b" * 101, "a" * 100):
        cache.encode(text)
    assert spelling.asked == {"a" * 100: 1, "b" * 101: 2}
    assert cache.bytes == OVERHEAD + 8 * 100


def test_none_are_kept_without_room() -> None:
    spelling = Spelling()
    cache = TokenCache(spelling)
    assert [cache.encode("ab"), cache.encode("ab")] == [(97, 98), (97, 98)]
    assert spelling.asked == {"ab": 2}
    assert cache.bytes == 0
    assert cache.counts == {"tokenization_cache_queries": 0, "tokenization_cache_hits": 0}


def test_threads_share_it() -> None:
    cache = TokenCache(lambda text: [len(text)], 10 * (OVERHEAD + 100))
    wrong: list[str] = []
    start = threading.Barrier(4)

    def ask(seed: int) -> None:
        start.wait()
        for step in range(2000):
            text = "x" * ((step * (seed + 3)) % 23)
            if cache.encode(text) != (len(text),):
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong
    counts = cache.counts
    assert counts["tokenization_cache_queries"] == 8000
    assert 0 < counts["tokenization_cache_hits"] < 8000
    assert cache.bytes <= 10 * (OVERHEAD + 100)
