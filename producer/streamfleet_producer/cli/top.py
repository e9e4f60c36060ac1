"""`streamfleet top`: queues, workers, rates and latencies, live or once."""

from __future__ import annotations

import sys
from typing import Annotated

from rich.console import Console
from typer import Option

from streamfleet_common.connections import Connections, redacted
from streamfleet_common.errors import InvalidRequest, Unsupported
from streamfleet_producer.cli import options
from streamfleet_producer.cli.terminal import print_json, run, say, stdout
from streamfleet_producer.cli.top_document import document
from streamfleet_producer.cli.top_frame import picture
from streamfleet_producer.cli.top_reading import FleetReader
from streamfleet_producer.cli.top_rows import queue_rows, worker_rows
from streamfleet_producer.cli.top_view import View

INTERVAL_S = 2.0


def top(
    *,
    queue: Annotated[
        list[str] | None,
        Option(
            "--queue",
            "-q",
            metavar="QUEUE",
            help="This queue, or those like 'chat-*'; may be repeated.",
            show_default=False,
        ),
    ] = None,
    interval: Annotated[
        float, Option(metavar="SECONDS", help="Seconds between two readings.", min=0.2, max=3600.0)
    ] = INTERVAL_S,
    once: Annotated[bool, Option("--once", help="Print one picture and end.")] = False,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    json: options.Json = False,
) -> None:
    """Watch queues and workers: rates, latencies, batches.

    It reads Redis alone, and needs no more than the role `operator`. Press `?` for its keys and columns.
    """
    if json and not once:
        raise InvalidRequest("--json prints one picture: say --once too")
    run(_once(redis_url, queue or [], json=json) if once else _live(redis_url, queue or [], interval))


async def _once(redis_url: str, patterns: list[str], *, json: bool) -> None:
    connections = Connections.open(redis_url)
    try:
        reader = FleetReader(connections, patterns)
        await reader.check()
        reading = await reader.read()
    finally:
        await connections.close()
    queues, workers = queue_rows(reading, {}), worker_rows(reading)
    redis = redacted(redis_url)
    view = View()
    view.take(reading, queues, workers)
    if view.trouble:
        say(view.trouble)
    if json:
        print_json(document(redis, reading, queues, workers))
        return
    console = stdout()
    for line in picture(view, redis, console.width):
        line.rstrip()
        console.print(line, no_wrap=True, overflow="crop", crop=False)


async def _live(redis_url: str, patterns: list[str], interval_s: float) -> None:
    console = Console(highlight=False, force_terminal=True)
    if not (sys.stdin.isatty() and sys.stdout.isatty()) or console.is_dumb_terminal:
        raise InvalidRequest("the live view needs a terminal that can draw: --once prints one picture")
    try:
        from streamfleet_producer.cli.top_live import LiveTop  # noqa: PLC0415 (Windows cannot)
    except ImportError as error:
        if error.name not in ("termios", "tty"):
            raise
        raise Unsupported(
            "the live view needs a terminal as Linux and macOS have it: --once prints one picture"
        ) from None
    connections = Connections.open(redis_url)
    try:
        reader = FleetReader(connections, patterns)
        await reader.check()
        await LiveTop(connections, reader, console, sys.stdin.fileno(), interval_s).run()
    finally:
        await connections.close()
