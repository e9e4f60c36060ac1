"""What a scripted fleet answers: rules, and the steps that an answer is made of."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamfleet_common.decisions import DecideRequest
from streamfleet_common.one_shot import CallRequest, ClassifyRequest, EmbedRequest, RerankRequest
from streamfleet_common.schemas import GenerateRequest, Request


@dataclass(frozen=True, slots=True)
class Wait:
    """Let so many seconds of the fleet's time pass before the next step."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Lost:
    """The worker is lost. The steps that follow are the next attempt's, from its first token on."""


NEVER: Final = Wait(math.inf)
"""The step after which nothing comes: the request ends by its deadline, or when it is cancelled."""


class Anything:
    """Matches every request."""

    def __repr__(self) -> str:
        return "ANYTHING"


ANYTHING: Final = Anything()

Match = str | re.Pattern[str] | Callable[[Any], bool] | Anything
"""One of a request's texts as it is, a pattern found in one of them, what a function says of it, or any.

The texts of a generate request are its prompt, or the last message's; of a decide request its state; of a
rerank request its query; of embed and classify their texts.
"""


@dataclass(slots=True)
class Rule:
    """How requests of one kind are answered that match. `left`: how many more of them."""

    kind: str
    match: Match
    steps: Sequence[Any]
    left: float
    queued_s: float
    finish_reason: str = "eos"
    handler: str = ""
    """Of a call."""
    streams: bool = False
    """Its handler gives its output in parts."""

    def suits(self, request: Request) -> bool:
        if self.left <= 0 or request.kind != self.kind:
            return False
        if isinstance(request, CallRequest) and request.handler != self.handler:
            return False
        if isinstance(self.match, Anything):
            return True
        if isinstance(self.match, str):
            return self.match in texts_of(request)
        if isinstance(self.match, re.Pattern):
            return any(map(self.match.search, texts_of(request)))
        return bool(self.match(request))


def texts_of(request: Request) -> Sequence[str]:
    """What a request says, as far as rules look at it; of a call nothing."""
    match request:
        case GenerateRequest():
            return [_prompt_of(request)]
        case DecideRequest():
            return [request.text]
        case RerankRequest():
            return [request.query]
        case EmbedRequest() | ClassifyRequest():
            return request.texts
        case _:
            return []


def _prompt_of(request: GenerateRequest) -> str:
    if request.messages is not None:
        return request.messages[-1].content
    if request.prompt_token_ids is not None:
        return " ".join(map(str, request.prompt_token_ids))
    return request.prompt or ""
