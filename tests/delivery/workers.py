"""Worker processes of the scripted engine, which a test may kill, pause and resume."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from eventually import eventually

TESTS = Path(__file__).parents[1]
LIMIT_S = 60.0


class WorkerProcess:
    """One worker process, from its start to its end."""

    def __init__(self, pid: int, log: Path, statuses: dict[int, int]) -> None:
        self.pid = pid
        self._log = log
        self._statuses = statuses

    # --- what it says

    @property
    def text(self) -> str:
        return self._log.read_text() if self._log.exists() else ""

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines() if line.endswith("}")]

    def line(self, event: str) -> dict[str, Any] | None:
        return next((line for line in self.lines if line["event"] == event), None)

    async def said(self, event: str) -> dict[str, Any]:
        await eventually(lambda: self.line(event) or self.status is not None, event)
        line = self.line(event)
        assert line is not None, self.text
        return line

    async def ready(self) -> str:
        """Wait until it takes work; gives its name as an owner."""
        return str((await self.said("ready"))["worker"])

    def metric(self, name: str, **labels: str) -> float:
        """A sample of its metrics, which it must serve."""
        listening = self.line("listening")
        assert listening is not None
        with urlopen(f"http://127.0.0.1:{listening['port']}/metrics", timeout=LIMIT_S) as reply:
            text = reply.read().decode()
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"streamfleet_{name}" and labels.items() <= sample.labels.items()
        )

    # --- what becomes of it

    @property
    def status(self) -> int | None:
        """Its exit status, minus n for a death by signal n; None while it lives."""
        return self._statuses.get(self.pid)

    @property
    def is_stopped(self) -> bool:
        """Whether it is paused."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
        return False

    def cpu_s(self) -> float:
        """CPU time that it has used."""
        tasks = Path(f"/proc/{self.pid}/task").iterdir()
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9

    def signal(self, number: signal.Signals) -> None:
        if self.status is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """End it now, whatever it does."""
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)

    async def ended(self) -> int:
        await eventually(lambda: self.status is not None, f"the end of {self.pid}")
        assert self.status is not None
        return self.status


class Nursery:
    """Where worker processes come from; a context manager that ends with all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._pids: queue.Queue[int] = queue.Queue()
        self._statuses: dict[int, int] = {}
        theirs = {name: value for name, value in os.environ.items() if not name.startswith("STREAMFLEET_")}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "delivery.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={
                **theirs,
                "PYTHONPATH": os.pathsep.join(filter(None, [str(TESTS), theirs.get("PYTHONPATH")])),
            },
        )
        self._reader = threading.Thread(target=self._read, name="nursery", daemon=True)

    def __enter__(self) -> Self:
        self._reader.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def worker(
        self, url: str, queue: object = "q", *, stop_at: object = None, exact: object = "", **settings: object
    ) -> WorkerProcess:
        """Begin a worker that says to be exact, of this class; `settings` are a worker's, by field name."""
        values = {"redis_url": url, "queue": queue, "engine": "scripted", "log_format": "json", **settings}
        self._count += 1
        log = self._folder / f"worker{self._count}.log"
        order = {
            "env": {f"STREAMFLEET_{name.upper()}": str(value) for name, value in values.items()},
            "log": str(log),
            "stop_at": None if stop_at is None else str(stop_at),
            "exact": str(exact),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return WorkerProcess(self._pids.get(timeout=LIMIT_S), log, self._statuses)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._reader.join()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                news = json.loads(line)
                if "status" in news:
                    self._statuses[news["pid"]] = news["status"]
                else:
                    self._pids.put(news["pid"])
