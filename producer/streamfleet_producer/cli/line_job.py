"""Line jobs: a line in, a line out, in order, with a bounded amount of work under way."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamfleet_common.errors import InvalidRequest, StreamfleetError, from_wire
from streamfleet_producer.cli.line_output import LineOutput
from streamfleet_producer.cli.lines import Line, Lines
from streamfleet_producer.cli.progress import Progress
from streamfleet_producer.cli.terminal import FAILED, say
from streamfleet_producer.cli.worker_watch import WorkerWatch
from streamfleet_producer.client import Client

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
_Answered = list[bytes | tuple[Item, Outcome]]
"""What comes of lines: what the output has for them, or an outcome."""
_Answering = asyncio.Future[_Answered]


@dataclass
class LineJob:
    """Reads items, asks about them, writes what comes of each; a failure is a line too, with an `error`.

    `asked` gives the outcomes for the values of some items, in their order; `item` says what a line means.
    """

    fleet: Client
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
        try:
            total = self.lines.count()
            done = self.output.before - self.output.failed_before
            left = None if total is None else max(0, total - done)
            with Progress(left, to_terminal=self.output.path is None) as progress:
                async with WorkerWatch(self.fleet, progress.say) as watch:
                    await self._run(progress, watch)
        except BaseException as error:
            self.output.close()
            if not isinstance(error, BrokenPipeError):
                self._tell_how_far()
            raise
        self.output.close()
        if self.failed:
            again = "" if self.output.path is None else ", and --resume tries them again"
            say(f"{self.failed} of {self.output.written} lines failed: see their `error`{again}", "red")
        elif self.output.before and not self.output.written:
            say(f"nothing is left to do: {self.output.path} has an answer for every line", "dim")
        return FAILED if self.failed else 0

    async def _run(self, progress: Progress, watch: WorkerWatch) -> None:
        underway: asyncio.Queue[_Answering | Exception | None] = asyncio.Queue(WINDOW)
        begun: set[_Answering] = set()

        async def read() -> None:
            number = 1
            try:
                async for block in self.lines.blocks(BLOCK):
                    answering = asyncio.ensure_future(self._answered(block, number, watch))
                    number += len(block)
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
                progress.advance(sum(not isinstance(one, bytes) for one in answered))
        finally:
            tasks: list[asyncio.Future[Any]] = [reading, *begun]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _answered(self, block: Sequence[Line], number: int, watch: WorkerWatch) -> _Answered:
        """What comes of lines, of which the first one has this number."""
        answered: _Answered = []
        open_: list[tuple[int, Item]] = []
        for place, (line, kept) in enumerate(zip(block, self.output.kept(len(block)), strict=True)):
            if kept is not None:
                answered.append(kept)
                continue
            item = Item(None, fault=line.fault) if line.fault else self.item(line.text)
            if not item.fault:
                open_.append((place, item))
            answered.append((item, InvalidRequest(f"line {number + place}: {item.fault}")))
        outcomes = await self.asked([item.value for _, item in open_]) if open_ else ()
        for (place, item), outcome in zip(open_, outcomes, strict=True):
            told = outcome
            if isinstance(outcome, StreamfleetError):
                told = _of_line(watch.explained(outcome), number + place)
            answered[place] = (item, told)
        return answered

    def _write(self, answered: _Answered) -> None:
        lines: list[bytes | dict[str, Any]] = []
        for one in answered:
            if isinstance(one, bytes):
                lines.append(one)
                continue
            item, outcome = one
            if not isinstance(outcome, StreamfleetError):
                lines.append({**item.others, **outcome})
            elif self.fail_fast:
                self.output.write(lines)
                raise outcome
            else:
                self.failed += 1
                failure = {"code": outcome.code, "message": outcome.message}
                lines.append({**item.others, "error": failure})
        self.output.write(lines)

    def _tell_how_far(self) -> None:
        count = self.output.lines
        if not count:
            return
        if self.output.path is None:
            say(f"{count} lines are written", "yellow")
        else:
            say(f"{count} lines are written to {self.output.path}: --resume goes on after them", "yellow")


def _of_line(error: StreamfleetError, number: int) -> StreamfleetError:
    """An error about the only text of a request, in words about the line that the text was."""
    words = error.message.replace(" and pairs.0", "").replace("texts.0", f"line {number}")
    words = words.replace("pairs.0", f"the pair of line {number}")
    return error if words == error.message else from_wire(error.code, words, error.details)
