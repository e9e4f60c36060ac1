"""A model's tokenizer, with user text kept apart from the model's control tokens."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

import tokenizers

from streamfleet_common.errors import InvalidRequest, TokenizerFailed
from streamfleet_worker.engine.chat_template import ChatTemplate
from streamfleet_worker.engine.incremental_decoder import IncrementalDecoder, PieceDecoder, WindowDecoder
from streamfleet_worker.engine.pair_frame import PairFrame
from streamfleet_worker.engine.pieces import Pieces
from streamfleet_worker.engine.spellings import Marks, Spellings

if TYPE_CHECKING:
    from streamfleet_common.chat import ChatMessage, Tool

LONG_CHARS = 2000
"""A text this long takes a millisecond; meanwhile other threads of the interpreter should run."""


class Tokenizer:
    """Text to token ids and back; safe to use from several threads.

    In user text the spelling of a control token ("<|im_end|>") is text like any other: nobody can close
    their own turn or open another's by writing it.

    Args:
        source: a transformers tokenizer backed by the `tokenizers` library.

    Raises:
        TokenizerFailed: it is of another kind.
    """

    def __init__(self, source: Any) -> None:
        backend = getattr(source, "backend_tokenizer", None)
        if not isinstance(backend, tokenizers.Tokenizer):
            raise TokenizerFailed(
                f"{type(source).__name__} is not backed by the tokenizers library: save the model with a "
                "tokenizer.json (tokenizer.save_pretrained with a fast tokenizer)"
            )
        self._source = source
        # Two copies, since whether control tokens are recognised is a state of the tokenizer, and one that
        # other threads would see change.
        self._control = tokenizers.Tokenizer.from_str(backend.to_str())
        self._plain = tokenizers.Tokenizer.from_str(backend.to_str())
        for copy in (self._control, self._plain):
            copy.no_truncation()
            copy.no_padding()
        self._control.encode_special_tokens = False
        self._plain.encode_special_tokens = True
        self._special = {
            token.content: token_id
            for token_id, token in backend.get_added_tokens_decoder().items()
            if token.special
        }
        self._special_ids = frozenset(self._special.values())
        try:
            self.pieces: Pieces | None = Pieces(self._control)
        except ValueError:
            self.pieces = None
        self._opening = self._find_opening()
        self._bos: int | None = source.bos_token_id
        self._unknown: int | None = source.unk_token_id
        self._spellings = Spellings(self._special)
        self._template = ChatTemplate(source)

    @property
    def has_chat_template(self) -> bool:
        """Whether `render` can work."""
        return self._template.exists

    @property
    def tells_types(self) -> bool:
        """Whether its model was trained to be told which text of a pair a token belongs to."""
        return "token_type_ids" in self._source.model_input_names

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Control tokens: they have an effect, and a text only where it is asked for."""
        return self._special_ids

    def encode(self, text: str) -> list[int]:
        """Ids of user text, with the begin-of-text token if the model wants one."""
        return _ids(self._plain, text, with_special=True)

    def encode_piece(self, text: str) -> list[int]:
        """Ids of text that stands somewhere within a prompt; no token is added."""
        return _ids(self._plain, text) if text else []

    def around(self, *, pair: bool = False) -> int:
        """How many tokens `encode` puts around a text; or the model wants around two, and between them."""
        return int(self._plain.num_special_tokens_to_add(is_pair=pair))

    def pair_frame(self) -> PairFrame:
        """What the model wants around two texts that it reads together.

        Raises:
            Unsupported: its tokenizer does not say.
        """
        return PairFrame.of(self._plain)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of token ids; ids that are no token have none."""
        return str(self._control.decode(list(token_ids), skip_special_tokens=skip_special))

    def decoder(self, context: Sequence[int] = (), *, skip_special: bool = True) -> IncrementalDecoder:
        """A decoder of the tokens that come after these."""
        hidden = self._special_ids if skip_special else frozenset()

        def is_shown(token_id: int) -> bool:
            return token_id not in hidden and self._control.id_to_token(token_id) is not None

        # A few tokens tell whether there is text, and how it ends.
        tail = list(islice(filter(is_shown, reversed(context)), 6))[::-1]
        if self.pieces is not None:
            return PieceDecoder(self.pieces, hidden, tail)
        return WindowDecoder(partial(self.decode, skip_special=skip_special), is_shown, tail)

    def texts(self, token_ids: Sequence[int]) -> list[str]:
        """The text of a prompt by token, control tokens included.

        A character that is spread over several tokens stands at the last of them.
        """
        decoder = self.decoder(skip_special=False)
        texts = [decoder.push(token_id) for token_id in token_ids]
        if texts:
            texts[-1] += decoder.flush()
        return texts

    def opening(self, token_ids: Sequence[int]) -> int:
        """How many tokens at the start of a prompt only say that a text begins.

        They are those that `encode` puts before every text; else the begin-of-text token, unless it comes
        again further on: then it opens turns, not the text.
        """
        begun = len(self._opening)
        if begun and tuple(token_ids[:begun]) == self._opening:
            return begun
        return int(bool(token_ids) and token_ids[0] == self._bos and self._bos not in token_ids[1:])

    def spellings(self, word: str) -> set[tuple[int, ...]]:
        """The runs of tokens that spell a word behind other text: as it stands, and behind a space.

        A word that begins with a space of its own gets no other. Empty for what the vocabulary cannot spell.
        """
        before = self.encode_piece("\n")
        runs = set()
        for spelling in (word,) if word[:1].isspace() else (word, f" {word}"):
            # The first space of a text is special to many tokenizers, so the word may not come first.
            ids = self.encode_piece(f"\n{spelling}")
            is_apart = ids[: len(before)] == before
            runs.add(tuple(ids[len(before) :] if is_apart else self.encode_piece(spelling)))
        return {run for run in runs if run and self._unknown not in run}

    def _find_opening(self) -> tuple[int, ...]:
        piece, ids = self.encode_piece("a"), self.encode("a")
        place = next((i for i in range(len(ids)) if ids[i : i + len(piece)] == piece), 0)
        return tuple(ids[:place])

    def render(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] = ()) -> list[int]:
        """Ids of a chat in the model's own template, up to where the assistant's turn begins.

        Raises:
            Unsupported: the model has no chat template, or one that would leave out tools or calls.
            InvalidRequest: the template refuses these messages, or does something with a text that
                spells a control token which we cannot follow.
        """
        marks = Marks()
        marked = self._template.render(messages, tools, partial(self._spellings.mark, marks=marks))
        if not marks:
            return _ids(self._control, marked)
        # Rendered once more, to see what the template makes of the texts themselves.
        parts = marks.split(marked)
        text = self._template.render(messages, tools, str)
        if "".join(part for part, _ in parts) == text:
            return self._ids_of(parts)
        own = sum(self._spellings.count(part) for part, is_plain in parts if not is_plain)
        if any(map(self._spellings.count, marks.texts)) or self._spellings.count(text) != own:
            raise InvalidRequest(
                "a message spells a control token of this model, and its chat template rewrites "
                "messages: leave the control token out"
            )
        # Nothing but what might have become one beside other text, and has not.
        return _ids(self._control, text)

    def user_turn(self) -> tuple[list[int], list[int]]:
        """Ids of what a chat has before the text of its only turn, a user's, and behind it up to the answer.

        Raises:
            InvalidRequest: the template refuses such a chat, or does not show its text once and whole.
        """
        mark = f"mark{secrets.token_hex(8)}"
        parts = self._template.text([{"role": "user", "content": mark}]).split(mark)
        if len(parts) != 2:
            raise InvalidRequest("the model's chat template does not show a message once and whole")
        before, behind = (self._control.encode(part, add_special_tokens=False).ids for part in parts)
        return before, behind

    def _ids_of(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Ids of a template's text, of whose parts some (True) are plain whatever they spell.

        It is done as the tokenizer itself does it: the text is split at control tokens, and what lies
        between is encoded piece by piece.
        """
        ids: list[int] = []
        pending = ""
        for part, is_plain in parts:
            start = 0
            for begin, end in () if is_plain else self._spellings.find(part):
                ids += self.encode_piece(pending + part[start:begin])
                ids.append(self._special[part[begin:end]])
                pending, start = "", end
            pending += part[start:]
        return ids + self.encode_piece(pending)


def _ids(backend: tokenizers.Tokenizer, text: str, *, with_special: bool = False) -> list[int]:
    if len(text) < LONG_CHARS:
        encoding = backend.encode(text, add_special_tokens=with_special)
    else:
        # As a batch of one: a single text holds the interpreter until it is done.
        (encoding,) = backend.encode_batch_fast([text], add_special_tokens=with_special)
    ids: list[int] = encoding.ids
    return ids
