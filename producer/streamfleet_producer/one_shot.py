"""One-shot work as lists: texts in, vectors or labels out, however many requests that takes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar, Unpack

from streamfleet_common import codec
from streamfleet_common.chat import ChatMessage
from streamfleet_common.decisions import MAX_QUESTIONS, DecideRequest, Decision, Question
from streamfleet_common.errors import IncompleteGeneration, InvalidRequest
from streamfleet_common.one_shot import (
    MAX_ITEMS,
    Classification,
    ClassifyRequest,
    EmbedRequest,
    Pooling,
    Rank,
    RerankRequest,
    Side,
)
from streamfleet_common.schemas import End, Request
from streamfleet_producer.long_list import AROUND_BYTES, LongList, size_of
from streamfleet_producer.ticket import Options

_T = TypeVar("_T")

ANSWER_BYTES = 4 * 4096
"""What an item's answer is taken to have where nobody says: a vector of 4,096 numbers, hundreds of labels."""


class OneShot(ABC):
    """What a client does with lists. Each method gives the answers alone, in the order of what was asked.

    A list that is longer than a request may hold goes in several, 32 of them at a time; an empty one gives an
    empty answer, and nothing is submitted. What fails fails the whole list, and what is still open of it is
    cancelled. `timeout` is for all of it, in seconds; for `options` see `Options`.

    Usage, timing and the worker's memory come with `run` and a request of one's own: of
    `end = await fleet.run(EmbedRequest(texts=[...]))` they are `end.usage`, `end.timing` and `end.memory`,
    beside `end.embeddings`.

    Raises, from every method:
        ModelNotFound, Unsupported, InvalidRequest, TooLong: no worker would take it, or could do it.
        QueueFull: others fill the queue, and still do when a list that has answers has waited for them;
            try again after `retry_after` seconds.
        DeadlineExceeded: no answer before the timeout, or before the deadline and its grace.
        Cancelled, GenerationFailed, IncompleteGeneration: how it ended.
    """

    async def embed(
        self,
        texts: Sequence[str],
        *,
        model: str | None = None,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate: bool = False,
        truncate_side: Side = "right",
        timeout: float | None = None,  # noqa: ASYNC109 (as in `run`)
        **options: Unpack[Options],
    ) -> list[array[float]]:
        """The vector of each text: float32 numbers, as many as the model gives, or the first `dimensions`.

        numpy takes them as they are: `numpy.array(vectors)` has the shape (texts, dimensions). What the
        arguments do is said at the fields of `EmbedRequest`; lists, errors, full answers at `OneShot`.
        """

        def request(part: Sequence[str]) -> EmbedRequest:
            return EmbedRequest(
                texts=part,
                model=model,
                pooling=pooling,
                normalize=normalize,
                dimensions=dimensions,
                truncate=truncate,
                truncate_side=truncate_side,
            )

        asked = LongList(
            listed("texts", texts), request, size_of, items_that_fit(dimensions and 4 * dimensions)
        )
        answered = await asked.answers(self, timeout, options)
        return [one.vector for part in answered for one in _whole(part.end.embeddings, part.count)]

    async def classify(
        self,
        texts: Sequence[str],
        *,
        pairs: Sequence[str] = (),
        model: str | None = None,
        multi_label: bool | None = None,
        top_k: int | None = None,
        truncate: bool = False,
        truncate_side: Side = "right",
        timeout: float | None = None,  # noqa: ASYNC109 (as in `run`)
        **options: Unpack[Options],
    ) -> list[Classification]:
        """The labels of each text, or of each text with its pair, the likeliest first.

        What the arguments do is said at the fields of `ClassifyRequest`; lists, errors, full answers at
        `OneShot`.
        """
        firsts, seconds = listed("texts", texts), listed("pairs", pairs)
        if seconds and len(seconds) != len(firsts):
            fault = f"{len(seconds)} pairs for {len(firsts)} texts: give one each, or none"
            raise InvalidRequest(fault)

        def request(part: Sequence[int]) -> ClassifyRequest:
            return ClassifyRequest(
                texts=[firsts[place] for place in part],
                pairs=[seconds[place] for place in part] if seconds else (),
                model=model,
                multi_label=multi_label,
                top_k=top_k,
                truncate=truncate,
                truncate_side=truncate_side,
            )

        def size(place: int) -> int:
            return size_of(firsts[place]) + (size_of(seconds[place]) if seconds else 0)

        asked = LongList(range(len(firsts)), request, size, items_that_fit(None))
        answered = await asked.answers(self, timeout, options)
        return [one for part in answered for one in _whole(part.end.classifications, part.count)]

    async def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        model: str | None = None,
        top_n: int | None = None,
        raw_scores: bool = False,
        truncate: bool = False,
        truncate_side: Side = "right",
        timeout: float | None = None,  # noqa: ASYNC109 (as in `run`)
        **options: Unpack[Options],
    ) -> list[Rank]:
        """The documents in the order in which they answer the query, the best first; all or the `top_n` best.

        Each `Rank` has the `index` of its document in the list, and its `score`. What the arguments do is
        said at the fields of `RerankRequest`; lists, errors, full answers at `OneShot`.
        """

        def request(part: Sequence[str]) -> RerankRequest:
            return RerankRequest(
                query=query,
                documents=part,
                model=model,
                top_n=top_n,
                raw_scores=raw_scores,
                truncate=truncate,
                truncate_side=truncate_side,
            )

        asked = LongList(listed("documents", documents), request, size_of, shared_bytes=size_of(query))
        ranks = [
            Rank(index=part.start + rank.index, score=rank.score)
            for part in await asked.answers(self, timeout, options)
            for rank in _whole(part.end.ranking, min(part.count, top_n or part.count))
        ]
        # Each part is in order; of equals the first given comes first, since sorting keeps their order.
        ranks.sort(key=lambda rank: -rank.score)
        return ranks[:top_n]

    async def decide(
        self,
        questions: Sequence[Question],
        *,
        state: str | None = None,
        state_json: Any = None,
        messages: Sequence[ChatMessage] | None = None,
        temperatures: Mapping[int, float] | Sequence[tuple[int, float]] = (),
        model: str | None = None,
        truncate: bool = False,
        timeout: float | None = None,  # noqa: ASYNC109 (as in `run`)
        **options: Unpack[Options],
    ) -> dict[str, Decision]:
        """The answer to each question by its id, in their order, about exactly one of the three states.

        What the arguments do is said at the fields of `DecideRequest`; lists, errors, full answers at
        `OneShot`.
        """
        items = listed("questions", questions)
        ids: set[str] = set()
        for place, question in enumerate(items):
            if not isinstance(question, Question):
                raise InvalidRequest(
                    f"questions.{place}: a Question is wanted, not {type(question).__name__}"
                )
            if question.id in ids:
                raise InvalidRequest(f"questions.{place}: another question has this id already")
            ids.add(question.id)

        def request(part: Sequence[Question]) -> DecideRequest:
            return DecideRequest(
                state=state,
                state_json=state_json,
                messages=messages,
                questions=part,
                temperatures=temperatures,
                model=model,
                truncate=truncate,
            )

        def size(question: Question) -> int:
            return 50 + sum(map(size_of, (question.id, question.criteria, *question.options)))

        asked = LongList(
            items,
            request,
            size,
            MAX_QUESTIONS,
            rows=lambda question: len(question.choices),
            shared_bytes=len(codec.encode(request([]))) if items else 0,
        )
        answered = await asked.answers(self, timeout, options)
        return {one.id: one for part in answered for one in _whole(part.end.answers, part.count)}

    # --- what a client has for it

    @abstractmethod
    async def run(
        self,
        request: Request,
        *,
        timeout: float | None = None,  # noqa: ASYNC109
        **options: Unpack[Options],
    ) -> End:
        """Submit a request and wait for its answer."""

    @abstractmethod
    async def max_bytes(self, request: Request) -> int:
        """How many bytes such a request may have, encoded. Raises as a submission of it would."""


def listed(name: str, items: Iterable[_T]) -> list[_T]:
    """What a caller gives as a list, as one.

    Raises:
        InvalidRequest: it is none; a text is none, nor is a map, whose names alone would be taken.
    """
    if isinstance(items, str | bytes):
        raise InvalidRequest(f"{name}: a list is wanted, not one text")
    if isinstance(items, Mapping) or not isinstance(items, Iterable):
        raise InvalidRequest(f"{name}: a list is wanted, not {type(items).__name__}")
    return list(items)


def items_that_fit(answer_bytes: int | None) -> int:
    """How many items of a request surely have answers that fit one result; at least one."""
    each = max(1, answer_bytes or ANSWER_BYTES) + 16
    return max(1, min(MAX_ITEMS, (codec.MAX_RESULT_BYTES - AROUND_BYTES) // each))


def _whole(found: Sequence[_T], count: int) -> Sequence[_T]:
    if len(found) != count:
        raise IncompleteGeneration(f"the worker gave {len(found)} answers where {count} were asked for")
    return found
