"""Forms made ready to guide answers: JSON schemas, regular expressions, choices.

Forms are followed by the library llguidance (the extra `guided`): it has no dependencies and one wheel for
all Pythons, refuses by name what it does not know, and counts its own work. The other one, xgrammar, wants
torch, transformers and triton, and compiles schemas with constraints that it then ignores; docs/guided.md has
the figures.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, NoReturn

from streamfleet_common.errors import InvalidRequest, Unsupported
from streamfleet_worker.engine.guide_limits import check_regex, check_schema, walk
from streamfleet_worker.engine.guide_matcher import CompiledGuide

try:
    from llguidance import LLTokenizer, TokenizerWrapper, regex_to_lark

    IS_INSTALLED = True
except ImportError:
    IS_INSTALLED = False

if TYPE_CHECKING:
    from streamfleet_common import schemas
    from streamfleet_worker.engine.pieces import Pieces
    from streamfleet_worker.engine.tokenizer import Tokenizer

MAX_GUIDES = 64
MAX_GUIDES_CHARS = 1 << 20
"""Of the forms that are kept, as they came; a guide takes some 100 times that, and 0.5 MB at least."""

# What stands between the parts of a JSON document. Bounded, for models may go on with spaces for ever.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \t\n\r]{1,32}"}
# Or the library would allow one token only where the text is settled: the one that it thinks the tokenizer
# would take. How a text is cut is the model's to choose.
_OPTIONS = '%llguidance {"no_forcing": true}'
_LACKING = {
    r"look-?arounds?\b|look-ahead": "look-around in regular expressions",
    r"backreferences": "backreferences in regular expressions",
    r"Unimplemented keys: \[(.*)\]": "the JSON schema keywords {}",
    r"Unknown format: (.*)": "the JSON schema format {!r}",
    r"oneOf constraints": "oneOf, unless its options exclude each other by a constant",
    r"min/maxProperties": "minProperties and maxProperties beside optional properties",
    r"patternProperty regexes": "patternProperties that may match the same name",
    r"^Resource .* is not present": "$ref to another document",
    r"circular references": "$ref to a schema around it, beside other keywords",
}
_TOO_MUCH = re.compile(
    r"too (large|big|many|complex)|fuel|panic|Unable to determine|Failed to generate|exceed", re.IGNORECASE
)


class GuideCompiler:
    """Makes forms ready for one model; may be used from several threads.

    Compiling takes milliseconds for a usual form, and for the worst that is not refused one to two seconds.
    What was compiled is kept, the least recently used go first.

    Args:
        tokenizer: the model's.
        vocab_size: the model's; it may be above the tokenizer's.
        eos_token_ids: the tokens that end an answer.
        max_guides: so many are kept.
        max_chars: the forms of those that are kept have so many characters together.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        max_guides: int = MAX_GUIDES,
        max_chars: int = MAX_GUIDES_CHARS,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._max_guides = max_guides
        self._max_chars = max_chars
        self._vocabulary: LLTokenizer | None = None
        self._kept: OrderedDict[tuple[str, schemas.Guide], CompiledGuide] = OrderedDict()
        self._chars = 0
        self._making = threading.Lock()
        self._keeping = threading.Lock()

    def compile(self, form: schemas.Guide, scope: str = "") -> CompiledGuide:
        """The guide of a form; one that was compiled in another scope is compiled again.

        Raises:
            InvalidRequest: the form is wrong, or more complex than the limit that is told.
            Unsupported: it has a feature, which is named, that cannot be followed; or the model has no end or
                no text of single tokens; or the library is not installed.
        """
        if not IS_INSTALLED:
            raise Unsupported(
                "this worker cannot guide an answer: install its extra `guided` "
                "(pip install 'streamfleet[guided]')",
                feature="guide",
            )
        with self._keeping:
            guide = self._kept.get((scope, form))
            if guide is not None:
                self._kept.move_to_end((scope, form))
                return guide
        guide = CompiledGuide(self._read_vocabulary(), _grammar(form), self._vocab_size)
        if fault := guide.fault():
            _refuse(form, fault)
        with self._keeping:
            self._keep((scope, form), guide)
        return guide

    def _keep(self, key: tuple[str, schemas.Guide], guide: CompiledGuide) -> None:
        if key not in self._kept:
            self._chars += _length(key[1])
        self._kept[key] = guide
        while len(self._kept) > self._max_guides or self._chars > self._max_chars:
            (_, oldest), _ = self._kept.popitem(last=False)
            self._chars -= _length(oldest)

    def _read_vocabulary(self) -> LLTokenizer:
        with self._making:
            if self._vocabulary is None:
                self._vocabulary = _vocabulary(self._tokenizer, self._vocab_size, self._ends)
            return self._vocabulary


def _vocabulary(tokenizer: Tokenizer, vocab_size: int, ends: Collection[int]) -> LLTokenizer:
    pieces = tokenizer.pieces
    if pieces is None or not ends:
        lack = "tokens have no text of their own" if ends else "vocabulary has no token that ends an answer"
        raise Unsupported(f"answers of this model cannot be guided: its {lack}", feature="guide")
    return LLTokenizer(
        TokenizerWrapper(_Vocabulary(tokenizer, pieces, vocab_size, ends)),
        n_vocab=vocab_size,
        eos_token=sorted(ends),
    )


class _Vocabulary:
    """What the library asks of a tokenizer; the bytes of a token are those that answers show."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, pieces: Pieces, vocab_size: int, ends: Collection[int]) -> None:
        found = map(pieces.__getitem__, range(vocab_size))
        self.tokens = [piece if isinstance(piece, bytes) else piece.encode() for piece in found]
        # None of these is ever taken for text.
        self.special_token_ids = sorted({i for i in tokenizer.special_token_ids if i < vocab_size} | {*ends})
        self.eos_token_id = min(ends)

    def __call__(self, text: str) -> list[int]:
        raise NotImplementedError("only what is forced would be encoded")


def _grammar(form: schemas.Guide) -> str:
    """A form in the library's terms."""
    if form.json_schema is not None:
        schema = _schema(str(form.json_schema))
        check_schema(schema)
        # To the library these are its options, to all others a keyword without a meaning.
        return f"{_OPTIONS}\nstart: %json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}"
    if form.regex is not None:
        check_regex(form.regex)
        return _regex_grammar(form.regex)
    return _regex_grammar("|".join(map(_literal, form.choice or ())))


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"guide.json_schema is not JSON: {error}") from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise InvalidRequest("guide.json_schema is no object, or false: nothing fits it")
    return schema


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _regex_grammar(regex: str) -> str:
    r"""A grammar of one regular expression; `\d` and `\w` are ASCII, as in patterns of a JSON schema."""
    return f"{_OPTIONS}\nstart: /{regex_to_lark(regex, 'dw')}/"


def _literal(text: str) -> str:
    return "".join(char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):X}}}" for char in text)


def _length(form: schemas.Guide) -> int:
    return len(str(form.json_schema or form.regex or "")) + sum(map(len, form.choice or ()))


def _refuse(form: schemas.Guide, said: str) -> NoReturn:
    """Tell what is wrong with a form, and where, by what the library said of it."""
    # Without where it stands in what we have written around it, which is quoted below.
    said = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", said)
    said = re.sub(r"\n +\d+ \| .*", "", said, flags=re.DOTALL)
    field, place = "regex" if form.regex is not None else "choice", ""
    if form.json_schema is not None:
        field = "json_schema"
        place = _place(_schema(str(form.json_schema)), said)
    if marked := re.search(r"\n    (.*)\n    ( *)\^+\n(?:error: )?(.*)", said):
        line, before, said = marked.groups()
        place += f" at {line[len(before) :][:20]!r}"
    else:
        said = said.partition("(in regex): ")[2] or said
        said = said.partition("\n")[0]
    for pattern, named in _LACKING.items():
        if match := re.search(pattern, said):
            feature = named.format(*match.groups())
            raise Unsupported(f"guide.{field}{place}: {feature} cannot be followed", feature=feature)
    way_out = ": it is too large or too complex, make it simpler" if _TOO_MUCH.search(said) else ""
    raise InvalidRequest(f"guide.{field}{place}: {said[:300]}{way_out}")


def _place(schema: Any, said: str) -> str:
    """The JSON pointer of the first thing that the library mentions; "" if there is none."""
    for place, key, value in walk(schema):
        named = value.lstrip("#") if isinstance(value, str) else ""
        if (
            f'"{key}"' in said
            or f"'{key}'" in said
            or (named and key in ("format", "pattern", "$ref") and named in said)
            or (key == "type" and said.endswith(f"type: {named}"))
            # Only keywords are spelled so, and never quoted.
            or (not key.islower() and re.search(rf"\b{re.escape(key)}\b", said))
        ):
            return place
    return ""
