"""Decide requests to prepared decisions: checked against a tokenizer and a length, without the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamfleet_common.errors import InvalidRequest, ModelNotFound, TooLong
from streamfleet_worker.engine.decision import Asked, PreparedDecision

if TYPE_CHECKING:
    from streamfleet_common.decisions import DecideRequest
    from streamfleet_worker.engine.tokenizer import Tokenizer


class DecisionPreparer:
    """The door for questions; safe to use from several threads.

    A prompt is the state, a blank line, the question's `criteria` and an option, and nothing else in words.
    With a chat template, state and question are a user's turn and the option opens the assistant's; without
    one, "Answer:" stands between question and option. State, question and option are turned into tokens
    apart. So the prompts of a request share their tokens up to the option, and a state's tokens are the same
    whatever is asked about it.

    Args:
        tokenizer: the model's.
        model: its name.
        max_seq_len: tokens of state, question and option together.
    """

    def __init__(self, tokenizer: Tokenizer, model: str, max_seq_len: int) -> None:
        self._tokenizer = tokenizer
        self._model = model
        self._limit = max_seq_len

    def prepare(self, request: DecideRequest) -> PreparedDecision:
        """Check a request and turn it into tokens. Without questions nothing is looked at but the model.

        Raises:
            ModelNotFound: it names another model.
            TooLong: a question does not fit beside the state, or not even beside one token of it if it may
                be cut; see `count_tokens`.
            InvalidRequest: the state or an option has no tokens.
        """
        if request.model is not None and request.model != self._model:
            raise ModelNotFound(
                f"this worker serves {self._model!r}, not {request.model!r}", known=[self._model]
            )
        if not request.questions:
            return PreparedDecision.of((), ())
        before, behind = self._frame()
        asked = [self._ask(place, request, behind) for place in range(len(request.questions))]
        state = self._tokenizer.encode_piece(request.text)
        if not state:
            raise InvalidRequest("the state has no tokens: there is nothing to decide about")
        needed = len(before) + (1 if request.truncate else len(state))
        for place, one in enumerate(asked):
            if needed + one.longest > self._limit:
                raise self._too_long(place, one, needed)
        # The same for all questions, so that its keys and values serve them all.
        room = self._limit - len(before) - max(one.longest for one in asked)
        cut = max(0, len(state) - room)
        kept = state[cut:] if request.messages is not None else state[: len(state) - cut]
        return PreparedDecision.of((*before, *kept), tuple(asked), cut)

    def count_tokens(self, request: DecideRequest) -> int:
        """Tokens that a request takes: its state once, each question, each option.

        Raises:
            TooLong: the first `question` (its id) that does not fit; so many `options` it has, of which so
                many `fit`.
            ModelNotFound, InvalidRequest: as `prepare` does.
        """
        return self.prepare(request).prompt_tokens

    def _frame(self) -> tuple[list[int], list[int]]:
        """What stands before the state, and between question and option."""
        if self._tokenizer.has_chat_template:
            return self._tokenizer.user_turn()
        ids = self._tokenizer.encode("a")
        return ids[: self._tokenizer.opening(ids)], self._tokenizer.encode_piece("\nAnswer:")

    def _ask(self, place: int, request: DecideRequest, behind: list[int]) -> Asked:
        question = request.questions[place]
        options = [tuple(self._answer(option)) for option in question.choices]
        for number, option in enumerate(options):
            if not option:
                raise InvalidRequest(f"questions.{place}.options.{number}: this model has no tokens for it")
        head = self._tokenizer.encode_piece(f"\n\n{question.criteria}") + behind
        return Asked(question, tuple(head), tuple(options), request.temperature(len(options)))

    def _answer(self, option: str) -> list[int]:
        if self._tokenizer.has_chat_template:
            return self._tokenizer.encode_piece(option)
        # The first space of a text is special to many tokenizers, so the option may not come first.
        line, ids = self._tokenizer.encode_piece("\n"), self._tokenizer.encode_piece(f"\n {option}")
        is_apart = ids[: len(line)] == line
        return ids[len(line) :] if is_apart else self._tokenizer.encode_piece(f" {option}")

    def _too_long(self, place: int, asked: Asked, needed: int) -> TooLong:
        return TooLong(
            f"questions.{place} and its longest option have {asked.longest} tokens, the state {needed}: over "
            f"the limit of {self._limit}. Shorten either, or have the state cut (truncate)",
            prompt_tokens=needed + asked.longest,
            max_tokens=0,
            limit=self._limit,
            question=asked.question.id,
            options=len(asked.options),
            fit=sum(needed + len(asked.head) + len(option) <= self._limit for option in asked.options),
        )
