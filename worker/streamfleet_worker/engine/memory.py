"""What an engine takes of the machine's memory, and what it may take."""

from __future__ import annotations

import contextlib
import logging
import resource
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_worker.engine.scheduler import RESERVED_STEP

log = logging.getLogger(__name__)

CACHE_SHARE: Mapping[str, float] = MappingProxyType({"cpu": 0.5, "cuda": 0.85, "mps": 0.4})
"""Of the memory that is free once the model is loaded: what the cache may take. A CPU's memory belongs to
other programs too; on a GPU the rest is for what a pass computes."""

ROW_WASTE = 2.0
"""A row may be so many times as wide as what is reserved for its sequence: the narrowest is 128, for 64."""

LEAST_TOKENS = 128
"""A cache for fewer serves nobody."""


def peak_bytes(device: torch.device) -> int:
    """The most memory that was taken so far on the device."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def free_bytes(device: torch.device, root: Path = Path("/")) -> int | None:
    """Memory that could be taken now on the device; None if the system does not tell.

    On a CPU it is the least of what the machine and the process's control group have left.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    found = []
    with contextlib.suppress(OSError, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    group = root / "sys/fs/cgroup"
    with contextlib.suppress(OSError, ValueError):  # there is no such group, or it has no limit ("max")
        limit, taken = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        # Files that were read count as taken, a model's weights among them, and give way to anything else.
        lines = (group / "memory.stat").read_text().splitlines()
        files = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
        found.append(limit - taken + files)
    return max(0, min(found)) if found else None


def cache_tokens(
    token_bytes: int, rows: int, max_len: int, device: torch.device, cache_bytes: int | None
) -> int:
    """Tokens that the cache may hold, for at most `rows` sequences of at most `max_len` tokens.

    Args:
        token_bytes: keys and values of one token.
        rows: sequences that run at once.
        max_len: of the longest sequence, in tokens.
        device: where the cache is.
        cache_bytes: what it may take; None takes its share of what is free.

    Raises:
        ModelLoadFailed: there is no room for any.
    """
    # Reservations are whole steps.
    wanted = rows * -(-max_len // RESERVED_STEP) * RESERVED_STEP
    if cache_bytes is None:
        free = free_bytes(device)
        budget = None if free is None else int(free * CACHE_SHARE.get(device.type, 0.4))
    else:
        budget = cache_bytes
    if budget is None:
        return wanted
    tokens = int(budget / (token_bytes * ROW_WASTE)) // RESERVED_STEP * RESERVED_STEP
    if tokens < LEAST_TOKENS:
        raise ModelLoadFailed(
            f"there is no memory for the cache: {budget >> 20} MiB hold {tokens} tokens of {token_bytes} "
            "bytes. Free some, choose a smaller model or precision, or set STREAMFLEET_CACHE_MIB"
        )
    if tokens < max_len:
        log.warning(
            "the cache holds %d tokens: no request may be longer, though %d are allowed", tokens, max_len
        )
    return min(wanted, tokens)
