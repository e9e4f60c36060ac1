"""Keys and values of prompts' beginnings that may come again, as system prompts and examples do."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any, Protocol

BLOCK = 8
"""Tokens in a block."""

_RECENT_PROMPTS = 32
"""Prompts whose digests are remembered: those that are being computed come back with every chunk."""


class Values(Protocol):
    """What a block holds; the cache only asks how large it is."""

    @property
    def bytes(self) -> int:
        """Its size."""


@dataclass(slots=True, eq=False)
class Block:
    """Keys and values of `BLOCK` tokens, after the tokens that its parents hold."""

    digest: bytes
    values: Any
    """What `insert` was given."""
    pins: int = 0


def chain(token_ids: Iterable[int], scope: str = "") -> tuple[bytes, ...]:
    """A digest for each whole block of a prompt, which tells its tokens and all before them, and its scope.

    Each is the BLAKE2b digest (32 bytes) of its parent's and its own tokens, so that nobody can make a prompt
    that is given another's keys and values. The first one's parent is the scope.
    """
    packed = memoryview(array("I", token_ids)).cast("B")
    size = BLOCK * array("I").itemsize
    digest = blake2b(scope.encode(), digest_size=32, person=b"scope").digest() if scope else b""
    digests = []
    for start in range(0, len(packed) - size + 1, size):
        block = blake2b(digest, digest_size=32)
        block.update(packed[start : start + size])
        digest = block.digest()
        digests.append(digest)
    return tuple(digests)


class PrefixCache:
    """Blocks of prompts, found by their scope, their tokens and all tokens before them.

    Full, it gives up the block that was used longest ago, always one without children: a block is of no use
    without its parents. A pinned block stays. It copies nothing: whoever inserts gives values that nobody
    writes to, and whoever matches copies them before releasing the blocks.

    Args:
        max_bytes: of all values together; 0 turns it off.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        """Of all values in it."""
        self.tokens_asked = 0
        """Prompt tokens of all matches so far."""
        self.tokens_found = 0
        """Those of them that were here."""
        self._blocks: dict[bytes, Block] = {}
        # Unpinned ones, used longest ago first. Whoever uses a block uses its parents too, and these are put
        # here after it: so the first one has no children.
        self._idle: OrderedDict[bytes, Block] = OrderedDict()
        self.chain = lru_cache(_RECENT_PROMPTS)(chain)

    def __len__(self) -> int:
        """Blocks in it."""
        return len(self._blocks)

    def held(self, digests: Sequence[bytes]) -> int:
        """How many blocks of a chain are here, counted from its first; uses and pins none."""
        for count, digest in enumerate(digests):
            if digest not in self._blocks:
                return count
        return len(digests)

    def match(self, token_ids: tuple[int, ...], limit: int | None = None, scope: str = "") -> list[Block]:
        """The longest run of blocks that a prompt begins with, pinned until `release`.

        Args:
            token_ids: the prompt. One token of it at least is left to be computed.
            limit: so many tokens may come from here.
            scope: whose the prompt is; what others have computed is not found.
        """
        if not self.max_bytes:
            return []
        longest = len(token_ids) - 1 if limit is None else min(limit, len(token_ids) - 1)
        digests = self.chain(token_ids, scope)[: longest // BLOCK]
        blocks = [self._blocks[digest] for digest in digests[: self.held(digests)]]
        self._pin(blocks)
        self.tokens_asked += len(token_ids)
        self.tokens_found += BLOCK * len(blocks)
        return blocks

    def release(self, blocks: Sequence[Block]) -> None:
        """Take back the pins of one `match`: all of its blocks at once.

        Raises:
            ValueError: one of them is not pinned.
        """
        for block in reversed(blocks):
            if not block.pins:
                raise ValueError("a block is released more often than it was matched")
            block.pins -= 1
            if not block.pins:
                self._idle[block.digest] = block

    def insert(
        self, token_ids: tuple[int, ...], first_block_index: int, values: Sequence[Values], scope: str = ""
    ) -> int:
        """Keep values of some blocks of a prompt, one item for each from `first_block_index` on.

        Blocks that are here already stay as they are; so their values are used, but not replaced. Nothing is
        kept of blocks whose parents are not here, or for which there is no room beside what is pinned.

        Returns:
            How many blocks came in.

        Raises:
            ValueError: the prompt has not so many whole blocks.
        """
        if not self.max_bytes:
            return 0
        digests = self.chain(token_ids, scope)[: first_block_index + len(values)]
        if len(digests) < first_block_index + len(values):
            raise ValueError(f"{len(token_ids)} tokens have {len(digests)} whole blocks")
        if self.held(digests[:first_block_index]) < first_block_index:
            return 0
        path = [self._blocks[digest] for digest in digests[:first_block_index]]
        self._pin(path)
        added = 0
        for digest, value in zip(digests[first_block_index:], values, strict=True):
            block = self._blocks.get(digest)
            if block is None:
                if not self._make_room(value.bytes):
                    break
                block = self._blocks[digest] = Block(digest, value)
                self.bytes += value.bytes
                added += 1
            self._pin([block])
            path.append(block)
        self.release(path)
        return added

    def clear(self) -> None:
        """Give up everything that is not pinned."""
        for digest, block in self._idle.items():
            del self._blocks[digest]
            self.bytes -= block.values.bytes
        self._idle.clear()

    def _pin(self, blocks: Iterable[Block]) -> None:
        for block in blocks:
            self._idle.pop(block.digest, None)
            block.pins += 1

    def _make_room(self, size: int) -> bool:
        while self.bytes + size > self.max_bytes:
            if not self._idle:
                return False
            digest, block = self._idle.popitem(last=False)
            del self._blocks[digest]
            self.bytes -= block.values.bytes
        return True
