from streamfleet_worker.lanes import AGED_MS, LaneRotation

# By hand: each turn adds 8, 4 and 1; the highest credit comes first and pays 13.
#   8 4 1 > h    3 8 2 > n    11 -1 3 > h   6 3 4 > h    1 7 5 > n     9 -2 6 > h    4 2 7 > b
#   12 6 -5 > h  7 10 -4 > n  15 1 -3 > h   10 5 -2 > h  5 9 -1 > n    13 0 0 > h    and all are back at 0
FIRST = "hnhhnhbhnhhnh"


def test_of_thirteen_turns_high_gets_eight_normal_four_bulk_one() -> None:
    rotation = LaneRotation()
    for _ in range(3):
        turns = [rotation.turn() for _ in range(13)]
        assert "".join(order[0][0] for order in turns) == FIRST


def test_each_turn_looks_into_every_lane_once_and_the_neediest_first() -> None:
    rotation = LaneRotation()
    assert [rotation.turn() for _ in range(3)] == [
        ["high", "normal", "bulk"],  # 8 4 1
        ["normal", "high", "bulk"],  # 3 8 2
        ["high", "bulk", "normal"],  # 11 -1 3
    ]


def firsts(rotation: LaneRotation, turns: int) -> str:
    return "".join(rotation.turn()[0][0] for _ in range(turns))


def test_a_lane_that_waits_too_long_has_every_second_turn() -> None:
    rotation = LaneRotation()
    rotation.waited((0, 0, AGED_MS))
    turns = firsts(rotation, 52)
    assert turns[1::2] == "b" * 26
    assert turns[::2] == FIRST * 2, "the others have theirs in between, by weight as ever"
    rotation.waited((0, 0, AGED_MS - 1))
    assert firsts(rotation, 13) == FIRST, "and afterwards it has no less than before"


def test_of_several_that_wait_too_long_the_oldest_is_helped() -> None:
    rotation = LaneRotation()
    rotation.waited((AGED_MS, 3 * AGED_MS, 2 * AGED_MS))
    assert firsts(rotation, 26)[1::2] == "n" * 13


def test_the_heaviest_lane_can_be_the_aged_one() -> None:
    rotation = LaneRotation()
    rotation.waited((AGED_MS, 0, 0))
    turns = firsts(rotation, 26)
    assert turns[1::2] == "h" * 13
    assert "n" in turns, "nobody starves"


def test_no_lane_is_aged_where_none_waits() -> None:
    rotation = LaneRotation()
    rotation.waited((0, 0, 0))
    assert firsts(rotation, 13) == FIRST
