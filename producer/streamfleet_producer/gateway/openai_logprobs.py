"""Log-probabilities as OpenAI tells them. No HTTP here.

Both forms tell tokens by their text. What the fleet tells of a token that was generated is what could be
shown once it was there, and of the other likely ones the ids. `Names` says the text of an id, where the
tokenizer is known; `unnamed` says what vLLM says where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streamfleet_producer.shown import Likeliest

Names = Callable[[int], str]


def unnamed(token_id: int) -> str:
    """A token by its number."""
    return f"token_id:{token_id}"


def chat_logprobs(
    ids: Sequence[int],
    texts: Sequence[str],
    logprobs: Sequence[float | None],
    likeliest: Sequence[Likeliest],
    names: Names,
) -> list[dict[str, Any]]:
    """Those of a chat's tokens; the arguments are parallel, as in a `Delta`."""
    told = []
    for place, token_id in enumerate(ids):
        text = _said(texts, place) or names(token_id)
        top = likeliest[place] if place < len(likeliest) else ()
        told.append(
            {
                **_token(text, logprobs[place]),
                "top_logprobs": [
                    _token(text if other == token_id else names(other), logprob) for other, logprob in top
                ],
            }
        )
    return told


class CompletionLogprobs:
    """Those of the tokens of one completion, as they come; offsets are counted in characters of its text."""

    def __init__(self, names: Names) -> None:
        self._names = names
        self._offset = 0

    def skip(self, text: str) -> None:
        """The text begins with this, which has no tokens here."""
        self._offset += len(text)

    def add(
        self,
        ids: Sequence[int],
        texts: Sequence[str],
        logprobs: Sequence[float | None],
        likeliest: Sequence[Likeliest],
    ) -> dict[str, Any]:
        """The next tokens; the arguments are parallel, as in a `Delta`."""
        tokens: list[str] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for place, token_id in enumerate(ids):
            shown = _said(texts, place)
            text = shown or self._names(token_id)
            top = likeliest[place] if place < len(likeliest) else ()
            told = {text if other == token_id else self._names(other): logprob for other, logprob in top}
            logprob = logprobs[place]
            if logprob is not None:
                told.setdefault(text, logprob)
            tokens.append(text)
            tops.append(None if logprob is None else told)
            offsets.append(self._offset)
            self._offset += len(shown)
        for text in texts[len(ids) :]:
            self._offset += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": list(logprobs[: len(ids)]),
            "top_logprobs": tops,
            "text_offset": offsets,
        }


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `CompletionLogprobs.add` gave, as one."""
    return {name: [item for part in parts for item in part[name]] for name in parts[0]}


def _said(texts: Sequence[str], place: int) -> str:
    return texts[place] if place < len(texts) else ""


def _token(text: str, logprob: float | None) -> dict[str, Any]:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode())}
