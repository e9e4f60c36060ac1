"""The index of shared beginnings, against a plain dictionary of whole prefixes."""

import hashlib
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streamfleet_worker.engine.prefix_cache import BLOCK, Block, PrefixCache, chain


@dataclass(frozen=True)
class Values:
    name: str
    bytes: int = 10


def tokens(text: str, rest: int = 1) -> tuple[int, ...]:
    """A block for each letter, and `rest` tokens more."""
    return tuple(ord(letter) for letter in text for _ in range(BLOCK)) + (0,) * rest


def filled(cache: PrefixCache, text: str) -> int:
    return cache.insert(tokens(text), 0, [Values(text[: i + 1]) for i in range(len(text))])


def found(cache: PrefixCache, text: str, rest: int = 1) -> str:
    """What a prompt gets, by the name of its last block."""
    blocks = cache.match(tokens(text, rest))
    cache.release(blocks)
    assert [block.values.name for block in blocks] == [text[: i + 1] for i in range(len(blocks))]
    return text[: len(blocks)]


def test_a_digest_tells_the_tokens_of_its_block_and_of_all_before_it() -> None:
    packed = b"".join(token.to_bytes(4, "little") for token in range(2 * BLOCK))
    first = hashlib.blake2b(packed[: 4 * BLOCK], digest_size=32).digest()
    second = hashlib.blake2b(first + packed[4 * BLOCK :], digest_size=32).digest()
    assert chain(range(3 * BLOCK - 1)) == (first, second)
    assert chain(range(BLOCK - 1)) == ()
    assert chain((*range(1, BLOCK), 0)) != (first,)


def test_the_longest_run_of_blocks_from_the_first_is_found() -> None:
    cache = PrefixCache(1000)
    assert filled(cache, "abc") == 3
    assert found(cache, "abcd") == "abc"
    assert found(cache, "abxc") == "ab"
    assert found(cache, "bc") == ""
    assert (len(cache), cache.bytes) == (3, 30)


def test_a_token_at_least_is_left_to_be_computed() -> None:
    cache = PrefixCache(1000)
    filled(cache, "ab")
    assert found(cache, "ab", rest=0) == "a"
    assert found(cache, "ab", rest=1) == "ab"


def test_a_limit_holds_for_prompts_whose_end_must_be_computed() -> None:
    cache = PrefixCache(1000)
    filled(cache, "abc")
    limits = (0, BLOCK - 1, BLOCK, 3 * BLOCK)
    assert [len(cache.match(tokens("abc"), limit)) for limit in limits] == [0, 0, 1, 3]
    assert len(cache.match(tokens("abc", rest=0), limit=100 * BLOCK)) == 2


def test_the_hit_ratio_counts_tokens() -> None:
    cache = PrefixCache(1000)
    filled(cache, "ab")
    found(cache, "abc", rest=5)
    found(cache, "x", rest=2)
    assert (cache.tokens_asked, cache.tokens_found) == (3 * BLOCK + 5 + BLOCK + 2, 2 * BLOCK)


def test_full_it_gives_up_the_leaf_used_longest_ago() -> None:
    cache = PrefixCache(50)
    filled(cache, "abc")
    filled(cache, "xy")
    found(cache, "abc")
    filled(cache, "m")
    assert (found(cache, "xy"), found(cache, "abc"), found(cache, "m")) == ("x", "abc", "m")
    # Used in the order x, abc, m: x goes first, then the leaves c and b of the chain.
    filled(cache, "n")
    assert (found(cache, "x"), cache.bytes) == ("", 50)
    filled(cache, "op")
    assert [found(cache, text) for text in ("abc", "m", "n", "op")] == ["a", "m", "n", "op"]


def test_what_is_pinned_stays_and_what_finds_no_room_is_not_kept() -> None:
    cache = PrefixCache(30)
    filled(cache, "ab")
    blocks = cache.match(tokens("ab"))
    assert filled(cache, "xyz") == 1
    assert (found(cache, "xyz"), cache.bytes) == ("x", 30)
    cache.clear()
    assert (len(cache), cache.bytes) == (2, 20)
    cache.release(blocks)
    assert filled(cache, "xyz") == 3
    assert found(cache, "ab") == ""


def test_a_chain_longer_than_the_cache_never_eats_its_own_beginning() -> None:
    cache = PrefixCache(30)
    for first in range(5):
        cache.insert(tokens("abcde"), first, [Values("abcde"[: first + 1])])
    assert found(cache, "abcde") == "abc"


def test_blocks_without_their_parents_are_of_no_use() -> None:
    cache = PrefixCache(1000)
    assert cache.insert(tokens("ab"), 1, [Values("ab")]) == 0
    filled(cache, "a")
    assert cache.insert(tokens("ab"), 1, [Values("ab")]) == 1
    assert found(cache, "ab") == "ab"


def test_what_is_there_stays_as_it_is() -> None:
    cache = PrefixCache(1000)
    filled(cache, "a")
    assert cache.insert(tokens("ab"), 0, [Values("other", 99), Values("ab")]) == 1
    assert (found(cache, "ab"), cache.bytes) == ("ab", 20)


def test_of_no_bytes_it_is_off() -> None:
    cache = PrefixCache(0)
    assert filled(cache, "ab") == 0
    assert (found(cache, "ab"), len(cache), cache.tokens_asked) == ("", 0, 0)


def test_misuse_is_told() -> None:
    cache = PrefixCache(1000)
    filled(cache, "a")
    blocks = cache.match(tokens("a"))
    cache.release(blocks)
    with pytest.raises(ValueError, match="more often"):
        cache.release(blocks)
    with pytest.raises(ValueError, match="whole blocks"):
        cache.insert(tokens("a", rest=BLOCK - 1), 1, [Values("?")])


texts = st.text("ab", min_size=1, max_size=5)


class AgainstADictionary(RuleBasedStateMachine):
    """The same calls to the cache and to a dictionary from a whole prefix (a text) to its size and last use.

    The dictionary's victim is found by looking at all: unpinned, without children, used longest ago; in one
    use a parent counts as used after its children.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = PrefixCache(60)
        self.sizes: dict[str, int] = {}
        self.used: dict[str, int] = {}
        self.held: list[tuple[str, list[Block]]] = []
        self.clock = 0

    def use(self, text: str) -> None:
        for end in range(len(text), 0, -1):
            self.clock += 1
            self.used[text[:end]] = self.clock

    def pinned(self, text: str) -> bool:
        return any(held.startswith(text) for held, _ in self.held)

    def room_for(self, size: int, keep: str) -> bool:
        while sum(self.sizes.values()) + size > 60:
            leaves = [
                text
                for text in self.sizes
                if not self.pinned(text)
                and not keep.startswith(text)
                and not any(other.startswith(text) and other != text for other in self.sizes)
            ]
            if not leaves:
                return False
            del self.sizes[min(leaves, key=lambda text: self.used[text])]
        return True

    @rule(text=texts, first=st.integers(0, 3), size=st.integers(1, 25))
    def insert(self, text: str, first: int, size: int) -> None:
        first = min(first, len(text) - 1)
        values = [Values(text[: end + 1], size) for end in range(first, len(text))]
        added = self.cache.insert(tokens(text), first, values)
        expected, kept = 0, text[:first]
        if all(text[:end] in self.sizes for end in range(1, first + 1)):
            for end in range(first + 1, len(text) + 1):
                if text[:end] not in self.sizes:
                    if not self.room_for(size, kept):
                        break
                    self.sizes[text[:end]] = size
                    expected += 1
                kept = text[:end]
            self.use(kept)
        assert added == expected

    @rule(text=texts, rest=st.integers(0, 1))
    def match(self, text: str, rest: int) -> None:
        longest = ""
        while len(longest) < len(text) - (not rest) and text[: len(longest) + 1] in self.sizes:
            longest = text[: len(longest) + 1]
        blocks = self.cache.match(tokens(text, rest))
        assert [block.values.name for block in blocks] == [longest[: i + 1] for i in range(len(longest))]
        self.held.append((longest, blocks))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        text, blocks = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.cache.release(blocks)
        self.use(text)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.sizes = {text: size for text, size in self.sizes.items() if self.pinned(text)}

    @invariant()
    def same(self) -> None:
        assert len(self.cache) == len(self.sizes)
        assert self.cache.bytes == sum(self.sizes.values()) <= 60
        assert all(self.cache.held(chain(tokens(text))) == len(text) for text in self.sizes)


TestAgainstADictionary = AgainstADictionary.TestCase
TestAgainstADictionary.settings = settings(
    max_examples=150, stateful_step_count=40, deadline=None, derandomize=True
)
