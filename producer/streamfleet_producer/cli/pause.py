"""`streamfleet pause` and `streamfleet resume`: whether a queue takes new requests."""

from __future__ import annotations

from dataclasses import asdict

from streamfleet_producer.cli import options
from streamfleet_producer.cli.operating import QueueName, operator
from streamfleet_producer.cli.terminal import print_json, run
from streamfleet_producer.operations import control
from streamfleet_producer.operations.control import Pause


def pause(
    queue: QueueName, *, redis_url: options.RedisUrl = options.DEFAULT_URL, json: options.Json = False
) -> None:
    """Let a queue refuse new requests.

    They fail with `QueueFull`, reason `paused`. What it has accepted goes on: it waits, runs and is answered.
    `streamfleet resume` ends that.
    """

    async def work() -> Pause:
        async with operator(redis_url, queue) as broker:
            return await control.pause(broker)

    _tell(run(work()), json=json)


def resume(
    queue: QueueName, *, redis_url: options.RedisUrl = options.DEFAULT_URL, json: options.Json = False
) -> None:
    """Let a paused queue take new requests again."""

    async def work() -> Pause:
        async with operator(redis_url, queue) as broker:
            return await control.resume(broker)

    _tell(run(work()), json=json)


def _tell(found: Pause, *, json: bool) -> None:
    if json:
        print_json(asdict(found))
        return
    already = "" if found.has_changed else " already"
    open_ = f"{found.queued:,} waiting and {found.running:,} running go on"
    if found.is_paused:
        print(f"queue {found.queue} is paused{already}: it refuses new requests; {open_}")
        print(f"to open it again: streamfleet resume {found.queue}")
    else:
        print(f"queue {found.queue} is open{already}: it takes new requests; {open_}")
