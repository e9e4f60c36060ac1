"""Where texts from outside spell a model's control tokens, and how these are told from the template's own."""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Iterator


class Spellings:
    """The spellings of all control tokens of a model.

    Args:
        tokens: as they are written.
    """

    def __init__(self, tokens: Iterable[str]) -> None:
        self._tokens = sorted((token for token in tokens if token), key=len, reverse=True)
        self._whole = re.compile("|".join(map(re.escape, self._tokens))) if self._tokens else None
        cuts = [(token[:place], token[place:]) for token in self._tokens for place in range(1, len(token))]
        # Spaces alone begin and end too much.
        self._begins = frozenset(begin for begin, _ in cuts if not begin.isspace())
        self._ends = frozenset(end for _, end in cuts if not end.isspace())
        self._longest = len(self._tokens[0]) - 1 if self._tokens else 0

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """Where a text spells a control token: the first and last place of each, the last one excluded."""
        for match in self._whole.finditer(text) if self._whole is not None else ():
            yield match.span()

    def count(self, text: str) -> int:
        """How many control tokens a text spells."""
        return sum(1 for _ in self.find(text))

    def mark(self, text: str, marks: Marks) -> str:
        """The text with a mark for what is, or beside other text could be, a control token.

        That is each whole spelling, the end of one at the start of the text, and the start of one at its end.
        """
        spans = list(self.find(text))
        first, last = (spans[0][0], spans[-1][1]) if spans else (len(text), 0)
        lengths = range(min(self._longest, len(text)), 0, -1)
        head = next((length for length in lengths if length <= first and text[:length] in self._ends), 0)
        if head:
            spans.insert(0, (0, head))
        start = max(last, head)
        tail = next((n for n in lengths if n <= len(text) - start and text[-n:] in self._begins), 0)
        if tail:
            spans.append((len(text) - tail, len(text)))
        parts, done = [], 0
        for begin, end in spans:
            parts += [text[done:begin], marks.new(text[begin:end])]
            done = end
        return "".join([*parts, text[done:]])


class Marks:
    """Stands in for texts that a template may only pass on; nobody can guess one."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self._texts: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._texts)

    @property
    def texts(self) -> Iterable[str]:
        """What they stand for."""
        return self._texts.values()

    def new(self, text: str) -> str:
        """A mark for this text."""
        mark = f"mark{self._nonce}x{len(self._texts)}x"
        self._texts[mark] = text
        return mark

    def split(self, text: str) -> list[tuple[str, bool]]:
        """A text in parts: its own, and those that marks stand for, which are told by True."""
        parts = re.split(f"(mark{self._nonce}x[0-9]+x)", text)
        return [(self._texts.get(part, part), part in self._texts) for part in parts]
