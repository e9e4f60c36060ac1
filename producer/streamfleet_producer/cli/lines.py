"""Lines that come in: of a file, of standard input, or as arguments."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from streamfleet_common.errors import InvalidRequest

CHUNK_BYTES = 64 * 1024
MAX_LINE_BYTES = 1024 * 1024
"""Longer ones fit no request by far; they are told as faults, and not kept."""
_SUFFIXES = {".txt", ".jsonl", ".json", ".csv", ".tsv", ".md"}


@dataclass(frozen=True, slots=True)
class Line:
    """A line without its end."""

    text: str
    fault: str = ""
    """Why it is none that could be asked about."""


class Lines:
    """The lines of one file or of standard input, as they come; or those given as arguments.

    Whatever waits for the next ones holds up nothing else on the event loop. Bytes that are no UTF-8 become
    U+FFFD.
    """

    def __init__(self, given: Sequence[str], path: Path | None = None) -> None:
        self._given = given
        self._path = path

    @classmethod
    def of(cls, arguments: Sequence[str], file: Path | None = None) -> Lines:
        """What arguments mean: `-` is standard input, one that names a file is it, others are the lines.

        Raises:
            InvalidRequest: there are none, or a file is not there; or there are some beside a `file`.
        """
        if file is not None:
            if arguments:
                raise InvalidRequest("give either --file, or texts or a file as arguments")
            return cls((), file)
        if not arguments:
            raise InvalidRequest("nothing was given: name a file, give texts, or `-` for standard input")
        if len(arguments) > 1:
            return cls(arguments)
        (argument,) = arguments
        if argument == "-":
            return cls((), Path("-"))
        if not argument.strip():
            raise InvalidRequest("the text is empty: there is nothing to ask about")
        path = Path(argument)
        try:
            is_there, is_folder = path.exists(), path.is_dir()
        except (OSError, ValueError):  # too long for a name, or no name at all
            return cls(arguments)
        if is_folder:
            raise InvalidRequest(f"{argument} is a folder: name a file")
        if not is_there and path.suffix in _SUFFIXES and not any(map(str.isspace, argument)):
            raise InvalidRequest(f"there is no file {argument}: a text that looks like one goes through `-`")
        return cls((), path) if is_there else cls(arguments)

    def count(self) -> int | None:
        """How many there are; None if that cannot be told before they come. Raises as `blocks`."""
        if self._path is None:
            return len(self._given)
        if not self._path.is_file():
            return None
        count, last = 0, b"\n"
        with _opened(self._path) as file:
            while data := file.read(CHUNK_BYTES):
                count, last = count + data.count(b"\n"), data[-1:]
        return count + (last != b"\n")

    async def blocks(self, most: int) -> AsyncIterator[list[Line]]:
        """What is there at once, up to `most` lines at a time.

        Raises:
            InvalidRequest: the file cannot be read.
        """
        if self._path is None:
            for start in range(0, len(self._given), most):
                yield [Line(text) for text in self._given[start : start + most]]
        elif str(self._path) == "-":
            async for block in _blocks(sys.stdin.buffer, most):
                yield block
        else:
            with _opened(self._path) as file:
                async for block in _blocks(file, most):
                    yield block


def _opened(path: Path) -> IO[bytes]:
    try:
        return path.open("rb", buffering=0)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None


async def _blocks(file: IO[bytes], most: int) -> AsyncIterator[list[Line]]:
    unread, is_skipping, is_first = b"", False, True
    async for data in _chunks(file):
        *whole, unread = (unread + data).split(b"\n")
        lines = []
        for raw in whole:
            if is_skipping:
                is_skipping = False  # the end of one that was told as too long
                continue
            lines.append(_line(raw, is_first=is_first))
            is_first = False
        if is_skipping or len(unread) > MAX_LINE_BYTES:
            if not is_skipping:
                lines.append(_line(unread, is_first=is_first))
            is_skipping, is_first, unread = True, False, b""
        for start in range(0, len(lines), most):
            yield lines[start : start + most]
    if unread and not is_skipping:
        yield [_line(unread, is_first=is_first)]


def _line(raw: bytes, *, is_first: bool) -> Line:
    if len(raw) > MAX_LINE_BYTES:
        return Line("", f"the line is over {MAX_LINE_BYTES} bytes")
    text = raw.decode("utf-8", "replace").removesuffix("\r")
    return Line(text.removeprefix("\ufeff") if is_first else text)


async def _chunks(file: IO[bytes]) -> AsyncIterator[bytes]:
    try:
        number = file.fileno()
    except io.UnsupportedOperation:
        while data := file.read(CHUNK_BYTES):
            yield data
        return
    while True:
        await _readable(number)
        data = os.read(number, CHUNK_BYTES)
        if not data:
            return
        yield data


async def _readable(number: int) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        loop.remove_reader(number)
        if not ready.done():
            ready.set_result(None)

    try:
        loop.add_reader(number, wake)
    except OSError:
        return  # a file on a disk, which never keeps anybody waiting
    try:
        await ready
    finally:
        loop.remove_reader(number)
