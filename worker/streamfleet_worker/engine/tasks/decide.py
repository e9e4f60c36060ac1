"""The decide task of a classifier: each option is a pair of texts, scored by itself."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from streamfleet_common.decisions import Decision
from streamfleet_common.errors import Unsupported
from streamfleet_common.schemas import Usage
from streamfleet_worker.engine.encoder_input import EncoderInput
from streamfleet_worker.engine.encoder_runner import LOGITS
from streamfleet_worker.engine.pair_decision_preparer import PairDecisionPreparer
from streamfleet_worker.engine.tasks.encoder_job import EncoderJob

if TYPE_CHECKING:
    import torch

    from streamfleet_common.decisions import DecideRequest
    from streamfleet_common.token_layout import TokenLayout
    from streamfleet_worker.engine.encoder_model import EncoderModel
    from streamfleet_worker.engine.token_cache import TokenCache


def score_column(labels: Sequence[str]) -> int | None:
    """Which of a model's logits says how well an option answers; None if none does.

    It is the only one, as cross-encoders have it; or that of "entailment" in models of natural language
    inference. Over several candidates their softmax is the zero-shot classification of Yin, Hay and Roth,
    "Benchmarking Zero-shot Text Classification" (2019), as transformers' pipeline of that name computes it;
    by its rule the label is the first that begins with "entail", in any case.
    """
    if len(labels) == 1:
        return 0
    return next((i for i, label in enumerate(labels) if label.lower().startswith("entail")), None)


class DecideTask:
    """Decide requests to items of a classifier; safe to use from several threads.

    Args:
        encoder: what scores them.
        max_seq_len: tokens of state, question and option together.
        tokens: texts to tokens; None takes the model's tokenizer.
    """

    def __init__(self, encoder: EncoderModel, max_seq_len: int, tokens: TokenCache | None = None) -> None:
        self._name = encoder.name
        self._labels = encoder.labels
        self._column = score_column(encoder.labels)
        self._tokens = tokens
        self._preparer = PairDecisionPreparer(encoder.tokenizer, encoder.name, max_seq_len)

    @property
    def layout(self) -> TokenLayout:
        """What stands around the texts of a request."""
        return self._preparer.layout

    def prepare(self, request: DecideRequest, scope: str = "") -> EncoderJob:
        """Check a request and turn its options into items. Without questions it has none.

        Raises:
            ModelNotFound: it names another model.
            Unsupported: the model's labels do not say how well an option answers, or its tokenizer does not
                take pairs.
            TooLong: a question does not fit beside the state; see `DecisionTokens.of`.
            InvalidRequest: the state or an option has no tokens.
        """
        began = time.perf_counter()
        if request.questions and self._column is None:
            raise Unsupported(
                f"{self._name!r} tells {', '.join(self._labels[:10]) or 'no labels'}: to decide, a model has "
                'one label alone, or one that is called "entailment"',
                feature="decide",
            )
        encode_piece = None if self._tokens is None else partial(self._tokens.encode, scope=scope)
        tokens = self._preparer.prepare(request, encode_piece)
        items = tuple(EncoderInput.of(*pair).spec(LOGITS) for pair in self._preparer.pairs(tokens))
        usage = Usage(
            prompt_tokens=tokens.count,
            cut_tokens=tokens.cut_tokens,
            truncated=int(tokens.cut_tokens > 0),
        )
        make = partial(_answer, request=request, column=self._column or 0)
        return EncoderJob(items, usage, time.perf_counter() - began, make)


def _answer(results: Sequence[torch.Tensor], *, request: DecideRequest, column: int) -> Mapping[str, Any]:
    scores = iter(results)
    answers = []
    for question in request.questions:
        found = [float(next(scores)[column]) for _ in question.choices]
        answers.append(Decision.of(question, found, request.temperature(len(found))))
    return {"answers": tuple(answers)}
