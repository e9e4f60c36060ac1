"""F12: the wall clocks of workers and producers jump by an hour, to and fro."""

from __future__ import annotations

import json
import re
import struct
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from faults.figures import keep
from faults.load import at_rest, ended
from faults.processes import Fleet
from faults.shims import compiled
from faults.test_producers_killed import Producer
from hired import submit

HOUR_S = 3600
ROOT = Path(__file__).parents[2]
WALL_CLOCK = re.compile(
    r"(?<![._\w])time\.time(_ns)?\(|datetime\.(now|utcnow|today)|CLOCK_REALTIME|localtime|gmtime"
)
# Where people are told when something was or began, clocks are compared, files and keys expire, and RQ's own
# jobs end; nothing of delivery.
TELLS_THE_TIME = re.compile(
    r"/gateway/(openai_chats|openai_completions|keys)\.py|/bulk/|/cli/(keys|load)\.py"
    r"|/operations/server_facts\.py|streamfleet_worker/metrics\.py"
)


class Clock:
    """The wall clock of processes that start after `take_over`."""

    def __init__(self, library: Path, path: Path, environment: pytest.MonkeyPatch) -> None:
        self._library = library
        self._path = path
        self._environment = environment
        path.touch()
        self.jump(0)

    def jump(self, seconds: int) -> None:
        """Let it show so much more than the true time."""
        with self._path.open("r+b") as file:
            file.write(struct.pack("q", seconds))

    def take_over(self) -> None:
        self._environment.setenv("CLOCK_SHIFT", str(self._path))
        self._environment.setenv("LD_PRELOAD", str(self._library))


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(compiled("clock_shim", tmp_path), tmp_path / "shift", monkeypatch)


async def test_clocks_that_jump_by_an_hour_change_nothing(clock: Clock) -> None:
    said: list[str] = []
    clock.jump(HOUR_S)
    # The server's clock is the one that counts, and stays.
    async with Fleet(1, before_crew=clock.take_over) as fleet:
        (worker,) = fleet.crew.workers
        off_s = _logged_at(worker.lines()[-1]) - datetime.now(UTC)
        async with Producer(fleet.server.url) as producer:
            rids = await submit(fleet.broker, ["ECHO 60 TICK 20"] * 4, deadline_ms=20_000)
            for shift_s in (-HOUR_S, HOUR_S, 0):
                # Answers under the old time, then a jump: two more of each of the eight it has under way.
                said += [await producer.said() for _ in range(16)]
                clock.jump(shift_s)
            said += [await producer.said() for _ in range(16)]
            said += await producer.kill()
        records = await ended(fleet.broker, rids)
        accepted = sorted({line.split()[1] for line in said if line.startswith("accepted ")})
        records += await ended(fleet.broker, accepted)
        await at_rest(fleet.broker)
    crashes = sum(record.crashes for record in records)
    keep(
        "F12",
        "the wall clocks of a worker and a producer jump from +1 h to -1 h, to +1 h and to the true time",
        f"{len(records)} requests done, {crashes} crashes counted, "
        f"{sum(record.attempts - 1 for record in records)} started again",
        "no effect",
    )
    assert off_s > timedelta(minutes=50), "the clock was never moved"
    assert {record.state for record in records} == {"done"}
    assert {record.attempts for record in records} == {1}


def _logged_at(line: str) -> datetime:
    return datetime.fromisoformat(json.loads(line)["timestamp"])


def test_no_code_of_ours_asks_for_the_time_of_day() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for part in ("common", "producer", "worker")
        for path in (ROOT / part).rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if WALL_CLOCK.search(line) and not TELLS_THE_TIME.search(str(path))
    ]
    assert not found, "a server's or a monotonic clock is meant"
