"""The worker's log lines, whoever speaks and on whichever thread."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from threading import Thread

import pytest
import structlog

from streamfleet_common import logs


@pytest.fixture
def engine_log() -> Iterator[logging.Logger]:
    """What the engine logs to; nobody listens any more afterwards."""
    ours = logging.getLogger("streamfleet_worker")
    yield logging.getLogger("streamfleet_worker.engine.models")
    for name in logs.FORWARDED:
        logging.getLogger(name).handlers.clear()
    ours.setLevel(logging.NOTSET)
    structlog.reset_defaults()


def test_what_the_engine_says_on_its_thread_is_a_line_like_any_other(
    engine_log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("json", "info", worker="w1")

    def speak() -> None:
        engine_log.debug("unheard")
        engine_log.info("loading %s", "m")

    thread = Thread(target=speak)
    thread.start()
    thread.join()
    (line,) = capsys.readouterr().err.splitlines()
    said = json.loads(line)
    assert (said["event"], said["level"], said["worker"]) == ("loading m", "info", "w1")


def test_a_line_about_a_request_says_which(
    engine_log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("json", "info", queue="q", worker="w1")
    engine_log.warning("failed: %s", "KeyError", extra={"rid": "00ab", "epoch": 2, "prompt": "canary"})
    (line,) = capsys.readouterr().err.splitlines()
    said = json.loads(line)
    assert (said["rid"], said["epoch"], said["queue"], said["worker"]) == ("00ab", 2, "q", "w1")
    assert "canary" not in line


async def test_what_the_event_loop_complains_of_is_told_without_words(
    engine_log: logging.Logger, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.configure("json", "info", worker="w1")
    logs.watch_loop()
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def fail(prompt: str) -> None:
        over.set()
        raise ValueError(prompt)

    loop.call_soon(fail, "canary")
    await over.wait()
    loop.call_exception_handler({"message": "Task was destroyed but it is pending!", "task": "canary"})
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["error"], first["worker"]) == ("ValueError", "w1")
    assert first["at"][-1].endswith(" fail")
    assert second["error"] == "Task was destroyed but it is pending!"
    assert "canary" not in repr([first, second])


def test_a_log_that_nobody_reads_any_more_ends_nobody() -> None:
    script = (
        "import sys, structlog; from streamfleet_common import logs; logs.configure('json', 'info');"
        "sys.stdin.read(); log = structlog.get_logger(); [log.info('x' * 9000) for _ in 'abc']; print('on')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        process.stderr.close()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.close()
        assert process.stdout.read() == b"on\n"
        assert process.wait(60) == 0
