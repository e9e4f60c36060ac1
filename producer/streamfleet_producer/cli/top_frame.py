"""Draws what `streamfleet top` shows: lines that fit the terminal, and no more of them than it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import TypeVar

from rich.text import Text

from streamfleet_common.dead_letters import DeadLetter
from streamfleet_producer.cli.dead import in_words
from streamfleet_producer.cli.terminal import in_one_line
from streamfleet_producer.cli.top_columns import QUEUES, WORKERS
from streamfleet_producer.cli.top_rows import QueueRow
from streamfleet_producer.cli.top_table import Table
from streamfleet_producer.cli.top_values import count, rate
from streamfleet_producer.cli.top_view import View

_Row = TypeVar("_Row")

MARK_WIDTH = 2
LEAST_ROWS = 3
KEYS = {
    "fleet": "q quit  ? help  ↑↓ Tab choose  s sort  p pause/open  D drain  d dead letters",
    "letters": "q quit  ? help  ↑↓ choose  Enter look into it  Esc back",
    "letter": "q quit  ? help  Esc back",
    "help": "any key: back",
}
HELP = """\
QUEUES                                  WORKERS
WAIT    accepted, not running yet       STATE   ready, asked (to drain), drain
RUN     given to a worker               RUN     rows in the batch now
OLD     age of the oldest that waits    WAIT    rows pulled, not in the batch
WRK     workers that take work          FILL    mean batch, of what it may have
END/S   requests ended a second         KV      of the key-value cache taken
TOK/S   tokens generated a second       TTFT95, ITL95   95th percentiles
TTFT    time to first token: median     - stands for what nobody says
ITL     time between tokens: median     ! before a queue: work waits, and no
FILL    how full batches are              worker takes it; P: it is paused
DEAD    dead letters

↑ ↓ PgUp PgDn Home End   choose a row           s S   next, last sort column
Tab ← →                  the other table        r     reverse the order
p       pause the chosen queue, or open it      Space read at once
D       drain the chosen worker                 q     quit
d Enter dead letters of the chosen queue        Ctrl-Z, fg   away, and back

Rates, percentiles and FILL are of the last half minute, as workers tell
every 5 s; a queue's END/S is of the last 10 s, as Redis has counted it."""


def frame(view: View, redis: str, interval_s: float, width: int, height: int) -> list[Text]:
    """The whole screen: at most `height` lines of at most `width` cells.

    Args:
        view: what to show.
        redis: the server's URL, without its passwords.
        interval_s: how often it is read.
        width: of the terminal, in cells.
        height: of the terminal, in lines.
    """
    room = max(0, height - 4)
    if view.page == "help":
        body = [Text(line) for line in HELP.splitlines()]
    elif view.page == "letters":
        body = _letters(view, width, room)
    elif view.page == "letter":
        body = _letter(view.letters[view.letter_at], width)
    else:
        body = _fleet(view, width, room)
    lines = [*_heads(view, redis, f"every {interval_s:g} s", width), Text(), *body[:room]]
    lines += [Text() for _ in range(height - 1 - len(lines))]
    return [_cut(line, width) for line in [*lines[: max(0, height - 1)], _foot(view, width)][:height]]


def picture(view: View, redis: str, width: int) -> list[Text]:
    """All there is, on as many lines as that takes."""
    lines = [*_heads(view, redis, "", width), Text()]
    lines += _table(
        QUEUES, view.queues, view.sort["queues"], width, marks=[_flag(row) for row in view.queues]
    )
    lines += [Text(), *_table(WORKERS, view.workers, view.sort["workers"], width)]
    return [_cut(line, width) for line in lines]


# --- parts


def _heads(view: View, redis: str, how_often: str, width: int) -> list[Text]:
    reading = view.reading
    at = "" if reading is None else f"{datetime.fromtimestamp(reading.at_ms / 1000, UTC):%H:%M:%S} UTC"
    silence = f"no answer for {count(int(view.silent_s))} s" if view.silent_s else ""
    right = "  ".join(filter(None, [at, silence or how_often]))
    where = in_one_line(redis, max(10, width - 19 - len(right)))
    left = Text.assemble(("streamfleet top", "bold"), "  ", where)
    left.pad_right(max(0, width - left.cell_len - len(right)))
    return [left.append(right, "bold red" if silence else "dim"), _totals(view, width)]


def _totals(view: View, width: int) -> Text:
    queues, workers = view.queues, view.workers
    ready = sum(row.state == "ready" for row in workers)
    parts = [(_many(len(queues), "queue"), ""), (_many(ready, "worker"), "")]
    if len(workers) > ready:
        parts.append((f"{count(len(workers) - ready)} draining", "yellow"))
    parts.append((f"{count(sum(row.figures.queued for row in queues))} waiting", ""))
    parts.append((f"{count(sum(row.figures.running for row in queues))} running", ""))
    if dead := sum(row.figures.dead_letters for row in queues):
        parts.append((f"{count(dead)} dead", "red"))
    if view.reading is not None and view.reading.unread:
        parts.append((f"{_many(view.reading.unread, 'queue')} not read", "bold red"))
    parts.append((f"{rate(_sum(row.ended_per_s for row in queues))} ended/s", ""))
    parts.append((f"{rate(_sum(row.generated_tokens_per_s for row in queues))} tok/s", ""))
    # Where it is too much for a line, the tables show how many queues and workers there are.
    line = Text()
    for some, gap in ((parts, "  "), (parts, " "), (parts[2:], " ")):
        line = Text(gap).join(Text(*part) for part in some)
        if line.cell_len <= width:
            break
    return line


def _many(number: int, what: str) -> str:
    return f"{count(number)} {what}" if number == 1 else f"{count(number)} {what}s"


def _sum(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def _fleet(view: View, width: int, room: int) -> list[Text]:
    queues, workers = _shares(max(1, len(view.queues)), max(1, len(view.workers)), room - 3)
    is_queue = view.focus == "queues"
    return [
        *_table(
            QUEUES,
            view.queues,
            view.sort["queues"],
            width,
            marks=[_flag(row) for row in view.queues],
            chosen=view.queue_at if is_queue else -1,
            near=view.queue_at,
            most=queues,
        ),
        Text(),
        *_table(
            WORKERS,
            view.workers,
            view.sort["workers"],
            width,
            chosen=-1 if is_queue else view.worker_at,
            near=view.worker_at,
            most=workers,
        ),
    ]


def _shares(queues: int, workers: int, room: int) -> tuple[int, int]:
    """How many lines each table gets: what one does not need the other may have."""
    half = max(LEAST_ROWS, room // 2)
    if queues <= half:
        return queues, max(0, room - queues)
    if workers <= room - half:
        return max(0, room - workers), workers
    return half, max(0, room - half)


def _flag(row: QueueRow) -> str:
    if row.is_unserved:
        return "!"
    return "P" if row.figures.is_paused else " "


def _table(
    table: Table[_Row],
    rows: Sequence[_Row],
    by: int,
    width: int,
    *,
    marks: Sequence[str] = (),
    chosen: int = -1,
    near: int = 0,
    most: int | None = None,
) -> list[Text]:
    """Head and rows; of more than `most` those around `near`, and how many there are besides."""
    room = width - MARK_WIDTH
    head = Text(" " * MARK_WIDTH).append_text(table.head(rows, room, by))
    if not rows:
        return [head, Text("  none", "dim")]
    first, last = _window(len(rows), near, len(rows) if most is None else most)
    lines = [head]
    for at, line in enumerate(table.lines(rows, rows[first:last], room), first):
        mark = ">" if at == chosen else " "
        flag = marks[at] if marks else " "
        full = Text.assemble(mark, (flag, "bold"), line)
        if at == chosen:
            full.pad_right(width - full.cell_len)
            full.stylize("reverse")
        lines.append(full)
    if last - first < len(rows):
        hidden = f"  {first + 1} to {last} of {len(rows)}; the others are above or below"
        lines.append(Text(hidden, "dim"))
    return lines


def _window(total: int, near: int, most: int) -> tuple[int, int]:
    if total <= most:
        return 0, total
    shown = max(1, most - 1)  # a line says how many there are
    first = max(0, min(near - shown // 2, total - shown))
    return first, first + shown


def _letters(view: View, width: int, room: int) -> list[Text]:
    lines = [Text(f"dead letters of {in_one_line(view.letters_queue, width - 30)}, oldest first", "bold")]
    lines.append(Text(f"  {'BURIED':<19} {'TENANT':<12} {'LANE':<6} {'TRIED':>5} {'LOST':>4} WHY", "bold"))
    first, last = _window(len(view.letters), view.letter_at, room - 2)
    for at in range(first, last):
        letter = view.letters[at]
        buried = f"{datetime.fromtimestamp(letter.buried_at_ms / 1000, UTC):%Y-%m-%d %H:%M:%S}"
        tenant, lane = in_one_line(letter.tenant or "-", 12), in_one_line(letter.lane or "-", 6)
        numbers = f"{count(letter.attempts):>5} {count(letter.crashes):>4}"
        why = in_one_line(letter.why, max(8, width - 54))
        mark = ">" if at == view.letter_at else " "
        line = Text(f"{mark} {buried:<19} {tenant:<12} {lane:<6} {numbers} {why}")
        if at == view.letter_at:
            line.stylize("reverse")
        lines.append(line)
    if last - first < len(view.letters):
        lines.append(Text(f"  {first + 1} to {last} of {len(view.letters)} that were read", "dim"))
    return lines


def _letter(letter: DeadLetter, width: int) -> list[Text]:
    lines = []
    for name, value in in_words(letter):
        rest = value
        label = name
        while rest or label:
            lines.append(Text.assemble((f"{label:<10}", "bold"), rest[: max(1, width - 10)]))
            rest, label = rest[max(1, width - 10) :], ""
    return lines


def _foot(view: View, width: int) -> Text:
    if view.question is not None:
        question, answers = Text(view.question.text, "bold"), "  y yes, any other key no"
        # Cut in the middle of that, it would not say what is a yes.
        fits = question.cell_len + len(answers) <= width
        return question.append(answers if fits else "  y yes", "not bold")
    if view.message:
        return Text(view.message, "bold")
    if view.trouble:
        return Text(view.trouble, "bold red")
    return Text(KEYS[view.page], "dim")


def _cut(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    line.no_wrap = True
    return line
