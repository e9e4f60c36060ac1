"""Servers and Sentinels as processes of a test's own, each in a folder of its own."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from streamfleet_common.embedded_binary import ServerBinary

HOST = "127.0.0.1"
NAME = "mymaster"
LIMIT_S = 60.0
# A machine under load keeps a server waiting for longer than a test wants to wait for a failover: so the
# Sentinels are patient, but for the failover that is wanted.
PATIENT_MS, QUICK_MS = 60_000, 500
REDIS = Path("/usr/bin/redis-server")
FLAGS = {
    "save": "",
    "appendonly": "yes",
    "repl-diskless-sync-delay": "0",
    "maxmemory-policy": "noeviction",
    "enable-debug-command": "local",
}


def servers() -> list[Any]:
    """The server programs to test with: the embedded one, and the system's where there is one."""
    absent = pytest.mark.skipif(not REDIS.exists(), reason=f"no {REDIS} on this machine")
    return [
        pytest.param(ServerBinary.find().path, id="embedded"),
        pytest.param(REDIS, id="redis-server", marks=absent),
    ]


def until(happened: Any, what: str) -> None:
    """Return once `happened()` is true; what it raises of Redis counts as false."""
    limit = time.monotonic() + LIMIT_S
    while True:
        try:
            if happened():
                return
        except redis.RedisError:
            pass
        if time.monotonic() > limit:
            raise AssertionError(f"{what} did not happen within {LIMIT_S:.0f} s")
        time.sleep(0.01)


class Node:
    """One server. A context manager; `raw` is a plain client of it, `settings` are for its next start."""

    def __init__(self, program: Path, **settings: str) -> None:
        self.port = free_port()
        self._program = program
        self._folder = Path(tempfile.mkdtemp(prefix="node-"))
        self.settings = {name.replace("_", "-"): value for name, value in settings.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self.raw: Any = redis.Redis(
            host=HOST, port=self.port, socket_timeout=LIMIT_S, protocol=2, retry=Retry(NoBackoff(), 0)
        )

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        return f"redis://{HOST}:{self.port}/0"

    def start(self, *, wait: bool = True) -> None:
        """Start it, again on its port and data; returns once it answers, unless told not to wait."""
        self._process = self._begin()
        if wait:
            until(self._answers, f"an answer of {self._command()}")

    def _begin(self) -> subprocess.Popen[bytes]:
        with (self._folder / "log").open("ab") as log:
            return subprocess.Popen(self._command(), stdout=log, stderr=log)

    def _answers(self) -> bool:
        if self._process is None or self._process.poll() is not None:
            # Somebody's connection has its port for a moment, which was free when it was chosen.
            time.sleep(0.2)
            self._process = self._begin()
        return bool(self.raw.ping())

    def kill(self) -> None:
        """SIGKILL, as a crash would."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        self.raw.connection_pool.disconnect()

    def freeze(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        assert self._process is not None
        os.kill(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def info(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = self.raw.info(section)
        return found

    def _command(self) -> list[str]:
        where = ["--bind", HOST, "--port", str(self.port), "--dir", str(self._folder)]
        settings = FLAGS | self.settings
        return [
            str(self._program),
            *where,
            *(word for name, value in settings.items() for word in (f"--{name}", value)),
        ]


class Sentinel(Node):
    """One of those who watch a primary."""

    def __init__(self, program: Path, primary: Node, quorum: int = 2) -> None:
        super().__init__(program)
        config = self._folder / "sentinel.conf"
        config.write_text(
            f"port {self.port}\nbind {HOST}\ndir {self._folder}\n"
            f"sentinel monitor {NAME} {HOST} {primary.port} {quorum}\n"
            f"sentinel down-after-milliseconds {NAME} {PATIENT_MS}\n"
            f"sentinel failover-timeout {NAME} 3000\n"
        )

    def primary_port(self) -> int:
        address: Any = self.raw.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", NAME)
        return int(address[1])

    def _command(self) -> list[str]:
        return [str(self._program), str(self._folder / "sentinel.conf"), "--sentinel"]


class Trio:
    """A primary, a replica, and three Sentinels that agree about them."""

    def __init__(self, first: Node, second: Node, sentinels: list[Sentinel]) -> None:
        self.first, self.second, self.sentinels = first, second, sentinels

    @property
    def url(self) -> str:
        hosts = ",".join(f"{HOST}:{sentinel.port}" for sentinel in self.sentinels)
        return f"redis+sentinel://{hosts}/{NAME}/0"

    def in_step(self) -> bool:
        """Whether the second is a replica of the first, and has all of it."""
        return follows(self.second)

    def fall_behind(self) -> None:
        """From now on the replica gets nothing, and knows nothing of what comes."""
        self.second.freeze()
        # What is in its socket already, it would read when it wakes: so the line ends here.
        until(lambda: self._cut_replicas() == 0, "a cut of the replica")

    def _cut_replicas(self) -> int:
        self.first.raw.execute_command("CLIENT", "KILL", "TYPE", "replica")
        return int(self.first.info("replication")["connected_slaves"])

    def promote(self) -> None:
        """Let the first die and the second take its place, with what it has."""
        self.first.kill()
        self.second.thaw()
        self.await_promotion()

    def await_promotion(self) -> None:
        """Let the Sentinels notice that the first is silent."""
        self._down_after(QUICK_MS)
        until(self._is_promoted, "a failover")
        self._down_after(PATIENT_MS)

    def _is_promoted(self) -> bool:
        ports = {sentinel.primary_port() for sentinel in self.sentinels}
        return ports == {self.second.port} and self.second.info("replication")["role"] == "master"

    def _down_after(self, ms: int) -> None:
        for sentinel in self.sentinels:
            sentinel.raw.execute_command("SENTINEL", "SET", NAME, "down-after-milliseconds", ms)

    def swap(self) -> None:
        """Let the two change places, by order."""
        self.sentinels[0].raw.execute_command("SENTINEL", "FAILOVER", NAME)
        until(self._is_promoted, "a failover")
        until(lambda: follows(self.first), "the end of the old primary")

    def bring_back(self) -> None:
        """Start the first again, which still takes itself for the primary, until it is told."""
        self.first.start()
        until(lambda: follows(self.first), "the end of the old primary")


def follows(node: Node) -> bool:
    state = node.info("replication")
    return (state["role"], state.get("master_link_status")) == ("slave", "up")


@contextmanager
def trio(program: Path, **settings: str) -> Iterator[Trio]:
    with ExitStack() as stack:
        first = stack.enter_context(Node(program, **settings))
        second = stack.enter_context(Node(program, replicaof=f"{HOST} {first.port}", **settings))
        sentinels = [stack.enter_context(Sentinel(program, first)) for _ in range(3)]
        made = Trio(first, second, sentinels)
        until(made.in_step, "a replica in step")
        until(lambda: all(_knows_all(sentinel) for sentinel in sentinels), "an agreement of the Sentinels")
        yield made


def _knows_all(sentinel: Sentinel) -> bool:
    known: Any = sentinel.raw.execute_command("SENTINEL", "MASTER", NAME)
    if not isinstance(known, dict):
        known = dict(zip(known[::2], known[1::2], strict=True))
    state = {_text(key): _text(value) for key, value in known.items()}
    return (int(state["num-slaves"]), int(state["num-other-sentinels"])) == (1, 2)


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def free_port() -> int:
    """One that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
