"""One request, two workers, a sweeper and a client: every order in which they can act.

The search runs on `queue_model` alone. What each worker knows is what it was told: it may have been told long
ago, since a pause can come between any two steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field

from broker_parts import STREAMS, submission
from queue_model import LEASE_MS, Queue
from queue_parts import Item, Request
from streamfleet_common.keys import Stream

UNIT_MS = 100_000
WORKERS = ("w1", "w2")
STEPS = ("reads", "starts", "emits", "finishes", "retries", "renews", "releases", "crashes", "is handed back")
EVERYBODY = ("a sweep", "a pause", "a lease passes", "a cancel")


@dataclass
class Worker:
    """What a worker knows."""

    read: Item | None = None
    runs: tuple[int, Item] | None = None
    """Epoch and entry of what it believes to be its own."""


@dataclass
class World:
    """All there is, and who was allowed to write in which epoch."""

    queue: Queue
    request: Request
    workers: dict[str, Worker] = field(default_factory=lambda: {name: Worker() for name in WORKERS})
    writers: dict[int, set[str]] = field(default_factory=dict)

    @classmethod
    def begin(cls) -> World:
        queue = Queue(limit=5)
        queue.submit(submission(stream=True))
        return cls(queue, queue.requests[0])

    def actions(self) -> Iterator[str]:
        """What can happen next."""
        waits = any(self.queue.unread(stream) for stream in STREAMS)
        for name, worker in self.workers.items():
            for step in STEPS:
                if step == "reads":
                    can = waits and not worker.read
                elif step == "starts":
                    can = worker.read is not None
                elif step == "is handed back":
                    can = any(item.owner == name for stream in STREAMS for item in self.queue.pending(stream))
                elif step == "crashes":
                    can = worker.read is not None or worker.runs is not None
                else:
                    can = worker.runs is not None
                if can:
                    yield f"{name} {step}"
        if self.request.is_open:
            yield from EVERYBODY

    def act(self, action: str) -> None:
        who, _, step = action.partition(" ")
        if who == "a":
            self._everybody(step)
        elif step in ("reads", "starts", "crashes", "is handed back"):
            self._alone(who, step)
        else:
            self._write(who, step)

    def _everybody(self, step: str) -> None:
        if step == "cancel":
            self.queue.cancel(self.request, self.request.tenant)
        elif step == "sweep":
            self.queue.sweep()
        elif step == "pause":
            self.queue.advance(12 * UNIT_MS)
        else:
            for _ in range(4):
                self.queue.advance(4 * UNIT_MS)
                self.queue.sweep()

    def _alone(self, name: str, step: str) -> None:
        worker = self.workers[name]
        if step == "reads":
            stream = self.next_stream()
            (worker.read,) = self.queue.read(name, stream, 1)
        elif step == "starts":
            assert worker.read
            outcome = self.queue.start(name, worker.read)
            worker.runs = (outcome[0], worker.read) if isinstance(outcome, tuple) else None
            worker.read = None
        elif step == "crashes":
            worker.read = worker.runs = None
        else:
            self.queue.hand_back(name, is_crashed=True)

    def _write(self, name: str, step: str) -> None:
        worker = self.workers[name]
        assert worker.runs
        epoch, item = worker.runs
        ours = self.request.is_run_by(name, epoch, item)
        if ours and step in ("emits", "finishes", "retries"):
            self.writers.setdefault(epoch, set()).add(name)
        if step == "emits" and ours:
            self.request.seq += 1
            self.request.events.append(f"{epoch}-{self.request.seq}")
        elif step == "finishes" and ours:
            self.queue.end(self.request, "D")
        elif step == "retries" and ours:
            self.queue.retry(self.request)
        elif step == "renews" and ours:
            self.queue.renew(self.request)
        elif step == "releases":
            self.queue.release(self.request, name, epoch, item)
        if not ours or step in ("finishes", "retries", "releases"):
            worker.runs = None

    def next_stream(self) -> Stream:
        return next(stream for stream in STREAMS if self.queue.unread(stream))

    def key(self) -> tuple[object, ...]:
        """Equal for worlds that can go on in the same ways."""
        request, queue = self.request, self.queue

        def place(item: Item | None) -> object:
            if item is None:
                return None
            silent = min(queue.now_ms - item.heard_ms, 2 * LEASE_MS) if item.owner else -1
            return (item.stream, item.owner, silent, item is request.item)

        since = 0 if queue.swept_ms is None else min(queue.now_ms - queue.swept_ms, LEASE_MS)
        told = [
            (place(one.read), one.runs and (one.runs[0], place(one.runs[1]))) for one in self.workers.values()
        ]
        counts = (request.epoch, request.attempts, request.crashes, request.solo, min(request.seq, 1))
        return (
            request.state,
            request.owner,
            counts,
            place(request.item),
            queue.swept_ms is None,
            since,
            max(0, queue.grace_until_ms - queue.now_ms),
            tuple(told),
        )


def check(world: World) -> None:
    """What must hold in every world."""
    request, queue = world.request, world.queue
    entries = [item for items in queue.items.values() for item in items]
    # An entry as long as it is open, and the record names it.
    assert len(entries) == request.is_open
    assert all(item is request.item for item in entries)
    # One end at most, the last of all events; no epoch has two writers.
    starts = {_place(event)[0] for event in request.events if event.endswith("-0")}
    ends = [event for event in request.events if _place(event)[0] not in starts]
    assert ends == ([] if request.is_open else [f"{request.epoch}-1"])
    assert sorted(request.events, key=_place) == request.events
    assert all(len(names) == 1 for names in world.writers.values())
    assert request.state != "P" or request.solo >= 2
    assert request.crashes <= request.attempts


def _place(event: str) -> tuple[int, int]:
    epoch, seq = event.split("-")
    return int(epoch), int(seq)


def search(depth: int) -> tuple[int, list[list[str]]]:
    """All worlds up to `depth` steps from the beginning: how many, and the ways to the last ones."""
    seen = {World.begin().key()}
    edge: list[tuple[World, list[str]]] = [(World.begin(), [])]
    for _ in range(depth):
        nexts: list[tuple[World, list[str]]] = []
        for world, way in edge:
            for action in world.actions():
                payload = world.request.submission  # the same in all worlds, and dear to copy
                after = copy.deepcopy(world, {id(payload): payload})
                after.act(action)
                check(after)
                key = after.key()
                if key not in seen:
                    seen.add(key)
                    nexts.append((after, [*way, action]))
        edge = nexts
    return len(seen), [way for _, way in edge]
