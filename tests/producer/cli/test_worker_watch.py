"""What is said while nothing comes: without a worker, and without Redis. Time passes as the test has it."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from command import environment, running
from eventually import eventually
from hand_worker import HandWorker
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.errors import BrokerUnavailable, Cancelled, DeadlineExceeded, Undecodable
from streamfleet_producer.cli.worker_watch import PAUSE_S, WorkerWatch
from streamfleet_producer.client import Client

NOBODY = "waiting: no worker serves queue 'fx' now; start one, or end with Ctrl-C"
AWAY = "Redis at redis://user:***@here cannot be reached: trying again"


class FakeFleet:
    url = "redis://user:secret@here"
    queue = "fx"

    def __init__(self, *found: Any) -> None:
        self.found = list(found)

    async def models(self) -> Any:
        found = self.found.pop(0) if len(self.found) > 1 else self.found[0]
        if isinstance(found, Exception):
            raise found
        if found == "silence":
            await asyncio.Event().wait()
        return found


class Clock:
    """Sleeps end when the test says so."""

    def __init__(self) -> None:
        self.asleep: list[tuple[float, asyncio.Event]] = []

    async def sleep(self, pause_s: float) -> None:
        woken = asyncio.Event()
        self.asleep.append((pause_s, woken))
        await woken.wait()

    async def pass_on(self) -> None:
        await eventually(lambda: self.asleep)
        pause_s, woken = self.asleep.pop()
        assert pause_s == PAUSE_S
        woken.set()
        await eventually(lambda: self.asleep)


def watch(*found: Any, say: Callable[[str], None], patience_s: float = 60.0) -> tuple[WorkerWatch, Clock]:
    clock = Clock()
    fleet = cast(Client, FakeFleet(*found))
    return WorkerWatch(fleet, say, sleep=clock.sleep, patience_s=patience_s), clock


def said(*found: Any, patience_s: float = 60.0) -> list[str]:
    """What is said while it finds this, one after the other."""
    lines: list[str] = []

    async def run() -> None:
        watching, clock = watch(*found, say=lines.append, patience_s=patience_s)
        async with watching:
            for _ in found:
                await clock.pass_on()

    asyncio.run(run())
    return lines


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        ((["card"], ["card"]), []),
        (([], [], []), [NOBODY]),
        (([], ["card"], []), [NOBODY, NOBODY]),
        ((BrokerUnavailable("gone"), BrokerUnavailable("gone"), ["card"]), [AWAY, "Redis is back"]),
        ((BrokerUnavailable("gone"), []), [AWAY, NOBODY]),
        ((Undecodable("a card of the future"),), []),
    ],
)
def test_each_trouble_is_said_once(found: tuple[Any, ...], lines: list[str]) -> None:
    assert said(*found) == lines


def test_who_does_not_answer_is_away() -> None:
    assert said("silence", patience_s=0.0) == [AWAY]


def test_nothing_is_said_before_its_time() -> None:
    lines: list[str] = []

    async def run() -> None:
        watching, clock = watch([], say=lines.append)
        async with watching:
            await eventually(lambda: clock.asleep)

    asyncio.run(run())
    assert lines == []


def test_a_deadline_without_a_worker_says_so() -> None:
    async def end(found: list[str], error: Exception) -> None:
        watching, _ = watch(found, say=lambda _: None)
        async with watching:
            raise error

    for found, words in [([], "too late: no worker serves queue 'fx' now"), (["card"], "too late")]:
        with pytest.raises(DeadlineExceeded) as raised:
            asyncio.run(end(found, DeadlineExceeded("too late")))
        assert raised.value.message == words
    with pytest.raises(Cancelled, match="left"):
        asyncio.run(end([], Cancelled("left")))


@pytest.mark.parametrize(
    "arguments",
    [
        ["call", "any", "1"],
        ["embed", "a"],
        pytest.param(["call", "any", "--file", "1"], marks=pytest.mark.slow),
        pytest.param(["rerank", "q", "a"], marks=pytest.mark.slow),
        pytest.param(["decide", "--state", "s", "--question", "a: b"], marks=pytest.mark.slow),
    ],
)
def test_every_command_that_waits_says_it(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    (tmp_path / "1").write_text("1\n")
    monkeypatch.chdir(tmp_path)
    asyncio.run(_come_and_go(redis_url))
    with running(*arguments, env=environment(STREAMFLEET_REDIS_URL=redis_url)) as command:
        command.wait_for(NOBODY)
        os.killpg(command.process.pid, signal.SIGINT)
        assert command.end()[0] == 130


def test_the_deadline_of_a_command_names_it(redis_url: str) -> None:
    asyncio.run(_come_and_go(redis_url))
    env = environment(STREAMFLEET_REDIS_URL=redis_url)
    with running("call", "any", "1", "--deadline", "0.2", env=env) as command:
        line = command.wait_for("error: ")
        assert line.endswith(": no worker serves queue 'fx' now")
        assert command.end()[0] == 124


def test_a_broker_that_is_lost_is_said(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text("1\n" * 100)
    with EmbeddedBroker() as broker:
        asyncio.run(_come_and_go(broker.url, life_ms=60_000))
        env = environment(STREAMFLEET_REDIS_URL=broker.url)
        with running("call", "any", "--file", str(tmp_path / "in.jsonl"), env=env) as command:
            asyncio.run(_submitted(broker.url))
            broker.stop()
            command.wait_for("cannot be reached: trying again")
            os.killpg(command.process.pid, signal.SIGINT)
            assert command.end()[0] == 130


async def _come_and_go(url: str, life_ms: int = 0) -> None:
    """A worker of the queue `fx` is announced, and is gone after `life_ms`."""
    async with HandWorker(url, "fx") as worker:
        for life in dict.fromkeys((60_000, life_ms)):
            await worker.announce(life_ms=life, model="any", tasks=["call"])


async def _submitted(url: str) -> None:
    async with Client(url, "fx") as client, asyncio.timeout(60):
        while not (await client.depth()).open:  # noqa: ASYNC110 (another process makes it true)
            await asyncio.sleep(0.01)
