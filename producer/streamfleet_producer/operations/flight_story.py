"""What became of a request, in words for a person: lines of at most 80 columns."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from rich.cells import cell_len

from streamfleet_common.backlog import MOST_SEEN
from streamfleet_common.schemas import End
from streamfleet_producer.operations.advice import advice
from streamfleet_producer.operations.flight import Flight
from streamfleet_producer.operations.launch_words import launch_words
from streamfleet_producer.operations.phases import Phase, bars, duration, percentages, phases_of

WIDTH = 80
LABEL = 10
BAR = 40
MOST_NEIGHBOURS = 8
MOST_ATTEMPTS = 10
MOST_CHARS = 400
"""Of a text that comes from elsewhere: an error's message, a worker's name."""
_SPENT = {
    "queued": "waiting in line for a worker",
    "earlier": "waiting in line and earlier attempts",
    "tokenize": "turning its texts into tokens",
    "wait": "waiting in its worker for a batch",
    "prefill": "reading its prompt",
    "decode": "writing its answer, token by token",
    "device": "computing its batches",
    "rest": "the way into its worker and out of it",
    "run": "its run, of which the worker tells no more",
}


def story(flight: Flight, *, full: str = "█") -> list[str]:
    """The lines. `full` is what bars are made of."""
    lines = _labelled("request", f"{flight.id} of queue {_plain(flight.queue)}")
    lines += _labelled("state", _state(flight))
    if flight.end is not None:
        lines += _time(phases_of(flight.end), full)
    for label, text in _parts(flight):
        lines += _labelled(label, text)
        if label == "with it":
            lines += [" " * LABEL + rid for rid in flight.neighbours[:MOST_NEIGHBOURS]]
    return lines


# --- parts


def _parts(flight: Flight) -> list[tuple[str, str]]:
    record, end = flight.record, flight.end
    parts: list[tuple[str, str]] = []
    if end is not None:
        if end.error is not None:
            parts.append(("why", f"{end.error.code}: {_plain(end.error.message)}"))
        parts.append(("to do", advice(flight)))
        if end.batch is not None:
            parts.append(("batch", _plain(launch_words(end.batch, end))))
            parts.append(("with it", _neighbours(flight)))
        parts.append(("tokens", _tokens(end)))
    elif record.end is not None:
        parts.append(("answer", "It cannot be read here: a worker of a far version wrote it."))
    else:
        parts += _waiting(flight) if record.state == "queued" else [("worker", _owner(flight))]
    parts.append(("attempts", _attempts(flight)))
    if end is not None:
        parts.append(("worker", _worker(end)))
    elif record.end is None:
        parts.append(("deadline", _deadline(flight)))
    return [(label, text) for label, text in parts if text]


def _state(flight: Flight) -> str:
    record = flight.record
    since = f"accepted {_moment(record.accepted_at_ms)}"
    if flight.record.end is not None:
        ended_at_ms = flight.record.end.times[2]
        took = duration(max(0, ended_at_ms - record.accepted_at_ms))
        return f"{record.state} after {took}; {since}"
    return f"{record.state} for {duration(_age(flight))}; {since}"


def _age(flight: Flight) -> float:
    record = flight.record
    since = record.started_at_ms if record.state == "running" else record.accepted_at_ms
    return float(max(0, flight.now_ms - since))


def _time(phases: Sequence[Phase], full: str) -> list[str]:
    amounts = [phase.ms for phase in phases]
    if not sum(amounts):
        return []
    shares = percentages(amounts)
    most = max(range(len(phases)), key=lambda place: shares[place])
    lines = _labelled("time", f"{shares[most]} % of it went into {_SPENT[phases[most].name]}.")
    for phase, share, (first, length) in zip(phases, shares, bars(amounts, BAR), strict=True):
        bar = (" " * first + full * length).ljust(BAR)
        lines.append(f"  {phase.name:<{LABEL - 1}}{bar} {duration(phase.ms):>10} {share:>4} %")
    return lines


def _neighbours(flight: Flight) -> str:
    count = flight.neighbour_count
    if flight.note is None:
        return (
            "Not known: the batch was not noted, or this user may not read that. Workers note up to a "
            "hundred batches a second, and the last 10,000 are kept, for six hours at most."
        )
    if not count:
        return "No other request was in it."
    shown = min(count, len(flight.neighbours), MOST_NEIGHBOURS)
    rest = f", of which {shown}:" if shown < count else ":"
    return f"{count:,} other {'request' if count == 1 else 'requests'}{rest}"


def _tokens(end: End) -> str:
    usage = end.usage
    words = []
    if usage.prompt_tokens:
        cached = f", {usage.cached_tokens:,} of them from the prefix cache" if usage.cached_tokens else ""
        words.append(f"{usage.prompt_tokens:,} read{cached}")
    if usage.completion_tokens:
        later = usage.completion_tokens - max(1, len(end.choices))
        seconds = end.timing.decode_ms / 1000
        pace = f" ({later / seconds:,.1f} a second after the first)" if later > 0 and seconds > 0 else ""
        words.append(f"{usage.completion_tokens:,} written{pace}")
    if usage.cut_tokens:
        places = "its prompt" if usage.truncated <= 1 else f"{usage.truncated:,} of its texts"
        words.append(f"{usage.cut_tokens:,} cut off {places}, as `truncate` asked")
    return "; ".join(words)


def _attempts(flight: Flight) -> str:
    record = flight.record
    if not record.attempts:
        return "" if record.state == "queued" else "No worker ever began it."
    lost = record.crashes
    words = [f"{record.attempts:,}." if record.attempts > 1 or lost else "The first one."]
    if lost:
        alone = f", {record.solo_losses:,} of them running nothing else" if record.solo_losses else ""
        words.append(f"{_count(lost, 'worker was', 'workers were')} lost with it{alone}.")
    again = record.attempts - 1 - min(lost, record.attempts - 1)
    if again:
        words.append(
            f"{_count(again, 'other attempt', 'other attempts')} came to nothing: it failed and was tried "
            "again, or its worker ended and gave it back."
        )
    if len(flight.starts or ()) > 1:
        words.append(_started(flight))
    if record.attempts == 1 and not lost and flight.end is not None:
        return ""
    return " ".join(words)


def _started(flight: Flight) -> str:
    starts = flight.starts or ()
    shown = [
        f"by {_plain(start.worker)} after {duration(max(0, start.started_at_ms - start.queued_at_ms))}"
        for start in starts[:MOST_ATTEMPTS]
    ]
    return f"Begun {', '.join(shown)}{', and so on' if len(starts) > MOST_ATTEMPTS else ''}."


def _worker(end: End) -> str:
    if not end.worker:
        return ""
    revision = f" ({_plain(end.revision)})" if end.revision else ""
    model = f", which serves {_plain(end.model)}{revision}" if end.model else ""
    return f"{_plain(end.worker)}{model}"


def _owner(flight: Flight) -> str:
    owner = flight.record.owner
    if owner in flight.ready:
        return f"{_plain(owner)} runs it."
    if owner in flight.draining:
        return f"{_plain(owner)} runs it, and ends when it has: it drains."
    return (
        f"{_plain(owner)} has it, and shows no card now: it may be gone. The request is given to another "
        "worker once its lease has run out."
    )


def _waiting(flight: Flight) -> list[tuple[str, str]]:
    record, line = flight.record, flight.line
    parts = []
    if not record.place:
        at = flight.next_try_at_ms
        soon = f" in {duration(at - flight.now_ms)}" if at is not None and at > flight.now_ms else " now"
        parts.append(("line", f"It failed, and waits for its next try, which may be{soon}."))
    elif flight.is_far:
        parts.append(("line", f"It waits behind the first {MOST_SEEN:,} of its lane."))
    elif line is None:
        parts.append(("line", "A worker has just taken it, and begins it now."))
    elif line.lane == "solo":
        parts.append(
            ("line", f"It is suspected of ending workers, so it will run alone; place {line.place:,}.")
        )
    else:
        parts.append(("line", _line(flight)))
    parts.append(("served", _served(flight)))
    if flight.is_paused:
        parts.append(("paused", "The queue takes no new requests in; those that it has go on, this one too."))
    return parts


def _line(flight: Flight) -> str:
    line = flight.line
    if line is None:
        return ""
    more = " or more" if line.is_cut else ""
    words = [f"Place {line.place:,} of {line.waiting:,}{more} in lane {line.lane}."]
    if flight.record.place[:1].isupper():
        words.append("It came back from a worker, and goes before the newcomers.")
    others = [f"{count:,} in {lane}" for lane, count in flight.others]
    if others:
        words.append(f"Also waiting: {', '.join(others)}; lanes take turns by weight.")
    if flight.ended_a_second > 0 and flight.ready:
        wait_ms = 1000 * line.place / flight.ended_a_second
        words.append(
            f"The queue ends {flight.ended_a_second:,.1f} requests a second: at that pace it is begun "
            f"within {duration(wait_ms)}, other lanes left aside."
        )
    return " ".join(words)


def _served(flight: Flight) -> str:
    ready, draining = len(flight.ready), len(flight.draining)
    if ready:
        also = f" {_count(draining, 'other one drains', 'others drain')}." if draining else ""
        return f"{_count(ready, 'worker takes', 'workers take')} work of this queue now.{also}"
    if draining:
        return f"Nobody takes work now: {_count(draining, 'worker drains', 'workers drain')}. Start another."
    return "Nobody serves this queue now: start a worker, or it waits until its deadline."


def _deadline(flight: Flight) -> str:
    left = flight.record.deadline_at_ms - flight.now_ms
    moment = _moment(flight.record.deadline_at_ms)
    if left > 0:
        return f"{moment}, in {duration(left)}"
    return f"{moment}, {duration(-left)} ago: the next sweep ends it as expired"


# --- words and lines


def _count(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _moment(ms: int) -> str:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return "at no time that a calendar has"


def _plain(text: str) -> str:
    """Of a text that others wrote what a terminal may show, in one line."""
    line = _printable(text)
    return line if len(line) <= MOST_CHARS else line[: MOST_CHARS - 1] + "…"


def _printable(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _labelled(label: str, text: str) -> list[str]:
    lines = wrapped(_printable(text), WIDTH - LABEL)
    return [f"{label if not number else '':<{LABEL}}{line}" for number, line in enumerate(lines)]


def wrapped(text: str, width: int) -> list[str]:
    """The text in lines of at most so many columns: characters may be two columns wide, or none."""
    lines: list[str] = []
    current = ""
    for word in text.split():
        rest = word
        while rest:
            joined = f"{current} {rest}" if current else rest
            if cell_len(joined) <= width:
                current, rest = joined, ""
            elif current:
                lines.append(current)
                current = ""
            else:
                fits = _fitting(rest, width)
                lines.append(rest[:fits])
                rest = rest[fits:]
    return [*lines, current] if current or not lines else lines


def _fitting(word: str, width: int) -> int:
    """How many characters of a word fit into a line; one at least."""
    columns = 0
    for count, char in enumerate(word):
        columns += cell_len(char)
        if columns > width:
            return max(1, count)
    return len(word)
