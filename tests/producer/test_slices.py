"""Lists cut into parts that fit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamfleet_common.errors import GenerationFailed, InvalidRequest, TooLong
from streamfleet_producer.slices import moved, slices


@pytest.mark.parametrize(
    ("weights", "limits", "parts"),
    [
        ([], (1,), []),
        ([(1,)], (1,), [(0, 1)]),
        ([(1,)] * 5, (2,), [(0, 2), (2, 4), (4, 5)]),
        ([(1,)] * 4, (9,), [(0, 4)]),
        # Too heavy for any: by itself, and its neighbours with each other.
        ([(1,), (1,), (9,), (1,), (1,)], (2,), [(0, 2), (2, 3), (3, 5)]),
        ([(9,), (9,)], (2,), [(0, 1), (1, 2)]),
        ([(1, 5), (1, 5), (1, 1)], (3, 9), [(0, 1), (1, 3)]),
        ([(1,), (1,)], (-5,), [(0, 1), (1, 2)]),
    ],
)
def test_parts(weights: list[tuple[int, ...]], limits: tuple[int, ...], parts: list[tuple[int, int]]) -> None:
    assert [(part.start, part.stop) for part in slices(weights, limits)] == parts


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30),
    st.tuples(st.integers(0, 20), st.integers(0, 20)),
)
def test_parts_follow_each_other_fit_and_could_not_be_longer(
    weights: list[tuple[int, int]], limits: tuple[int, int]
) -> None:
    def fits(start: int, stop: int) -> bool:
        return all(
            sum(item[kind] for item in weights[start:stop]) <= limit for kind, limit in enumerate(limits)
        )

    parts = list(slices(weights, limits))
    assert [place for part in parts for place in range(part.start, part.stop)] == list(range(len(weights)))
    for part in parts:
        assert part.stop - part.start == 1 or fits(part.start, part.stop)
        assert part.stop == len(weights) or not fits(part.start, part.stop + 1)


def test_an_error_s_places_are_those_of_the_whole_list() -> None:
    error = InvalidRequest(
        "EmbedRequest is not valid: texts.3 is empty; texts.12: bad",
        problems=["texts.3 is empty", "texts.12: bad", "model: bad.3"],
    )
    told = moved(error, 100, 100)
    assert str(told) == "EmbedRequest is not valid: texts.103 is empty; texts.112: bad"
    assert told.problems == ["texts.103 is empty", "texts.112: bad", "model: bad.3"]
    assert moved(error, 0, 0) is error


def test_an_item_is_counted_in_rows() -> None:
    error = GenerationFailed("item 2: item 5: of questions.1", item=2, retryable=True)
    told = moved(error, 10, 40)
    assert str(told) == "item 42: item 5: of questions.11"
    assert (told.item, told.retryable) == (42, True)


def test_an_error_keeps_its_kind_and_details() -> None:
    error = TooLong("texts.0: too long", prompt_tokens=9, max_tokens=0, limit=8)
    told = moved(error, 5, 5)
    assert isinstance(told, TooLong)
    assert (str(told), told.limit, told.prompt_tokens) == ("texts.5: too long", 8, 9)
    assert told.problems == ["texts.5: too long"]
