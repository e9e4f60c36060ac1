"""The check of a request's length against the workers that live, before it is queued."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from streamfleet_common.errors import TooLong, Unsupported
from streamfleet_producer.token_counter import TokenCounter

if TYPE_CHECKING:
    from pathlib import Path

    from streamfleet_common.cards import Card
    from streamfleet_common.schemas import Request
    from streamfleet_producer.catalogue import Catalogue


class LengthCheck:
    """Counts the requests of one client, if it has got a tokenizer.

    Args:
        tokenizer: a counter, or where `TokenCounter.from_file` finds one; None counts nothing.

    Raises:
        Unsupported: the extra `tokenizers` is not installed.
        TokenizerFailed: it cannot be read.
    """

    def __init__(self, tokenizer: TokenCounter | str | Path | None = None) -> None:
        if tokenizer is None or isinstance(tokenizer, TokenCounter):
            self._counter = tokenizer
        else:
            self._counter = TokenCounter.from_file(tokenizer)

    async def refuse(self, catalogue: Catalogue, request: Request) -> None:
        """Refuse a request that is too long for every worker. What cannot be counted is left to them.

        Raises:
            TooLong: it is.
            InvalidRequest: a text has no tokens.
        """
        if self._counter is None:
            return
        try:
            try:
                await self.count(catalogue, request)
            except TooLong:
                await catalogue.read()  # a refusal is never made from old cards
                await self.count(catalogue, request)
        except Unsupported:
            pass

    async def count(self, catalogue: Catalogue, request: Request) -> int:
        """Tokens of a request, as the workers of the queue count them.

        Raises:
            ModelNotFound, InvalidRequest: no worker would take it.
            TooLong: it is, for every worker.
            Unsupported: it cannot be counted here, or no worker lives who says how.
        """
        if self._counter is None:
            raise Unsupported(
                "counting tokens takes the model's tokenizer: give the client its tokenizer.json, "
                'Client(…, tokenizer="path/to/tokenizer.json")',
                feature="count_tokens",
            )
        cards = await catalogue.serving(request)
        if not cards:
            raise Unsupported(
                "no worker of this queue lives, and without one nobody knows what it puts around a text: "
                "start one, or submit without counting",
                feature="count_tokens",
            )
        # On a thread: a long text takes a tenth of a second.
        return await asyncio.to_thread(_count, self._counter, request, cards)


def _count(counter: TokenCounter, request: Request, cards: Sequence[Card]) -> int:
    """By the most generous of the workers; a refusal has to hold for every one."""
    # Those of one model and size count alike.
    doors = {(card.limits.max_seq_len, card.layout): card for card in cards}
    most, *others = sorted(doors.values(), key=lambda card: -card.limits.max_seq_len)
    try:
        return counter.count(request, most)
    except TooLong:
        for card in others:
            with contextlib.suppress(TooLong):
                return counter.count(request, card)
        raise
