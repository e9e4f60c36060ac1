"""Which build of torch this machine should get, and what it costs."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

# pyproject.toml has the same range; never an exact version there, so that a machine may hold a
# build of its vendor.
RANGE = "torch>=2.6,<3"
# With an exact version pip prefers a CPU build (2.13.0+cpu) wherever one is on offer.
CPU = "torch==2.13.0"

INDEX_VARIABLE = "STREAMFLEET_TORCH_INDEX"
NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")

# Room for the whole environment: the installed files, pip's downloads beside them, its cache.
CPU_DISK_GB = 3.0
CUDA_DISK_GB = 12.0

# Run in the environment: whether it holds a torch that works and is in the range.
CHECK = (
    "import torch; v = tuple(int(p) for p in torch.__version__.split('.')[:2]); assert (2, 6) <= v < (3, 0)"
)


@dataclass(frozen=True)
class TorchBuild:
    """What to tell pip, and what to tell the user before."""

    arguments: tuple[str, ...]
    expect: str
    disk_gb: float
    hint: str = ""


def choose(variables: Mapping[str, str]) -> TorchBuild:
    """The build for this machine, given its environment variables."""
    if NVIDIA_DRIVER.exists() or shutil.which("nvidia-smi", path=variables.get("PATH")):
        expect = "for the NVIDIA GPU of this machine: several GB, some minutes"
        return TorchBuild((RANGE,), expect, CUDA_DISK_GB)
    expect = "for the CPU: about 200 MB, a minute or two"
    index = variables.get(INDEX_VARIABLE)
    if index:
        # An index that cannot be reached would otherwise hold everything up for minutes.
        briefly = ("--extra-index-url", index, "--retries", "0", "--timeout", "5")
        return TorchBuild((CPU, *briefly), expect, CPU_DISK_GB)
    hint = (
        "Where pip finds no CPU build, it takes the one with CUDA libraries, of several GB; "
        f"{INDEX_VARIABLE} can name an index of CPU builds."
    )
    return TorchBuild((CPU,), expect, CPU_DISK_GB, hint if sys.platform == "linux" else "")
