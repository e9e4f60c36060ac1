"""Requests on their way into the queue, and what became of them there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from streamfleet_common import codec
from streamfleet_common.decisions import DecideRequest
from streamfleet_common.errors import Undecodable
from streamfleet_common.one_shot import CallRequest, ClassifyRequest, EmbedRequest, RerankRequest
from streamfleet_common.schemas import Envelope, Request, State

CHARACTERS_PER_TOKEN = 4
"""In English prose, for tokenizers of today: what admission by tokens goes by where only text is known."""


Refused = Literal[
    "", "requests", "tokens", "paused", "memory", "tenant_requests", "tenant_tokens", "tenant_budget"
]
"""Why a queue takes no more: too many requests or tokens, somebody paused it, or Redis is nearly full; or its
tenant has its share of open requests, of open tokens, or of a day's tokens."""


class Watching(Protocol):
    """Somebody who wants to know what becomes of a submission."""

    def submitted(self, outcome: Submitted | BaseException) -> None:
        """It is decided. Must not raise."""


@dataclass(slots=True)
class Submission:
    """A request ready to be accepted: its envelope, and the bytes made of it.

    `digest` says whether two submissions of one id ask for the same thing. `tokens` is what the request may
    take at most: its answer, and its prompt as far as it can be told without a tokenizer.
    """

    envelope: Envelope
    payload: bytes
    digest: str
    tokens: int
    watching: Watching | None = field(default=None, compare=False)

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
        return cls(envelope, payload, digest, _tokens(envelope.request, len(payload)))


@dataclass(slots=True)
class Submitted:
    """What became of a submission. `depth` is the queue's depth after it.

    The rest is set when the queue is "full": its limit, or that of the tenant's share if this is why; why it
    takes no more, and when to try again; and how many tokens the request itself may take.
    """

    outcome: Literal["accepted", "duplicate", "conflict", "full"]
    state: State = "queued"
    depth: int = 0
    limit: int = 0
    reason: Refused = ""
    retry_after_s: float = 0.0
    tokens: int = field(default=0, compare=False)


def _tokens(request: Request, payload_bytes: int) -> int:
    match request:
        case DecideRequest():
            texts = (text for asked in request.questions for text in (asked.criteria, *asked.choices))
            return _estimated(request.text, *texts)
        case EmbedRequest():
            return _estimated(*request.texts)
        case ClassifyRequest():
            return _estimated(*request.texts, *request.pairs)
        case RerankRequest():
            # The query is read again beside each document.
            return _estimated(*request.documents, *[request.query] * request.n)
        case CallRequest():
            return -(-payload_bytes // CHARACTERS_PER_TOKEN)  # nobody here knows what of it is text
    if request.prompt_token_ids is not None:
        prompt = len(request.prompt_token_ids)
    else:
        turns = (turn.text for turn in request.messages or ())
        prompt = _estimated(request.prompt or "", *turns, *(tool.text for tool in request.tools))
    if request.truncate is not None:
        prompt = min(prompt, request.truncate)
    # "fit" takes what is left, and nobody here knows how much that is.
    answer = 0 if request.max_tokens == "fit" else request.max_tokens
    return prompt + request.n * answer


def _estimated(*texts: str) -> int:
    return -(-sum(map(len, texts)) // CHARACTERS_PER_TOKEN)
