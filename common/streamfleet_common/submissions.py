"""Requests on their way into the queue, and what became of them there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from streamfleet_common import codec
from streamfleet_common.errors import Undecodable
from streamfleet_common.schemas import Envelope, State


@dataclass(frozen=True, slots=True)
class Submission:
    """A request ready to be accepted: its envelope, and the bytes made of it.

    `digest` says whether two submissions of one id ask for the same thing.
    """

    envelope: Envelope
    payload: bytes
    digest: str

    @classmethod
    def of(cls, envelope: Envelope, limit: int = codec.MAX_REQUEST_BYTES) -> Submission:
        """Encode an envelope.

        Raises:
            Undecodable: the request is over `limit` bytes.
        """
        payload, digest = codec.encode_envelope(envelope)
        if len(payload) > limit:
            raise Undecodable(
                f"request of {len(payload)} bytes is over max_request_bytes ({limit}): send less",
                bytes=len(payload),
                limit=limit,
            )
        return cls(envelope, payload, digest)


@dataclass(frozen=True, slots=True)
class Submitted:
    """What became of a submission. `depth` is the queue's depth after it, `limit` set when it is full."""

    outcome: Literal["accepted", "duplicate", "conflict", "full"]
    state: State = "queued"
    depth: int = 0
    limit: int = 0
