"""How far a long run is: a bar on stderr, where somebody looks."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.text import Text

from streamfleet_producer.cli.terminal import stderr

FEW = 8
"""So many items need no bar."""


class Progress:
    """Items done, their rate, and when the rest will be; silent in pipes, and where the results are shown.

    `total` is None if nobody knows it.
    """

    def __init__(self, total: int | None, *, to_terminal: bool) -> None:
        console = stderr()
        is_seen = console.is_terminal and not (to_terminal and sys.stdout.isatty())
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            _Rate(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not is_seen,
            redirect_stdout=False,  # the results go there, and perhaps into a file
        )
        self._total = total
        self._done = 0
        self._task = self._bar.add_task("lines", total=total)

    def advance(self, count: int) -> None:
        """So many more are done."""
        self._done += count
        if not self._bar.live.is_started and (self._total or self._done) > FEW:
            self._bar.start()
        self._bar.update(self._task, completed=self._done)

    def say(self, text: str) -> None:
        """A line for the person, above the bar."""
        self._bar.console.print(Text(text, style="yellow"), soft_wrap=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text("" if task.speed is None else f"{task.speed:,.0f}/s", style="dim")
