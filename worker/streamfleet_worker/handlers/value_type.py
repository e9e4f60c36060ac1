"""What a handler's annotations say that an input or an output is."""

from __future__ import annotations

import json
import math
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any, Literal, Union, get_args, get_origin

import msgpack
from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticInvalidForJsonSchema, PydanticUserError
from pydantic_core import PydanticSerializationError

from streamfleet_common.message import problems
from streamfleet_common.one_shot import MAX_LEVELS, plain_json

MAX_SCHEMA_BYTES = 64 * 1024
MAX_NAME_CHARS = 100
_NIL = b"\xc0"
_CONTAINERS = frozenset((dict, list))
_SCALARS = frozenset((str, bool, int, float, type(None)))
_FLOAT = frozenset((float,))
_UNKNOWN = re.compile(r"Unable to serialize unknown type: <class '([\w.]+)'>")
_ARRAYS = frozenset(("numpy.ndarray", "torch.Tensor"))


class ValueType:
    """A type of JSON values, as pydantic understands the annotation: a model, `str`, `list[float]`, anything.

    Raises:
        PydanticUserError: it can make nothing of it.
    """

    def __init__(self, annotation: Any) -> None:
        self._adapter: TypeAdapter[Any] = TypeAdapter(annotation)
        self._anything = annotation is Any
        self.name = _name(annotation)
        """What to call it, where one reads that something is none."""
        # Its values need no making plain: what is read is what is written.
        self._is_plain = all(one is Any or one in _SCALARS for one in _elements(annotation))

    def read(self, text: bytes) -> Any:
        """The value that a JSON text stands for.

        Raises:
            ValidationError: it is no such value.
        """
        return self._adapter.validator.validate_json(text)

    def write(self, value: Any) -> tuple[Any, int]:
        """The value as plain JSON of its own, and how many bytes that takes on the wire.

        Raises:
            ValueError: it is no such value, or has no place in JSON; without the value in its words. Its
                cause is what code of the user's has raised, if it has.
        """
        try:
            checked = self._adapter.validator.validate_python(value)
            if self._is_plain:
                kind = type(checked)
                if kind in _SCALARS and (kind is not float or math.isfinite(checked)):
                    return checked, len(msgpack.packb(checked))
                if kind is list and _is_flat(checked):
                    return list(checked), len(msgpack.packb(checked))
            dumped = self._adapter.serializer.to_python(checked, mode="json", by_alias=True, warnings="error")
            plain = self._made_plain(dumped, checked)
            packed = msgpack.packb(plain)
        except ValidationError as error:
            raise ValueError("; ".join(map(_of_output, problems(error)))) from None
        except PydanticSerializationError as error:
            raise ValueError(_of_writing(str(error))) from error.__cause__
        except OverflowError:
            raise ValueError("an integer has more than 64 bits") from None
        except UnicodeEncodeError:
            raise ValueError("a text holds a lone surrogate, which is not valid Unicode") from None
        except RecursionError:
            raise ValueError("it is nested too deep") from None
        if _NIL in packed and _has_null(plain):
            # Of what it knows no type for, pydantic makes a null, as if nothing were wrong.
            fault = self._infinite(checked)
            if fault:
                raise ValueError(fault)
        return plain, len(packed)

    def _made_plain(self, dumped: Any, checked: Any) -> Any:
        try:
            return plain_json(dumped)
        except ValueError as error:
            raise ValueError(self._infinite(checked) or str(error)) from None

    def _infinite(self, checked: Any) -> str:
        """Where a value has a number that is not finite; "" if nowhere."""
        return _infinite(self._adapter.dump_python(checked, by_alias=True, warnings=False), ())

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


def _infinite(value: Any, place: tuple[str, ...]) -> str:
    if isinstance(value, float):
        if math.isfinite(value):
            return ""
        number = "NaN" if math.isnan(value) else "infinite"
        return f"{'.'.join(place) or 'the output'} is {number}, and JSON has no such number"
    if len(place) > MAX_LEVELS:
        return ""
    if isinstance(value, dict):
        parts: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        parts = enumerate(value)
    else:
        return ""
    return next((fault for name, part in parts if (fault := _infinite(part, (*place, str(name))))), "")


def _of_output(problem: str) -> str:
    """A line of pydantic's, which says "input" of whatever it reads."""
    if problem.endswith(": Field required"):
        return f"{problem.removesuffix(': Field required')} is missing"
    place, middle, words = f": {problem}".rpartition(": Input should ")
    return f"{place.removeprefix(': ') or 'the output'} should {words}" if middle else problem


def _of_writing(words: str) -> str:
    found = _UNKNOWN.match(words)
    if found is None:
        # What follows a bracket may be the value.
        return words.partition("[")[0].strip()
    library, _, kind = found[1].rpartition(".")
    number = re.match("float|u?int|bool", kind) if library == "numpy" else None
    if found[1] in _ARRAYS:
        advice = "write x.tolist(), or annotate the output"
    elif number is not None:
        advice = f"write {number[0].removeprefix('u')}(x), or annotate the output"
    else:
        advice = "annotate the output, with a type that pydantic knows"
    return f"{found[1]} is no JSON value: {advice}"


def _name(annotation: Any) -> str:
    if annotation is Any:
        return "JSON"
    if isinstance(annotation, type):
        return annotation.__name__
    # Without the modules' names, and those of functions in which classes are made.
    name = re.sub(r"(?:(?:\w+|<locals>)\.)+(?=\w)", "", str(annotation))
    return name if len(name) <= MAX_NAME_CHARS else f"{name[:MAX_NAME_CHARS]}…"


def _elements(annotation: Any) -> Iterator[Any]:
    """What it is, or may be, or is a list of."""
    if get_origin(annotation) in (list, Union, types.UnionType):
        for one in get_args(annotation):
            yield from _elements(one)
    else:
        yield annotation


def _is_flat(values: list[Any]) -> bool:
    """Whether they are texts, finite numbers, booleans and nulls, and nothing else."""
    kinds = set(map(type, values))
    if kinds == _FLOAT:  # most lists are long and hold numbers
        return all(map(math.isfinite, values))
    if not kinds <= _SCALARS:
        return False
    return float not in kinds or all(math.isfinite(one) for one in values if type(one) is float)


def _containers(children: Iterable[Any]) -> list[Any]:
    # Most often none, and told without a step of ours for each child.
    if _CONTAINERS.isdisjoint(map(type, children)):
        return []
    return [child for child in children if type(child) in _CONTAINERS]
