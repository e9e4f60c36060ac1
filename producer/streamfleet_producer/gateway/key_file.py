"""The file that says who may ask: tenants, hashes of their API keys, and what each may take.

It never holds a key, only SHA-256 of it. A key has 256 random bits: there is nothing to guess, so nothing
slower is needed. The base install is enough to read and write it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import fcntl
import hashlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field, ValidationError

from streamfleet_common.errors import InvalidRequest
from streamfleet_common.message import SEQUENCE, Message, Name, problems
from streamfleet_common.message import Tenant as TenantName

PREFIX = "sf-"
"""What a key begins with, so that one that leaked can be found by those who look for such."""
MAX_FILE_BYTES = 64 * 1024 * 1024

_Count = Annotated[int, Field(ge=0, le=10**12)]
_Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class KeyEntry(Message):
    """One key of a tenant."""

    sha256: _Hex32
    name: Name = ""
    """What it is for."""
    created: dt.date
    expires: dt.date | None = None
    """The first day (UTC) on which it is no longer valid."""

    @property
    def id(self) -> str:
        """How it is called where the key itself must not be said."""
        return self.sha256[:12]


class TenantEntry(Message):
    """One tenant."""

    secret: _Hex32
    """Makes the ids of its requests that have an idempotency key; nobody else can tell them then."""
    keys: Annotated[tuple[KeyEntry, ...], SEQUENCE] = ()
    max_open_requests: _Count = 0
    """Accepted and unfinished requests in one queue, at most; 0: no limit but the queue's."""
    max_open_tokens: _Count = 0
    """Tokens that these may take, prompts and answers together; 0: no limit."""
    tokens_per_day: _Count = 0
    """Tokens read and written in one queue from midnight to midnight (UTC); 0: no limit."""


class KeyFile(Message):
    """All tenants, by name."""

    tenants: dict[TenantName, TenantEntry] = Field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> KeyFile:
        """Read it.

        Raises:
            InvalidRequest: it is not there, cannot be read, or is not valid; every problem is named.
        """
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise InvalidRequest(f"key file {path} is over {MAX_FILE_BYTES} bytes")
            return cls.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            raise InvalidRequest(
                f"no key file {path}: make one with `streamfleet keys add TENANT --keys-file {path}`"
            ) from None
        except OSError as error:
            raise InvalidRequest(f"key file {path} cannot be read: {error.strerror}") from None
        except ValidationError as error:
            faults = problems(error)
            raise InvalidRequest(f"key file {path}: {'; '.join(faults)}", problems=faults) from None

    @classmethod
    @contextlib.contextmanager
    def edited(cls, path: Path) -> Iterator[dict[str, TenantEntry]]:
        """Change the tenants: what is in the map at the end is written, for the owner's eyes only.

        Whoever edits at the same time waits. A file that is not there begins empty.

        Raises:
            InvalidRequest: as `read`, or it cannot be written.
        """
        try:
            with path.with_name(f".{path.name}.lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                tenants = dict(cls.read(path).tenants) if path.exists() else {}
                yield tenants
                cls(tenants=tenants).write(path)
        except OSError as error:
            raise InvalidRequest(f"key file {path} cannot be written: {error.strerror}") from None

    def write(self, path: Path) -> None:
        """Put it in the place of what is there. Raises OSError."""
        new = path.with_name(f".{path.name}.new")
        new.unlink(missing_ok=True)
        with open(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:  # noqa: PTH123
            file.write(self.model_dump_json(indent=2, exclude_defaults=True) + "\n")
            file.flush()
            os.fsync(file.fileno())
        new.replace(path)


def new_key() -> str:
    """A key that nobody has. It is shown once, and kept nowhere."""
    return PREFIX + secrets.token_urlsafe(32)


def hash_of(key: str) -> str:
    """What the file keeps of a key: 64 hex digits."""
    return hashlib.sha256(key.encode("utf-8", "replace")).hexdigest()


def new_tenant() -> TenantEntry:
    """A tenant without keys or limits."""
    return TenantEntry(secret=secrets.token_hex(32))
