"""The process beside the model: claims requests, runs them in batches, publishes tokens.

What a handler of your own is written with is here: `handler`, `Retry` and `END`. See `docs/handlers.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamfleet_worker.handlers.handler import handler
    from streamfleet_worker.handlers.marks import END, Retry

__all__ = ["END", "Retry", "handler"]


def __getattr__(name: str) -> Any:
    # Not before they are asked for: a supervisor imports this package too, and must stay small.
    if name == "handler":
        from streamfleet_worker.handlers.handler import handler  # noqa: PLC0415

        return handler
    if name in ("END", "Retry"):
        from streamfleet_worker.handlers import marks  # noqa: PLC0415

        return getattr(marks, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
