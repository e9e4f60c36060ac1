"""What goes to a handler and comes from it, between Python's types and JSON."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any, Literal

from pydantic import BaseModel, Secret, SecretBytes, SecretStr, TypeAdapter, ValidationError
from pydantic_core import to_json, to_jsonable_python

from streamfleet_common.errors import GenerationFailed, InvalidRequest
from streamfleet_common.message import problems

MAX_TYPES = 64
MASK = "**********"
_SECRETS = (Secret, SecretStr, SecretBytes)


def plain_input(value: Any) -> Any:
    """A handler's input as JSON: a pydantic model by its aliases, as the handler's schema has them.

    Its secrets are sent as they are, since asterisks would be another input. What a serializer of the
    model's own makes of them is sent instead, if there is one.

    Raises:
        InvalidRequest: the model has no form in JSON.
    """
    if not isinstance(value, BaseModel):
        return value
    try:
        shown = value.model_dump(mode="json", by_alias=True)
        kept = value.model_dump(by_alias=True, warnings=False)
        return _revealed(shown, kept, value.model_config.get("ser_json_bytes", "utf8"))
    except ValueError:  # whose words may quote it
        raise InvalidRequest(f"input: a {type(value).__name__} that has no form in JSON") from None


def _revealed(shown: Any, kept: Any, bytes_as: Literal["utf8", "base64", "hex"]) -> Any:
    """What pydantic shows of a value as JSON, with the secrets that it masks, found in what it keeps of it.

    Raises:
        ValueError: one is a key, or has no form in JSON.
    """
    if isinstance(kept, _SECRETS):
        if shown not in (MASK, str(kept)):
            return shown
        secret: Any = kept.get_secret_value()
        if isinstance(secret, BaseModel):
            return plain_input(secret)
        return to_jsonable_python(secret, bytes_mode=bytes_as)
    if isinstance(shown, dict) and isinstance(kept, Mapping) and len(shown) == len(kept):
        if any(isinstance(key, _SECRETS) for key in kept):
            raise ValueError("a secret is a key")
        pairs = zip(shown.items(), kept.values(), strict=True)
        return {key: _revealed(part, whole, bytes_as) for (key, part), whole in pairs}
    if isinstance(shown, list) and isinstance(kept, Collection) and len(shown) == len(kept):
        return [_revealed(part, whole, bytes_as) for part, whole in zip(shown, kept, strict=True)]
    return shown  # a leaf, or what a serializer for JSON alone has made of it


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
