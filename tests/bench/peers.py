"""The systems that the benchmarks measure beside us, each in an environment of its own.

They want versions that exclude each other and ours, so they are no dependencies of the tests: the first run
makes an environment for each under the one that runs it, and later ones find it there.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
FOLDER = Path(sys.prefix) / "peers"


@dataclass(frozen=True)
class Environment:
    """Where a system is installed, and what it needs."""

    name: str
    requirements: tuple[str, ...]

    @property
    def python(self) -> Path:
        return FOLDER / self.name / "bin" / "python"

    def prepare(self) -> None:
        """Make it, unless it is there.

        Raises:
            SystemExit: it cannot be installed; with what pip says.
        """
        stamp = FOLDER / self.name / "requirements.txt"
        wanted = "\n".join(self.requirements)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        print(f"installing {self.name} in {FOLDER / self.name}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", FOLDER / self.name], check=True)
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        installing = subprocess.run([*pip, *self.requirements], check=False, capture_output=True, text=True)
        if installing.returncode != 0:
            raise SystemExit(f"{installing.stderr}\n{self.name} cannot be installed")
        stamp.write_text(wanted)


@dataclass(frozen=True)
class Peer(Environment):
    """A job queue for `fleet.py`, and the command of its worker behind `python`.

    `NAME_noop.py` beside this file is its producer, and says how it is set.
    """

    work: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def producer(self) -> Path:
        return HERE / f"{self.name}_noop.py"


@dataclass(frozen=True)
class Server(Environment):
    """A server that batches calls of a handler, for `one_shot.py`.

    `NAME_handlers.py` beside this file starts it, and says how it is set.
    """

    @property
    def command(self) -> list[str]:
        return [str(self.python), str(HERE / f"{self.name}_handlers.py")]


PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "dramatiq",
            ("dramatiq[redis]==2.2.1", "redis==8.1.0", "hiredis==3.5.0"),
            ("-m", "dramatiq", "dramatiq_noop", "-p", "1", "-t", "4", "--skip-logging"),
            {"dramatiq_worker_timeout": "1", "dramatiq_queue_prefetch": "256"},
        ),
        Peer(
            "taskiq",
            (
                "taskiq==0.13.0",
                "taskiq-redis==1.2.4",
                "redis==8.1.0",
                "hiredis==3.5.0",
                "msgpack==1.2.4",
                "uvloop==0.23.0",
            ),
            (
                *("-m", "taskiq", "worker", "taskiq_noop:broker", "--workers", "1"),
                *("--max-async-tasks", "256", "--max-prefetch", "256", "--no-parse", "--log-level", "ERROR"),
            ),
        ),
        Peer(
            "arq",
            ("arq==0.28.0", "redis==5.3.1", "hiredis==3.5.0", "msgpack==1.2.4", "uvloop==0.23.0"),
            ("arq_noop.py", "work"),
        ),
        Peer(
            "celery",
            ("celery[redis]==5.7.0", "redis==8.1.0", "hiredis==3.5.0", "msgpack==1.2.4"),
            (
                *("-m", "celery", "-A", "celery_noop", "worker", "--pool", "solo", "--loglevel", "ERROR"),
                *("--without-gossip", "--without-mingle", "--without-heartbeat"),
            ),
        ),
    )
}

SERVERS = {
    server.name: server
    for server in (
        Server("litserve", ("litserve==0.2.19", "uvloop==0.23.0", "httptools==0.9.0", "pyzmq==27.3.0")),
        Server("mosec", ("mosec==0.9.8",)),
        Server("ray", ("ray[serve]==2.60.0",)),
    )
}


def sentence_transformers() -> Environment:
    """That library with the torch and the transformers that we have ourselves."""
    # Which build of torch is right depends on the machine.
    ours = (f"torch=={version('torch').partition('+')[0]}", f"transformers=={version('transformers')}")
    return Environment("sentence-transformers", ("sentence-transformers==6.2.0", *ours))
