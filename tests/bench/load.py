"""The load that every system gets, and what is measured of it.

The standard library alone, since each peer has an environment of its own. A producer tells how it sends a
request and gets its result. It is first warmed up, then used with one request in flight, then with many for a
fixed time. CPU times are the processes' own, over that last part.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

TEXT = "x" * 200
"""What each request carries, and its result too."""
TICK_US = 1e6 / os.sysconf("SC_CLK_TCK")
FIRST_LIMIT_S = 60.0
"""How long a worker may take to be there."""

_T = TypeVar("_T")
Span = tuple[float, float]
"""When a request was sent and when its result was there, in seconds."""


@dataclass(frozen=True)
class Load:
    """What to do, and where: `trips` requests one by one, then `seconds` with `in_flight` at once."""

    url: str
    seconds: float
    in_flight: int
    trips: int
    worker_pid: int
    server_pid: int
    records: str = ""
    """A file for what `streamfleet report` draws, without its head; "" for none."""

    @classmethod
    def read(cls) -> Load:
        """What `fleet.py` asks for, from BENCH_LOAD."""
        return cls(**json.loads(os.environ["BENCH_LOAD"]))


def cpu_us(pid: int) -> float:
    """CPU time that a process and its descendants have used so far, in microseconds."""
    used: dict[int, float] = {}
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        used[int(entry.name)] = (int(fields[11]) + int(fields[12])) * TICK_US
        children.setdefault(int(fields[1]), []).append(int(entry.name))
    total, left = 0.0, [pid]
    while left:
        process = left.pop()
        total += used.get(process, 0.0)
        left += children.get(process, [])
    return total


def busy_us() -> float:
    """CPU time of everybody on this machine so far, in microseconds; what the host took away counts, too."""
    # user nice system idle iowait irq softirq steal; guests are in user and nice.
    ticks = [int(field) for field in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) * TICK_US


def percentiles(seconds: list[float]) -> dict[str, float]:
    """p50 and p99 in milliseconds."""
    cuts = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else [*seconds * 99]
    return {"p50_ms": round(cuts[49] * 1000, 3), "p99_ms": round(cuts[98] * 1000, 3)}


async def measure(
    load: Load,
    call: Callable[[], Awaitable[Any]],
    *,
    alone: Callable[[], Awaitable[Any]] | None = None,
    around: Callable[[bool], None] = lambda _: None,
) -> dict[str, Any]:
    """Load a producer on an event loop: `call` sends a request and gives its result.

    `alone` is the same with the settings that are best while nothing else is in flight. `around` is called
    with True before the crowded part and with False after it.
    """
    alone = alone or call
    async with asyncio.timeout(FIRST_LIMIT_S):
        _check(await alone())
    await asyncio.gather(*(call() for _ in range(2 * load.in_flight)))

    trips: list[Span] = []
    for _ in range(load.trips):
        began = time.perf_counter()
        _check(await alone())
        trips.append((began, time.perf_counter()))

    crowded: list[Span] = []

    async def caller(until: float) -> None:
        while (began := time.perf_counter()) < until:
            _check(await call())
            crowded.append((began, time.perf_counter()))

    around(True)
    meter = _Meter(load)
    until = meter.began + load.seconds
    await asyncio.gather(*(caller(until) for _ in range(load.in_flight)))
    result = meter.result(trips, crowded)
    around(False)
    return result


def measure_blocking(load: Load, send: Callable[[], _T], get: Callable[[_T], Any]) -> dict[str, Any]:
    """Load a blocking producer: `send` a request, `get` its result, the oldest first.

    One thread: with more, such a producer spends its time on Python's lock.
    """
    _check(get(send()))
    for sent in [send() for _ in range(2 * load.in_flight)]:
        _check(get(sent))

    trips: list[Span] = []
    for _ in range(load.trips):
        began = time.perf_counter()
        _check(get(send()))
        trips.append((began, time.perf_counter()))

    crowded: list[Span] = []
    waiting: deque[tuple[float, _T]] = deque()
    meter = _Meter(load)
    until = meter.began + load.seconds
    while waiting or time.perf_counter() < until:
        while len(waiting) < load.in_flight and time.perf_counter() < until:
            waiting.append((time.perf_counter(), send()))
        began, sent = waiting.popleft()
        _check(get(sent))
        crowded.append((began, time.perf_counter()))
    return meter.result(trips, crowded)


class _Meter:
    """Time and CPU from its making on."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._cpu = self._used()
        self._others_before = self._others()
        self.began = time.perf_counter()

    def result(self, trips: list[Span], crowded: list[Span]) -> dict[str, Any]:
        seconds = time.perf_counter() - self.began
        count = len(crowded)
        result = {
            "requests": count,
            "requests_per_s": round(count / seconds),
            "alone": percentiles([ended - began for began, ended in trips]),
            "crowded": percentiles([ended - began for began, ended in crowded]),
            "others_cores": round(max(0.0, self._others() - self._others_before) / seconds / 1e6, 2),
            "cpu_us": {part: round((us - self._cpu[part]) / count, 1) for part, us in self._used().items()},
        }
        if self._load.records:
            _record(Path(self._load.records), {"alone": trips, "crowded": crowded})
        return result

    def _others(self) -> float:
        """CPU time of all that is not measured here, in microseconds."""
        return busy_us() - sum(self._used().values())

    def _used(self) -> dict[str, float]:
        # Without descendants: in `hotspots.py` the two others are children of this process.
        return {
            "producer": time.process_time() * 1e6,
            "worker": cpu_us(self._load.worker_pid),
            "redis": cpu_us(self._load.server_pid),
        }


def _record(file: Path, parts: dict[str, list[Span]]) -> None:
    """Write the lines of the requests, times counted from the first one on."""
    first = min(began for spans in parts.values() for began, _ in spans)
    with file.open("w") as out:
        for kind, spans in parts.items():
            for began, ended in spans:
                times = {
                    "submitted_ms": round((began - first) * 1000, 3),
                    "ended_ms": round((ended - first) * 1000, 3),
                }
                out.write(json.dumps({"type": "request", "kind": kind, **times}) + "\n")


def _check(answer: object) -> None:
    if answer != TEXT:
        raise AssertionError(f"another answer than was asked for: {answer!r}")
