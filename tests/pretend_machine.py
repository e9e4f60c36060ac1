"""A machine to run the bootstrap on, where making and filling an environment takes no time."""

from __future__ import annotations

import shutil
import stat
import sys
from pathlib import Path

import pytest

import environment
import torch_build
from environment import Environment

ROOT = Path(__file__).parents[1]

# Plays the Python of a venv: answers the questions environment.py asks, writes down what pip is
# told to install, and fails as it is told to. Its folder is the venv.
STUB = """\
#!/bin/sh
venv=$(cd "$(dirname "$0")/.." && pwd)
case "$*" in
  *version_info*) cat "$venv/version" ;;
  *"import torch"*) test -e "$venv/has-torch" ;;
  *importlib.metadata*) test -e "$venv/has-model" ;;
  *"pip --version"*|*ensurepip*) test -e "$venv/has-pip" ;;
  *"pip install"*)
    echo "$*" >> "$venv/pip-calls"
    if test -e "$venv/pip-fails"; then cat "$venv/pip-fails"; exit 1; fi ;;
  *) exit 64 ;;
esac
"""

# Plays the Python that runs the bootstrap, when it is asked to make a venv.
MAKER = """\
#!/bin/sh
if test -e "$(dirname "$0")/fails"; then cat "$(dirname "$0")/fails"; exit 1; fi
mkdir -p "$3/bin" && cp "$(dirname "$0")/stub" "$3/bin/python" && touch "$3/has-pip"
echo 3.12.1 > "$3/version"
"""


def executable(path: Path, text: str) -> Path:
    """A script at `path` that may be run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class PretendMachine:
    """A checkout on a machine of its own, where installing takes no time."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "checkout"
        for name in environment.INPUTS:
            target = self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
        self.bin = folder / "bin"
        executable(self.bin / "stub", STUB)
        monkeypatch.setattr(sys, "_base_executable", str(executable(self.bin / "maker", MAKER)))
        monkeypatch.setattr(torch_build, "NVIDIA_DRIVER", folder / "no-driver")
        self.variables = {"PATH": f"{self.bin}:/usr/bin:/bin"}
        self.said: list[str] = []

    @property
    def venv(self) -> Path:
        return self.root / ".venv"

    def environment(self) -> Environment:
        return Environment(self.root, self.variables, self.said.append)

    def make_venv(self, *, version: str = "3.12.1", **has: bool) -> None:
        executable(self.venv / "bin" / "python", STUB)
        (self.venv / "version").write_text(version)
        for name, there in has.items():
            if there:
                (self.venv / f"has-{name}").touch()

    def pip_calls(self) -> list[str]:
        """What pip was told to install, in order, without what is the same every time."""
        log = self.venv / "pip-calls"
        lines = log.read_text().splitlines() if log.exists() else []
        prefix = f"-m pip install --constraint {self.root}/tests/constraints.txt "
        assert all(line.startswith(prefix) for line in lines)
        return [line.removeprefix(prefix) for line in lines]
