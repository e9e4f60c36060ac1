"""What became of a request, in words: each state, and no line too long whatever others have written."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any, get_args

import pytest
from rich.cells import cell_len

from streamfleet_common.batch_notes import BatchNote
from streamfleet_common.frames import Frame
from streamfleet_common.records import Record
from streamfleet_common.schemas import Batch, Choice, End, EndState, Failure, Start, State, Timing, Usage
from streamfleet_producer.operations.flight import Flight, Line
from streamfleet_producer.operations.flight_story import WIDTH, story, wrapped

NOW_MS = 1_796_000_100_000
RID = "00" + "a" * 32
CHOICE = Choice(text="secret answer", token_ids=(1, 2), finish_reason="eos")


def record(state: State, **fields: Any) -> Record:
    values: dict[str, Any] = {
        "epoch": 1,
        "tenant": "acme",
        "accepted_at_ms": NOW_MS - 10_000,
        "started_at_ms": 0,
        "attempts": 0,
        "crashes": 0,
        "solo_losses": 0,
        "deadline_at_ms": NOW_MS + 50_000,
        "owner": "",
        "digest": "d",
        "end": None,
        "lane": "normal",
        "place": "n1-0",
    }
    return Record(state=state, **{**values, **fields})


def waiting(**fields: Any) -> Flight:
    values: dict[str, Any] = {"line": Line("normal", 3, 17), "ready": ("w0",)}
    return Flight(RID, "q", record("queued"), NOW_MS, **{**values, **fields})


def ended(
    state: EndState, *, started: bool = True, of_record: dict[str, Any] | None = None, **end: Any
) -> Flight:
    """One that was accepted 10 s ago, was begun after 4 s and ended 5 s later."""
    started_at_ms = NOW_MS - 6000 if started else 0
    times = (NOW_MS - 10_000, started_at_ms, NOW_MS - 1000, int(started))
    values: dict[str, Any] = {
        "queued_at_ms": times[0],
        "started_at_ms": times[1],
        "ended_at_ms": times[2],
        "attempt": times[3],
    }
    at_end: dict[str, Any] = {
        "started_at_ms": started_at_ms,
        "attempts": int(started),
        "deadline_at_ms": 0,
        "lane": None,
    }
    at_end |= {"end": Frame(2, 1, b"", times), "place": ""}
    return Flight(
        RID,
        "q",
        record(state, **{**at_end, **(of_record or {})}),
        NOW_MS,
        end=End(state=state, **values, **end),
    )


def text(flight: Flight) -> str:
    """As one line, to look for sentences in."""
    return " ".join(" ".join(story(flight)).split())


# --- of one that was answered


def test_a_generation_from_acceptance_to_end() -> None:
    flight = ended(
        "done",
        choices=(CHOICE,),
        usage=Usage(prompt_tokens=34, completion_tokens=41, cached_tokens=24),
        timing=Timing(wait_ms=500.0, prefill_ms=300.0, decode_ms=3950.0),
        batch=Batch(id="w0/7", size=3, reason="ratio"),
        model="m",
        revision="r",
        worker="w0",
    )
    flight = replace(flight, note=BatchNote("w0/7", "ratio", 3, 0.0, 3, (RID, "0" * 34, "1" * 34)))
    assert story(flight) == [
        f"request   {RID} of queue q",
        "state     done after 9.00 s; accepted 2026-11-30 00:54:50 UTC",
        "time      44 % of it went into waiting in line for a worker.",
        "  queued   ██████████████████                           4.00 s   44 %",
        "  wait                       ██                         500 ms    6 %",
        "  prefill                      █                        300 ms    3 %",
        "  decode                        ██████████████████      3.95 s   44 %",
        "  rest                                            █     250 ms    3 %",
        "batch     It joined the running batch w0/7: 3 rows ran then. Other rows ran, and",
        "          the newcomers were enough for these to be held up for them.",
        "with it   2 other requests:",
        "          " + "0" * 34,
        "          " + "1" * 34,
        "tokens    34 read, 24 of them from the prefix cache; 41 written (10.1 a second",
        "          after the first)",
        "worker    w0, which serves m (r)",
    ]


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("full", "It was full, so it was launched at once."),
        ("delay", "Its oldest item had waited `max_delay` for company"),
        ("drain", "Its worker was to end"),
        ("moon", "Its worker says it was launched for: moon."),
    ],
)
def test_why_a_micro_batch_was_launched(reason: str, words: str) -> None:
    batch = Batch(id="w0/7", size=32, padded_ratio=0.123, reason=reason)
    said = text(ended("done", outputs=(1,), timing=Timing(device_ms=5.0, batches=2), batch=batch))
    assert (
        "It ran in w0/7, a batch of 32 items. 12 % of its tokens only filled rows up to one length." in said
    )
    assert words in said
    assert "It was the last of 2 batches with items of this request." in said


def test_what_others_had_asked_for_is_not_told_as_rows() -> None:
    said = text(ended("done", outputs=(1,), batch=Batch(id="w0/7", size=2, reason="full")))
    assert "It ran in w0/7, a batch of 2 items." in said


def test_neighbours_beyond_a_few_are_counted() -> None:
    rids = (RID, *(f"{number:034x}" for number in range(63)))
    flight = ended("done", choices=(CHOICE,), batch=Batch(id="b", size=200, reason="full"))
    lines = story(replace(flight, note=BatchNote("b", "full", 200, 0.0, 200, rids)))
    assert "with it   199 other requests, of which 8:" in lines
    assert sum(line.strip() in rids for line in lines) == 8
    assert "Not known" in text(flight)


def test_what_was_cut() -> None:
    one = ended("done", choices=(CHOICE,), usage=Usage(prompt_tokens=8, cut_tokens=5, truncated=1))
    assert "8 read; 5 cut off its prompt, as `truncate` asked" in text(one)
    many = ended("done", outputs=(1,), usage=Usage(prompt_tokens=8, cut_tokens=5, truncated=3))
    assert "5 cut off 3 of its texts" in text(many)


# --- of one that was not


@pytest.mark.parametrize(
    ("flight", "words"),
    [
        (ended("cancelled", started=False), "cancelled it. If it is still wanted, send it again."),
        (ended("expired", started=False), "No worker began it in time."),
        (ended("expired"), "It was begun, and its deadline came first"),
        (ended("dead"), "do not send it again as it is. `streamfleet dead list` shows the letter"),
        (
            ended(
                "failed", error=Failure(code="generation_failed", message="x", details={"retryable": True})
            ),
            "generation_failed: x to do It may do better at the next try: send it again.",
        ),
        (
            ended("failed", error=Failure(code="generation_failed", message="x")),
            "It would fail again as it is",
        ),
        (
            ended("failed", error=Failure(code="invalid_request", message="x", details={"problems": ("x",)})),
            "The request itself is at fault",
        ),
        (ended("failed", error=Failure(code="too_long", message="x")), "Shorten the prompt"),
        (
            ended("failed", error=Failure(code="of_another_version", message="x")),
            "It would fail again as it is",
        ),
        (ended("failed"), "Its worker gave no reason"),
    ],
)
def test_what_to_do(flight: Flight, words: str) -> None:
    assert words in text(flight)


def test_what_no_worker_began_says_so_and_spent_all_in_line() -> None:
    said = text(ended("expired", started=False))
    assert "100 % of it went into waiting in line for a worker." in said
    assert "No worker ever began it." in said


def test_attempts_and_what_came_of_them() -> None:
    flight = ended("done", choices=(CHOICE,), of_record={"attempts": 3, "crashes": 1})
    assert (
        "3. 1 worker was lost with it. 1 other attempt came to nothing: it failed and was tried again, or "
        "its worker ended and gave it back."
    ) in text(flight)
    begun = [
        Start(worker=f"w{number}", model="m", queued_at_ms=1000, started_at_ms=1000 + 500 * number)
        for number in range(2)
    ]
    assert "Begun by w0 after 0 ms, by w1 after 500 ms." in text(replace(flight, starts=tuple(begun)))
    suspect = ended("dead", of_record={"attempts": 3, "crashes": 3, "solo_losses": 1})
    assert "3. 3 workers were lost with it, 1 of them running nothing else." in text(suspect)


def test_an_end_that_cannot_be_read_is_told() -> None:
    said = text(replace(ended("done"), end=None))
    assert "done after 9.00 s" in said
    assert "It cannot be read here" in said


# --- of one that is open


def test_where_it_waits() -> None:
    flight = waiting(others=(("high", 5),), ended_a_second=2.0)
    assert story(flight) == [
        f"request   {RID} of queue q",
        "state     queued for 10.0 s; accepted 2026-11-30 00:54:50 UTC",
        "line      Place 3 of 17 in lane normal. Also waiting: 5 in high; lanes take",
        "          turns by weight. The queue ends 2.0 requests a second: at that pace it",
        "          is begun within 1.50 s, other lanes left aside.",
        "served    1 worker takes work of this queue now.",
        "deadline  2026-11-30 00:55:50 UTC, in 50.0 s",
    ]


@pytest.mark.parametrize(
    ("flight", "words"),
    [
        (waiting(ready=()), "Nobody serves this queue now: start a worker"),
        (waiting(ready=(), draining=("w0",)), "Nobody takes work now: 1 worker drains. Start another."),
        (waiting(draining=("w1", "w2")), "1 worker takes work of this queue now. 2 others drain."),
        (waiting(is_paused=True), "The queue takes no new requests in; those that it has go on"),
        (waiting(line=None), "A worker has just taken it"),
        (waiting(line=None, is_far=True), "It waits behind the first 1,000 of its lane."),
        (waiting(line=Line("bulk", 9, 1000, is_cut=True)), "Place 9 of 1,000 or more in lane bulk."),
        (
            waiting(line=Line("solo", 1, 1)),
            "It is suspected of ending workers, so it will run alone; place 1.",
        ),
        (replace(waiting(), record=record("queued", place="N1-0")), "It came back from a worker"),
        (
            replace(
                waiting(next_try_at_ms=NOW_MS + 3000, line=None),
                record=record("queued", place="", attempts=1),
            ),
            "It failed, and waits for its next try, which may be in 3.00 s.",
        ),
        (
            replace(waiting(), record=record("queued", deadline_at_ms=NOW_MS - 2000)),
            "2.00 s ago: the next sweep ends it as expired",
        ),
    ],
)
def test_of_one_that_waits(flight: Flight, words: str) -> None:
    assert words in text(flight)


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ({"ready": ("w0",)}, "w0 runs it."),
        ({"draining": ("w0",)}, "w0 runs it, and ends when it has: it drains."),
        ({"ready": ("w1",)}, "w0 has it, and shows no card now: it may be gone."),
    ],
)
def test_of_one_that_runs(workers: dict[str, Any], words: str) -> None:
    running = record("running", owner="w0", started_at_ms=NOW_MS - 2000, attempts=1)
    said = text(Flight(RID, "q", running, NOW_MS, **workers))
    assert "running for 2.00 s" in said
    assert words in said
    assert "The first one." in said


# --- of any


def test_neither_prompt_nor_answer_is_told() -> None:
    assert "secret" not in text(ended("done", choices=(CHOICE,)))


def test_no_line_is_wider_than_a_terminal() -> None:
    draw = random.Random(7)
    letters = "ab ü\t\n\x1b[2J漢字🙂e\u0301|%"

    def words(most: int) -> str:
        return "".join(draw.choice(letters) for _ in range(draw.randint(0, most)))

    def number() -> int:
        return draw.choice([0, 1, draw.randint(0, 10**6), 2**53])

    for _ in range(120):
        state: EndState = draw.choice(get_args(EndState))
        flight = ended(
            state,
            started=draw.random() < 0.8,
            of_record={"attempts": number(), "crashes": number(), "solo_losses": number()},
            choices=(CHOICE,) * draw.randint(0, 2),
            usage=Usage(
                prompt_tokens=number(),
                completion_tokens=number(),
                cached_tokens=number(),
                cut_tokens=number(),
                truncated=number(),
            ),
            timing=Timing(
                wait_ms=draw.random() * number(),
                tokenize_ms=draw.random() * number(),
                prefill_ms=draw.random() * number(),
                decode_ms=draw.random() * number(),
                device_ms=draw.random() * number(),
                batches=number(),
            ),
            batch=draw.choice(
                [None, Batch(id=words(200), size=number(), padded_ratio=draw.random(), reason=words(32))]
            ),
            error=draw.choice([None, Failure(code=words(64), message=words(4000))]),
            model=words(200),
            revision=words(200),
            worker=words(200),
        )
        starts = tuple(
            Start(worker=words(200), model="m", started_at_ms=number()) for _ in range(draw.randint(0, 12))
        )
        flight = replace(flight, queue=words(64), starts=starts)
        opened = replace(
            waiting(
                ended_a_second=draw.random(),
                others=(("high", number()),),
                line=Line("normal", number(), number()),
                is_paused=True,
                starts=starts,
            ),
            record=record(draw.choice(["queued", "running"]), owner=words(200), deadline_at_ms=number()),
        )
        for line in (*story(flight), *story(opened)):
            assert cell_len(line) <= WIDTH, line
            assert line.isprintable(), line


def test_lines_are_broken_between_words_where_that_is_possible() -> None:
    assert wrapped("one two three", 7) == ["one two", "three"]
    assert wrapped("abcdefgh ij", 3) == ["abc", "def", "gh", "ij"]
    assert wrapped("漢字漢字", 5) == ["漢字", "漢字"]
    assert wrapped("", 5) == [""]
