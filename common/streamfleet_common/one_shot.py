"""One-shot work: texts to vectors, labels or an order, and what a handler of one's own makes of its input.

A request holds many items, which may run in several batches; its answer comes whole.
"""

from __future__ import annotations

import base64
import math
import sys
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, model_validator

from streamfleet_common.message import SEQUENCE, LongText, Message, Name, Text

MAX_ITEMS = 1024
"""Texts, pairs or documents of one request."""
MAX_DIMENSIONS = 65_536
MAX_LEVELS = 14
"""Lists and maps within each other, in what a handler takes and gives: what messages have room for."""

Pooling = Literal["cls", "mean", "last"]
Side = Literal["left", "right"]

_SCALARS = frozenset((str, bool, int, type(None)))


def plain_json(value: Any, levels: int = MAX_LEVELS) -> Any:
    """The same JSON value, with lists where the wire has tuples.

    Args:
        value: it.
        levels: lists and maps within each other, at most.

    Raises:
        ValueError: it is none, or nested deeper.
    """
    kind = type(value)
    if kind is dict or kind is list or kind is tuple:
        if not levels:
            raise ValueError(f"it is nested deeper than {MAX_LEVELS} levels")
        if kind is not dict:
            # Most lists are long and hold numbers.
            if set(map(type, value)) == {float} and all(map(math.isfinite, value)):
                return list(value)
            return [plain_json(part, levels - 1) for part in value]
        if all(type(name) is str for name in value):
            return {name: plain_json(part, levels - 1) for name, part in value.items()}
    elif kind in _SCALARS or (kind is float and math.isfinite(value)):
        return value
    raise ValueError(
        "a JSON value is wanted: text, finite numbers, true, false, null, lists, and maps with text as keys"
    )


Json = Annotated[Any, BeforeValidator(plain_json)]
"""A JSON value, as Python has it."""

if TYPE_CHECKING:
    # Whoever builds a request may write a list; what it then holds is a tuple all the same.
    _Texts = Sequence[str]
    _Pairs = Sequence[str]
else:
    _Texts = Annotated[tuple[LongText, ...], Field(strict=False, min_length=1, max_length=MAX_ITEMS)]
    _Pairs = Annotated[tuple[LongText, ...], Field(strict=False, max_length=MAX_ITEMS)]


# --- requests


class EmbedRequest(Message):
    """Texts to be turned into vectors."""

    kind: Literal["embed"] = "embed"
    model: Name | None = None
    """When given, the queue must serve this model."""
    texts: _Texts
    pooling: Pooling | None = None
    """What of the tokens' vectors makes the text's: the first one, their mean, the last one. None is the
    model's own way."""
    normalize: bool | None = None
    """Scale each vector to length 1; None is the model's own way."""
    dimensions: int | None = Field(default=None, ge=1, le=MAX_DIMENSIONS)
    """Keep so many of each vector's first numbers, before it is normalized. For models trained for it."""
    truncate: bool = False
    """Cut texts that are too long for the model; the usage says how many, and by how much. Else refused."""
    truncate_side: Side = "right"
    """Where tokens are cut: "right" keeps the start of the text, "left" its end."""

    @property
    def n(self) -> int:
        """Rows of a batch that it takes."""
        return len(self.texts)

    @model_validator(mode="after")
    def _worded(self) -> EmbedRequest:
        _refuse_empty("texts", self.texts)
        return self


class ClassifyRequest(Message):
    """Texts, or pairs of texts, to be given labels."""

    kind: Literal["classify"] = "classify"
    model: Name | None = None
    """When given, the queue must serve this model."""
    texts: _Texts
    pairs: _Pairs = ()
    """For models that read two texts: the second of each pair, one for each of `texts`."""
    multi_label: bool | None = None
    """Each label has a probability of its own (true), or all of them share one (false); None is the model's
    own way."""
    top_k: int | None = Field(default=None, ge=1)
    """Tell the k likeliest labels only."""
    truncate: bool = False
    """Cut texts that are too long for the model, of a pair the longer one; the usage says how many, and by
    how much. Else refused."""
    truncate_side: Side = "right"
    """Where tokens are cut: "right" keeps the start of the text, "left" its end."""

    @property
    def n(self) -> int:
        """Rows of a batch that it takes."""
        return len(self.texts)

    @model_validator(mode="after")
    def _worded(self) -> ClassifyRequest:
        _refuse_empty("texts", self.texts)
        _refuse_empty("pairs", self.pairs)
        if self.pairs and len(self.pairs) != len(self.texts):
            raise ValueError(f"{len(self.pairs)} pairs for {len(self.texts)} texts: give one each, or none")
        return self


class RerankRequest(Message):
    """Documents to be put in the order in which they answer a query."""

    kind: Literal["rerank"] = "rerank"
    model: Name | None = None
    """When given, the queue must serve this model."""
    query: LongText
    documents: _Texts
    top_n: int | None = Field(default=None, ge=1)
    """Tell the n best only."""
    raw_scores: bool = False
    """Tell the model's own scores, which have no bounds, and not their sigmoid."""
    truncate: bool = False
    """Cut documents that are too long beside the query, which is never cut; the usage says how many, and by
    how much. Else refused."""
    truncate_side: Side = "right"
    """Where tokens are cut: "right" keeps the start of the document, "left" its end."""

    @property
    def n(self) -> int:
        """Rows of a batch that it takes."""
        return len(self.documents)

    @model_validator(mode="after")
    def _worded(self) -> RerankRequest:
        if not self.query or self.query.isspace():
            raise ValueError("query is empty: there is nothing to answer")
        _refuse_empty("documents", self.documents)
        return self


class CallRequest(Message):
    """An input for a handler that somebody wrote, who knows what becomes of it."""

    kind: Literal["call"] = "call"
    handler: Annotated[Name, Field(min_length=1)]
    """The queue must serve it."""
    input: Json
    """What its input model takes."""

    @property
    def n(self) -> int:
        """Rows of a batch that it takes."""
        return 1

    @property
    def model(self) -> str:
        """What the queue must serve."""
        return self.handler


def _refuse_empty(name: str, texts: Sequence[str]) -> None:
    for place, text in enumerate(texts):
        if not text or text.isspace():
            raise ValueError(f"{name}.{place} is empty: there is nothing to read")


# --- answers


class Embedding(Message):
    """A text's vector. In JSON its bytes are base64, of the alphabet that URLs may hold."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    data: Annotated[bytes, Field(min_length=4, max_length=4 * MAX_DIMENSIONS)]
    """Its numbers as float32, little-endian."""

    @property
    def vector(self) -> array[float]:
        """Its numbers; numpy takes it without a copy."""
        numbers = array("f", self.data)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers

    @property
    def numbers(self) -> list[float]:
        """Its numbers for JSON: nine digits tell a float32 from any other, and more would say nothing."""
        return [float(f"{number:.9g}") for number in self.vector]

    @property
    def base64(self) -> str:
        """`data` in base64, as OpenAI's `encoding_format` has it."""
        return base64.b64encode(self.data).decode()

    @property
    def dimensions(self) -> int:
        return len(self.data) // 4

    @model_validator(mode="after")
    def _whole(self) -> Embedding:
        if len(self.data) % 4:
            raise ValueError(f"{len(self.data)} bytes are no whole number of float32")
        return self


class Label(Message):
    """A label that a text has, and how likely that is."""

    label: Text
    score: float
    """A probability."""


class Classification(Message):
    """A text's labels."""

    labels: Annotated[tuple[Label, ...], SEQUENCE]
    """The likeliest first; of equals in the model's order."""

    @property
    def label(self) -> str:
        """The likeliest."""
        return self.labels[0].label


class Rank(Message):
    """A document in its place."""

    index: int = Field(ge=0)
    """The document's place in the request."""
    score: float
    """How well it answers the query."""


class HandlerCard(Message):
    """How a handler is called."""

    input_schema: Text = ""
    """JSON schema of its input; "" says nothing."""
    output_schema: Text = ""
    """JSON schema of its output, or of each part of it; "" says nothing."""
    streams: bool = False
    """Its output comes in parts."""
