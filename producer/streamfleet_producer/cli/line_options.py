"""Options of the commands that read lines and write lines."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

_LINES = "Lines in and out"

Source = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE|-|TEXT",
        help="A file with a text on each line, `-` for standard input, or the texts.",
        show_default=False,
    ),
]
File = Annotated[
    Path | None,
    typer.Option(
        "--file",
        "-f",
        metavar="<file>",
        help="The file, whatever its name.",
        show_default=False,
        rich_help_panel=_LINES,
    ),
]
Jsonl = Annotated[
    bool,
    typer.Option(
        "--jsonl",
        help="Lines are JSON with a field `text`; the answers keep their other fields.",
        rich_help_panel=_LINES,
    ),
]
KeepText = Annotated[
    bool, typer.Option("--text", help="Repeat the text in its answer.", rich_help_panel=_LINES)
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        dir_okay=False,
        metavar="<file>",
        help="Write to this file, not to standard output.",
        show_default=False,
        rich_help_panel=_LINES,
    ),
]
Resume = Annotated[
    bool,
    typer.Option("--resume", help="Go on after the lines that the file has.", rich_help_panel=_LINES),
]
FailFast = Annotated[
    bool, typer.Option("--fail-fast", help="End with the first line that fails.", rich_help_panel=_LINES)
]
Model = Annotated[str | None, typer.Option(help="The queue must serve this model.", show_default=False)]
Truncate = Annotated[bool, typer.Option("--truncate", help="Cut what is too long for the model.")]
TruncateSide = Annotated[
    Literal["left", "right"], typer.Option(help="Where it is cut; right keeps the start.")
]
