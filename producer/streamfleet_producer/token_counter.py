"""The token counter: a model's tokenizer on the producer's side, to count requests before they are queued."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from streamfleet_common.errors import TokenizerFailed, Unsupported
from streamfleet_common.token_count import TokenCount

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamfleet_common.cards import Card
    from streamfleet_common.schemas import Request

FILE = "tokenizer.json"


class TokenCounter:
    """Counts the tokens of requests as a model's worker does; safe to use from several threads.

    Args:
        source: the model's tokenizer, of the `tokenizers` library. It is not changed.
    """

    def __init__(self, source: Any) -> None:
        # As in the worker: the spelling of a control token is text like any other.
        self._tokenizer = type(source).from_str(source.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True

    @classmethod
    def from_file(cls, path: str | Path) -> TokenCounter:
        """A counter by a `tokenizer.json`, or by the folder where it lies: that of the model served.

        Raises:
            Unsupported: the extra `tokenizers` is not installed.
            TokenizerFailed: there is no such file, or it is no tokenizer.
        """
        try:
            import tokenizers  # noqa: PLC0415 (an extra)
        except ImportError:
            raise Unsupported(
                "counting tokens needs the extra `tokenizers`: pip install 'streamfleet[tokenizers]'",
                feature="count_tokens",
            ) from None
        file = Path(path).expanduser()
        if file.is_dir():
            file /= FILE
        if not file.is_file():
            raise TokenizerFailed(
                f"{file} is no file: name the {FILE} of the model, or the folder it lies in"
            )
        try:
            return cls(tokenizers.Tokenizer.from_file(str(file)))
        except Exception as error:  # the library has no class for it
            raise TokenizerFailed(f"{file} cannot be read: {error}"[:1000]) from error

    def count(self, request: Request, card: Card) -> int:
        """Tokens that the worker of this card finds in a request: the `prompt_tokens` of its answer's usage.

        Raises:
            TooLong: the worker would refuse it.
            InvalidRequest: a text has no tokens.
            Unsupported: it cannot be counted here: chat messages, a handler's input, or a worker that does
                not say what it puts around texts.
        """
        if card.layout is None:
            raise Unsupported(
                f"{card.model!r} does not say what its worker puts around a text: submit without counting",
                feature="count_tokens",
            )
        return TokenCount(card.layout, card.limits.max_seq_len, self._encode_piece).of(request)

    def _encode_piece(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._tokenizer.encode(text, add_special_tokens=False).ids if text else ()
        return ids
