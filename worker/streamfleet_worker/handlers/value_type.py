"""What a handler's annotations say that an input or an output is."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any, Literal

import msgpack
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError
from pydantic_core import PydanticSerializationError

from streamfleet_common.message import problems
from streamfleet_common.one_shot import plain_json

MAX_SCHEMA_BYTES = 64 * 1024
_NIL = b"\xc0"
_CONTAINERS = frozenset((dict, list))


class ValueType:
    """A type of JSON values, as pydantic understands the annotation: a model, `str`, `list[float]`, anything.

    Raises:
        PydanticUserError: it can make nothing of it.
    """

    def __init__(self, annotation: Any) -> None:
        self._adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        self._anything = annotation is Any

    def read(self, text: bytes) -> Any:
        """The value that a JSON text stands for.

        Raises:
            ValidationError: it is no such value.
        """
        return self._adapter.validator.validate_json(text)

    def write(self, value: Any) -> tuple[Any, int]:
        """The value as plain JSON of its own, and how many bytes that takes on the wire.

        Raises:
            ValueError: it is no such value, or has no place in JSON; without the value in its words.
        """
        try:
            checked = self._adapter.validator.validate_python(value)
            dumped = self._adapter.serializer.to_python(checked, mode="json", by_alias=True, warnings="error")
            plain = plain_json(dumped)
            packed = msgpack.packb(plain)
        except ValidationError as error:
            raise ValueError("; ".join(problems(error))) from None
        except PydanticSerializationError as error:
            # What follows a bracket may be the value.
            raise ValueError(str(error).partition("[")[0].strip()) from None
        except OverflowError:
            raise ValueError("an integer has more than 64 bits") from None
        except UnicodeEncodeError:
            raise ValueError("a text holds a lone surrogate, which is not valid Unicode") from None
        except RecursionError:
            raise ValueError("it is nested too deep") from None
        if (
            _NIL in packed
            and _has_null(plain)
            and not _is_finite(self._adapter.dump_python(checked, warnings=False))
        ):
            # Of what it knows no type for, pydantic makes a null, as if nothing were wrong.
            raise ValueError("a number is not finite")
        return plain, len(packed)

    def schema(self, mode: Literal["validation", "serialization"]) -> str:
        """Its JSON schema; "" if it takes anything, has none, or one that is too large to be shown."""
        if self._anything:
            return ""
        try:
            text = json.dumps(self._adapter.json_schema(mode=mode), ensure_ascii=False, separators=(",", ":"))
        except (PydanticInvalidForJsonSchema, PydanticUserError):
            return ""
        return text if len(text.encode()) <= MAX_SCHEMA_BYTES else ""


def _has_null(value: Any) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else (value,)
    return None in children or any(map(_has_null, _containers(children)))


def _is_finite(value: Any) -> bool:
    if isinstance(value, float):
        return math.isfinite(value)
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    return not isinstance(value, list | tuple | set | frozenset) or all(map(_is_finite, value))


def _containers(children: Iterable[Any]) -> list[Any]:
    # Most often none, and told without a step of ours for each child.
    if _CONTAINERS.isdisjoint(map(type, children)):
        return []
    return [child for child in children if type(child) in _CONTAINERS]
