"""A new attempt beside what was shown of the last: token by token."""

from __future__ import annotations

import pytest

from hand_worker import delta
from streamfleet_common.schemas import Delta
from streamfleet_producer.replay import Replay
from streamfleet_producer.shown import Shown


def shown_of(*deltas: Delta) -> Shown:
    shown = Shown()
    for one in deltas:
        shown.add(one)
    return shown


def test_a_replay_shows_only_what_is_new() -> None:
    shown = shown_of(delta("abc"))
    replay = Replay(shown)
    assert replay.take(delta("a")) is None
    assert not replay.caught_up()
    assert replay.take(delta("bcd", 1)) == delta("d", 3)
    assert replay.caught_up()
    assert replay.take(delta("e", 4)) == delta("e", 4)


def test_a_replay_stops_at_the_first_difference() -> None:
    shown = shown_of(delta("abc"))
    for other in (delta("abX"), delta("abc", 1)):
        with pytest.raises(ValueError, match="differ"):
            Replay(shown).take(other)


def test_a_replay_made_of_the_whole_text_goes_on_where_it_stopped() -> None:
    shown = shown_of(delta("abc"))
    whole = Delta(token_ids=(0, 1, 2, 3, 4), texts=("", "", "", "", "abcde"), logprobs=(-1.0,) * 5)
    replay = Replay(shown)
    assert replay.take(whole) == Delta(token_ids=(3, 4), texts=("", "de"), logprobs=(-1.0,) * 2)
    assert replay.caught_up()


def test_a_replay_with_the_tokens_but_another_text_differs() -> None:
    shown = shown_of(delta("abc"))
    for texts in (("", "", "", "abX"), ("a", "b", "cd", "")):
        with pytest.raises(ValueError, match="differ"):
            Replay(shown).take(Delta(token_ids=(0, 1, 2, 3), texts=texts))
    short = Replay(shown)
    assert short.take(Delta(token_ids=(0, 1, 2), texts=("a", "b", ""))) is None
    assert not short.caught_up()


def test_choices_are_replayed_one_by_one() -> None:
    shown = shown_of(delta("ab"), Delta(index=1, token_ids=(9,), texts=("z",)))
    replay = Replay(shown)
    assert replay.take(delta("ab")) is None
    assert not replay.caught_up()
    assert replay.take(Delta(index=1, token_ids=(9, 8), texts=("z", "y"))) == Delta(
        index=1, token_ids=(8,), texts=("y",)
    )
    assert replay.caught_up()


LIKELY = (((0, -1.0), (5, -2.0)),)


@pytest.mark.parametrize(
    ("again", "is_same"),
    [
        ({"logprobs": (-1.0,), "top_logprobs": LIKELY}, True),
        ({"logprobs": (-1.0 - 2**-52,), "top_logprobs": LIKELY}, False),
        ({"logprobs": (-1.0,), "top_logprobs": (((0, -1.0), (5, -2.5)),)}, False),
        ({"logprobs": (-1.0,), "top_logprobs": (((0, -1.0),),)}, False),
        ({"logprobs": (), "top_logprobs": ()}, True),
    ],
)
def test_log_probabilities_count_where_every_bit_does(again: dict[str, tuple[object]], is_same: bool) -> None:
    one = delta("a").model_copy(update={"logprobs": (-1.0,), "top_logprobs": LIKELY})
    other = one.model_copy(update=again)
    assert Replay(shown_of(one)).take(other) is None
    if is_same:
        assert Replay(shown_of(one), to_the_bit=True).take(other) is None
    else:
        with pytest.raises(ValueError, match="differ"):
            Replay(shown_of(one), to_the_bit=True).take(other)


def test_what_it_has_added_was_shown_too() -> None:
    replay = Replay(shown_of(delta("ab")))
    replay.take(delta("a"))
    assert replay.shown.events() == [delta("ab")]
    replay.take(delta("bc", 1))
    replay.take(Delta(index=1, token_ids=(9,), texts=("z",)))
    assert replay.shown.events() == [delta("abc"), Delta(index=1, token_ids=(9,), texts=("z",))]
    assert replay.caught_up()


def test_text_that_came_sooner_than_now_is_not_forgotten() -> None:
    replay = Replay(shown_of(Delta(token_ids=(0, 1), texts=("", "ab"))))
    # What the next attempt has held back so far was shown all the same.
    assert replay.take(Delta(token_ids=(0, 1), texts=("", ""))) is None
    assert not replay.caught_up()
    assert replay.shown.events() == [Delta(token_ids=(0, 1), texts=("", "ab"))]
    assert replay.take(Delta(token_ids=(2,), texts=("abc",))) == Delta(token_ids=(2,), texts=("c",))
    assert replay.caught_up()


def test_no_new_token_is_shown_before_the_text_has_come_again() -> None:
    replay = Replay(shown_of(Delta(token_ids=(0, 1), texts=("", "ab"))))
    with pytest.raises(ValueError, match="differ"):
        replay.take(Delta(token_ids=(0, 1, 2), texts=("", "", "a")))


def test_text_without_a_token_is_shown_as_well() -> None:
    replay = Replay(shown_of(delta("a"), Delta(index=1, token_ids=(9,), texts=("z",))))
    assert replay.take(delta("a")) is None
    # An attempt that is cut short shows what it held back, and choice 1 has not come again.
    assert replay.take(Delta(token_ids=(), texts=("b",))) == Delta(token_ids=(), texts=("b",))
    assert not replay.caught_up()
