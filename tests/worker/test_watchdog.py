"""The watchdog in processes of their own, since what it does is end one."""

from __future__ import annotations

import subprocess
import sys

import pytest

LIMIT_S = 60.0
PROGRAM = """
import ctypes, sys, time
from streamfleet_worker import watchdog
watchdog.MARGIN_S = 0.0
dog = watchdog.Watchdog(float(sys.argv[1]))
dog.stroke()
{does}
print("alive", flush=True)
"""
HOLD = "ctypes.PyDLL(None).poll(None, 0, 60_000)"
"""C keeps the interpreter's lock for a minute: no thread of Python runs meanwhile."""


def watched(does: str, limit_s: float) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM.format(does=does), str(limit_s)]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.parametrize("does", [HOLD, "time.sleep(60)"], ids=["interpreter held", "loop asleep"])
def test_it_ends_a_process_that_does_not_move_and_says_where_it_stood(does: str) -> None:
    ended = watched(does, 0.2)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "Timeout (0:00:00.2" in ended.stderr
    assert 'File "<string>", line 7 in <module>' in ended.stderr


def test_a_stroke_in_time_and_again_keeps_the_process_alive() -> None:
    # Each stroke begins the limit anew: together they take several times as long.
    ended = watched("for _ in range(10): dog.stroke(); time.sleep(0.1)", 0.5)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "alive\n", "")


def test_closed_it_watches_no_longer() -> None:
    ended = watched("dog.close(); time.sleep(0.3)", 0.1)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "alive\n", "")
