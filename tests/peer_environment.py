"""Clients that the tests run as they come, each in an environment of its own beside that of the tests.

They want other versions of what we use ourselves. The first test that needs one makes it, and later ones
find it there; where packages cannot be fetched, the test is skipped.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(sys.prefix) / "peers"
INSTALLING_S = 240
CALLING_S = 50


@dataclass(frozen=True)
class PeerEnvironment:
    """Where a client is installed, and what it needs."""

    name: str
    requirements: tuple[str, ...]

    @property
    def python(self) -> Path:
        return FOLDER / self.name / "bin" / "python"

    def prepare(self) -> None:
        """Make it, unless it is there; skips the test if it cannot be made."""
        stamp = FOLDER / self.name / "requirements.txt"
        wanted = "\n".join(self.requirements)
        FOLDER.mkdir(parents=True, exist_ok=True)
        # Test processes run side by side.
        with (FOLDER / f"{self.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if stamp.exists() and stamp.read_text() == wanted:
                return
            subprocess.run(
                [sys.executable, "-m", "venv", "--clear", FOLDER / self.name],
                check=True,
                timeout=INSTALLING_S,
            )
            pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            try:
                installing = subprocess.run(
                    [*pip, "--retries", "1", "--timeout", "15", *self.requirements],
                    check=False,
                    capture_output=True,
                    text=True,
                    timeout=INSTALLING_S,
                )
            except subprocess.TimeoutExpired:
                pytest.skip(f"{self.name} could not be installed in {INSTALLING_S} s")
            if installing.returncode != 0:
                last = installing.stderr.strip().rpartition("\n")[2]
                pytest.skip(f"{self.name} cannot be installed: {last}")
            stamp.write_text(wanted)

    async def run(self, script: Path, asked: Any) -> Any:
        """Run a script there that reads JSON and writes JSON."""
        process = await asyncio.create_subprocess_exec(
            str(self.python),
            "-I",
            str(script),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(CALLING_S):
                out, err = await process.communicate(json.dumps(asked).encode())
        finally:
            if process.returncode is None:
                process.kill()
        assert process.returncode == 0, err.decode()[-2000:]
        return json.loads(out)
