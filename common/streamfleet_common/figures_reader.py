"""Reads the figures of many queues with plain commands: for who may see no request and call no script."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any

from streamfleet_common.calls import Action, Calls, verdict
from streamfleet_common.connections import Connections, redacted
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.figures import (
    CONTROL_FIELDS,
    SWEEP_FIELDS,
    UNREAD,
    Figures,
    QueueFigures,
    Unread,
    figures_of,
    lines_of,
    number,
)
from streamfleet_common.keys import GROUP, QUEUES, Keys, all_streams
from streamfleet_common.steps import sub_lanes_of

MOST_QUEUES = 1000
"""Of more than that the ones announced last are read."""
AT_ONCE = 50
"""Queues in one pipeline, so that others have their turn at Redis between two."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class FiguresReader:
    """Reads the figures of queues.

    Commands are those of the role `metrics`; see `acl.py`.
    """

    def __init__(self, connections: Connections) -> None:
        self._url = connections.url
        self._commands = connections.commands
        self._calls = Calls(connections, "")

    async def check(self, queues: Sequence[str] = (), *, within_s: float) -> None:
        """Ask Redis what `read` must be told to say anything at all.

        Raises:
            BrokerUnavailable: it did not answer in time, cannot be reached, or refuses to tell this user.
        """
        try:
            async with asyncio.timeout(within_s):
                await self._server(queues)
        except TimeoutError:
            raise self._late(within_s) from None

    async def read(self, queues: Sequence[str] = (), *, within_s: float) -> Figures:
        """The figures of these queues, or of all that workers ever announced.

        It takes `within_s` at most. Where Redis answers at all, queues that are not read by then are counted
        as such, and so are those beyond `MOST_QUEUES` and those that Redis refuses.

        Raises:
            BrokerUnavailable: Redis did not answer in time, cannot be reached, or refuses to tell this user.
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
            pipe.time()  # which the figures of each queue are reckoned from
            pipe.info("memory")
            pipe.hgetall(QUEUES)

        time, memory, known = await self._ask(questions)
        for answer in (time,) if queues else (time, known):
            if isinstance(answer, Exception):
                raise self._calls.unavailable(answer) from answer
        if isinstance(memory, Exception):
            memory = {}  # not everybody may ask
        if queues:
            return memory, list(dict.fromkeys(queues))
        announced = [(-number(at), name.decode("utf-8", "replace")) for name, at in known.items()]
        return memory, [name for _, name in sorted(announced) if _NAME.fullmatch(name)]

    async def _queues(self, queues: Sequence[str]) -> list[QueueFigures | str]:
        """The figures of each, or what Redis said where it refused a question."""
        names = [Keys(queue) for queue in queues]

        def controls(pipe: Any) -> None:
            for keys in names:
                pipe.hmget(keys.control, CONTROL_FIELDS)

        control = await self._ask(controls)
        streams = [1 if isinstance(found, Exception) else sub_lanes_of(found[:2]) for found in control]

        def questions(pipe: Any) -> None:
            pipe.time()
            for keys, sub_lanes in zip(names, streams, strict=True):
                for stream, sub_lane in all_streams(sub_lanes):
                    pipe.xpending(keys.stream(stream, sub_lane), GROUP)
                    pipe.xlen(keys.stream(stream, sub_lane))
                pipe.zcard(keys.open)
                pipe.zcard(keys.later)
                pipe.xlen(keys.dead)
                pipe.hmget(keys.tenants, ("*", "*|r"))
                pipe.hmget(keys.sweep, SWEEP_FIELDS)
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
                figures.append(
                    figures_of(queue, now_ms, found, lines_of(ours[:count], sub_lanes), ours[count:])
                )
        return figures


def _parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for first in range(0, len(names), AT_ONCE):
        yield names[first : first + AT_ONCE]


def _is_absent(answer: object) -> bool:
    return isinstance(answer, Exception) and verdict(answer).action is Action.REGROUP
