"""`streamfleet top` at a terminal, with somebody at its keyboard, on a real server."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import termios
from typing import Any

import pytest
import redis
from rich.cells import cell_len

from broker_parts import card
from command import PROGRAM, environment, streamfleet
from server_view import T
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.worker_stats import WorkerStats
from terminal_process import TerminalProcess, on_terminal

HOUR_MS = 3_600_000
OUT_OF_SIGHT, IN_SIGHT = "\x1b[?1049h", "\x1b[?1049l"
"""Another screen, and the one there was before."""


@pytest.fixture
def url(redis_url: str) -> str:
    """A server with two workers on the queue `q`, and a dead letter."""

    async def announce() -> None:
        connections = Connections.open(redis_url)
        try:
            for name in ("w1", "w2"):
                stats = WorkerStats(window_s=10.0, ended=20, generated_tokens=300, running=2)
                await Broker(connections, "q").announce(card(name, stats=stats), life_ms=HOUR_MS)
        finally:
            await connections.close()

    asyncio.run(announce())
    with redis.Redis.from_url(redis_url) as raw:
        fields = {"rid": "00" + "a" * 32, "why": "workers die of it", "tenant": "acme", "lane": "high"}
        fields |= {"accepted": "1700000000000", "attempts": "3", "crashes": "2", "solo": "1", "worker": "w0"}
        raw.xadd(f"{T}:dead", {**fields, "digest": "d" * 64, "bytes": "1234"})
    return redis_url


@pytest.fixture
def raw(redis_url: str) -> Any:
    with redis.Redis.from_url(redis_url) as client:
        yield client


def watched(url: str, *arguments: str, **size: int) -> Any:
    command = (*PROGRAM, "top", "--redis-url", url, "--interval", "0.2", *arguments)
    return on_terminal(*command, env=environment(), **size)


def fits(top: TerminalProcess, width: int, height: int) -> bool:
    lines = top.lines()
    return len(lines) == height and all(cell_len(line) <= width for line in lines)


def test_keys_do_what_they_say_and_the_terminal_comes_back_as_it_was(url: str, raw: Any) -> None:
    with watched(url) as top:
        top.wait_for_line("> q ", " 60.0 ")  # (300 + 300) / 10 s
        assert OUT_OF_SIGHT in top.written
        top.wait_for(lambda _: fits(top, 80, 24), "a whole frame")
        assert not top.settings[3] & termios.ECHO

        top.press("p")
        top.wait_for_line("pause q", "y yes")
        top.press("n")
        top.wait_for_line("nothing was changed")
        assert raw.hget(f"{T}:control", "paused") is None
        top.press("py")
        top.wait_for_line("queue q is paused")
        assert raw.hget(f"{T}:control", "paused") == b"1"
        top.wait_for_line(">Pq ")
        top.press("py")
        top.wait_for_line("queue q is open")
        assert raw.hget(f"{T}:control", "paused") is None

        top.press("\t\x1b[BD")  # to the workers, the second of them
        top.wait_for_line("drain w2", "y yes")
        top.press("y")
        top.wait_for_line("asked to drain", "w2")
        assert raw.hexists(f"{T}:control", "drain:w2")
        assert not raw.hexists(f"{T}:control", "drain:w1")
        top.wait_for_line("w2", "asked")

        top.press("d")
        top.wait_for_line("acme", "workers die of it")
        top.press("\r")
        top.wait_for_line("request", "00" + "a" * 32)
        top.wait_for_line("1,234 bytes")
        top.press("\x1b")
        top.wait_for_line("oldest first")
        top.press("\x1b")
        top.wait_for_line("WORKER", "STATE")

        top.press("?")
        top.wait_for_line("any key: back")
        top.resize(120, 30)
        top.wait_for(lambda top: fits(top, 120, 30), "a larger picture")
        top.press(" ")
        top.wait_for_line("WORKER", "MODEL")

        top.press("q")
        assert top.end() == 0
        assert top.settings == top.before
        assert IN_SIGHT in top.written.rpartition(OUT_OF_SIGHT)[2]
        assert "\x1b[?25h" in top.written.rpartition("\x1b[?25l")[2]  # the cursor


@pytest.mark.slow
@pytest.mark.parametrize(("end", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_ends_it_and_gives_the_terminal_back(url: str, end: signal.Signals, status: int) -> None:
    with watched(url) as top:
        top.wait_for_line("QUEUE")
        if end == signal.SIGINT:
            top.press("\x03")
        else:
            top.process.send_signal(end)
        assert top.end() == status
        assert top.settings == top.before
        assert IN_SIGHT in top.written.rpartition(OUT_OF_SIGHT)[2]


@pytest.mark.slow
def test_a_fault_of_its_own_gives_the_terminal_back_too(url: str) -> None:
    broken = """
from streamfleet_producer.cli import main, top_live
draw, count = top_live.frame, 0
def fail_later(*arguments):
    global count
    count += 1
    if count > 2:
        raise ValueError("a fault of ours")
    return draw(*arguments)
top_live.frame = fail_later
main()
"""
    command = (sys.executable, "-c", broken, "top", "--redis-url", url, "--interval", "3600")
    with on_terminal(*command, env=environment()) as top:
        top.wait_for_line("QUEUE", "WAIT")
        top.press("jj")
        assert top.end() == 1
        assert top.settings == top.before
        after = top.written.rpartition(IN_SIGHT)[2]
        assert "a fault of ours" in after


@pytest.mark.slow
def test_a_shell_may_send_it_away_and_fetch_it_back(url: str) -> None:
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("needs bash, for its job control")
    env = environment(PS1="", PROMPT_COMMAND="")
    with on_terminal(bash, "--norc", "--noprofile", "--noediting", "-i", env=env) as shell:
        command = (
            f"{sys.executable} -c 'from streamfleet_producer.cli import main; main()' top --redis-url {url}"
        )
        shell.press(f"{command} --interval 0.2\n")
        shell.wait_for_line("QUEUE", "WAIT")
        shell.press("\x1a")
        shell.wait_for(lambda shell: "Stopped" in shell.written.rpartition(IN_SIGHT)[2], "the shell")
        shell.press("stty -a\n")
        shell.wait_for(lambda shell: " icanon" in shell.written.rpartition(IN_SIGHT)[2], "icanon")
        assert " echo " in shell.written.rpartition(IN_SIGHT)[2]
        shell.press("fg\n")
        shell.wait_for(lambda shell: shell.written.count(OUT_OF_SIGHT) == 2, "the view")
        shell.wait_for_line("QUEUE", "WAIT")
        shell.press("q")
        shell.wait_for(lambda shell: shell.written.count(IN_SIGHT) == 2, "its end")
        shell.press("exit\n")
        assert shell.end() == 0


@pytest.mark.slow
def test_a_server_that_is_away_is_said_and_waited_for(server: Any, url: str) -> None:
    with watched(url) as top:
        top.wait_for_line("QUEUE", "WAIT")
        os.kill(server.pid, signal.SIGSTOP)
        try:
            # Long before the reading that waits gives up.
            top.wait_for_line("streamfleet top", "UTC  no answer for ")
        finally:
            os.kill(server.pid, signal.SIGCONT)
        top.wait_for(lambda top: "no answer" not in "".join(top.lines()), "an answer")
        server.kill()
        top.wait_for_line("not read since then")
        top.wait_for_line("streamfleet top", "UTC  no answer for ")
        top.wait_for_line("QUEUE", "WAIT")  # the last picture
        server.start()
        top.wait_for(lambda top: "not read" not in "".join(top.lines()), "a new reading")
        assert "no answer" not in "".join(top.lines())
        top.press("q")
        assert top.end() == 0


def test_one_picture_for_scripts(url: str, raw: Any) -> None:
    raw.hset(f"{T}:control", "paused", "1")
    raw.hset(f"{T}:control", "drain:w1", "1")
    found = streamfleet("top", "--once", "--json", "--redis-url", url)
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert document["version"] == 1
    (queue,) = document["queues"]
    assert (queue["queue"], queue["is_paused"], queue["dead_letters"]) == ("q", True, 1)
    assert queue["ended_per_s"] == 4.0
    assert queue["generated_tokens_per_s"] == 60.0
    assert [worker["state"] for worker in document["workers"]] == ["asked", "ready"]


@pytest.mark.slow
def test_without_a_terminal_it_says_what_to_do(url: str) -> None:
    found = streamfleet("top", "--redis-url", url)
    assert found.returncode == 2
    assert "--once" in found.stderr
    dumb = (*PROGRAM, "top", "--redis-url", url)
    with on_terminal("env", "TERM=dumb", *dumb, env=environment()) as top:
        assert top.end() == 2
        assert "--once" in top.written
    nobody = streamfleet("top", "--once", "--queue", "typo", "--redis-url", url)
    assert nobody.returncode == 5
    assert "the queues there are: q" in nobody.stderr
    some = streamfleet("top", "--once", "--queue", "[pq]*", "--redis-url", url)
    assert "w2" in some.stdout
    assert "\x1b" not in some.stdout
