"""Decide requests in a classifier's tokens: checked against a tokenizer and a length, without the model."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from streamfleet_common.decision_tokens import DecisionTokens
from streamfleet_common.errors import ModelNotFound, Unsupported
from streamfleet_common.token_layout import TokenLayout

if TYPE_CHECKING:
    from streamfleet_common.decision_tokens import EncodePiece
    from streamfleet_common.decisions import DecideRequest
    from streamfleet_worker.engine.pair_frame import Ids, PairFrame
    from streamfleet_worker.engine.tokenizer import Tokenizer


class PairDecisionPreparer:
    """The door for questions to a model that reads pairs of texts; safe to use from several threads.

    The first text of a pair is the state, a blank line and the question's `criteria`; the second is an
    option. Nothing is added in words; control tokens stand as the model's tokenizer has them around pairs.

    Args:
        tokenizer: the model's.
        model: its name.
        max_seq_len: tokens of state, question and option together.
    """

    def __init__(self, tokenizer: Tokenizer, model: str, max_seq_len: int) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._limit = max_seq_len
        self._frame: PairFrame | None = None
        with contextlib.suppress(Unsupported):
            self._frame = tokenizer.pair_frame()
        self.layout = TokenLayout(
            text=tokenizer.around(),
            pair=tokenizer.around(pair=True),
            state=len(self._frame.before) if self._frame else 0,
            question=len(self._frame.between) if self._frame else 0,
            option=len(self._frame.behind) if self._frame else 0,
        )
        """What stands around the texts of a request."""

    def prepare(self, request: DecideRequest, encode_piece: EncodePiece | None = None) -> DecisionTokens:
        """Check a request and turn it into tokens. Without questions nothing is looked at but the model.

        `encode_piece` turns texts into tokens; None takes the tokenizer's own.

        Raises:
            ModelNotFound: it names another model.
            TooLong: a question does not fit beside the state; see `DecisionTokens.of`.
            InvalidRequest: the state or an option has no tokens.
            Unsupported: the tokenizer does not take pairs.
        """
        if request.model is not None and request.model != self._model:
            raise ModelNotFound(
                f"this worker serves {self._model!r}, not {request.model!r}", known=[self._model]
            )
        if request.questions and self._frame is None:
            self._tokenizer.pair_frame()  # which says why not
        return DecisionTokens.of(
            request, self.layout, self._limit, encode_piece or self._tokenizer.encode_piece
        )

    def pairs(self, tokens: DecisionTokens) -> Iterator[tuple[Ids, Ids]]:
        """Ids and token types of what the model reads: a pair for each option, question by question."""
        frame = self._frame or self._tokenizer.pair_frame()
        for question in tokens.questions:
            first = tokens.state + question.criteria
            for option in question.options:
                yield frame.around(first, option)

    def count_tokens(self, request: DecideRequest) -> int:
        """Tokens that a request takes: its state once, each question, each option.

        Raises:
            TooLong, ModelNotFound, InvalidRequest, Unsupported: as `prepare` does.
        """
        return self.prepare(request).count
