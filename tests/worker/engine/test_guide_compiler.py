"""The door of guided output: what is refused, by which name, and what is kept."""

import importlib.util
import json
import sys
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from guide_walk import walk
from streamfleet_common import schemas
from streamfleet_common.errors import InvalidRequest, Unsupported
from streamfleet_worker.engine import guide_compiler
from streamfleet_worker.engine.guide_compiler import GuideCompiler
from streamfleet_worker.engine.tokenizer import Tokenizer
from tiny_model import VOCAB_SIZE, build_tokenizer
from tiny_tokenizers import byte_metaspace, suffixed


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(build_tokenizer())


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GuideCompiler:
    return GuideCompiler(tokenizer, VOCAB_SIZE, {2})


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "integer"}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


WRONG_SCHEMAS = {
    '{"type": "strin"}': "json_schema/type: .*strin",
    '{"properties": [1]}': "properties must be an object",
    '{"properties": {"a": {"items": {"pattern": "("}}}}': r"/a/items/pattern at '\(': unclosed group",
    '{"minLength": -1}': "/minLength: .*-1",
    '{"type": "string", "minLength": 5, "maxLength": 1}': r"minLength \(5\) is greater than maxLength \(1\)",
    '{"type": "integer", "minimum": 5, "maximum": 1}': r"minimum \(5\) is greater than maximum \(1\)",
    '{"properties": {"a~/b": {"$ref": "#/nope"}}}': r"/properties/a~0~1b/\$ref: .*/nope",
    '{"$ref": "#"}': "nothing fits it",
    '{"type": "object", "properties": {"a": false}, "required": ["a"]}': "/properties/a: .*'a' is unsat",
    '{"enum": []}': "Unsatisfiable",
    "false": "nothing fits it",
    "[1]": "json_schema",
    '{"minimum": NaN}': "json_schema",
    '{"a": ': "json_schema",
}


@pytest.mark.parametrize("schema", WRONG_SCHEMAS)
def test_a_wrong_schema_is_refused_with_what_and_where(compiler: GuideCompiler, schema: str) -> None:
    with pytest.raises(InvalidRequest, match=WRONG_SCHEMAS[schema]) as caught:
        compiler.compile(schemas.Guide(json_schema=schema))
    assert type(caught.value) is InvalidRequest


WRONG_REGEXES = {
    "(": r"regex at '\(': unclosed group",
    "ab[c": r"at '\[c': unclosed character class",
    r"\d\Zx": r"at '\\\\Zx': unrecognized escape sequence",
    "a**{2": r"at '\{2': unclosed counted repetition",
    "a{3,1}": r"at '\{3,1\}'",
    r"[^\s\S]": "nothing fits it",
}


@pytest.mark.parametrize("regex", WRONG_REGEXES)
def test_a_wrong_regular_expression_is_refused_with_what_and_where(
    compiler: GuideCompiler, regex: str
) -> None:
    with pytest.raises(InvalidRequest, match=WRONG_REGEXES[regex]) as caught:
        compiler.compile(schemas.Guide(regex=regex))
    assert type(caught.value) is InvalidRequest


LACKING = {
    '{"uniqueItems": true}': ("/uniqueItems", "uniqueItems"),
    '{"properties": {"a": {"not": {"type": "string"}}}}': ("/properties/a/not", "not"),
    '{"if": {}, "then": {}}': ("/if", '"if", "then"'),
    '{"properties": {"uri": {"format": "iri"}}}': ("/properties/uri/format", "iri"),
    '{"items": {"oneOf": [{"type": "integer"}, {"minimum": 3}]}}': ("/items/oneOf", "oneOf"),
    '{"minProperties": 2, "properties": {"a": {}, "b": {}}}': ("", "minProperties"),
    '{"patternProperties": {"^a": {}, "a$": {"type": "null"}}}': ("", "patternProperties"),
    '{"items": {"$ref": "http://localhost/x.json"}}': (r"/items/\$ref", "another document"),
    '{"pattern": "(?=a)b"}': ("/pattern at", "look-around"),
    '{"exclusiveMinimum": 0, "maximum": 0.5}': ("/exclusiveMinimum", "exclusiveMinimum 0"),
}


@pytest.mark.parametrize("schema", LACKING)
def test_a_keyword_that_cannot_be_followed_is_refused_by_name(compiler: GuideCompiler, schema: str) -> None:
    place, feature = LACKING[schema]
    with pytest.raises(Unsupported, match=f"json_schema{place}") as caught:
        compiler.compile(schemas.Guide(json_schema=schema))
    assert feature in caught.value.feature


@pytest.mark.parametrize(
    ("regex", "feature"),
    [
        ("(?=a)b", "look-around"),
        ("(?<!a)b", "look-around"),
        (r"a\b", "look-around"),
        ("a$b", "look-around"),
        (r"(a)\1", "backreferences"),
        ("(?x) a", "verbose mode"),
    ],
)
def test_a_regular_expression_that_cannot_be_followed_is_refused_by_name(
    compiler: GuideCompiler, regex: str, feature: str
) -> None:
    with pytest.raises(Unsupported) as caught:
        compiler.compile(schemas.Guide(regex=regex))
    assert feature in caught.value.feature


def test_annotations_and_unknown_words_are_no_hindrance(compiler: GuideCompiler) -> None:
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A",
        "type": "integer",
        "deprecated": True,
        "x-order": 3,
        "examples": [1],
    }
    compiler.compile(schemas.Guide(json_schema=schema))


HOSTILE: dict[str, Any] = {
    "deep": nested(200),
    "product of anyOf": {
        "allOf": [{"anyOf": [{"required": [f"a{i}"]}, {"required": [f"b{i}"]}]} for i in range(20)]
    },
    "multiples": {"allOf": [{"type": "integer", "multipleOf": n} for n in (7, 11, 13, 17, 19, 23)]},
    "any of many": {"minProperties": 1, "properties": {f"p{i}": {} for i in range(1500)}},
    "patterns at once": {"allOf": [{"pattern": f"^(a|b)*a(a|b){{{i}}}$"} for i in range(1, 20)]},
    "exponential pattern": {"type": "string", "pattern": "^((b){1000,}){1000,}$"},
    "pattern properties": {"patternProperties": {f"^a{i}(x|y)*$": {} for i in range(200)}},
    "expanding references": {
        "$defs": {"big": {"properties": {f"p{i}": {"pattern": f"x{i}$"} for i in range(500)}}},
        "properties": {
            f"x{j}": {"allOf": [{"$ref": "#/$defs/big"}, {"properties": {f"q{j}": True}}]} for j in range(300)
        },
    },
    "wide range": {"type": "number", "minimum": -1.23456789e300, "maximum": 1.7e308},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_too_much_is_refused(compiler: GuideCompiler, name: str) -> None:
    # A fault here is a test that runs into its time limit.
    with pytest.raises(InvalidRequest, match=r"too (large|complex|many|deep)|deeper|nest") as caught:
        compiler.compile(schemas.Guide(json_schema=json.dumps(HOSTILE[name])))
    assert type(caught.value) is InvalidRequest
    assert len(str(caught.value)) < 600


LARGE: dict[str, Any] = {
    "references that double": {
        "$defs": {
            **{
                f"a{i}": {
                    "type": "object",
                    "properties": {name: {"$ref": f"#/$defs/a{i + 1}"} for name in "xy"},
                    "required": ["x"],
                    "additionalProperties": False,
                }
                for i in range(30)
            },
            "a30": {"const": 1},
        },
        "$ref": "#/$defs/a0",
    },
    "long lists": {"type": "array", "items": {"const": 1}, "minItems": 3, "maxItems": 1_000_000},
    "many values": {"enum": [f"value number {i}" for i in range(2500)]},
    "many properties": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(2000)}},
}


@pytest.mark.parametrize("name", LARGE)
def test_what_only_looks_like_too_much_is_not(
    compiler: GuideCompiler, tokenizer: Tokenizer, name: str
) -> None:
    guide = compiler.compile(schemas.Guide(json_schema=LARGE[name]))
    if name != "references that double":
        json.loads(walk(guide, tokenizer, VOCAB_SIZE, {2}, 0)[1])


# --- what is kept


def test_a_form_is_compiled_once(compiler: GuideCompiler) -> None:
    first = compiler.compile(schemas.Guide(regex="ab?"))
    assert compiler.compile(schemas.Guide(regex="ab?")) is first
    assert compiler.compile(schemas.Guide(choice=("ab?",))) is not first


def test_the_least_recently_used_guide_goes_first(tokenizer: Tokenizer) -> None:
    compiler = GuideCompiler(tokenizer, VOCAB_SIZE, {2}, max_guides=2)
    a, b, c = (schemas.Guide(regex=text) for text in "abc")
    first, second = compiler.compile(a), compiler.compile(b)
    assert compiler.compile(a) is first
    compiler.compile(c)
    assert compiler.compile(a) is first
    assert compiler.compile(b) is not second


def test_long_forms_leave_room_for_fewer(tokenizer: Tokenizer) -> None:
    compiler = GuideCompiler(tokenizer, VOCAB_SIZE, {2}, max_chars=100)
    small = [compiler.compile(schemas.Guide(regex=text)) for text in "abc"]
    compiler.compile(schemas.Guide(choice=("d" * 60, "e" * 38)))  # 98: of the others, two characters stay
    assert compiler.compile(schemas.Guide(regex="c")) is small[2]
    assert compiler.compile(schemas.Guide(regex="a")) is not small[0]
    # One that is too large for the room goes at once, and does not stand in the way of others.
    compiler.compile(schemas.Guide(regex="f" * 101))
    kept = compiler.compile(schemas.Guide(regex="g"))
    assert compiler.compile(schemas.Guide(regex="g")) is kept


def test_several_threads_may_compile(tokenizer: Tokenizer) -> None:
    compiler = GuideCompiler(tokenizer, VOCAB_SIZE, {2}, max_guides=3)
    start = Barrier(8)

    def work(seed: int) -> None:
        start.wait(timeout=60)
        for i in range(30):
            options = (f"option {(i + seed) % 5}", "no")
            guide = compiler.compile(schemas.Guide(choice=options))
            assert walk(guide, tokenizer, VOCAB_SIZE, {2}, seed)[1] in options

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert len(compiler._kept) == 3
    assert compiler._chars == sum(guide_compiler._length(form) for _, form in compiler._kept)


# --- models and workers that cannot


@pytest.mark.parametrize("make", [byte_metaspace, suffixed])
def test_a_model_whose_tokens_have_no_text_of_their_own_is_not_guided(make: Any) -> None:
    with pytest.raises(Unsupported, match="no text of their own") as caught:
        GuideCompiler(Tokenizer(make()), 300, {1}).compile(schemas.Guide(regex="a"))
    assert caught.value.feature == "guide"


@pytest.mark.parametrize("ends", [set(), {VOCAB_SIZE}])
def test_a_model_without_an_end_is_not_guided(tokenizer: Tokenizer, ends: set[int]) -> None:
    with pytest.raises(Unsupported, match="ends an answer"):
        GuideCompiler(tokenizer, VOCAB_SIZE, ends).compile(schemas.Guide(regex="a"))


def test_without_the_library_the_way_to_it_is_told(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The module once more, where the import fails.
    monkeypatch.setitem(sys.modules, "llguidance", None)
    spec = importlib.util.spec_from_file_location("without_library", guide_compiler.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(Unsupported, match=r"pip install 'streamfleet\[guided\]'") as caught:
        module.GuideCompiler(tokenizer, VOCAB_SIZE, {2}).compile(schemas.Guide(regex="a"))
    assert caught.value.feature == "guide"
