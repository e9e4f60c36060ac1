"""The count of a request's tokens, made with a tokenizer and what a worker's card says, without the model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamfleet_common.decision_tokens import DecisionTokens, EncodePiece
from streamfleet_common.decisions import DecideRequest
from streamfleet_common.errors import InvalidRequest, TooLong, Unsupported
from streamfleet_common.one_shot import CallRequest, ClassifyRequest, EmbedRequest, RerankRequest

if TYPE_CHECKING:
    from streamfleet_common.schemas import GenerateRequest, Request
    from streamfleet_common.token_layout import TokenLayout


class TokenCount:
    """Counts requests as a worker does, and refuses as too long what it would refuse.

    Args:
        layout: what the worker puts around texts.
        max_seq_len: the worker's limit, in tokens.
        encode_piece: the model's tokenizer.
    """

    def __init__(self, layout: TokenLayout, max_seq_len: int, encode_piece: EncodePiece) -> None:
        self._layout = layout
        self._limit = max_seq_len
        self._encode_piece = encode_piece

    def of(self, request: Request) -> int:
        """Tokens of a request, control tokens included: the `prompt_tokens` of its answer's usage.

        Raises:
            TooLong: it does not fit.
            InvalidRequest: a text has no tokens.
            Unsupported: it cannot be counted here: chat messages, which the worker renders, and handlers'
                inputs.
        """
        if isinstance(request, DecideRequest):
            return DecisionTokens.of(request, self._layout, self._limit, self._encode_piece).count
        if isinstance(request, EmbedRequest):
            return self._texts(request)
        if isinstance(request, ClassifyRequest):
            return self._pairs(request) if request.pairs else self._texts(request)
        if isinstance(request, RerankRequest):
            return self._documents(request)
        if isinstance(request, CallRequest):
            raise Unsupported("a handler's input has no tokens to be counted", feature="count_tokens")
        return self._prompt(request)

    def _prompt(self, request: GenerateRequest) -> int:
        if request.messages is not None:
            raise Unsupported(
                "messages are counted by the worker alone, which has the model's chat template: "
                "send a prompt, or submit without counting",
                feature="count_tokens",
            )
        if request.prompt is not None:
            pieces = len(self._encode_piece(request.prompt))
            if not pieces:
                raise InvalidRequest("the prompt has no tokens: there is nothing to continue")
            tokens = pieces + self._layout.text
        else:
            tokens = len(request.prompt_token_ids or ())
        kept = min(tokens, request.truncate or tokens)
        answer = max(1, request.min_tokens) if request.max_tokens == "fit" else request.max_tokens
        if kept + answer > self._limit:
            raise TooLong(prompt_tokens=kept, max_tokens=answer, limit=self._limit)
        return kept

    def _texts(self, request: EmbedRequest | ClassifyRequest) -> int:
        rest = self._limit - self._layout.text if request.truncate else 0
        count = 0
        for place, text in enumerate(request.texts):
            name = f"texts.{place}"
            count += self._fit(place, name, self._length(name, text) + self._layout.text, rest)
        return count

    def _pairs(self, request: ClassifyRequest) -> int:
        rest = self._limit - self._layout.pair - 1 if request.truncate else 0
        count = 0
        for place, pair in enumerate(zip(request.texts, request.pairs, strict=True)):
            names = f"texts.{place}", f"pairs.{place}"
            tokens = sum(map(self._length, names, pair)) + self._layout.pair
            count += self._fit(place, f"the pair of {' and '.join(names)}", tokens, rest)
        return count

    def _documents(self, request: RerankRequest) -> int:
        taken = self._length("query", request.query) + self._layout.pair
        if taken >= self._limit:
            raise TooLong(
                f"the query takes {taken} tokens with what is around it, which leaves no room for a document "
                f"below the limit of {self._limit}: shorten the query, which is never cut",
                prompt_tokens=taken + 1,
                max_tokens=0,
                limit=self._limit,
            )
        rest = self._limit - taken if request.truncate else 0
        count = 0
        for place, text in enumerate(request.documents):
            name = f"documents.{place}"
            count += self._fit(place, f"{name}, with the query,", self._length(name, text) + taken, rest)
        return count

    def _fit(self, place: int, name: str, tokens: int, rest: int) -> int:
        """Tokens of an item once it is cut, of which at least one has to be left of `rest`."""
        if tokens > self._limit and rest < 1:
            raise TooLong(
                f"{name} has {tokens} tokens, over the limit of {self._limit}: shorten it, or have it cut "
                "(truncate)",
                prompt_tokens=tokens,
                max_tokens=0,
                limit=self._limit,
                item=place,
            )
        return min(tokens, self._limit)

    def _length(self, name: str, text: str) -> int:
        tokens = len(self._encode_piece(text))
        if not tokens:
            raise InvalidRequest(f"{name} has no tokens: there is nothing to read")
        return tokens
