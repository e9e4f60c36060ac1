"""A real Prometheus in a folder of its own, and what it answers."""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
import yaml

RULES = Path(__file__).parents[2] / "dashboards" / "rules"
SCRAPE_S = 2
"""How often it scrapes, and evaluates its rules."""
WINDOW = f"{10 * SCRAPE_S}s"
"""What Grafana would put in the place of `$__rate_interval`, or a little more: here scrapes may be late."""
PATIENCE_S = 120.0
PORTS = range(18_000, 30_000)
POLL_S = 0.5


@dataclass(frozen=True)
class Series:
    """One series of an answer; `points` are times (seconds) and values, which may be NaN."""

    labels: Mapping[str, str]
    points: tuple[tuple[float, float], ...]


def free_port() -> int:
    """A port of the loopback address that nobody has now.

    Below those that the system gives to connections: one of these would have it before it is listened on.
    """
    for port in random.sample(PORTS, 100):
        with socket.socket() as asked, suppress(OSError):
            asked.bind(("127.0.0.1", port))
            return port
    raise OSError(f"no free port from {PORTS.start} to {PORTS.stop}")


def wait_for(happened: Callable[[], object], what: Callable[[], str]) -> None:
    """Return once `happened()` is true, and raise TimeoutError with what `what()` says where it never is."""
    late_at = time.monotonic() + PATIENCE_S
    while not happened():
        if time.monotonic() > late_at:
            raise TimeoutError(f"{what()}: not within {PATIENCE_S:.0f} s")
        time.sleep(POLL_S)


class Prometheus:
    """Scrapes `targets` (name to port), with the rules of this project; `pause` replaces each `for:`."""

    def __init__(self, folder: Path, targets: Mapping[str, int], *, pause: str | None = None) -> None:
        self._folder = folder
        self._port = free_port()
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for name in ("recording.yml", "alerts.yml"):
            rules = yaml.safe_load((RULES / name).read_text())
            for group in rules["groups"]:
                for rule in group["rules"]:
                    if pause is not None and "for" in rule:
                        rule["for"] = pause
            (folder / name).write_text(yaml.safe_dump(rules, sort_keys=False))
        (folder / "prometheus.yml").write_text(yaml.safe_dump(_config(targets), sort_keys=False))
        self._http = httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=30)

    def __enter__(self) -> Self:
        with (self._folder / "prometheus.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    shutil.which("prometheus") or "prometheus",
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self._port}",
                ],
                stdout=log,
                stderr=log,
            )
        wait_for(self._is_ready, lambda: "Prometheus")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(30)

    def _is_ready(self) -> bool:
        if self._process.poll() is not None:
            raise RuntimeError((self._folder / "prometheus.log").read_text()[-2000:])
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False

    def _ask(self, path: str, **parameters: str) -> Any:
        answer = self._http.post(path, data=parameters) if parameters else self._http.get(path)
        told = answer.json()
        if told["status"] != "success":
            raise ValueError(f"{told.get('error')}: {parameters.get('query')}")
        return told["data"]

    def now(self, expression: str) -> list[Series]:
        """The value of an expression at this moment."""
        told = self._ask("/api/v1/query", query=expression)
        found = told["result"] if told["resultType"] == "vector" else []
        return [Series(one["metric"], ((one["value"][0], float(one["value"][1])),)) for one in found]

    def over(self, expression: str, start: float, end: float, step: float = SCRAPE_S) -> list[Series]:
        """The values of an expression from `start` to `end` (seconds since the epoch)."""
        told = self._ask(
            "/api/v1/query_range", query=expression, start=str(start), end=str(end), step=str(step)
        )
        return [
            Series(one["metric"], tuple((at, float(value)) for at, value in one["values"]))
            for one in told["result"]
        ]

    def rules(self) -> list[dict[str, Any]]:
        """All rules, with their health and, of alerts, their state."""
        return [rule for group in self._ask("/api/v1/rules")["groups"] for rule in group["rules"]]

    def alerts(self) -> list[dict[str, Any]]:
        """Alerts that are pending or firing."""
        alerts: list[dict[str, Any]] = self._ask("/api/v1/alerts")["alerts"]
        return alerts

    def down(self) -> list[str]:
        """What it could not scrape last time, with the reason."""
        targets = self._ask("/api/v1/targets")["activeTargets"]
        return [
            f"{one['labels']['instance']}: {one['lastError']}" for one in targets if one["health"] != "up"
        ]


def _config(targets: Mapping[str, int]) -> dict[str, Any]:
    return {
        "global": {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"},
        "rule_files": ["recording.yml", "alerts.yml"],
        "scrape_configs": [
            {
                "job_name": "streamfleet",
                "static_configs": [
                    {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}}
                    for name, port in targets.items()
                ],
            }
        ],
    }
