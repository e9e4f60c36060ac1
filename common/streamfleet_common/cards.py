"""Worker cards: what is served where, with which limits."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from streamfleet_common.message import Message, Name, QueueName, Texts
from streamfleet_common.one_shot import HandlerCard
from streamfleet_common.token_layout import TokenLayout
from streamfleet_common.worker_stats import WorkerStats


class Limits(Message):
    """What a worker takes; lengths in tokens unless said otherwise."""

    max_batch_size: int = Field(ge=1)
    max_seq_len: int = Field(ge=1)
    """Prompt and answer together."""
    max_queue_depth: int = Field(ge=1)
    max_queue_tokens: int = Field(default=0, ge=0)
    """Of all accepted and unfinished requests of the queue together; 0: no limit."""
    max_request_bytes: int = Field(ge=1)
    vocab_size: int = Field(default=0, ge=0)
    """Token ids must be below it; 0 if the worker knows no tokens."""


class Card(Message):
    """What one worker serves, refreshed while it lives. Clients read it to refuse early."""

    worker: Name
    queue: QueueName
    model: Name
    revision: Name = ""
    tasks: Texts = ("generate",)
    handler: HandlerCard | None = None
    """Of a worker that serves a handler, whose name is then `model`."""
    layout: TokenLayout | None = None
    """What it puts around the texts of a request, which can then be counted before it is submitted."""
    device: Name = ""
    precision: Name = ""
    limits: Limits
    capacity: int = Field(default=0, ge=0)
    """Requests it could take now."""
    state: Literal["ready", "draining"] = "ready"
    stats: WorkerStats | None = None
    """How the last half minute went; None of a worker of a version that does not say."""
    version: Name = ""
    """Of its streamfleet; this and the next two are for whoever looks whether workers agree, and ""
    or 0 of one of a version that does not say."""
    lease_ms: int = Field(default=0, ge=0)
    sub_lanes: int = Field(default=0, ge=0)
