"""`streamfleet stream`: ask, and see the answer as it is made."""

from __future__ import annotations

import asyncio
import sys
import time

from streamfleet_common.schemas import End, GenerateRequest
from streamfleet_producer.cli import options
from streamfleet_producer.cli.request_options import takes_request
from streamfleet_producer.cli.terminal import (
    leaving_quietly,
    print_choices,
    print_json,
    printable,
    run,
    say,
    stderr,
)
from streamfleet_producer.cli.worker_watch import WorkerWatch
from streamfleet_producer.ticket import DEADLINE_S, Options
from streamfleet_producer.token_stream import TokenStream


@takes_request
def stream(
    request: GenerateRequest,
    *,
    queue: options.Queue = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    lane: options.QueueLane = "normal",
    deadline: options.Deadline = DEADLINE_S,
    idempotency_key: options.IdempotencyKey = None,
    json: options.Json = False,
) -> None:
    """Ask, and print the answer as it comes.

    Of several answers the first one comes so, the others when all are there. Leaving by Ctrl-C cancels the
    request. With --json each event is a line, the whole result the last one.
    """
    more = Options(lane=lane, deadline_s=deadline)
    with leaving_quietly():  # which cancels the request
        run(_stream(redis_url, queue, request, idempotency_key=idempotency_key, more=more, json=json))


async def _stream(
    redis_url: str,
    queue: str | None,
    request: GenerateRequest,
    *,
    idempotency_key: str | None,
    more: Options,
    json: bool,
) -> None:
    opened = options.open_client(redis_url, queue, kind="generate", model=request.model)
    async with opened as fleet, WorkerWatch(fleet):
        asked_at = time.monotonic()
        try:
            async with fleet.stream(request, idempotency_key=idempotency_key, **more) as tokens:
                if json:
                    await _as_json(tokens)
                    return
                first_at = await _as_text(tokens, several=request.n > 1)
        except asyncio.CancelledError:
            if stderr().is_terminal:
                say("cancelled", "dim")
            raise
        if stderr().is_terminal:
            _sum_up(tokens.result, first_at - asked_at, time.monotonic() - first_at)


async def _as_json(tokens: TokenStream) -> None:
    async for event in tokens.events():
        print_json(event.model_dump(mode="json"))
    print_json(tokens.result.model_dump(mode="json"))


async def _as_text(tokens: TokenStream, *, several: bool) -> float:
    """Print the text, of the first answer if there are several, and the others once they are there.

    Gives when the first token came, on the monotonic clock.
    """
    first_at = 0.0
    last = "\n"
    watched = sys.stdout.isatty()
    heading = "[1]\n" if several else ""
    try:
        async for delta in tokens:
            first_at = first_at or time.monotonic()
            if delta.index > 0:
                continue
            text = printable(delta.text) if watched else delta.text
            sys.stdout.write(heading + text)
            sys.stdout.flush()
            heading, last = "", text[-1:] or last
    finally:
        # Whatever ends it, what comes next begins a line.
        if last != "\n":
            sys.stdout.write("\n")
            sys.stdout.flush()
    print_choices([choice.text for choice in tokens.result.choices[1:]], first=2)
    return first_at or time.monotonic()


def _sum_up(end: End, first_s: float, rest_s: float) -> None:
    count = end.usage.completion_tokens
    rate = f", then {(count - 1) / rest_s:.0f} a second" if count > 1 and rest_s > 0 else ""
    plural = "" if count == 1 else "s"
    reasons = ", ".join(dict.fromkeys(choice.finish_reason for choice in end.choices))
    say(f"{count} token{plural}, the first after {first_s:.2f} s{rate} ({reasons})", "dim")
