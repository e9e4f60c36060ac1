"""Messages to bytes and back: msgpack maps that carry the protocol's version under `v`.

What comes in is bounded before it is unpacked, validated after, and never passed on as it came.
"""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

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
    fields = _fields(envelope)
    digest = hashlib.sha256(_pack(fields["request"])).hexdigest()[:32]
    return _pack({"v": VERSION, **fields}), digest


def _fields(message: Message) -> dict[str, Any]:
    if isinstance(message, Envelope):
        # Left out here, since pydantic would draw another id to see whether this one is the default.
        fields = {"rid": message.rid, **message.model_dump(exclude_defaults=True, exclude={"rid"})}
        fields["request"]["kind"] = message.request.kind
        return fields
    fields = message.model_dump(exclude_defaults=True)
    for name in ("type", "kind"):
        if name in type(message).model_fields:
            fields[name] = getattr(message, name)
    return fields


def _pack(fields: dict[str, Any]) -> bytes:
    try:
        packed: bytes = msgpack.packb(fields)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidRequest(f"message cannot be encoded ({type(error).__name__}: {error})") from None
    return packed


def decode_envelope(data: bytes, limit: int = MAX_REQUEST_BYTES) -> Envelope:
    """The envelope in `data`, of at most `limit` bytes.

    Raises:
        Undecodable: no msgpack map of a version this side understands, or over the limit.
        InvalidRequest: well-formed, but not a valid request; `problems` lists every fault.
    """
    return _decode(_ENVELOPE, data, limit, "request")


def decode_event(data: bytes, limit: int = MAX_RESULT_BYTES) -> Event:
    """The event in `data`. Raises as `decode_envelope` does."""
    return _decode(_EVENT, data, limit, "event")


def decode_card(data: bytes, limit: int = MAX_REQUEST_BYTES) -> Card:
    """The worker card in `data`. Raises as `decode_envelope` does."""
    return _decode(_CARD, data, limit, "worker card")


def _decode(adapter: TypeAdapter[_M], data: bytes, limit: int, what: str) -> _M:
    fields = unpack(data, limit, what)
    version = fields.pop("v", None)
    if type(version) is not int or abs(version - VERSION) > 1 or version < 1:
        raise Undecodable(
            f"{what} of protocol version {repr(version)[:40]}; this side understands "
            f"{', '.join(str(v) for v in range(max(1, VERSION - 1), VERSION + 2))}: "
            "upgrade the older of the two sides",
            version=str(version)[:40],
        )
    try:
        # A newer peer may send fields that we do not know yet; anybody else's are mistakes.
        return adapter.validate_python(fields, strict=True, extra="ignore" if version > VERSION else "forbid")
    except ValidationError as error:
        faults = problems(error)
        raise InvalidRequest(f"{what} is not valid: {'; '.join(faults)}", problems=faults) from None


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
    if _deeper_than(fields, MAX_DEPTH):
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
    for child in value.values() if isinstance(value, dict) else value:
        kind = type(child)
        if (kind is tuple or kind is dict) and _deeper_than(child, depth - 1):
            return True
    return False
