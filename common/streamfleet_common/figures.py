"""The figures of many queues, read with plain commands: for who may see no request and call no script."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from streamfleet_common import codec
from streamfleet_common.calls import Action, Calls, verdict
from streamfleet_common.connections import Connections, redacted
from streamfleet_common.errors import BrokerUnavailable, InvalidRequest
from streamfleet_common.keys import GROUP, LANE_STREAMS, QUEUES, Keys, all_streams
from streamfleet_common.steps import SUB_LANE_FIELDS, sub_lanes_of

MOST_QUEUES = 1000
"""Of more than that the ones announced last are read."""
AT_ONCE = 50
"""Queues in one pipeline, so that others have their turn at Redis between two."""
SOLO = "solo"
"""Stands among the lanes for suspects, which wait apart from all of them."""
LANES: tuple[str, ...] = (*LANE_STREAMS, SOLO)
Unread = Literal["too_many", "out_of_time", "refused"]
"""Why a queue was not read."""
UNREAD: tuple[Unread, ...] = get_args(Unread)

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_CONTROL = (*SUB_LANE_FIELDS, "max_queue_depth", "paused")
_SWEEP = ("last", "ended", *(f"oldest:{lane}" for lane in LANE_STREAMS))


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


class FiguresReader:
    """Reads the figures of queues.

    Commands are those of the role `metrics`; see `acl.py`.
    """

    def __init__(self, connections: Connections) -> None:
        self._url = connections.url
        self._commands = connections.commands
        self._calls = Calls(connections, "")

    async def ping(self, *, within_s: float) -> None:
        """Ask Redis whether it is there.

        Raises:
            BrokerUnavailable: it did not answer in time, or cannot be reached.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._calls.ask(self._commands.ping, budget_s=0)
        except TimeoutError:
            raise self._late(within_s) from None

    async def read(self, queues: Sequence[str] = (), *, within_s: float) -> Figures:
        """The figures of these queues, or of all that workers ever announced.

        It takes `within_s` at most. Where Redis answers at all, queues that are not read by then are counted
        as such, and so are those beyond `MOST_QUEUES` and those that Redis refuses.

        Raises:
            BrokerUnavailable: Redis did not answer in time, or cannot be reached.
        """
        until = asyncio.get_running_loop().time() + within_s
        unread: Counter[Unread] = Counter(dict.fromkeys(UNREAD, 0))
        refusal: str | None = None
        try:
            async with asyncio.timeout_at(until):
                memory, names = await self._server(queues)
        except TimeoutError:
            raise self._late(within_s) from None
        unread["too_many"] = max(0, len(names) - MOST_QUEUES)
        names = names[:MOST_QUEUES]
        found: list[QueueFigures] = []
        seen = 0
        try:
            async with asyncio.timeout_at(until):
                for part in _parts(names):
                    for one in await self._queues(part):
                        if isinstance(one, QueueFigures):
                            found.append(one)
                        else:
                            unread["refused"] += 1
                            refusal = one
                    seen += len(part)
        except TimeoutError:
            unread["out_of_time"] = len(names) - seen
        return Figures(
            tuple(sorted(found, key=lambda figures: figures.queue)),
            unread,
            refusal,
            memory.get("used_memory"),
            memory.get("maxmemory") or None,
        )

    def _late(self, within_s: float) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"Redis at {redacted(self._url)} did not answer within {within_s:g} s: "
            "is it busy, or the network slow?",
            reason="unreachable",
        )

    async def _ask(self, put: Callable[[Any], object]) -> list[Any]:
        """Answers, errors among them, to the questions that `put` puts into a pipeline."""

        def ask() -> Awaitable[list[Any]]:
            # Made anew for each attempt: a pipeline is empty once it has run, even in vain.
            pipe = self._commands.pipeline(transaction=False)
            put(pipe)
            return pipe.execute(raise_on_error=False)

        # No more tries than it takes to find a connection that is good: the next scrape comes soon.
        return await self._calls.ask(ask, budget_s=0)

    async def _server(self, queues: Sequence[str]) -> tuple[Mapping[str, int], list[str]]:
        """What `INFO memory` says, and the queues to read, those announced last first."""

        def questions(pipe: Any) -> None:
            pipe.ping()
            pipe.info("memory")
            pipe.hgetall(QUEUES)

        up, memory, known = await self._ask(questions)
        for answer in (up,) if queues else (up, known):
            if isinstance(answer, Exception):
                raise self._calls.unavailable(answer) from answer
        if isinstance(memory, Exception):
            memory = {}  # not everybody may ask
        if queues:
            return memory, list(dict.fromkeys(queues))
        announced = [(-_number(at), name.decode("utf-8", "replace")) for name, at in known.items()]
        return memory, [name for _, name in sorted(announced) if _NAME.fullmatch(name)]

    async def _queues(self, queues: Sequence[str]) -> list[QueueFigures | str]:
        """The figures of each, or what Redis said where it refused a question."""
        names = [Keys(queue) for queue in queues]

        def controls(pipe: Any) -> None:
            for keys in names:
                pipe.hmget(keys.control, _CONTROL)

        control = await self._ask(controls)
        streams = [1 if isinstance(found, Exception) else sub_lanes_of(found[:2]) for found in control]

        def questions(pipe: Any) -> None:
            pipe.time()
            for keys, sub_lanes in zip(names, streams, strict=True):
                for stream, number in all_streams(sub_lanes):
                    pipe.xpending(keys.stream(stream, number), GROUP)
                    pipe.xlen(keys.stream(stream, number))
                pipe.zcard(keys.open)
                pipe.zcard(keys.later)
                pipe.xlen(keys.dead)
                pipe.hmget(keys.tenants, ("*", "*|r"))
                pipe.hmget(keys.sweep, _SWEEP)
                pipe.hgetall(keys.workers)

        time, *answers = await self._ask(questions)
        if isinstance(time, Exception):
            raise self._calls.unavailable(time) from time
        now_ms = time[0] * 1000 + time[1] // 1000
        figures: list[QueueFigures | str] = []
        at = 0
        for queue, found, sub_lanes in zip(queues, control, streams, strict=True):
            count = 2 * len(all_streams(sub_lanes))
            ours, at = answers[at : at + count + 6], at + count + 6
            # A stream that nobody has written to yet has no group, and nothing pending.
            ours = [0 if _is_absent(answer) else answer for answer in ours]
            refused = next((one for one in (found, *ours) if isinstance(one, Exception)), None)
            if refused is not None:
                figures.append(self._calls.unavailable(refused).message)
            else:
                figures.append(_figures(queue, now_ms, found, _lines(ours[:count], sub_lanes), ours[count:]))
        return figures


def _parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(names), AT_ONCE):
        yield names[first : first + AT_ONCE]


def _is_absent(answer: object) -> bool:
    return isinstance(answer, Exception) and verdict(answer).action is Action.REGROUP


def _number(text: bytes | None) -> int:
    """A note in Redis as a number; 0 where there is none, or somebody wrote another thing."""
    return int(text) if text is not None and text.isdigit() else 0


def _lines(answers: Sequence[Any], sub_lanes: int) -> tuple[int, dict[str, int]]:
    """How many entries are given out, and how many wait in each lane."""
    running, lanes = 0, dict.fromkeys(LANES, 0)
    for (stream, _), pending, length in zip(all_streams(sub_lanes), answers[::2], answers[1::2], strict=True):
        given = pending["pending"] if isinstance(pending, dict) else 0
        running += given
        lanes[stream.partition(":")[0]] += max(0, length - given)
    return running, lanes


def _figures(
    queue: str,
    now_ms: int,
    control: Sequence[bytes | None],
    lines: tuple[int, dict[str, int]],
    rest: Sequence[Any],
) -> QueueFigures:
    running, lanes = lines
    open_, later, dead, (tokens, running_tokens), (last, ended, *noted), cards = rest
    running = min(running, open_)
    states = _states(cards, now_ms)
    return QueueFigures(
        queue=queue,
        queued=open_ - running,
        running=running,
        max_depth=_number(control[2]) or None,
        open_tokens=_number(tokens),
        waiting_tokens=max(0, _number(tokens) - _number(running_tokens)),
        lanes=lanes,
        oldest_s=_oldest(now_ms, lanes, noted),
        retrying=later,
        dead_letters=dead,
        is_paused=control[3] == b"1",
        ready=states["ready"],
        draining=states["draining"],
        ended=_number(ended),
        last_sweep_s=max(0, now_ms - _number(last)) / 1000 if last else None,
    )


def _oldest(now_ms: int, lanes: Mapping[str, int], noted: Sequence[bytes | None]) -> dict[str, float]:
    ages = {}
    for lane, accepted in zip(LANE_STREAMS, noted, strict=True):
        if not lanes[lane]:
            ages[lane] = 0.0  # the note is as old as the last sweep
        elif _number(accepted):
            ages[lane] = max(0, now_ms - _number(accepted)) / 1000
    return ages


def _states(cards: Mapping[bytes, bytes], now_ms: int) -> Counter[str]:
    """Live workers by state. A card that cannot be read, of a far version, does not count, as in `cards`."""
    states: Counter[str] = Counter()
    for raw in cards.values():
        until, _, data = raw.partition(b"|")
        if _number(until) >= now_ms:
            try:
                states[codec.decode_card(data).state] += 1
            except InvalidRequest:
                continue
    return states
