"""What is read from JSON and written to it: the wire's rules, whatever the type."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from streamfleet_common.codec import decode_event, encode
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.schemas import End
from streamfleet_worker.handlers.value_type import ValueType


class Exact(BaseModel):
    model_config = ConfigDict(strict=True)

    day: date
    pair: tuple[int, int]


class Loose(BaseModel):
    value: Any = None
    other: float = Field(default=0.0, serialization_alias="autre")


@dataclass
class Pair:
    left: int
    right: int


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8")),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=10,
)


def fault(annotation: Any, value: Any) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (its words are what is returned)
        ValueType(annotation).write(value)
    return str(caught.value)


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


def test_it_reads_as_json_is_read() -> None:
    # A strict model takes neither texts for dates nor lists for tuples, but for JSON, which has no others.
    read = ValueType(Exact).read(b'{"day":"2024-02-29","pair":[1,2]}')

    assert read == Exact(day=date(2024, 2, 29), pair=(1, 2))
    with pytest.raises(ValidationError):
        ValueType(Exact).read(b'{"day":"2024-02-30","pair":[1,2]}')


@given(JSON)
def test_any_json_value_comes_back_as_it_is(value: Any) -> None:
    try:
        plain, size = ValueType(Any).write(value)
    except ValueError:
        # Only what no result could carry.
        with pytest.raises(InvalidRequest):
            decode_event(encode(End(state="done", outputs=(value,))))
        return
    assert plain == value
    assert type(plain) is type(value)
    assert size == len(msgpack.packb(value))


def test_values_of_numpy_become_plain_ones() -> None:
    for annotation, value, wanted in (
        (float, np.float32(0.5), 0.5),
        (float, np.float64(0.25), 0.25),
        (int, np.int64(3), 3),
        (str, np.str_("a"), "a"),
        (list[float], [np.float32(1.5)], [1.5]),
        (list[float], np.array([1.5, 2], dtype=np.float32), [1.5, 2.0]),
        (list[list[float]], np.eye(2), [[1.0, 0.0], [0.0, 1.0]]),
        (list[int], np.array([3]), [3]),
    ):
        plain, _ = ValueType(annotation).write(value)
        assert plain == wanted
        assert type(plain) is type(wanted)


def test_models_and_the_like_become_maps_of_their_own() -> None:
    kept = {"a": [1]}

    plain, _ = ValueType(Loose).write(Loose(value=kept))
    kept["a"].append(2)

    assert plain == {"value": {"a": [1]}, "autre": 0.0}
    assert ValueType(Pair).write(Pair(1, 2))[0] == {"left": 1, "right": 2}
    assert ValueType(Exact).write(Exact(day=date(2024, 1, 2), pair=(1, 2)))[0] == {
        "day": "2024-01-02",
        "pair": [1, 2],
    }


@pytest.mark.parametrize(
    ("number", "name"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "infinite")]
)
def test_numbers_that_json_does_not_have_are_refused(number: float, name: str) -> None:
    # pydantic itself makes null of some of them.
    for annotation, value, place in (
        (float, number, "the output"),
        (list[float], [1.0, number], "1"),
        (list[float | str], ["a", number], "1"),
        (list[list[float]], [[1.0], [2.0, number]], "1.1"),
        (Any, number, "the output"),
        (Any, [1, number], "1"),
        (Any, {"a": [None, number]}, "a.1"),
        (Loose, Loose(value=number), "value"),
        (Loose, Loose(value=[(number,)]), "value.0.0"),
        (Loose, Loose(value=None, other=number), "autre"),
    ):
        assert fault(annotation, value) == f"{place} is {name}, and JSON has no such number"
    assert ValueType(Any).write([None, 1.0])[0] == [None, 1.0]


def test_what_is_not_of_the_type_is_refused_without_being_told() -> None:
    wrong: Any = {"other": "secret"}
    for annotation, value in (
        (int, "secret"),
        (Loose, {"other": "secret"}),
        (Any, object()),
        (Any, np.zeros(3)),
        (Loose, Loose.model_construct(**wrong)),
    ):
        words = fault(annotation, value)
        assert words
        assert "secret" not in words


def test_what_is_wrong_is_said_of_the_output() -> None:
    assert fault(Pair, {"left": 1}) == "right is missing"
    assert fault(int, "x") == ("the output should be a valid integer, unable to parse string as an integer")
    assert fault(list[Pair], [{"left": 1}, 5]).startswith("0.right is missing; 1 should be ")
    assert fault(dict[str, float], {"Input should ": "x"}).startswith(
        "Input should  should be a valid number"
    )


def test_what_pydantic_knows_nothing_of_is_told_with_what_to_write() -> None:
    for value, words in (
        (np.float32(1), "numpy.float32 is no JSON value: write float(x), or annotate the output"),
        (np.uint8(1), "numpy.uint8 is no JSON value: write int(x), or annotate the output"),
        ({"a": np.bool_(True)}, "numpy.bool is no JSON value: write bool(x), or annotate the output"),
        ([np.zeros(2)], "numpy.ndarray is no JSON value: write x.tolist(), or annotate the output"),
        (object(), "object is no JSON value: annotate the output, with a type that pydantic knows"),
    ):
        assert fault(Any, value) == words


def test_a_type_is_named_as_it_is_written() -> None:
    class Local(BaseModel):
        value: int

    for annotation, name in (
        (Any, "JSON"),
        (int, "int"),
        (Pair, "Pair"),
        (Local, "Local"),
        (list[Local], "list[Local]"),
        (dict[str, float | None], "dict[str, float | None]"),
    ):
        assert ValueType(annotation).name == name


def test_what_is_plain_already_is_written_as_all_else_is() -> None:
    """Values of plain types take a shorter way, to the same end."""
    kept = [1, 2]
    for annotation, value, wanted in (
        (str, "a", "a"),
        (str | None, None, None),
        (bool, True, True),
        (float, 1, 1.0),
        (list[float | None], [1, None], [1.0, None]),
        (list[str | int], ["a", 1], ["a", 1]),
        (list[list[int]], ([1], (2,)), [[1], [2]]),
        (Any, (1, "a"), [1, "a"]),
        (Any, kept, [1, 2]),
    ):
        plain, size = ValueType(annotation).write(value)
        assert (plain, type(plain), size) == (wanted, type(wanted), len(msgpack.packb(wanted)))
        assert plain is not kept


def test_what_the_wire_cannot_carry_is_refused() -> None:
    assert fault(int, 2**64) == "an integer has more than 64 bits"
    assert "surrogate" in fault(Any, ["\ud800"])
    assert "surrogate" in fault(Any, {"\ud800": 1})
    assert ValueType(Any).write({1: 2})[0] == {"1": 2}


def test_depth_is_bounded_as_a_result_is() -> None:
    """The deepest that is taken is the deepest that a client reads."""
    deepest, _ = ValueType(Any).write(nested(14))
    assert decode_event(encode(End(state="done", outputs=(deepest,)))).type == "end"
    with pytest.raises(InvalidRequest):
        End(state="done", outputs=(nested(15),))
    assert fault(Any, nested(15)) == "it is nested deeper than 14 levels"

    endless: list[Any] = []
    endless.append(endless)
    assert fault(Any, endless)
    assert fault(Any, nested(5000))


def test_a_type_without_a_schema_has_none() -> None:
    assert ValueType(Callable).schema("validation") == ""
    assert ValueType(int).schema("validation") == '{"type":"integer"}'
