"""One question of the demo and its answer, as it grows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from streamfleet_common.errors import StreamfleetError
from streamfleet_common.schemas import ChatMessage, GenerateRequest
from streamfleet_producer.cli.terminal import printable
from streamfleet_producer.client import Client


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, as a chat message."""

    text: str
    stop: str | None = None
    """Text that ends the answer, kept in it: a full stop ends it after its first sentence."""

    def request(self, max_tokens: int) -> GenerateRequest:
        return GenerateRequest(
            messages=(ChatMessage(role="user", content=self.text),),
            max_tokens=max_tokens,
            stop=() if self.stop is None else (self.stop,),
            include_stop=True,
        )


@dataclass(slots=True)
class Exchange:
    """A question asked and what has come back. Times are seconds after it was asked."""

    number: int
    question: Question
    text: str = ""
    tokens: int = 0
    state: Literal["waiting", "running", "done", "failed"] = "waiting"
    first_s: float = 0.0
    total_s: float = 0.0
    error: str = ""
    _asked_at: float = field(default=0.0, repr=False)

    async def run(self, fleet: Client, changed: Callable[[Exchange], None], max_tokens: int) -> None:
        """Ask, and take the answer in; `changed` is called at each change. An error is kept, not raised."""
        self._asked_at = time.monotonic()
        try:
            async with fleet.stream(self.question.request(max_tokens)) as tokens:
                async for delta in tokens:
                    if self.state == "waiting":
                        self.state, self.first_s = "running", self._elapsed()
                    self.text += delta.text
                    self.tokens += len(delta.token_ids)
                    changed(self)
            self.text = tokens.result.text
            self.tokens = tokens.result.usage.completion_tokens
            self.state = "done"
        except StreamfleetError as error:
            self.state, self.error = "failed", error.message
        self.total_s = self._elapsed()
        changed(self)

    @property
    def ended(self) -> bool:
        return self.state == "done" or self.state == "failed"

    @property
    def amount(self) -> str:
        """How long the answer is, in words."""
        return f"{self.tokens} token{'' if self.tokens == 1 else 's'}"

    @property
    def answer(self) -> str:
        """The text as one paragraph, fit to be wrapped."""
        return printable(" ".join(self.text.split()))

    def _elapsed(self) -> float:
        return time.monotonic() - self._asked_at
