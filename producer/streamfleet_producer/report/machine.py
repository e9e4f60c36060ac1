"""The machine and the program of a run, for the head of its records."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path


def machine() -> dict[str, str]:
    """This machine, in the words of its system."""
    found = {"system": platform.platform(terse=True), "cores": str(os.cpu_count() or "?")}
    try:
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
    except OSError:  # only Linux has it
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {**({"processor": name[:200]} if name else {}), **found}


def versions() -> dict[str, str]:
    """Of what sends the load."""
    return {"streamfleet": version("streamfleet"), "Python": platform.python_version()}
