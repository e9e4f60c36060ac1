"""Which event may follow which: by hand, without Redis."""

from __future__ import annotations

import random
from typing import Any

import pytest

from hand_worker import delta, done
from streamfleet_common.frames import Frame
from streamfleet_common.schemas import Choice, Delta, End, Event, Parts, Prefill, Restart, Start
from streamfleet_producer.transcript import DIFFERS, LOST, Transcript

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


def voided(transcript: Transcript) -> list[Delta | Parts]:
    """What the last restart took back."""
    assert transcript.void is not None
    return transcript.void.events()


def test_the_log_may_open_an_epoch_without_its_start() -> None:
    transcript = at((1, 0))
    assert transcript.judge(frame(2, 1)) == "gap"
    assert transcript.judge(frame(2, 1), logged=True) == "next"
    assert transcript.judge(frame(2, 2), logged=True) == "gap"


def test_a_new_epoch_takes_back_what_was_shown() -> None:
    transcript = at((1, 0), (1, 1))
    assert transcript.apply(frame(2, 0), START) == [Restart(reason=LOST), START]
    assert voided(transcript) == [delta("a")]
    assert transcript.said.events() == []
    assert at((1, 0)).apply(frame(2, 0), START) == [START]


def test_a_restart_that_the_fleet_tells_keeps_its_reason() -> None:
    shown = at((1, 0), (1, 1)).apply(frame(2, 0), Restart(reason="drained"))
    assert shown == [Restart(reason="drained")]


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


def test_the_text_that_an_expired_answer_held_back_has_no_token() -> None:
    transcript = at((1, 0), (1, 1), (1, 2))
    choice = Choice(text="abc", token_ids=(0, 1), finish_reason="expired")
    end = End(state="expired", choices=(choice,), of=1, last_seq=3)
    assert transcript.complete(end) == [Delta(token_ids=(), texts=("c",))]


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
    top = tuple(((place, -1.0),) for place in range(3))
    choice = Choice(
        text="abc",
        token_ids=(0, 1, 2),
        logprobs=(-1.0, -2.0, -3.0),
        top_logprobs=top,
        finish_reason="eos",
    )
    [rest] = at((1, 0), (1, 1)).complete(End(state="done", choices=(choice,), of=1, last_seq=3))
    assert rest == Delta(token_ids=(1, 2), texts=("", "bc"), logprobs=(-2.0, -3.0), top_logprobs=top[1:])


# --- attempts that are to be the same


SAME = Start(worker="w", model="m", exact="kind")
PREFILL = Prefill(token_ids=(1, 2), texts=("a", "b"), logprobs=(None, -0.5))


def attempt(transcript: Transcript, epoch: int, *events: Event) -> list[Event]:
    """Let an attempt say these from its start on; gives what is shown."""
    shown: list[Event] = []
    for seq, event in enumerate(events):
        place = frame(epoch, seq)
        assert transcript.judge(place) == "next"
        shown += transcript.apply(place, event)
    return shown


def test_the_same_again_is_not_shown_again() -> None:
    transcript = Transcript()
    first: list[Event] = [SAME, PREFILL, delta("abc")]
    assert attempt(transcript, 1, *first) == first
    assert attempt(transcript, 2, SAME, PREFILL, delta("a"), delta("bcd", 1), delta("e", 4)) == [
        delta("d", 3),
        delta("e", 4),
    ]
    assert transcript.said.events() == [delta("abcde")]
    assert transcript.proves(done("abcde", of=2, last_seq=4))
    assert transcript.close(done("abcde", of=2, last_seq=4)) == []


@pytest.mark.parametrize(
    ("first", "second"),
    [("", ""), ("kind", ""), ("", "kind"), ("kind", "another"), ("kind", "Kind")],
)
def test_without_the_same_promise_it_is_a_restart(first: str, second: str) -> None:
    transcript = Transcript()
    attempt(transcript, 1, SAME.model_copy(update={"exact": first}), delta("abc"))
    again = SAME.model_copy(update={"exact": second})
    assert attempt(transcript, 2, again, delta("abcd")) == [Restart(reason=LOST), again, delta("abcd")]


def test_an_attempt_whose_start_is_lost_has_promised_nothing() -> None:
    transcript = Transcript()
    attempt(transcript, 1, SAME, delta("ab"))
    assert transcript.judge(frame(2, 1), logged=True) == "next"
    assert transcript.apply(frame(2, 1), delta("abc")) == [Restart(reason=LOST), delta("abc")]


def test_where_the_promise_is_broken_all_that_was_said_comes_after_a_restart() -> None:
    transcript = Transcript()
    attempt(transcript, 1, SAME, PREFILL, delta("abcd"))
    again = SAME.model_copy(update={"worker": "w2"})
    assert attempt(transcript, 3, again, PREFILL, delta("ab")) == []
    assert transcript.apply(frame(3, 3), delta("xy", 2)) == [
        Restart(reason=DIFFERS),
        again,
        PREFILL,
        delta("abxy"),
    ]
    assert voided(transcript) == [delta("abcd")]
    assert transcript.apply(frame(3, 4), delta("z", 4)) == [delta("z", 4)]
    assert voided(transcript) == [delta("abcd")]


ONE = delta("ab").model_copy(update={"logprobs": (-1.0, -2.0), "top_logprobs": (((0, -1.0),), ((1, -2.0),))})


@pytest.mark.parametrize(
    "other",
    [
        {"token_ids": (0, 7)},
        {"texts": ("a", "x")},
        {"texts": ("a", "bc")},
        {"logprobs": (-1.0, -2.0000000000000004)},
        {"top_logprobs": (((0, -1.0),), ((1, -2.5),))},
        {"top_logprobs": (((0, -1.0),), ((1, -2.0), (2, -3.0)))},
    ],
)
def test_every_bit_counts(other: dict[str, object]) -> None:
    transcript = Transcript()
    attempt(transcript, 1, SAME, ONE)
    changed = ONE.model_copy(update=other)
    assert attempt(transcript, 2, SAME, changed) == [Restart(reason=DIFFERS), SAME, changed]


def test_the_prompt_counts_too() -> None:
    transcript = Transcript()
    attempt(transcript, 1, SAME, PREFILL)
    other = PREFILL.model_copy(update={"logprobs": (None, -0.75)})
    assert attempt(transcript, 2, SAME, other) == [Restart(reason=DIFFERS), SAME, other]


def test_a_prompt_that_was_not_shown_yet_is() -> None:
    transcript = Transcript()
    attempt(transcript, 1, SAME)
    assert attempt(transcript, 2, SAME, PREFILL, delta("a")) == [SAME, PREFILL, delta("a")]
    assert attempt(transcript, 3, SAME, PREFILL, delta("ab")) == [delta("b", 1)]


def test_several_attempts_are_all_compared_with_what_was_shown() -> None:
    transcript = Transcript()
    attempt(transcript, 1, SAME, PREFILL, delta("abcdef"))
    assert attempt(transcript, 2, SAME) == []
    assert attempt(transcript, 3, SAME, PREFILL, delta("ab")) == []
    assert attempt(transcript, 4, SAME, PREFILL, delta("abcd"), delta("efg", 4)) == [delta("g", 6)]
    assert attempt(transcript, 5, SAME, PREFILL, delta("abcdefgh")) == [delta("h", 7)]
    other = SAME.model_copy(update={"exact": ""})
    assert attempt(transcript, 6, other) == [Restart(reason=LOST), other]
    assert voided(transcript) == [delta("abcdefgh")]


def test_an_attempt_that_has_said_little_takes_back_all_that_was_shown_before_it() -> None:
    transcript = Transcript()
    attempt(transcript, 1, SAME, delta("abc"))
    assert attempt(transcript, 2, SAME) == []
    other = SAME.model_copy(update={"exact": "another"})
    assert attempt(transcript, 3, other) == [Restart(reason=LOST), other]
    assert voided(transcript) == [delta("abc")]


def choice_of(index: int, text: str, first_id: int = 0) -> Delta:
    return delta(text, first_id).model_copy(update={"index": index})


def test_one_choice_may_be_further_than_another() -> None:
    transcript = Transcript()
    attempt(transcript, 1, SAME, choice_of(0, "ab"), choice_of(1, "vwx"))
    assert attempt(transcript, 2, SAME, choice_of(0, "abc"), choice_of(2, "k")) == [
        choice_of(0, "c", 2),
        choice_of(2, "k"),
    ]
    # Now the one that differs takes all choices back, and what they are by now comes again.
    assert transcript.apply(frame(2, 3), choice_of(1, "vX")) == [
        Restart(reason=DIFFERS),
        SAME,
        choice_of(0, "abc"),
        choice_of(2, "k"),
        choice_of(1, "vX"),
    ]
    texts = {line.index: line.text for line in voided(transcript) if isinstance(line, Delta)}
    assert texts == {0: "abc", 1: "vwx", 2: "k"}


def test_an_attempt_that_ends_before_what_was_shown_differs() -> None:
    transcript = Transcript()
    attempt(transcript, 1, SAME, delta("abc"))
    attempt(transcript, 2, SAME, delta("ab"))
    end = done("ab", of=2, last_seq=1)
    assert transcript.proves(end)
    assert transcript.close(end) == [Restart(reason=DIFFERS), SAME, delta("ab")]


def test_a_missing_rest_is_compared_before_it_is_shown() -> None:
    transcript = Transcript()
    attempt(transcript, 1, SAME, delta("abc"))
    attempt(transcript, 2, SAME, delta("a"))
    assert transcript.complete(done("abcd", of=2, last_seq=5)) == [delta("d", 3)]


@pytest.mark.parametrize(
    ("exact", "text", "shown"),
    [
        ("kind", "abcd", [delta("d", 3)]),
        ("kind", "abc", []),
        ("", "abcd", [Restart(reason=LOST), Delta(token_ids=(0, 1, 2, 3), texts=("", "", "", "abcd"))]),
        ("kind", "abX", [Restart(reason=DIFFERS), Delta(token_ids=(0, 1, 2), texts=("", "", "abX"))]),
        ("kind", "ab", [Restart(reason=DIFFERS), Delta(token_ids=(0, 1), texts=("", "ab"))]),
    ],
)
def test_an_attempt_of_which_only_the_end_is_left(exact: str, text: str, shown: list[Event]) -> None:
    transcript = Transcript()
    attempt(transcript, 1, SAME, delta("abc"))
    end = done(text, of=3, last_seq=9).model_copy(update={"exact": exact})
    assert transcript.complete(end) == shown


def test_text_that_was_shown_without_a_token_of_its_own_comes_again_with_one() -> None:
    # What was held back when an attempt failed is shown at its end.
    transcript = Transcript()
    attempt(transcript, 1, SAME, Delta(token_ids=(0, 1), texts=("a", "")), Delta(token_ids=(), texts=("b",)))
    assert attempt(transcript, 2, SAME, Delta(token_ids=(0, 1, 2), texts=("a", "", "bc"))) == [
        Delta(token_ids=(2,), texts=("c",))
    ]


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
            for new in transcript.apply(place, event):
                if isinstance(new, Restart):
                    shown.clear()
                shown.append(new)
        return verdict == "gap"

    for place, event in arriving:
        if take(place, event, logged=False):
            for known in log:
                assert not take(*known, logged=True)
    for known in log:
        take(*known, logged=True)
    assert [event for event in shown if isinstance(event, Delta)] == last


# --- parts


def parts(*values: Any) -> Parts:
    return Parts(values=values)


def output(*values: Any, of: int, last_seq: int) -> End:
    return End(state="done", outputs=values, of=of, last_seq=last_seq)


def test_parts_are_shown_as_they_come() -> None:
    transcript = Transcript()
    events: list[Event] = [START, parts("a", {"b": [1, None]}), parts("c")]
    assert attempt(transcript, 1, *events) == events
    end = output("a", {"b": [1, None]}, "c", of=1, last_seq=2)
    assert transcript.proves(end)
    assert transcript.close(end) == []
    assert not transcript.proves(output("a", "x", "c", of=1, last_seq=2))
    assert not transcript.proves(output("a", of=1, last_seq=2))


def test_an_output_that_did_not_come_in_parts_is_one() -> None:
    transcript = at((1, 0))
    end = output({"label": "x"}, of=1, last_seq=0)
    assert transcript.proves(end)
    assert transcript.close(end) == [parts({"label": "x"})]


def test_missing_parts_are_made_of_the_outputs() -> None:
    transcript = Transcript()
    attempt(transcript, 1, START, parts(1, 2))
    end = output(1, 2, 3, None, of=1, last_seq=9)
    assert not transcript.proves(end)
    assert transcript.complete(end) == [parts(3, None)]
    other = Transcript()
    attempt(other, 1, START, parts(1, 5))
    with pytest.raises(ValueError, match="not how the output begins"):
        other.complete(end)


def test_a_new_attempt_takes_parts_back() -> None:
    transcript = Transcript()
    attempt(transcript, 1, START, parts(1, 2))
    assert attempt(transcript, 2, START, parts(1)) == [Restart(reason=LOST), START, parts(1)]
    assert voided(transcript) == [parts(1, 2)]
    assert transcript.complete(output(1, 7, of=3, last_seq=1)) == [Restart(reason=LOST), parts(1, 7)]


def test_parts_that_are_promised_to_be_the_same_are_shown_once() -> None:
    transcript = Transcript()
    attempt(transcript, 1, SAME, parts(1, 2))
    assert attempt(transcript, 2, SAME, parts(1), parts(2, 3)) == [parts(3)]
    assert attempt(transcript, 3, SAME, parts(1, 2), parts(4)) == [
        Restart(reason=DIFFERS),
        SAME,
        parts(1, 2, 4),
    ]
