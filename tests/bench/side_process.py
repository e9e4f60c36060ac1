"""A side of `generation.py` or `one_shot.py` as seen from there: its process, asked for a round at a time."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from streamfleet_worker.supervisor_process import HUGE_PAGES

HERE = Path(__file__).parent
STOP_LIMIT_S = 30.0


class SideProcess:
    """One side, from `start` to `stop`; idle while it is not asked.

    Raises:
        SystemExit: from any method, if it ends or is silent for `limit_s`; with the end of what it said.
    """

    def __init__(self, name: str, command: Sequence[str], limit_s: float) -> None:
        self._name = name
        self._limit_s = limit_s
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 (until `stop`)
        self._child = subprocess.Popen(
            command,
            cwd=HERE,
            # As our supervisor starts its workers; the others have it too.
            env={**HUGE_PAGES, **os.environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
        )

    def wait_ready(self) -> None:
        """Until it is loaded and warm."""
        self._read()

    def ask(self, what: Any) -> Any:
        """Its answer to one line."""
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(what) + "\n")
        self._child.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """End it; it may have ended."""
        self._child.terminate()
        try:
            self._child.communicate(timeout=STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._said.close()

    def _read(self) -> Any:
        # A side sends one line for each that it is sent, so none can wait in the buffer of the last read.
        assert self._child.stdout is not None
        readable, _, _ = select.select([self._child.stdout], [], [], self._limit_s)
        if readable and (line := self._child.stdout.readline()):
            return json.loads(line)
        self._said.seek(0)
        said = "".join(self._said.readlines()[-30:])
        how = "ended" if readable else f"said nothing for {self._limit_s:g} s"
        raise SystemExit(f"{said}\nthe side {self._name!r} {how}")
