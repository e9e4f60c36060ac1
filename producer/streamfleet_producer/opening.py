"""How a stream begins: its request is submitted when it is entered, and listened to from before that."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

from streamfleet_common.schemas import Request
from streamfleet_producer.event_reader import MAX_BYTES, MAX_FRAMES, EventReader
from streamfleet_producer.giving_up import Until, given_up_at
from streamfleet_producer.intake import Intake
from streamfleet_producer.link import Link
from streamfleet_producer.ticket import DEADLINE_S, Options, Ticket


def opening(
    link: Link,
    intake: Intake,
    request: Request,
    *,
    key: str | None,
    options: Options,
    bounds: tuple[int, int] = (MAX_FRAMES, MAX_BYTES),
) -> tuple[EventReader, Callable[[], Awaitable[Ticket]]]:
    """What a stream is made of: its reader, and what submits the request.

    Args:
        link: what the client works with.
        intake: what makes a submission of the request.
        request: what is asked.
        key: an idempotency key, if there is one.
        options: what else is said about the request.
        bounds: frames and bytes that are kept for a slow reader.
    """
    max_frames, max_bytes = bounds
    reader = EventReader(
        link,
        on_restart=options.get("on_restart", "restart"),
        max_frames=max_frames,
        max_bytes=max_bytes,
    )

    async def submit() -> Ticket:
        given_up = given_up_at(link, options)
        if given_up == math.inf:
            return await submitted()
        async with Until(link, given_up):
            return await submitted()

    async def submitted() -> Ticket:
        submission = await intake.prepare(
            link.catalogue, request, stream=True, key=key, options=options, rids=link.rids
        )
        rid = submission.envelope.rid
        await reader.listen(rid)
        try:
            outcome = await link.submit(submission)
        except BaseException:
            await reader.leave()
            raise
        deadline_s = options.get("deadline_s", DEADLINE_S)
        reader.accepted(outcome, keyed=key is not None, deadline_s=deadline_s)
        return Ticket.of(rid, outcome)

    return reader, submit
