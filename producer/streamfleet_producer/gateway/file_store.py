"""Uploaded files and the files that batches answer with: a folder, bounded and expiring.

A file is two: the content, and a small JSON beside it, whose name ends so, that says what it is. The second
is written last and removed first, so that what has none is a leftover.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Annotated, Literal

from pydantic import Field, ValidationError

from streamfleet_common.errors import InvalidRequest, RequestNotFound
from streamfleet_common.message import Message
from streamfleet_producer.gateway.refusals import BodyTooLarge

Purpose = Literal["batch", "batch_output"]
SUFFIX = ".json"
MAX_NAME_CHARS = 255
_ID = re.compile(r"file-[0-9a-f]{32}")
_COPY_BYTES = 1024 * 1024


class StoredFile(Message):
    """What a file is. Times are Unix times in seconds."""

    id: Annotated[str, Field(pattern=r"^file-[0-9a-f]{32}$")]
    filename: Annotated[str, Field(max_length=MAX_NAME_CHARS)]
    purpose: Purpose
    created_at: int
    expires_at: int


class FileStore:
    """The files of all tenants, each of whom sees its own. Blocking: from an event loop call it on a thread.

    Several gateways may share the folder. `max_files_bytes` bounds all files together, as they are when one
    is added; what batches write later comes on top until then.

    Args:
        folder: where they lie, in a folder for each tenant; made if it is not there.
        max_file_bytes: of one uploaded file.
        max_files_bytes: of all.
        ttl_s: how long a file is kept; seconds.
        clock: Unix time in seconds.

    Raises:
        InvalidRequest: the folder cannot be made.
    """

    def __init__(
        self,
        folder: Path,
        *,
        max_file_bytes: int,
        max_files_bytes: int,
        ttl_s: float,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = folder.absolute()
        self.max_file_bytes = max_file_bytes
        self._max_files_bytes = max_files_bytes
        self.ttl_s = ttl_s
        self._clock = clock
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidRequest(f"files_dir {folder} cannot be made: {error.strerror}") from None

    def add(self, tenant: str, source: IO[bytes], filename: str, *, ttl_s: float | None = None) -> StoredFile:
        """Keep an uploaded file, for batches: for `ttl_s` seconds, but no longer than any.

        Raises:
            BodyTooLarge: it is over the bound of one file, or does not fit beside the others.
        """
        room = self._max_files_bytes - self.total_bytes()
        file = self._new("batch", filename, self.ttl_s if ttl_s is None else min(ttl_s, self.ttl_s))
        path = self._path(tenant, file.id)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        try:
            with path.open("xb") as target:
                size = 0
                while chunk := source.read(_COPY_BYTES):
                    size += len(chunk)
                    if size > self.max_file_bytes:
                        raise BodyTooLarge(
                            f"the file is over max_file_bytes ({self.max_file_bytes}): split it",
                            limit=self.max_file_bytes,
                        )
                    if size > room:
                        raise BodyTooLarge(
                            f"all files together may have {self._max_files_bytes} bytes (max_files_bytes), "
                            "and that is reached: delete some",
                            limit=self._max_files_bytes,
                        )
                    target.write(chunk)
            self._describe(tenant, file)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return file

    def reserve(self, tenant: str, filename: str) -> tuple[StoredFile, Path]:
        """A file that a batch will write: what it is, and where. It is not there yet."""
        file = self._new("batch_output", filename, self.ttl_s)
        path = self._path(tenant, file.id)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self._describe(tenant, file)
        return file, path

    def get(self, tenant: str, id: str) -> tuple[StoredFile, Path]:  # noqa: A002 (the word of the whole API)
        """What a file is, and where its content lies.

        Raises:
            RequestNotFound: the tenant has no such file, or it has expired.
        """
        path = self.path(tenant, id)
        file = self._read(path.with_name(path.name + SUFFIX))
        if file is None or not path.exists() or file.expires_at <= self._clock():
            raise _not_found()
        return file, path

    def path(self, tenant: str, id: str) -> Path:  # noqa: A002
        """Where the content of a file lies, or has lain.

        Raises:
            RequestNotFound: no file can have this id.
        """
        if not _ID.fullmatch(id):
            raise _not_found()
        return self._path(tenant, id)

    def list(self, tenant: str) -> list[tuple[StoredFile, Path]]:
        """All files of a tenant, the newest first."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(self._folder(tenant)):
                if entry.name.endswith(SUFFIX):
                    with contextlib.suppress(RequestNotFound):
                        found.append(self.get(tenant, entry.name.removesuffix(SUFFIX)))
        return sorted(found, key=lambda pair: (pair[0].created_at, pair[0].id), reverse=True)

    def delete(self, tenant: str, id: str) -> None:  # noqa: A002
        """Remove a file. Raises as `get`."""
        _, path = self.get(tenant, id)
        self._remove(path)

    def hold(self, tenant: str, id: str, for_s: float) -> None:  # noqa: A002
        """Keep a file for so many seconds from now on at least, since a batch reads it. Raises as `get`."""
        file, _ = self.get(tenant, id)
        until = int(self._clock() + for_s)
        if file.expires_at < until:
            self._describe(tenant, file.changed({"expires_at": until}))

    def total_bytes(self) -> int:
        """Of the contents of all files."""
        total = 0
        for entry in self._entries():
            if not entry.name.endswith(SUFFIX):
                with contextlib.suppress(FileNotFoundError):  # another gateway may have just removed it
                    total += entry.stat().st_size
        return total

    def remove_expired(self) -> int:
        """Remove what has expired, and leftovers that are as old. Gives how many files."""
        now, removed = self._clock(), 0
        for entry in self._entries():
            path = Path(entry.path)
            with contextlib.suppress(FileNotFoundError):
                if entry.name.endswith(SUFFIX):
                    file = self._read(path)
                    old = file.expires_at if file is not None else entry.stat().st_mtime + self.ttl_s
                    path = path.with_name(entry.name.removesuffix(SUFFIX))
                elif path.with_name(entry.name + SUFFIX).exists():
                    continue
                else:
                    old = entry.stat().st_mtime + self.ttl_s
                if old <= now:
                    self._remove(path)
                    removed += 1
        return removed

    # --- parts

    def _new(self, purpose: Purpose, filename: str, ttl_s: float) -> StoredFile:
        now = self._clock()
        return StoredFile(
            id=f"file-{secrets.token_hex(16)}",
            filename=filename[:MAX_NAME_CHARS].encode("utf-8", "replace").decode(),
            purpose=purpose,
            created_at=int(now),
            expires_at=int(now + ttl_s),
        )

    def _path(self, tenant: str, id: str) -> Path:  # noqa: A002
        return self._folder(tenant) / id

    def _folder(self, tenant: str) -> Path:
        # A tenant's name may be `.` or `..`, which are no folders of its own. No name has a `~`.
        return self.folder / (tenant if tenant.strip(".") else f"{tenant}~")

    def _describe(self, tenant: str, file: StoredFile) -> None:
        path = self._path(tenant, file.id)
        new = path.with_name(f".{path.name}")
        new.write_text(file.model_dump_json())
        new.replace(path.with_name(path.name + SUFFIX))

    def _read(self, path: Path) -> StoredFile | None:
        try:
            return StoredFile.model_validate_json(path.read_bytes())
        except (OSError, ValidationError):
            return None

    def _remove(self, path: Path) -> None:
        path.with_name(path.name + SUFFIX).unlink(missing_ok=True)
        path.unlink(missing_ok=True)

    def _entries(self) -> Iterator[os.DirEntry[str]]:
        for tenant in os.scandir(self.folder):
            if tenant.is_dir(follow_symlinks=False):
                yield from (
                    entry for entry in os.scandir(tenant.path) if entry.is_file(follow_symlinks=False)
                )


def _not_found() -> RequestNotFound:
    return RequestNotFound("no such file: it was never uploaded, was deleted, or has expired")
