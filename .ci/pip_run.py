"""One run of pip: silent while it works, with its own words when it fails."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

HEARTBEAT_S = 20.0
KEPT_LINES = 30
WIDTH = 80

# Lines that tell a user nothing about a failure.
NOISE = (
    "Looking in ",
    "WARNING: Location ",
    "WARNING: Retrying ",
    "[notice]",
    "Requirement already satisfied",
)
NETWORK = (
    "Could not fetch URL",
    "Failed to establish a new connection",
    "Name or service not known",
    "NameResolutionError",
    "NewConnectionError",
    "No route to host",
    "ProxyError",
    "ReadTimeoutError",
    "SSLError",
    "Temporary failure in name resolution",
    "timed out",
)
DISK = ("No space left on device", "Disk quota exceeded")

# They would send what we install somewhere else than into the environment.
MISLEADING = ("PIP_PREFIX", "PIP_TARGET", "PIP_USER", "PYTHONHOME", "PYTHONPATH")


class PipFailed(Exception):
    """pip gave up; `output` holds its last lines, without the noise."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("pip failed")
        useful = [line for line in lines if line.strip() and not line.startswith(NOISE)]
        self.output = "\n".join(useful[-KEPT_LINES:])
        text = "\n".join(lines)
        self.is_disk_full = any(mark in text for mark in DISK)
        self.is_network = not self.is_disk_full and any(mark in text for mark in NETWORK)


def doing(lines: Sequence[str]) -> str:
    """What pip is at, in its own words."""
    for line in reversed(lines):
        words = line.strip()
        if words.startswith(("Collecting ", "Downloading ", "Installing ", "Processing ")):
            return words if len(words) <= WIDTH else f"{words[: WIDTH - 3]}..."
    return "still at it"


def run_pip(
    python: Path,
    arguments: Sequence[str],
    cwd: Path,
    variables: Mapping[str, str],
    say: Callable[[str], None],
) -> None:
    """Run `pip install` with `arguments`; say now and then that it is still at it.

    Raises:
        PipFailed: pip ended with an error.
    """
    kept = {name: value for name, value in variables.items() if name not in MISLEADING}
    quiet = {"PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1", "PIP_PROGRESS_BAR": "off"}
    command = [str(python), "-m", "pip", "install", *arguments]
    began = time.monotonic()
    lines: list[str] = []
    with subprocess.Popen(
        command,
        cwd=cwd,
        env={**kept, **quiet},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        reader = threading.Thread(target=lines.extend, args=(pip.stdout or (),), daemon=True)
        reader.start()
        try:
            while reader.is_alive():
                reader.join(HEARTBEAT_S)
                if reader.is_alive():
                    say(f"      {time.monotonic() - began:3.0f} s: {doing(lines)}")
            status = pip.wait()
        except BaseException:
            # Ctrl-C reaches pip too where there is a terminal; elsewhere it must be told.
            pip.terminate()
            raise
    if status != 0:
        raise PipFailed([line.rstrip("\n") for line in lines])
