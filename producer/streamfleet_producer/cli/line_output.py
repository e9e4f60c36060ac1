"""Lines that go out: JSON, one document a line, to standard output or into a file."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from streamfleet_common.errors import InvalidRequest

CHUNK_BYTES = 1024 * 1024


class LineOutput:
    """Where answers go, in order. A file that has some already is gone on with, if that is wanted.

    Lines that say that they failed are made anew then. The file is first written beside itself as far as it
    was, and takes its own place once that is done, or when this is closed; all that it had stays in it.

    Raises:
        InvalidRequest: the file holds something and is not to be gone on with, or cannot be opened.
    """

    def __init__(self, path: Path | None, *, resume: bool = False) -> None:
        self.path = path
        self.before = 0
        """Lines that were there already."""
        self.failed_before = 0
        """Those of them that are to be made anew."""
        self.written = 0
        """Lines that this run has made."""
        self._passed = 0  # lines of the input that have been written, or were there
        self._looked_at = 0  # lines of the old file that `kept` has told of
        self._old: IO[bytes] | None = None
        self._beside: Path | None = None
        self._file: IO[bytes] | None = None
        if path is None:
            if resume:
                raise InvalidRequest("--resume goes on with a file: name it with --output")
            return
        try:
            if not resume and path.is_file() and path.stat().st_size:
                raise InvalidRequest(
                    f"{path} is there already: go on with it (--resume), or name another file"
                )
            self._file = path.open("r+b" if resume and path.exists() else "w+b" if resume else "wb")
            if resume:
                self._go_on(path, self._file)
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be written: {error.strerror or error}") from None

    @property
    def lines(self) -> int:
        """Lines that the output has once it is closed."""
        return max(self.before, self._passed)

    def kept(self, count: int) -> list[bytes | None]:
        """What the file has for the input's next lines, to be given to `write`; None where it lacks one."""
        found: list[bytes | None] = []
        for _ in range(min(count, self.before - self._looked_at)):
            line = b"" if self._old is None else self._old.readline()
            found.append(None if _has_failed(line) else line)
        self._looked_at += len(found)
        return found + [None] * (count - len(found))

    def write(self, lines: Sequence[bytes | dict[str, Any]]) -> None:
        """Add lines, made or kept, in the order of the input, and see to it that they are out."""
        data = b"".join(line if isinstance(line, bytes) else _encoded(line) for line in lines)
        if self._file is None:
            sys.stdout.write(data.decode())
            sys.stdout.flush()
        else:
            with self._all_or_nothing():
                self._file.write(data)
                self._file.flush()
        self.written += sum(not isinstance(line, bytes) for line in lines)
        self._passed += len(lines)
        if self._passed >= self.before:
            self._take_place()

    def close(self) -> None:
        """Leave a file that has all it had before, and what was made."""
        if self._old is not None and self._file is not None:
            with self._all_or_nothing():
                self._old.seek(0)
                for _ in range(self._passed):
                    self._old.readline()
                shutil.copyfileobj(self._old, self._file, CHUNK_BYTES)
                self._file.flush()
        self._take_place()
        if self._file is not None:
            self._file.close()

    def _go_on(self, path: Path, file: IO[bytes]) -> None:
        self.before, self.failed_before = _count(file)
        if not self.failed_before:
            return
        file.seek(0)
        # Links stay what they are: the file that they lead to is replaced.
        number, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.resolve().parent)
        self._old, self._file, self._beside = file, os.fdopen(number, "wb"), Path(name)
        shutil.copymode(path, name)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Leave the old file alone if what shall take its place cannot be written as a whole."""
        try:
            yield
        except BaseException:
            if self._beside is not None:
                self._beside.unlink(missing_ok=True)
            self._old = self._beside = None
            raise

    def _take_place(self) -> None:
        if self._old is None or self._beside is None or self.path is None:
            return
        self._old.close()
        self._beside.replace(self.path.resolve())
        self._old = self._beside = None


def _encoded(record: dict[str, Any]) -> bytes:
    return (json.dumps(record, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def _count(file: IO[bytes]) -> tuple[int, int]:
    """Count a file's lines and those that failed, and leave it at the end of the last whole one.

    Nothing after that counts.
    """
    count = failed = end = 0
    for line in file:
        if not line.endswith(b"\n"):
            break
        count, failed, end = count + 1, failed + _has_failed(line), end + len(line)
    file.seek(end)
    file.truncate()
    return count, failed


def _has_failed(line: bytes) -> bool:
    """Whether a line of ours has an `error` in the place of an answer."""
    if b'"error": {"code": ' not in line:
        return False
    try:
        error = json.loads(line).get("error")
    except (ValueError, RecursionError, AttributeError):
        return False
    return is_failure(error)


def is_failure(error: object) -> bool:
    """Whether this is what a line of ours that failed has as its `error`."""
    return isinstance(error, dict) and set(error) == {"code", "message"}
