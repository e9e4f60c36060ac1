"""What `streamfleet top` shows, and what keys do to it; it draws nothing and asks nobody."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from streamfleet_common.dead_letters import DeadLetter
from streamfleet_producer.cli.terminal import in_one_line
from streamfleet_producer.cli.top_columns import QUEUES, WORKERS
from streamfleet_producer.cli.top_reading import Reading
from streamfleet_producer.cli.top_rows import QueueRow, WorkerRow

Page = Literal["fleet", "letters", "letter", "help"]
Focus = Literal["queues", "workers"]
Deed = Literal["quit", "read", "pause", "resume", "drain", "letters", "more_letters"]
MOVES = {"up": -1, "k": -1, "down": 1, "j": 1, "pgup": -10, "pgdn": 10, "home": -(10**9), "end": 10**9}


@dataclass(frozen=True, slots=True)
class Order:
    """What shall be done about a key: by whoever talks to Redis."""

    deed: Deed
    queue: str = ""
    worker: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """Is asked before anything changes."""

    text: str
    order: Order


@dataclass(slots=True)
class View:
    """The state of the screen. Rows are found by their names, since their order changes."""

    reading: Reading | None = None
    queues: list[QueueRow] = field(default_factory=list)
    workers: list[WorkerRow] = field(default_factory=list)
    page: Page = "fleet"
    focus: Focus = "queues"
    sort: dict[Focus, int] = field(default_factory=lambda: {"queues": 0, "workers": 0})
    is_reversed: dict[Focus, bool] = field(default_factory=lambda: {"queues": False, "workers": False})
    question: Question | None = None
    message: str = ""
    trouble: str = ""
    """Why there are no newer figures."""
    silent_s: float = 0.0
    """For how long Redis has not answered, where that is long enough to be said."""
    letters: list[DeadLetter] = field(default_factory=list)
    letters_queue: str = ""
    letter_at: int = 0
    _chosen_queue: str = ""
    _chosen_worker: tuple[str, str] = ("", "")
    _help_from: Page = "fleet"

    # --- what is shown

    def take(self, reading: Reading, queues: Sequence[QueueRow], workers: Sequence[WorkerRow]) -> None:
        """Show these from now on."""
        self.reading, self.silent_s = reading, 0.0
        self.queues, self.workers = list(queues), list(workers)
        self.trouble = "" if reading.refusal is None else f"queues not read: {reading.refusal}"
        self._order()

    def take_letters(self, queue: str, letters: Sequence[DeadLetter]) -> None:
        """Show these dead letters; further ones of the queue that is shown go below."""
        if self.page == "letters" and queue == self.letters_queue and self.letters:
            self.letters += letters
            return
        if not letters:
            self.message = f"queue {_shown(queue)} has no dead letters"
            return
        self.page, self.letters_queue, self.letters, self.letter_at = "letters", queue, list(letters), 0

    def _order(self) -> None:
        self.queues = QUEUES.sorted(
            sorted(self.queues, key=lambda row: row.queue),
            self.sort["queues"],
            is_reversed=self.is_reversed["queues"],
        )
        self.workers = WORKERS.sorted(
            sorted(self.workers, key=lambda row: (row.queue, row.worker)),
            self.sort["workers"],
            is_reversed=self.is_reversed["workers"],
        )

    @property
    def queue_at(self) -> int:
        """The chosen queue's place; 0 if it is gone, or none was chosen."""
        return next((at for at, row in enumerate(self.queues) if row.queue == self._chosen_queue), 0)

    @property
    def worker_at(self) -> int:
        """The chosen worker's place."""
        places = (at for at, row in enumerate(self.workers) if (row.queue, row.worker) == self._chosen_worker)
        return next(places, 0)

    # --- keys

    def press(self, key: str) -> Order | None:
        """Take a key in; gives what is to be done about it, if anything is."""
        self.message = ""
        if self.question is not None:
            question, self.question = self.question, None
            if key in ("y", "Y"):
                return question.order
            self.message = "nothing was changed"
            return None
        if key in ("q", "Q"):
            return Order("quit")
        if key == "?" and self.page != "help":
            self._help_from, self.page = self.page, "help"
        elif self.page == "help":
            self.page = self._help_from
        elif self.page == "letter":
            if key in ("esc", "enter", "left", "d"):
                self.page = "letters"
        elif self.page == "letters":
            return self._press_letters(key)
        else:
            return self._press_fleet(key)
        return None

    def _press_letters(self, key: str) -> Order | None:
        if key in MOVES:
            wanted = self.letter_at + MOVES[key]
            self.letter_at = max(0, min(len(self.letters) - 1, wanted))
            if wanted >= len(self.letters):
                return Order("more_letters", self.letters_queue)
        elif key == "enter":
            self.page = "letter"
        elif key in ("esc", "left", "d"):
            self.page = "fleet"
        return None

    def _press_fleet(self, key: str) -> Order | None:
        if key in MOVES:
            self._move(MOVES[key])
        elif key in ("tab", "left", "right"):
            self.focus = "workers" if self.focus == "queues" else "queues"
        elif key in ("s", "S"):
            table = QUEUES if self.focus == "queues" else WORKERS
            by = (self.sort[self.focus] + (1 if key == "s" else -1)) % len(table.sortable)
            self.sort[self.focus], self.is_reversed[self.focus] = by, False
            self._order()
        elif key == "r":
            self.is_reversed[self.focus] = not self.is_reversed[self.focus]
            self._order()
        elif key == " ":
            return Order("read")
        elif key == "p" and (queue := self._queue()) is not None:
            self._ask_pause(queue)
        elif key == "D":
            self._ask_drain()
        elif key in ("d", "enter") and (queue := self._queue()) is not None:
            return Order("letters", queue.queue)
        return None

    def _move(self, by: int) -> None:
        if self.focus == "queues" and self.queues:
            at = max(0, min(len(self.queues) - 1, self.queue_at + by))
            self._chosen_queue = self.queues[at].queue
        elif self.focus == "workers" and self.workers:
            at = max(0, min(len(self.workers) - 1, self.worker_at + by))
            row = self.workers[at]
            self._chosen_worker = (row.queue, row.worker)

    def _queue(self) -> QueueRow | None:
        """The queue that a key is for: the chosen one, or that of the chosen worker."""
        if self.focus == "workers" and self.workers:
            queue = self.workers[self.worker_at].queue
            return next((row for row in self.queues if row.queue == queue), None)
        return self.queues[self.queue_at] if self.queues else None

    def _ask_pause(self, row: QueueRow) -> None:
        name = _shown(row.queue)
        if row.figures.is_paused:
            self.question = Question(f"open {name} for new requests again?", Order("resume", row.queue))
        else:
            self.question = Question(f"pause {name}: refuse new requests?", Order("pause", row.queue))

    def _ask_drain(self) -> None:
        if self.focus != "workers":
            self.message = "choose a worker first: Tab, then the arrows"
        elif self.workers:
            row = self.workers[self.worker_at]
            if row.state != "ready":
                self.message = f"{_shown(row.worker)} drains already"
                return
            # The order names who was asked about, whoever stands in that line by the time of the answer.
            text = f"drain {_shown(row.worker)}: let it finish and end?"
            self.question = Question(text, Order("drain", row.queue, row.worker))


def _shown(name: str) -> str:
    line = in_one_line(name, None)
    return line if len(line) <= 40 else f"{line[:19]}…{line[-20:]}"
