"""What single tokens add to a text."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import tokenizers

Piece = str | bytes
"""Whole characters, or bytes of which some are part of a character."""

WHOLE_TOKEN_DECODERS = (["ByteLevel"], ["Metaspace"], ["WordPiece"])
STEPS = ("Replace", "ByteFallback", "Fuse", "Strip")
"""In this order; what sentencepiece models are converted to. Each may be missing."""

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")


class Pieces(dict[int, Piece]):
    """The piece of each token id that stands behind other text; "" for an id that is no token.

    Of most tokenizers a text is the pieces of its tokens, joined and read as UTF-8. Only the first token
    may lose its leading space. Pieces are worked out when first asked for, and kept: never more than the
    vocabulary has.

    Args:
        backend: the tokenizer; nobody else may change it.

    Raises:
        ValueError: its tokens have no pieces, since their text depends on neighbours in other ways.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        super().__init__()
        self._backend = backend
        # As it would be pickled, since the whole tokenizer's JSON holds its vocabulary too.
        steps = _steps(json.loads(backend.decoder.__getstate__())) if backend.decoder else []
        kinds = [step["type"] for step in steps]
        if not _are_local(steps):
            raise ValueError(f"the text of a token depends on more than the token in {kinds}")
        self._is_byte_level = kinds == ["ByteLevel"]
        self._has_byte_tokens = "ByteFallback" in kinds
        size = backend.get_vocab_size(with_added_tokens=True)
        self._anchor = next((i for i in range(size) if self._decode(i).strip()), -1)
        if self._anchor < 0:
            raise ValueError("no token of the vocabulary has a text")
        self._anchor_length = len(self._decode(self._anchor))

    def first(self, token_id: int) -> Piece:
        """The piece of a token with which a text begins."""
        piece = self[token_id]
        return piece if self._is_byte_level or isinstance(piece, bytes) else self._decode(token_id)

    def __missing__(self, token_id: int) -> Piece:
        piece = self[token_id] = self._find(token_id)
        return piece

    def _find(self, token_id: int) -> Piece:
        if self._is_byte_level:
            return _shortest(_byte_level(self._backend.id_to_token(token_id) or ""))
        if (byte := self._byte(token_id)) is not None:
            return _shortest(byte)
        return self._decode(self._anchor, token_id)[self._anchor_length :]

    def _decode(self, *token_ids: int) -> str:
        return str(self._backend.decode(list(token_ids), skip_special_tokens=False))

    def _byte(self, token_id: int) -> bytes | None:
        if not self._has_byte_tokens:
            return None
        match = _BYTE_TOKEN.fullmatch(self._backend.id_to_token(token_id) or "")
        return bytes.fromhex(match[1]) if match else None


def _steps(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder["type"] == "Sequence":
        return [step for part in decoder["decoders"] for step in _steps(part)]
    return [decoder]


def _are_local(steps: list[dict[str, Any]]) -> bool:
    kinds = [step["type"] for step in steps]
    if kinds in WHOLE_TOKEN_DECODERS:
        return True
    strips = [step for step in steps if step["type"] == "Strip"]
    return (
        bool(kinds)
        and kinds == [kind for kind in STEPS if kind in kinds]
        # More than one space could belong to more than the first token.
        and all(step["start"] <= 1 and step["stop"] == 0 for step in strips)
    )


def _shortest(piece: bytes) -> Piece:
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return piece


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_BYTES[character] for character in token)
    except KeyError:
        # The tokenizers library does the same with added tokens that are spelled in other characters.
        return token.encode()


def _bytes_by_character() -> dict[str, int]:
    # `bytes_to_unicode` of GPT-2's encoder.py, the other way round.
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTES = _bytes_by_character()
