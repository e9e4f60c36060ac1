"""Rerank: documents in the order in which they answer a query."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from streamfleet_common.errors import Unsupported
from streamfleet_common.one_shot import Rank
from streamfleet_worker.engine.encoder_runner import LOGITS
from streamfleet_worker.engine.tasks.encoder_job import EncoderJob, check_answer_size

if TYPE_CHECKING:
    from streamfleet_common.one_shot import RerankRequest
    from streamfleet_worker.engine.encoder_input import EncoderInput, InputBuilder
    from streamfleet_worker.engine.encoder_model import EncoderModel

RANK_BYTES = 32


class RerankTask:
    """The door for documents that are to be put in order.

    Args:
        encoder: what reads the query with each of them.
        inputs: makes its rows.
    """

    def __init__(self, encoder: EncoderModel, inputs: InputBuilder) -> None:
        self._encoder = encoder
        self._inputs = inputs

    def prepare(self, request: RerankRequest, scope: str = "") -> EncoderJob:
        """Check a request and turn its texts into tokens.

        Raises:
            TooLong: the query leaves no room for a document; or a document is too long beside it, and may
                not be cut.
            Unsupported: the model is no reranker, or does not take pairs.
            InvalidRequest: a text has no tokens.
        """
        began = time.perf_counter()
        encoder = self._encoder
        if encoder.head != "classify" or len(encoder.labels) != 1:
            gives = f"{len(encoder.labels)} labels" if encoder.labels else "vectors"
            raise Unsupported(
                f"{encoder.name!r} gives {gives}, and not the one score by which documents are put in order: "
                "send a rerank request to a queue whose workers serve a reranker",
                feature="rerank",
            )
        check_answer_size(RANK_BYTES * min(request.n, request.top_n or request.n), "ask for less of top_n")
        query = self._inputs.tokens("query", request.query, scope)
        self._inputs.check_query(query)
        rows = [self._row(request, query, place, scope) for place in range(request.n)]
        make = partial(_answer, top_n=request.top_n, raw_scores=request.raw_scores)
        return EncoderJob.of(rows, LOGITS, make, began)

    def _row(self, request: RerankRequest, query: tuple[int, ...], place: int, scope: str) -> EncoderInput:
        side = request.truncate_side if request.truncate else None
        document = self._inputs.tokens(f"documents.{place}", request.documents[place], scope)
        name = f"documents.{place}, with the query,"
        return self._inputs.pair(place, name, query, document, side=side, whose="second")


def _answer(results: Sequence[torch.Tensor], *, top_n: int | None, raw_scores: bool) -> Mapping[str, Any]:
    logits = torch.stack([result[0] for result in results])
    # One by one: a vector's last numbers may be rounded otherwise than its first.
    scores = logits.tolist() if raw_scores else [one.double().sigmoid().float().item() for one in logits]
    # By the logits, which tell apart what rounds to one probability.
    order = logits.argsort(descending=True, stable=True)[:top_n].tolist()
    return {"ranking": tuple(Rank(index=place, score=scores[place]) for place in order)}
