"""Bytes made by hand, and bytes made by somebody who means no good."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from streamfleet_common import codec
from streamfleet_common.cards import Card, Limits
from streamfleet_common.errors import InvalidRequest, StreamfleetError, Undecodable
from streamfleet_common.message import Message
from streamfleet_common.schemas import (
    ChatMessage,
    Choice,
    Delta,
    End,
    Envelope,
    Failure,
    GenerateRequest,
    Guide,
    Parts,
    Prefill,
    Restart,
    Retry,
    Sampling,
    Start,
    Timing,
    Tool,
    ToolCall,
    Usage,
)

RID = "00" + "ab" * 16
REQUEST: dict[str, Any] = {"kind": "generate", "prompt": "Hi"}


def packed(**fields: Any) -> bytes:
    data: bytes = msgpack.packb({"v": 1, **fields})
    return data


def message(**fields: Any) -> bytes:
    return packed(**{"rid": RID, "request": REQUEST, **fields})


# --- the very bytes


def test_the_bytes_of_a_request() -> None:
    envelope = Envelope(rid=RID, request=GenerateRequest(prompt="Hi"))
    # A map of 3: v 1, rid (a text of 34), request: a map of 2: prompt "Hi", kind "generate".
    assert codec.encode(envelope) == (
        b"\x83\xa1v\x01\xa3rid\xd9\x22"
        + RID.encode()
        + b"\xa7request\x82\xa6prompt\xa2Hi\xa4kind\xa8generate"
    )


def test_a_request_from_bytes() -> None:
    data = (
        b"\x84\xa1v\x01"
        b"\xa3rid\xd9\x22" + RID.encode() + b"\xa6stream\xc3"
        b"\xa7request\x84\xa4kind\xa8generate\xb0prompt_token_ids\x93\x01\xcd\x01\x00\xce\x7f\xff\xff\xff"
        b"\xa4stop\x91\xa1."
        b"\xa8sampling\x81\xabtemperature\xcb" + struct.pack(">d", 0.5)
    )
    assert codec.decode_envelope(data) == Envelope(
        rid=RID,
        stream=True,
        request=GenerateRequest(
            prompt_token_ids=(1, 256, 2**31 - 1), stop=(".",), sampling=Sampling(temperature=0.5)
        ),
    )


def test_the_bytes_of_an_event() -> None:
    delta = Delta(token_ids=(5,), texts=("é",))
    data = b"\x84\xa1v\x01\xa9token_ids\x91\x05\xa5texts\x91\xa2\xc3\xa9\xa4type\xa5delta"
    assert codec.encode(delta) == data
    assert codec.decode_event(data) == delta


EVENTS: list[Any] = [
    Start(worker="w", model="m", revision="r", queued_at_ms=1754000000001, started_at_ms=1754000000002),
    Start(worker="w", model="m", exact="cpu of a kind"),
    Prefill(token_ids=(1, 2), texts=("a", "b"), logprobs=(None, -0.5)),
    Prefill(
        token_ids=(1, 2), texts=("a", "b"), logprobs=(None, -0.5), top_logprobs=((), ((2, -0.5), (7, -1.5)))
    ),
    Delta(index=1, token_ids=(1, 2), texts=("a", ""), logprobs=(-0.5, -1.0)),
    Delta(token_ids=(1,), texts=("a",), logprobs=(-0.5,), top_logprobs=(((1, -0.5), (2**31 - 1, -1.5)),)),
    Restart(reason="the worker was lost"),
    End(state="done"),
    End(
        state="done",
        choices=(
            Choice(text="ab", token_ids=(1, 2), finish_reason="stop", last_token_id=2, logprobs=(-1.0, None)),
            Choice(index=1, text="", token_ids=(), finish_reason="length", seed=2**63 - 1),
            Choice(
                index=2,
                text="a",
                token_ids=(1,),
                logprobs=(-0.5,),
                top_logprobs=(((1, -0.5),),),
                finish_reason="eos",
                last_token_id=1,
                seed=0,
            ),
        ),
        prefill=Prefill(token_ids=(1,), texts=("a",), logprobs=(None,)),
        usage=Usage(prompt_tokens=1, completion_tokens=2, cached_tokens=1, cut_tokens=5),
        exact="cpu of a kind",
        seed=2**63 - 1,
        timing=Timing(wait_ms=0.25, prefill_ms=1.0, decode_ms=1e6),
        model="m",
        revision="r",
        worker="w",
        attempt=2,
        of=3,
        last_seq=4,
    ),
    End(state="failed", error=Failure(code="c", message="m", details={"a": 1, "b": None, "c": "d"})),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_events_come_back(event: Message) -> None:
    assert codec.decode_event(codec.encode(event)) == event


def test_requests_come_back() -> None:
    envelope = Envelope(
        rid=RID,
        tenant="a.b",
        lane="bulk",
        stream=True,
        deadline_ms=1,
        on_restart="fail",
        idempotency_key="k",
        result_ttl_ms=1000,
        traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01",
        request=GenerateRequest(
            model="m",
            messages=(ChatMessage(role="system", content=""), ChatMessage(role="user", content="a")),
            tools=(Tool(name="f", description="d", parameters={"type": "object"}),),
            max_tokens="fit",
            min_tokens=0,
            n=4,
            truncate=100,
            truncate_side="right",
            sampling=Sampling(
                temperature=1.5,
                top_k=5,
                top_p=0.5,
                min_p=0.25,
                typical_p=0.75,
                repetition_penalty=1.1,
                presence_penalty=-0.5,
                frequency_penalty=0.5,
                logit_bias={7: -100, 0: 0.5},
                bad_words=("x", " y"),
                seed=7,
            ),
            guide=Guide(json_schema={"type": "object"}),
            stop=("a", "b"),
            include_stop=True,
            stop_token_ids=(1, 2),
            ignore_eos=False,
            logprobs=True,
            top_logprobs=5,
            prompt_logprobs=True,
            echo=True,
            skip_special_tokens=False,
        ),
    )
    request = envelope.request
    assert isinstance(request, GenerateRequest)
    assert request.model_fields_set == set(GenerateRequest.model_fields) - {
        "kind",
        "prompt",
        "prompt_token_ids",
    }
    assert request.sampling.model_fields_set == set(Sampling.model_fields)
    assert codec.decode_envelope(codec.encode(envelope)) == envelope


@pytest.mark.parametrize(
    "guide", [Guide(regex="[a-z]+"), Guide(choice=("yes", "no")), Guide(json_schema="{}")]
)
def test_guides_come_back(guide: Guide) -> None:
    envelope = Envelope(rid=RID, request=GenerateRequest(prompt="Hi", guide=guide))
    assert codec.decode_envelope(codec.encode(envelope)) == envelope


def test_cards_come_back() -> None:
    card = Card(
        worker="w",
        queue="q",
        model="m",
        tasks=("generate", "embed"),
        device="cpu",
        limits=Limits(max_batch_size=1, max_seq_len=2, max_queue_depth=3, max_request_bytes=4, vocab_size=5),
        capacity=6,
        state="draining",
    )
    assert codec.decode_card(codec.encode(card)) == card


def test_a_rid_is_always_sent() -> None:
    envelope = Envelope(request=GenerateRequest(prompt="a"))
    assert msgpack.unpackb(codec.encode(envelope))["rid"] == envelope.rid


# --- against pydantic's own way to leave defaults out


def _messages(kind: type[Message], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Messages of which any fields are given; one that is not keeps its default, if it has any."""
    required = {name: some for name, some in fields.items() if kind.model_fields[name].is_required()}
    optional = {name: some for name, some in fields.items() if name not in required}
    return st.fixed_dictionaries(required, optional=optional).map(lambda values: kind(**values))


COUNTS = st.integers(0, 3)
MILLISECONDS = st.sampled_from([0.0, -0.0, 0.5])
TEXTS = st.sampled_from(["", "a", "\u00e9 b"])
IDS = st.lists(st.integers(0, 3), max_size=3).map(tuple)
LOGPROBS = st.lists(st.none() | st.floats(-5, 0), max_size=2).map(tuple)
TOP_LOGPROBS = st.lists(st.lists(st.tuples(COUNTS, st.floats(-5, 0)), max_size=2).map(tuple), max_size=2).map(
    tuple
)
SAMPLINGS = _messages(
    Sampling,
    temperature=MILLISECONDS | st.floats(0, 100),
    top_k=COUNTS,
    min_p=st.floats(0, 1),
    typical_p=st.floats(0, 1, exclude_min=True),
    repetition_penalty=st.sampled_from([1.0, 1, 1.5]),
    presence_penalty=st.floats(-10, 10),
    frequency_penalty=st.floats(-10, 10),
    logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-1000, 1000), max_size=3),
    bad_words=st.sampled_from([(), ("a", "\u00e9")]),
    seed=st.none() | COUNTS,
)
GUIDES = st.sampled_from([Guide(json_schema="{}"), Guide(regex="a+"), Guide(choice=("a", "b"))])
CALLS = _messages(ToolCall, id=TEXTS, name=st.just("f"), arguments=st.sampled_from(["{}", '{"a": 1}']))
PROMPTS = st.one_of(
    st.fixed_dictionaries({"prompt": st.text(min_size=1).filter(lambda text: not text.isspace())}),
    st.fixed_dictionaries({"prompt_token_ids": st.just((1, 2))}),
    st.fixed_dictionaries(
        {
            "messages": st.lists(
                _messages(ChatMessage, role=st.sampled_from(["user", "system"]), content=TEXTS)
                | st.builds(
                    ChatMessage,
                    role=st.just("assistant"),
                    content=TEXTS,
                    tool_calls=st.lists(CALLS, min_size=1, max_size=2).map(tuple),
                ),
                min_size=1,
            ).map(tuple),
            "tools": st.sampled_from(
                [(), (Tool(name="f"),), (Tool(name="f", description="d"), Tool(name="g"))]
            ),
        }
    ),
)
REQUESTS = st.tuples(
    PROMPTS,
    st.fixed_dictionaries(
        {},
        optional={
            "model": st.none() | TEXTS,
            "max_tokens": st.sampled_from([1, 128, "fit"]),
            "min_tokens": st.sampled_from([0, 1]),
            "n": st.sampled_from([1, 2]),
            "truncate": st.none() | st.just(5),
            "truncate_side": st.sampled_from(["left", "right"]),
            "sampling": SAMPLINGS,
            "guide": st.none() | GUIDES,
            "stop": st.sampled_from([(), ("a",)]),
            "stop_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=64).map(tuple),
            "ignore_eos": st.booleans(),
            "logprobs": st.just(True),
            "prompt_logprobs": st.booleans(),
            "echo": st.booleans(),
            "skip_special_tokens": st.booleans(),
        },
    ),
    COUNTS,
).map(
    lambda parts: GenerateRequest(
        **parts[0],
        **parts[1] | ({"ignore_eos": False, "min_tokens": 0} if parts[1].get("guide") is not None else {}),
        **({"top_logprobs": parts[2]} if "logprobs" in parts[1] else {}),
    )
)
ENVELOPES = _messages(
    Envelope,
    rid=st.just(RID),
    tenant=st.sampled_from(["default", "a"]),
    lane=st.sampled_from(["normal", "high"]),
    stream=st.booleans(),
    deadline_ms=st.sampled_from([1, 600_000]),
    retry=_messages(Retry, attempts=st.none() | st.just(1), backoff_ms=COUNTS),
    idempotency_key=st.none() | st.just("k"),
    request=REQUESTS,
)
PREFILLS = _messages(Prefill, token_ids=IDS, texts=st.just(()), logprobs=LOGPROBS, top_logprobs=TOP_LOGPROBS)
ENDS = _messages(
    End,
    state=st.sampled_from(["done", "failed"]),
    choices=st.lists(
        _messages(
            Choice,
            index=COUNTS,
            text=TEXTS,
            token_ids=IDS,
            logprobs=LOGPROBS,
            top_logprobs=TOP_LOGPROBS,
            finish_reason=st.just("eos"),
            last_token_id=st.none() | COUNTS,
            seed=st.none() | COUNTS,
        ),
        max_size=2,
    ).map(tuple),
    prefill=st.none() | PREFILLS,
    error=st.none()
    | _messages(
        Failure,
        code=TEXTS,
        message=TEXTS,
        details=st.dictionaries(
            TEXTS, st.none() | st.booleans() | COUNTS | st.lists(TEXTS).map(tuple), max_size=2
        ),
    ),
    usage=_messages(
        Usage, prompt_tokens=COUNTS, completion_tokens=COUNTS, cached_tokens=COUNTS, cut_tokens=COUNTS
    ),
    timing=_messages(Timing, wait_ms=MILLISECONDS, decode_ms=MILLISECONDS),
    seed=st.none() | COUNTS,
    worker=TEXTS,
    exact=TEXTS,
    attempt=COUNTS,
    of=COUNTS,
)
OTHERS = (
    PREFILLS
    | _messages(Start, worker=TEXTS, model=TEXTS, queued_at_ms=COUNTS, exact=TEXTS)
    | _messages(
        Delta,
        index=COUNTS,
        token_ids=IDS,
        texts=st.lists(TEXTS, max_size=2).map(tuple),
        logprobs=LOGPROBS,
        top_logprobs=TOP_LOGPROBS,
    )
    | _messages(Restart, reason=TEXTS)
)
CARDS = _messages(
    Card,
    worker=TEXTS,
    queue=st.just("q"),
    model=TEXTS,
    device=TEXTS,
    tasks=st.sampled_from([("generate",), ("a", "b")]),
    limits=_messages(
        Limits,
        max_batch_size=st.just(1),
        max_seq_len=st.just(2),
        max_queue_depth=st.just(3),
        max_request_bytes=st.just(4),
        vocab_size=COUNTS,
    ),
)


def by_pydantic(message: Message) -> dict[str, Any]:
    fields: dict[str, Any] = message.model_dump(exclude_defaults=True)
    if isinstance(message, Envelope):
        fields = {"rid": message.rid, **message.model_dump(exclude_defaults=True, exclude={"rid"})}
        fields["request"]["kind"] = "generate"
    for name in ("type", "kind"):
        if name in type(message).model_fields:
            fields[name] = getattr(message, name)
    return {"v": 1, **fields}


@settings(max_examples=400, deadline=None)
@given(ENVELOPES | ENDS | OTHERS | CARDS)
def test_defaults_are_left_out_as_pydantic_would(message: Any) -> None:
    assert codec.encode(message) == msgpack.packb(by_pydantic(message))


@settings(max_examples=400, deadline=None)
@given(ENVELOPES)
def test_any_request_comes_back(envelope: Envelope) -> None:
    assert codec.decode_envelope(codec.encode(envelope)) == envelope


@settings(max_examples=400, deadline=None)
@given(ENDS | OTHERS)
def test_any_event_comes_back(event: Any) -> None:
    assert codec.decode_event(codec.encode(event)) == event


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_log_probabilities_keep_their_bits(numbers: list[float]) -> None:
    top = tuple(((1, number),) for number in numbers)
    delta = Delta(token_ids=(), texts=(), logprobs=tuple(numbers), top_logprobs=top)
    back = codec.decode_event(codec.encode(delta))
    assert isinstance(back, Delta)
    for got in (back.logprobs, [scored[0][1] for scored in back.top_logprobs]):
        assert struct.pack(f"{len(numbers)}d", *got) == struct.pack(f"{len(numbers)}d", *numbers)


@settings(max_examples=200, deadline=None)
@given(ENVELOPES)
def test_a_submission_has_the_bytes_of_its_envelope_and_the_digest_of_its_request(envelope: Envelope) -> None:
    payload, digest = codec.encode_envelope(envelope)
    assert payload == codec.encode(envelope)
    request = msgpack.packb(by_pydantic(envelope)["request"])
    assert digest == hashlib.sha256(request).hexdigest()[:32]


def test_the_request_is_the_last_field_of_an_envelope_and_the_fields_are_few() -> None:
    # The encoder puts the request's bytes behind a map whose header counts up to 15 in one byte.
    assert list(Envelope.model_fields)[-1] == "request"
    assert len(Envelope.model_fields) + len(["v"]) <= 15


# --- versions


@pytest.mark.parametrize("version", [None, 0, -1, 3, 2**63, True, 1.0, "1", b"1", [1], {}])
def test_far_versions_are_refused_by_name(version: object) -> None:
    with pytest.raises(Undecodable, match="this side understands 1, 2") as caught:
        codec.decode_envelope(message(v=version))
    assert repr(version)[:20] in str(caught.value).replace("(1,)", "[1]")


def test_a_missing_version_is_refused() -> None:
    with pytest.raises(Undecodable, match="version None"):
        codec.decode_envelope(msgpack.packb({"rid": RID, "request": REQUEST}))


def test_a_huge_version_is_not_repeated() -> None:
    with pytest.raises(Undecodable) as caught:
        codec.decode_envelope(message(v="x" * 100_000))
    assert len(str(caught.value)) < 500
    assert len(caught.value.version) <= 40


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.decode_envelope(message(colour="red", request={**REQUEST, "hue": 1, "sampling": {"sat": 2}}))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == [
        "request.sampling.sat",
        "request.hue",
        "colour",
    ]


def test_what_an_older_peer_does_not_know_is_at_its_default() -> None:
    assert codec.decode_envelope(message()).request == GenerateRequest(prompt="Hi")
    start = codec.decode_event(packed(type="start", worker="w", model="m"))
    assert start == Start(worker="w", model="m", exact="")
    delta = codec.decode_event(packed(type="delta", token_ids=[1], texts=["a"], logprobs=[-0.5]))
    assert delta == Delta(token_ids=(1,), texts=("a",), logprobs=(-0.5,), top_logprobs=())
    choice = {"text": "a", "token_ids": [1], "finish_reason": "eos"}
    end = codec.decode_event(packed(type="end", state="done", choices=[choice], usage={"prompt_tokens": 1}))
    assert isinstance(end, End)
    assert (end.exact, end.choices[0].seed, end.choices[0].top_logprobs) == ("", None, ())
    assert (end.usage.cached_tokens, end.usage.cut_tokens) == (0, 0)


def test_an_unknown_field_of_a_newer_peer_is_left_out() -> None:
    data = message(v=2, colour="red", request={**REQUEST, "hue": 1, "sampling": {"sat": 2, "top_k": 3}})
    assert codec.decode_envelope(data) == Envelope(
        rid=RID, request=GenerateRequest(prompt="Hi", sampling=Sampling(top_k=3))
    )
    event = codec.decode_event(packed(v=2, type="delta", token_ids=[1], texts=["a"], shape="round"))
    assert event == Delta(token_ids=(1,), texts=("a",))


def test_a_newer_peer_is_still_held_to_the_bounds() -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.decode_envelope(message(v=2, deadline_ms=0, colour="red"))
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["deadline_ms"]


# --- well packed, but wrong


@pytest.mark.parametrize(
    ("fields", "places"),
    [
        ({"stream": 1}, ["stream"]),
        ({"deadline_ms": 600_000.0}, ["deadline_ms"]),
        ({"deadline_ms": "600000"}, ["deadline_ms"]),
        ({"deadline_ms": True}, ["deadline_ms"]),
        ({"tenant": b"acme"}, ["tenant"]),
        ({"rid": "../x"}, ["rid"]),
        ({"request": None}, ["request"]),
        ({"request": [["kind", "generate"]]}, ["request"]),
        ({"request": {"kind": "delete"}}, ["request"]),
        ({"request": {**REQUEST, "max_tokens": 2**64 - 1}}, ["request.max_tokens"]),
        (
            {"request": {**REQUEST, "sampling": {"temperature": float("nan")}}},
            ["request.sampling.temperature"],
        ),
        ({"request": {**REQUEST, "sampling": {"top_p": float("inf")}}}, ["request.sampling.top_p"]),
        ({"request": {**REQUEST, "stop": "."}}, ["request.stop"]),
        ({"request": {**REQUEST, "stop": {".": 1}}}, ["request.stop"]),
        ({"tenant": "a b", "lane": "x", "stream": None}, ["tenant", "lane", "stream"]),
    ],
)
def test_wrong_values(fields: dict[str, Any], places: list[str]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.decode_envelope(message(**fields))
    assert not isinstance(caught.value, Undecodable)
    assert [problem.partition(":")[0] for problem in caught.value.problems] == places


@pytest.mark.parametrize("kind", ["", "nonsense", "x" * 10_000, None, 1, b"end"])
def test_an_unknown_event(kind: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.decode_event(packed(type=kind))
    assert len(str(caught.value)) < 500


def test_an_event_without_a_type() -> None:
    with pytest.raises(InvalidRequest, match="type"):
        codec.decode_event(packed(state="done"))


def test_an_event_is_no_request() -> None:
    with pytest.raises(InvalidRequest):
        codec.decode_envelope(codec.encode(End(state="done")))


# --- not packed at all, or with malice


def nested(levels: int, opening: bytes, core: bytes = b"\xc0") -> bytes:
    return b"\x82\xa1v\x01\xa1x" + opening * levels + core


GARBAGE: dict[str, bytes] = {
    "nothing": b"",
    "text": b"hello",
    "json": b'{"v": 1}',
    "zeros": bytes(100),
    "never used": b"\xc1",
    "cut short": message()[:-1],
    "something after": message() + b"\x00",
    "two messages": message() * 2,
    "no map": msgpack.packb([1, 2]),
    "a number": msgpack.packb(1),
    "nil": b"\xc0",
    "array header lies": b"\x82\xa1v\x01\xa1x\xdd\xff\xff\xff\xff",
    "map header lies": b"\xdf\xff\xff\xff\xff",
    "text header lies": b"\x82\xa1v\x01\xa1x\xdb\xff\xff\xff\xff",
    "bytes header lies": b"\x82\xa1v\x01\xa1x\xc6\xff\xff\xff\xff",
    "extension": packed(x=msgpack.ExtType(5, b"abcd")),
    "empty extension": b"\x82\xa1v\x01\xa1x\xc7\x00\x05",
    "timestamp": packed(x=msgpack.Timestamp(1)),
    "long timestamp": packed(x=msgpack.Timestamp(2**40, 5)),
    "empty timestamp": b"\x82\xa1v\x01\xa1x\xc7\x00\xff",
    "number as key": msgpack.packb({"v": 1, 7: 1}),
    "nil as key": msgpack.packb({"v": 1, None: 1}),
    "array as key": b"\x82\xa1v\x01\x91\x01\x01",
    "number as inner key": packed(request={1: 2}),
    "bytes as key": b"\x82\xa1v\x01\xc4\x01x\x01",
    "text that is no utf-8": b"\x82\xa1v\x01\xa1x\xa1\xff",
    "surrogate in utf-8": b"\x82\xa1v\x01\xa1x\xa3\xed\xa0\x80",
    "key that is no utf-8": b"\x82\xa1v\x01\xa1\xff\x01",
    "17 arrays": nested(16, b"\x91"),
    "17 maps": nested(16, b"\x81\xa1a"),
    "600 arrays": nested(600, b"\x91"),
    "600 maps": nested(600, b"\x81\xa1a"),
    "100,000 arrays": nested(100_000, b"\x91"),
    "100,000 maps": nested(80_000, b"\x81\xa1a"),
    "wide and deep": nested(15, b"\x92\xc0", b"\x91\xc0"),
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
@pytest.mark.parametrize("decode", [codec.decode_envelope, codec.decode_event, codec.decode_card])
def test_garbage_is_refused(decode: Callable[[bytes], object], data: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        decode(data)
    assert len(str(caught.value)) < 500
    assert caught.value.__cause__ is None


def test_depth_is_counted_from_the_message() -> None:
    value: Any = 1
    for _ in range(14):
        value = [value]  # with the message and its values 16 levels
    assert isinstance(codec.decode_event(packed(type="parts", values=[value])), Parts)
    with pytest.raises(Undecodable, match="deeper than 16"):
        codec.decode_event(packed(type="parts", values=[[value]]))


@pytest.mark.parametrize("detail", [math.nan, math.inf, b"bytes", {"a": "b"}, [1], [["a"]], "x" * 4_194_305])
def test_details_of_errors_are_plain_values(detail: Any) -> None:
    failure = {"code": "c", "message": "m", "details": {"limit": detail}}
    with pytest.raises(InvalidRequest):
        codec.decode_event(packed(type="end", state="failed", error=failure))


@pytest.mark.parametrize("detail", [None, True, 7, 0.5, "text", ["a", "b"], []])
def test_plain_details_come_through_as_they_are(detail: Any) -> None:
    failure = {"code": "c", "message": "m", "details": {"limit": detail}}
    end = codec.decode_event(packed(type="end", state="failed", error=failure))
    assert isinstance(end, End)
    assert end.error is not None
    assert end.error.error().details == {"limit": detail}


def test_the_depth_of_values_that_hold_no_list_is_not_mistaken() -> None:
    # Bytes of text and numbers that would begin a list elsewhere: many of them, and yet no depth.
    delta = Delta(token_ids=tuple(range(0x80, 0xF0)), texts=("\u0454" * 100,))
    assert codec.decode_event(codec.encode(delta)) == delta


def test_five_megabytes_of_empty_maps_are_not_even_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    def unpackb(*_args: Any, **_options: Any) -> None:
        raise AssertionError("the size is to be looked at first")

    data = b"\x82\xa1v\x01\xa1x\xdd" + struct.pack(">I", 5_000_000) + b"\x80" * 5_000_000
    monkeypatch.setattr(msgpack, "unpackb", unpackb)
    for decode in (codec.decode_envelope, codec.decode_event, codec.decode_card):
        with pytest.raises(Undecodable, match="over the limit") as caught:
            decode(data)
        assert caught.value.bytes == len(data)


def test_as_many_empty_maps_as_the_limit_takes() -> None:
    count = codec.MAX_REQUEST_BYTES - 11
    data = b"\x82\xa1v\x01\xa1x\xdd" + struct.pack(">I", count) + b"\x80" * count
    assert len(data) == codec.MAX_REQUEST_BYTES
    with pytest.raises(InvalidRequest) as caught:
        codec.decode_envelope(data)
    assert len(str(caught.value)) < 500


def test_a_flood_of_wrong_values_has_a_short_answer() -> None:
    fields = {f"k{number}": 0 for number in range(20_000)}
    with pytest.raises(InvalidRequest) as caught:
        codec.decode_envelope(message(**fields))
    assert len(str(caught.value)) < 10_000


def test_the_limit_is_the_last_size_that_passes() -> None:
    data = message()
    assert codec.decode_envelope(data, limit=len(data)).rid == RID
    with pytest.raises(Undecodable) as caught:
        codec.decode_envelope(data, limit=len(data) - 1)
    assert (caught.value.bytes, caught.value.limit) == (len(data), len(data) - 1)


def test_of_a_field_given_twice_the_last_counts() -> None:
    data = b"\x84\xa1v\x01\xa6tenant\xa1a\xa6tenant\xa1b\xa7request\x81\xa6prompt\xa1x"
    assert codec.decode_envelope(data).tenant == "b"
    data = b"\x84\xa1v\x01\xa1v\x09\xa6tenant\xa1b\xa7request\x81\xa6prompt\xa1x"
    with pytest.raises(Undecodable, match="version 9"):
        codec.decode_envelope(data)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_do_worse_than_be_refused(data: bytes) -> None:
    for decode in (codec.decode_envelope, codec.decode_event, codec.decode_card):
        with pytest.raises(StreamfleetError):
            decode(data)


TREES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FIELDS = st.sampled_from(
    sorted(
        {*Envelope.model_fields, *GenerateRequest.model_fields, *End.model_fields, *Card.model_fields, "type"}
    )
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(FIELDS, TREES, max_size=6), st.sampled_from([1, 2]))
def test_no_values_do_worse_than_be_refused(fields: dict[str, Any], version: int) -> None:
    data = msgpack.packb({**fields, "v": version})
    for decode in (codec.decode_envelope, codec.decode_event, codec.decode_card):
        try:
            got: Any = decode(data)
        except InvalidRequest:
            continue
        # Whatever was let in can be sent on, as itself.
        assert isinstance(got, BaseModel)
        assert decode(codec.encode(got)) == got  # type: ignore[arg-type]


# --- what cannot be packed


@pytest.mark.parametrize("value", [object(), 2**64, -(2**63) - 1, "\ud800", {1, 2}])
def test_what_cannot_be_packed_is_a_fault_of_the_caller(value: object) -> None:
    with pytest.raises(InvalidRequest, match="cannot be encoded"):
        codec.encode(End(state="failed").changed({"model": value}))  # as nobody validates it


def test_the_digest_does_not_depend_on_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def digest(prompt: str) -> str:
        return codec.encode_envelope(Envelope(request=GenerateRequest(prompt=prompt)))[1]

    before = digest("Hi")
    monkeypatch.setattr(codec, "VERSION", 2)
    assert digest("Hi") == before
    assert digest("Ho") != before
