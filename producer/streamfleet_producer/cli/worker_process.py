"""A worker started by the command line: its environment, its log, and why it ended."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from streamfleet_producer.cli.processes import KeptProcess

HOST = "127.0.0.1"
SCRAPE_LIMIT_S = 5.0
TAIL_LINES = 12
# `-P`: a file called like one of our imports, in the folder where the user happens to be, is none of ours.
COMMAND = (sys.executable, "-P", "-m", "streamfleet_worker")


def environment(settings: Mapping[str, object]) -> dict[str, str]:
    """This program's environment with worker settings, by field name; those that are None are left alone."""
    ours = {
        f"STREAMFLEET_{name.upper()}": str(value) for name, value in settings.items() if value is not None
    }
    return {**os.environ, **ours}


class WorkerProcess:
    """One `python -m streamfleet_worker`, followed by what it logs.

    `settings` are worker settings by field name. `on_event` is called with each log line in words, on
    another thread.
    """

    def __init__(
        self, settings: Mapping[str, object], on_event: Callable[[str], None] = lambda _: None
    ) -> None:
        self._on_event = on_event
        self._ready = threading.Event()
        self._facts: dict[str, Any] = {}
        self.port: int | None = None
        """The port of its metrics, once it listens."""
        env = environment({"http_host": HOST, "http_port": 0, **settings, "log_format": "json"})
        # The worker's standard output and error are one pipe, which Python would otherwise fill in blocks.
        self._process = KeptProcess(COMMAND, {**env, "PYTHONUNBUFFERED": "1"}, self._follow)

    @property
    def ready(self) -> bool:
        """Whether it serves its queue, and has its metrics to be read."""
        return self._ready.is_set()

    @property
    def description(self) -> str:
        """What it serves, and how, once ready."""
        facts = self._facts
        device = str(facts["device"]).partition(" (")[0]  # what follows is for a log
        return (
            f"{facts['model']} in {facts['precision']} on {device}, "
            f"up to {facts['max_batch_size']} requests in a batch"
        )

    @property
    def status(self) -> int | None:
        return self._process.status

    @property
    def metrics_url(self) -> str:
        return f"http://{HOST}:{self.port}/metrics"

    def wait_ready(self, limit_s: float) -> bool:
        """Whether it is ready within `limit_s` seconds."""
        return self._ready.wait(limit_s)

    def stop(self, grace_s: float) -> None:
        """Let it drain for `grace_s` seconds, then end it."""
        self._process.terminate()
        self._process.wait(grace_s)
        self._process.close()

    def terminate(self) -> None:
        """Tell it to drain, without waiting."""
        self._process.terminate()

    def kill(self) -> None:
        """End it now."""
        self._process.close()

    def wait(self, limit_s: float) -> bool:
        """Whether it has ended within `limit_s` seconds."""
        return self._process.wait(limit_s)

    def tail(self) -> list[str]:
        """The end of its log, in words."""
        return [_worded(line) for line in self._process.lines()[-TAIL_LINES:]]

    def why_ended(self) -> str:
        """The reason it gave for its end, in one line."""
        lines = self._process.lines()
        for line in reversed(lines):
            record = _record(line)
            if record is None and line.strip():
                return line.strip()  # the last line of a traceback, or a complaint before the log was set up
            if record is not None and record.get("level") in ("error", "critical"):
                return str(record["event"])
        status = self.status
        if status is not None and status > 128:
            return f"it was killed by signal {status - 128}"
        return f"it ended with status {status} and gave no reason"

    def metrics(self) -> dict[str, float]:
        """Its metrics by sample name, summed over labels; a histogram's buckets as `name_bucket{le}`.

        Raises:
            OSError: it does not answer.
        """
        with urlopen(self.metrics_url, timeout=SCRAPE_LIMIT_S) as reply:  # noqa: S310 - our own http address
            text = reply.read().decode()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                le = sample.labels.get("le")
                name = sample.name if le is None else f"{sample.name}{{{le}}}"
                values[name] = values.get(name, 0.0) + sample.value
        return values

    def _follow(self, line: str) -> None:
        record = _record(line)
        if record is not None:
            if record["event"] == "ready":
                self._facts = record
            elif record["event"] == "listening":
                self.port = int(record["port"])
            # It listens from its start, so that its loading can be watched.
            if self._facts and self.port is not None:
                self._ready.set()
        self._on_event(_worded(line))


def _record(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "event" in record else None


def _worded(line: str) -> str:
    record = _record(line)
    if record is None:
        return line
    details = " ".join(
        f"{name}={value}"
        for name, value in record.items()
        if name not in ("event", "level", "timestamp", "worker")
    )
    return f"{record.get('level', ''):<8} {record['event']} {details}".rstrip()
