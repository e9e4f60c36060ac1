"""Which lines have been answered, and which have been read: 16 bytes a line, whatever its id."""

from __future__ import annotations

import hashlib


def id_digest(custom_id: str) -> bytes:
    """What stands for a `custom_id`; 16 bytes."""
    return hashlib.blake2b(b"i" + custom_id.encode(), digest_size=16).digest()


def line_digest(number: int) -> bytes:
    """What stands for a line that has no id of its own; 16 bytes."""
    return hashlib.blake2b(b"l%d" % number, digest_size=16).digest()


class Answered:
    """The ids of an input and of what was written before; about 100 bytes of memory for each of them."""

    def __init__(self) -> None:
        self._was_read: dict[bytes, bool] = {}
        """Whether this run has read the line; False for one that the result files have, not met yet."""

    def add(self, digest: bytes) -> bool:
        """Note what a result file has. Gives whether it was not noted before."""
        if digest in self._was_read:
            return False
        self._was_read[digest] = False
        return True

    def read(self, digest: bytes) -> bool | None:
        """Note that a line was read.

        Gives True if it is to be answered, False if it was, None if this run has read it before.
        """
        known = self._was_read.get(digest)
        if known:
            return None
        self._was_read[digest] = True
        return known is None

    def __len__(self) -> int:
        return len(self._was_read)
