"""The root of everything on the wire, and the bounded values that messages are made of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self, dataclass_transform

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, ValidationError
from pydantic_core import CoreSchema, core_schema

from streamfleet_common import errors

MAX_PROMPT_CHARS = 200_000
MAX_TEXT_CHARS = 4 * 1024 * 1024
"""More fits no result."""
MAX_PROBLEMS = 100
MAX_PROBLEM_CHARS = 300
MAX_FAULTS = 10_000
"""Of more faults each is not even looked at: pydantic tells all of them or none, at 2 µs each."""

_set = object.__setattr__  # the only way into a frozen message

# Sequences are tuples, since messages are frozen; lists are taken too, for JSON knows nothing else.
# What is in them stays strict.
SEQUENCE = Field(strict=False)

# The bound is not only for the length: a string without any may hold lone surrogates, which no encoder takes.
Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS)]
LongText = Annotated[str, Field(max_length=MAX_PROMPT_CHARS)]
Name = Annotated[str, Field(max_length=200)]
Rid = Annotated[str, Field(pattern=r"^[0-9a-f]{34}$")]
Tenant = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
QueueName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Ids = Annotated[tuple[TokenId, ...], SEQUENCE]
Texts = Annotated[tuple[Text, ...], SEQUENCE]
Logprobs = Annotated[tuple[float | None, ...], SEQUENCE]
_Scored = Annotated[tuple[TokenId, float], SEQUENCE]
TopLogprobs = Annotated[tuple[Annotated[tuple[_Scored, ...], SEQUENCE], ...], SEQUENCE]
"""For each place the likeliest tokens and their natural log-probabilities, best first."""


class Said:
    """Annotates a value that may have one of several forms: `wish` is what is said of one that has none.

    Pydantic itself tells for each form why it is not that.
    """

    def __init__(self, wish: str) -> None:
        self._wish = wish

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.custom_error_schema(handler(source), "form", custom_error_message=self._wish)


def problems(error: ValidationError) -> list[str]:
    """Every fault that pydantic found, one line each, without the offending values (they may be private).

    Bounded, since the request may be hostile: at most `MAX_PROBLEMS` lines, then how many more there are.
    """
    if error.error_count() > MAX_FAULTS:
        return [
            f"{error.error_count()} problems, which are too many to be told: look at the kinds of its values"
        ]
    faults = error.errors(include_url=False, include_input=False, include_context=False)
    places = {fault["loc"][:-1] for fault in faults}
    # A list of which no item fits is none too short: pydantic counts those that do.
    faults = [fault for fault in faults if fault["type"] != "too_short" or fault["loc"] not in places]
    found = []
    for fault in faults[:MAX_PROBLEMS]:
        loc = fault["loc"]
        if loc[:1] == ("request",):
            loc = loc[:1] + loc[2:]  # without its kind, which pydantic puts between
        place = ".".join(str(part) for part in loc)
        text = fault["msg"].removeprefix("Value error, ")
        if fault["type"] == "extra_forbidden":
            text = "unknown field; it would have had no effect. Check its spelling"
        elif fault["type"] == "string_unicode":
            text = "holds a lone surrogate, which is not valid Unicode text"
        elif fault["type"] == "union_tag_invalid":
            text = "unknown kind"  # pydantic's own words repeat the value
        elif fault["type"] == "tuple_type":
            text = "Input should be a valid list"  # what everybody writes, and JSON has
        elif fault["type"] in ("too_long", "too_short"):
            text = text.replace("Tuple should", "List should")
        line = f"{place}: {text}" if place else text
        found.append(line if len(line) <= MAX_PROBLEM_CHARS else f"{line[:MAX_PROBLEM_CHARS]}…")
    if len(faults) > MAX_PROBLEMS:
        found.append(f"and {len(faults) - MAX_PROBLEMS} more")
    return found


if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)


# Said again, since checkers without pydantic's plugin look no further than the metaclass itself.
@dataclass_transform(kw_only_default=True, field_specifiers=(Field,))
class _Door(ModelMetaclass):
    """Makes a direct call of a schema raise `InvalidRequest`; nested and decoded ones stay with pydantic."""

    # Unseen by type checkers: they would take its signature, which takes anything, for the schema's own.
    if not TYPE_CHECKING:

        def __call__(cls, *args, **values):  # noqa: N805 (a metaclass has classes as instances)
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                faults = problems(error)
                raise errors.InvalidRequest(
                    f"{cls.__name__} is not valid: {'; '.join(faults)}", problems=faults
                ) from None


class Message(BaseModel, metaclass=_Door):
    """The root of everything on the wire.

    Raises:
        InvalidRequest: when built from values that do not fit, with every problem found.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def changed(self, values: Mapping[str, Any]) -> Self:
        """The same message but for these fields, at a sixth of the cost: none of them is validated."""
        message = type(self).__new__(type(self))
        _set(message, "__dict__", {**self.__dict__, **values})
        _set(message, "__pydantic_fields_set__", self.__pydantic_fields_set__)  # which nobody changes
        _set(message, "__pydantic_extra__", None)
        _set(message, "__pydantic_private__", None)
        return message
