"""Where a model runs, and in which arithmetic: names to torch devices and types."""

from __future__ import annotations

import logging
import platform
import re
from pathlib import Path

import torch

from streamfleet_common.errors import Unsupported

log = logging.getLogger(__name__)

PRECISIONS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

INT8 = "int8"
"""The precision of linear layers that only encoders have."""

MAX_THREADS = 1024

_NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


def set_threads(threads: int) -> None:
    """Let torch use this many CPU threads in one operation.

    One is right when a worker runs per core; more pay off on an otherwise idle machine only.
    """
    torch.set_num_threads(threads)


def find_device(name: str) -> torch.device:
    """The device by its name; "cpu:2" also lets torch use two threads.

    "auto" is a GPU that works, else the CPU; a GPU that is there and does not work is logged, loudly.

    Raises:
        Unsupported: there is no such device here, or it does not work.
    """
    if name == "auto":
        return _find_best()
    match = re.fullmatch(r"cpu(:(?P<threads>[0-9]+))?|mps|cuda(:(?P<index>[0-9]+))?", name)
    if match is None:
        raise Unsupported(
            f"no device {name!r}: name auto, cpu, cpu:<threads>, cuda, cuda:<number> or mps", feature=name
        )
    if name.startswith("cpu"):
        if match["threads"] is not None:
            if not 1 <= int(match["threads"]) <= MAX_THREADS:
                raise Unsupported(f"no device {name}: a CPU runs 1 to {MAX_THREADS} threads", feature=name)
            set_threads(int(match["threads"]))
        return torch.device("cpu")
    reason = _why_not(name)
    if reason is not None:
        raise Unsupported(f"device {name} is not to be had: {reason}. Use device auto or cpu", feature=name)
    return torch.device(name)


def find_precision(name: str, device: torch.device) -> torch.dtype:
    """The type of the weights by its name.

    Raises:
        Unsupported: there is no such type, or the device has no arithmetic in it.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name == INT8:
        raise Unsupported("precision int8 is for encoders: use bfloat16", feature=name)
    if name not in PRECISIONS:
        raise Unsupported(f"no precision {name!r}: name auto, {', '.join(PRECISIONS)}", feature=name)
    if name == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise Unsupported(f"{describe(device)} has no bfloat16: use float16 or float32", feature=name)
    return PRECISIONS[name]


def describe(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} (cuda:{device.index or 0})"
    if device.type == "mps":
        return f"Apple GPU (mps, {platform.machine()})"
    info = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", info.read_text()) if info.exists() else None
    model = found[1] if found else platform.processor() or platform.machine()
    return f"CPU ({model}, {torch.get_num_threads()} of its threads)"


def _find_best() -> torch.device:
    # A driver without a torch that can use it is worth a word too.
    seen = {
        "cuda": torch.cuda.is_available() or _NVIDIA_DRIVER.exists(),
        "mps": torch.backends.mps.is_available(),
    }
    for name in (name for name, is_seen in seen.items() if is_seen):
        reason = _why_not(name)
        if reason is None:
            return torch.device(name)
        log.warning("RUNNING ON THE CPU: device %s is there but cannot be used: %s", name, reason)
    return torch.device("cpu")


def _why_not(name: str) -> str | None:
    """Why a GPU cannot be used; None if it can. It is tried: drivers promise what then fails."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        return f"no NVIDIA GPU is visible, or this torch ({torch.__version__}) was built without CUDA"
    if name == "mps" and not torch.backends.mps.is_available():
        return "it takes a Mac with Apple silicon"
    if name.startswith("cuda:") and int(name.removeprefix("cuda:")) >= torch.cuda.device_count():
        return f"{torch.cuda.device_count()} are visible"
    try:
        (torch.ones(2, 2, device=name) @ torch.ones(2, 2, device=name)).sum().item()
    except Exception as error:  # noqa: BLE001  whatever the driver raises
        return str(error).strip().split("\n", 1)[0] or type(error).__name__
    return None
