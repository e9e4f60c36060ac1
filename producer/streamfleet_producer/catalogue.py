"""What the fleet serves, as its workers' cards say, and the refusals that follow from it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.errors import InvalidRequest, ModelNotFound, StreamfleetError, TooLong, Unsupported
from streamfleet_common.schemas import Card, GenerateRequest

CARD_LIFE_S = 3.0
"""How long cards are believed before they are asked for again."""
MAX_PROBLEMS = 10


class Catalogue:
    """The cards of one queue, cached. A refusal is never made from the cache alone.

    Raises:
        BrokerUnavailable: by every coroutine, when Redis cannot be reached.
    """

    def __init__(self, broker: Broker, queue: str, *, life_s: float = CARD_LIFE_S) -> None:
        self._broker = broker
        self._queue = queue
        self._life_s = life_s
        self._cards: list[Card] = []
        self._known: list[str] = []
        self._read_at = -math.inf
        self._reading: asyncio.Task[None] | None = None

    async def check(self, request: GenerateRequest) -> int:
        """Refuse a request that no worker of the queue would take. Gives the workers' `max_request_bytes`.

        A queue that has been served before is accepted without a live worker: the request waits.

        Raises:
            ModelNotFound: no such queue, or it does not serve the model; `known` lists what there is.
            Unsupported: no worker there does this kind of work.
            InvalidRequest: token ids outside the vocabulary.
            TooLong: prompt and answer do not fit. Told for token ids only; a text is counted by the worker.
        """
        now = asyncio.get_running_loop().time()
        if now - self._read_at < self._life_s and self._refusal(request) is None:
            return self._max_request_bytes()
        await self.read()
        refusal = self._refusal(request)
        if refusal is not None:
            raise refusal
        return self._max_request_bytes()

    async def read(self) -> list[Card]:
        """The cards as they are now; whoever asks while a reading is under way shares it."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(), name="catalogue")
        await asyncio.shield(self._reading)
        return self._cards

    async def settle(self) -> None:
        """Wait until nothing is being read."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def _read(self) -> None:
        try:
            self._cards = await self._broker.cards()
            self._known = [self._queue] if self._cards else await self._broker.queues()
            self._read_at = asyncio.get_running_loop().time()
        finally:
            self._reading = None

    def _max_request_bytes(self) -> int:
        return max((card.limits.max_request_bytes for card in self._cards), default=codec.MAX_REQUEST_BYTES)

    def _refusal(self, request: GenerateRequest) -> StreamfleetError | None:
        cards: Sequence[Card] = self._cards
        if not cards:
            return None if self._queue in self._known else self._no_queue()
        if request.model is not None:
            cards = [card for card in cards if card.model == request.model]
            if not cards:
                known = sorted({card.model for card in self._cards})
                return ModelNotFound(
                    f"queue {self._queue!r} does not serve model {request.model!r} but {', '.join(known)}: "
                    "leave `model` out, or submit to a queue that serves it",
                    known=known,
                )
        cards = [card for card in cards if request.kind in card.tasks]
        if not cards:
            tasks = sorted({task for card in self._cards for task in card.tasks})
            return Unsupported(
                f"queue {self._queue!r} does {', '.join(tasks)}, not {request.kind}: "
                "submit to a queue whose workers do",
                feature=request.kind,
            )
        return self._bad_ids(request, cards) or self._too_long(request, cards)

    def _no_queue(self) -> ModelNotFound:
        there = (
            f"there are: {', '.join(self._known)}. Check the name"
            if self._known
            else "no worker has ever announced itself here. Check the URL"
        )
        return ModelNotFound(
            f"no queue {self._queue!r}; {there}, or start a worker for it: "
            f"`streamfleet worker --queue {self._queue}`",
            known=self._known,
        )

    def _bad_ids(self, request: GenerateRequest, cards: Sequence[Card]) -> InvalidRequest | None:
        # A refusal has to hold for every worker, so the most generous one counts; 0 means it knows no tokens.
        sizes = [card.limits.vocab_size for card in cards]
        limit = max(sizes) if min(sizes) else 0
        fields = {
            "prompt_token_ids": request.prompt_token_ids or (),
            "stop_token_ids": request.stop_token_ids,
        }
        if not limit or all(max(ids, default=0) < limit for ids in fields.values()):
            return None
        problems = [
            f"{name}.{place}: token id {token} is outside the vocabulary of {limit}"
            for name, ids in fields.items()
            for place, token in enumerate(ids)
            if token >= limit
        ]
        shown = problems[:MAX_PROBLEMS]
        if len(problems) > MAX_PROBLEMS:
            shown.append(f"and {len(problems) - MAX_PROBLEMS} more")
        return InvalidRequest(
            f"{'; '.join(shown)}: encode the text with the tokenizer of {cards[0].model!r}",
            problems=shown,
            limit=limit,
        )

    def _too_long(self, request: GenerateRequest, cards: Sequence[Card]) -> TooLong | None:
        if request.prompt_token_ids is None:
            return None
        tokens = len(request.prompt_token_ids)
        limit = max(card.limits.max_seq_len for card in cards)
        if tokens + request.max_tokens <= limit:
            return None
        return TooLong(prompt_tokens=tokens, max_tokens=request.max_tokens, limit=limit)
