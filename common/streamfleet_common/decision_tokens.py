"""The tokens of questions: state, heads and options of a decide request, cut and checked without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamfleet_common.errors import InvalidRequest, TooLong

if TYPE_CHECKING:
    from streamfleet_common.decisions import DecideRequest, Question
    from streamfleet_common.token_layout import TokenLayout

Ids = tuple[int, ...]
EncodePiece = Callable[[str], Sequence[int]]
"""Ids of text that stands somewhere within a prompt; no token is added."""


@dataclass(frozen=True, slots=True)
class QuestionTokens:
    """A question in tokens, without what stands around them."""

    criteria: Ids
    options: tuple[Ids, ...]


@dataclass(frozen=True, slots=True)
class DecisionTokens:
    """A decide request in tokens, without what stands around them.

    State, question and option are turned into tokens apart. So what a model reads for the options of a
    request begins with the same tokens, and a state's tokens are the same whatever is asked about it.
    """

    state: Ids
    questions: tuple[QuestionTokens, ...]
    cut_tokens: int
    """Tokens that `truncate` took from the state."""
    count: int
    """Its tokens with what stands around them: the state once, each question, each option."""

    @classmethod
    def of(
        cls, request: DecideRequest, layout: TokenLayout, max_seq_len: int, encode_piece: EncodePiece
    ) -> DecisionTokens:
        """Turn a request into tokens that fit. Without questions nothing is looked at.

        Args:
            request: what is asked.
            layout: what stands around its parts.
            max_seq_len: tokens of state, question and option together.
            encode_piece: the model's tokenizer.

        Raises:
            TooLong: the first `question` (its id) that does not fit beside the state, or not even beside one
                token of it if it may be cut; so many `options` it has, of which so many `fit`.
            InvalidRequest: the state or an option has no tokens.
        """
        if not request.questions:
            return cls((), (), 0, 0)
        questions = tuple(
            QuestionTokens(
                tuple(encode_piece(f"\n\n{question.criteria}")),
                tuple(_options(place, question, layout.option_prefix, encode_piece)),
            )
            for place, question in enumerate(request.questions)
        )
        state = tuple(encode_piece(request.text))
        if not state:
            raise InvalidRequest("the state has no tokens: there is nothing to decide about")
        around = layout.question + layout.option
        needed = layout.state + (1 if request.truncate else len(state))
        heads = [len(tokens.criteria) + around for tokens in questions]
        longest = [
            head + max(map(len, tokens.options)) for head, tokens in zip(heads, questions, strict=True)
        ]
        for place, length in enumerate(longest):
            if needed + length > max_seq_len:
                room = max_seq_len - needed - heads[place]
                options = questions[place].options
                raise TooLong(
                    f"questions.{place} and its longest option have {length} tokens, the state {needed}: "
                    f"over the limit of {max_seq_len}. Shorten either, or have the state cut (truncate)",
                    prompt_tokens=needed + length,
                    max_tokens=0,
                    limit=max_seq_len,
                    question=request.questions[place].id,
                    options=len(options),
                    fit=sum(len(option) <= room for option in options),
                )
        # The same for all questions, so that what is computed of it serves them all.
        cut = max(0, layout.state + len(state) + max(longest) - max_seq_len)
        kept = state[cut:] if request.messages is not None else state[: len(state) - cut]
        count = layout.state + len(kept)
        for tokens in questions:
            count += len(tokens.criteria) + layout.question
            count += sum(len(option) + layout.option for option in tokens.options)
        return cls(kept, questions, cut, count)


def _options(place: int, question: Question, prefix: str, encode_piece: EncodePiece) -> list[Ids]:
    # The first space of a text is special to many tokenizers, so a prefix may not come first.
    line = tuple(encode_piece("\n")) if prefix else ()
    found = []
    for number, option in enumerate(question.choices):
        ids = tuple(encode_piece(f"\n{prefix}{option}" if prefix else option))
        if prefix:
            is_apart = ids[: len(line)] == line
            ids = ids[len(line) :] if is_apart else tuple(encode_piece(f"{prefix}{option}"))
        if not ids:
            raise InvalidRequest(f"questions.{place}.options.{number}: this model has no tokens for it")
        found.append(ids)
    return found
