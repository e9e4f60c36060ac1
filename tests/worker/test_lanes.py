from streamfleet_worker.lanes import LaneRotation

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
