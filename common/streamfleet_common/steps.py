"""What the steps of the protocol stand on: one shard of one queue, its names, and the way to call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from streamfleet_common.calls import Calls
from streamfleet_common.connections import Connections
from streamfleet_common.keys import MAX_SUB_LANES, Keys, Stream, all_streams
from streamfleet_common.settings import Durability

SUB_LANE_FIELDS = ("sub_lanes", "sub_lanes_top")
"""Of the control hash: how many sub-lanes are in use, and how many of them may hold something."""


class Steps:
    """The base of `Broker`'s parts."""

    def __init__(
        self,
        connections: Connections,
        queue: str,
        *,
        shard: int = 0,
        script_flags: bool = True,
        durability: Durability = "fast",
    ) -> None:
        self.keys = Keys(queue, shard)
        self._connections = connections
        self._commands = connections.commands
        self._sub_lanes = 1
        """How many of each lane there were when a script, or a question, last told."""
        self._calls = Calls(connections, self.keys.tag, script_flags=script_flags, durability=durability)

    def _streams(self) -> list[tuple[Stream, int]]:
        """Every stream of work, as far as it is known."""
        return all_streams(self._sub_lanes)

    async def _ask_streams(self, ask: Callable[[Any, str], Any]) -> list[tuple[Stream, int, Any]]:
        """Put one question about each stream of work; what a stream answers may be an error.

        `ask` puts the question of the stream of this name into a pipeline.
        """
        while True:
            streams = self._streams()

            def questions() -> Awaitable[list[Any]]:
                # Made anew for each attempt: a pipeline is empty once it has run, even in vain.
                pipe = self._commands.pipeline(transaction=False)
                pipe.hmget(self.keys.control, SUB_LANE_FIELDS)
                for stream, number in streams:  # noqa: B023 - called before the next round
                    ask(pipe, self.keys.stream(stream, number))
                return pipe.execute(raise_on_error=False)

            counts, *answers = await self._calls.ask(questions)
            if isinstance(counts, Exception):
                raise self._calls.unavailable(counts) from counts
            known, self._sub_lanes = len(streams), sub_lanes_of(counts)
            if len(self._streams()) <= known:
                return [(*one, answer) for one, answer in zip(streams, answers, strict=True)]


def sub_lanes_of(counts: Sequence[bytes | None]) -> int:
    """How many sub-lanes may hold something, by the `SUB_LANE_FIELDS` of a control hash."""
    numbers = [int(count) for count in counts if count is not None and count.isdigit()]
    return max(1, min(MAX_SUB_LANES, max(numbers, default=1)))
