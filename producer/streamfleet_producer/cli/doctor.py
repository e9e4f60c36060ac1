"""`streamfleet doctor`: looks at server and queues, and says what is the matter and what mends it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Annotated

import typer
from rich.text import Text

from streamfleet_common import acl
from streamfleet_common.connections import Connections, redacted
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.settings import Durability, FleetSettings, read
from streamfleet_producer.cli import options
from streamfleet_producer.cli.terminal import FAILED, print_json, printable, run, stdout
from streamfleet_producer.operations.checkup import LEVELS, Check, Level, counts
from streamfleet_producer.operations.doctor import examine

WIDTH = 80
NAME_WIDTH = 16
_STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "fault": "bold red", "unseen": "dim"}


def doctor(
    *,
    queue: Annotated[
        list[str] | None,
        typer.Option("--queue", "-q", help="A queue; else all.", show_default=False),
    ] = None,
    durability: Annotated[
        Durability | None,
        typer.Option(help="What the server must keep; else STREAMFLEET_DURABILITY.", show_default=False),
    ] = None,
    role: Annotated[
        str | None,
        typer.Option(
            help=f"See whether a user has the rights of this role: {', '.join(acl.ROLES)}.",
            show_default=False,
        ),
    ] = None,
    user: Annotated[
        str | None, typer.Option(help="With --role: that user; else the own.", show_default=False)
    ] = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    json: options.Json = False,
) -> None:
    """Check Redis and the queues, and say what mends each fault.

    It changes nothing, and looks at as much as its user may. Exit status 1 if it finds a fault, 0 if there
    are warnings at most.
    """
    if role is not None and role not in acl.ROLES:
        raise InvalidRequest(f"there is no role {role[:40]!r}: take one of {', '.join(acl.ROLES)}")
    if user is not None and role is None:
        raise InvalidRequest("--user goes with --role")

    async def work() -> list[Check]:
        connections = Connections.open(redis_url)
        try:
            return await examine(
                connections,
                level=durability or read(FleetSettings).durability,
                queues=queue or (),
                role=role,
                user=user,
            )
        finally:
            await connections.close()

    checks = run(work())
    if json:
        shown = [asdict(check) for check in checks]
        print_json({"redis_url": redacted(redis_url), "counts": counts(checks), "checks": shown})
    else:
        _show(checks)
    if counts(checks)["fault"]:
        raise typer.Exit(FAILED)


def _show(checks: Sequence[Check]) -> None:
    console = stdout()
    for about, some in groupby(checks, key=lambda check: check.about):
        console.print(Text(printable(about), style="bold"), soft_wrap=True)
        for check in some:
            for line in lines_of(check):
                console.print(line, soft_wrap=True)
    found = counts(checks)
    words = ", ".join(f"{found[level]} {level}" for level in LEVELS if found[level])
    console.print(Text(f"{len(checks)} checks: {words}"), soft_wrap=True)
    if any("CONFIG SET" in check.mend for check in checks):
        said = "What is set so counts until the next restart: redis-cli CONFIG REWRITE keeps it."
        console.print(Text(said), soft_wrap=True)


def lines_of(check: Check) -> list[Text]:
    """A check on lines of at most `WIDTH` columns, below each other at the same columns."""
    indent = 2 + 8 + NAME_WIDTH
    words = textwrap.wrap(printable(check.words), WIDTH - indent, break_on_hyphens=False) or [""]
    first = Text.assemble(
        "  ", (f"{check.level:<8}", _STYLES[check.level]), f"{check.name:<{NAME_WIDTH}}", words[0]
    )
    lines = [first, *(Text(" " * indent + line) for line in words[1:])]
    if check.mend:
        room = WIDTH - 4 - len("mend: ")
        mends = textwrap.wrap(printable(check.mend), room, break_on_hyphens=False)
        lines.append(Text.assemble(" " * 4, ("mend: ", "bold"), mends[0]))
        lines += [Text(" " * 10 + line) for line in mends[1:]]
    return lines
