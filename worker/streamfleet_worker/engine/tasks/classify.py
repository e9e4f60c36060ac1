"""Classify: texts, or pairs of texts, to labels with probabilities."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from streamfleet_common.errors import Unsupported
from streamfleet_common.one_shot import Classification, Label
from streamfleet_worker.engine.encoder_runner import LOGITS
from streamfleet_worker.engine.tasks.encoder_job import EncoderJob, check_answer_size

if TYPE_CHECKING:
    import torch

    from streamfleet_common.one_shot import ClassifyRequest
    from streamfleet_worker.engine.encoder_input import EncoderInput, InputBuilder
    from streamfleet_worker.engine.encoder_model import EncoderModel


class ClassifyTask:
    """The door for texts that are to be given labels.

    Args:
        encoder: what reads them.
        inputs: makes its rows.
    """

    def __init__(self, encoder: EncoderModel, inputs: InputBuilder) -> None:
        self._encoder = encoder
        self._inputs = inputs
        self._label_bytes = sorted((32 + len(name.encode()) for name in encoder.labels), reverse=True)

    def prepare(self, request: ClassifyRequest, scope: str = "") -> EncoderJob:
        """Check a request and turn its texts into tokens.

        Raises:
            TooLong: a text or a pair is, and may not be cut.
            Unsupported: the model has no labels, or but one; or it is given pairs and does not take any.
            InvalidRequest: a text has no tokens; more to tell than a result holds.
        """
        began = time.perf_counter()
        encoder = self._encoder
        if encoder.head != "classify":
            raise Unsupported(
                f"{encoder.name!r} gives vectors and has no labels: send texts to be classified to a queue "
                "whose workers serve a classifier",
                feature="classify",
            )
        if len(encoder.labels) == 1:
            raise Unsupported(
                f"{encoder.name!r} has one label only, whose score puts documents in order: send it a rerank "
                "request, or texts to be classified to another queue",
                feature="classify",
            )
        told = self._label_bytes[: request.top_k]
        check_answer_size(request.n * (16 + sum(told)), "send fewer texts, or ask for less of top_k")
        rows = [self._row(request, place, scope) for place in range(request.n)]
        multi_label = encoder.multi_label if request.multi_label is None else request.multi_label
        make = partial(_answer, names=encoder.labels, multi_label=multi_label, top_k=request.top_k)
        return EncoderJob.of(rows, LOGITS, make, began)

    def _row(self, request: ClassifyRequest, place: int, scope: str) -> EncoderInput:
        side = request.truncate_side if request.truncate else None
        if not request.pairs:
            return self._inputs.text(place, f"texts.{place}", request.texts[place], side, scope)
        first = self._inputs.tokens(f"texts.{place}", request.texts[place], scope)
        second = self._inputs.tokens(f"pairs.{place}", request.pairs[place], scope)
        name = f"the pair of texts.{place} and pairs.{place}"
        return self._inputs.pair(place, name, first, second, side=side, whose="longer")


def _answer(
    results: Sequence[torch.Tensor], *, names: Sequence[str], multi_label: bool, top_k: int | None
) -> Mapping[str, Any]:
    return {
        "classifications": tuple(
            _classification(logits, names, multi_label=multi_label, top_k=top_k) for logits in results
        )
    }


def _classification(
    logits: torch.Tensor, names: Sequence[str], *, multi_label: bool, top_k: int | None
) -> Classification:
    exact = logits.double()
    probabilities = exact.sigmoid() if multi_label else exact.softmax(0)
    scores = probabilities.float().tolist()
    # By the logits, which tell apart what rounds to one probability.
    order = exact.argsort(descending=True, stable=True)[:top_k].tolist()
    return Classification(labels=tuple(Label(label=names[i], score=scores[i]) for i in order))
