"""Token ids to text, a token at a time, in whole characters.

Three ways were measured on a byte-level vocabulary (`tests/bench/detokenizer.py`) and compared with the
tokenizer's own decoding of all tokens at once.

Two decodings of a window that starts a few tokens earlier, whose difference is the new text (the method of
text-generation-inference and vLLM), cost about 1.8 µs a token, and hold whole characters back as long as the
text ends in U+FFFD; without a bound the window grows while broken bytes come, and time with its square.
`tokenizers.decoders.DecodeStream` does the same in 0.5 µs, grows likewise, cannot be flushed, and raises
or repeats text after broken bytes of a sentencepiece model. The pieces of tokens, joined and read as UTF-8,
cost 0.2 µs, hold back at most three bytes, and are exact. So they are used for the tokenizers that have
pieces, which nearly all causal models do, and the bounded window for the rest.

Broken bytes become what Unicode recommends: one U+FFFD for each longest beginning of a character. A
sentencepiece model's own decoder instead turns a whole run of byte tokens into marks when one is broken, even
characters that were shown long before.
"""

from __future__ import annotations

from codecs import utf_8_decode
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from streamfleet_worker.engine.pieces import Pieces

Decode = Callable[[Sequence[int]], str]
"""Text of token ids."""

MARK = "\ufffd"
"""Stands for bytes that are no character."""

MAX_UNREAD = 16
"""Tokens that a window waits for an end that is not U+FFFD: a character has four bytes at most."""


class IncrementalDecoder(Protocol):
    """Text of a growing list of tokens: every call gives the characters that are new and complete."""

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; "" while one is unfinished."""

    def flush(self) -> str:
        """What is still held back, with one U+FFFD for an unfinished character."""


class PieceDecoder:
    """An `IncrementalDecoder` for tokenizers whose tokens have pieces.

    Args:
        pieces: of this tokenizer.
        hidden: tokens that are passed over.
        context: the last tokens before the first one that are no hidden ones. They are not shown, but for
            a character that they leave unfinished; three suffice, since a fourth byte ends any.
    """

    def __init__(self, pieces: Pieces, hidden: Collection[int] = (), context: Sequence[int] = ()) -> None:
        self._pieces = pieces
        self._hidden = hidden
        self._has_begun = False
        self._unfinished = b""
        for token_id in context:
            self.push(token_id)

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; "" while one is unfinished."""
        if token_id in self._hidden:
            return ""
        piece = self._pieces[token_id]
        if not self._has_begun:
            first = self._pieces.first(token_id)
            self._has_begun = bool(piece or first)
            piece = first
        if not piece:
            return ""
        if isinstance(piece, str):
            return self.flush() + piece if self._unfinished else piece
        read = self._unfinished + piece
        text, length = utf_8_decode(read, "replace")
        self._unfinished = read[length:]
        return text

    def flush(self) -> str:
        """What is still held back, with one U+FFFD for an unfinished character."""
        # Python waits for a third byte also behind two that begin no character (half of a surrogate pair).
        text, self._unfinished = self._unfinished.decode(errors="replace"), b""
        return text


class WindowDecoder:
    """An `IncrementalDecoder` for any tokenizer.

    Args:
        decode: the tokenizer's decoder.
        is_shown: whether a token is one for it; others are passed over.
        context: the last such tokens before the first one; read for their influence, never shown.
    """

    def __init__(
        self,
        decode: Decode,
        is_shown: Callable[[int], bool] = lambda _: True,
        context: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._is_shown = is_shown
        # The window: tokens before `_read` are shown already and are there for their influence only.
        self._window = list(context)
        self._read = len(self._window)
        self._shown = decode(self._window) if self._window else ""

    def push(self, token_id: int) -> str:
        """The characters that `token_id` completes; "" while one is unfinished."""
        if not self._is_shown(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        new = self._new(text)
        if (text.endswith(MARK) or not new) and len(self._window) - self._read < MAX_UNREAD:
            return ""
        del self._window[: self._read]
        self._read = len(self._window)
        self._shown = self._decode(self._window)
        return new

    def flush(self) -> str:
        """What is still held back."""
        text = self._decode(self._window) if self._read < len(self._window) else self._shown
        new = self._new(text)
        self._window, self._read, self._shown = [], 0, ""
        return new

    def _new(self, text: str) -> str:
        # What was shown may end in marks of a character which is whole only now.
        shown = self._shown
        while shown.endswith(MARK) and not text.startswith(shown):
            shown = shown[:-1]
        return text[len(shown) :]
