"""What an encoder reads: one text, or two, in tokens, with the model's control tokens around them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from streamfleet_common.errors import InvalidRequest, TooLong
from streamfleet_worker.engine.item import ItemSpec
from streamfleet_worker.engine.pair_frame import PairFrame
from streamfleet_worker.engine.token_cache import Ids

if TYPE_CHECKING:
    from streamfleet_common.one_shot import Side
    from streamfleet_worker.engine.token_cache import TokenCache
    from streamfleet_worker.engine.tokenizer import Tokenizer

ROW_BYTES = 400
"""Of an item that waits, besides its tokens."""
_PROBES = ("a", "the", "0", ".")
"""Texts of which every vocabulary has tokens for one."""

Whose = Literal["longer", "second"]
"""Which of two texts is cut: the longer one, until both have one length; or always the second."""


Row = tuple[Sequence[int], Sequence[int]]
"""What a runner is given: ids and token types, of one length."""


@dataclass(frozen=True, slots=True, eq=False)
class EncoderInput:
    """A row of a batch. Nobody may change its arrays."""

    ids: array[int]
    types: array[int]
    """The token types: 0 of the first text, 1 of the second, in most models that have any."""
    cut_tokens: int = 0
    """How many are missing that the text had."""

    @classmethod
    def of(cls, ids: Sequence[int], types: Sequence[int] | None = None, cut_tokens: int = 0) -> EncoderInput:
        """A row of these tokens, control tokens among them; of one type if there is no word of it."""
        packed = array("i", ids)
        return cls(packed, array("b", bytes(len(packed)) if types is None else types), cut_tokens)

    def spec(self, group: Hashable) -> ItemSpec:
        """Its item, to run with others of this group."""
        digest = hashlib.blake2b(self.ids.tobytes(), digest_size=16)
        digest.update(self.types.tobytes())
        row: Row = self.ids, self.types
        return ItemSpec(
            row,
            length=len(self.ids),
            group=group,
            digest=digest.digest(),
            bytes=ROW_BYTES + (self.ids.itemsize + 1) * len(self.ids),
        )


class InputBuilder:
    """Texts to rows as one model wants them; safe to use from several threads.

    Args:
        tokenizer: the model's.
        tokens: texts to tokens, control tokens apart.
        limit: the longest row, in tokens.
    """

    def __init__(self, tokenizer: Tokenizer, tokens: TokenCache, limit: int) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._before, self._behind = _frame(tokenizer)
        self.limit = limit

    @cached_property
    def _pair(self) -> PairFrame:
        return self._tokenizer.pair_frame()

    def tokens(self, name: str, text: str, scope: str = "") -> Ids:
        """Tokens of a text of this scope; `name` is how its field is called in an error.

        Raises:
            InvalidRequest: there are none.
        """
        ids = self._tokens.encode(text, scope)
        if not ids:
            raise InvalidRequest(f"{name} has no tokens: there is nothing to read")
        return ids

    def text(self, place: int, name: str, text: str, side: Side | None, scope: str = "") -> EncoderInput:
        """A text by itself.

        Args:
            place: the item's, in its request.
            name: how the text's field is called in an error.
            text: what to read.
            side: where it may be cut; None if it may not.
            scope: whose it is.

        Raises:
            TooLong: it is, and may not be cut.
            InvalidRequest: it has no tokens.
        """
        ids = self.tokens(name, text, scope)
        room = self.limit - len(self._before) - len(self._behind)
        cut = len(ids) - room
        if cut > 0:
            if side is None or room < 1:
                raise self._too_long(place, name, self.limit + cut)
            ids = _cut(ids, room, side)
        return EncoderInput.of(self._before + ids + self._behind, cut_tokens=max(0, cut))

    def pair(
        self, place: int, name: str, first: Ids, second: Ids, *, side: Side | None, whose: Whose
    ) -> EncoderInput:
        """Two texts that are read together; as `text`.

        Raises:
            TooLong: both together are, and may not be cut, or not by as much.
            Unsupported: the model's tokenizer does not take pairs.
        """
        room = self.limit - self._pair.size
        cut = len(first) + len(second) - room
        if cut > 0:
            rest = room - len(first) if whose == "second" else room - 1
            if side is None or rest < 1:
                raise self._too_long(place, name, self.limit + cut)
            if whose == "longer":
                first_room, second_room = _shares(len(first), len(second), room)
                first = _cut(first, first_room, side)
                second = _cut(second, second_room, side)
            else:
                second = _cut(second, rest, side)
        ids, types = self._pair.around(first, second)
        return EncoderInput.of(ids, types, max(0, cut))

    def check_query(self, query: Ids) -> None:
        """Refuse a query beside which no document has room.

        Raises:
            TooLong: it leaves less than one token.
        """
        taken = len(query) + self._pair.size
        if taken >= self.limit:
            raise TooLong(
                f"the query takes {taken} tokens with what is around it, which leaves no room for a document "
                f"below the limit of {self.limit}: shorten the query, which is never cut",
                prompt_tokens=taken + 1,
                max_tokens=0,
                limit=self.limit,
            )

    def _too_long(self, place: int, name: str, tokens: int) -> TooLong:
        return TooLong(
            f"{name} has {tokens} tokens, over the limit of {self.limit}: shorten it, or have it cut "
            "(truncate)",
            prompt_tokens=tokens,
            max_tokens=0,
            limit=self.limit,
            item=place,
        )


def _frame(tokenizer: Tokenizer) -> tuple[Ids, Ids]:
    """Control tokens before and behind a text by itself."""
    for probe in _PROBES:
        piece, whole = tokenizer.encode_piece(probe), tokenizer.encode(probe)
        for start in range(len(whole) - len(piece) + 1) if piece else ():
            if whole[start : start + len(piece)] == piece:
                return tuple(whole[:start]), tuple(whole[start + len(piece) :])
    return (), ()


def _cut(ids: Ids, room: int, side: Side) -> Ids:
    if len(ids) <= room:
        return ids
    return ids[:room] if side == "right" else ids[len(ids) - room :]


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """Tokens that two texts may keep of `room`, so that the longer one is cut until they are equal.

    As the tokenizers library shares; an odd token goes to the longer one, of two equal ones to the second.
    """
    half = room // 2
    if min(first, second) <= half:
        return (first, room - first) if first <= second else (room - second, second)
    return (half, room - half) if first <= second else (room - half, half)
