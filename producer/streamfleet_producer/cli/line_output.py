"""Lines that go out: JSON, one document a line, to standard output or into a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from streamfleet_common.errors import InvalidRequest

CHUNK_BYTES = 1024 * 1024


class LineOutput:
    """Where answers go, in order. A file that has some already is gone on with, if that is wanted.

    Raises:
        InvalidRequest: the file holds something and is not to be gone on with, or cannot be opened.
    """

    def __init__(self, path: Path | None, *, resume: bool = False) -> None:
        self.path = path
        self.before = 0
        """Lines that were there already."""
        self.written = 0
        """Lines that this run has added."""
        if path is None:
            if resume:
                raise InvalidRequest("--resume goes on with a file: name it with --output")
            self._file: IO[bytes] | None = None
            return
        try:
            if not resume and path.is_file() and path.stat().st_size:
                raise InvalidRequest(
                    f"{path} is there already: go on with it (--resume), or name another file"
                )
            self._file = path.open("r+b" if resume and path.exists() else "w+b" if resume else "wb")
            if resume:
                self.before = _whole_lines(self._file)
        except OSError as error:
            raise InvalidRequest(f"{path} cannot be written: {error.strerror or error}") from None

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        """Add a line for each, and see to it that they are out."""
        text = "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
        if self._file is None:
            sys.stdout.write(text)
            sys.stdout.flush()
        else:
            self._file.write(text.encode("utf-8", "replace"))
            self._file.flush()
        self.written += len(records)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _whole_lines(file: IO[bytes]) -> int:
    """Count a file's lines, and leave it at the end of the last whole one: nothing after it counts."""
    count = end = at = 0
    while data := file.read(CHUNK_BYTES):
        lines = data.count(b"\n")
        if lines:
            count, end = count + lines, at + data.rindex(b"\n") + 1
        at += len(data)
    file.truncate(end)
    file.seek(end)
    return count
