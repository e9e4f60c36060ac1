"""Decide requests to prepared decisions of a causal model: checked against a tokenizer and a length alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamfleet_common.decision_tokens import DecisionTokens
from streamfleet_common.errors import InvalidRequest, ModelNotFound
from streamfleet_common.token_layout import TokenLayout
from streamfleet_worker.engine.decision import Asked, Ids, PreparedDecision

if TYPE_CHECKING:
    from streamfleet_common.decisions import DecideRequest
    from streamfleet_worker.engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class _Frame:
    before: Ids
    """What stands before the state."""
    between: Ids
    """And between question and option."""
    layout: TokenLayout


class DecisionPreparer:
    """The door for questions; safe to use from several threads.

    A prompt is the state, a blank line, the question's `criteria` and an option, and nothing else in words.
    With a chat template, state and question are a user's turn and the option opens the assistant's; without
    one, "Answer:" stands between question and option. So the prompts of a request share their tokens up to
    the option. The template is rendered once: one that tells the day would give an answer of its own each
    day.

    Args:
        tokenizer: the model's.
        model: its name.
        max_seq_len: tokens of state, question and option together.
    """

    def __init__(self, tokenizer: Tokenizer, model: str, max_seq_len: int) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._limit = max_seq_len
        try:
            self._known: _Frame | None = self._frame()
        except InvalidRequest:
            self._known = None

    @property
    def layout(self) -> TokenLayout | None:
        """What stands around the parts of a request; None if the model's template cannot be followed."""
        return None if self._known is None else self._known.layout

    def prepare(self, request: DecideRequest) -> PreparedDecision:
        """Check a request and turn it into tokens. Without questions nothing is looked at but the model.

        Raises:
            ModelNotFound: it names another model.
            TooLong: a question does not fit beside the state; see `DecisionTokens.of`.
            InvalidRequest: the state or an option has no tokens, or the model's template does not show a
                message once and whole.
        """
        if request.model is not None and request.model != self._model:
            raise ModelNotFound(
                f"this worker serves {self._model!r}, not {request.model!r}", known=[self._model]
            )
        if not request.questions:
            return PreparedDecision.of((), ())
        frame = self._known or self._frame()
        tokens = DecisionTokens.of(request, frame.layout, self._limit, self._tokenizer.encode_piece)
        asked = tuple(
            Asked(question, one.criteria + frame.between, one.options, request.temperature(len(one.options)))
            for question, one in zip(request.questions, tokens.questions, strict=True)
        )
        return PreparedDecision.of(frame.before + tokens.state, asked, tokens.cut_tokens)

    def count_tokens(self, request: DecideRequest) -> int:
        """Tokens that a request takes: its state once, each question, each option.

        Raises:
            TooLong, ModelNotFound, InvalidRequest: as `prepare` does.
        """
        return self.prepare(request).prompt_tokens

    def _frame(self) -> _Frame:
        tokenizer = self._tokenizer
        if tokenizer.has_chat_template:
            before, between = tokenizer.user_turn()
        else:
            ids = tokenizer.encode("a")
            before, between = ids[: tokenizer.opening(ids)], tokenizer.encode_piece("\nAnswer:")
        layout = TokenLayout(
            text=tokenizer.around(),
            pair=tokenizer.around(pair=True),
            state=len(before),
            question=len(between),
            option_prefix="" if tokenizer.has_chat_template else " ",
        )
        return _Frame(tuple(before), tuple(between), layout)
