"""What a handler may put in an item's place that is neither its output nor an error."""

from __future__ import annotations

import enum
import math
from typing import Any, Final

from streamfleet_worker.engine.item import RetryLater


class _Mark(enum.Enum):
    END = "END"


END: Final[Any] = _Mark.END
"""Of a handler that yields: the item is complete, and its place is not looked at again.

Typed as anything, so that it fits in a list of whatever the parts are.
"""


class Retry(RetryLater):
    """The item is to be tried again after so many seconds, by whichever worker is free then.

    In an item's place it is about that item, raised it is about the whole batch. How often a request is
    tried is its sender's to say.

    Raises:
        ValueError: `after` is no time from now on.
    """

    def __init__(self, after: float) -> None:
        if not (math.isfinite(after) and after >= 0):
            raise ValueError(f"Retry after {after} s: give a number of seconds, 0 or more")
        super().__init__(float(after))
