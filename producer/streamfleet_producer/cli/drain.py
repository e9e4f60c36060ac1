"""`streamfleet drain`: let one worker finish what it runs, and end."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from streamfleet_producer.cli import options
from streamfleet_producer.cli.operating import QueueName, operator
from streamfleet_producer.cli.terminal import print_json, run, say
from streamfleet_producer.operations import control
from streamfleet_producer.operations.control import Drain

WAIT_S = 120.0


def drain(
    queue: QueueName,
    worker: Annotated[
        str,
        typer.Argument(
            metavar="WORKER", help="Its name, as `streamfleet top` and its log have it.", show_default=False
        ),
    ],
    *,
    wait: Annotated[bool, typer.Option("--wait", help="Until it has ended.")] = False,
    timeout: Annotated[float, typer.Option(help="With --wait: so many seconds at most.", min=0.0)] = WAIT_S,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    json: options.Json = False,
) -> None:
    """Let a worker finish what it runs, and end.

    It takes nothing new. What it has not finished within its own limit (STREAMFLEET_DRAIN_TIMEOUT_S) goes
    back to the front of its lane. Whoever keeps it, a supervisor or an orchestrator, starts another in its
    place.
    """

    async def work() -> Drain:
        async with operator(redis_url, queue) as broker:
            asked = await control.drain(broker, worker)
            if not json:
                _tell(asked)
            if wait:
                await control.drained(broker, worker, within_s=timeout)
            return asked

    asked = run(work())
    if json:
        print_json({**asdict(asked), "has_ended": wait})
    elif wait:
        print(f"worker {worker} has ended")


def _tell(asked: Drain) -> None:
    already = "" if asked.is_first else " already"
    print(f"worker {asked.worker} drains{already}: it finishes what it runs, and ends")
    if not asked.others:
        say(f"no other worker serves queue {asked.queue}: what waits there waits for the next one", "yellow")
    for gone in asked.cleaned:
        say(f"worker {gone} is long gone: its mark was taken away")
