"""Libraries that a process is started with before the system's, to make its world worse."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COMPILE_LIMIT_S = 60.0


def compiled(name: str, folder: Path) -> Path:
    """The library of `name.c`, made in `folder`; skips the test where none can be made, or loaded."""
    if sys.platform != "linux":
        pytest.skip("only Linux loads a library before the system's")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip(f"no C compiler on this machine, which {name}.c needs")
    library = folder / f"{name}.so"
    command: list[str | Path] = [
        compiler,
        "-shared",
        "-fPIC",
        "-O1",
        "-o",
        library,
        HERE / f"{name}.c",
        "-ldl",
    ]
    subprocess.run(command, check=True, timeout=COMPILE_LIMIT_S)
    return library
