"""Which event may follow which: by hand, without Redis."""

from __future__ import annotations

import random

import pytest

from hand_worker import delta, done
from streamfleet_common.frames import Frame
from streamfleet_common.schemas import Choice, Delta, End, Event, Restart, Start
from streamfleet_producer.transcript import Replay, Tokens, Transcript

START = Start(worker="w", model="m")


def frame(epoch: int, seq: int) -> Frame:
    return Frame(epoch, seq, b"x", (1, 2, 3, 1) if seq == 0 else ())


def at(*places: tuple[int, int]) -> Transcript:
    """A transcript that has been shown these."""
    transcript = Transcript()
    for epoch, seq in places:
        assert transcript.judge(frame(epoch, seq)) == "next"
        transcript.apply(frame(epoch, seq), START if seq == 0 else delta("abcdef"[seq - 1], seq - 1))
    return transcript


@pytest.mark.parametrize(
    ("place", "verdict"),
    [
        ((2, 3), "next"),
        ((2, 2), "old"),
        ((2, 1), "old"),
        ((2, 0), "old"),
        ((2, 4), "gap"),
        ((1, 9), "old"),
        ((1, 0), "old"),
        ((3, 0), "next"),
        ((3, 1), "gap"),
        ((7, 0), "next"),
        ((7, 2), "gap"),
    ],
)
def test_an_event_follows_iff_it_is_the_next_or_opens_a_higher_epoch(
    place: tuple[int, int], verdict: str
) -> None:
    assert at((2, 0), (2, 1), (2, 2)).judge(frame(*place)) == verdict


def test_the_log_may_open_an_epoch_without_its_start() -> None:
    transcript = at((1, 0))
    assert transcript.judge(frame(2, 1)) == "gap"
    assert transcript.judge(frame(2, 1), logged=True) == "next"
    assert transcript.judge(frame(2, 2), logged=True) == "gap"


def test_a_new_epoch_takes_back_what_was_shown() -> None:
    transcript = at((1, 0), (1, 1))
    restart = transcript.apply(frame(2, 0), START)
    assert isinstance(restart, Restart)
    assert transcript.void.texts == {0: ["a"]}
    assert transcript.shown.texts == {}
    assert at((1, 0)).apply(frame(2, 0), START) is None


def test_a_restart_that_the_fleet_tells_keeps_its_reason() -> None:
    restart = at((1, 0), (1, 1)).apply(frame(2, 0), Restart(reason="drained"))
    assert restart == Restart(reason="drained")


def test_an_end_proves_that_nothing_is_missing() -> None:
    transcript = at((1, 0), (1, 1), (1, 2))
    assert transcript.proves(done("ab", of=1, last_seq=2))
    assert not transcript.proves(done("abc", of=1, last_seq=3))
    assert not transcript.proves(done("ab", of=2, last_seq=2))
    assert not Transcript().proves(End(state="done"))


def test_what_is_missing_is_made_of_the_whole_text() -> None:
    transcript = at((1, 0), (1, 1), (1, 2))
    assert transcript.complete(done("abcd", of=1, last_seq=4)) == [Delta(token_ids=(2, 3), texts=("", "cd"))]
    assert at((1, 0), (1, 1)).complete(done("a", of=1, last_seq=9)) == []


@pytest.mark.parametrize(
    "choice",
    [
        Choice(text="xb", token_ids=(0, 1), finish_reason="eos"),
        Choice(text="ab", token_ids=(0, 7), finish_reason="eos"),
        Choice(text="a", token_ids=(0,), finish_reason="eos"),
        Choice(text="abc", token_ids=(0, 1), finish_reason="eos"),
        Choice(index=1, text="ab", token_ids=(0, 1), finish_reason="eos"),
    ],
)
def test_nothing_is_made_up_where_the_text_begins_differently(choice: Choice) -> None:
    with pytest.raises(ValueError, match=r"."):
        at((1, 0), (1, 1), (1, 2)).complete(End(state="done", choices=(choice,), of=1, last_seq=5))


def test_logprobs_are_cut_with_their_tokens() -> None:
    choice = Choice(text="abc", token_ids=(0, 1, 2), logprobs=(-1.0, -2.0, -3.0), finish_reason="eos")
    [rest] = at((1, 0), (1, 1)).complete(End(state="done", choices=(choice,), of=1, last_seq=3))
    assert rest == Delta(token_ids=(1, 2), texts=("", "bc"), logprobs=(-2.0, -3.0))


def test_a_replay_shows_only_what_is_new() -> None:
    shown = Tokens()
    shown.add(delta("abc"))
    replay = Replay(shown)
    assert replay.take(delta("a")) is None
    assert not replay.caught_up()
    assert replay.take(delta("bcd", 1)) == delta("d", 3)
    assert replay.caught_up()
    assert replay.take(delta("e", 4)) == delta("e", 4)


def test_a_replay_stops_at_the_first_difference() -> None:
    shown = Tokens()
    shown.add(delta("abc"))
    for other in (delta("abX"), delta("abc", 1)):
        with pytest.raises(ValueError, match="differ"):
            Replay(shown).take(other)


def test_a_replay_made_of_the_whole_text_goes_on_where_it_stopped() -> None:
    shown = Tokens()
    shown.add(delta("abc"))
    whole = Delta(token_ids=(0, 1, 2, 3, 4), texts=("", "", "", "", "abcde"), logprobs=(-1.0,) * 5)
    replay = Replay(shown)
    assert replay.take(whole) == Delta(token_ids=(3, 4), texts=("", "de"), logprobs=(-1.0,) * 2)
    assert replay.caught_up()


def test_a_replay_with_the_tokens_but_another_text_differs() -> None:
    shown = Tokens()
    shown.add(delta("abc"))
    for texts in (("", "", "", "abX"), ("a", "b", "cd", "")):
        with pytest.raises(ValueError, match="differ"):
            Replay(shown).take(Delta(token_ids=(0, 1, 2, 3), texts=texts))
    short = Replay(shown)
    assert short.take(Delta(token_ids=(0, 1, 2), texts=("a", "b", ""))) is None
    assert not short.caught_up()


def test_choices_are_replayed_one_by_one() -> None:
    shown = Tokens()
    shown.add(delta("ab"))
    shown.add(Delta(index=1, token_ids=(9,), texts=("z",)))
    replay = Replay(shown)
    assert replay.take(delta("ab")) is None
    assert not replay.caught_up()
    assert replay.take(Delta(index=1, token_ids=(9, 8), texts=("z", "y"))) == Delta(
        index=1, token_ids=(8,), texts=("y",)
    )
    assert replay.caught_up()


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_arrival_with_the_log_gives_the_last_attempt(seed: int) -> None:
    rng = random.Random(seed)
    log: list[tuple[Frame, Event]] = []
    for epoch in (1, 3, 4):
        log.append((frame(epoch, 0), START))
        log += [(frame(epoch, n + 1), delta(f"{epoch}", n)) for n in range(rng.randint(0, 6))]
    last = [event for place, event in log if place.epoch == 4 and isinstance(event, Delta)]
    arriving = [pair for pair in log for _ in range(rng.randint(0, 2))]
    rng.shuffle(arriving)

    transcript = Transcript()
    shown: list[Event] = []

    def take(place: Frame, event: Event, *, logged: bool) -> bool:
        verdict = transcript.judge(place, logged=logged)
        if verdict == "next":
            if transcript.apply(place, event) is not None:
                shown.clear()
            shown.append(event)
        return verdict == "gap"

    for place, event in arriving:
        if take(place, event, logged=False):
            for known in log:
                assert not take(*known, logged=True)
    for known in log:
        take(*known, logged=True)
    assert [event for event in shown if isinstance(event, Delta)] == last
