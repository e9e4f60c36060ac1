"""One HTTP request as the log and the trace tell of it, filled in on its way through the gateway."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import structlog
from starlette.types import Message

from streamfleet_common.errors import StreamfleetError
from streamfleet_common.trace_context import trace_of
from streamfleet_producer.intake import NOTED

if TYPE_CHECKING:
    from streamfleet_producer.gateway.server_spans import ServerSpan, ServerSpans

CLIENT_GONE = 499

log = structlog.get_logger()


class Passage:
    """Knows who asked for what, and what became of it: never a path, a prompt or an answer.

    Args:
        method: the verb of HTTP.
        route: the pattern of the path.
        headers: of the request, as ASGI has them.
        spans: make the span of the request; None if nobody wants any.
    """

    __slots__ = (
        "_traceparent",
        "began_at",
        "error",
        "method",
        "requests",
        "route",
        "span",
        "status",
        "tenant",
    )

    def __init__(
        self,
        method: str,
        route: str,
        headers: Iterable[tuple[bytes, bytes]] = (),
        spans: ServerSpans | None = None,
    ) -> None:
        self.method = method
        self.route = route
        self.tenant = ""
        self.status = CLIENT_GONE
        """Of the answer; nobody was there to read one until it begins."""
        self.error = ""
        """The code of what went wrong."""
        self.requests: list[tuple[str, str]] = []
        """Queue and id of what it was about."""
        self.began_at = time.monotonic()
        self._traceparent = next((value for name, value in headers if name == b"traceparent"), None)
        self.span: ServerSpan | None = None if spans is None else spans.begin(method, route, headers)

    def note(self) -> None:
        """Put down the ids of what is submitted from here on, in this task."""
        NOTED.set(self.requests)

    def failed(self, error: StreamfleetError) -> None:
        """It has come to nothing, or has ended in the middle."""
        self.error = error.code

    def answering(self, message: Message) -> Message:
        """Note the status of an answer that begins; gives its beginning with what else the header says."""
        self.status = message["status"]
        if self.span is None:
            return message
        return {**message, "headers": [*message["headers"], self.span.response_header]}

    def about(self) -> dict[str, Any]:
        """What every log line about it says."""
        about: dict[str, Any] = {"method": self.method, "route": self.route}
        if self.tenant:
            about["tenant"] = self.tenant
        if self.requests:
            about["queue"], about["rid"] = self.requests[0]
            if len(self.requests) > 1:
                about["requests"] = len(self.requests)
        if self.span is not None:
            about["trace_id"] = self.span.trace_id
        elif self._traceparent is not None:
            about |= trace_of(self._traceparent.decode("latin-1"))
        return about

    def over(self, seconds: float, *, says_so: bool) -> None:
        """It has ended, `seconds` after its beginning. To be called in the task that began it."""
        if self.span is not None:
            self.span.end(self)
        if says_so:
            about = self.about()
            if self.error:
                about["code"] = self.error
            log.debug("answered", **about, status=self.status, seconds=round(seconds, 6))
