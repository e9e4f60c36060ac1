"""`streamfleet submit`: hand a request in and come back for it later."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from streamfleet_common.schemas import GenerateRequest
from streamfleet_producer.cli import options
from streamfleet_producer.cli.request_options import takes_request
from streamfleet_producer.cli.terminal import print_json, run
from streamfleet_producer.ticket import DEADLINE_S, RESULT_TTL_S, Options

ResultTtl = Annotated[float, typer.Option("--result-ttl", help="Seconds for which the answer is kept.")]


@takes_request
def submit(
    request: GenerateRequest,
    *,
    queue: options.Queue = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    lane: options.QueueLane = "normal",
    deadline: options.Deadline = DEADLINE_S,
    result_ttl: ResultTtl = RESULT_TTL_S,
    idempotency_key: options.IdempotencyKey = None,
    json: options.Json = False,
) -> None:
    """Submit a request and print its id.

    The id is for `result`, `status` and `cancel`.
    """
    more = Options(lane=lane, deadline_s=deadline, result_ttl_s=result_ttl)
    run(_submit(redis_url, queue, request, idempotency_key=idempotency_key, more=more, json=json))


async def _submit(
    redis_url: str,
    queue: str | None,
    request: GenerateRequest,
    *,
    idempotency_key: str | None,
    more: Options,
    json: bool,
) -> None:
    async with options.open_client(redis_url, queue, kind="generate", model=request.model) as fleet:
        ticket = await fleet.submit(request, idempotency_key=idempotency_key, **more)
        if json:
            print_json({**asdict(ticket), "queue": fleet.queue})
        else:
            print(ticket.id)
