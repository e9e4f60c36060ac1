"""Where a JSON value ends, in text that is still coming."""

from __future__ import annotations

import re

_WITHIN_TEXT = re.compile(r'[^"\\]*')
_BETWEEN_TEXTS = re.compile(r"[\s\d+\-.,:eEtrufalsn]*")
"""What JSON has outside of its texts, but for brackets."""


class JsonExtent:
    """Follows an object or a list to its end; each character is looked at once.

    It knows brackets and texts, and what never stands between them. What ends may be no JSON all the same.

    Args:
        start: where the value begins in the text.
        max_end: no further is it followed,
        max_depth: nor within so many brackets.
    """

    def __init__(self, start: int, *, max_end: int, max_depth: int) -> None:
        self.at = start
        """So far it has been followed; the place behind the last bracket once it has ended."""
        self._max_end = max_end
        self._max_depth = max_depth
        self._depth = 0
        self._is_text = False
        self._skips = False

    def follow(self, text: str) -> bool | None:
        """Whether the value has ended (True), or is none (False); None if more of the text must be seen."""
        text = text[: self._max_end]
        while self.at < len(text):
            if self._is_text:
                self._follow_text(text)
                continue
            self.at = _past(_BETWEEN_TEXTS, text, self.at) if self._depth else self.at
            sign = text[self.at : self.at + 1]
            if not sign:
                break
            if sign in "{[":
                self._depth += 1
            elif sign in "}]":
                self._depth -= 1
            elif sign == '"' and self._depth:
                self._is_text = True
            else:
                return False
            self.at += 1
            if self._depth <= 0:
                return self._depth == 0
            if self._depth > self._max_depth:
                return False
        return None if len(text) < self._max_end else False

    def _follow_text(self, text: str) -> None:
        if self._skips:
            self._skips = False
            self.at += 1
            return
        self.at = _past(_WITHIN_TEXT, text, self.at)
        sign = text[self.at : self.at + 1]
        self._is_text = sign != '"'
        self._skips = sign == "\\"
        self.at += len(sign)


def _past(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()
