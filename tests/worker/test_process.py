"""Worker processes: what an operator sees from outside."""

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
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import redis
from prometheus_client.parser import text_string_to_metric_families

from eventually import eventually
from hired import ends, eventually_so, submit
from streamfleet_common.broker import Broker
from streamfleet_common.keys import Keys
from streamfleet_worker.intake import INLINE_BYTES

PATIENCE_S = 60.0
LAME = str(Path(__file__).parent / "lame_worker.py")


class Process:
    """A worker process and what it logs."""

    def __init__(self, folder: Path, environment: dict[str, str], *command: str) -> None:
        self.folder = folder
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self.child = subprocess.Popen(
                [sys.executable, *command],
                env=os.environ | environment | {"LAME_FOLDER": str(folder)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def text(self) -> str:
        return self._log.read_text()

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text.splitlines() if line.endswith("}")]

    def line(self, event: str) -> dict[str, Any] | None:
        return next((line for line in self.lines if line["event"] == event), None)

    async def said(self, event: str) -> dict[str, Any]:
        await eventually(lambda: self.line(event) or self.child.poll() is not None, event)
        line = self.line(event)
        assert line is not None, self.text
        return line

    async def ended(self) -> int:
        return await asyncio.to_thread(self.child.wait, PATIENCE_S)

    def get(self, port: int, path: str) -> tuple[int, str]:
        try:
            with urlopen(f"http://127.0.0.1:{port}{path}", timeout=60) as reply:
                return reply.status, reply.read().decode()
        except HTTPError as error:
            return error.code, error.read().decode()


Launch = Callable[..., Process]


@pytest.fixture
def launch(redis_url: str, tmp_path: Path) -> Iterator[Launch]:
    children: list[Process] = []

    def start(engine: str | None = None, **settings: str) -> Process:
        values = {"redis_url": redis_url, "queue": "q", "engine": "scripted", "log_format": "json"} | settings
        environment = {f"STREAMFLEET_{name.upper()}": value for name, value in values.items()}
        command = ("-m", "streamfleet_worker") if engine is None else (LAME, engine)
        folder = tmp_path / str(len(children))
        folder.mkdir()
        children.append(Process(folder, environment, *command))
        return children[-1]

    yield start
    for process in children:
        process.child.kill()
        process.child.wait()


async def test_it_serves_tells_its_state_and_drains_at_sigterm(
    broker: Broker, launch: Launch, redis_url: str
) -> None:
    worker = launch(http_port="0")
    port = int((await worker.said("listening"))["port"])
    ready = await worker.said("ready")
    assert (ready["model"], ready["queue"], ready["max_batch_size"]) == ("scripted", "q", 8)
    assert worker.get(port, "/readyz") == (200, "ok\n")
    assert worker.get(port, "/healthz") == (200, "ok\n")
    (answer,) = await ends(broker, await submit(broker, ["a secret prompt"]))
    assert answer.text == "a secret prompt"
    assert answer.worker == ready["worker"]
    samples = {
        (sample.name, sample.labels.get("worker")): sample.value
        for family in text_string_to_metric_families(worker.get(port, "/metrics")[1])
        for sample in family.samples
    }
    assert 0 <= samples["streamfleet_seconds_since_last_poll", "0"] < 10
    assert samples["streamfleet_generation_tokens_total", None] == 1
    worker.child.terminate()
    assert await worker.ended() == 0
    assert [line["event"] for line in worker.lines] == [
        "starting",
        "listening",
        "ready",
        "draining",
        "stopped",
    ]
    assert "secret" not in worker.text
    assert await broker.cards() == []
    with redis.Redis.from_url(redis_url) as raw:
        assert raw.hkeys(Keys("q").workers) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_idle_it_ends_within_the_time_of_a_read(
    launch: Launch, number: signal.Signals, broker: Broker
) -> None:
    worker = launch(drain_timeout_s="3600", log_format="console")
    await eventually(lambda: " ready " in worker.text, "readiness")
    worker.child.send_signal(number)
    # Far under any of our timeouts, and far over what it takes.
    assert await asyncio.to_thread(worker.child.wait, 5.0) == 0


async def test_busy_it_finishes_what_it_runs_and_reads_no_more(broker: Broker, launch: Launch) -> None:
    worker = launch("slow", max_batch_size="4")
    await worker.said("ready")
    rids = await submit(broker, ["ECHO 60"] * 12, stream=True)
    await eventually_so(lambda: _running(broker, 4), "a full batch")
    worker.child.terminate()
    assert await worker.ended() == 0
    states = [found.state for found in await broker.status(rids, "default") if found is not None]
    assert sorted(states) == ["done"] * 4 + ["queued"] * 8
    assert await broker.cards() == []


async def _running(broker: Broker, count: int) -> bool:
    return (await broker.depth()).running == count


async def _was_handed_back(broker: Broker, rids: list[str], *, crashes: int) -> None:
    for found in await broker.status(rids, "default"):
        assert found is not None
        assert (found.state, found.attempts, found.crashes) == ("queued", 1, crashes)
    assert await broker.cards() == []


async def test_out_of_time_it_hands_back_what_is_left(broker: Broker, launch: Launch) -> None:
    worker = launch("slow", drain_timeout_s="0.2")
    await worker.said("ready")
    rids = await submit(broker, ["ECHO 2000"] * 3)
    await eventually_so(lambda: _running(broker, 3), "a batch")
    worker.child.terminate()
    assert await worker.ended() == 0
    await _was_handed_back(broker, rids, crashes=0)
    line = worker.line("requests handed back") or {}
    assert (line["count"], line["reason"]) == (3, "drain")


async def test_a_second_signal_hands_back_at_once(broker: Broker, launch: Launch) -> None:
    worker = launch("slow", drain_timeout_s="3600")
    await worker.said("ready")
    rids = await submit(broker, ["ECHO 2000"] * 3)
    await eventually_so(lambda: _running(broker, 3), "a batch")
    worker.child.terminate()
    await worker.said("draining")
    worker.child.terminate()
    assert await worker.ended() == 0
    await _was_handed_back(broker, rids, crashes=0)


async def test_an_engine_that_dies_ends_the_process_with_1(broker: Broker, launch: Launch) -> None:
    worker = launch("slow", drain_timeout_s="3600")
    await worker.said("ready")
    rids = await submit(broker, ["ECHO 2000"] * 3)
    await eventually_so(lambda: _running(broker, 3), "a batch")
    (worker.folder / "die").touch()
    assert await worker.ended() == 1
    await _was_handed_back(broker, rids, crashes=1)
    assert worker.lines[-1]["event"] == "the engine died (MemoryError: told to die); start the worker again"


async def test_an_engine_that_hangs_ends_the_process_with_1(broker: Broker, launch: Launch) -> None:
    worker = launch("slow", drain_timeout_s="3600", step_limit_s="1")
    await worker.said("ready")
    rids = await submit(broker, ["ECHO 2000"] * 3)
    await eventually_so(lambda: _running(broker, 3), "a batch")
    (worker.folder / "hang").touch()
    assert await worker.ended() == 1
    await _was_handed_back(broker, rids, crashes=1)
    assert "in one step for over 1 s" in worker.lines[-1]["event"]


async def test_a_step_that_holds_the_interpreter_ends_the_process_too(broker: Broker, launch: Launch) -> None:
    worker = launch(step_limit_s="1", lease_s="1.5")
    await worker.said("ready")
    (rid,) = await submit(broker, ["ECHO 5 BLOCK@2:600"])
    # No code of ours can run in it by then, so nothing is handed back: its lease runs out.
    assert await worker.ended() == 1
    assert "Timeout" in worker.text, "the stacks of its threads"
    assert "_hold_interpreter" in worker.text
    successor = launch(lease_s="1.5")
    await successor.said("ready")

    async def taken() -> bool:
        (found,) = await broker.status([rid], "default")
        return found is not None and found.attempts == 2

    await eventually_so(taken, "another try")
    (found,) = await broker.status([rid], "default")
    assert found is not None
    assert found.crashes == 1


async def test_told_to_stop_while_loading_it_goes_at_once(broker: Broker, launch: Launch) -> None:
    (rid,) = await submit(broker, ["early"])
    worker = launch("loading", http_port="0")
    port = int((await worker.said("listening"))["port"])
    await eventually((worker.folder / "loading").exists, "the loading")
    assert worker.get(port, "/readyz") == (503, "starting\n")
    assert worker.get(port, "/healthz") == (200, "ok\n")
    worker.child.terminate()
    assert await worker.ended() == 0
    assert worker.lines[-1]["event"] == "stopped while starting"
    assert await broker.cards() == []
    (found,) = await broker.status([rid], "default")
    assert found is not None
    assert found.state == "queued"


async def test_a_prompt_that_never_comes_ready_does_not_hold_the_process(
    broker: Broker, launch: Launch
) -> None:
    worker = launch("stuck", drain_timeout_s="0.1")
    await worker.said("ready")
    rids = await submit(broker, ["x" * INLINE_BYTES])
    await eventually((worker.folder / "preparing").exists, "the preparing")
    worker.child.terminate()
    assert await worker.ended() == 0
    await _was_handed_back(broker, rids, crashes=0)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ("unloadable", "no model 'x': name another"),
        ("crashing", "the engine cannot be built (RuntimeError: CUDA says no)"),
    ],
)
async def test_without_a_model_it_ends_with_1_and_one_line(
    broker: Broker, launch: Launch, engine: str, said: str
) -> None:
    (rid,) = await submit(broker, ["early"])
    worker = launch(engine)
    assert await worker.ended() == 1
    assert [line["event"] for line in worker.lines] == ["starting", said]
    assert worker.lines[-1]["level"] == "error"
    assert len(worker.text.splitlines()) == 2
    (found,) = await broker.status([rid], "default")
    assert found is not None
    assert found.state == "queued"


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "http://localhost"])
async def test_without_redis_it_ends_with_1_and_one_line(launch: Launch, url: str) -> None:
    worker = launch(redis_url=url)
    assert await worker.ended() == 1
    last = worker.lines[-1]
    assert (last["level"], last["code"]) == ("error", "broker_unavailable")
    assert "Redis" in last["event"]
    assert "Traceback" not in worker.text


async def test_on_a_taken_port_it_ends_with_1_and_reads_nothing(broker: Broker, launch: Launch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        worker = launch(http_port=str(taken.getsockname()[1]))
        assert await worker.ended() == 1
    assert "STREAMFLEET_HTTP_PORT" in worker.lines[-1]["event"]
    assert "Traceback" not in worker.text
    assert await broker.cards() == []


async def test_wrong_settings_end_it_with_2_and_the_variables_name(launch: Launch) -> None:
    worker = launch(max_batch_size="many")
    assert await worker.ended() == 2
    assert "STREAMFLEET_MAX_BATCH_SIZE" in worker.text
    assert len(worker.text.splitlines()) == 1


async def test_two_processes_share_a_queue_and_answer_each_request_once(
    broker: Broker, launch: Launch
) -> None:
    crew = [launch("slow", http_port="0") for _ in range(2)]
    for worker in crew:
        await worker.said("ready")
    rids = await submit(broker, ["ECHO 10"] * 64)
    answers = await ends(broker, rids)
    assert {(answer.state, answer.attempt) for answer in answers} == {("done", 1)}
    assert len({answer.worker for answer in answers}) == 2
    ports = [int((await worker.said("listening"))["port"]) for worker in crew]

    async def counted() -> bool:
        # Counted when the reply is there, which may be after the caller has seen the end.
        texts = [worker.get(port, "/metrics")[1] for worker, port in zip(crew, ports, strict=True)]
        return sum(map(successes, texts)) == 64

    await eventually_so(counted, "64 successes")


def successes(text: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "streamfleet_request_success_total"
    )
