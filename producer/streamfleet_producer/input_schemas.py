"""Input schemas: whether a handler would take an input, told from the JSON schema on its worker's card."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from streamfleet_common.message import MAX_PROBLEM_CHARS

if TYPE_CHECKING:
    import jsonschema_rs

MAX_SCHEMAS = 64
MAX_PROBLEMS = 10
MAX_SEARCHED = 4096
"""Values within an input of which every fault is told, which takes microseconds each; of a larger input the
first is told alone, or 120,000 wrong numbers would hold up the caller for a second."""
MAX_PLACE_CHARS = 100
_VALUE = "the value"


class InputSchemas:
    """Compiled schemas, `MAX_SCHEMAS` of them: those that were used last.

    Nothing that a schema says makes this side open a file or a connection, or match a pattern in more than
    linear time. A schema that cannot be read here refuses nothing: the worker knows how to.
    """

    def __init__(self) -> None:
        self._compiled: OrderedDict[str, jsonschema_rs.Validator | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._compiled)

    def faults(self, schema: str, value: Any) -> list[str]:
        """Everything that is wrong with a value, `MAX_PROBLEMS` lines at most; none if the schema fits.

        The lines say where, but do not repeat the value, which may be private.
        """
        import jsonschema_rs  # noqa: PLC0415 - 15 MB, for who calls handlers alone

        validator = self._validator(schema)
        try:
            if validator is None or validator.is_valid(value):
                return []
            if _is_large(value):
                validator.validate(value)
            errors = list(islice(validator.iter_errors(value), MAX_PROBLEMS + 1))
        except jsonschema_rs.ValidationError as error:
            return [f"{_line(error)}, and maybe more"]
        except ValueError:
            return []  # a value that the wire does not take either, and that is refused there
        lines = list(dict.fromkeys(map(_line, errors[:MAX_PROBLEMS])))
        return [*lines, "and more"] if len(errors) > MAX_PROBLEMS else lines

    def _validator(self, schema: str) -> jsonschema_rs.Validator | None:
        if schema in self._compiled:
            self._compiled.move_to_end(schema)
        else:
            self._compiled[schema] = _compile(schema)
            if len(self._compiled) > MAX_SCHEMAS:
                self._compiled.popitem(last=False)
        return self._compiled[schema]


def _compile(schema: str) -> jsonschema_rs.Validator | None:
    import jsonschema_rs  # noqa: PLC0415 - 15 MB, for who calls handlers alone

    try:
        return jsonschema_rs.validator_for(
            json.loads(schema),
            mask=_VALUE,
            retriever=_refuse,
            pattern_options=jsonschema_rs.RegexOptions(),
        )
    except (ValueError, RecursionError, jsonschema_rs.ReferencingError):
        return None


def _refuse(uri: str) -> Any:
    raise ValueError(f"{uri} is not fetched")


def _is_large(value: Any) -> bool:
    unseen, count = [value], 0
    while unseen:
        one = unseen.pop()
        children = one.values() if isinstance(one, dict) else one if isinstance(one, list | tuple) else ()
        count += len(children)
        if count > MAX_SEARCHED:
            return True
        unseen.extend(children)
    return False


def _line(error: jsonschema_rs.ValidationError) -> str:
    place = ".".join(map(str, ("input", *error.instance_path)))
    if len(place) > MAX_PLACE_CHARS:
        place = f"{place[:MAX_PLACE_CHARS]}…"
    line = f"{place}: {_words(error)}"
    return line if len(line) <= MAX_PROBLEM_CHARS else f"{line[:MAX_PROBLEM_CHARS]}…"


def _words(error: jsonschema_rs.ValidationError) -> str:
    ways: Sequence[Sequence[jsonschema_rs.ValidationError]] = getattr(error.kind, "context", ())
    # Of "any of these" the words of each, since those of the whole say nothing.
    told = dict.fromkeys(way[0].message for way in ways if way)
    return ", and ".join(told) or error.message
