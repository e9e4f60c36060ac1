"""What the fleet serves, as its workers' cards say, and the refusals that follow from it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.cards import Card
from streamfleet_common.errors import (
    BrokerUnavailable,
    InvalidRequest,
    ModelNotFound,
    StreamfleetError,
    TooLong,
    Unsupported,
)
from streamfleet_common.one_shot import CallRequest
from streamfleet_common.schemas import GenerateRequest, Request
from streamfleet_producer.input_schemas import InputSchemas
from streamfleet_producer.names import listed

CARD_LIFE_S = 3.0
"""How long cards are believed before they are asked for again."""
MAX_PROBLEMS = 10


@dataclass(frozen=True, slots=True)
class _Offer:
    """What the most generous of the workers takes that serve a wish; a refusal has to hold for every one."""

    model: str = ""
    max_request_bytes: int = codec.MAX_REQUEST_BYTES
    max_seq_len: int = 0
    """0 while no worker lives who could tell."""
    vocab_size: int = 0
    """0 if any of them knows no tokens."""
    cards: tuple[Card, ...] = ()
    """The workers' own."""
    input_schemas: tuple[str, ...] = ()
    """Those of a handler, several while it is replaced by another; none if any worker tells none."""

    @classmethod
    def of(cls, cards: Sequence[Card]) -> _Offer:
        limits = [card.limits for card in cards]
        sizes = [limit.vocab_size for limit in limits]
        schemas = dict.fromkeys("" if card.handler is None else card.handler.input_schema for card in cards)
        return cls(
            cards[0].model,
            max(limit.max_request_bytes for limit in limits),
            max(limit.max_seq_len for limit in limits),
            max(sizes) if min(sizes) else 0,
            tuple(cards),
            () if "" in schemas else tuple(schemas),
        )

    def refusal(self, request: Request, schemas: InputSchemas) -> InvalidRequest | None:
        if isinstance(request, CallRequest):
            return self._bad_input(request, schemas)
        if not isinstance(request, GenerateRequest):
            return None  # it has no token ids, and its texts are counted by the worker
        ids = request.prompt_token_ids or ()
        named: dict[str, Sequence[int]] = {
            "prompt_token_ids": ids,
            "stop_token_ids": request.stop_token_ids,
            "sampling.logit_bias": list(dict(request.sampling.logit_bias)),
        }
        if self.vocab_size and max(max(some, default=0) for some in named.values()) >= self.vocab_size:
            return self._bad_ids(named)
        kept = min(len(ids), request.truncate or len(ids))
        answer = max(1, request.min_tokens) if request.max_tokens == "fit" else request.max_tokens
        if ids and self.max_seq_len and kept + answer > self.max_seq_len:
            return TooLong(prompt_tokens=kept, max_tokens=answer, limit=self.max_seq_len)
        return None

    def _bad_input(self, request: CallRequest, schemas: InputSchemas) -> InvalidRequest | None:
        problems: list[str] = []
        for schema in self.input_schemas:
            faults = schemas.faults(schema, request.input)
            if not faults:
                return None
            problems = problems or faults
        if not problems:
            return None
        return InvalidRequest(
            f"handler {request.handler!r} takes no such input: {'; '.join(problems)}", problems=problems
        )

    def _bad_ids(self, fields: Mapping[str, Sequence[int]]) -> InvalidRequest:
        problems = [
            f"{name}.{place}: token id {token} is outside the vocabulary of {self.vocab_size}"
            for name, ids in fields.items()
            for place, token in enumerate(ids)
            if token >= self.vocab_size
        ]
        shown = problems[:MAX_PROBLEMS]
        if len(problems) > MAX_PROBLEMS:
            shown.append(f"and {len(problems) - MAX_PROBLEMS} more")
        return InvalidRequest(
            f"{'; '.join(shown)}: encode the text with the tokenizer of {self.model!r}",
            problems=shown,
            limit=self.vocab_size,
        )


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
        self._offers: dict[tuple[str | None, str], _Offer] = {}
        self._schemas = InputSchemas()
        self._read_at = -math.inf
        self._reading: asyncio.Task[None] | None = None
        self._now = asyncio.get_running_loop().time

    async def check(self, request: Request) -> int:
        """Refuse a request that no worker of the queue would take. Gives the workers' `max_request_bytes`.

        A queue that has been served before is accepted without a live worker: the request waits.

        Raises:
            ModelNotFound: no such queue, model or handler; `known` lists what there is.
            Unsupported: no worker there does this kind of work.
            InvalidRequest: token ids outside the vocabulary, or an input that no worker's schema allows.
            TooLong: prompt and answer do not fit. Told for token ids only; a text is counted by the worker.
        """
        age_s = self._now() - self._read_at
        if age_s < self._life_s:
            if age_s > self._life_s / 2 and self._reading is None:
                # Ahead of need, so that hardly anybody has to wait for it.
                self._read_on()
            refusal, max_request_bytes = self._judge(request)
            if refusal is None:
                return max_request_bytes
        await self.read()
        refusal, max_request_bytes = self._judge(request)
        if refusal is not None:
            raise refusal
        return max_request_bytes

    async def serving(self, request: Request) -> Sequence[Card]:
        """The cards of the workers that would take a request, none while no worker lives.

        Raises as `check` does.
        """
        await self.check(request)
        offer = self._offers.get((request.model, request.kind))
        return () if offer is None else offer.cards

    async def read(self) -> list[Card]:
        """The cards as they are now; whoever asks while a reading is under way shares it."""
        reading = self._read_on()
        try:
            await asyncio.shield(reading)
        except asyncio.CancelledError:
            if reading.cancelled():  # and not whoever waits for it
                raise BrokerUnavailable("the client was closed", reason="closed") from None
            raise
        return self._cards

    async def settle(self) -> None:
        """Wait until nothing is being read."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def close(self) -> None:
        """Give up a reading that is under way."""
        reading = self._reading
        if reading is not None:
            reading.cancel()
            await asyncio.wait([reading])

    def _read_on(self) -> asyncio.Task[None]:
        if self._reading is None:
            self._reading = asyncio.create_task(self._read(), name="catalogue")
            self._reading.add_done_callback(_forget)
        return self._reading

    async def _read(self) -> None:
        try:
            self._cards = await self._broker.cards()
            self._known = [self._queue] if self._cards else await self._broker.queues()
            self._offers.clear()
            self._read_at = self._now()
        finally:
            self._reading = None

    def _judge(self, request: Request) -> tuple[StreamfleetError | None, int]:
        # Most requests have the same wish, so what it meets is worked out once for each reading of the cards.
        wish = (request.model, request.kind)
        offer = self._offers.get(wish)
        if offer is None:
            found = self._find(*wish)
            if not isinstance(found, _Offer):
                return found, 0
            offer = self._offers[wish] = found
        return offer.refusal(request, self._schemas), offer.max_request_bytes

    def _find(self, model: str | None, kind: str) -> _Offer | StreamfleetError:
        cards: Sequence[Card] = self._cards
        if not cards:
            return _Offer() if self._queue in self._known else self._no_queue()
        if kind == "call":
            # What else the queue's workers serve is no handler.
            cards = [card for card in cards if kind in card.tasks]
            if not cards:
                return self._not_done(kind)
        if model is not None:
            known = sorted({card.model for card in cards})
            cards = [card for card in cards if card.model == model]
            if not cards:
                what = f"handler {model!r}" if kind == "call" else f"model {model!r}"
                way_out = "check the name" if kind == "call" else "leave `model` out"
                return ModelNotFound(
                    f"queue {self._queue!r} does not serve {what} but {', '.join(known)}: "
                    f"{way_out}, or submit to a queue that serves it",
                    known=known,
                )
        cards = [card for card in cards if kind in card.tasks]
        return _Offer.of(cards) if cards else self._not_done(kind)

    def _not_done(self, kind: str) -> Unsupported:
        tasks = sorted({task for card in self._cards for task in card.tasks})
        return Unsupported(
            f"queue {self._queue!r} does {', '.join(tasks)}, not {kind}: submit to a queue whose workers do",
            feature=kind,
        )

    def _no_queue(self) -> ModelNotFound:
        there = (
            f"there are: {listed(self._known)}. Check the name"
            if self._known
            else "no worker has ever announced itself here. Check the URL"
        )
        return ModelNotFound(
            f"no queue {self._queue!r}; {there}, or start a worker for it: "
            f"`streamfleet worker --queue {self._queue}`",
            known=self._known,
        )


def _forget(reading: asyncio.Task[None]) -> None:
    if not reading.cancelled():
        reading.exception()  # whoever needs the cards reads them himself, and is told what is wrong
