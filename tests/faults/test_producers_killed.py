"""F3: a producer is killed before a submit, between a submit and its reply, and in the middle of a stream."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from faults.figures import keep
from faults.load import at_rest, ended, ended_at_ms, rid_of
from faults.scene import Scene, pause, until

PROGRAM = Path(__file__).with_name("producer_process.py")
GRACE_MS = 5000
DEADLINE_MS = 1000  # of the producer


class Producer:
    """A process of `producer_process.py`; a context manager, killed at its end."""

    def __init__(self, *urls: str) -> None:
        self._urls = urls
        self.process: asyncio.subprocess.Process

    async def __aenter__(self) -> Producer:
        pipe = asyncio.subprocess.PIPE
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, str(PROGRAM), *self._urls, stdin=pipe, stdout=pipe
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.kill()

    async def said(self) -> str:
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            return (await self.process.stdout.readline()).decode().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")

    async def kill(self) -> list[str]:
        """SIGKILL; gives what it had still said."""
        if self.process.returncode is None:
            self.process.kill()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        rest = (await self.process.stdout.read()).decode()
        await self.process.wait()
        return rest.splitlines()


async def test_what_a_killed_producer_leaves_behind_ends_by_its_deadline() -> None:
    async with Scene() as scene:
        async with Producer(scene.client_line.url, scene.client_line.url) as producer:
            assert await producer.said() == "streaming"
            # The submit gets there, its reply does not get back.
            scene.client_line.delay_s = 0.3
            producer.go_on()

            async def submitted() -> bool:
                (record,) = await scene.broker.status([rid_of("unanswered")], "default")
                return record is not None

            await until(submitted)
            assert await producer.kill() == [], "it was answered already"

        async def gone() -> bool:
            return scene.client_line.lines == 0

        gone_s = await until(gone)
        (never,) = await scene.broker.status([rid_of("never")], "default")
        listeners: Any = await scene.server.control.client_list(_type="pubsub")
        records = await ended(scene.broker, [rid_of("stream"), rid_of("unanswered")])
        await at_rest(scene.broker)
        rows = [hired.engine.room().rows for hired in scene.workers]
    late_ms = [ended_at_ms(record) - record.accepted_at_ms - DEADLINE_MS for record in records]
    keep(
        "F3 a producer killed",
        "SIGKILL with a stream under way, a submit without its reply, and a subscription without a submit",
        f"the two that were accepted ended as {', '.join(record.state for record in records)}, at most "
        f"{max(late_ms)} ms after their deadline; connections gone after {gone_s:.2f} s",
        "0 lost; orphans end by their deadline",
    )
    assert {record.state for record in records} == {"expired"}
    assert max(late_ms) < GRACE_MS
    assert never is None
    assert not listeners
    assert rows == [8, 8]


@pytest.mark.parametrize(
    "times",
    [
        pytest.param(1, id="quick"),
        pytest.param(20, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(300)]),
    ],
)
async def test_all_that_a_producer_was_told_is_accepted_ends(times: int) -> None:
    accepted: set[str] = set()
    async with Scene() as scene:
        for _ in range(times):
            async with Producer(scene.client_line.url) as producer:
                said = [await producer.said()]
                await pause(random.uniform(0.1, 0.5))
                said += await producer.kill()
            accepted |= {line.split()[1] for line in said if line.startswith("accepted ")}
            # Under the same keys the next one joins what this one has left.
        records = await ended(scene.broker, sorted(accepted))
        await at_rest(scene.broker)
        ends = int(await scene.server.control.hget(scene.broker.keys.sweep, "ended") or 0)
    states = {record.state for record in records}
    keep(
        f"F3 {times} producers killed",
        "SIGKILL at any moment, with 8 streams at a time",
        f"{len(accepted)} accepted, 0 lost, ended as {', '.join(sorted(states))}; {ends} ends were written",
        "0 lost",
    )
    assert len(accepted) >= 8
    assert states == {"done"}
    assert all(record.crashes == 0 and record.attempts == 1 for record in records)
