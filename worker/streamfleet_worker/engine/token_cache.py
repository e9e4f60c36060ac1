"""Texts that were turned into tokens, kept for when they come again."""

from __future__ import annotations

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable

OVERHEAD = 250
"""Bytes that an entry takes besides its text and tokens: two objects, and its place in a map."""

Ids = tuple[int, ...]


class TokenCache:
    """Texts to tokens, those used last at hand; safe to use from several threads.

    For queries, labels, questions and templates that come again and again. A text of 27 words takes MiniLM's
    WordPiece 70 to 80 µs on one core, and 1 µs to be found here; one of 140 words 230 to 300 µs, and 4 µs.
    What a text costs that is not found drowns in that, so it pays as soon as any come again; beside the 9 ms
    that the model takes for 27 words it is little all the same.

    Args:
        encode: a text to its tokens, control tokens apart.
        max_bytes: of texts and tokens together; what was used longest ago goes first. 0 keeps none.
    """

    def __init__(self, encode: Callable[[str], Iterable[int]], max_bytes: int = 0) -> None:
        self._encode = encode
        self._max_bytes = max_bytes
        self._kept: OrderedDict[tuple[str, str], tuple[array[int], int]] = OrderedDict()
        self._lock = threading.Lock()
        self._bytes = self._queries = self._hits = 0

    @property
    def bytes(self) -> int:
        """Taken now, about."""
        return self._bytes

    @property
    def counts(self) -> dict[str, int]:
        """Texts that were looked for, and those that were there; of a cache that keeps none, none."""
        return {"tokenization_cache_queries": self._queries, "tokenization_cache_hits": self._hits}

    def encode(self, text: str, scope: str = "") -> Ids:
        """The tokens of a text; one that came in another scope is not found."""
        if not self._max_bytes:
            return tuple(self._encode(text))
        with self._lock:
            self._queries += 1
            kept = self._kept.get((scope, text))
            if kept is not None:
                self._hits += 1
                self._kept.move_to_end((scope, text))
                return tuple(kept[0])
        # Outside the lock: it may take a while, and two threads that do it both do no harm.
        ids = tuple(self._encode(text))
        packed = array("i", ids)
        # Characters take up to four bytes each.
        size = OVERHEAD + 4 * len(text) + packed.itemsize * len(packed)
        if size <= self._max_bytes // 8:
            with self._lock:
                self._put((scope, text), packed, size)
        return ids

    def _put(self, key: tuple[str, str], ids: array[int], size: int) -> None:
        if key in self._kept:
            return
        self._kept[key] = ids, size
        self._bytes += size
        while self._bytes > self._max_bytes:
            _, (_, gone) = self._kept.popitem(last=False)
            self._bytes -= gone
