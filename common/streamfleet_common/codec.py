"""Messages to bytes and back: msgpack maps that carry the protocol's version under `v`.

What comes in is bounded before it is unpacked, validated after, and never passed on as it came.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import msgpack
from pydantic import TypeAdapter, ValidationError

from streamfleet_common.cards import Card
from streamfleet_common.errors import InvalidRequest, Undecodable
from streamfleet_common.message import Message, problems
from streamfleet_common.schemas import Envelope, Event

VERSION = 1
MAX_DEPTH = 16
MAX_REQUEST_BYTES = 256 * 1024
MAX_RESULT_BYTES = 4 * 1024 * 1024
_NO_OPENING = bytes(byte for byte in range(256) if not (0x80 <= byte <= 0x9F or 0xDC <= byte <= 0xDF))
"""Every byte that begins neither a map nor a list in msgpack."""

_CONTAINERS = frozenset((dict, tuple))

_M = TypeVar("_M")
_ENVELOPE: TypeAdapter[Envelope] = TypeAdapter(Envelope)
_EVENT: TypeAdapter[Event] = TypeAdapter(Event)
_CARD: TypeAdapter[Card] = TypeAdapter(Card)


def encode(message: Message) -> bytes:
    """The bytes of a message. Fields at their default are left out, but for the one that names the kind.

    Raises:
        InvalidRequest: a value is none that msgpack knows: an object, an integer of more than 64 bits.
    """
    return _pack({"v": VERSION, **_fields(message)})


def encode_envelope(envelope: Envelope) -> tuple[bytes, str]:
    """The payload of a submission, and the digest of its request.

    The digest is 32 hex digits, equal for equal requests, whatever version of the protocol carries them.
    Raises as `encode` does.
    """
    fields = {"v": VERSION, **_fields(envelope)}
    request = _pack(fields.pop("request"))
    # The request is the last field of its map, so it is packed once and put behind the others. Their map has
    # less than 16 fields, and so a header of one byte that counts them.
    head = _pack(fields)
    digest = hashlib.sha256(request).hexdigest()[:32]
    return b"%c%b\xa7request%b" % (head[0] + 1, head[1:], request), digest


def _fields(message: Message) -> dict[str, Any]:
    kind = type(message)
    fields = _dump(kind)(message)
    if kind is Envelope:
        fields["request"]["kind"] = message.request.kind  # type: ignore[attr-defined]
    for name in _kind_names(kind):
        fields[name] = getattr(message, name)
    return fields


@cache
def _kind_names(kind: type[Message]) -> tuple[str, ...]:
    return tuple(name for name in ("type", "kind") if name in kind.model_fields)


@cache
def _dump(kind: type[Message]) -> Callable[[Any], dict[str, Any]]:
    """What makes a map of a message's fields that are not at their default; of messages within it too.

    It gives what pydantic's `model_dump(exclude_defaults=True)` gives, at a fraction of its cost. As
    dataclasses do with their methods, its source is written for the class: a line or two for each field.
    """
    names: dict[str, Any] = {}
    lines = ["def dump(message):", " values, fields = message.__dict__, {}"]
    for place, (name, field) in enumerate(kind.model_fields.items()):
        default, dumps = f"default{place}", f"dumps{place}"
        names[dumps] = _holder(field.annotation)
        value = "value" if names[dumps] is None else f"{dumps}(value)"
        lines.append(f" value = values[{name!r}]")
        if field.is_required() or (kind is Envelope and name == "rid"):  # another default each time
            lines.append(f" fields[{name!r}] = {value}")
            continue
        names[default] = field.get_default(call_default_factory=True)
        if names[dumps] is None:
            lines.append(f" if value is not {default} and value != {default}: fields[{name!r}] = value")
            continue
        # Two messages are compared as maps: pydantic's own comparison costs more than making the map.
        lines.append(f" if value is not {default}:")
        if names[default] is not None:
            names[default + "_map"] = names[dumps](names[default])
            lines.append(f"  value = {value}")
            lines.append(f"  if value != {default}_map: fields[{name!r}] = value")
        else:
            lines.append(f"  fields[{name!r}] = {value}")
    exec("\n".join([*lines, " return fields"]), names)  # noqa: S102 (of the names of our own fields)
    made: Callable[[Any], dict[str, Any]] = names["dump"]
    return made


def _holder(annotation: Any) -> Callable[[Any], Any] | None:
    """What makes a map of a value, if it is a message; maps, if it is a tuple of messages."""
    if isinstance(annotation, type) and issubclass(annotation, Message):
        return _dump(annotation)
    inners = get_args(annotation)
    if get_origin(annotation) is Union and len(kinds := [kind for one in inners for kind in _kinds(one)]) > 1:
        return _either(kinds)
    for inner in inners:
        dump = _holder(inner)
        if dump is not None:
            if get_origin(annotation) is tuple:
                return lambda messages: tuple([dump(message) for message in messages])
            return dump
    return None


def _kinds(annotation: Any) -> list[type[Message]]:
    """The messages that a part of a union may be: itself, or what it annotates."""
    parts = (annotation, *get_args(annotation))
    return [part for part in parts if isinstance(part, type) and issubclass(part, Message)]


def _either(kinds: list[type[Message]]) -> Callable[[Any], dict[str, Any]]:
    dumps = [(kind, _dump(kind)) for kind in kinds]

    def dump(message: Any) -> dict[str, Any]:
        for kind, dumped in dumps:
            if isinstance(message, kind):
                return dumped(message)
        raise InvalidRequest(f"a request is wanted, not {type(message).__name__}")

    return dump


def _pack(fields: dict[str, Any]) -> bytes:
    try:
        packed: bytes = msgpack.packb(fields)
    except OverflowError:
        raise InvalidRequest("message cannot be encoded: an integer has more than 64 bits") from None
    except UnicodeEncodeError:
        raise InvalidRequest(
            "message cannot be encoded: a text holds a lone surrogate, which is not valid Unicode"
        ) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"message cannot be encoded ({type(error).__name__}: {error})") from None
    return packed


def decode_envelope(data: bytes, limit: int = MAX_REQUEST_BYTES) -> Envelope:
    """The envelope in `data`, of at most `limit` bytes.

    Raises:
        Undecodable: no msgpack map of a version this side understands, or over the limit.
        InvalidRequest: well-formed, but not a valid request; `problems` lists every fault.
    """
    return _decode(_ENVELOPE, data, limit, "request")


def decode_event(data: bytes, limit: int = MAX_RESULT_BYTES, times: Sequence[int] = ()) -> Event:
    """The event in `data`. Raises as `decode_envelope` does.

    `times` are those in the head of a start's or an end's frame: queued, started, now (server ms) and
    attempts. They stand in place of what the event itself says.
    """
    return _decode(_EVENT, data, limit, "event", times)


def decode_card(data: bytes, limit: int = MAX_REQUEST_BYTES) -> Card:
    """The worker card in `data`. Raises as `decode_envelope` does."""
    return _decode(_CARD, data, limit, "worker card")


def _decode(adapter: TypeAdapter[_M], data: bytes, limit: int, what: str, times: Sequence[int] = ()) -> _M:
    fields = unpack(data, limit, what)
    version = fields.pop("v", None)
    if type(version) is not int or abs(version - VERSION) > 1 or version < 1:
        raise Undecodable(
            f"{what} of protocol version {repr(version)[:40]}; this side understands "
            f"{', '.join(str(v) for v in range(max(1, VERSION - 1), VERSION + 2))}: "
            "upgrade the older of the two sides",
            version=str(version)[:40],
        )
    if times:
        _set_times(fields, times)
    try:
        # A newer peer may send fields that we do not know yet; anybody else's are mistakes.
        extra: Literal["ignore", "forbid"] = "ignore" if version > VERSION else "forbid"
        valid: _M = adapter.validator.validate_python(fields, strict=True, extra=extra)
    except ValidationError as error:
        faults = problems(error)
        raise InvalidRequest(f"{what} is not valid: {'; '.join(faults)}", problems=faults) from None
    return valid


def _set_times(fields: dict[str, Any], times: Sequence[int]) -> None:
    kind = fields.get("type")
    if kind == "end":
        (
            fields["queued_at_ms"],
            fields["started_at_ms"],
            fields["ended_at_ms"],
            fields["attempt"],
        ) = times
    elif kind == "start":
        fields["queued_at_ms"], fields["started_at_ms"] = times[:2]


def unpack(data: bytes, limit: int, what: str = "message") -> dict[str, Any]:
    """The msgpack map in `data`, with sequences as tuples; sizes and depth are bounded.

    Raises:
        Undecodable: as its message says.
    """
    if len(data) > limit:
        raise Undecodable(
            f"{what} of {len(data)} bytes is over the limit of {limit}: send less",
            bytes=len(data),
            limit=limit,
        )
    try:
        fields = msgpack.unpackb(
            data,
            use_list=False,
            strict_map_key=True,
            max_str_len=limit,
            max_bin_len=limit,
            max_array_len=limit,
            max_map_len=limit,
            max_ext_len=0,
            ext_hook=_refuse_extension,
        )
    except (ValueError, msgpack.UnpackException, RecursionError, UnicodeDecodeError) as error:
        raise Undecodable(
            f"{what} is not valid msgpack ({type(error).__name__}): encode it as docs/protocol.md says"
        ) from None
    if not isinstance(fields, dict):
        raise Undecodable(f"{what} must be a msgpack map, not {type(fields).__name__}")
    # Most messages hold so few bytes that could open a map or a list that they cannot be too deep.
    if len(data.translate(None, _NO_OPENING)) > MAX_DEPTH and _deeper_than(fields, MAX_DEPTH):
        raise Undecodable(f"{what} is nested deeper than {MAX_DEPTH} levels", limit=MAX_DEPTH)
    return fields


def _refuse_extension(code: int, data: bytes) -> None:
    # An empty one passes the limit of length.
    raise ValueError(f"extension type {code} of {len(data)} bytes")


def _deeper_than(value: Any, depth: int) -> bool:
    # Bounded by its own argument, so a hostile nesting cannot exhaust the stack. Called for containers only:
    # most values are none, and a call for each would cost more than unpacking them.
    if depth == 0:
        return True
    children = value.values() if isinstance(value, dict) else value
    if _CONTAINERS.isdisjoint(map(type, children)):
        return False  # most often so, and told without a step of ours for each child
    for child in children:
        kind = type(child)
        if (kind is tuple or kind is dict) and _deeper_than(child, depth - 1):
            return True
    return False
