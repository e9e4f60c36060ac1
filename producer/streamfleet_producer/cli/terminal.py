"""How the command line talks: plain text for pipes, colour where a person looks, exit codes for scripts."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import Collection, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from streamfleet_common.errors import (
    BrokerUnavailable,
    Conflict,
    DeadlineExceeded,
    InvalidRequest,
    ModelNotFound,
    QueueFull,
    RequestNotFound,
    StreamfleetError,
)
from streamfleet_common.schemas import Failure
from streamfleet_producer.cli.processes import ending

_T = TypeVar("_T")

FAILED = 1
_CODES: tuple[tuple[type[StreamfleetError], int], ...] = (
    (InvalidRequest, 2),
    (Conflict, 2),
    (QueueFull, 3),
    (BrokerUnavailable, 4),
    (RequestNotFound, 5),
    (ModelNotFound, 5),
    (DeadlineExceeded, 124),
)
EXIT_CODES = (
    "Exit status: 0 done, 1 failed or cancelled, 2 wrong usage or request, 3 queue full, "
    "4 no broker, 5 not found, 124 deadline passed, 130 ended by Ctrl-C."
)


def exit_code(error: StreamfleetError) -> int:
    """What a script is told about an error."""
    return next((code for kind, code in _CODES if isinstance(error, kind)), FAILED)


def stdout() -> Console:
    """The console for results; made anew, so that it looks at the stream as it is now."""
    return Console(highlight=False)


def stderr() -> Console:
    """The console for what is said besides the results."""
    return Console(stderr=True, highlight=False)


def say(text: str, style: str = "") -> None:
    """A line for the person, on stderr, never broken by us."""
    stderr().print(Text(text, style=style), soft_wrap=True)


def complain(message: str) -> None:
    """An error in one line, red on a terminal."""
    stderr().print(Text.assemble(("error: ", "bold red"), (message, "red")), soft_wrap=True)


def print_json(value: object) -> None:
    """One line of JSON on stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def printable(text: str) -> str:
    """The text without control characters: a model must not steer somebody's terminal."""
    return "".join(char for char in text if char.isprintable() or char in "\n\t")


def print_choices(texts: Sequence[str], first: int = 1) -> None:
    """Several answers, each below its number, counted from `first`."""
    watched = sys.stdout.isatty()
    for number, text in enumerate(texts, first):
        gap = "\n" if number > 1 else ""
        sys.stdout.write(f"{gap}[{number}]\n{printable(text) if watched else text}\n")
    sys.stdout.flush()


def print_table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[str] = ()) -> None:
    """Columns below their heads; those named in `right` end at the right."""
    # By hand and not by rich: lines for `grep` and `awk`, never cut to a width.
    cells = [[name.upper() for name in heads], *rows]
    widths = [max(len(line[column]) for line in cells) for column in range(len(heads))]
    for line in cells:
        padded = [
            cell.rjust(width) if name in right else cell.ljust(width)
            for name, cell, width in zip(heads, line, widths, strict=True)
        ]
        print("  ".join(padded).rstrip())


def in_one_line(text: str, room: int | None) -> str:
    """A text for a table: without line breaks and control characters, and cut to `room`, if that is given."""
    line = " ".join(printable(text).split())
    return line if room is None or len(line) <= room else f"{line[: max(1, room - 1)]}…"


@contextmanager
def leaving_quietly() -> Iterator[None]:
    """Let a reader who has seen enough (`| head`) end the command without a word.

    Raises:
        typer.Exit: with the status of a program that such a reader ends.
    """
    try:
        yield
    except BrokenPipeError:
        # What is left in the buffer must not fail once more at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(128 + signal.SIGPIPE) from None


def program() -> str:
    """How this command is called here, to be typed again: its path where the shell would not find it."""
    called = sys.argv[0]
    found = shutil.which("streamfleet")
    if found is not None and Path(called).exists() and Path(found).samefile(called):
        return "streamfleet"
    return called if Path(called).name == "streamfleet" else "streamfleet"


def run(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a command's work on an event loop; a signal to end cancels it first.

    Raises:
        typer.Exit: with 128 + the signal's number, after a signal.
    """
    with ending() as end:
        try:
            return asyncio.run(coroutine)
        except KeyboardInterrupt:
            raise typer.Exit(end.exit_code) from None


class Command(TyperCommand):
    """A command whose help has its options in groups, where they name one as their panel."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write them, the groups in the order of their first options."""
        groups: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            line = parameter.get_help_record(ctx)
            if line is not None:
                kind = "Arguments" if parameter.param_type_name == "argument" else "Options"
                groups.setdefault(getattr(parameter, "rich_help_panel", None) or kind, []).append(line)
        for title, lines in groups.items():
            with formatter.section(title):
                formatter.write_dl(lines)


class Group(TyperGroup):
    """The commands; what goes wrong in one is said in a line, not in a traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that was asked for."""
        try:
            with leaving_quietly():
                done = super().invoke(ctx)
                sys.stdout.flush()  # while somebody is there to be told that it cannot be
                return done
        except StreamfleetError as error:
            # A script that asked for JSON gets the error's parts too.
            if ctx.meta.get("json"):
                sys.stderr.write(json.dumps({"error": Failure.of(error).model_dump()}) + "\n")
            else:
                complain(error.message)
            raise typer.Exit(exit_code(error)) from None
        except OSError as error:  # a disk that is full, say
            complain(str(error.strerror or error))
            raise typer.Exit(FAILED) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
