"""How a worker logs: structlog to standard error, JSON for machines or lines for people."""

from __future__ import annotations

import logging
import sys
from typing import Any

import structlog


class _Forwarder(logging.Handler):
    """Brings what the engine logs, by the standard library alone, into the same lines."""

    def emit(self, record: logging.LogRecord) -> None:
        structlog.get_logger().log(record.levelno, record.getMessage())


def configure(log_format: str, level: str, **bound: str) -> None:
    """Set structlog up, with `bound` on every line. Prompts and answers are never logged."""

    def add_bound(
        _logger: Any, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        # No context variables, which a new thread (the engine's) begins without.
        return {**bound, **event}

    renderer: structlog.typing.Processor = (
        structlog.processors.JSONRenderer()
        if log_format == "json"
        else structlog.dev.ConsoleRenderer(
            colors=sys.stderr.isatty(),
            # The pretty ones show the values of local variables, and prompts and answers are among them.
            exception_formatter=structlog.dev.plain_traceback,
        )
    )
    structlog.configure(
        processors=[
            add_bound,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )
    engine = logging.getLogger("streamfleet_worker")
    engine.handlers = [_Forwarder()]
    engine.setLevel(level.upper())
