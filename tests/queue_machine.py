"""Random interleavings of all steps by three owners and two tenants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from hypothesis import strategies as st
from hypothesis.stateful import rule

from broker_parts import START, STREAMS, card, name_of, submission
from queue_checks import BODY, EPOCH_MS, LIMIT, OWNERS, TENANTS, UNIT_MS, Checked, T
from queue_model import COMPANY, LEASE_MS
from queue_parts import Item, Request
from streamfleet_common.deliveries import Bill, Delivery, Emission, Entry, Finish
from streamfleet_common.keys import Stream
from streamfleet_common.records import LETTERS as STATE_LETTERS
from streamfleet_common.schemas import LANES, Choice, End, EndState, Lane, Retry, Usage
from streamfleet_common.shares import EVERYBODY, Share
from streamfleet_common.submissions import Submission

OWNER = st.sampled_from(OWNERS)
AT = st.integers(0, 30)
CHANGE = st.sampled_from(["", "", "", "", "", "owner", "epoch", "older", "entry"])
LOOKS = st.sampled_from([STREAMS, STREAMS[:6], STREAMS[:3], ("solo", *STREAMS[:6])])
"""What a worker may look into; `STREAMS` ends with "solo"."""
HOW = st.sampled_from(["done", "failed", "expired", "retry", "retry", 0, 150_000, 5_000_000])
"""How a request ends: a number is another try after so many ms."""
SHARES = st.dictionaries(
    st.sampled_from([*TENANTS, EVERYBODY]),
    st.sampled_from([Share(), Share(2), Share(1, 300), Share(0, 200), Share(0, 100), Share(0, 0, 600)]),
    max_size=2,
)
WANTS = st.fixed_dictionaries(
    {
        "lane": st.sampled_from(LANES),
        "tenant": st.sampled_from(TENANTS),
        "stream": st.booleans(),
        "on_restart": st.sampled_from(["restart", "restart", "fail"]),
        "deadline_ms": st.sampled_from([86_400_000] * 5 + [UNIT_MS // 2]),
        "retry": st.sampled_from([(None, 0)] * 3 + [(None, 150_000), (1, 0), (2, 150_000)]).map(
            lambda pair: Retry(attempts=pair[0], backoff_ms=pair[1])
        ),
    }
)


class Fleet(Checked):
    """Any step at any time."""

    # --- the producer

    def submit_all(self, batch: Sequence[Submission]) -> None:
        expected = [self.queue.submit(one) for one in batch]
        answers = self.run(self.broker.submit(batch, max_queue_depth=LIMIT))
        assert [
            (f"{one.outcome} {one.reason}".rstrip(), one.depth, STATE_LETTERS[one.state]) for one in answers
        ] == expected
        self.learn()

    @rule(
        many=st.lists(
            st.tuples(st.sampled_from(["new", "new", "again", "body", "tenant"]), AT, WANTS),
            min_size=1,
            max_size=4,
        )
    )
    def submit(self, many: list[tuple[str, int, dict[str, Any]]]) -> None:
        batch: list[Submission] = []
        for kind, at, wants in many:
            known = [request.submission.envelope for request in self.queue.requests]
            known += [one.envelope for one in batch]
            if kind == "new" or not known:
                batch.append(submission(**wants))
                continue
            old = known[at % len(known)]
            tenant = TENANTS[old.tenant == TENANTS[0]] if kind == "tenant" else old.tenant
            batch.append(submission("Bye" if kind == "body" else "Hi", rid=old.rid, tenant=tenant))
        self.submit_all(batch)

    @rule(at=st.lists(AT, min_size=1, max_size=3), tenant=st.sampled_from(TENANTS))
    def cancel(self, at: list[int], tenant: str) -> None:
        if not self.queue.requests:
            return
        targets = [self.queue.requests[-1 - number % len(self.queue.requests)] for number in at]
        expected = [self.queue.cancel(request, tenant) for request in targets]
        states = self.run(self.broker.cancel([request.rid for request in targets], tenant))
        assert [STATE_LETTERS[state] if state else None for state in states] == expected

    @rule(
        at=st.lists(AT, min_size=1, max_size=4),
        to=st.sampled_from(LANES),
        source=st.sampled_from([None, None, *LANES]),
        tenant=st.sampled_from([None, None, *TENANTS]),
        is_repeated=st.booleans(),
    )
    def move(
        self, at: list[int], to: Lane, source: Lane | None, tenant: str | None, is_repeated: bool
    ) -> None:
        if not self.queue.requests:
            return
        targets = [self.queue.requests[-1 - number % len(self.queue.requests)] for number in at]
        rids = [request.rid for request in targets]
        for _ in range(1 + is_repeated):
            # Within a batch each counts once: the second of two equal ones finds it done.
            expected = [self.queue.move(request, to, source, tenant) for request in targets]
            moves = self.run(self.broker.move(rids, to=to, source=source, tenant=tenant))
            assert [one.outcome for one in moves] == expected
            self.learn()

    @rule(lane=st.sampled_from(LANES), tenant=st.sampled_from([None, *TENANTS]))
    def look_for_what_waits(self, lane: Lane, tenant: str | None) -> None:
        waiting = self.run(self.broker.waiting(lane, tenant=tenant))
        assert {one.rid: one.tenant for one in waiting} == {
            request.rid: request.tenant
            for request in self.queue.open()
            if (request.state, request.lane) == ("Q", lane)
            and request.crashes < COMPANY
            and tenant in (None, request.tenant)
        }

    @rule(owner=OWNER, wants=WANTS, to=st.sampled_from(LANES), is_read=st.booleans())
    def move_under_a_reader(self, owner: str, wants: dict[str, Any], to: Lane, is_read: bool) -> None:
        """A request is moved before, or just after, a worker reads it, and then begun by what was read."""
        self.submit_all([submission(**wants)])
        known = len(self.entries)
        if is_read:
            self.read(owner, list(STREAMS), 2)
        self.move([0, 1], to, None, None, False)
        self.read(owner, list(STREAMS), 2)
        self.start(owner, [*range(len(self.entries) - known)])

    @rule(owner=OWNER, wants=WANTS, to=st.sampled_from(LANES))
    def move_what_came_back(self, owner: str, wants: dict[str, Any], to: Lane) -> None:
        self.submit_all([submission(**wants)])
        self.take(owner, STREAMS, 6)
        self.release([(0, "", True)])
        self.move([0], to, None, None, False)

    # --- the workers

    @rule(owner=OWNER, streams=st.lists(st.sampled_from(STREAMS), min_size=1, max_size=7, unique=True))
    def read(self, owner: str, streams: list[Stream], count: int = 2) -> None:
        names = [name for stream in streams for name in self.queue.lane(stream)]
        items = [item for name in names for item in self.queue.read(owner, name, count)]
        self.broker._sub_lanes = self.queue.top  # as the last look of a worker told it
        entries = self.run(self.broker.read(owner, streams, count, block_ms=None))
        assert [(name_of(one.stream, one.sub_lane), one.eid) for one in entries] == [
            (one.stream, one.eid) for one in items
        ]
        self.entries += zip(entries, items, strict=True)

    @rule(owner=OWNER, at=st.lists(AT, min_size=1, max_size=3))
    def start(self, owner: str, at: list[int]) -> None:
        if self.entries:
            # The later ones are the likelier ones: they are still alive.
            pairs = [self.entries[-1 - number % len(self.entries)] for number in at]
            outcomes = self.run(self.broker.start(owner, [entry for entry, _ in pairs], START))
            self.started(owner, pairs, outcomes)

    def started(self, owner: str, pairs: Sequence[tuple[Entry, Item]], outcomes: Sequence[Any]) -> None:
        expected: dict[int, Any] = {}
        for (_, item), outcome in zip(pairs, outcomes, strict=True):
            if id(item) not in expected:  # the same one twice gets one answer
                expected[id(item)] = self.queue.start(owner, item)
            if isinstance(outcome, Delivery):
                assert item.request is not None
                got = (outcome.epoch, outcome.attempts)
                assert (got, outcome.owner) == (expected[id(item)], owner)
                assert (outcome.crashes, outcome.deadline_at_ms - EPOCH_MS, outcome.now_ms - EPOCH_MS) == (
                    item.request.crashes,
                    item.request.deadline_ms,
                    self.queue.now_ms,
                )
                self.deliveries.append((outcome, item))
            else:
                assert outcome == expected[id(item)]

    @rule(
        owner=OWNER,
        streams=LOOKS,
        count=st.integers(1, 6),
    )
    def take(self, owner: str, streams: tuple[Stream, ...], count: int) -> None:
        make_room, items = self.queue.take(owner, streams, count)
        taken = self.run(self.broker.take(owner, START, streams=streams, count=count))
        assert taken.make_room == make_room
        # The script takes several of a sub-lane at once, where the model takes one of each in turn.
        items.sort(key=lambda item: item.stream)
        taken.started.sort(key=lambda one: name_of(one[0].stream, one[0].sub_lane))
        assert [name_of(one.stream, one.sub_lane) for one, _ in taken.started] == [
            item.stream for item in items
        ]
        for (entry, _), item in zip(taken.started, items, strict=True):
            item.eid = item.eid or entry.eid
            assert entry.eid == item.eid
            assert item.request is None or entry.rid == item.request.rid
        pairs = [(entry, item) for (entry, _), item in zip(taken.started, items, strict=True)]
        self.entries += pairs
        self.started(owner, pairs, [outcome for _, outcome in taken.started])
        self.learn()

    @rule(owner=OWNER, many=st.lists(WANTS, min_size=1, max_size=2))
    def bring(self, owner: str, many: list[dict[str, Any]]) -> None:
        """Requests all the way to a worker: by single steps alone, few would ever come so far."""
        self.submit_all([submission(**wants) for wants in many])
        self.take(owner, STREAMS, 6)

    @rule(owner=OWNER, wants=WANTS, units=st.integers(0, 1), is_lost=st.booleans())
    def linger(self, owner: str, wants: dict[str, Any], units: int, is_lost: bool) -> None:
        """What was read is begun late, and twice at once; or too late."""
        self.submit_all([submission(**wants)])
        known = len(self.entries)
        self.read(owner, list(STREAMS), 2)
        self.advance(units)
        if is_lost:
            self.hand_back(owner, True)
        self.start(owner, [*range(len(self.entries) - known)] * 2)

    @rule(owner=OWNER, heir=OWNER, units=st.integers(0, 3), look=LOOKS, wants=WANTS)
    def hesitate(
        self, owner: str, heir: str, units: int, look: tuple[Stream, ...], wants: dict[str, Any]
    ) -> None:
        """A request fails, perhaps after its first words, and is tried again after its pause."""
        self.submit_all([submission(**{**wants, "retry": Retry(backoff_ms=150_000)})])
        self.take(owner, STREAMS, 6)
        if units:
            self.emit([(0, "", 2)], 1)
        self.finish([(0, "", "retry")], False)
        self.advance(units)
        self.take(heir, look, 6)

    def claim(self, at: int, change: str) -> tuple[Delivery, Request, Item | None] | None:
        """A delivery that somebody was given, or one that pretends to be."""
        if not self.deliveries:
            return None
        delivery, item = self.deliveries[-1 - at % len(self.deliveries)]
        assert item.request is not None
        its: Item | None = item
        if change == "owner":
            delivery = replace(delivery, owner=OWNERS[OWNERS.index(delivery.owner) - 1])
        elif change in ("epoch", "older"):
            delivery = replace(delivery, epoch=delivery.epoch + (1 if change == "epoch" else -1))
        elif change == "entry":
            delivery, its = replace(delivery, entry=replace(delivery.entry, eid="1-1")), None
        return delivery, item.request, its

    def claims(self, many: Sequence[tuple[int, str]]) -> list[tuple[Delivery, Request, Item | None]]:
        found = [self.claim(at, change) for at, change in many]
        return [one for one in found if one is not None]

    @rule(owner=OWNER, many=st.lists(st.tuples(AT, CHANGE), min_size=1, max_size=4))
    def renew(self, owner: str, many: list[tuple[int, str]]) -> None:
        claims = self.claims(many)
        ours = [
            delivery.owner == owner and request.is_run_by(owner, delivery.epoch, item)
            for delivery, request, item in claims
        ]
        renewal = self.run(self.broker.renew(owner, [delivery for delivery, _, _ in claims]))
        assert renewal.ours == ours
        for (_, request, _), is_ours in zip(claims, ours, strict=True):
            if is_ours:
                self.queue.renew(request)

    @rule(
        many=st.lists(st.tuples(AT, CHANGE, st.integers(0, 3)), min_size=1, max_size=4),
        times=st.integers(1, 2),
    )
    def emit(self, many: list[tuple[int, str, int]], times: int) -> None:
        emissions, expected = [], []
        for at, change, kind in many:
            for delivery, request, item in self.claims([(at, change)]):
                ours = request.is_run_by(delivery.owner, delivery.epoch, item)
                expected.append(ours)
                again = kind == 1 and request.seq > 0  # as after a lost reply
                seq = request.seq if again else request.seq + 1
                body = BODY if kind and request.submission.envelope.stream else b""
                if ours and body and not again:
                    request.seq = seq
                    request.events.append(f"{delivery.epoch}-{seq}")
                emissions.append(Emission(delivery, request.tenant, seq, body))
        for _ in range(times):
            assert self.run(self.broker.emit(emissions)) == expected

    @rule(
        many=st.lists(
            st.tuples(AT, CHANGE, HOW),
            min_size=1,
            max_size=3,
        ),
        is_repeated=st.booleans(),
    )
    def finish(self, many: list[tuple[int, str, str | int]], is_repeated: bool) -> None:
        finishes, expected, repeated = [], [], []
        for at, change, how in many:
            pause_ms = how if isinstance(how, int) else None
            kind = how if pause_ms is None else "retry"
            for delivery, request, item in self.claims([(at, change)]):
                # Told apart by their text, so that it can be seen whose end stands: two calls with the same
                # end would be one call and its repetition.
                self.ends += 1
                choice = Choice(text=str(self.ends), token_ids=(1,), finish_reason="eos")
                spent = (100 + self.ends, 1)
                usage = Usage(prompt_tokens=spent[0], completion_tokens=spent[1])
                state: EndState = "failed" if kind == "retry" else cast(EndState, kind)
                end = End(state=state, choices=(choice,), usage=usage)
                finishes.append(Finish(delivery, end, retry=kind == "retry", retry_after_ms=pause_ms))
                ours = request.is_run_by(delivery.owner, delivery.epoch, item)
                if ours and kind == "retry":
                    self.queue.retry(request, pause_ms, spent)
                elif ours:
                    self.queue.end(request, STATE_LETTERS[end.state], spent)
                else:
                    self.queue.bill(request, delivery.epoch, spent)
                expected.append(ours)
                repeated.append(ours and not request.is_open)
        assert self.run(self.broker.finish(finishes)) == expected
        if is_repeated:
            assert self.run(self.broker.finish(finishes)) == repeated
        self.learn()

    @rule(
        many=st.lists(st.tuples(AT, CHANGE), min_size=1, max_size=3),
        is_cancelled=st.booleans(),
        times=st.integers(1, 2),
    )
    def bill(self, many: list[tuple[int, str]], is_cancelled: bool, times: int) -> None:
        """Workers tell what they had computed of requests; those that they still own go on."""
        bills = []
        for at, change in many:
            for delivery, request, _ in self.claims([(at, change)]):
                if is_cancelled:
                    self.queue.cancel(request, request.tenant)
                    self.run(self.broker.cancel([request.rid], request.tenant))
                self.ends += 1
                spent = (100 + self.ends, 1)
                self.queue.bill(request, delivery.epoch, spent)
                bills.append(Bill(request.rid, delivery.fence, *spent))
        for _ in range(times):
            assert self.run(self.broker.finish([], bills)) == []

    @rule(many=st.lists(st.tuples(AT, CHANGE, st.booleans()), min_size=1, max_size=3))
    def release(self, many: list[tuple[int, str, bool]]) -> None:
        held: list[Delivery | Entry] = []
        expected: list[bool] = []
        done: set[str] = set()
        for at, change, is_begun in many:
            if is_begun:
                for delivery, request, item in self.claims([(at, change)]):
                    held.append(delivery)
                    ok = self.queue.release(request, delivery.owner, delivery.epoch, item)
                    expected.append(ok and request.rid not in done)
                    done.update([request.rid] if ok else [])
            elif self.entries:
                entry, its = self.entries[-1 - at % len(self.entries)]
                held.append(entry)
                expected.append(bool(its.request and self.queue.release(its.request, "", None, its)))
        assert self.run(self.broker.release(held)) == expected
        self.learn()

    # --- everybody

    @rule()
    def sweep(self) -> None:
        counts = self.queue.sweep()
        swept = self.run(self.broker.sweep(lease_ms=LEASE_MS))
        assert (swept.expired, swept.requeued, swept.failed, swept.dead, swept.stray, swept.grace) == (
            counts.expired,
            counts.requeued,
            counts.failed,
            counts.dead,
            counts.stray,
            counts.is_grace,
        )
        self.learn()

    @rule(owner=OWNER, is_crashed=st.booleans())
    def hand_back(self, owner: str, is_crashed: bool) -> None:
        expected = self.queue.hand_back(owner, is_crashed=is_crashed)
        assert self.run(self.broker.hand_back(owner, crashed=is_crashed)).requests == expected
        self.learn()

    @rule(owner=OWNER, heir=OWNER, times=st.integers(1, 4), is_silent=st.booleans(), last=LOOKS)
    def die(self, owner: str, heir: str, times: int, is_silent: bool, last: tuple[Stream, ...]) -> None:
        """An owner dies, another begins what it ran, and dies of it as well."""
        for number in range(times):
            if is_silent:
                self.fall_silent((owner, heir)[number % 2], 24)
            else:
                self.hand_back((owner, heir)[number % 2], True)
            if number < times - 1:
                self.take((heir, owner)[number % 2], STREAMS, 6)
        self.submit_all([submission()])
        for other in OWNERS:
            self.take(other, last, 2)

    @rule(units=st.sampled_from([1, 1, 3, 6, 12]))
    def advance(self, units: int) -> None:
        ms = units * UNIT_MS
        self.queue.advance(ms)
        self.raw.incrby(f"{T}:clock", ms)
        self.age([f"{T}:s:{stream}" for stream in self.queue.streams()], [ms])
        # Claiming an entry that is there no more makes the server forget it.
        for stream in self.queue.streams():
            for item in self.queue.pending(stream):
                if not item.is_there:
                    self.queue.let_go(item)

    @rule(owner=OWNER, units=st.integers(6, 24))
    def fall_silent(self, owner: str, units: int) -> None:
        """Time passes, with sweeps on time, and all but one owner renew their leases."""
        for _ in range(units // 3):
            self.advance(3)
            for other in OWNERS:
                at = [n for n, (one, _) in enumerate(reversed(self.deliveries)) if one.owner == other]
                if other != owner and at:
                    self.renew(other, [(number, "") for number in at[:8]])
            self.sweep()

    # --- who watches over the tenants

    @rule(sub_lanes=st.integers(1, 3))
    def split(self, sub_lanes: int) -> None:
        self.queue.split(sub_lanes)
        self.run(self.broker.announce(card("w9", LIMIT), lease_ms=LEASE_MS, sub_lanes=sub_lanes))

    @rule(shares=SHARES)
    def share(self, shares: dict[str, Share]) -> None:
        self.queue.shares = shares
        self.run(self.broker.set_shares(shares))
        assert self.run(self.broker.shares()) == shares

    @rule(lane=st.sampled_from(LANES), counts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
    def crowd(self, lane: str, counts: list[int]) -> None:
        """Several tenants wait in one lane, and are taken in turn."""
        self.split(3)
        self.share({})
        many = [submission(lane=lane, tenant=TENANTS[at % len(TENANTS)]) for at in range(LIMIT)]
        self.submit_all(many)
        for count in counts:
            self.take(OWNERS[0], STREAMS[:6], count)

    @rule(to=st.integers(1, 2), is_taken=st.booleans(), is_harmed=st.booleans(), ends=st.booleans())
    def merge(self, to: int, is_taken: bool, is_harmed: bool, ends: bool) -> None:
        """There are fewer sub-lanes, while something waits or runs in those that are to go."""
        self.split(3)
        self.share({})
        self.submit_all([submission(tenant=tenant) for tenant in TENANTS])
        if is_taken:
            self.take(OWNERS[0], STREAMS, 6)
        if is_harmed:
            for item in [one.item for one in self.queue.open() if one.item and one.item.is_there]:
                if item.stream[-1:].isdigit():
                    self.queue.delete(item)
                    self.raw.xdel(f"{T}:s:{item.stream}", item.eid)
        self.split(to)
        self.sweep()
        if ends:
            self.hand_back(OWNERS[0], True)
        self.take(OWNERS[1], STREAMS, 6)
        self.sweep()

    @rule(owner=OWNER, heir=OWNER)
    def die_in_sub_lanes(self, owner: str, heir: str) -> None:
        """An owner falls silent about what it took from several of them."""
        self.split(3)
        day_ms = 86_400_000
        self.submit_all([submission(tenant=tenant, deadline_ms=day_ms) for tenant in TENANTS])
        self.take(owner, STREAMS, 6)
        self.fall_silent(owner, 24)
        self.take(heir, STREAMS, 6)

    @rule(tenant=st.sampled_from(TENANTS))
    def spend(self, tenant: str) -> None:
        """A tenant comes to the end of its tokens for the day."""
        self.share({EVERYBODY: Share(0, 0, 600)})
        for _ in range(3):
            self.submit_all([submission(tenant=tenant), submission(tenant=tenant)])
            self.take(OWNERS[0], STREAMS[:6], 6)
            self.finish([(0, "", "done"), (1, "", "done")], False)

    # --- what happens from outside

    @rule(stream=st.sampled_from(STREAMS[:6]), fields=st.sampled_from([{"x": "y"}, {"r": "no rid"}]))
    def stray(self, stream: Stream, fields: dict[str, str]) -> None:
        item = self.queue.stray(stream)
        place = f"{EPOCH_MS + self.queue.now_ms}-*"
        item.eid = self.raw.xadd(f"{T}:s:{stream}", fields, id=place).decode()

    @rule(at=AT, chance=st.integers(0, 2))
    def lose_payload(self, at: int, chance: int) -> None:
        there = [one.item for one in self.queue.open() if one.item and one.item.is_there]
        if there and not chance:
            item = there[at % len(there)]
            self.queue.delete(item)
            assert self.raw.xdel(f"{T}:s:{item.stream}", item.eid) == 1
