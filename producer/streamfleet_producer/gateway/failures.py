"""Faults of the gateway itself: what its log says of one, and what the client is told."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import structlog

from streamfleet_common.errors import GenerationFailed

FRAMES = 8

log = structlog.get_logger()


def failure_of(error: Exception, about: Mapping[str, Any]) -> GenerationFailed:
    """The error to be told for an exception that nobody foresaw; `about` says which request it was.

    The log gets its kind and where it was raised, not its words: they may quote a prompt.
    """
    frames = traceback.extract_tb(error.__traceback__)[-FRAMES:]
    at = [f"{frame.filename}:{frame.lineno} {frame.name}" for frame in frames]
    log.error("the gateway failed on a request", **about, kind=type(error).__name__, at=at)
    return GenerationFailed("the gateway failed on this request; its log says where")
