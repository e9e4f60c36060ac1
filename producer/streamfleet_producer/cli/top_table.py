"""Tables that fit a terminal: narrow ones have what matters, wide ones more."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.cells import cell_len
from rich.text import Text

from streamfleet_producer.cli.top_values import fitted

_Row = TypeVar("_Row")
Cell = tuple[str, str]
"""A value, and its style."""


@dataclass(frozen=True, slots=True)
class Column(Generic[_Row]):
    """One of a table's columns.

    Args:
        head: above it.
        width: in cells.
        cell: of a row.
        key: what to sort rows by; larger ones come first, unless it is a text. None: not by this one.
        is_left: where its values begin; else it is where they end.
        grows: as far as its longest value needs, where there is room.
        is_extra: shown only where there is room.
    """

    head: str
    width: int
    cell: Callable[[_Row], Cell]
    key: Callable[[_Row], str | float | None] | None = None
    is_left: bool = False
    grows: bool = False
    is_extra: bool = False


class Table(Generic[_Row]):
    """Rows in columns, a blank between two."""

    def __init__(self, columns: Sequence[Column[_Row]]) -> None:
        self._columns = columns
        self.sortable = [column for column in columns if column.key is not None]

    def sorted(self, rows: Sequence[_Row], by: int, *, is_reversed: bool) -> list[_Row]:
        """The rows in the order of the `by`-th of `sortable`; those without a value are the last."""
        key = self.sortable[by].key
        assert key is not None  # noqa: S101 - the type checker cannot know it
        known = [row for row in rows if key(row) is not None]
        # Rows come in the order of their names, and equals stay in it.
        is_falling = any(not isinstance(key(row), str) for row in known) != is_reversed
        known.sort(key=key, reverse=is_falling)  # type: ignore[arg-type]
        return known + [row for row in rows if key(row) is None]

    def head(self, rows: Sequence[_Row], width: int, by: int) -> Text:
        """The names of the columns, the one that rows are sorted by marked."""
        line = Text()
        for column, room in self._layout(rows, width):
            style = "bold reverse" if column is self.sortable[by] else "bold"
            name = column.head[:room]
            pad = " " * (room - len(name))
            line.append(" " if line else "")
            line.append("" if column.is_left else pad).append(name, style)
            line.append(pad if column.is_left else "")
        return line

    def lines(self, rows: Sequence[_Row], shown: Sequence[_Row], width: int) -> list[Text]:
        """Those of `rows` that are shown; widths are those that all of them need, so that nothing jumps."""
        layout = self._layout(rows, width)
        lines = []
        for row in shown:
            line = Text()
            for column, room in layout:
                text, style = column.cell(row)
                line.append(" " if line else "")
                line.append(fitted(text, room, is_left=column.is_left), style)
            lines.append(line)
        return lines

    def _layout(self, rows: Sequence[_Row], width: int) -> list[tuple[Column[_Row], int]]:
        widths = [0 if column.is_extra else column.width for column in self._columns]
        left = width - sum(widths) - sum(not column.is_extra for column in self._columns) + 1
        for at, column in enumerate(self._columns):
            if column.grows and left > 0:
                longest = max((cell_len(column.cell(row)[0]) for row in rows), default=0)
                more = max(0, min(left, longest - column.width))
                widths[at] += more
                left -= more
        for at, column in enumerate(self._columns):
            if column.is_extra and column.width + 1 <= left:
                widths[at] = column.width
                left -= column.width + 1
        return [(column, room) for column, room in zip(self._columns, widths, strict=True) if room]
