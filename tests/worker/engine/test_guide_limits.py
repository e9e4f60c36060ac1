"""How much a form may ask for: the weight of regular expressions, and what is refused by a count."""

import json
from typing import Any

import pytest

from streamfleet_common.errors import InvalidRequest, Unsupported
from streamfleet_worker.engine.guide_limits import MAX_WEIGHT, check_regex, check_schema, walk, weight


@pytest.mark.parametrize(
    ("regex", "expanded", "repeated"),
    [
        # Characters and sets count 1 each, however they are spelled.
        ("abc", 3, 0),
        (r"\.\d\p{L}\x{41}", 4, 0),
        ("[a-z][^]x][[:alpha:]][]a]", 4, 0),
        (r"[\]a{3}]", 1, 0),
        ("(?i)a(?P<name>b)(?:c)", 3, 0),
        # A single character that is repeated is written out, but counts once as repeated.
        (".{0,4000}", 4000, 1),
        ("a+b*c?", 3, 3),
        ("a{3}{4}", 12, 12),
        # A group is written out in both.
        ("(ab){5}", 10, 10),
        ("(a+b){5,}", 10, 10),
        ("((a{2}b){3}c){4}", 40, 40),
        ("(ab)*", 2, 1),
        (r"(\d{1,3}\.){3}\d{1,3}", 12 + 3, 12 + 1),
        # What is no count is text.
        ("a{,3}", 5, 0),
        ("a{2", 3, 0),
        # Unbalanced ones are refused elsewhere; here they must not fail.
        ("((ab", 2, 0),
        ("))a{3}", 3, 1),
        ("[ab", 1, 0),
    ],
)
def test_the_weight_of_a_regular_expression(regex: str, expanded: int, repeated: int) -> None:
    assert weight(regex) == (1 + repeated) * expanded


@pytest.mark.parametrize(
    "regex",
    [
        "((b){1000,}){1000,}",  # held the library up for ever
        "(b{100,}){100,}",
        "(a?){990}a{10000}",  # a second for one mask
        "(a?){990}a{100000}",  # fourteen seconds
        "(a?){500}(a{20,}){20,}a{10000}",
        "(" * 50 + "a" + "){9}" * 50,
        "(a{000000000000000000000100,}){0100,}",
    ],
)
def test_repetitions_that_would_hold_a_step_up_are_refused(regex: str) -> None:
    with pytest.raises(InvalidRequest, match=f"at most {MAX_WEIGHT}") as caught:
        check_regex(regex)
    assert caught.value.limit == MAX_WEIGHT
    with pytest.raises(InvalidRequest, match="json_schema"):
        check_schema({"items": {"anyOf": [{"pattern": regex}]}})
    with pytest.raises(InvalidRequest, match="json_schema"):
        check_schema({"patternProperties": {regex: {}}})


@pytest.mark.parametrize("regex", ["(?x)a b", "(?ix:a b)", "a(?i-x)b"])
def test_verbose_mode_is_refused_by_name(regex: str) -> None:
    with pytest.raises(Unsupported) as caught:
        check_regex(regex)
    assert caught.value.feature == "verbose mode"


def test_patterns_of_a_schema_count_together() -> None:
    pattern = "(ab){100}"  # 201 x 200
    assert weight(pattern) == 40_200
    check_schema({"prefixItems": [{"pattern": pattern}] * 24})
    with pytest.raises(InvalidRequest, match="1005000"):
        check_schema({"prefixItems": [{"pattern": pattern}] * 25})


@pytest.mark.parametrize(
    ("values", "multiple"),
    [
        ([0.01, 50, 5], None),  # 1, 5000, 500 hundredths: 5000
        ([7, 11, 13], None),
        ([7, 11, 13, 17], 17_017),
        ([101, 103], 10_403),
        ([0.25, 0.001], None),  # 250 and 1 thousandths
        ([10_007], 10_007),
        ([0.10007], 10_007),
        ([1e-5, 1], 100_000),
    ],
)
def test_the_least_common_multiple_is_bounded(values: list[float], multiple: int | None) -> None:
    schema = {"properties": {f"p{i}": {"multipleOf": value} for i, value in enumerate(values)}}
    if multiple is None:
        check_schema(schema)
        return
    with pytest.raises(InvalidRequest, match=f"multipleOf.* {multiple},"):
        check_schema(schema)


@pytest.mark.parametrize("value", [1e308, 10**400, 5e-324])
def test_multiples_out_of_all_bounds_are_refused(value: float) -> None:
    with pytest.raises(InvalidRequest, match="multipleOf"):
        check_schema({"multipleOf": value})


@pytest.mark.parametrize("value", [0, True, "3", None, -3])
def test_a_multiple_that_is_none_is_left_to_the_library(value: Any) -> None:
    check_schema({"multipleOf": value})


def test_one_of_many_properties_is_refused() -> None:
    schema: dict[str, Any] = {"properties": {f"p{i}": {} for i in range(51)}}
    check_schema(schema)
    check_schema({**schema, "minProperties": 0})
    with pytest.raises(InvalidRequest, match="/allOf/1/minProperties: 51, where at most 50"):
        check_schema({"allOf": [schema, {"minProperties": 1}]})


def test_many_pattern_properties_are_refused() -> None:
    check_schema({"patternProperties": {f"a{i}": {} for i in range(16)}})
    with pytest.raises(InvalidRequest, match="patternProperties: 17, where at most 16"):
        check_schema({"patternProperties": {f"a{i}": {} for i in range(17)}})


@pytest.mark.parametrize(
    ("bounds", "is_kept"),
    [
        ({"exclusiveMinimum": 0, "maximum": 0.5}, False),
        ({"exclusiveMaximum": 0.0, "exclusiveMinimum": -0.1}, False),
        ({"exclusiveMinimum": 0, "maximum": 1}, True),
        ({"exclusiveMinimum": 0.1, "maximum": 0.5}, True),
        ({"minimum": 0, "maximum": 0.5}, True),
        # As in draft 4.
        ({"minimum": 0.5, "exclusiveMinimum": False}, True),
    ],
)
def test_bounds_that_the_library_does_not_keep_are_refused(bounds: dict[str, float], is_kept: bool) -> None:
    for place, schema in (("", bounds), ("/items/x", {"items": {"x": bounds}})):
        if is_kept:
            check_schema(schema)
        else:
            with pytest.raises(Unsupported, match=f"json_schema{place}/exclusiveM.* 0 beside"):
                check_schema(schema)


def test_walking_a_schema_tells_the_pointer_of_each_value() -> None:
    schema = json.loads('{"a/b": {"c~d": [1, {"e": null}]}, "f": true}')
    # RFC 6901: "~" is spelled "~0", "/" is spelled "~1".
    assert [(place, key) for place, key, _ in walk(schema)] == [
        ("/a~1b", "a/b"),
        ("/f", "f"),
        ("/a~1b/c~0d", "c~d"),
        ("/a~1b/c~0d/0", "0"),
        ("/a~1b/c~0d/1", "1"),
        ("/a~1b/c~0d/1/e", "e"),
    ]
    assert list(walk(True)) == []
