"""The demo on a terminal: a grid of questions whose answers grow side by side."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table
from rich.text import Text

from streamfleet_producer.cli.exchange import Exchange

FRAMES_PER_S = 15
LEAST_PANEL_WIDTH = 38
WIDEST_PANEL = 60
LEAST_PANEL_HEIGHT = 4
LINES_BESIDE_PANELS = 3
"""What was said before, which should stay in sight, and the line below."""
CHARS_PER_TOKEN = 4.5
LABEL_WIDTH = 8
CURSOR = "▌"
STYLES = {"waiting": "bright_black", "running": "cyan", "done": "green", "failed": "red"}
MARKS = {"waiting": "·", "running": "▸", "done": "✓", "failed": "✗"}


class Board:
    """All exchanges, drawn within the terminal as it is now.

    Panels keep their size while answers grow, so that nothing jumps; a longer answer shows its end. With
    `whole` set they are as tall as their answers. Where panels do not fit, each exchange is a line.
    """

    def __init__(self, exchanges: Sequence[Exchange], max_tokens: int) -> None:
        self._exchanges = exchanges
        self._max_tokens = max_tokens
        self.status = ""
        self.whole = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = _columns(len(self._exchanges), options.max_width)
        rows = math.ceil(len(self._exchanges) / columns)
        width = min(WIDEST_PANEL, options.max_width // columns)
        inner = max(1, width - 4)
        wanted = math.ceil(self._max_tokens * CHARS_PER_TOKEN / inner) + 2
        height = min(wanted, (console.height - LINES_BESIDE_PANELS) // rows)
        fits = height >= LEAST_PANEL_HEIGHT
        if not fits and not self.whole:
            yield from self._lines(options.max_width)
        else:
            grid = Table.grid()
            for _ in range(columns):
                grid.add_column(width=width)
            for row in range(rows):
                exchanges = self._exchanges[row * columns : (row + 1) * columns]
                bodies = [self._wrapped(exchange, console, inner) for exchange in exchanges]
                lines = height - 2 if fits else 1
                if self.whole:
                    lines = max(lines, *map(len, bodies))
                grid.add_row(*map(_panel, exchanges, bodies, [lines] * len(bodies)))
            yield grid
        yield Text(self.status, style="dim", no_wrap=True, overflow="ellipsis")

    def _wrapped(self, exchange: Exchange, console: Console, width: int) -> list[Text]:
        if exchange.state == "failed":
            return list(Text(exchange.error, style="red").wrap(console, width))
        if exchange.state == "waiting":
            return [Text("waiting", style="bright_black")]
        lines = list(Text(exchange.answer).wrap(console, width))
        if exchange.state == "running" and lines and lines[-1].cell_len < width:
            lines[-1].append(CURSOR, style="cyan")
        return lines

    def _lines(self, width: int) -> Iterator[Text]:
        longest = max(len(exchange.question.text) for exchange in self._exchanges)
        first = min(longest, width * 2 // 5)
        room = max(1, width - first - 4)
        for exchange in self._exchanges:
            question = Text(exchange.question.text, style="bold")
            question.truncate(first, overflow="ellipsis", pad=True)
            answer = exchange.error if exchange.state == "failed" else exchange.answer
            shown = answer if len(answer) <= room else "…" + answer[1 - room :]
            mark = (MARKS[exchange.state] + " ", STYLES[exchange.state])
            yield Text.assemble(mark, question, "  ", shown, no_wrap=True, overflow="crop")


def _panel(exchange: Exchange, body: list[Text], lines: int) -> Panel:
    style = STYLES[exchange.state]
    below = {
        "waiting": "",
        "running": f"first token {exchange.first_s:.2f} s",
        "done": f"✓ {exchange.amount} · first after {exchange.first_s:.2f} s",
        "failed": "✗ failed",
    }[exchange.state]
    return Panel(
        Text("\n").join(body[-lines:]),
        title=Text(exchange.question.text, style="bold" if exchange.state != "waiting" else ""),
        title_align="left",
        subtitle=Text(below, style=style) if below else None,
        subtitle_align="right",
        border_style=style,
        height=lines + 2,
    )


def _columns(count: int, width: int) -> int:
    """As many as are readable, but no more than make a square, and rather such that no place stays empty."""
    most = max(1, min(width // LEAST_PANEL_WIDTH, math.ceil(math.sqrt(count))))
    return next((columns for columns in range(most, 1, -1) if count % columns == 0), most)


class Screen:
    """Talks to a person at a terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def waiting(self, label: str, text: str) -> Iterator[None]:
        """Something takes a while."""
        columns = (
            SpinnerColumn(style="cyan"),
            TextColumn("{task.description}"),
            TextColumn("{task.elapsed:.0f} s", style="dim"),
        )
        with Progress(*columns, console=self._console, transient=True) as progress:
            progress.add_task(f"[bold]{label:<{LABEL_WIDTH}}[/]{text}", total=None)
            yield

    def done(self, label: str, text: str) -> None:
        """Something is there now."""
        line = Text.assemble(("✓ ", "green"), (f"{label:<{LABEL_WIDTH}}", "bold"), text)
        self._console.print(line, no_wrap=True, overflow="ellipsis")

    @asynccontextmanager
    async def board(self, exchanges: Sequence[Exchange], max_tokens: int) -> AsyncIterator[Board]:
        """Show the exchanges until the end of the context."""
        board = Board(exchanges, max_tokens)
        with Live(board, console=self._console, auto_refresh=False) as live:
            drawing = asyncio.create_task(_draw(live, board, exchanges))
            try:
                yield board
                board.whole = True
            finally:
                drawing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await drawing
                board.status = ""

    def changed(self, exchange: Exchange) -> None:
        """An answer has grown: the next frame shows it."""

    def story(self, paragraph: str, next_steps: Sequence[str]) -> None:
        """What happened, in words, and what to try."""
        width = min(self._console.width, 2 * WIDEST_PANEL)
        self._console.print(Padding(Text(paragraph), (0, 1)), width=width)
        self._console.print()
        self._console.print(Text(" Next, in two terminals:"))
        for step in next_steps:
            self._console.print(Text("  $ ", style="dim").append(step, style="cyan"), soft_wrap=True)


async def _draw(live: Live, board: Board, exchanges: Sequence[Exchange]) -> None:
    clock = asyncio.get_running_loop().time
    began = clock()
    shown = ""
    while True:
        running = sum(exchange.state == "running" for exchange in exchanges)
        tokens = sum(exchange.tokens for exchange in exchanges)
        state = f"{tokens}/{[exchange.state for exchange in exchanges]}"
        if state != shown:
            shown = state
            rate = tokens / (clock() - began)
            board.status = f" {running} of {len(exchanges)} answering · {tokens} tokens · {rate:.0f} a second"
            live.refresh()
        await asyncio.sleep(1 / FRAMES_PER_S)
