"""The texts of single tokens, where the gateway has the tokenizer of the model."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

from streamfleet_common.errors import TokenizerFailed, Unsupported

FILE = "tokenizer.json"


class Vocabulary:
    """Tells the text of a token, and which tokens are special. Safe to use from several threads."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(
            token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special
        )

    def text(self, token_id: int) -> str:
        """The text that it has by itself; "" for no token."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def is_special(self, token_id: int) -> bool:
        """Whether it is a control token."""
        return token_id in self._special


@lru_cache(maxsize=16)
def vocabulary(path: Path) -> Vocabulary:
    """The vocabulary in a `tokenizer.json`, or in the folder where it lies; read once. It takes a while.

    Raises:
        Unsupported: the extra `tokenizers` is not installed.
        TokenizerFailed: there is no such file, or it is no tokenizer.
    """
    try:
        import tokenizers  # noqa: PLC0415 (an extra)
    except ImportError:
        raise Unsupported(
            "`tokenizers` names a tokenizer, which needs the extra of that name: "
            "pip install 'streamfleet[tokenizers]'",
            feature="tokenizers",
        ) from None
    file = path.expanduser()
    if file.is_dir():
        file /= FILE
    try:
        return Vocabulary(tokenizers.Tokenizer.from_file(str(file)))
    except Exception as error:  # the library has no class for it
        raise TokenizerFailed(f"{file} cannot be read: {error}"[:1000]) from error
