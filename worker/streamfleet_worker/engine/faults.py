"""What an error says about the machine. Without torch, which names its own errors plainly enough."""

from __future__ import annotations


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that the device or the machine had no memory left for something."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and (
        type(error).__name__ == "OutOfMemoryError"
        or "out of memory" in str(error)
        or "can't allocate memory" in str(error)
    )
