"""What a worker says, as TGI's clients expect it. No HTTP here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from streamfleet_common.errors import IncompleteGeneration
from streamfleet_common.schemas import Choice, Delta, End, FinishReason, Prefill, Restart
from streamfleet_producer.gateway.tgi_request import is_drawn, parameters_of
from streamfleet_producer.gateway.tgi_schemas import TgiFinishReason, TgiGenerateBody
from streamfleet_producer.gateway.tgi_vocabulary import Vocabulary
from streamfleet_producer.shown import Likeliest, Shown
from streamfleet_producer.transcript import StreamEvent

_FINISH: dict[FinishReason, TgiFinishReason] = {
    "eos": "eos_token",
    "stop": "stop_sequence",
    "length": "length",
}


@dataclass(frozen=True, slots=True)
class Token:
    """A token of the answer, and what could be shown once it was there."""

    id: int
    text: str
    logprob: float | None = None
    likeliest: Likeliest = ()

    def behind(self, text: str) -> Token:
        """The same token, with this text before its own."""
        return Token(self.id, text + self.text, self.logprob, self.likeliest) if text else self


@dataclass(frozen=True, slots=True)
class TokenWriter:
    """Writes tokens as TGI does.

    Without a vocabulary only what came over the wire is known: the likeliest tokens have no text, but for the
    one that was taken, and special is what ended the text.
    """

    vocabulary: Vocabulary | None = None

    def token(self, token: Token, *, ends: bool = False) -> dict[str, Any]:
        """A token; `ends` if it ended the text by what it is."""
        # What bears text is never special, for clients leave special ones out of the text they put together.
        special = not token.text and (ends or self._is_special(token.id))
        text = self.vocabulary.text(token.id) if special and self.vocabulary is not None else token.text
        return {"id": token.id, "text": text, "logprob": token.logprob, "special": special}

    def likeliest(self, token: Token) -> list[dict[str, Any]]:
        """The likeliest tokens of its place."""
        return [
            {
                "id": token_id,
                "text": self._text(token_id, token),
                "logprob": logprob,
                "special": self._is_special(token_id),
            }
            for token_id, logprob in token.likeliest
        ]

    def _text(self, token_id: int, taken: Token) -> str:
        if self.vocabulary is not None:
            return self.vocabulary.text(token_id)
        return taken.text if token_id == taken.id else ""

    def _is_special(self, token_id: int) -> bool:
        return self.vocabulary is not None and self.vocabulary.is_special(token_id)


@dataclass(slots=True)
class Gathered:
    """All that a stream has told: the prompt's tokens, and those of each answer."""

    prefill: Prefill | None = None
    shown: Shown = field(default_factory=Shown)

    def add(self, event: StreamEvent) -> None:
        """Take the next event; after a restart all begins anew."""
        match event:
            case Prefill():
                self.prefill = event
            case Delta():
                self.shown.add(event)
            case Restart():
                self.prefill, self.shown = None, Shown()
            case _:
                pass

    def tokens(self, index: int) -> list[Token]:
        """Those of one answer."""
        line = self.shown.lines.get(index)
        return [] if line is None else list(_tokens(line.ids, line.texts, line.logprobs, line.top_logprobs))


def tokens_of(delta: Delta) -> list[Token]:
    """The tokens of a delta. A text that has no token is not among them."""
    return list(_tokens(delta.token_ids, delta.texts, delta.logprobs, delta.top_logprobs))


def _tokens(
    ids: Sequence[int],
    texts: Sequence[str],
    logprobs: Sequence[float | None],
    likeliest: Sequence[Likeliest],
) -> Iterator[Token]:
    for place, token_id in enumerate(ids):
        yield Token(
            token_id,
            texts[place],
            logprobs[place] if place < len(logprobs) else None,
            likeliest[place] if place < len(likeliest) else (),
        )


def finish_of(choice: Choice) -> TgiFinishReason:
    """Why an answer ended.

    Raises:
        IncompleteGeneration: it did not end by itself.
    """
    try:
        return _FINISH[choice.finish_reason]
    except KeyError:
        raise IncompleteGeneration(f"the answer broke off ({choice.finish_reason})") from None


def best_first(choices: Sequence[Choice]) -> list[Choice]:
    """The answers, first the one whose tokens are the likeliest on average; of equals the first.

    Raises:
        IncompleteGeneration: there is none.
    """
    if not choices:
        raise IncompleteGeneration("the worker ended the request without an answer")
    best = max(choices, key=_mean_logprob)
    return [best, *(choice for choice in choices if choice is not best)]


def _mean_logprob(choice: Choice) -> float:
    told = [logprob for logprob in choice.logprobs if logprob is not None]
    return sum(told) / len(told) if told else -float("inf")


def generated(
    body: TgiGenerateBody, end: End, told: Gathered, writer: TokenWriter, *, full_text: bool = False
) -> dict[str, Any]:
    """The whole answer; with details if they were asked for.

    Args:
        body: what was asked.
        end: what the worker ended with.
        told: its tokens, if there are to be details.
        writer: writes them.
        full_text: begin texts with the prompt.

    Raises:
        IncompleteGeneration: it is no whole answer.
    """
    parameters = parameters_of(body)
    best, *others = best_first(end.choices)
    prefix = body.inputs if full_text else ""
    if not (parameters.details or parameters.decoder_input_details):
        finish_of(best)
        return {"generated_text": prefix + best.text}
    details = _sequence(body, best, told, writer)
    if others:
        details["best_of_sequences"] = [
            {"generated_text": prefix + other.text, **_sequence(body, other, told, writer)}
            for other in others
        ]
    return {"generated_text": prefix + best.text, "details": details}


def _sequence(body: TgiGenerateBody, choice: Choice, told: Gathered, writer: TokenWriter) -> dict[str, Any]:
    tokens = told.tokens(choice.index)
    last = len(tokens) - 1
    sequence = {
        **ending(body, choice),
        "prefill": prefilled(told.prefill),
        "tokens": [
            writer.token(token, ends=place == last and choice.finish_reason == "eos")
            for place, token in enumerate(tokens)
        ],
    }
    if parameters_of(body).top_n_tokens:
        sequence["top_tokens"] = [writer.likeliest(token) for token in tokens]
    return sequence


def ending(body: TgiGenerateBody, choice: Choice) -> dict[str, Any]:
    """How an answer ended. The seed is told where one was used."""
    return {
        "finish_reason": finish_of(choice),
        "generated_tokens": len(choice.token_ids),
        "seed": choice.seed if is_drawn(parameters_of(body)) else None,
    }


def prefilled(prefill: Prefill | None) -> list[dict[str, Any]]:
    """The prompt's tokens; none unless they were asked for."""
    if prefill is None:
        return []
    parts = zip(prefill.token_ids, prefill.texts, prefill.logprobs, strict=True)
    return [{"id": token_id, "text": text, "logprob": logprob} for token_id, text, logprob in parts]
