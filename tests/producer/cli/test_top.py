"""What `streamfleet top` makes of readings: rows by hand, and screens that fit."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len

from broker_parts import card
from streamfleet_common.cards import Card
from streamfleet_common.dead_letters import DeadLetter
from streamfleet_common.figures import QueueFigures
from streamfleet_common.worker_stats import TOKEN_BOUNDS_S, WAIT_BOUNDS_S, WorkerStats
from streamfleet_producer.cli.top_document import document
from streamfleet_producer.cli.top_frame import frame, picture
from streamfleet_producer.cli.top_reading import Member, Reading
from streamfleet_producer.cli.top_rows import EndedRates, Percentiles, percentiles, queue_rows, worker_rows
from streamfleet_producer.cli.top_values import count, duration, fitted, percent, rate
from streamfleet_producer.cli.top_view import Order, Question, View

AT_MS = 1_790_000_000_000
REDIS = "redis://a-long-name-of-a-server.example.internal:6379/0?protocol=3&socket_timeout=5"
LONG = "a-queue-with-a-very-long-name-that-no-column-of-80-has-room-for"
SIZES = ((80, 24), (80, 10), (60, 24), (100, 30), (120, 40), (200, 50), (40, 8), (80, 3))


def figures(queue: str = "q", **changes: Any) -> QueueFigures:
    values: dict[str, Any] = {
        "queue": queue,
        "queued": 0,
        "running": 0,
        "max_depth": 100,
        "open_tokens": 0,
        "waiting_tokens": 0,
        "lanes": {"high": 0, "normal": 0, "bulk": 0, "solo": 0},
        "oldest_s": {"high": 0.0, "normal": 0.0, "bulk": 0.0},
        "retrying": 0,
        "dead_letters": 0,
        "is_paused": False,
        "ready": 0,
        "draining": 0,
        "ended": 0,
        "last_sweep_s": None,
    }
    return QueueFigures(**{**values, **changes})


def member(worker: str = "w1", queue: str = "q", *, is_asked: bool = False, **fields: Any) -> Member:
    made = card(worker)
    batch = fields.pop("max_batch_size", 4)
    limits = made.limits.changed({"max_batch_size": batch})
    return Member(Card(**{**dict(made), "queue": queue, "limits": limits, **fields}), is_asked)


def waits(**counts: int) -> tuple[int, ...]:
    """Counts by the bound, in ms, up to which they are."""
    by_bound = {round(bound * 1000): 0 for bound in WAIT_BOUNDS_S} | {
        int(name.removeprefix("ms")): value for name, value in counts.items()
    }
    return (*by_bound.values(), 0)


def letter(number: int = 1, **changes: Any) -> DeadLetter:
    values: dict[str, Any] = {
        "id": f"{AT_MS + number}-0",
        "rid": "00" + "a" * 32,
        "why": "workers die of this request, also when they run nothing else",
        "tenant": "acme",
        "lane": "normal",
        "accepted_at_ms": AT_MS - 5000,
        "attempts": 3,
        "crashes": 3,
        "solo_losses": 1,
        "worker": "w1",
        "digest": "d" * 64,
        "size": 1234,
        "payload": b"the prompt that nobody shall see",
    }
    return DeadLetter(**{**values, **changes})


def shown(queues: Sequence[QueueFigures], workers: Sequence[Member] = ()) -> View:
    reading = Reading(AT_MS, tuple(queues), tuple(workers))
    view = View()
    view.take(reading, queue_rows(reading, {}), worker_rows(reading))
    return view


def texts(view: View, width: int = 80, height: int = 24) -> list[str]:
    return [line.plain for line in frame(view, REDIS, 2.0, width, height)]


# --- rows


def test_percentiles_lie_between_the_bounds_as_values_are_thought_to() -> None:
    # 10 values up to 100 ms (above 50), 10 up to 250 ms: the median is the last of the first ten.
    some = waits(ms100=10, ms250=10)
    found = percentiles([some], WAIT_BOUNDS_S)
    assert found is not None
    assert found.p50 == pytest.approx(0.1)
    assert found.p95 == pytest.approx(0.1 + 0.15 * 0.9)  # the 19th: nine tenths of the way
    assert found.p99 == pytest.approx(0.1 + 0.15 * 0.98)
    # The same counts from two workers are the same percentiles.
    assert percentiles([waits(ms100=10), (), waits(ms250=10)], WAIT_BOUNDS_S) == found
    first = percentiles([waits(ms1=4)], WAIT_BOUNDS_S)
    assert first is not None
    assert (first.p50, first.p95, first.p99) == pytest.approx((5e-4, 95e-5, 99e-5))


def test_percentiles_of_nothing_are_none_and_beyond_all_bounds_the_last() -> None:
    assert percentiles([], WAIT_BOUNDS_S) is None
    assert percentiles([(), (0,) * 19], WAIT_BOUNDS_S) is None
    assert percentiles([(0,) * 18 + (3,)], WAIT_BOUNDS_S) == Percentiles(7200.0, 7200.0, 7200.0)
    # A worker of another version may tell more counts than there are bounds, or fewer.
    assert percentiles([(1,)], TOKEN_BOUNDS_S) == percentiles([(1, 0, 0)], TOKEN_BOUNDS_S)


def test_a_queue_is_the_sum_of_its_workers() -> None:
    busy = WorkerStats(
        window_s=20.0,
        ended=40,
        failed=10,
        prompt_tokens=200,
        generated_tokens=1000,
        batches=10,
        batch_rows=30,
        ttft=waits(ms100=10),
    )
    young = WorkerStats(
        window_s=5.0, ended=5, generated_tokens=50, batches=10, batch_rows=20, ttft=waits(ms250=10)
    )
    workers = [
        member("w1", stats=busy),
        member("w2", stats=young, max_batch_size=2),
        member("w3", stats=WorkerStats()),  # has just begun
        member("old"),  # of a version that says nothing
        member("other", queue="p", stats=busy),
    ]
    reading = Reading(AT_MS, (figures("p"), figures(ready=4)), tuple(workers))
    _, row = queue_rows(reading, {})
    assert row.ended_per_s == pytest.approx(40 / 20 + 5 / 5)
    assert row.failed_per_s == pytest.approx(10 / 20)
    assert row.prompt_tokens_per_s == pytest.approx(200 / 20)
    assert row.generated_tokens_per_s == pytest.approx(1000 / 20 + 50 / 5)
    assert row.batch_fill == pytest.approx((30 + 20) / (10 * 4 + 10 * 2))
    assert row.ttft_s == percentiles([waits(ms100=10, ms250=10)], WAIT_BOUNDS_S)
    assert row.itl_s is None
    assert row.models == ("m",)
    assert queue_rows(reading, {"q": 7.0})[1].ended_per_s == 7.0  # what Redis counted goes before


def test_who_says_nothing_has_dashes() -> None:
    (row,) = worker_rows(Reading(AT_MS, (figures(),), (member("old"),)))
    assert (row.running, row.ended_per_s, row.batch_fill, row.ttft_s, row.kv_usage) == (None,) * 5
    (line,) = [line for line in texts(shown([figures()], [member("old")])) if line.startswith("  old ")]
    assert line.split()[3:] == ["-"] * 8


def test_workers_drain_by_their_card_and_are_asked_by_a_mark() -> None:
    members = [member("a"), member("b", is_asked=True), member("c", is_asked=True, state="draining")]
    rows = worker_rows(Reading(AT_MS, (), tuple(members)))
    assert [row.state for row in rows] == ["ready", "asked", "draining"]


def test_the_rate_of_ends_is_that_of_ten_seconds() -> None:
    rates = EndedRates()

    def at(second: float, **ended: int) -> dict[str, float]:
        queues = tuple(figures(queue, ended=number) for queue, number in ended.items())
        return rates.take(Reading(AT_MS + round(second * 1000), queues, ()))

    assert at(0, q=100) == {}
    assert at(2, q=120, new=5) == {"q": 10.0}
    assert at(4, q=120, new=9) == {"q": 5.0}
    assert at(12, q=220, new=10) == {"q": 10.0, "new": 0.5}  # since second 2
    assert at(14, q=0, new=10) == {"new": pytest.approx(1 / 10)}  # Redis was emptied


def test_the_oldest_is_of_lanes_where_something_waits() -> None:
    lanes = {"high": 0, "normal": 1, "bulk": 2, "solo": 0}
    old = figures(queued=3, lanes=lanes, oldest_s={"high": 0.0, "normal": 3.5, "bulk": 60.0})
    gone = figures("gone", oldest_s={"normal": 9.0}, lanes={"normal": 0})
    first, second = queue_rows(Reading(AT_MS, (old, gone), ()), {})
    assert first.oldest_s == 60.0
    assert second.oldest_s is None
    assert first.is_unserved
    assert not second.is_unserved


def test_values_take_five_cells_at_most_whatever_they_are() -> None:
    numbers = [
        0.0,
        *(factor * 10.0**power for power in range(-7, 15) for factor in (1, 1.5, 9.949, 9.96, 9.9999)),
    ]
    for number in numbers:
        for show in (count, rate, duration):
            assert len(show(number)) <= 5, (show, number)
    assert [count(n) for n in (0, 9999, 12_345, 99_960, 1_234_567)] == ["0", "9999", "12.3k", "100k", "1.2M"]
    assert [rate(x) for x in (None, 0.0, 0.004, 0.25, 12.34, 1234.0)] == [
        "-",
        "0",
        "<0.01",
        "0.25",
        "12.3",
        "1234",
    ]
    seconds = (0.00025, 0.0025, 0.25, 2.5, 25.0, 125.0, 11_100.0, 345_600.0)
    assert [duration(s) for s in seconds] == [
        ".25ms",
        "2.5ms",
        "250ms",
        "2.50s",
        "25.0s",
        "2m05",
        "3h05",
        "4d",
    ]
    assert [percent(x) for x in (None, 0.0, 0.874, 1.0)] == ["-", "0%", "87%", "100%"]


def test_long_names_keep_both_ends() -> None:
    assert fitted("chat-7b-instruct", 9) == "chat…ruct"
    assert fitted("q", 3) == "q  "
    assert fitted("7", 3, is_left=False) == "  7"
    for name, width in itertools.product((LONG, "模型" * 30, "e\u0301" * 30, "é模" * 9), range(1, 30)):
        assert cell_len(fitted(name, width)) == width


# --- screens


def crowd(queues: int) -> View:
    """So many queues, with two workers each, and names of all kinds."""
    names = [(LONG[: 40 + at % 20] if at % 3 else "q") + f"-{at}" for at in range(queues)]
    stats = WorkerStats(
        window_s=30.0,
        ended=10**6,
        failed=1,
        generated_tokens=10**9,
        batches=10**6,
        batch_rows=3 * 10**6,
        running=512,
        waiting=100_000,
        kv_usage=0.99,
        ttft=(9,) * 19,
        itl=(10**9,) * 16,
    )
    found = [
        figures(
            name, queued=10**6 + at, running=12_345, ready=at % 3, is_paused=at % 2 == 0, dead_letters=10**4
        )
        for at, name in enumerate(names)
    ]
    workers = [
        member(
            f"wörker-模型-{'x' * 60}-{at}-{number}",
            name,
            stats=stats,
            model="modèle 模型 " * 9,
            is_asked=at == 1,
        )
        for at, name in enumerate(names)
        for number in (1, 2)
    ]
    return shown(found, workers)


@pytest.mark.parametrize("queues", [0, 1, 3, 50])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_every_screen_fits(queues: int, width: int, height: int) -> None:
    view = crowd(queues)
    view.trouble = "x" * 300
    for keys in (
        ["\t", "end"],
        ["s", "end"],
        ["r", "home", "pgdn"],
        ["p"],
        ["n"],
        ["tab", "end", "D"],
        ["n"],
        ["?"],
    ):
        lines = texts(view, width, height)
        assert len(lines) == height
        assert all(cell_len(line) <= width for line in lines), lines
        for key in keys:
            view.press(key)
    assert len(texts(view, width, height)) == height
    view.press("esc")
    view.take_letters(LONG, [letter(at, why="模型 " * 100, tenant="t" * 64) for at in range(50)])
    for key in ("end", "enter", "esc"):
        lines = texts(view, width, height)
        assert len(lines) == height
        assert all(cell_len(line) <= width for line in lines), lines
        view.press(key)
    for line in picture(view, REDIS, width):
        assert cell_len(line.plain) <= width


def test_the_chosen_row_stays_in_sight_among_many() -> None:
    view = crowd(50)
    line = ""
    for key in ("end", "home", "pgdn", "tab", "end"):
        view.press(key)
        (line,) = [line for line in texts(view) if line.startswith(">")]
    row = view.workers[view.worker_at]
    assert row is view.workers[-1]
    assert line.split()[1].endswith(row.worker[-4:])


def test_80_columns_have_all_of_the_main_figures() -> None:
    stats = WorkerStats(window_s=10.0, ended=20, generated_tokens=5000, batches=5, batch_rows=15, running=3)
    stats = stats.changed({"ttft": waits(ms100=10, ms250=10), "kv_usage": 0.25})
    lanes = {"high": 0, "normal": 7, "bulk": 0, "solo": 0}
    queue = figures(queued=7, running=3, ready=1, dead_letters=2, lanes=lanes, oldest_s={"normal": 65.0})
    lines = texts(shown([queue], [member(stats=stats)]))
    (line,) = [line for line in lines if line.startswith("> q")]
    assert " ".join(line.split()) == "> q 7 3 1m05 1 2.00 500 100ms 235ms - - 75% 2"
    (line,) = [line for line in lines if line.startswith("  w1")]
    assert " ".join(line.split()) == "w1 q ready 3 0 75% 25% 2.00 500 235ms -"
    assert lines[1] == "1 queue  1 worker  7 waiting  3 running  2 dead  2.00 ended/s  500 tok/s"


def test_80_columns_have_all_of_the_totals_of_a_fleet_in_trouble() -> None:
    stats = WorkerStats(window_s=10.0, ended=1230, failed=20, generated_tokens=12_340, running=8)
    queue = figures(queued=1204, running=96, ready=14, draining=2, dead_letters=12)
    workers = [member(f"w{n}", stats=stats) for n in range(14)]
    workers += [member(f"x{n}", state="draining", stats=stats) for n in range(2)]
    few = figures(queued=8, running=16, ready=1, draining=1, dead_letters=1)
    line = "1 queue 1 worker 1 draining 8 waiting 16 running 1 dead 246 ended/s 2468 tok/s"
    assert texts(shown([few], [workers[0], workers[-1]]))[1] == line
    line = "2 draining 1204 waiting 96 running 12 dead 1968 ended/s 19.7k tok/s"
    assert texts(shown([queue], workers))[1] == line
    assert texts(shown([queue], workers), 120)[1].startswith("1 queue  14 workers  2 draining  1204 waiting")


def test_80_columns_have_how_long_redis_has_been_silent() -> None:
    view = shown([figures()], [])
    view.silent_s = 7.9
    for width in (80, 200):
        (head, *_) = texts(view, width)
        assert head.startswith("streamfleet top  redis://")
        assert head.endswith(" UTC  no answer for 7 s")
        assert cell_len(head) == width
    view.question = Question("drain it?", Order("drain"))
    assert "no answer for 7 s" in texts(view)[0]
    assert view.reading is not None
    view.take(view.reading, view.queues, view.workers)
    assert "no answer" not in texts(view)[0]


def test_what_is_written_by_hand_steers_no_terminal() -> None:
    evil = "q\x1b]0;title\x07\nnext"
    view = shown([figures(evil)], [member("w\x1b[2J", stats=WorkerStats())])
    view.take_letters(evil, [letter(why="because\x1b[2J\nof", tenant="\x1b[31mt")])
    for key in ("enter", "esc", "esc", "p", "n"):
        assert not any("\x1b" in line or "\n" in line or "\x07" in line for line in texts(view))
        view.press(key)


def test_a_prompt_is_never_shown() -> None:
    view = shown([figures(dead_letters=1)])
    view.take_letters("q", [letter()])
    view.press("enter")
    text = "\n".join(texts(view))
    assert "1,234 bytes" in text
    assert "nobody shall see" not in text


# --- keys


def test_rows_are_sorted_by_each_column_and_back() -> None:
    view = shown([figures("a", queued=1, ready=1), figures("b", queued=3), figures("c", queued=2, running=9)])

    def order() -> str:
        return "".join(row.queue for row in view.queues)

    assert order() == "abc"
    view.press("s")
    assert order() == "bca"  # the longest queue first
    view.press("r")
    assert order() == "acb"
    view.press("s")
    assert order() == "cab"  # by what runs; equals by name
    view.press("S")
    view.press("S")
    assert order() == "abc"
    view.press("r")
    assert order() == "cba"


def test_the_chosen_row_is_the_same_queue_after_a_new_order() -> None:
    view = shown([figures("a", queued=1), figures("b", queued=3)])
    view.press("down")
    view.press("s")
    assert view.queues[view.queue_at].queue == "b"
    view.press("p")
    assert view.press("y") == Order("pause", "b")


def asked(view: View) -> str:
    """What is asked now; nothing if nothing is."""
    return "" if view.question is None else view.question.text


def test_who_may_not_read_a_queue_is_told_so() -> None:
    view = shown([figures()])
    assert texts(view)[-1].startswith("q quit")
    refused = Reading(AT_MS, (), (), unread=1, refusal="Redis refuses this user: check the ACL")
    view.take(refused, [], [])
    assert texts(view)[-1] == "queues not read: Redis refuses this user: check the ACL"


def test_80_columns_say_what_is_a_yes_whatever_is_asked_about() -> None:
    view = shown([figures(LONG)], [member("w" * 80, LONG)])
    view.press("p")
    assert texts(view)[-1].endswith("refuse new requests?  y yes")
    for key in ("n", "tab", "D"):
        view.press(key)
    assert texts(view)[-1].endswith("let it finish and end?  y yes")
    assert texts(view, 120)[-1].endswith("  y yes, any other key no")


def test_nothing_is_changed_without_a_yes() -> None:
    workers = [member("w", "b"), member("x", "b", is_asked=True)]
    view = shown([figures("a"), figures("b", is_paused=True)], workers)
    assert view.press("p") is None
    for key in ("n", "q", "esc", "enter", " "):
        assert asked(view).startswith("pause a")
        assert view.press(key) is None
        assert asked(view) == ""
        view.press("p")
    assert view.press("y") == Order("pause", "a")
    view.press("down")
    view.press("p")
    assert asked(view).startswith("open b")
    assert view.press("y") == Order("resume", "b")
    assert view.press("D") is None
    assert asked(view) == ""  # a queue is chosen, not a worker
    view.press("tab")
    view.press("D")
    assert asked(view).startswith("drain w")
    assert view.press("Y") == Order("drain", "b", "w")
    view.press("down")
    assert view.press("D") is None
    assert asked(view) == ""  # it drains already


def test_keys_of_empty_tables_do_nothing() -> None:
    view = shown([])
    for key in ("p", "d", "enter", "down", "tab", "D", "end", "s", "r", "p", "d"):
        assert view.press(key) is None
    assert view.press("q") == Order("quit")


def test_more_dead_letters_are_asked_for_at_the_end_of_those_there_are() -> None:
    view = shown([figures(dead_letters=150)])
    assert view.press("d") == Order("letters", "q")
    view.take_letters("q", [letter(at) for at in range(100)])
    assert view.press("end") == Order("more_letters", "q")
    view.take_letters("q", [letter(at) for at in range(100, 150)])
    assert view.letter_at == 99
    assert view.press("down") is None
    view.press("enter")
    assert f"{AT_MS + 100}-0" in "\n".join(texts(view))


# --- for scripts


def test_the_document_has_its_fields_always() -> None:
    stats = WorkerStats(window_s=30.0, ended=3, batches=3, batch_rows=4, ttft=waits(ms100=1), kv_usage=0.5)
    full = Reading(AT_MS, (figures(ready=1),), (member(stats=stats),))
    bare = Reading(AT_MS, (figures(),), (member(),))
    documents = [
        document(REDIS, reading, queue_rows(reading, {}), worker_rows(reading)) for reading in (full, bare)
    ]
    for kind in ("queues", "workers"):
        (first,), (second,) = (found[kind] for found in documents)
        assert list(first) == list(second)
    (worker,) = documents[0]["workers"]
    assert worker["ended_per_s"] == 0.1
    assert worker["batch_rows"] == 1.333333
    assert worker["ttft_s"] == {"p50": 0.075, "p95": 0.0975, "p99": 0.0995}
    assert documents[1]["workers"][0]["ttft_s"] is None
    assert documents[0]["at"] == "2026-09-21T14:13:20.000+00:00"


def test_the_page_tells_all_fields_and_columns() -> None:
    page = (Path(__file__).parents[3] / "docs" / "top.md").read_text()
    told = set(re.findall(r"`([^`\n]+)`", page))
    reading = Reading(AT_MS, (figures(),), (member(),))
    made = document(REDIS, reading, queue_rows(reading, {}), worker_rows(reading))
    assert {*made, *made["queues"][0], *made["queues"][0]["lanes"], *made["workers"][0]} <= told
    heads = {
        word for line in picture(shown([figures()], [member()]), REDIS, 200) for word in line.plain.split()
    }
    assert {"WAIT", "E2E95", "RETRY", "KV", "DEVICE"} <= heads
    columns = {head for head in heads if re.fullmatch(r"[A-Z][A-Z0-9/]+", head)}
    assert columns - {"QUEUE", "WORKER", "UTC"} <= told
