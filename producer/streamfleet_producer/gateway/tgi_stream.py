"""The events of TGI's stream: one a token, the last of them with the whole text."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from streamfleet_common.errors import IncompleteGeneration
from streamfleet_common.schemas import Delta, End
from streamfleet_producer.gateway.tgi_answer import Token, TokenWriter, ending, finish_of, tokens_of
from streamfleet_producer.gateway.tgi_request import parameters_of
from streamfleet_producer.gateway.tgi_schemas import DEFAULT_MAX_NEW_TOKENS, TgiGenerateBody

UNFINISHED = "\ufffd"


class TgiEvents:
    """Makes events of deltas.

    The last token bears the end, which comes after it. So a token is kept until the next one is there if it
    may be the last.

    Args:
        body: what was asked.
        writer: writes tokens.
        full_text: begin the whole text with the prompt.
        knows_ends: the worker ends a text only by the limit, or by a token that shows nothing but a
            character left unfinished. Otherwise any token may be the last.
    """

    def __init__(
        self, body: TgiGenerateBody, writer: TokenWriter, *, full_text: bool = False, knows_ends: bool = False
    ) -> None:
        self._body = body
        self._writer = writer
        self._full_text = full_text
        parameters = parameters_of(body)
        self._limit = parameters.max_new_tokens or DEFAULT_MAX_NEW_TOKENS
        self._top = bool(parameters.top_n_tokens)
        self._details = parameters.details
        # What was held back for a stop string is shown by whatever token ends the text.
        self._any_may_end = bool(parameters.stop) or not knows_ends
        self._count = 0
        self._kept: Token | None = None
        self._last: Token | None = None
        self._loose = ""

    def of(self, delta: Delta) -> Iterator[dict[str, Any]]:
        """The events that can be sent once this delta is there."""
        tokens = tokens_of(delta)
        for plain in tokens:
            token, self._loose = plain.behind(self._loose), ""
            if self._kept is not None:
                yield self._event(self._kept)
            self._kept = None
            self._count += 1
            self._last = token
            if self._may_end(token):
                self._kept = token
            else:
                yield self._event(token)
        # A text without a token, of an attempt that broke off, belongs before the next token's.
        self._loose += "".join(delta.texts[len(tokens) :])

    def last(self, end: End) -> dict[str, Any]:
        """The last event.

        Raises:
            IncompleteGeneration: it is no whole answer.
        """
        if not end.choices or self._last is None:
            raise IncompleteGeneration("the worker ended the request without a token")
        choice = end.choices[0]
        finish_of(choice)
        token = self._kept
        if token is None:
            # It was sent already. Only an event with a token is understood, so there is an empty one.
            self._count += 1
            token = Token(self._last.id, self._loose, self._last.logprob)
        event = self._event(token, ends=choice.finish_reason == "eos" or self._kept is None)
        event["generated_text"] = (self._body.inputs if self._full_text else "") + choice.text
        if self._details:
            event["details"] = {**ending(self._body, choice), "input_length": end.usage.prompt_tokens}
        return event

    def _may_end(self, token: Token) -> bool:
        return (
            self._any_may_end
            or self._count >= self._limit
            or not token.text
            or token.text.endswith(UNFINISHED)
        )

    def _event(self, token: Token, *, ends: bool = False) -> dict[str, Any]:
        event: dict[str, Any] = {
            "index": self._count,
            "token": self._writer.token(token, ends=ends),
            "generated_text": None,
            "details": None,
        }
        if self._top:
            event["top_tokens"] = self._writer.likeliest(token)
        return event
