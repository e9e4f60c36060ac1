"""The demo without a terminal: plain lines, for pipes, logs and small windows."""

from __future__ import annotations

import textwrap
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from streamfleet_producer.cli.exchange import Exchange

WIDTH = 88


class Lines:
    """Says each thing once, whole, with a label; no control codes. Texts are wrapped at `width`."""

    def __init__(self, width: int = WIDTH) -> None:
        self._width = width
        self._started: set[int] = set()

    @contextmanager
    def waiting(self, label: str, text: str) -> Iterator[None]:
        """Something takes a while."""
        _say(f"{label.lower()}: {text}")
        yield

    def done(self, label: str, text: str) -> None:
        """Something is there now."""
        _say(f"{label.lower()}: {text}")

    @asynccontextmanager
    async def board(self, exchanges: Sequence[Exchange], max_tokens: int) -> AsyncIterator[None]:
        """Introduce the questions; what becomes of them is said by `changed`."""
        del max_tokens
        _say("")
        for exchange in exchanges:
            _say(f"[{exchange.number}] {exchange.question.text}")
        _say("")
        yield

    def changed(self, exchange: Exchange) -> None:
        """Say that an answer begins, and later the whole of it."""
        if exchange.state == "running" and exchange.number not in self._started:
            self._started.add(exchange.number)
            _say(f"[{exchange.number}] first token after {exchange.first_s:.2f} s")
        elif exchange.state == "done":
            size = f"{exchange.amount} in {exchange.total_s:.2f} s"
            _say(f"[{exchange.number}] {exchange.question.text} ({size})")
            _say(textwrap.fill(exchange.answer, self._width, initial_indent="    ", subsequent_indent="    "))
        elif exchange.state == "failed":
            _say(f"[{exchange.number}] failed: {exchange.error}")

    def story(self, paragraph: str, next_steps: Sequence[str]) -> None:
        """What happened, in words, and what to try."""
        _say("")
        _say(textwrap.fill(paragraph, self._width))
        _say("")
        _say("Next, in two terminals:")
        for step in next_steps:
            _say(f"  $ {step}")


def _say(line: str) -> None:
    print(line, flush=True)
