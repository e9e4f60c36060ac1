"""What Redis knows of one request, whoever's it is: for operators who ask what became of it."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from typing import Any

from streamfleet_common.errors import InvalidRequest
from streamfleet_common.frames import Frame
from streamfleet_common.keys import Keys
from streamfleet_common.records import Record
from streamfleet_common.schemas import Start
from streamfleet_common.steps import Steps

MOST_EPOCHS = 100


class FlightSteps(Steps):
    """Find a record and read it, the starts in its log, and when its next try is."""

    async def record_of_any(self, rid: str) -> Record | None:
        """The record of a request of any tenant; None if there is none.

        Raises:
            Undecodable: no record.
        """
        raw: Any = await self._calls.ask(lambda: self._commands.get(self.keys.record(rid)))
        return None if raw is None else Record.parse(raw)

    async def queues_knowing(self, rid: str, queues: Sequence[str]) -> tuple[list[str], list[str]]:
        """Of these queues those that have a record of a request, and those that this user may not ask."""

        def ask() -> Awaitable[list[Any]]:
            pipe = self._commands.pipeline(transaction=False)
            for queue in queues:
                # A byte of it, since a record may hold an answer of any length.
                pipe.getrange(Keys(queue, self.keys.shard).record(rid), 0, 0)
            return pipe.execute(raise_on_error=False)

        answers = dict(zip(queues, await self._calls.ask(ask), strict=True))
        refused = []
        for queue, answer in answers.items():
            if isinstance(answer, Exception):
                error = self._calls.unavailable(answer)
                if error.reason != "forbidden":
                    raise error from answer
                refused.append(queue)
        return [queue for queue, answer in answers.items() if answer and queue not in refused], refused

    async def starts(self, rid: str, epochs: int) -> list[Start] | None:
        """The starts of a streaming request that its log has, of its first `MOST_EPOCHS` epochs at most.

        None where this user may not read logs.
        """

        def ask() -> Awaitable[list[Any]]:
            pipe = self._commands.pipeline(transaction=False)
            for epoch in range(1, min(epochs, MOST_EPOCHS) + 1):
                pipe.xrange(self.keys.log(rid), f"{epoch}-0", f"{epoch}-0")
            return pipe.execute()

        found = await self._calls.permitted(ask)
        if found is None:
            return None
        starts = []
        for _, fields in (entry for entries in found for entry in entries):
            try:
                event = Frame.parse(fields[b"f"]).event()
            except InvalidRequest:  # of a far version
                continue
            if isinstance(event, Start):
                starts.append(event)
        return starts

    async def next_try_at_ms(self, rid: str) -> int | None:
        """When a request that waits for its next try may have it (server ms); None if it does not wait so.

        None, too, where this user may not ask.
        """
        at: float | None = await self._calls.permitted(lambda: self._commands.zscore(self.keys.later, rid))
        return None if at is None else int(at)

    async def ended_a_second(self) -> float:
        """Requests of the queue that ended a second, going by its last sweeps; 0 if nobody has noted any."""
        rate: Any = await self._calls.ask(lambda: self._commands.hget(self.keys.sweep, "rate"))
        try:
            return float(rate or 0)
        except ValueError:
            return 0.0
