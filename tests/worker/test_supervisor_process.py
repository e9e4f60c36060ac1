"""Supervised worker processes on a real queue: what an operator sees when they die, drain and are replaced.

The lease is ten minutes in all of them: what another worker runs within a test has been handed to it.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import pytest

from command import descendants, wait_gone
from eventually import eventually
from hired import ends, eventually_so, record, submit
from streamfleet_common.broker import Broker

PATIENCE_S = 60.0
LAME = str(Path(__file__).parent / "lame_worker.py")


class Fleet:
    """A supervisor's process, and what it and its workers log."""

    def __init__(self, folder: Path, environment: dict[str, str], *command: str) -> None:
        self.folder = folder
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, *command],
                env=os.environ | environment | {"LAME_FOLDER": str(folder)},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self) -> str:
        return self._log.read_text()

    def lines(self, event: str) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.text.splitlines() if line.endswith("}")]
        return [line for line in lines if line["event"] == event]

    async def said(self, event: str, times: int = 1) -> list[dict[str, Any]]:
        await eventually(
            lambda: len(self.lines(event)) >= times or self.process.poll() is not None,
            f"{event!r} {times} times in {self.text}",
        )
        lines = self.lines(event)
        assert len(lines) >= times, self.text
        return lines

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, PATIENCE_S)

    def pid(self, name: str) -> int:
        return next(int(line["pid"]) for line in self.lines("worker started") if line["worker"] == name)


Launch = Callable[..., Fleet]


@pytest.fixture
def launch(redis_url: str, tmp_path: Path) -> Iterator[Launch]:
    fleets: list[Fleet] = []

    def start(engine: str | None = None, **settings: str) -> Fleet:
        values = {
            "redis_url": redis_url,
            "queue": "q",
            "engine": "scripted",
            "log_format": "json",
            "workers": "2",
            "lease_s": "600",
        }
        environment = {f"STREAMFLEET_{name.upper()}": value for name, value in (values | settings).items()}
        command = ("-m", "streamfleet_worker") if engine is None else (LAME, engine)
        folder = tmp_path / str(len(fleets))
        folder.mkdir()
        fleets.append(Fleet(folder, environment, *command))
        return fleets[-1]

    yield start
    for fleet in fleets:
        family = descendants(fleet.process.pid)
        for pid in (fleet.process.pid, *family):
            if fleet.process.poll() is None or pid != fleet.process.pid:
                os.kill(pid, signal.SIGKILL)
        fleet.process.wait()
        wait_gone(family)


def environment(pid: int) -> list[str]:
    """Of another process, as it was started."""
    return Path(f"/proc/{pid}/environ").read_text().split("\0")


async def owner(broker: Broker, rid: str) -> str:
    """Who runs a request, once it runs."""
    await eventually_so(lambda: _runs(broker, rid), "a start")
    return (await record(broker, rid)).owner


async def _runs(broker: Broker, rid: str) -> bool:
    return (await record(broker, rid)).state == "running"


def get(port: int, path: str) -> tuple[int, str] | None:
    try:
        with urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as reply:
            return reply.status, reply.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()
    except URLError:
        return None


BEGAN = 'streamfleet_process_start_time_seconds{queue="q",worker="1"}'


def page(port: int) -> dict[str, float]:
    """Every series as it is written on the page of metrics, and its value."""
    answer = get(port, "/metrics")
    for _ in range(20):
        if answer is None or answer[0] != 503:  # as on a machine that stood still meanwhile
            break
        answer = get(port, "/metrics")
    assert answer is not None
    assert answer[0] == 200, answer
    lines = [line.rpartition(" ") for line in answer[1].splitlines() if not line.startswith("#")]
    series = {name: float(value) for name, _, value in lines}
    assert len(series) == len(lines), "no series twice"
    return series


def counted(port: int, name: str) -> float:
    """A counter, summed over its labels."""
    return sum(value for series, value in page(port).items() if series.startswith(f"streamfleet_{name}{{"))


# --- deaths


async def test_a_killed_worker_s_work_runs_elsewhere_at_once(broker: Broker, launch: Launch) -> None:
    fleet = launch("slow")
    await fleet.said("ready", 2)
    (rid,) = await submit(broker, ["ECHO 100"])
    victim = await owner(broker, rid)
    os.kill(fleet.pid(victim), signal.SIGKILL)
    (end,) = await ends(broker, [rid])
    assert (end.state, end.attempt) == ("done", 2)
    assert end.worker != victim
    (handed_back,) = await fleet.said("work handed back")
    assert (handed_back["worker"], handed_back["requests"], handed_back["crashed"]) == (victim, 1, True)
    assert (handed_back["rids"], handed_back["buried"]) == ([rid], [])
    assert victim not in [card.worker for card in await broker.cards()]

    (death,) = await fleet.said("worker ended")
    assert death["how"] == "it was killed by signal 9"
    assert 0 <= death["again_in_s"] <= 1
    again = (await fleet.said("worker started", 3))[2]
    assert again["number"] == death["number"]
    assert again["worker"] != victim
    await fleet.said("ready", 3)
    fleet.process.terminate()
    assert await fleet.ended() == 0


async def test_workers_that_cannot_load_end_it_with_their_last_words(broker: Broker, launch: Launch) -> None:
    fleet = launch("crashing", workers="1", max_crashes="2")
    assert await fleet.ended() == 1
    assert len(fleet.lines("worker started")) == 2
    (why,) = [line for line in fleet.text.splitlines() if "giving up: " in line]
    assert "2 crashes without one answered request" in why
    assert "it ended with status 1" in why
    assert "the engine cannot be built (RuntimeError: CUDA says no)" in why


async def test_without_redis_they_are_tried_again_and_none_has_crashed(
    broker: Broker, launch: Launch
) -> None:
    fleet = launch(redis_url="redis://127.0.0.1:1/0", workers="1", max_crashes="1")
    await fleet.said("worker ended")
    await fleet.said("worker started", 2)
    fleet.process.terminate()
    assert await fleet.ended() == 0


# --- the end


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_drains_all_that_runs(broker: Broker, launch: Launch, number: int) -> None:
    fleet = launch("slow", drain_timeout_s="60")
    await fleet.said("ready", 2)
    rids = await submit(broker, ["ECHO 50"] * 8)
    for rid in rids:
        await owner(broker, rid)
    # As a terminal does it: to every process of the group, which the workers are none of.
    os.killpg(fleet.process.pid, number)
    assert await fleet.ended() == 0
    assert {(end.state, end.attempt) for end in await ends(broker, rids)} == {("done", 1)}
    assert await broker.cards() == []
    assert len(fleet.lines("stopped")) == 3


async def test_a_second_signal_is_passed_on(broker: Broker, launch: Launch) -> None:
    fleet = launch("slow", drain_timeout_s="3600")
    await fleet.said("ready", 2)
    for rid in await submit(broker, ["ECHO 2000"] * 2):
        await owner(broker, rid)
    fleet.process.terminate()
    await fleet.said("draining", 3)
    fleet.process.terminate()
    assert await fleet.ended() == 0


async def test_killed_it_leaves_workers_that_drain_and_say_so(broker: Broker, launch: Launch) -> None:
    fleet = launch("slow", drain_timeout_s="60")
    await fleet.said("ready", 2)
    rids = await submit(broker, ["ECHO 50"] * 2)
    for rid in rids:
        await owner(broker, rid)
    workers = descendants(fleet.process.pid)
    assert len(workers) == 2
    fleet.process.kill()
    wait_gone(workers)
    assert {(end.state, end.attempt) for end in await ends(broker, rids)} == {("done", 1)}
    assert len(fleet.lines("stopped")) == 2
    assert "Traceback" not in fleet.text


# --- replacing


async def test_a_rolling_restart_under_load_loses_and_repeats_nothing(broker: Broker, launch: Launch) -> None:
    fleet = launch("slow", http_port="0", drain_timeout_s="60")
    (listening,) = await fleet.said("listening")
    before = {line["worker"] for line in await fleet.said("ready", 2)}
    rids = await submit(broker, ["ECHO 50"] * 40)
    fleet.process.send_signal(signal.SIGHUP)
    await fleet.said("all workers are replaced")
    rids += await submit(broker, ["ECHO 5"] * 40)
    answers = await ends(broker, rids)
    assert {(end.state, end.attempt) for end in answers} == {("done", 1)}
    now = {card.worker for card in await broker.cards()}
    assert len(now) == 2
    assert not now & before
    # Also what those told last that are gone, which nobody has asked for.
    assert len(fleet.lines("listening")) == 1
    await eventually(lambda: counted(listening["port"], "request_success_total") == 80, "the counts of all")
    assert counted(listening["port"], "worker_restarts_total") == 0, "nobody has failed"
    fleet.process.terminate()
    assert await fleet.ended() == 0


async def test_the_counts_of_a_killed_worker_stay_and_its_gauges_go(broker: Broker, launch: Launch) -> None:
    fleet = launch(workers="1", http_port="0")
    (listening,) = await fleet.said("listening")
    port = listening["port"]
    (ready,) = await fleet.said("ready")
    await ends(broker, await submit(broker, ["ECHO 2"] * 3))
    # An end is in Redis before its worker hears so, and counts it.
    await eventually(lambda: counted(port, "generation_tokens_total") == 6, "the count of all three")
    await eventually(lambda: BEGAN in page(port), "the worker's gauges")
    first = page(port)
    os.kill(fleet.pid(ready["worker"]), signal.SIGKILL)
    await fleet.said("ready", 2)
    await eventually(lambda: get(port, "/readyz") == (200, "ok\n"), "its successor")
    await eventually(lambda: BEGAN in page(port), "its successor's gauges")
    second = page(port)
    assert second.keys() - first.keys() == set()
    assert counted(port, "generation_tokens_total") == 6
    await ends(broker, await submit(broker, ["ECHO 2"]))
    await eventually(lambda: counted(port, "generation_tokens_total") == 8, "the count of the fourth")
    third = page(port)
    sums = [series for series in first if 'worker="' not in series and "supervisor" not in series]
    assert len(sums) > 200
    for series in sums:
        assert first[series] <= second[series] <= third[series], series
    assert second[BEGAN] > first[BEGAN], "another process in the same slot"
    assert third['streamfleet_worker_restarts_total{queue="q"}'] == 1
    assert third['streamfleet_supervisor_workers{queue="q",state="ready"}'] == 1
    fleet.process.terminate()
    assert await fleet.ended() == 0
    assert get(port, "/readyz") is None


async def test_a_worker_that_does_not_answer_keeps_nobody_waiting(broker: Broker, launch: Launch) -> None:
    fleet = launch(http_port="0")
    (listening,) = await fleet.said("listening")
    port = listening["port"]
    one, other = [fleet.pid(line["worker"]) for line in await fleet.said("ready", 2)]
    await ends(broker, await submit(broker, ["ECHO 1"] * 5))
    # An end is in Redis before its worker hears so; and a busy machine may leave a worker out of a page.
    await eventually(lambda: counted(port, "request_success_total") == 5, "the count of all five")

    def slots() -> list[str]:
        return [series for series in page(port) if series.startswith("streamfleet_num_requests_running")]

    await eventually(lambda: len(slots()) == 2, "both workers' gauges")
    os.kill(one, signal.SIGSTOP)
    assert counted(port, "request_success_total") == 5
    await eventually(lambda: len(slots()) == 1, "the other one's gauge alone")
    await eventually(lambda: get(port, "/readyz") == (200, "ok\n"), "the other one")
    os.kill(other, signal.SIGSTOP)
    await eventually(lambda: not slots(), "no gauge of any")
    assert get(port, "/readyz") == (503, "no worker is ready (1: no answer; 2: no answer)\n")
    for pid in (one, other):
        os.kill(pid, signal.SIGCONT)
    await eventually(lambda: get(port, "/readyz") == (200, "ok\n"), "an answer")
    await eventually(lambda: get(port, "/healthz") == (200, "ok\n"), "an answer that all is well")
    fleet.process.terminate()
    assert await fleet.ended() == 0


# --- before it begins


async def test_a_port_that_is_taken_is_said_once_and_no_worker_starts(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        fleet = launch(http_port=str(port))
        assert await fleet.ended() == 1
    assert f"cannot listen on 127.0.0.1:{port}" in fleet.text
    assert len(fleet.text.splitlines()) == 1


async def test_wrong_settings_are_said_once(launch: Launch) -> None:
    fleet = launch(max_batch_size="many")
    assert await fleet.ended() == 2
    assert "STREAMFLEET_MAX_BATCH_SIZE" in fleet.text
    assert len(fleet.text.splitlines()) == 1


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize(("own", "expected"), [(None, "glibc.malloc.hugetlb=1"), ("x=1", "x=1")])
async def test_workers_ask_for_huge_pages_unless_told_otherwise(
    launch: Launch, monkeypatch: pytest.MonkeyPatch, own: str | None, expected: str
) -> None:
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    if own is not None:
        monkeypatch.setenv("GLIBC_TUNABLES", own)
    fleet = launch(workers="1")
    (line,) = await fleet.said("worker started")
    pid = int(line["pid"])
    await eventually(lambda: environment(pid) != [""], "its program")  # between fork and exec it has none
    assert f"GLIBC_TUNABLES={expected}" in environment(pid)


def test_it_imports_nothing_that_only_workers_need() -> None:
    script = "import sys, streamfleet_worker.supervisor_process; print(*sys.modules)"
    loaded = subprocess.check_output([sys.executable, "-c", script], text=True).split()
    assert "streamfleet_worker.supervisor" in loaded
    unwanted = ("torch", "transformers", "numpy", "prometheus_client", "streamfleet_worker.engine")
    assert not [name for name in loaded if name in unwanted]
