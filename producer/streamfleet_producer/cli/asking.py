"""Asking about lines: many at once, and each alone where that fails."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from typing import Any

from streamfleet_common.errors import (
    BrokerUnavailable,
    IncompleteGeneration,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    StreamfleetError,
    Unsupported,
)
from streamfleet_common.schemas import End, Request
from streamfleet_producer.cli.line_job import Item, Outcome
from streamfleet_producer.cli.line_output import is_failure
from streamfleet_producer.client import Client
from streamfleet_producer.ticket import Options

LEAST_PAUSE_S = 0.05
_NOBODY_S_LINE = (BrokerUnavailable, ModelNotFound, Unsupported)
"""What would befall any other line as well."""


async def answers(fleet: Client, requests: Sequence[Request], more: Options) -> list[End | StreamfleetError]:
    """What becomes of each request; waits while the queue is full.

    Raises:
        StreamfleetError: what would become of any other request as well.
    """
    found: dict[int, End | StreamfleetError] = {}
    left = list(range(len(requests)))
    while left:
        outcomes = await fleet.run_many([requests[place] for place in left], return_exceptions=True, **more)
        full = [outcome for outcome in outcomes if isinstance(outcome, QueueFull)]
        for outcome in outcomes:
            if isinstance(outcome, _NOBODY_S_LINE):
                raise outcome
        found |= dict(zip(left, outcomes, strict=True))
        left = [place for place in left if isinstance(found[place], QueueFull)]
        if left:
            await asyncio.sleep(max(LEAST_PAUSE_S, *(one.retry_after for one in full)))
    return [found[place] for place in range(len(requests))]


async def together(
    fleet: Client,
    values: Sequence[Any],
    request: Callable[[Sequence[Any]], Request],
    taken: Callable[[End], Sequence[dict[str, Any]]],
    more: Options,
) -> list[Outcome]:
    """Ask about values in one request; should that fail, about each alone, to know which is to blame.

    Args:
        fleet: who is asked.
        values: what about.
        request: makes a request of some values.
        taken: the outcomes of a request's values, in order.
        more: what else is said about each request.
    """
    if not values:
        return []
    try:
        (whole,) = await answers(fleet, [request(values)], more)
    except _NOBODY_S_LINE:
        raise
    except InvalidRequest as error:
        whole = error
    found = _outcomes(whole, len(values), taken)
    if len(values) == 1 or not isinstance(whole, StreamfleetError):
        return found
    made: list[Request | InvalidRequest] = []
    for value in values:
        try:
            made.append(request([value]))
        except InvalidRequest as error:
            made.append(error)
    alone = iter(await answers(fleet, [one for one in made if not isinstance(one, InvalidRequest)], more))
    ends = [one if isinstance(one, InvalidRequest) else next(alone) for one in made]
    return [outcome for end in ends for outcome in _outcomes(end, 1, taken)]


def _outcomes(
    end: End | StreamfleetError, count: int, taken: Callable[[End], Sequence[dict[str, Any]]]
) -> list[Outcome]:
    """What a request comes to, for each of its `count` values."""
    if isinstance(end, StreamfleetError):
        return [end] * count
    found = taken(end)
    if len(found) != count:
        return [
            IncompleteGeneration(f"the worker gave {len(found)} answers where {count} were asked for")
        ] * count
    return list(found)


def text_item(line: str, *, jsonl: bool, keep: bool, pair: bool = False) -> Item:
    """The text that a line asks about: all of it, or a field of a JSON line; with its pair, if it has one.

    Args:
        line: as it came.
        jsonl: it is a JSON document with a field `text`.
        keep: the answer has the text too.
        pair: a field `pair` is the second text.
    """
    if not jsonl:
        fault = "" if line.strip() else "the line is empty"
        return Item((line, None), {"text": line} if keep else {}, fault)
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        return Item(None, fault="the line is no JSON")
    if not isinstance(fields, dict) or not isinstance(fields.get("text"), str):
        return Item(None, fault='the line has no field "text" that is a text')
    own = {"text", "pair"} if pair else {"text"}
    others = {name: value for name, value in fields.items() if keep or name not in own}
    if is_failure(others.get("error")):
        del others["error"]  # of the run that the line comes from: this one says its own
    second = fields.get("pair") if pair else None
    if second is not None and not isinstance(second, str):
        return Item(None, others, 'the field "pair" is no text')
    fault = "" if fields["text"].strip() else 'the field "text" is empty'
    return Item((fields["text"], second), others, fault)
