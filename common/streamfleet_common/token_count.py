"""The count of a request's tokens, made with a tokenizer and what a worker's card says, without the model."""

from __future__ import annotations

from collections.abc import Sequence
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
            return self._texts("texts", request.texts, 0, self._layout.text, request.truncate)
        if isinstance(request, ClassifyRequest):
            if request.pairs:
                return self._pairs(request)
            return self._texts("texts", request.texts, 0, self._layout.text, request.truncate)
        if isinstance(request, RerankRequest):
            query = self._length("query", request.query)
            return self._texts("documents", request.documents, query, self._layout.pair, request.truncate)
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
            tokens = self._length("the prompt", request.prompt) + self._layout.text
        else:
            tokens = len(request.prompt_token_ids or ())
        kept = min(tokens, request.truncate or tokens)
        answer = max(1, request.min_tokens) if request.max_tokens == "fit" else request.max_tokens
        if kept + answer > self._limit:
            raise TooLong(prompt_tokens=kept, max_tokens=answer, limit=self._limit)
        return kept

    def _pairs(self, request: ClassifyRequest) -> int:
        count = 0
        for place, (text, other) in enumerate(zip(request.texts, request.pairs, strict=True)):
            tokens = self._length(f"texts.{place}", text) + self._length(f"pairs.{place}", other)
            count += self._fit(f"texts.{place}", tokens + self._layout.pair, request.truncate)
        return count

    def _texts(self, name: str, texts: Sequence[str], beside: int, around: int, truncate: bool) -> int:
        """Texts that each stand with so many tokens `beside` them, which are never cut, and `around`."""
        count = 0
        for place, text in enumerate(texts):
            tokens = self._length(f"{name}.{place}", text) + beside + around
            count += self._fit(f"{name}.{place}", tokens, truncate and beside + around < self._limit)
        return count

    def _fit(self, name: str, tokens: int, may_cut: bool) -> int:
        if tokens > self._limit and not may_cut:
            raise TooLong(
                f"{name} has {tokens} tokens, over the limit of {self._limit}: shorten it, or have it cut "
                "(truncate)",
                prompt_tokens=tokens,
                max_tokens=0,
                limit=self._limit,
            )
        return min(tokens, self._limit)

    def _length(self, name: str, text: str) -> int:
        tokens = len(self._encode_piece(text))
        if not tokens:
            raise InvalidRequest(f"{name} has no tokens: there is nothing to read")
        return tokens
