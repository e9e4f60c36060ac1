"""The text of an answer: token ids to deltas that never take anything back, and stop strings."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from streamfleet_worker.engine.incremental_decoder import IncrementalDecoder

if TYPE_CHECKING:
    from streamfleet_worker.engine.prepared import Prepared
    from streamfleet_worker.engine.tokenizer import Tokenizer


class StopMatcher:
    """Finds stop strings in text that comes in pieces.

    Held back is the longest end of the text that may still become a stop, and nothing else. Of several
    stops the one that is complete first wins; of those complete at once, the longest.

    Args:
        stops: literal strings, none empty.
        include: show the stop that was met.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._beginnings = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, bool]:
        """The text that may be shown, and whether a stop was met; nothing may be pushed after that.

        Without `may_stop`, a stop that this text completes is text like any other.
        """
        if not self._held and self._beginnings.isdisjoint(text):
            return text, False
        held = len(self._held)
        text = self._held + text
        if may_stop:
            # Only what ends in the new text: the held text may hold a stop that came when none was wanted.
            starts = [(text.find(stop, max(0, held + 1 - len(stop))), stop) for stop in self._stops]
            matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
            if matches:
                self._held = ""
                end, start = min(matches)
                return text[: end if self._include else start], True
        keep = min(_possible(text, stop) for stop in self._stops)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """What is still held back: it has become no stop."""
        held, self._held = self._held, ""
        return held


def _possible(text: str, stop: str) -> int:
    """The first place from which the text is a beginning of `stop`; its length if there is none."""
    place = text.find(stop[0], max(0, len(text) + 1 - len(stop)))
    while place >= 0 and not stop.startswith(text[place:]):
        place = text.find(stop[0], place + 1)
    return len(text) if place < 0 else place


class Detokenizer:
    """The text of one answer: what `push` and the end give, joined, is its final text.

    However the answer ends, the end gives what was held back: text that has become no stop string, and one
    U+FFFD for an unfinished character. So the text is always that of the tokens reported.

    A control token is shown if control tokens are, also when it ends the text. Another token that ends the
    text by its id is shown if stops are. No stop string is in what is shown unless stops are included or
    it came too early.

    Args:
        decoder: reads the answer's tokens.
        stops: strings that end the text.
        include_stop: show what ended the text, a string or a token.
        min_tokens: a stop string that is complete before so many tokens is text like any other; one that
            is complete later ends the text, wherever it began.
        prefix: comes before the first token's text; no stop is looked for in it.
        control_ids: the tokenizer's control tokens.
    """

    def __init__(
        self,
        decoder: IncrementalDecoder,
        stops: Sequence[str] = (),
        *,
        include_stop: bool = False,
        min_tokens: int = 0,
        prefix: str = "",
        control_ids: Collection[int] = (),
    ) -> None:
        self._decoder = decoder
        self._matcher = StopMatcher(stops, include_stop) if stops else None
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._prefix = prefix
        self._control_ids = control_ids
        self._tokens = 0
        self._is_open = True

    @classmethod
    def of(cls, tokenizer: Tokenizer, prepared: Prepared) -> Detokenizer:
        """The detokenizer of an answer to this request."""
        decoder = tokenizer.decoder(prepared.prompt_token_ids, skip_special=prepared.skip_special_tokens)
        return cls(
            decoder,
            prepared.stop,
            include_stop=prepared.include_stop,
            min_tokens=prepared.min_tokens,
            prefix=prepared.prefix,
            control_ids=tokenizer.special_token_ids,
        )

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text that may be shown after this token, and whether it met a stop string.

        Nothing may be pushed after that, nor after `flush` or `end`.
        """
        self._tokens += 1
        text, stopped = self._decoder.push(token_id), False
        if self._matcher is not None and text:
            text, stopped = self._matcher.push(text, may_stop=self._tokens >= self._min_tokens)
            self._is_open = not stopped
        return (self._with_prefix(text) if self._prefix else text), stopped

    def flush(self, token_id: int | None = None) -> tuple[str, bool]:
        """The rest of the text when no token follows, and whether it met a stop string after all.

        `token_id` is the token that ended the text, if it was by its id: it was not pushed.
        """
        self._is_open = False
        text = ""
        if token_id is not None and (self._include_stop or token_id in self._control_ids):
            text = self._decoder.push(token_id)
        text += self._decoder.flush()
        stopped = False
        if self._matcher is not None:
            text, stopped = self._matcher.push(text)
            if not stopped:
                text += self._matcher.flush()
        return self._with_prefix(text), stopped

    def end(self) -> str:
        """The rest of the text when it is ended from outside: cancelled, expired, failed.

        "" if no token came, since nothing was to be shown then, and if the text had ended already.
        """
        return self.flush()[0] if self._is_open and self._tokens else ""

    def _with_prefix(self, text: str) -> str:
        text, self._prefix = self._prefix + text, ""
        return text
