"""Which request is meant: its id as `submit` printed it, or as a gateway shows it."""

from __future__ import annotations

import re

from streamfleet_common.errors import InvalidRequest

_SHOWN = re.compile(r"(?:chatcmpl-|cmpl-)?(?:(?P<queue>[A-Za-z0-9_.-]{1,64}):)?(?P<rid>[0-9a-f]{34})")


def named(shown: str, queue: str | None) -> tuple[str, str | None]:
    """The id itself, and its queue, if the id or `queue` says which.

    A gateway shows `QUEUE:ID`, to clients of OpenAI's routes as `chatcmpl-QUEUE:ID` or `cmpl-QUEUE:ID`.

    Raises:
        InvalidRequest: it is no id, or is of another queue than `queue`.
    """
    found = _SHOWN.fullmatch(shown.strip())
    if found is None:
        start = shown if len(shown) <= 80 else f"{shown[:80]}…"
        raise InvalidRequest(
            f"{start!r} is no request's id: an id has 34 hex digits, as `submit` prints it; "
            "QUEUE:ID, as a gateway shows it, will do too"
        )
    of = found["queue"]
    if of is not None and queue is not None and of != queue:
        raise InvalidRequest(
            f"{shown!r} is of queue {of!r}, but {queue!r} was named (as QUEUE, --queue or "
            "STREAMFLEET_QUEUE): say one of the two"
        )
    return found["rid"], of or queue
