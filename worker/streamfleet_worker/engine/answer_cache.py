"""Results that may be asked for again, for a while."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

OVERHEAD = 200
"""Bytes that an entry takes besides what it holds, about."""


@dataclass(frozen=True, slots=True)
class _Kept:
    value: Any
    bytes: int
    until: float


class AnswerCache:
    """Results of items by their scope, group and digest.

    It belongs to one engine, so to one revision of a model.

    Args:
        max_bytes: what it takes at most; the results that were used longest ago go first. 0 keeps none.
        ttl_s: how long a result is kept, in seconds on the engine's clock.
    """

    def __init__(self, max_bytes: int = 0, ttl_s: float = 3600.0) -> None:
        self._max_bytes = max_bytes
        self._ttl_s = ttl_s
        self._kept: OrderedDict[Hashable, _Kept] = OrderedDict()
        self.bytes = 0
        """Taken now, about."""
        self.queries = 0
        self.hits = 0

    def get(self, key: Hashable, now: float) -> Any:
        """The result; None if there is none."""
        if not self._max_bytes:
            return None
        self.queries += 1
        kept = self._kept.get(key)
        if kept is None:
            return None
        if now >= kept.until:
            self._drop(key)
            return None
        self.hits += 1
        self._kept.move_to_end(key)
        return kept.value

    def put(self, key: Hashable, value: Any, now: float) -> None:
        """Keep a result, if it is not too large to be worth what it would push out."""
        size = OVERHEAD + size_of(value)
        if size > self._max_bytes // 8:
            return
        if key in self._kept:
            self._drop(key)
        self._kept[key] = _Kept(value, size, now + self._ttl_s)
        self.bytes += size
        while self.bytes > self._max_bytes:
            self._drop(next(iter(self._kept)))

    def _drop(self, key: Hashable) -> None:
        self.bytes -= self._kept.pop(key).bytes


def size_of(value: Any) -> int:
    """Bytes that a result takes, about: of an array its numbers, of a JSON value its parts."""
    size = getattr(value, "nbytes", None)
    if isinstance(size, int):
        return size
    size = sys.getsizeof(value)
    if isinstance(value, dict):
        return size + sum(size_of(name) + size_of(part) for name, part in value.items())
    if isinstance(value, list | tuple):
        return size + sum(map(size_of, value))
    return size
