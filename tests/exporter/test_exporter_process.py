"""`streamfleet exporter` as a process: what it serves, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import pytest

from command import LIMIT_S, environment, running, streamfleet
from eventually import eventually
from exporter_page import samples_of, series

JSON = {"STREAMFLEET_LOG_FORMAT": "json"}


def test_it_serves_until_it_is_told_to_end(redis_url: str) -> None:
    env = environment(STREAMFLEET_REDIS_URL=redis_url, **JSON)
    with running("exporter", "--port", "0", "-q", "a", "-q", "b", env=env) as exporter:
        said = json.loads(exporter.wait_for("exporter listens"))
        with build_opener(ProxyHandler({})).open(said["url"], timeout=LIMIT_S) as reply:
            seen = samples_of(reply.read().decode())
        exporter.process.send_signal(signal.SIGTERM)
        status, lines = exporter.end()

    assert seen[series("broker_up")] == 1
    assert {dict(labels)["queue"] for name, labels in seen if name == "queue_depth"} == {"a", "b"}
    assert status == 0, lines


@pytest.mark.slow
def test_it_starts_where_redis_is_not_there_yet() -> None:
    env = environment(STREAMFLEET_REDIS_URL="redis://127.0.0.1:1/0", **JSON)
    with running("exporter", "--port", "0", "--timeout-s", "30", env=env) as exporter:
        said = json.loads(exporter.wait_for("exporter listens"))
        with build_opener(ProxyHandler({})).open(said["url"], timeout=LIMIT_S) as reply:
            assert samples_of(reply.read().decode())[series("broker_up")] == 0
        assert json.loads(exporter.wait_for("Redis does not answer"))["level"] == "warning"
        exporter.process.send_signal(signal.SIGINT)
        assert exporter.end()[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", ["exporter", "gateway"])
@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM])
async def test_told_to_end_while_it_begins_it_ends_in_peace(
    redis_url: str, command: str, ending: signal.Signals
) -> None:
    with running(command, "--port", "0", "--redis-url", redis_url, env=environment(**JSON)) as begun:
        words = Path(f"/proc/{begun.process.pid}/cmdline")
        # The command has given the process to the server, which has yet to import what it needs.
        await eventually(
            lambda: f"streamfleet_producer.{command}" in words.read_text().split("\0"), "the server"
        )
        begun.process.send_signal(ending)
        status, lines = begun.end()
    assert status == 0, lines
    assert "Traceback" not in "".join(lines)


def test_what_comes_before_a_server_s_program_runs_is_kept_for_it() -> None:
    script = """if True:
        import os, signal
        from streamfleet_producer.early_end import Beginning, hold
        over = Beginning()
        over.watch()
        over.is_over = True
        os.kill(os.getpid(), signal.SIGINT)
        print("served", flush=True)
        hold()
        os.kill(os.getpid(), signal.SIGINT)
        print("held", flush=True)
        Beginning().watch()
        print("late", flush=True)
    """
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment(), capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "served\nheld\n", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "status", "words"),
    [
        ({"STREAMFLEET_EXPORTER_PORT": "http"}, 2, "STREAMFLEET_EXPORTER_PORT"),
        ({"STREAMFLEET_EXPORTER_QUEUES": '["no queue"]'}, 2, "STREAMFLEET_EXPORTER_QUEUES"),
        ({"STREAMFLEET_EXPORTER_TIMEOUT_S": "0"}, 2, "STREAMFLEET_EXPORTER_TIMEOUT_S"),
        ({"STREAMFLEET_REDIS_URL": "http://127.0.0.1"}, 2, "is no Redis URL"),
        ({"STREAMFLEET_EXPORTER_HOST": "nowhere.invalid"}, 1, "choose another STREAMFLEET_EXPORTER_PORT"),
    ],
)
def test_what_keeps_it_from_starting_is_said(settings: dict[str, str], status: int, words: str) -> None:
    done = streamfleet("exporter", env=environment(**{"STREAMFLEET_EXPORTER_PORT": "0"} | settings))

    assert done.returncode == status, done.stderr
    assert words in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_port_that_is_taken_ends_it_with_1() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = streamfleet("exporter", "--port", port, env=environment(**JSON))

    assert done.returncode == 1
    assert f"127.0.0.1:{port}" in done.stderr
