"""The figures of queues: how much waits and runs, for how long, and who serves it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from streamfleet_common import codec
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.keys import LANE_STREAMS, all_streams
from streamfleet_common.steps import SUB_LANE_FIELDS

SOLO = "solo"
"""Stands among the lanes for suspects, which wait apart from all of them."""
LANES: tuple[str, ...] = (*LANE_STREAMS, SOLO)
Unread = Literal["too_many", "out_of_time", "refused"]
"""Why a queue was not read."""
UNREAD: tuple[Unread, ...] = get_args(Unread)

CONTROL_FIELDS = (*SUB_LANE_FIELDS, "max_queue_depth", "paused")
SWEEP_FIELDS = ("last", "ended", *(f"oldest:{lane}" for lane in LANE_STREAMS))


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """One queue. What nobody has noted in Redis yet is None, or left out of a mapping."""

    queue: str
    queued: int
    """Accepted and not running, those that wait for a next try among them."""
    running: int
    """Given to a worker, and not ended."""
    max_depth: int | None
    open_tokens: int
    """Prompt and answer, of all open requests."""
    waiting_tokens: int
    """The same of those that do not run."""
    lanes: Mapping[str, int]
    """Requests that wait, by lane (`LANES`); those that came back from a worker are counted."""
    oldest_s: Mapping[str, float]
    """By lane, but for `SOLO`: the age of the oldest request that waits, 0 where none does."""
    retrying: int
    """Requests that wait for the time of their next try."""
    dead_letters: int
    is_paused: bool
    ready: int
    """Live workers that take work."""
    draining: int
    """Live workers that do not any more."""
    ended: int
    """Requests that ended, since the queue began."""
    last_sweep_s: float | None
    """How long ago the last sweep was."""


@dataclass(frozen=True, slots=True)
class Figures:
    """All that was read at one time."""

    queues: tuple[QueueFigures, ...]
    unread: Mapping[Unread, int]
    """How many queues were not read, for each reason."""
    refusal: str | None
    """What Redis said to the last queue that was refused."""
    memory_used: int | None
    """Bytes; None where Redis does not tell."""
    memory_max: int | None
    """Its `maxmemory` in bytes; None where it has no limit or does not tell."""


def number(text: bytes | None) -> int:
    """A note in Redis as a number; 0 where there is none, or somebody wrote another thing."""
    return int(text) if text is not None and text.isdigit() else 0


def lines_of(answers: Sequence[Any], sub_lanes: int) -> tuple[int, dict[str, int]]:
    """How many entries are given out, and how many wait in each lane."""
    running, lanes = 0, dict.fromkeys(LANES, 0)
    for (stream, _), pending, length in zip(all_streams(sub_lanes), answers[::2], answers[1::2], strict=True):
        given = pending["pending"] if isinstance(pending, dict) else 0
        running += given
        lanes[stream.partition(":")[0]] += max(0, length - given)
    return running, lanes


def figures_of(
    queue: str,
    now_ms: int,
    control: Sequence[bytes | None],
    lines: tuple[int, dict[str, int]],
    rest: Sequence[Any],
) -> QueueFigures:
    """Put together what Redis answered.

    Args:
        queue: its name.
        now_ms: the server's time.
        control: the `CONTROL_FIELDS` of its control hash.
        lines: what `lines_of` says of its streams.
        rest: how many are open, for later, and dead; the tokens of all and of those that run; the
            `SWEEP_FIELDS` of the notes of sweeps; the cards.
    """
    running, lanes = lines
    open_, later, dead, (tokens, running_tokens), (last, ended, *noted), cards = rest
    running = min(running, open_)
    states = _states(cards, now_ms)
    return QueueFigures(
        queue=queue,
        queued=open_ - running,
        running=running,
        max_depth=number(control[2]) or None,
        open_tokens=number(tokens),
        waiting_tokens=max(0, number(tokens) - number(running_tokens)),
        lanes=lanes,
        oldest_s=_oldest(now_ms, lanes, noted),
        retrying=later,
        dead_letters=dead,
        is_paused=control[3] == b"1",
        ready=states["ready"],
        draining=states["draining"],
        ended=number(ended),
        last_sweep_s=max(0, now_ms - number(last)) / 1000 if last else None,
    )


def _oldest(now_ms: int, lanes: Mapping[str, int], noted: Sequence[bytes | None]) -> dict[str, float]:
    ages: dict[str, float] = {}
    for lane, accepted in zip(LANE_STREAMS, noted, strict=True):
        if not lanes[lane]:
            ages[lane] = 0.0  # the note is as old as the last sweep
        elif number(accepted):
            ages[lane] = max(0, now_ms - number(accepted)) / 1000
    return ages


def _states(cards: Mapping[bytes, bytes], now_ms: int) -> Counter[str]:
    """Live workers by state. A card that cannot be read, of a far version, does not count, as in `cards`."""
    states: Counter[str] = Counter()
    for raw in cards.values():
        until, _, data = raw.partition(b"|")
        if number(until) >= now_ms:
            try:
                states[codec.decode_card(data).state] += 1
            except InvalidRequest:
                continue
    return states
