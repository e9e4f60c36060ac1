"""The workers that the command line starts: their environment, what they log, and why they ended."""

from __future__ import annotations

import math
import os
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from streamfleet_producer.cli.log_lines import SERIOUS, read_record, worded
from streamfleet_producer.cli.processes import TiedProcess
from streamfleet_producer.cli.terminal import printable

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


@dataclass(slots=True)
class _Worker:
    number: int
    facts: dict[str, Any] = field(default_factory=dict)
    """What it serves, once it does."""


class Workers:
    """`count` workers under one supervisor, in a process tied to this one, followed by what they log.

    `settings` are worker settings by field name. `say` is told in words what happens, on another thread: also
    what workers print, and what they log as a warning or worse.
    """

    def __init__(
        self, settings: Mapping[str, object], count: int = 1, say: Callable[[str], None] = lambda _: None
    ) -> None:
        self._count = count
        self._say = say
        self._changed = threading.Condition()
        self._workers: dict[str, _Worker] = {}
        self._port: int | None = None
        """Of the metrics of all of them, once their supervisor listens."""
        self._last_words: str | None = None
        self.has_served = False
        """Some worker has been ready."""
        self.why_one_ended: str | None = None
        """The reason that the last worker had to end, if one did without being told to."""
        env = environment({"http_host": HOST, "http_port": 0, **settings, "workers": count})
        self._process = TiedProcess(
            COMMAND, {**env, "STREAMFLEET_LOG_FORMAT": "json", "STREAMFLEET_LOG_LEVEL": "info"}, self._follow
        )

    @property
    def ready(self) -> bool:
        """Whether all serve their queue."""
        with self._changed:
            return sum(bool(worker.facts) for worker in self._workers.values()) == self._count

    def wait_ready(self, limit_s: float) -> bool:
        """Whether all serve within `limit_s` seconds."""
        with self._changed:
            return self._changed.wait_for(lambda: self.ready, limit_s)

    @property
    def status(self) -> int | None:
        """The supervisor's exit status; None while it keeps the workers."""
        return self._process.status

    @property
    def facts(self) -> Mapping[str, Any]:
        """What they serve, once ready, as one of them has logged it."""
        with self._changed:
            return next(worker.facts for worker in self._workers.values() if worker.facts)

    @property
    def description(self) -> str:
        """What they serve, and how, once ready."""
        return _description(self.facts)

    def terminate(self) -> None:
        """Tell them to drain, without waiting."""
        self._process.terminate()

    def kill(self) -> None:
        """End them now."""
        self._process.close()

    def tail(self) -> list[str]:
        """The end of their log, in words."""
        lines = [line for line in self._process.lines() if "supervisor" not in (read_record(line) or {})]
        return [line if (record := read_record(line)) is None else worded(record) for line in lines][
            -TAIL_LINES:
        ]

    def why_ended(self) -> str:
        """The reason for the end of one of them, or of all, in one line."""
        status = self.status
        if status is None:
            return self.why_one_ended or "it ended"
        for line in reversed(self._process.lines()):
            record = read_record(line)
            if record is None and line.strip():
                return line.strip()  # the last line of a traceback, or a complaint before the log was set up
            if record is not None and record.get("level") in ("error", "critical"):
                return str(record["event"])
        if status > 128:
            return f"it was killed by signal {status - 128}"
        return f"it ended with status {status} and gave no reason"

    def metrics(self) -> dict[str, float]:
        """Their metrics by sample name, summed over labels; a histogram's buckets as `name_bucket{le}`.

        Raises:
            OSError: it does not answer.
        """
        with urlopen(_metrics_url(self._port), timeout=SCRAPE_LIMIT_S) as reply:  # noqa: S310 - our own http address
            text = reply.read().decode()
        values: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                le = sample.labels.get("le")
                name = sample.name if le is None else f"{sample.name}{{{le}}}"
                values[name] = values.get(name, 0.0) + sample.value
        return values

    def _follow(self, line: str) -> None:
        record = read_record(line)
        with self._changed:
            # One that has not even started is the end of all: what its successor says, on a machine so slow
            # that there is one, was said.
            if not self.has_served and self.why_one_ended is not None:
                return
            said = self._passed_on(line) if record is None else self._heard(record)
            self._changed.notify_all()
        for words in said:
            self._say(words)

    def _heard(self, record: dict[str, Any]) -> list[str]:
        """Take a line of the log in; gives what there is to say about it."""
        event = record["event"]
        if event == "worker started":
            self._workers[record["worker"]] = _Worker(record["number"])
        elif event == "worker ended":
            return self._ended(record)
        elif event == "listening":
            self._port = int(record["port"])
        elif (worker := self._workers.get(record.get("worker", ""))) is not None and event == "ready":
            worker.facts = record
            page = [] if self.has_served else [f"          metrics {_metrics_url(self._port)}"]
            self.has_served = True
            return [*self._held(), f"worker {worker.number}  {_description(record)}", *page]
        elif record.get("level") in SERIOUS and not str(event).startswith("giving up"):
            return self._passed_on(worded(record), worker)
        return []

    def _ended(self, record: dict[str, Any]) -> list[str]:
        self._workers.pop(record["worker"], None)
        if "again_in_s" not in record:
            return []
        self.why_one_ended = record["reason"]
        if not self.has_served:
            # Whoever has it started makes it the end of all, and says why.
            return [line for line in self._held() if record["reason"] not in line]
        pause_s = max(1, math.ceil(record["again_in_s"]))
        words = f"ended: {record['reason']}; another starts in {pause_s} s"
        return [*self._held(), f"worker {record['number']}  {words}"]

    def _passed_on(self, words: str, worker: _Worker | None = None) -> list[str]:
        """Words of a worker, or of any of them, line by line."""
        if worker is None and self._count == 1:
            name = "worker 1"
        else:
            name = "workers " if worker is None else f"worker {worker.number}"
        lines = [f"{name} │ {printable(line)}" for line in words.splitlines()]
        if self.has_served or not lines:
            return lines
        # The last line of a worker that never serves is the reason for its end as a rule, and told as such.
        *now, last = [*self._held(), *lines]
        self._last_words = last
        return now

    def _held(self) -> list[str]:
        last, self._last_words = self._last_words, None
        return [] if last is None else [last]


def _description(facts: Mapping[str, Any]) -> str:
    size = f"up to {facts['max_batch_size']} requests in a batch"
    device = str(facts["device"]).partition(" (")[0]  # what follows is for a log
    if facts["precision"] == "none":  # there is no model
        return f"{facts['model']} on {device}, {size}"
    return f"{facts['model']} in {facts['precision']} on {device}, {size}"


def _metrics_url(port: int | None) -> str:
    return f"http://{HOST}:{port}/metrics"
