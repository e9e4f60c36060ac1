"""Names in what is said to a person."""

from __future__ import annotations

from collections.abc import Sequence

MOST_NAMES = 10
"""So many are said; errors have all of them in `known`."""


def listed(names: Sequence[str]) -> str:
    """The first of them; a fleet may have a thousand."""
    more = f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more or "none"
