"""Where a model runs, and in which arithmetic: names to torch devices and types."""

from __future__ import annotations

import platform
import re
from pathlib import Path

import torch

from streamfleet_common.errors import DeviceUnavailable

PRECISIONS = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def set_threads(threads: int) -> None:
    """Let torch use this many CPU threads in one operation.

    One is right when a worker runs per core; more pay off on an otherwise idle machine only.
    """
    torch.set_num_threads(threads)


def find_device(name: str) -> torch.device:
    """The device by its name.

    Raises:
        DeviceUnavailable: there is no such device here.
    """
    has_cuda, has_mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    if name == "auto":
        return torch.device("cuda" if has_cuda else "mps" if has_mps else "cpu")
    match = re.fullmatch(r"(cpu|mps|cuda(:(?P<index>[0-9]+))?)", name)
    if match is None:
        raise DeviceUnavailable(f"no device {name!r}: name auto, cpu, cuda, cuda:<number> or mps")
    if name == "mps" and not has_mps:
        raise DeviceUnavailable("device mps is not to be had here: it takes a Mac with Apple silicon")
    if name.startswith("cuda"):
        if not has_cuda:
            raise DeviceUnavailable(
                "device cuda is not to be had: no NVIDIA GPU is visible, or this torch "
                f"({torch.__version__}) was built without CUDA. Use device auto or cpu"
            )
        if int(match["index"] or 0) >= torch.cuda.device_count():
            raise DeviceUnavailable(f"no device {name}: {torch.cuda.device_count()} are visible")
    return torch.device(name)


def find_precision(name: str, device: torch.device) -> torch.dtype:
    """The type of the weights by its name.

    Raises:
        DeviceUnavailable: there is no such type, or the device has no arithmetic in it.
    """
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if name not in PRECISIONS:
        raise DeviceUnavailable(f"no precision {name!r}: name auto, {', '.join(PRECISIONS)}")
    if name == "bfloat16" and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise DeviceUnavailable(f"{describe(device)} has no bfloat16: use float16 or float32")
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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the machine had no memory left for something."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        "out of memory" in str(error) or "can't allocate memory" in str(error)
    )
