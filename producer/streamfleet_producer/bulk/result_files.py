"""The output file and the error file of a job: the truth about what has been answered.

Whole lines are appended, each with one write, so that what a killed process wrote is there. A machine that
loses power may lose what came after the last sync, and leave a torn line: whoever goes on cuts the files
behind their last good line, and asks about the rest again. A line is in one of the two files, once.
"""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import IO, Any, Self

from pydantic_core import from_json

from streamfleet_common.errors import Conflict, InvalidRequest
from streamfleet_producer.bulk.answered import Answered, id_digest, line_digest

_HEADS = (b'{"custom_id":', b'{"id":"batch_req_')
"""How a line begins, in each of the forms."""


class ResultFiles:
    """Two files open to be added to, by nobody else at the same time.

    Raises, when opened:
        Conflict: another process writes them.
        InvalidRequest: a file holds something else than a job's lines, or cannot be written.
    """

    def __init__(self, output: IO[bytes], errors: IO[bytes]) -> None:
        self._output = output
        self._errors = errors
        self.answered = Answered()
        self.completed = 0
        self.failed = 0
        self._unsynced = False

    @classmethod
    def open(cls, output: Path, errors: Path) -> Self:
        """Open both, made if they are not there, and read what they have."""
        files: list[IO[bytes]] = []
        try:
            files.append(_locked(output))
            files.append(_locked(errors))
            made = cls(*files)
            made.completed = _take_in(files[0], output, made.answered)
            made.failed = _take_in(files[1], errors, made.answered)
        except BaseException:
            for file in files:
                file.close()
            raise
        return made

    def answer(self, line: bytes) -> None:
        """Add a line to the output."""
        self._append(self._output, line)
        self.completed += 1

    def refuse(self, line: bytes) -> None:
        """Add a line to the errors."""
        self._append(self._errors, line)
        self.failed += 1

    def sync(self) -> None:
        """See to it that all is on the disk; may run on a thread."""
        if self._unsynced:
            self._unsynced = False
            os.fsync(self._output.fileno())
            os.fsync(self._errors.fileno())

    def close(self) -> None:
        """Sync, and let others write."""
        self.sync()
        self._output.close()
        self._errors.close()

    def _append(self, file: IO[bytes], line: bytes) -> None:
        begin = file.tell()
        self._unsynced = True
        try:
            while line:  # a disk that fills up takes a part; the rest then raises
                line = line[file.write(line) :]
        except OSError:
            # Whoever reads the file finds whole lines, and so does what may still be written behind them.
            file.truncate(begin)
            file.seek(begin)
            raise


def encoded(line: dict[str, Any]) -> bytes:
    """A line of JSON, with its end.

    Raises:
        ValueError: there is a number in it that JSON has not, or half a character.
    """
    return json.dumps(line, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode() + b"\n"


def create(path: Path) -> None:
    """Make an empty file for a job's lines.

    Raises:
        InvalidRequest: it holds something already, or cannot be made.
    """
    try:
        if path.exists() and (not path.is_file() or path.stat().st_size):
            raise InvalidRequest(f"{path} is there already, and not empty: name another file")
        path.touch(mode=0o600)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from None


def _locked(path: Path) -> IO[bytes]:
    try:
        number = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from None
    file = os.fdopen(number, "r+b", buffering=0)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise Conflict(f"another process is writing {path}: is the job running twice?") from None
    return file


def _take_in(file: IO[bytes], path: Path, answered: Answered) -> int:
    """Note the lines of a file, and cut it behind the last good one; gives how many there are."""
    count = end = 0
    with os.fdopen(os.dup(file.fileno()), "rb") as reader:
        for raw in reader:
            digest = _digest(raw)
            if digest is None:
                if not count and not _may_be_torn(raw):
                    raise InvalidRequest(f"{path} holds something else than a job's lines: it is left alone")
                break
            if not answered.add(digest):
                break  # nothing of ours is written twice: what follows was damaged
            count, end = count + 1, end + len(raw)
    file.truncate(end)
    file.seek(end)
    return count


def _may_be_torn(raw: bytes) -> bool:
    """Whether this may be the beginning of a line of ours, or what a lost block leaves."""
    return not raw.endswith(b"\n") and any(
        raw.startswith(head) or head.startswith(raw) for head in (*_HEADS, b"\0")
    )


def _digest(raw: bytes) -> bytes | None:
    """What stands for the line that a result is about; None if it is no whole line of ours."""
    if not raw.endswith(b"\n"):
        return None
    try:
        fields = from_json(raw)
    except ValueError:
        return None
    if not isinstance(fields, dict):
        return None
    custom_id, number = fields.get("custom_id"), fields.get("line")
    if isinstance(custom_id, str):
        return id_digest(custom_id)
    return line_digest(number) if custom_id is None and isinstance(number, int) else None
