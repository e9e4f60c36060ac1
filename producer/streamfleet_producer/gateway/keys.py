"""Who asks: the tenant whose key an HTTP request brings."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import structlog

from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.gateway.key_file import KeyEntry, KeyFile, TenantEntry, hash_of

LOOK_S = 1.0
"""How often the file is looked at."""

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose behalf a request comes. `secret` makes the ids that follow from its idempotency keys."""

    name: str = "default"
    secret: bytes | None = None


ANYBODY = Tenant()
"""Who everybody is where there are no keys."""


def _today() -> dt.date:
    return dt.datetime.now(dt.UTC).date()


class KeyRing:
    """Tells the tenant of a key, and follows the file: a change counts within a second, without a restart.

    A file that was broken by an edit is reported, and the keys of before go on. Without a file everybody is
    the tenant "default".

    Raises:
        InvalidRequest: the file cannot be read at the start.
    """

    def __init__(
        self,
        path: Path | None = None,
        *,
        now: Callable[[], float] = time.monotonic,
        today: Callable[[], dt.date] = _today,
    ) -> None:
        self._path = path
        self._now = now
        self._today = today
        self._tenants: dict[str, tuple[Tenant, KeyEntry]] = {}
        self._entries: Mapping[str, TenantEntry] = {}
        self._version: tuple[int, ...] = ()
        self._looked_at = now()
        self.changes = 0
        """How often the file was read anew."""
        if path is not None:
            self._version = _version(path)
            self._take(KeyFile.read(path))

    @property
    def is_open(self) -> bool:
        """Whether no key is asked for."""
        return self._path is None

    def entries(self) -> Mapping[str, TenantEntry]:
        """The tenants as the file has them now."""
        self._look()
        return self._entries

    def tenant(self, authorization: str | None) -> Tenant | None:
        """Whom an `Authorization: Bearer KEY` names; None without one, or if the key is nobody's now."""
        if self._path is None:
            return ANYBODY
        self._look()
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return None
        # Looked up by its hash: how long that takes tells nothing about the keys there are.
        found = self._tenants.get(hash_of(key.strip()))
        if found is None:
            return None
        tenant, entry = found
        return None if entry.expires is not None and entry.expires <= self._today() else tenant

    def _look(self) -> None:
        now = self._now()
        if self._path is None or now - self._looked_at < LOOK_S:
            return
        self._looked_at = now
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            self._take(KeyFile.read(self._path))
        except InvalidRequest as error:
            log.error("key file not taken; the keys of before go on", reason=error.message)
            return
        log.info("key file read", tenants=len(self._entries), keys=len(self._tenants))

    def _take(self, file: KeyFile) -> None:
        self._entries = file.tenants
        self._tenants = {
            key.sha256: (Tenant(name, bytes.fromhex(entry.secret)), key)
            for name, entry in file.tenants.items()
            for key in entry.keys
        }
        self.changes += 1


def _version(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError:
        return ()
    return (stat.st_ino, stat.st_size, stat.st_mtime_ns)
