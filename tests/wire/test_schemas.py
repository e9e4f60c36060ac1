"""The schemas that are printed, held against messages, and against the models that they are made of."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from typer.testing import CliRunner

from streamfleet_common import codec, wire_schemas
from streamfleet_common.cards import Card
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.schemas import Envelope, Event
from streamfleet_common.scripts import Script
from streamfleet_producer.cli.app import app
from wire.examples import EVENTS, MESSAGES, REQUESTS

ADAPTERS: dict[str, TypeAdapter[Any]] = {
    "envelope": TypeAdapter(Envelope),
    "event": TypeAdapter(Event),
    "card": TypeAdapter(Card),
}
DECODERS: dict[str, Callable[[bytes], Any]] = {
    "envelope": codec.decode_envelope,
    "event": codec.decode_event,
    "card": codec.decode_card,
}


def family(name: str) -> str:
    """Which of the three doors a message goes through."""
    return "event" if name in EVENTS else name.partition(" ")[0]


def _type(validator: Any, wanted: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if "contentEncoding" in schema:
        # On the wire such a string is bytes; their number is said in words.
        if not isinstance(instance, bytes) or not instance or len(instance) % 4:
            yield jsonschema.ValidationError("bytes are wanted")
        return
    yield from jsonschema.Draft202012Validator.VALIDATORS["type"](validator, wanted, instance, schema)


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    # In JSON Schema `$` is the very end; in Python's `re` a line feed may follow it.
    python = pattern.replace("$", r"\Z")
    yield from jsonschema.Draft202012Validator.VALIDATORS["pattern"](validator, python, instance, schema)


# Numbers keep their type on the wire: 7.0 is no integer.
TYPES = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine(
    "integer", lambda _, value: isinstance(value, int) and not isinstance(value, bool)
)
Validator = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
    jsonschema.Draft202012Validator, {"type": _type, "pattern": _pattern}, type_checker=TYPES
)


def validator(name: str) -> Any:
    made = wire_schemas.schema(name)
    jsonschema.Draft202012Validator.check_schema(made)
    return Validator(json.loads(json.dumps(made)))


VALIDATORS = {name: validator(name) for name in wire_schemas.names()}


def faults(name: str, fields: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}"[:200] for error in VALIDATORS[name].iter_errors(fields)]


# --- what is sent


@pytest.mark.parametrize("name", MESSAGES)
def test_real_messages_fit_their_schemas(name: str) -> None:
    fields = MESSAGES[name]
    message = DECODERS[family(name)](msgpack.packb(fields))
    sent = msgpack.unpackb(codec.encode(message))
    assert faults(family(name), fields) == []
    assert faults(family(name), sent) == []
    if name in EVENTS:
        assert faults(name, sent) == []
        assert all(faults(other, sent) for other in EVENTS if other != name)
    if family(name) == "envelope":
        kind = name.rpartition(" ")[2]
        assert faults(kind, sent["request"]) == []
        assert all(faults(other, sent["request"]) for other in REQUESTS if other != kind)


@pytest.mark.parametrize("name", MESSAGES)
def test_the_examples_have_every_field(name: str) -> None:
    """Else what follows would prove less than it seems to."""
    message = DECODERS[family(name)](msgpack.packb(MESSAGES[name]))
    left_out = set(type(message).model_fields) - set(MESSAGES[name])
    assert left_out == set()
    if isinstance(message, Envelope):
        kind = name.rpartition(" ")[2]
        left_out = set(type(message.request).model_fields) - set(REQUESTS[kind])
        # Of several ways to say the same one is there.
        assert left_out <= {"prompt", "prompt_token_ids", "state_json", "messages"}


def test_what_is_at_its_default_may_be_left_out() -> None:
    assert faults("envelope", {"v": 1, "request": {"prompt": "Hi"}}) == []
    assert faults("generate", {"prompt": "Hi"}) == []
    assert faults("end", {"v": 1, "type": "end", "state": "cancelled"}) == []


# --- what is not

BROKEN: list[tuple[str, dict[str, Any]]] = [
    ("generate", {"prompt": "Hi", "max_tokens": 0}),
    ("generate", {"prompt": "Hi", "max_tokens": "most"}),
    ("generate", {"prompt": "Hi", "max_tokens": 7.0}),
    ("generate", {"prompt": "Hi", "max_tokens": True}),
    ("generate", {"prompt": "Hi", "maxtokens": 7}),
    ("generate", {"prompt": "Hi", "messages": [{"role": "user", "content": "a"}]}),
    ("generate", {"prompt": "Hi", "sampling": {"temperature": -1}}),
    ("generate", {"prompt": "Hi", "sampling": {"logit_bias": [[1, 2.0]] * 1001}}),
    ("generate", {"prompt": "Hi", "top_logprobs": 2}),
    ("generate", {"prompt": "Hi", "guide": {"regex": "a", "choice": ["b"]}}),
    ("generate", {"prompt": "Hi", "guide": {"regex": "a"}, "ignore_eos": True}),
    ("generate", {"prompt": " \n"}),
    ("generate", {"prompt_token_ids": []}),
    ("generate", {}),
    ("embed", {"texts": ["a"]}),
    ("embed", {"kind": "embed", "texts": []}),
    ("embed", {"kind": "embed", "texts": ["a", " "]}),
    ("decide", {"kind": "decide", "state": "a", "state_json": "{}"}),
    ("envelope", {"request": {"prompt": "Hi"}}),
    ("envelope", {"v": 2, "request": {"prompt": "Hi"}}),
    ("envelope", {"v": 1, "rid": "00", "request": {"prompt": "Hi"}}),
    ("envelope", {"v": 1, "lane": "fast", "request": {"prompt": "Hi"}}),
    ("envelope", {"v": 1, "request": {"kind": "call", "handler": "h"}}),
    ("event", {"v": 1, "state": "done"}),
    ("event", {"v": 1, "type": "end", "state": "over"}),
    ("delta", {"v": 1, "type": "delta", "token_ids": [-1], "texts": ["a"]}),
    ("card", {"v": 1, "worker": "w", "queue": "a b", "model": "m", "limits": {}}),
]


@pytest.mark.parametrize(("name", "fields"), BROKEN)
def test_broken_messages_do_not_fit(name: str, fields: dict[str, Any]) -> None:
    assert faults(name, fields)


# --- the same verdict as the models'

# Forms that Python's callers may use, and that are made into those of the wire at once: any map or value
# where a JSON document as text is sent, maps of numbers where pairs are.
LENIENT = {"json_schema", "state_json", "parameters", "arguments", "logit_bias", "temperatures"}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to everything within a value."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, part in parts:
        yield (*path, name)
        yield from places(part, (*path, name))


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 300)
    | st.sampled_from([2**31 - 1, 2**31, 2**63 - 1, 70_000, 1024, 604_800_001])
    | st.floats(-2, 2, allow_nan=False)
    | st.sampled_from([0.0, 1.0, 100.5, 1000.5])
    | st.text(max_size=3)
    | st.sampled_from(["", " ", "\n", "fit", "yes", "normal", "x" * 65, "x" * 201, "A.b_c-1\n"])
    | st.sampled_from([b"", b"\0" * 4, b"\0" * 3])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)


@st.composite
def mutants(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A message with a few things changed, left out or added."""
    name = draw(st.sampled_from(sorted(MESSAGES)))
    fields = copy.deepcopy(MESSAGES[name])
    if draw(st.booleans()):
        lists = [path for path in places(fields) if isinstance(_at(fields, path), list)]
        if lists:
            grown = _at(fields, draw(st.sampled_from(lists)))
            grown *= draw(st.sampled_from([0, 9, 129, 1025]))
    for _ in range(draw(st.integers(0, 3))):
        ways = [path for path in itertools.islice(places(fields), 500) if path != ("v",)]
        if not ways:
            break
        way = draw(st.sampled_from(ways))
        holder = _at(fields, way[:-1])
        what = draw(st.sampled_from(["change", "change", "change", "leave out", "add"]))
        if what == "change":
            holder[way[-1]] = draw(VALUES)
        elif what == "leave out":
            del holder[way[-1]]
        elif what == "add" and isinstance(holder, dict):
            holder[draw(st.sampled_from(["novelty", "prompt", "kind", "type", "index"]))] = draw(VALUES)
    return family(name), fields


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def verdict(name: str, fields: dict[str, Any]) -> set[str]:
    """The kinds of fault that the models find; none if it is valid."""
    plain = codec.unpack(msgpack.packb(fields), 2**26)
    plain.pop("v")
    try:
        ADAPTERS[name].validate_python(plain, strict=True)
    except ValidationError as error:
        return {fault["type"] for fault in error.errors(include_url=False, include_context=False)}
    return set()


def has_lenient_form(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(has_lenient_form, value))
    if not isinstance(value, dict):
        return False
    for name, part in value.items():
        if name in LENIENT and not (isinstance(part, str) or (isinstance(part, list) and "json" not in name)):
            return True
        if has_lenient_form(part):
            return True
    return False


@settings(max_examples=200, deadline=None)
@given(mutants())
def test_schemas_and_models_agree(mutant: tuple[str, dict[str, Any]]) -> None:
    name, fields = mutant
    found, fits = verdict(name, fields), VALIDATORS[name].is_valid(fields)
    if not found:
        assert fits or has_lenient_form(fields)
    elif found - {"value_error"}:
        # A value_error is a rule between fields, not all of which a schema can say.
        assert not fits, found


def test_the_mutants_are_worth_it() -> None:
    """Of both kinds there are many."""
    seen: list[bool] = []

    @settings(max_examples=80, deadline=None, database=None)
    @given(mutants())
    def look(mutant: tuple[str, dict[str, Any]]) -> None:
        seen.append(not verdict(*mutant))

    look()
    assert 5 < sum(seen) < len(seen) - 5


# --- how it is printed


def test_one_document_has_them_all() -> None:
    made = wire_schemas.document()
    jsonschema.Draft202012Validator.check_schema(made)
    whole = Validator(json.loads(json.dumps(made)))
    for fields in MESSAGES.values():
        assert list(whole.iter_errors(fields)) == []
    assert list(whole.iter_errors({"v": 1}))
    assert {*wire_schemas.names(), "Sampling", "Choice"} <= set(made["$defs"])
    for name in ("envelope", "end", "call"):
        one = Validator({"$ref": f"#/$defs/{name}", "$defs": made["$defs"]})
        fields = (
            REQUESTS["call"]
            if name == "call"
            else {**MESSAGES, "envelope": MESSAGES["envelope of call"]}[name]
        )
        assert list(one.iter_errors(fields)) == []


def test_the_command_prints_what_the_library_makes() -> None:
    def printed(*arguments: str) -> str:
        done = CliRunner().invoke(app, ["schema", *arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert json.loads(printed("--json")) == wire_schemas.document()
    assert json.loads(printed("end")) == wire_schemas.schema("end")
    assert json.loads(printed("end", "--json")) == wire_schemas.schema("end")
    assert printed("frame") == wire_schemas.FORMS["frame"] + "\n"
    assert printed("cancel.lua") == Script.load("cancel").text
    assert json.loads(printed("submit.lua", "--json")) == {"submit.lua": Script.load("submit").text}
    listed = [line.split()[0] for line in printed().splitlines()[1:]]
    assert listed == [*wire_schemas.names(), "frame", "record", "submit.lua", "cancel.lua", "sweep.lua"]
    assert CliRunner().invoke(app, ["schema", "x"]).exit_code != 0


def test_an_unknown_name_is_told() -> None:
    with pytest.raises(InvalidRequest, match="no message 'x': there are envelope, start"):
        wire_schemas.schema("x")
