"""`streamfleet explain` on a real fleet: what it prints, and how it exits."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable

import pytest
from rich.cells import cell_len
from typer.testing import CliRunner, Result

from command import environment, streamfleet
from hand_worker import HandWorker
from streamfleet_common.schemas import GenerateRequest
from streamfleet_producer import Client
from streamfleet_producer.cli.app import app

Call = Callable[..., Result]


@pytest.fixture
def call(fleet_url: str, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command in this process, on the fleet."""
    monkeypatch.setenv("STREAMFLEET_REDIS_URL", fleet_url)
    monkeypatch.delenv("STREAMFLEET_QUEUE", raising=False)
    return lambda *arguments: CliRunner().invoke(app, arguments)


def submitted(call: Call, *arguments: str) -> str:
    rid = call("submit", *arguments).stdout.strip()
    call("result", rid)
    return rid


def test_of_an_answer_in_words_and_for_scripts(call: Call) -> None:
    rid = submitted(call, "ECHO 3 TICK 20")
    told = call("explain", rid)
    assert told.exit_code == 0, told.output
    lines = told.stdout.splitlines()
    assert lines[0] == f"request   {rid} of queue smollm2"
    assert lines[1].startswith("state     done after ")
    assert any(line.startswith("batch     It joined the running batch ") for line in lines)
    assert all(cell_len(line) <= 80 for line in lines)
    assert "tok0" not in told.stdout
    document = json.loads(call("explain", rid, "--json").stdout)
    assert document["state"] == "done"
    assert sum(phase["percent"] for phase in document["phases"]) == 100
    took_ms = document["ended_at_ms"] - document["accepted_at_ms"]
    # The server tells whole milliseconds.
    assert sum(phase["ms"] for phase in document["phases"]) == pytest.approx(took_ms, abs=2)
    assert document["batch"]["id"].startswith(document["worker"] + "/")
    assert document["batch"]["size"] == 1
    assert document["usage"]["completion_tokens"] == 3
    assert "tok0" not in json.dumps(document)


def test_of_a_failure_it_says_what_to_do(call: Call) -> None:
    rid = submitted(call, "ECHO 9 RAISE@1")
    said = " ".join(call("explain", rid).stdout.split())
    assert "state failed after" in said
    assert "why generation_failed: told to fail" in said
    assert "to do It would fail again as it is" in said


def test_of_nobody(call: Call) -> None:
    told = call("explain", "00" + "f" * 32)
    assert (told.exit_code, told.stdout) == (5, "")
    assert "queue 'smollm2' knows no request" in told.stderr
    told = call("explain", "00" + "f" * 32, "--json")
    assert json.loads(told.stderr)["error"]["code"] == "request_not_found"


def test_the_queue_is_found_among_several(redis_url: str) -> None:
    async def submit() -> str:
        async with HandWorker(redis_url, "one") as one, HandWorker(redis_url, "two") as two:
            for worker in (one, two):
                await worker.announce()
            async with Client(redis_url, queue="two") as client:
                return (await client.submit(GenerateRequest(prompt="Hi"))).id

    rid = asyncio.run(submit())
    told = CliRunner().invoke(app, ["explain", rid, "--redis-url", redis_url])
    assert told.exit_code == 0, told.output
    assert told.stdout.startswith(f"request   {rid} of queue two\nstate     queued ")
    told = CliRunner().invoke(app, ["explain", "00" + "f" * 32, "--redis-url", redis_url])
    assert (told.exit_code, told.stdout) == (5, "")
    assert "none of 2 queues knows a request" in told.stderr


@pytest.mark.slow
def test_where_a_terminal_has_no_blocks(fleet_url: str, call: Call) -> None:
    rid = submitted(call, "ECHO 3")
    env = environment(STREAMFLEET_REDIS_URL=fleet_url, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    told = streamfleet("explain", rid, env=env)
    assert told.returncode == 0
    assert "#" in told.stdout
    assert told.stdout.isascii()
