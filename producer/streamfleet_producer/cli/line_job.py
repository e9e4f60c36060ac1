"""Line jobs: a line in, a line out, in order, with a bounded amount of work under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamfleet_common.errors import InvalidRequest, StreamfleetError
from streamfleet_producer.cli.line_output import LineOutput
from streamfleet_producer.cli.lines import Line, Lines
from streamfleet_producer.cli.progress import Progress
from streamfleet_producer.cli.terminal import FAILED, say

BLOCK = 32
"""Lines that are asked about together."""
WINDOW = 16
"""Blocks under way, or answered and not yet written."""


@dataclass(frozen=True, slots=True)
class Item:
    """What a line asks about."""

    value: Any
    others: dict[str, Any] = field(default_factory=dict)
    """Other fields of the line, which its answer has too."""
    fault: str = ""
    """Why it cannot be asked about."""


Outcome = dict[str, Any] | StreamfleetError
_Answering = asyncio.Future[list[tuple[Item, Outcome]]]


@dataclass
class LineJob:
    """Reads items, asks about them, writes what comes of each; a failure is a line too, with an `error`.

    `asked` gives the outcomes for the values of some items, in their order; `item` says what a line means.
    """

    lines: Lines
    output: LineOutput
    item: Callable[[str], Item]
    asked: Callable[[Sequence[Any]], Awaitable[Sequence[Outcome]]]
    fail_fast: bool = False
    """Raise the first failure of a line instead of writing it."""
    failed: int = 0

    async def run(self) -> int:
        """Run to the end. Gives an exit status.

        Raises:
            StreamfleetError: what befalls every line, or with `fail_fast` any; what came before is written.
        """
        total = self.lines.count()
        try:
            left = None if total is None else max(0, total - self.output.before)
            with Progress(left, to_terminal=self.output.path is None) as progress:
                await self._run(progress)
        except BaseException as error:
            if not isinstance(error, BrokenPipeError):
                self._tell_how_far()
            raise
        finally:
            self.output.close()
        if self.failed:
            say(f"{self.failed} of {self.output.written} lines failed: see their `error`", "red")
        return FAILED if self.failed else 0

    async def _run(self, progress: Progress) -> None:
        underway: asyncio.Queue[_Answering | Exception | None] = asyncio.Queue(WINDOW)
        begun: set[_Answering] = set()

        async def read() -> None:
            to_skip = self.output.before
            try:
                async for block in self.lines.blocks(BLOCK):
                    left = block[to_skip:]
                    to_skip -= len(block) - len(left)
                    if left:
                        answering = asyncio.ensure_future(self._answered(left))
                        begun.add(answering)
                        await underway.put(answering)
            except Exception as error:  # noqa: BLE001 - raised where the lines are written
                await underway.put(error)
            await underway.put(None)

        reading = asyncio.ensure_future(read())
        try:
            while (answering := await underway.get()) is not None:
                if isinstance(answering, Exception):
                    raise answering
                answered = await answering
                begun.discard(answering)
                self._write(answered)
                progress.advance(len(answered))
        finally:
            tasks: list[asyncio.Future[Any]] = [reading, *begun]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answered(self, block: Sequence[Line]) -> list[tuple[Item, Outcome]]:
        items = [Item(None, fault=line.fault) if line.fault else self.item(line.text) for line in block]
        asked = iter(await self.asked([item.value for item in items if not item.fault]))
        return [(item, InvalidRequest(item.fault) if item.fault else next(asked)) for item in items]

    def _write(self, answered: Sequence[tuple[Item, Outcome]]) -> None:
        records: list[dict[str, Any]] = []
        for item, outcome in answered:
            if not isinstance(outcome, StreamfleetError):
                records.append({**item.others, **outcome})
            elif self.fail_fast:
                self.output.write(records)
                raise outcome
            else:
                self.failed += 1
                failure = {"code": outcome.code, "message": outcome.message}
                records.append({**item.others, "error": failure})
        self.output.write(records)

    def _tell_how_far(self) -> None:
        count = self.output.before + self.output.written
        if not count:
            return
        if self.output.path is None:
            say(f"{count} lines are written", "yellow")
        else:
            say(f"{count} lines are written to {self.output.path}: --resume goes on after them", "yellow")
