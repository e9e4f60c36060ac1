"""Slices: a list that is longer than a request may hold, cut into what requests may."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from streamfleet_common.errors import StreamfleetError, from_wire

_ITEM = re.compile(r"^item (\d+):")
_PLACE = re.compile(r"\b(texts|pairs|documents|questions)\.(\d+)")


def slices(weights: Sequence[Sequence[int]], limits: Sequence[int]) -> Iterator[slice]:
    """Parts of a list, each as long as it can be.

    Args:
        weights: of each item what it takes of each limit.
        limits: what a part may take in all. An item that is over one by itself is a part of its own.
    """
    start, taken = 0, [0] * len(limits)
    for place, item in enumerate(weights):
        wanted = [sum(pair) for pair in zip(taken, item, strict=True)]
        if place > start and any(want > limit for want, limit in zip(wanted, limits, strict=True)):
            yield slice(start, place)
            start, wanted = place, list(item)
        taken = wanted
    if start < len(weights):
        yield slice(start, len(weights))


def moved(error: StreamfleetError, start: int, row: int) -> StreamfleetError:
    """The error of a part, with what it names counted in the whole list.

    Args:
        error: of the part.
        start: the place where the part begins, for what is named by its place (`texts.3`).
        row: the row of a batch where it begins, for what is named so (`item 3`).
    """

    def move(text: str) -> str:
        text = _ITEM.sub(lambda found: f"item {int(found[1]) + row}:", text)
        return _PLACE.sub(lambda found: f"{found[1]}.{int(found[2]) + start}", text)

    if start == 0:
        return error
    details = dict(error.details)
    if "problems" in details:
        details["problems"] = [move(str(problem)) for problem in details["problems"]]
    if isinstance(details.get("item"), int):
        details["item"] += row
    made = from_wire(error.code, move(error.message), details)
    made.retryable = error.retryable
    return made
