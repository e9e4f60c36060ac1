"""The Redis or Valkey server of a benchmark, with or without its append-only file."""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.embedded_binary import ServerBinary


def add_options(parser: argparse.ArgumentParser, *, aof: bool = True) -> None:
    """Which server; the same words for every benchmark. `aof` lets the caller choose, too."""
    parser.add_argument(
        "--server", metavar="PROGRAM", help="a redis-server or valkey-server; by default the embedded one"
    )
    if aof:
        parser.add_argument(
            "--aof", action="store_true", help="with the append-only file, synced every second"
        )


@contextmanager
def serving(program: str | None, *, aof: bool) -> Iterator[EmbeddedBroker]:
    """A server of its own, set as the embedded one is but for the append-only file.

    Raises:
        BrokerUnavailable: `program` is none, or too old.
    """
    # A benchmark that is told to stop takes its workers with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    broker = EmbeddedBroker(extra_args=("--appendonly", "yes" if aof else "no"))
    if program is not None:
        broker._binary = ServerBinary.at(Path(shutil.which(program) or program))
    with broker:
        yield broker


def describe(broker: EmbeddedBroker, *, aof: bool) -> str:
    """The server in a line."""
    binary = broker._program()
    return f"{binary.product} {binary.version}{', AOF' if aof else ''}"


@contextmanager
def process(command: list[str], environment: dict[str, str], cwd: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A child process, and all that it starts, for as long as the block lasts."""
    with subprocess.Popen(
        command,
        env={**os.environ, **environment},
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as child:
        try:
            yield child
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
            # Some leave what they started behind.
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
