"""What goes to a handler and comes from it, between Python's types and JSON."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic_core import to_json

from streamfleet_common.errors import GenerationFailed, InvalidRequest
from streamfleet_common.message import problems

MAX_TYPES = 64


def plain_input(value: Any) -> Any:
    """A handler's input as JSON: a pydantic model by its aliases, as the handler's schema has them.

    Raises:
        InvalidRequest: the model has no form in JSON.
    """
    if not isinstance(value, BaseModel):
        return value
    try:
        return value.model_dump(mode="json", by_alias=True)
    except ValueError:  # whose words may quote it
        raise InvalidRequest(f"input: a {type(value).__name__} that has no form in JSON") from None


def typed_output(handler: str, value: Any, wanted: Any) -> Any:
    """A handler's output as a value of the type `wanted`; as it is, if that is None.

    Raises:
        GenerationFailed: it is none. It does not repeat the output.
    """
    if wanted is None:
        return value
    try:
        adapter = _adapter(wanted)
    except TypeError:  # a type without a hash is rare, and only costs the making of another
        adapter = TypeAdapter(wanted)
    try:
        # As JSON, which knows neither tuples nor times, and so takes lists and texts for them.
        return adapter.validate_json(to_json(value))
    except ValidationError as error:
        faults = problems(error)
        raise GenerationFailed(
            f"the output of handler {handler!r} is not of the type that was asked for: {'; '.join(faults)}",
            problems=faults,
        ) from None


@lru_cache(MAX_TYPES)
def _adapter(wanted: Any) -> TypeAdapter[Any]:
    return TypeAdapter(wanted)
