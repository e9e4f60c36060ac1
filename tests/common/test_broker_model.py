"""Random interleavings of the protocol's steps by three actors, against a small model of it.

After each step the server is compared with the model, and the promises are looked at directly. The second
half proves that this would notice: scripts with one fault each must be caught.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgpack
import pytest
import redis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from broker_parts import START, submission
from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.deliveries import Delivery, Emission, Entry, Finish
from streamfleet_common.schemas import LANES, Choice, Delta, End, EndState, Lane
from streamfleet_common.scripts import Script, ScriptName
from streamfleet_common.submissions import Submission

T = "{q:q:0}"
OWNERS = ("w1", "w2", "w3")
TENANTS = ("default", "acme")
LIMIT = 5
LETTERS: dict[str, str] = {"done": "D", "failed": "F", "cancelled": "C", "expired": "X", "dead": "P"}
BODY = codec.encode(Delta(token_ids=(1,), texts=("a",)))


@dataclass
class Request:
    """What the model knows of a request."""

    submission: Submission
    due: bool
    eid: str
    state: str = "Q"
    epoch: int = 0
    owner: str = ""
    attempts: int = 0
    seq: int = 0
    events: list[str] = field(default_factory=list)
    """The ids of everything that was to be published."""

    @property
    def is_open(self) -> bool:
        return self.state in "QR"

    @property
    def rid(self) -> str:
        return self.submission.envelope.rid

    @property
    def tenant(self) -> str:
        return self.submission.envelope.tenant

    @property
    def lane(self) -> Lane:
        return self.submission.envelope.lane

    def end(self, letter: str) -> None:
        self.state, self.owner = letter, ""
        self.epoch += 1
        self.events.append(f"{self.epoch}-1")

    def is_run_by(self, delivery: Delivery) -> bool:
        """Whether a write in the name of this delivery may count."""
        return (self.state, self.epoch, self.eid, self.owner) == (
            "R",
            delivery.epoch,
            delivery.entry.eid,
            delivery.owner,
        )


class Fleet(RuleBasedStateMachine):
    """Three owners, two tenants, any step at any time."""

    url: ClassVar[str]
    scripts: ClassVar[dict[ScriptName, Script]] = {}
    """Scripts to use instead of the real ones."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.connections = Connections.open(self.url)
        self.broker = Broker(self.connections, "q")
        self.broker._calls._scripts.update(self.scripts)
        client: Any = redis.Redis
        self.raw = client.from_url(self.url, protocol=2)
        self.raw.flushall()
        self.run(self.broker.create_groups())
        self.channels: Any = self.raw.pubsub(ignore_subscribe_messages=True)
        self.channels.psubscribe(f"{T}:c:*")
        self.channels.get_message(timeout=5)  # the confirmation
        self.requests: list[Request] = []
        self.waiting: dict[Lane, list[str]] = {lane: [] for lane in LANES}
        self.garbage: set[tuple[Lane, str]] = set()
        self.dead = 0
        self.entries: list[Entry] = []
        self.deliveries: list[Delivery] = []
        self.ends = 0
        self.heard: dict[bytes, list[bytes]] = defaultdict(list)

    def run(self, step: Any) -> Any:
        return self.loop.run_until_complete(step)

    def find(self, rid: str) -> Request | None:
        return next((request for request in self.requests if request.rid == rid), None)

    def open(self) -> list[Request]:
        return [request for request in self.requests if request.is_open]

    # --- the producer

    @rule(
        many=st.lists(
            st.tuples(
                st.sampled_from(["new", "new", "again", "other body", "other tenant"]),
                st.integers(0, 20),
                st.sampled_from(LANES),
                st.sampled_from(TENANTS),
                st.booleans(),
                st.integers(0, 5).map(lambda number: number == 0),
            ),
            min_size=1,
            max_size=4,
        )
    )
    def submit(self, many: list[tuple[str, int, Lane, str, bool, bool]]) -> None:
        batch: list[Submission] = []
        expected: list[tuple[str, int, str]] = []
        new: list[Request] = []
        for kind, at, lane, tenant, stream, due in many:
            known = self.requests + new
            if kind == "new" or not known:
                one = submission(lane=lane, tenant=tenant, stream=stream, deadline_ms=1 if due else 600_000)
                depth = len(self.open()) + len(new)
                if depth < LIMIT:
                    new.append(Request(one, due, ""))
                    expected.append(("accepted", depth + 1, "Q"))
                else:
                    expected.append(("full", depth, "Q"))
            else:
                old = known[at % len(known)]
                envelope = old.submission.envelope
                if kind == "again":
                    one = submission(rid=envelope.rid, tenant=envelope.tenant)
                    expected.append(("duplicate", 0, old.state))
                else:
                    another = TENANTS[envelope.tenant == TENANTS[0]]
                    one = (
                        submission("Bye", rid=envelope.rid, tenant=envelope.tenant)
                        if kind == "other body"
                        else submission(rid=envelope.rid, tenant=another)
                    )
                    expected.append(("conflict", 0, old.state))
            batch.append(one)
        answers = self.run(self.broker.submit(batch, max_queue_depth=LIMIT))
        letters: dict[str, str] = {"queued": "Q", "running": "R", **LETTERS}
        assert [(one.outcome, one.depth, letters[one.state]) for one in answers] == expected
        for request in new:
            request.eid = self.fields(request)[2]
            self.waiting[request.lane].append(request.eid)
            self.requests.append(request)
        if any(request.due for request in new):
            latest = max(int(self.fields(request)[0][1:]) for request in new if request.due)
            while self.now() <= latest:
                pass

    @rule(at=st.lists(st.integers(0, 20), min_size=1, max_size=3), tenant=st.sampled_from(TENANTS))
    def cancel(self, at: list[int], tenant: str) -> None:
        if not self.requests:
            return
        targets = [self.requests[number % len(self.requests)] for number in at]
        expected: list[str | None] = []
        for request in targets:
            if request.tenant != tenant:
                expected.append(None)
                continue
            if request.is_open:
                self.leave(request)
                request.end("C")
            expected.append(request.state)
        states = self.run(self.broker.cancel([request.rid for request in targets], tenant))
        assert [LETTERS[state] if state else None for state in states] == expected

    # --- the workers

    @rule(owner=st.sampled_from(OWNERS), lane=st.sampled_from(LANES), count=st.integers(1, 3))
    def read(self, owner: str, lane: Lane, count: int) -> None:
        entries = self.run(self.broker.read(owner, [lane], count, block_ms=None))
        assert [entry.eid for entry in entries] == self.waiting[lane][:count]
        del self.waiting[lane][:count]
        self.entries += entries

    @rule(owner=st.sampled_from(OWNERS), at=st.lists(st.integers(0, 30), min_size=1, max_size=3))
    def start(self, owner: str, at: list[int]) -> None:
        if not self.entries:
            return
        # The later ones are the likelier ones: they are still alive.
        entries = [self.entries[-1 - number % len(self.entries)] for number in at]
        expected: list[Any] = []
        answered: dict[tuple[str, str, str], Any] = {}
        for entry in entries:
            place = (entry.lane, entry.eid, entry.rid)
            if place not in answered:
                answered[place] = self.expect_start(owner, entry)
            expected.append(answered[place])
        started = self.run(self.broker.start(owner, entries, START))
        got = [(one.epoch, one.attempts, one.owner) if isinstance(one, Delivery) else one for one in started]
        assert got == expected
        self.deliveries += [one for one in started if isinstance(one, Delivery)]

    @rule(
        owner=st.sampled_from(OWNERS),
        lane=st.sampled_from(LANES),
        tenant=st.sampled_from(TENANTS),
        stream=st.sampled_from([True, True, False]),
        due=st.sampled_from([False, False, False, True]),
        twice=st.booleans(),
    )
    def bring(self, *, owner: str, lane: Lane, tenant: str, stream: bool, due: bool, twice: bool) -> None:
        """A request all the way to a worker: by single steps alone, few would ever come so far."""
        self.submit([("new", 0, lane, tenant, stream, due)])
        self.read(owner, lane, 3)
        self.start(owner, [0, 0] if twice else [0])

    def expect_start(self, owner: str, entry: Entry) -> Any:
        request = self.find(entry.rid)
        if request is None:
            if (entry.lane, entry.eid) in self.garbage:
                self.garbage.discard((entry.lane, entry.eid))
                self.dead += 1
            return "stray"
        if not request.is_open or request.eid != entry.eid:
            return "gone"
        if request.state == "R" and request.owner != owner:
            return "lost"
        if request.due:
            request.end("X")
            return "expired"
        if request.state == "Q":
            request.state, request.owner, request.seq = "R", owner, 0
            request.epoch += 1
            request.attempts += 1
            if request.submission.envelope.stream:
                request.events.append(f"{request.epoch}-0")
        return (request.epoch, request.attempts, owner)

    def delivery(self, at: int, change: str) -> tuple[Delivery, Request] | None:
        """One that somebody was given, or one that pretends to be."""
        if not self.deliveries:
            return None
        delivery = self.deliveries[-1 - at % len(self.deliveries)]
        entry, owner, epoch = delivery.entry, delivery.owner, delivery.epoch
        if change == "owner":
            owner = OWNERS[OWNERS.index(owner) - 1]
        elif change == "epoch":
            epoch += 1
        elif change == "older":
            epoch -= 1
        elif change == "entry":
            entry = Entry(entry.rid, "1-1", entry.lane, entry.payload)
        request = self.find(entry.rid)
        assert request is not None
        return Delivery(entry, owner, epoch, 0, 0, 0, 0, 0), request

    CHANGES = st.sampled_from(["", "", "", "", "owner", "epoch", "older", "entry"])

    @rule(
        many=st.lists(st.tuples(st.integers(0, 30), CHANGES, st.integers(0, 3)), min_size=1, max_size=4),
        times=st.integers(1, 2),
    )
    def emit(self, many: list[tuple[int, str, int]], times: int) -> None:
        emissions, expected = [], []
        for at, change, kind in many:
            found = self.delivery(at, change)
            if found is None:
                return
            delivery, request = found
            ours = request.is_run_by(delivery)
            expected.append(ours)
            seq = request.seq + 1
            body = BODY
            if kind == 0 or not request.submission.envelope.stream:
                body = b""
            elif kind == 1 and request.seq:
                seq = request.seq  # again, as after a lost reply
            if ours and body and seq > request.seq:
                request.seq = seq
                request.events.append(f"{delivery.epoch}-{seq}")
            emissions.append(Emission(delivery, request.tenant, seq, body))
        for _ in range(times):
            assert self.run(self.broker.emit(emissions)) == expected

    @rule(
        many=st.lists(
            st.tuples(st.integers(0, 30), CHANGES, st.sampled_from(["done", "failed"])),
            min_size=1,
            max_size=3,
        ),
        is_repeated=st.booleans(),
    )
    def finish(self, many: list[tuple[int, str, EndState]], is_repeated: bool) -> None:
        finishes, expected = [], []
        for at, change, state in many:
            found = self.delivery(at, change)
            if found is None:
                return
            delivery, request = found
            # Told apart by their text, so that it can be seen whose end stands: two calls with the same end
            # would be one call and its repetition.
            self.ends += 1
            text = str(self.ends)
            choice = Choice(text=text, token_ids=(1,), finish_reason="eos")
            finishes.append(Finish(delivery, End(state=state, choices=(choice,))))
            expected.append(request.is_run_by(delivery))
            if expected[-1]:
                request.end(LETTERS[state])
        assert self.run(self.broker.finish(finishes)) == expected
        if is_repeated:
            assert self.run(self.broker.finish(finishes)) == expected

    @rule()
    def expire(self) -> None:
        due = [request for request in self.requests if request.is_open and request.due]
        for request in due:
            self.leave(request)
            request.end("X")
        assert self.run(self.broker.expire()) == len(due)

    @rule(at=st.integers(0, 20), owner=st.sampled_from(OWNERS))
    def enqueue_again(self, at: int, owner: str) -> None:
        """What a sweep does with a request whose owner was lost: a new entry, a new epoch, no owner."""
        running = [request for request in self.requests if request.state == "R"]
        if not running:
            return
        request = running[at % len(running)]
        fields = self.fields(request)
        stream = f"{T}:s:{request.lane}"
        eid = self.raw.xadd(stream, {"r": request.rid, "p": request.submission.payload}).decode()
        self.raw.xack(stream, "w", request.eid)
        self.raw.xdel(stream, request.eid)
        request.state, request.owner, request.eid = "Q", "", eid
        request.epoch += 1
        fields[0] = "Q" + fields[0][1:]
        fields[1:4] = [str(request.epoch), eid, ""]
        self.raw.set(f"{T}:r:{request.rid}", "|".join(fields))
        self.waiting[request.lane].append(eid)

    @rule(lane=st.sampled_from(LANES), fields=st.sampled_from([{"x": "y"}, {"r": "no rid"}]))
    def stray(self, lane: Lane, fields: dict[str, str]) -> None:
        eid = self.raw.xadd(f"{T}:s:{lane}", fields).decode()
        self.garbage.add((lane, eid))
        self.waiting[lane].append(eid)

    # --- what must hold

    def now(self) -> int:
        seconds, micros = self.raw.time()
        return int(seconds) * 1000 + int(micros) // 1000

    def fields(self, request: Request) -> list[str]:
        head: bytes = self.raw.get(f"{T}:r:{request.rid}").partition(b"\n")[0]
        return head.decode().split("|")

    def leave(self, request: Request) -> None:
        """An end takes the entry off its stream, read or not."""
        if request.eid in self.waiting[request.lane]:
            self.waiting[request.lane].remove(request.eid)

    def listen(self) -> None:
        self.channels.ping("end")
        while True:
            message = self.channels.get_message(timeout=5)
            assert message is not None
            if message["type"] == "pong":
                return
            self.heard[message["channel"]].append(message["data"])

    @invariant()
    def places_entries_and_records_agree(self) -> None:
        pipe = self.raw.pipeline(transaction=False)
        pipe.zrange(f"{T}:open", 0, -1)
        pipe.xlen(f"{T}:dead")
        for lane in LANES:
            pipe.xlen(f"{T}:s:{lane}")
        for lane in LANES:
            pipe.xpending(f"{T}:s:{lane}", "w")
        open_, dead, *both = pipe.execute()
        lengths, pending = both[: len(LANES)], [summary["pending"] for summary in both[len(LANES) :]]
        assert sorted(rid.decode() for rid in open_) == sorted(request.rid for request in self.open())
        assert len(open_) <= LIMIT
        assert sum(lengths) == len(open_) + len(self.garbage)
        # What has left a stream is acknowledged too, or it would be given out again for ever.
        assert all(held <= length for held, length in zip(pending, lengths, strict=True))
        assert dead == self.dead

    @invariant()
    def records_are_what_the_model_says(self) -> None:
        pipe = self.raw.pipeline(transaction=False)
        for request in self.requests:
            pipe.get(f"{T}:r:{request.rid}")
            pipe.pttl(f"{T}:r:{request.rid}")
        answers = pipe.execute()
        for request, record, life in zip(self.requests, answers[::2], answers[1::2], strict=True):
            head, _, frame = record.partition(b"\n")
            fields = head.decode().split("|")
            if request.is_open:
                assert (fields[0][0], fields[1:4]) == (
                    request.state,
                    [str(request.epoch), request.eid, request.owner],
                )
                assert fields[5] == str(request.attempts)
                assert life == -1
            else:
                assert (fields[0], fields[1], fields[3]) == (
                    "E" + request.state,
                    str(request.epoch),
                    str(request.attempts),
                )
                assert frame.startswith(f"{request.epoch}-1,".encode())
                assert life > 0

    @invariant()
    def logs_and_channels_tell_each_event_once(self) -> None:
        self.listen()
        pipe = self.raw.pipeline(transaction=False)
        for request in self.requests:
            pipe.xrange(f"{T}:ev:{request.rid}")
            pipe.pttl(f"{T}:ev:{request.rid}")
        answers = pipe.execute()
        for request, log, life in zip(self.requests, answers[::2], answers[1::2], strict=True):
            frames = self.heard[f"{T}:c:{request.tenant}:{request.rid}".encode()]
            places = [frame.partition(b" ")[0].partition(b",")[0].decode() for frame in frames]
            assert places == request.events
            ends = [frame for frame in frames if msgpack.unpackb(frame.partition(b" ")[2])["type"] == "end"]
            assert len(ends) == (not request.is_open)
            if request.submission.envelope.stream:
                assert [(id_.decode(), fields[b"f"]) for id_, fields in log] == list(
                    zip(places, frames, strict=True)
                )
                assert not log or life > 0
            else:
                assert log == []
            self.assert_in_order(places)
        assert len(self.heard) <= len(self.requests)

    @staticmethod
    def assert_in_order(places: list[str]) -> None:
        """Ids rise, and within an epoch there is no hole."""
        last = Counter[int]()
        highest = 0
        for place in places:
            epoch, seq = (int(number) for number in place.split("-"))
            assert epoch >= highest
            highest = epoch
            if seq:
                assert seq == last[epoch] + 1
            last[epoch] = seq

    def teardown(self) -> None:
        if not hasattr(self, "loop"):
            return
        try:
            self.drain()
        finally:
            self.channels.close()
            self.raw.close()
            self.run(self.connections.close())
            self.loop.close()

    def drain(self) -> None:
        """Whatever happened: everything can be ended, and then nothing is left but results with a life."""
        for request in self.requests:
            if request.is_open:
                request.end("C")
        for tenant in TENANTS:
            rids = [request.rid for request in self.requests if request.tenant == tenant]
            self.run(self.broker.cancel(rids, tenant))
        self.run(self.broker.read("w1", LANES, 1000, block_ms=None))
        self.dead += len(self.garbage)
        self.garbage.clear()
        for owner in OWNERS:
            self.run(self.broker.start(owner, self.run(self.broker.given(owner)), START))
        self.records_are_what_the_model_says()
        self.logs_and_channels_tell_each_event_once()
        assert self.raw.zcard(f"{T}:open") == 0
        assert self.raw.xlen(f"{T}:dead") == self.dead
        for lane in LANES:
            assert self.raw.xlen(f"{T}:s:{lane}") == 0
            assert self.raw.xpending(f"{T}:s:{lane}", "w")["pending"] == 0
        for key in (*self.raw.keys(f"{T}:r:*"), *self.raw.keys(f"{T}:ev:*")):
            assert self.raw.pttl(key) > 0


QUIET = [HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large]


def test_any_interleaving_keeps_the_promises(redis_url: str) -> None:
    Fleet.url = redis_url
    run_state_machine_as_test(
        Fleet,
        settings=settings(
            max_examples=80, stateful_step_count=40, deadline=None, suppress_health_check=QUIET
        ),
    )


FENCE = "and sub(record, 15, 14 + #fence) == fence"
MUTANTS: dict[str, tuple[ScriptName, str, str]] = {
    "finish without a fence": ("finish", FENCE, ""),
    "emit without a fence": ("emit", FENCE, ""),
    "finish whatever the state": ("finish", f"sub(record, 1, 1) == 'R' {FENCE}", "true"),
    "start by anybody": ("start", "its_owner ~= '' and its_owner ~= owner", "false"),
    "start of a superseded entry": ("start", "or its_eid ~= eid", ""),
    "start again opens another epoch": ("start", "if its_owner == '' then", "if true then"),
    "start after the deadline": ("start", "tonumber(deadline) <= tonumber(now)", "false"),
    "start buries garbage each time": ("start", "call('XDEL', T .. ':s:' .. lane, eid) == 1", "true"),
    "start twice in a batch": ("start", "if earlier then", "if false then"),
    "one place too many": ("submit", "depth >= limit", "depth > limit"),
    "no duplicate within a batch": ("submit", "elseif batch[rid] then", "elseif false then"),
    "any body is a duplicate": ("submit", "and its_digest == digest", ""),
    "any tenant's is a duplicate": ("submit", "its_tenant == tenant and", ""),
    "cancel for anybody": ("cancel", "match(head, '|([^|]*)|[^|]*$') ~= tenant", "false"),
    "cancel twice in a batch": ("cancel", "elseif seen[rid] then", "elseif false then"),
    "cancel keeps the place": ("cancel", "call('ZREM', T .. ':open', unpack(ended.rids))", ""),
    "finish keeps the entry": ("finish", "discard(lane, eids) end", "break end"),
    "finish does not acknowledge": ("finish", "call('XACK', T .. ':s:' .. lane, 'w', unpack(eids))", ""),
    "finish keeps the epoch": ("finish", "string.format('%.0f', epoch + 1)", "epoch"),
    "finish twice in a batch": ("finish", "if rids[j] == rid then", "if false then"),
    "finish without a life": ("finish", ", 'PX', ttl)", ")"),
    "finish again is refused": ("finish", "if repeated(", "if nil and repeated("),
    "any end is a repetition": ("finish", "and sub(record, -#event - 1) == ' ' .. event", ""),
    "emit does not log": ("emit", "if log(rid, id, id .. ' ' .. event) then", "if true then"),
    "emit publishes repetitions": (
        "emit",
        "if log(rid, id, id .. ' ' .. event) then",
        "log(rid, id, id .. ' ' .. event) if true then",
    ),
    "expire before the deadline": ("expire", "'-inf', now", "'-inf', '+inf'"),
    "expire keeps the place": ("expire", "call('ZREM', T .. ':open', unpack(ended.rids))", ""),
}


@pytest.fixture
def mutant() -> Callable[[ScriptName, str, str], type[Fleet]]:
    def make(name: ScriptName, right: str, wrong: str) -> type[Fleet]:
        real = Script.load(name).text
        assert right in real, "the script has changed: change the mutant with it"
        text = real.replace(right, wrong)
        script = Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())
        return type("Mutant", (Fleet,), {"scripts": {name: script}})

    return make


QUICK = {
    "finish without a fence",
    "one place too many",
    "no duplicate within a batch",
    "cancel for anybody",
    "cancel keeps the place",
    "start buries garbage each time",
}
"""The others take some seconds each."""


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    [
        pytest.param(*mutant, id=name, marks=[] if name in QUICK else [pytest.mark.slow])
        for name, mutant in MUTANTS.items()
    ],
)
def test_mutants_are_caught(
    redis_url: str,
    mutant: Callable[[ScriptName, str, str], type[Fleet]],
    name: ScriptName,
    right: str,
    wrong: str,
) -> None:
    fleet = mutant(name, right, wrong)
    fleet.url = redis_url
    with pytest.raises(AssertionError):
        run_state_machine_as_test(
            fleet,
            settings=settings(
                max_examples=200,
                stateful_step_count=40,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                derandomize=True,
                report_multiple_bugs=False,
                suppress_health_check=QUIET,
            ),
        )
