"""`streamfleet bulk` and `dead`, as somebody types them, with the scripted engine behind them."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
from typer.testing import CliRunner

from command import LIMIT_S, POLL_S, Running, environment, running, streamfleet
from streamfleet_common.keys import Keys
from streamfleet_producer.bulk.settings import RQ_QUEUE
from streamfleet_producer.cli.app import app

LEASE = ("--lease", "2")


@pytest.fixture
def raw(fleet_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(fleet_url, protocol=2) as client:
        client.delete(f"rq:queue:{RQ_QUEUE}")
        yield client


@pytest.fixture
def env(fleet_url: str, raw: Any) -> Mapping[str, str]:
    return environment(STREAMFLEET_REDIS_URL=fleet_url, STREAMFLEET_QUEUE="smollm2")


def write(folder: Path, prompts: list[str]) -> tuple[str, str]:
    lines = [
        {"custom_id": f"c{number}", "request": {"prompt": prompt, "max_tokens": 2000}}
        for number, prompt in enumerate(prompts)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(folder / "in.jsonl"), str(folder / "out.jsonl")


def answers(folder: Path) -> dict[str, str]:
    lines = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert max(Counter(line["custom_id"] for line in lines).values(), default=1) == 1
    return {line["custom_id"]: line["answer"]["choices"][0]["text"] for line in lines}


def called(*arguments: str, env: Mapping[str, str], status: int = 0) -> str:
    """What a command says on stdout, in this process: several of their own would take seconds."""
    ended = CliRunner().invoke(app, arguments, env=dict(env))
    assert ended.exit_code == status, ended.output
    return ended.stdout


def document(*arguments: str, env: Mapping[str, str], status: int = 0) -> Any:
    return json.loads(called(*arguments, env=env, status=status))


def seen(env: Mapping[str, str], id: str, is_there: Callable[[Any], bool]) -> Any:  # noqa: A002
    """A job's document once it is as wanted."""
    until = time.monotonic() + LIMIT_S
    while not is_there(found := document("bulk", "status", id, "--json", env=env)):
        assert time.monotonic() < until, f"not within {LIMIT_S} s: {found}"
        time.sleep(POLL_S)
    return found


def test_a_file_is_answered_by_a_job(env: Mapping[str, str], tmp_path: Path) -> None:
    paths = write(tmp_path, [f"ECHO 2 AS c{number}." for number in range(40)])
    with running("bulk", "run", *paths, env=env) as command:
        # Nobody runs jobs yet, which is said, and how that is changed.
        command.wait_for("start one with `streamfleet bulk worker`")
        with running("bulk", "worker", "--folder", str(tmp_path), *LEASE, env=env) as worker:
            status, said = command.end()
            assert status == 0, said
            assert "completed, 40 answered, 0 failed" in said[-1]
            name = said[-1].partition(":")[0]
            assert answers(tmp_path) == {f"c{number}": f"c{number}.0 c{number}.1" for number in range(40)}
            # A line that fails is the job's exit status; and the file is not written over.
            called("bulk", "run", *paths, env=env, status=2)
            (tmp_path / "in.jsonl").write_text('{"custom_id": "a"}\n')
            (tmp_path / "out.jsonl").unlink()
            failed = document("bulk", "run", *paths, "--json", env=env, status=1)
            assert failed["counts"] == {"total": 1, "completed": 0, "failed": 1, "in_flight": 0}
            assert Path(failed["errors"]).read_text().startswith('{"custom_id":"a","error":')
            os.kill(worker.process.pid, signal.SIGTERM)
            assert worker.end()[0] == 0
    listed = called("bulk", "list", env=env)
    assert listed.splitlines()[2].split()[:5] == [name, "completed", "40", "40", "0"]
    called("bulk", "status", "batch_" + "0" * 32, env=env, status=5)


def test_a_job_that_runs_is_left_told_to_go_on_and_cancelled(env: Mapping[str, str], tmp_path: Path) -> None:
    # Five that are quick, and some that nobody would wait for.
    quick, slow = ["ECHO 1"] * 5, ["ECHO 2000 TICK 1000"] * 20
    paths = write(tmp_path, quick + slow)
    with running("bulk", "worker", "--folder", str(tmp_path), *LEASE, env=env) as first:
        with running("bulk", "run", *paths, "--window", "8", env=env) as command:
            while not (found := document("bulk", "list", "--json", env=env)) or found[0]["input"] != paths[0]:
                time.sleep(POLL_S)
            name = found[0]["id"]
            before = seen(
                env, name, lambda one: one["counts"]["completed"] == 5 and one["counts"]["in_flight"]
            )
            assert before["status"] == "in_progress"
            # Ctrl-C ends the command, not the job.
            os.kill(command.process.pid, signal.SIGINT)
            command.wait_for(f"streamfleet bulk status {name} --wait")
            assert command.process.wait(LIMIT_S) == 130
        # Its worker ends in order, and lets the job go: another one goes on with it.
        ended_in_order(first)
    with running("bulk", "worker", "--folder", str(tmp_path), *LEASE, env=env):
        again = seen(env, name, lambda one: one["runs"] == 2 and one["counts"]["in_flight"] == 8)
        assert again["counts"]["completed"] == 5
        cancelled = document("bulk", "cancel", name, "--json", env=env)
        assert cancelled["status"] in {"cancelling", "cancelled"}
        cancelled = document("bulk", "status", name, "--wait", "--json", env=env, status=1)
    assert (cancelled["status"], cancelled["counts"]["completed"]) == ("cancelled", 5)
    assert set(answers(tmp_path)) == {f"c{number}" for number in range(5)}
    assert Path(cancelled["errors"]).read_bytes() == b""
    # Nothing of it runs on in the fleet.
    queues = document("queues", "--json", env=env)
    assert [(queue["queued"], queue["running"]) for queue in queues] == [(0, 0)]


def ended_in_order(worker: Running) -> None:
    os.kill(worker.process.pid, signal.SIGTERM)
    status, said = worker.end()
    assert status == 0, said


@pytest.mark.slow
def test_the_cron_puts_upkeep_into_the_queue_until_it_is_ended(env: Mapping[str, str], raw: Any) -> None:
    names = {b"upkeep_sweep-queues", b"upkeep_remove-files", b"upkeep_trim-dead"}
    raw.delete(*(b"rq:job:" + name for name in names))
    with running("bulk", "cron", env=env) as command:
        until = time.monotonic() + LIMIT_S
        while set(raw.lrange(f"rq:queue:{RQ_QUEUE}", 0, -1)) != names:
            assert time.monotonic() < until
            time.sleep(POLL_S)
        ended_in_order(command)
    # A worker does them, and ends then.
    assert streamfleet("bulk", "worker", "--burst", env=env).returncode == 0
    assert {raw.hget(b"rq:job:" + name, "status") for name in names} == {b"finished"}


def test_a_redis_that_is_not_there_is_said() -> None:
    env = environment(STREAMFLEET_RQ_URL="redis://localhost:1/0")
    for command in ("list", "worker", "cron"):
        ended = CliRunner().invoke(app, ["bulk", command], env=env)
        assert ended.exit_code == 4, command
        assert "STREAMFLEET_RQ_URL" in ended.stderr


def test_dead_letters_are_listed_shown_and_dropped(env: Mapping[str, str], raw: Any) -> None:
    keys = Keys("smollm2")
    for number in range(3):
        raw.xadd(
            keys.dead, {"rid": f"r{number}", "why": "its workers died", "tenant": "t"}, id=f"{number + 1}-0"
        )
    listed = called("dead", "list", env=env).splitlines()
    assert [line.split()[0] for line in listed] == ["ID", "1-0", "2-0", "3-0"]
    shown = document("dead", "show", "2-0", "--json", env=env)
    assert (shown["rid"], shown["tenant"], shown["is_kept"]) == ("r1", "t", False)
    refused = CliRunner().invoke(app, ["dead", "replay", "2-0"], env=dict(env))
    assert refused.exit_code == 2
    assert "STREAMFLEET_DEAD_LETTER_PAYLOAD" in refused.stderr
    # Of a misspelled queue there are no letters either: that must not read as if they were gone.
    for rest in (["list"], ["show", "2-0"], ["drop", "--all"], ["replay", "--all"]):
        misspelled = CliRunner().invoke(app, ["dead", *rest, "--queue", "smolm2"], env=dict(env))
        assert (misspelled.exit_code, "queues there are: smollm2" in misspelled.stderr) == (5, True), rest
    whole = CliRunner().invoke(app, ["dead", "replay", "--all"], env=dict(env))
    assert (whole.exit_code, whole.stdout) == (0, "")
    assert "passed over 3" in whole.stderr
    dropped = CliRunner().invoke(app, ["dead", "drop", "1-0", "7-7"], env=dict(env))
    assert (dropped.exit_code, dropped.stdout) == (0, "1\n")
    assert "not to be found: 1" in dropped.stderr
    called("dead", "drop", env=env, status=2)
    called("dead", "show", "1-0", env=env, status=5)
    assert document("dead", "drop", "--all", "--json", env=env) == {"dropped": 2}
    assert raw.xlen(keys.dead) == 0
