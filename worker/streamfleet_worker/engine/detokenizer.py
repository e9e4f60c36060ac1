"""Token ids to text: deltas that never take anything back, and stop strings.

A token's text depends on its neighbours: a character may be spread over several tokens, and a
sentencepiece token loses its leading space when it comes first. So text is the difference between two
decodings of a window that starts a few tokens earlier (the two-window method of text-generation-inference
and vLLM), and it is held back while it ends in U+FFFD, which is what an unfinished character decodes to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""Text of token ids, special tokens hidden."""

UNFINISHED = "\ufffd"


class IncrementalDecoder:
    """Text of a growing list of tokens; every call gives the characters that are new and complete.

    Args:
        decode: the tokenizer's decoder.
        context: the last tokens before the first one; read for their influence, never shown.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        # The window: tokens before `_read` are shown already and are there for their influence only.
        self._window = list(context)
        self._read = len(self._window)
        self._shown = decode(self._window) if self._window else ""

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; "" while one is unfinished."""
        self._window.append(token_id)
        text = self._decode(self._window)
        new = self._new(text)
        if text.endswith(UNFINISHED) or not new:
            return ""
        del self._window[: self._read]
        self._read = len(self._window)
        self._shown = self._decode(self._window)
        return new

    def flush(self) -> str:
        """What is still held back, with a replacement mark for a character that stays broken."""
        text = self._decode(self._window) if self._read < len(self._window) else self._shown
        new = self._new(text)
        self._window, self._read, self._shown = [], 0, ""
        return new

    def _new(self, text: str) -> str:
        if text.startswith(self._shown):
            return text[len(self._shown) :]
        # The context ended within a character which is whole only now.
        return text[len(self._shown.rstrip(UNFINISHED)) :]


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
        self._include = include
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """The text that may be shown, and whether a stop was met; nothing may be pushed after that."""
        if not self._stops or not text:
            return text, False
        text = self._held + text
        matches = [(start + len(stop), -len(stop)) for stop in self._stops if (start := text.find(stop)) >= 0]
        if matches:
            self._held = ""
            end, negative_length = min(matches)
            return text[: end if self._include else end + negative_length], True
        keep = max(map(self._overlap, [text] * len(self._stops), self._stops))
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def flush(self) -> str:
        """What is still held back: it has become no stop."""
        held, self._held = self._held, ""
        return held

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that is a beginning of `stop`."""
        for length in range(min(len(text), len(stop) - 1), 0, -1):
            if text.endswith(stop[:length]):
                return length
        return 0


class Detokenizer:
    """The text of one sequence: decoder and stop strings in a row."""

    def __init__(
        self,
        decode: Decode,
        context: Sequence[int] = (),
        stops: Sequence[str] = (),
        include_stop: bool = False,
    ) -> None:
        self._decoder = IncrementalDecoder(decode, context)
        self._matcher = StopMatcher(stops, include_stop)

    def push(self, token_id: int) -> tuple[str, bool]:
        """The text that may be shown after this token, and whether it met a stop string."""
        return self._matcher.push(self._decoder.push(token_id))

    def flush(self) -> tuple[str, bool]:
        """The rest of the text when no token follows, and whether it met a stop string after all."""
        text, stopped = self._matcher.push(self._decoder.flush())
        return (text, True) if stopped else (text + self._matcher.flush(), False)
