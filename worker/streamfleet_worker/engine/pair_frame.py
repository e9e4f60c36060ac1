"""The frame of a pair: the control tokens that a model has around two texts which it reads together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from streamfleet_common.errors import Unsupported

Ids = tuple[int, ...]

_PROBES = ("a", "the", "0", ".")
"""Texts of which every vocabulary has tokens for one."""


@dataclass(frozen=True, slots=True)
class PairFrame:
    """Control tokens before, between and behind the texts, and the token types of all tokens.

    With it texts that were turned into tokens apart, or in pieces, can be put together.
    """

    before: Ids
    between: Ids
    behind: Ids
    types: tuple[Ids, Ids, Ids]
    """Of the control tokens, in the same three runs."""
    text_types: tuple[int, int]
    """Of the tokens of the first text, and of the second."""

    @classmethod
    def of(cls, backend: Any) -> PairFrame:
        """The frame that a tokenizer (of the tokenizers library) has.

        Raises:
            Unsupported: it puts the second text first.
        """
        for probe in _PROBES:
            pair = backend.encode(probe, probe)
            texts: list[int | None] = pair.sequence_ids
            if 0 in texts and 1 in texts:
                break
        else:
            raise Unsupported("this model's tokenizer does not take pairs of texts", feature="pairs")
        first, second = texts.index(0), texts.index(1)
        end, last = first + texts.count(0), second + texts.count(1)
        if second < first:
            raise Unsupported("this model's tokenizer puts the second text of a pair first", feature="pairs")
        runs = slice(0, first), slice(end, second), slice(last, None)
        before, between, behind = (tuple(pair.ids[run]) for run in runs)
        before_types, between_types, behind_types = (tuple(pair.type_ids[run]) for run in runs)
        return cls(
            before,
            between,
            behind,
            (before_types, between_types, behind_types),
            (pair.type_ids[first], pair.type_ids[second]),
        )

    @property
    def size(self) -> int:
        """How many control tokens there are."""
        return len(self.before) + len(self.between) + len(self.behind)

    def around(self, first: Ids, second: Ids) -> tuple[Ids, Ids]:
        """Ids and token types of a pair."""
        before, between, behind = self.types
        one, other = self.text_types
        return (
            self.before + first + self.between + second + self.behind,
            before + (one,) * len(first) + between + (other,) * len(second) + behind,
        )
