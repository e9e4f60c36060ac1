"""The file of requests: counted before a job begins, then read line by line, never held as a whole."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from streamfleet_common.errors import InvalidRequest

CHUNK_BYTES = 256 * 1024
MAX_LINES = 1_000_000
MAX_BYTES = 1024 * 1024 * 1024
MAX_LINE_BYTES = 1024 * 1024
"""Four times what a request may have on the wire, since JSON escapes."""
_BLANK = b" \t\r\n\f\v"
_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """A line that is not blank."""

    number: int
    """Counted from 1, blank lines too."""
    data: bytes | None
    """Without the line's end; None if it is over `MAX_LINE_BYTES`."""


class InputFile:
    """A JSONL file. Blank lines are passed over."""

    def __init__(self, path: Path, *, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> None:
        self.path = path
        self._max_lines = max_lines
        self._max_bytes = max_bytes

    def count(self) -> int:
        """How many lines it has that are not blank.

        Raises:
            InvalidRequest: it cannot be read, is empty, or has more lines or bytes than are taken.
        """
        with self._opened() as file:
            size = os.fstat(file.fileno()).st_size
            if size > self._max_bytes:
                raise InvalidRequest(
                    f"the input has {size} bytes, at most {self._max_bytes} are taken: split it",
                    bytes=size,
                    limit=self._max_bytes,
                )
            count = 0
            for _ in _lines(_chunks(file)):
                count += 1
                if count > self._max_lines:
                    raise InvalidRequest(
                        f"the input has more than {self._max_lines} lines: split it", limit=self._max_lines
                    )
        if not count:
            raise InvalidRequest("the input has no lines: there is nothing to ask")
        return count

    async def lines(self) -> AsyncIterator[Line]:
        """The lines in their order. The disk is waited for on a thread.

        Raises:
            InvalidRequest: it cannot be read.
        """
        with self._opened() as file:
            splitter = _Splitter()
            while data := await asyncio.to_thread(file.read, CHUNK_BYTES):
                for line in splitter.feed(data):
                    yield line
            for line in splitter.end():
                yield line

    def _opened(self) -> IO[bytes]:
        try:
            if not self.path.is_file():
                raise InvalidRequest(f"there is no file {self.path}")
            return self.path.open("rb", buffering=0)
        except OSError as error:
            raise InvalidRequest(f"{self.path} cannot be read: {error.strerror}") from None


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while data := file.read(CHUNK_BYTES):
        yield data


def _lines(chunks: Iterator[bytes]) -> Iterator[Line]:
    splitter = _Splitter()
    for data in chunks:
        yield from splitter.feed(data)
    yield from splitter.end()


class _Splitter:
    """Makes lines of what comes, and keeps no more of an endless one than a line may have."""

    def __init__(self) -> None:
        self._number = 0
        self._unread = b""
        self._is_skipping = False
        """The line that is being read was too long, and has been told of."""

    def feed(self, data: bytes) -> Iterator[Line]:
        *whole, self._unread = (self._unread + data).split(b"\n")
        for raw in whole:
            yield from self._line(raw)
        if len(self._unread) > MAX_LINE_BYTES:
            if not self._is_skipping:
                yield Line(self._number + 1, None)
            self._is_skipping, self._unread = True, b""

    def end(self) -> Iterator[Line]:
        yield from self._line(self._unread)

    def _line(self, raw: bytes) -> Iterator[Line]:
        self._number += 1
        if self._is_skipping:
            self._is_skipping = False
            return
        if self._number == 1:
            raw = raw.removeprefix(_BOM)
        if len(raw) > MAX_LINE_BYTES:
            yield Line(self._number, None)
        elif raw.strip(_BLANK):
            yield Line(self._number, raw)
