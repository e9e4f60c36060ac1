"""How a worker or a gateway logs: structlog to standard error, JSON for machines or lines for people.

Needs structlog, which the base install lacks: it is imported when a process configures its log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    import structlog

FRAMES = 8
ABOUT = ("rid", "epoch")
"""What a line of the standard library's may say in its `extra`: which request it is about."""
FORWARDED = {"streamfleet_worker": "", "opentelemetry": "WARNING"}
"""Whose lines become ours, and from which level on; from that of all others where none is said."""


class _Forwarder(logging.Handler):
    """Brings what is logged by the standard library alone, as an engine does, into the same lines."""

    def emit(self, record: logging.LogRecord) -> None:
        import structlog  # noqa: PLC0415 (an extra)

        # Without the words of an exception, which may quote a prompt: whoever logs says what may be said.
        details = {name: record.__dict__[name] for name in ABOUT if name in record.__dict__}
        structlog.get_logger().log(record.levelno, record.getMessage(), **details)


class _StandardError:
    """Standard error for as long as somebody reads it: a log that cannot be written is no reason to die."""

    def write(self, text: str) -> int:
        self._try(lambda: sys.stderr.write(text))
        return len(text)

    def flush(self) -> None:
        self._try(sys.stderr.flush)

    def _try(self, step: Callable[[], object]) -> None:
        try:
            step()
        except BrokenPipeError:
            # What is buffered would be tried again each time, at last at the end of the process.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stderr.fileno())
            os.close(nowhere)
        except OSError:
            pass  # a full disk, say: later lines may find room


def watch_loop() -> None:
    """Have what the running event loop complains of told in our lines, without the words, which may quote."""
    asyncio.get_running_loop().set_exception_handler(_complain)


def _complain(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    import structlog  # noqa: PLC0415 (an extra)

    log, error = structlog.get_logger(), context.get("exception")
    if error is None:
        log.error("fault on the event loop", error=str(context.get("message", "")))
        return
    # Its message has the arguments of what failed in it, as its exception may.
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    at = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    log.error("fault on the event loop", error=type(error).__name__, at=at)


def configure(log_format: str, level: str, **bound: str) -> None:
    """Set structlog up, with `bound` on every line. Prompts and answers are never logged."""
    import structlog  # noqa: PLC0415 (an extra)

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
        # A line in one piece, since several processes may write to the same place.
        logger_factory=structlog.WriteLoggerFactory(cast(TextIO, _StandardError())),
        cache_logger_on_first_use=True,
    )
    for name, least in FORWARDED.items():
        theirs = logging.getLogger(name)
        theirs.handlers = [_Forwarder()]
        theirs.setLevel(least or level.upper())
