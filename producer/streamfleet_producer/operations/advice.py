"""Why a request has no answer, and what to do about it."""

from __future__ import annotations

from streamfleet_common.errors import InvalidRequest, StreamfleetError
from streamfleet_producer.operations.flight import Flight

_SPECIAL = {
    "model_not_found": "Ask for a model that the queue serves (`streamfleet queues`), or leave it out.",
    "too_long": "Shorten the prompt or `max_tokens`, or let `truncate` cut it.",
    "unsupported": "Send it to a queue whose workers do this kind of work.",
    "undecodable": "Upgrade the older of the two sides, producer or worker.",
}


def advice(flight: Flight) -> str:
    """What to do about a request that ended without an answer; "" of one that was answered."""
    record, end = flight.record, flight.end
    if record.state == "done":
        return ""
    if record.state == "cancelled":
        return "Whoever sent it, or knows its id, cancelled it. If it is still wanted, send it again."
    if record.state == "expired":
        if not record.started_at_ms:
            return (
                "No worker began it in time. If that happens often, the queue has too few workers; this "
                "request alone would gain by a longer deadline or a more urgent lane."
            )
        return "It was begun, and its deadline came first: give it a longer one, or fewer tokens."
    if record.state == "dead":
        return (
            "Workers die of it: do not send it again as it is. `streamfleet dead list` shows the letter, "
            "`dead show` the request if it was kept."
        )
    error = end.error.error() if end is not None and end.error is not None else None
    return _of_failure(error)


def _of_failure(error: StreamfleetError | None) -> str:
    if error is None:
        return "Its worker gave no reason; the worker's log has its id."
    if error.code in _SPECIAL:
        return _SPECIAL[error.code]
    if isinstance(error, InvalidRequest):
        return "The request itself is at fault: mend it before it is sent again."
    if getattr(error, "retryable", False):
        return "It may do better at the next try: send it again."
    return "It would fail again as it is; the worker's log says more under its id."
