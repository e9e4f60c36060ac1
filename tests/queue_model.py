"""What the protocol promises, as a small model without Redis: requests, entries, owners and a clock.

It is written from the design, not from the scripts. Each step gives what the scripts should reply, and leaves
behind what the server should then hold. Times are ms of a clock of its own; only `advance` moves it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from queue_parts import Counts, Item, Request
from streamfleet_common.keys import LETTERS, sub_lane_of
from streamfleet_common.schemas import LANES
from streamfleet_common.shares import EVERYBODY, Share
from streamfleet_common.submissions import Submission

LEASE_MS = 950_000
"""Silence is measured by the server's own clock, which goes on while a test runs: the model's clock moves in
steps of 100,000 ms, and a lease ends half a step before one."""
MAX_SOLO = 2
COMPANY = 2
FAILURES = 3
MAX_BACKOFF_MS = 3_600_000


class Queue:
    """One queue and all who work on it."""

    def __init__(self, limit: int, epoch_ms: int = 0) -> None:
        self.limit = limit
        self.epoch_ms = epoch_ms
        """The server's time at which the clock is 0."""
        self.now_ms = 0
        self.requests: list[Request] = []
        self.sub_lanes = 1
        """How many of them newcomers are put into."""
        self.top = 1
        """How many may hold something."""
        self.turns: dict[str, int] = {}
        """Whose turn it is, of the sub-lanes of a lane."""
        self.shares: dict[str, Share] = {}
        self.usage: Counter[tuple[int, str, str]] = Counter()
        """By day of the clock, tenant, and what is counted."""
        self.items: dict[str, list[Item]] = {stream: [] for stream in LETTERS}
        """All entries that are there or given out, in their order."""
        self.dead = 0
        self.swept_ms: int | None = None
        self.grace_until_ms = 0
        self.asked: tuple[str, int] | None = None
        """The owner that is to make room for a suspect, and until when it is waited for."""

    # --- what there is

    def find(self, rid: str) -> Request | None:
        return next((request for request in self.requests if request.rid == rid), None)

    def open(self) -> list[Request]:
        return [request for request in self.requests if request.is_open]

    def later(self) -> list[Request]:
        """Those that wait for their next try, the first one first."""
        waiting = [request for request in self.open() if request.item is None]
        return sorted(waiting, key=lambda request: (request.due_ms, request.rid))

    def lane(self, stream: str) -> list[str]:
        """All sub-lanes of a lane; any other stream is alone."""
        return [stream, *(f"{stream}:{number}" for number in range(1, self.top) if stream in LANES)]

    def streams(self) -> list[str]:
        return [name for stream in LETTERS for name in self.lane(stream)]

    def counts(self) -> dict[str, int]:
        """What each tenant has open: requests, and `|t` tokens; `*` the tokens of all, `*|r` of what runs."""
        counts: Counter[str] = Counter()
        for request in self.open():
            tokens = request.submission.tokens
            counts.update({request.tenant: 1, f"{request.tenant}|t": tokens, "*": tokens})
            if request.state == "R":
                counts["*|r"] += tokens
        return dict(counts)

    def unread(self, stream: str) -> list[Item]:
        return [item for item in self.items[stream] if item.is_there and not item.owner]

    def pending(self, stream: str) -> list[Item]:
        return [item for item in self.items[stream] if item.owner]

    # --- inner steps

    def _drop(self, item: Item | None) -> None:
        if item is not None and item in self.items[item.stream]:
            self.items[item.stream].remove(item)

    def end(self, request: Request, letter: str, spent: tuple[int, int] | None = None) -> None:
        """`spent` are the tokens of prompt and answer, where somebody knows them."""
        self._drop(request.item)
        self.usage[self.day(), request.tenant, "requests"] += 1
        self.usage[self.day(), request.tenant, "failed"] += letter in "FP"
        if spent is not None:
            self._book(request, spent)
        elif letter in "CX" and request.state == "R":
            request.unbilled = request.epoch
        request.state, request.owner, request.item = letter, "", None
        request.epoch += 1
        request.events.append(f"{request.epoch}-1")

    def bill(self, request: Request, epoch: int, spent: tuple[int, int]) -> None:
        """A worker tells what it had computed in an epoch of a request that it no longer owns."""
        if request.unbilled == epoch:
            self._book(request, spent)
            request.unbilled = None

    def _book(self, request: Request, spent: tuple[int, int]) -> None:
        for kind, number in zip(("prompt", "completion"), spent, strict=True):
            self.usage[self.day(), request.tenant, f"{kind}_tokens"] += number

    def _put(self, request: Request) -> None:
        stream = "solo" if request.crashes >= COMPANY else f"{request.lane}:again"
        self._drop(request.item)
        request.item = Item(request, stream, self.now_ms)
        self.items[stream].append(request.item)
        request.state, request.owner, request.seq = "Q", "", 0
        request.epoch += 1

    def _again(
        self,
        request: Request,
        *,
        limit: int = 0,
        pauses: bool,
        pause_ms: int | None = None,
        spent: tuple[int, int] | None = None,
    ) -> str:
        """Back into the queue, after a pause if it `pauses`; gives the letter of its state then.

        `pause_ms` takes the place of what its policy says.
        """
        policy = request.submission.envelope.retry
        limit = policy.attempts or limit
        if request.is_shown or (limit and request.attempts >= limit):
            self.end(request, "F", spent)
            return "F"
        if pause_ms is None:
            pause_ms = policy.backoff_ms * 2 ** (request.attempts - 1)
        if pauses and pause_ms:
            self._drop(request.item)
            request.state, request.owner, request.item = "Q", "", None
            request.due_ms, request.seq = self.now_ms + min(pause_ms, MAX_BACKOFF_MS), 0
            request.epoch += 1
        else:
            self._put(request)
        return request.state

    def _wake(self, count: int) -> None:
        for request in [one for one in self.later() if one.due_ms <= self.now_ms][:count]:
            self._put(request)

    # --- the producer

    def submit(self, submission: Submission) -> tuple[str, int, str]:
        """Outcome, depth and state letter."""
        known = self.find(submission.envelope.rid)
        if known:
            same = (known.tenant, known.submission.digest) == (submission.envelope.tenant, submission.digest)
            return ("duplicate" if same else "conflict", 0, known.state)
        if len(self.open()) >= self.limit:
            return ("full requests", len(self.open()), "Q")
        if why := self._over(submission):
            return (f"full {why}", len(self.open()), "Q")
        request = Request(submission, self.now_ms + submission.envelope.deadline_ms)
        number = sub_lane_of(request.tenant, self.sub_lanes)
        lane = request.lane
        request.item = Item(request, f"{lane}:{number}" if number else lane, self.now_ms)
        self.items[request.item.stream].append(request.item)
        self.requests.append(request)
        return ("accepted", len(self.open()), "Q")

    def _over(self, submission: Submission) -> str:
        """Which limit of its tenant's share it would break."""
        tenant = submission.envelope.tenant
        share = self.shares.get(tenant, self.shares.get(EVERYBODY, Share()))
        mine = [request for request in self.open() if request.tenant == tenant]
        tokens = sum(request.submission.tokens for request in mine) + submission.tokens
        used = sum(self.usage[self.day(), tenant, f"{kind}_tokens"] for kind in ("prompt", "completion"))
        if 0 < share.max_open_requests <= len(mine):
            return "tenant_requests"
        if mine and 0 < share.max_open_tokens < tokens:
            return "tenant_tokens"
        return "tenant_budget" if 0 < share.tokens_per_day < tokens + used else ""

    def move(self, request: Request, to: str, source: str | None, tenant: str | None) -> str:
        """What becomes of one that shall wait in another lane."""
        item = request.item
        why_not = {
            "gone": tenant not in (None, request.tenant),
            "ended": not request.is_open,
            "running": request.state == "R",
            "suspect": request.crashes >= COMPANY,
            "there": request.lane == to,
            "elsewhere": source not in (None, request.lane),
            "lost": item is not None and not item.is_there,
            "running ": item is not None and bool(item.owner),  # read, and not yet begun
        }
        for word, holds in why_not.items():
            if holds:
                return word.strip()
        if item is not None:
            number = sub_lane_of(request.tenant, self.sub_lanes)
            came_back = item.stream.endswith(":again")
            new = f"{to}:again" if came_back else f"{to}:{number}" if number else to
            self._drop(item)
            request.item = Item(request, new, self.now_ms)
            self.items[new].append(request.item)
        request.lane = to
        return "moved"

    def cancel(self, request: Request, tenant: str) -> str | None:
        if request.tenant != tenant:
            return None
        if request.is_open:
            self.end(request, "C")
        return request.state

    # --- the workers

    def read(self, owner: str, stream: str, count: int) -> list[Item]:
        items = self.unread(stream)[:count]
        for item in items:
            item.owner, item.heard_ms = owner, self.now_ms
        return items

    def start(self, owner: str, item: Item) -> tuple[int, int] | str:
        """Epoch and attempts, or why not."""
        request = item.request
        if request is None:
            if item in self.items[item.stream]:
                self.dead += 1
            self._drop(item)
            return "stray"
        if not request.is_open or request.item is not item:
            return "gone"
        if request.state == "R" and request.owner != owner:
            return "lost"
        if request.deadline_ms <= self.now_ms:
            self.end(request, "X")
            return "expired"
        if request.state == "Q":
            request.state, request.owner, request.seq = "R", owner, 0
            request.epoch += 1
            request.attempts += 1
            if request.submission.envelope.stream:
                request.events.append(f"{request.epoch}-0")
        return (request.epoch, request.attempts)

    def take(self, owner: str, streams: Sequence[str], count: int) -> tuple[bool, list[Item]]:
        """Whether to make room, and what was read; it is still to be started."""
        self._wake(count)
        there = [item for item in self.items["solo"] if item.is_there]
        if "solo" not in streams and len(there) > len(self.pending("solo")):
            asked, until_ms = self.asked or ("", -1)
            if asked == owner or until_ms < self.now_ms:
                self.asked = (owner, self.now_ms + 30_000)
                return True, []
        items: list[Item] = []
        for stream in streams:
            if len(items) == count:
                break
            if len(self.lane(stream)) > 1:
                items += self._in_turn(owner, stream, count - len(items))
                continue
            found = self.read(owner, stream, 1 if stream == "solo" else count - len(items))
            items += found
            if stream == "solo" and found:
                self.asked = None
                break
        return False, items

    def _in_turn(self, owner: str, lane: str, count: int) -> list[Item]:
        """One of each sub-lane, one after the other, from the one whose turn it is on."""
        found: list[Item] = []
        names = self.lane(lane)
        at, vain = self.turns.get(lane, 0) % len(names), 0
        while len(found) < count and vain < len(names):
            items = self.read(owner, names[at], 1)
            found += items
            vain = 0 if items else vain + 1
            at = (at + 1) % len(names)
            if items:
                self.turns[lane] = at
        return found

    def renew(self, request: Request) -> None:
        """Of one whose caller may do it."""
        assert request.item is not None
        if request.item.is_there:
            request.item.owner, request.item.heard_ms = request.owner, self.now_ms
        else:
            self.let_go(request.item)

    def retry(
        self, request: Request, pause_ms: int | None = None, spent: tuple[int, int] | None = None
    ) -> str:
        assert request.item is not None
        if not request.item.is_there:
            self.end(request, "F", spent)
            return "F"
        return self._again(request, limit=FAILURES, pauses=True, pause_ms=pause_ms, spent=spent)

    def release(self, request: Request, owner: str, epoch: int | None, item: Item | None) -> bool:
        """`epoch` is None for one that was only read."""
        if not request.is_open or item is None or request.item is not item or not item.is_there:
            return False
        if request.state == "Q":
            self._put(request)
            return True
        if epoch is None or not request.is_run_by(owner, epoch, item):
            return False
        self._again(request, pauses=False)
        return True

    # --- everybody

    def _recover(self, items: Sequence[Item], *, is_counted: bool, counts: Counts) -> None:
        for item in items:
            request = item.request
            if not item.is_there:
                self._drop(item)
            elif request is None:
                self._drop(item)
                self.dead += 1
                counts.stray += 1
            elif request.state == "Q":
                self._put(request)
                counts.requeued += 1
            else:
                request.crashes += is_counted
                request.solo += is_counted and item.stream == "solo"
                if is_counted and request.solo >= MAX_SOLO:
                    self.dead += 1
                    counts.dead += 1
                    self.end(request, "P")
                elif self._again(request, pauses=is_counted) == "Q":
                    counts.requeued += 1
                else:
                    counts.failed += 1

    def sweep(self) -> Counts:
        counts = self._sweep()
        while self.top > self.sub_lanes and not any(self.items[f"{lane}:{self.top - 1}"] for lane in LANES):
            self.top -= 1
        return counts

    def _sweep(self) -> Counts:
        counts = Counts()
        if self.swept_ms is None or self.now_ms - self.swept_ms > LEASE_MS / 2:
            self.grace_until_ms = self.now_ms + LEASE_MS
        self.swept_ms = self.now_ms
        for request in self.open():
            if request.deadline_ms <= self.now_ms:
                self.end(request, "X")
                counts.expired += 1
        self._wake(100)
        counts.is_grace = self.now_ms < self.grace_until_ms
        if counts.is_grace:
            return counts
        for _, items in self._silent(lambda item: self.now_ms - item.heard_ms >= LEASE_MS):
            self._recover(items, is_counted=True, counts=counts)
        for request in self.open():
            lost = request.item is not None and not request.item.is_there
            if lost and request.item and self.now_ms - request.item.made_ms > 2000:
                self.end(request, "F")
                counts.failed += 1
        return counts

    def _silent(self, is_silent: Callable[[Item], bool]) -> Iterator[tuple[str, list[Item]]]:
        # All of them at first: what is put back on the way is not pending.
        found = [(name, [one for one in self.pending(name) if is_silent(one)]) for name in self.streams()]
        yield from found

    def hand_back(self, owner: str, *, is_crashed: bool) -> int:
        taken = 0
        for _, items in self._silent(lambda item: item.owner == owner):
            taken += len(items)
            self._recover(items, is_counted=is_crashed, counts=Counts())
        return taken

    # --- what comes from outside

    def split(self, sub_lanes: int) -> None:
        """The workers say that each lane has so many sub-lanes."""
        self.sub_lanes, self.top = sub_lanes, max(self.top, sub_lanes)
        for name in self.streams():
            self.items.setdefault(name, [])

    def day(self) -> int:
        """The day of the clock, counted from its epoch."""
        return (self.epoch_ms + self.now_ms) // 86_400_000

    def advance(self, ms: int) -> None:
        self.now_ms += ms

    def let_go(self, item: Item) -> None:
        """The server forgets who was given an entry that is there no more; its record still knows."""
        self._drop(item)

    def stray(self, stream: str) -> Item:
        item = Item(None, stream, self.now_ms)
        self.items[stream].append(item)
        return item

    def delete(self, item: Item) -> None:
        """Somebody deletes an entry by hand."""
        item.is_there = False
        if not item.owner:
            self._drop(item)
