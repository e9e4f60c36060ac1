"""Tied processes: followed while they live, and never left behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from command import LIMIT_S, descendants, wait_gone
from streamfleet_producer.cli.processes import TiedProcess


@contextmanager
def tied(script: str) -> Iterator[tuple[TiedProcess, threading.Event]]:
    """A shell script tied to this program; the event is set once it has said `up`."""
    up = threading.Event()

    def heard(line: str) -> None:
        if line == "up":
            up.set()

    process = TiedProcess(["sh", "-c", script], os.environ, heard)
    try:
        yield process, up
    finally:
        process.close()


def test_its_words_and_its_status_come_through() -> None:
    with tied("echo out; echo err >&2; printf last; exit 3") as (process, _):
        assert process.wait(LIMIT_S)
        assert process.status == 3
        assert process.lines() == ["out", "err", "last"]


def test_a_death_by_signal_is_told_as_a_shell_does() -> None:
    with tied("kill -KILL $$") as (process, _):
        assert process.wait(LIMIT_S)
        assert process.status == 128 + signal.SIGKILL


def test_terminate_lets_it_end_in_its_own_time() -> None:
    with tied("trap 'echo ending; exit 7' TERM; echo up; while :; do sleep 0.01; done") as (process, up):
        assert up.wait(LIMIT_S)
        process.terminate()

        assert process.wait(LIMIT_S)
        assert (process.status, process.lines()) == (7, ["up", "ending"])


def test_close_is_heard_on_standard_input() -> None:
    with tied("echo up; cat; echo ending; exit 7") as (process, up):
        assert up.wait(LIMIT_S)
        process.close()

        assert (process.status, process.lines()) == (7, ["up", "ending"])


def test_close_ends_also_who_will_not_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamfleet_producer.cli.processes.ORPHAN_GRACE_S", 0.1)
    with tied("trap '' TERM; sleep 600 & echo up; wait; wait") as (process, up):
        assert up.wait(LIMIT_S)
        family = descendants(os.getpid())
        ours = {pid: args for pid, args in family.items() if "sleep 600" in args}
        assert len(ours) >= 2
        process.close()

        assert process.status == 128 + signal.SIGKILL
        wait_gone(ours)


def test_only_the_last_lines_are_kept() -> None:
    with tied("i=0; while [ $i -lt 500 ]; do i=$((i+1)); echo $i; done") as (process, _):
        assert process.wait(LIMIT_S)
        assert process.lines() == [str(number) for number in range(301, 501)]
