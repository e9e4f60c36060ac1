"""One-shot work on the wire: its bytes, its bounds, and what no side can be made to take."""

from __future__ import annotations

import base64
import math
import struct
from array import array
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from streamfleet_common import codec
from streamfleet_common.cards import Card, Limits
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.message import Message
from streamfleet_common.one_shot import (
    MAX_DIMENSIONS,
    CallRequest,
    Classification,
    ClassifyRequest,
    Embedding,
    EmbedRequest,
    HandlerCard,
    Label,
    Rank,
    RerankRequest,
    plain_json,
)
from streamfleet_common.schemas import End, Envelope, Parts, Request, Timing, Usage

RID = "00" + "ab" * 16
HEAD = b"\x83\xa1v\x01\xa3rid\xd9\x22" + RID.encode() + b"\xa7request"
"""A map of 3: v 1, rid (a text of 34), request."""


# --- the very bytes

GOLDEN: list[tuple[Any, bytes]] = [
    (EmbedRequest(texts=["a", "é"]), b"\x82\xa5texts\x92\xa1a\xa2\xc3\xa9\xa4kind\xa5embed"),
    (
        EmbedRequest(texts=["a"], pooling="cls", normalize=False, dimensions=256, truncate=True),
        (
            b"\x86\xa5texts\x91\xa1a\xa7pooling\xa3cls\xa9normalize\xc2\xaadimensions\xcd\x01\x00"
            b"\xa8truncate\xc3\xa4kind\xa5embed"
        ),
    ),
    (ClassifyRequest(texts=["a"]), b"\x82\xa5texts\x91\xa1a\xa4kind\xa8classify"),
    (
        ClassifyRequest(texts=["a"], pairs=["b"], multi_label=True, top_k=3, truncate_side="left"),
        (
            b"\x86\xa5texts\x91\xa1a\xa5pairs\x91\xa1b\xabmulti_label\xc3\xa5top_k\x03\xadtruncate_side\xa4left"
            b"\xa4kind\xa8classify"
        ),
    ),
    (
        RerankRequest(query="q", documents=["a"]),
        b"\x83\xa5query\xa1q\xa9documents\x91\xa1a\xa4kind\xa6rerank",
    ),
    (
        RerankRequest(query="q", documents=["a"], top_n=1, raw_scores=True),
        b"\x85\xa5query\xa1q\xa9documents\x91\xa1a\xa5top_n\x01\xaaraw_scores\xc3\xa4kind\xa6rerank",
    ),
    (
        CallRequest(handler="h", input={"a": [1, None, -0.5]}),
        b"\x83\xa7handler\xa1h\xa5input\x81\xa1a\x93\x01\xc0\xcb\xbf\xe0\0\0\0\0\0\0\xa4kind\xa4call",
    ),
    (CallRequest(handler="h", input=None), b"\x83\xa7handler\xa1h\xa5input\xc0\xa4kind\xa4call"),
]


@pytest.mark.parametrize(("request_", "data"), GOLDEN, ids=lambda value: getattr(value, "kind", ""))
def test_the_bytes_of_a_request(request_: Request, data: bytes) -> None:
    envelope = Envelope(rid=RID, request=request_)
    assert codec.encode(envelope) == HEAD + data
    assert codec.encode_envelope(envelope)[0] == HEAD + data
    assert codec.decode_envelope(HEAD + data) == envelope


EVENTS: list[tuple[Any, bytes]] = [
    (
        Parts(values=(1, {"a": None})),
        b"\x83\xa1v\x01\xa6values\x92\x01\x81\xa1a\xc0\xa4type\xa5parts",
    ),
    (
        End(state="done", embeddings=(Embedding(data=struct.pack("<2f", 1.0, -0.5)),)),
        (
            b"\x84\xa1v\x01\xa5state\xa4done\xaaembeddings\x91\x81\xa4data\xc4\x08\0\0\x80\x3f\0\0\0\xbf"
            b"\xa4type\xa3end"
        ),
    ),
    (
        End(state="done", classifications=(Classification(labels=(Label(label="x", score=0.5),)),)),
        (
            b"\x84\xa1v\x01\xa5state\xa4done\xafclassifications\x91\x81\xa6labels\x91"
            b"\x82\xa5label\xa1x\xa5score\xcb\x3f\xe0\0\0\0\0\0\0\xa4type\xa3end"
        ),
    ),
    (
        End(state="done", ranking=(Rank(index=0, score=2.0),)),
        (
            b"\x84\xa1v\x01\xa5state\xa4done\xa7ranking\x91\x82\xa5index\x00\xa5score\xcb\x40\0\0\0\0\0\0\0"
            b"\xa4type\xa3end"
        ),
    ),
    (
        End(state="done", outputs=("a", [True])),
        b"\x84\xa1v\x01\xa5state\xa4done\xa7outputs\x92\xa1a\x91\xc3\xa4type\xa3end",
    ),
    (
        End(
            state="done",
            usage=Usage(truncated=1),
            timing=Timing(tokenize_ms=0.5, device_ms=2.0, batches=3),
            memory={"weights": 7},
        ),
        (
            b"\x86\xa1v\x01\xa5state\xa4done\xa5usage\x81\xa9truncated\x01"
            b"\xa6timing\x83\xabtokenize_ms\xcb\x3f\xe0\0\0\0\0\0\0\xa9device_ms\xcb\x40\0\0\0\0\0\0\0"
            b"\xa7batches\x03\xa6memory\x81\xa7weights\x07\xa4type\xa3end"
        ),
    ),
]


@pytest.mark.parametrize(("event", "data"), EVENTS)
def test_the_bytes_of_an_event(event: Any, data: bytes) -> None:
    assert codec.encode(event) == data
    assert codec.decode_event(data) == event


def test_a_handler_s_card_comes_back() -> None:
    limits = Limits(max_batch_size=1, max_seq_len=1, max_queue_depth=1, max_request_bytes=1)
    handler = HandlerCard(input_schema='{"type": "object"}', output_schema="true", streams=True)
    card = Card(worker="w", queue="q", model="h", tasks=("call",), handler=handler, limits=limits)
    assert codec.decode_card(codec.encode(card)) == card
    plain = Card(worker="w", queue="q", model="h", handler=HandlerCard(), limits=limits)
    assert codec.decode_card(codec.encode(plain)) == plain
    assert "handler" not in msgpack.unpackb(
        codec.encode(Card(worker="w", queue="q", model="h", limits=limits))
    )


# --- at random

TEXTS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8).filter(str.strip)
SIDES = st.sampled_from(["left", "right"])
CUTS = {"model": st.none() | TEXTS, "truncate": st.booleans(), "truncate_side": SIDES}
NUMBERS = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(exclude_categories=["Cs"]), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
REQUESTS = st.one_of(
    st.builds(
        lambda texts, others: EmbedRequest(texts=texts, **others),
        st.lists(TEXTS, min_size=1, max_size=3),
        st.fixed_dictionaries(
            {},
            optional={
                **CUTS,
                "pooling": st.sampled_from([None, "cls", "mean", "last"]),
                "normalize": st.sampled_from([None, True, False]),
                "dimensions": st.none() | st.integers(1, MAX_DIMENSIONS),
            },
        ),
    ),
    st.builds(
        lambda pairs, paired, others: ClassifyRequest(
            texts=[pair[0] for pair in pairs], pairs=[pair[1] for pair in pairs] if paired else [], **others
        ),
        st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3),
        st.booleans(),
        st.fixed_dictionaries(
            {},
            optional={
                **CUTS,
                "multi_label": st.sampled_from([None, True, False]),
                "top_k": st.none() | st.integers(1, 9),
            },
        ),
    ),
    st.builds(
        lambda query, documents, others: RerankRequest(query=query, documents=documents, **others),
        TEXTS,
        st.lists(TEXTS, min_size=1, max_size=3),
        st.fixed_dictionaries(
            {}, optional={**CUTS, "top_n": st.none() | st.integers(1, 9), "raw_scores": st.booleans()}
        ),
    ),
    st.builds(lambda handler, value: CallRequest(handler=handler, input=value), TEXTS, JSON),
)


@settings(max_examples=300, deadline=None)
@given(REQUESTS)
def test_any_request_comes_back_with_its_defaults_left_out(request_: Any) -> None:
    envelope = Envelope(rid=RID, request=request_)
    data = codec.encode(envelope)
    assert codec.decode_envelope(data) == envelope
    fields = request_.model_dump(exclude_defaults=True)
    assert data == msgpack.packb({"v": 1, "rid": RID, "request": {**fields, "kind": request_.kind}})


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
SCORES = st.floats(allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(FLOATS, min_size=1, max_size=4), max_size=3),
    st.lists(st.lists(st.tuples(TEXTS, SCORES), max_size=3), max_size=3),
    st.lists(st.tuples(st.integers(0, 9), SCORES), max_size=3),
    st.lists(JSON, max_size=3),
    st.dictionaries(TEXTS, st.integers(0, 2**63), max_size=3),
)
def test_any_answer_comes_back_to_the_bit(
    vectors: list[list[float]],
    labels: list[list[tuple[str, float]]],
    ranks: list[tuple[int, float]],
    outputs: list[Any],
    memory: dict[str, int],
) -> None:
    end = End(
        state="done",
        embeddings=tuple(Embedding(data=struct.pack(f"<{len(one)}f", *one)) for one in vectors),
        classifications=tuple(
            Classification(labels=tuple(Label(label=name, score=score) for name, score in one))
            for one in labels
        ),
        ranking=tuple(Rank(index=index, score=score) for index, score in ranks),
        outputs=tuple(outputs),
        memory=memory,
    )
    back = codec.decode_event(codec.encode(end))
    assert isinstance(back, End)
    assert back == end
    assert [list(one.vector) for one in back.embeddings] == vectors
    assert repr(back.outputs) == repr(tuple(outputs))  # lists are lists again, and 1 is not True


# --- bounds: the last value that is taken, the first that is not

EMBED: dict[str, Any] = {"texts": ["a"]}
RERANK: dict[str, Any] = {"query": "q", "documents": ["a"]}
BOUNDS: list[tuple[type[Message], dict[str, Any], str, list[Any], list[Any]]] = [
    (
        EmbedRequest,
        {},
        "texts",
        [["a"], ["a"] * 1024, ["a" * 200_000], ("a", "b")],
        [[], ["a"] * 1025, ["a" * 200_001], [""], ["a", " \n"], "a", ["a", None], [b"a"], None, {"a": 1}],
    ),
    (EmbedRequest, EMBED, "model", [None, "m" * 200], ["m" * 201, 7]),
    (EmbedRequest, EMBED, "pooling", [None, "cls", "mean", "last"], ["max", "", True]),
    (EmbedRequest, EMBED, "normalize", [None, True, False], [1, "true"]),
    (EmbedRequest, EMBED, "dimensions", [None, 1, 65_536], [0, -1, 65_537, 1.0, True, "1"]),
    (EmbedRequest, EMBED, "truncate", [True, False], [None, 1, 100]),
    (EmbedRequest, EMBED, "truncate_side", ["left", "right"], ["Left", "middle", None]),
    (ClassifyRequest, {}, "texts", [["a"] * 1024], [[], ["a"] * 1025, [" "], "a"]),
    (
        ClassifyRequest,
        {"texts": ["a", "b"]},
        "pairs",
        [[], (), ["c", "d"]],
        [["c"], ["c", "d", "e"], ["c", ""], "cd", None, [["c"], ["d"]]],
    ),
    (ClassifyRequest, EMBED, "multi_label", [None, True, False], [0, "no"]),
    (ClassifyRequest, EMBED, "top_k", [None, 1, 2**40], [0, -1, 1.0, True]),
    (RerankRequest, {"documents": ["a"]}, "query", ["q", "q" * 200_000], ["", "  ", "q" * 200_001, None]),
    (RerankRequest, {"query": "q"}, "documents", [["a"] * 1024], [[], ["a"] * 1025, ["a", ""], "a", None]),
    (RerankRequest, RERANK, "top_n", [None, 1, 2**40], [0, -1, 1.5, False]),
    (RerankRequest, RERANK, "raw_scores", [True, False], [None, 1]),
    (CallRequest, {"input": 1}, "handler", ["h", "h" * 200], ["", "h" * 201, None, 1]),
    (
        CallRequest,
        {"handler": "h"},
        "input",
        [None, True, 0, -1.5, "", [], {}, [[]], {"": {"a": []}}, (1, 2), 2**64],
        [math.nan, math.inf, [-math.inf], {1: 2}, {None: 1}, {"a": {1}}, b"a", array("f"), object(), [...]],
    ),
    (
        Embedding,
        {},
        "data",
        [bytes(4), bytes(4 * 65_536)],
        [b"", bytes(3), bytes(5), bytes(4 * 65_537), "abcd"],
    ),
    (Label, {"label": "a"}, "score", [0.5, -1.0, 0], [math.nan, math.inf, "1", None, True]),
    (Rank, {"score": 0.5}, "index", [0, 5], [-1, 0.0, True, None]),
    (Rank, {"index": 0}, "score", [0.5, -1e300], [math.nan, -math.inf, None]),
    (Parts, {}, "values", [(), (None,), [1, [2]]], [None, "ab", 5, (math.nan,), ({1: 2},), (b"a",)]),
    (End, {"state": "done"}, "outputs", [(), (None,), [{"a": 1}]], [None, "ab", (math.inf,), ({1: 2},)]),
    (End, {"state": "done"}, "memory", [{}, {"peak": 2**50}], [{"a": 1.5}, {"a": "b"}, {"a" * 201: 1}, None]),
    (End, {"state": "done"}, "memory", [{str(n): n for n in range(64)}], [{str(n): n for n in range(65)}]),
    (Usage, {}, "truncated", [0, 5], [-1, 1.0]),
    (Timing, {}, "tokenize_ms", [0.0, 1], [-0.1, math.nan]),
    (Timing, {}, "device_ms", [0.0, 1], [-0.1, math.inf]),
    (Timing, {}, "batches", [0, 5], [-1, 0.5]),
]


@pytest.mark.parametrize(
    ("kind", "others", "name", "good", "bad"),
    BOUNDS,
    ids=[f"{kind.__name__}-{name}" for kind, _, name, _, _ in BOUNDS],
)
def test_bounds(
    kind: type[Message], others: dict[str, Any], name: str, good: list[Any], bad: list[Any]
) -> None:
    for value in good:
        kind(**others, **{name: value})
    for value in bad:
        with pytest.raises(InvalidRequest) as caught:
            kind(**others, **{name: value})
        assert caught.value.problems, value


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (EmbedRequest, {"texts": ["\ud800"]}),
        (ClassifyRequest, {"texts": ["a"], "pairs": ["\ud800"]}),
        (RerankRequest, {"query": "\ud800", "documents": ["a"]}),
        (RerankRequest, {"query": "q", "documents": ["\ud800"]}),
        (CallRequest, {"handler": "\ud800", "input": 1}),
        (Label, {"label": "\ud800", "score": 0.5}),
    ],
)
def test_no_text_holds_a_lone_surrogate(kind: type[Message], values: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="lone surrogate"):
        kind(**values)


@pytest.mark.parametrize("value", ["\ud800", ["\ud800"], {"\ud800": 1}, 2**64, -(2**63) - 1, {"a": [2**70]}])
def test_an_input_that_msgpack_does_not_know_is_refused_when_it_is_packed(value: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"cannot be encoded: (an integer|a text) h"):
        codec.encode(Envelope(request=CallRequest(handler="h", input=value)))


def test_a_private_input_is_not_repeated() -> None:
    for value in ({"s3cret": {1}}, ["s3cret", b"s3cret"], {"a": float("nan"), "b": "s3cret"}):
        with pytest.raises(InvalidRequest) as caught:
            CallRequest(handler="h", input=value)
        assert "s3cret" not in str(caught.value)


@pytest.mark.parametrize("levels", [1_000, 1_000_000])
def test_an_input_nested_without_end_is_refused(levels: int) -> None:
    value: Any = []
    for _ in range(levels):
        value = [value]
    try:
        with pytest.raises(InvalidRequest):
            codec.encode(Envelope(request=CallRequest(handler="h", input=value)))
    finally:
        while value:  # one level at a time, since Python takes them all back in one go
            (value,) = value


def test_an_input_that_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(InvalidRequest, match="nested deeper than 14 levels"):
        CallRequest(handler="h", input=value)


def test_what_is_as_deep_as_an_input_may_be_crosses_the_wire_and_no_deeper_is_made() -> None:
    value: Any = 1
    for _ in range(14):
        value = [value]
    data, _ = codec.encode_envelope(Envelope(request=CallRequest(handler="h", input=value)))
    assert codec.decode_envelope(data).request == CallRequest(handler="h", input=value)
    end = End(state="done", outputs=(value,))
    assert codec.decode_event(codec.encode(end)) == end
    for wrong in ([value], {"a": value}):
        with pytest.raises(InvalidRequest, match="nested deeper than 14 levels"):
            CallRequest(handler="h", input=wrong)
        with pytest.raises(InvalidRequest, match="nested deeper than 14 levels"):
            End(state="done", outputs=(wrong,))


def test_vectors_are_base64_in_json() -> None:
    end = End(state="done", embeddings=(Embedding(data=b"\x00\x00\x80\xff"),))
    assert end.model_dump(mode="json")["embeddings"] == [{"data": "AACA_w=="}]
    assert End.model_validate_json(end.model_dump_json()) == end


@pytest.mark.parametrize(
    ("request_", "place"),
    [
        ({"kind": "embed"}, "request.texts"),
        ({"kind": "embed", "texts": "abc"}, "request.texts"),
        ({"kind": "embed", "texts": [b"a"]}, "request.texts.0"),
        ({"kind": "embed", "texts": ["a"], "prompt": "b"}, "request.prompt"),
        ({"kind": "embed", "texts": ["a"], "truncate": 5}, "request.truncate"),
        ({"kind": "classify", "texts": ["a"], "top_k": 0}, "request.top_k"),
        ({"kind": "rerank", "documents": ["a"]}, "request.query"),
        ({"kind": "rerank", "query": "q", "texts": ["a"]}, "request.documents"),
        ({"kind": "call", "handler": "h"}, "request.input"),
        ({"kind": "call", "input": 1}, "request.handler"),
        ({"kind": "call", "handler": "h", "input": float("nan")}, "request.input"),
        ({"kind": "call", "handler": "h", "input": b"a"}, "request.input"),
        ({"kind": "call", "handler": "h", "input": 1, "model": "m"}, "request.model"),
    ],
)
def test_what_is_wrong_is_told_by_its_place(request_: dict[str, Any], place: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        codec.decode_envelope(msgpack.packb({"v": 1, "rid": RID, "request": request_}))
    assert caught.value.problems[0].partition(":")[0] == place


@pytest.mark.parametrize(
    "fields",
    [
        {"embeddings": [{"data": b""}]},
        {"embeddings": [{"data": bytes(5)}]},
        {"embeddings": [{"data": [1.0]}]},
        {"embeddings": [[0.5]]},
        {"classifications": [{"labels": [{"label": "a"}]}]},
        {"ranking": [{"index": -1, "score": 0.5}]},
        {"ranking": [{"index": 0, "score": float("nan")}]},
        {"outputs": 5},
        {"outputs": [b"a"]},
        {"memory": {"a": -0.5}},
    ],
)
def test_no_answer_of_another_form_is_believed(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        codec.decode_event(msgpack.packb({"v": 1, "type": "end", "state": "done", **fields}))


def test_what_an_older_peer_does_not_know_is_at_its_default() -> None:
    end = codec.decode_event(msgpack.packb({"v": 1, "type": "end", "state": "done"}))
    assert isinstance(end, End)
    assert (end.embeddings, end.classifications, end.ranking, end.outputs, end.memory) == ((), (), (), (), {})
    assert (end.usage.truncated, end.timing.tokenize_ms, end.timing.batches) == (0, 0.0, 0)


# --- what they tell


def test_items_are_rows() -> None:
    assert EmbedRequest(texts=["a", "b"]).n == 2
    assert ClassifyRequest(texts=["a", "b"], pairs=["c", "d"]).n == 2
    assert RerankRequest(query="q", documents=["a", "b", "c"]).n == 3
    assert CallRequest(handler="h", input=[1, 2]).n == 1
    assert CallRequest(handler="h", input=1).model == "h"


def test_a_vector_is_its_numbers() -> None:
    one = Embedding(data=b"\0\0\x80\x3f\0\0\0\xbf\x01\0\0\0")  # 1, -0.5, the smallest above 0
    assert list(one.vector) == [1.0, -0.5, 2.0**-149]
    assert one.vector.typecode == "f"
    assert one.dimensions == 3
    assert base64.b64decode(one.base64) == one.data


def test_the_last_part_is_the_output() -> None:
    assert End(state="done", outputs=(1, None, 3)).output == 3
    assert End(state="done").output is None
    assert Classification(labels=(Label(label="a", score=0.9), Label(label="b", score=0.1))).label == "a"


def test_json_keeps_its_kinds() -> None:
    value = {"a": (1, True, 1.0, (None,)), "b": {"c": ()}}
    assert repr(plain_json(value)) == "{'a': [1, True, 1.0, [None]], 'b': {'c': []}}"
    assert CallRequest(handler="h", input=value).input == {"a": [1, True, 1.0, [None]], "b": {"c": []}}


def test_equal_requests_have_equal_digests() -> None:
    def digest(request_: Request) -> str:
        return codec.encode_envelope(Envelope(request=request_))[1]

    same = [EmbedRequest(texts=["a"]), EmbedRequest(texts=("a",), truncate=False, pooling=None)]
    others: list[Request] = [
        EmbedRequest(texts=["b"]),
        EmbedRequest(texts=["a"], normalize=False),
        ClassifyRequest(texts=["a"]),
        CallRequest(handler="a", input=1),
        CallRequest(handler="a", input=True),
        CallRequest(handler="a", input=1.0),
    ]
    assert len(set(map(digest, same))) == 1
    assert len(set(map(digest, [*same, *others]))) == 1 + len(others)


def test_a_frozen_input_is_the_sender_s_own_no_longer() -> None:
    value = {"a": [1]}
    request_ = CallRequest(handler="h", input=value)
    value["a"].append(2)
    assert request_.input == {"a": [1]}
    with pytest.raises(ValidationError, match="frozen"):
        request_.input = 5  # type: ignore[misc]
