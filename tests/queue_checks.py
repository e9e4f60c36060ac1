"""A queue on the real server beside its model; after each step they must agree.

The scripts go by a clock that the machine moves: a key stands for their `TIME`, and what is pending is aged
with it. The promises that can be looked at directly are, besides.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import date
from typing import Any, ClassVar

import msgpack
import redis
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant

from broker_parts import STREAMS, name_of
from queue_model import Queue
from queue_parts import Item, Request
from script_changes import changed
from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.deliveries import Delivery, Entry
from streamfleet_common.keys import parse_place
from streamfleet_common.records import LETTERS as STATE_LETTERS
from streamfleet_common.records import Record
from streamfleet_common.schemas import Delta
from streamfleet_common.scripts import Script, ScriptName

T = "{q:q:0}"
OWNERS = ("w1", "w2", "w3")
TENANTS = ("default", "acme", "beta")
"""Each in another of three sub-lanes."""
LIMIT = 5
UNIT_MS = 100_000
EPOCH_MS = 1_700_000_000_000
BODY = codec.encode(Delta(token_ids=(1,), texts=("a",)))
AGE = """
for _, key in ipairs(KEYS) do
  for _, entry in ipairs(redis.call('XPENDING', key, 'w', '-', '+', 1000)) do
    redis.call('XCLAIM', key, 'w', entry[2], 0, entry[1], 'IDLE', entry[3] + ARGV[1], 'JUSTID')
  end
end
"""


def with_clock(name: ScriptName, script: Script) -> Script:
    """The script, going by the machine's clock."""
    if name == "backlog":
        return script  # a question, which the machine does not ask
    if name == "submit":
        time = "local time = redis.call('TIME')\nlocal now = time[1] * 1000 + math.floor(time[2] / 1000)"
        now, key = "string.format('%.0f', now)", "local now = tonumber(redis.call('GET', T .. ':clock'))"
    else:
        time = "call('TIME')\n  return string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000))"
        now, key = "clock()", "call('GET', T .. ':clock')\n  return time"
    script = changed(name, (time, key), script=script)
    entry = "'*', 'r', rid, 'p'"
    if entry in script.text:
        script = changed(name, (entry, f"{now} .. '-*', 'r', rid, 'p'"), script=script)
    return script


class Checked(RuleBasedStateMachine):
    """A queue and its model, compared after each step."""

    url: ClassVar[str]
    scripts: ClassVar[dict[ScriptName, Script]] = {}
    """Scripts to use instead of the real ones."""

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.connections = Connections.open(self.url)
        self.broker = Broker(self.connections, "q")
        scripts = self.broker._calls._scripts
        for name, script in {**scripts, **self.scripts}.items():
            scripts[name] = with_clock(name, script)
        client: Any = redis.Redis
        self.raw = client.from_url(self.url, protocol=2)
        self.raw.flushall()
        self.raw.set(f"{T}:clock", EPOCH_MS)
        self.age = self.raw.register_script(AGE)
        self.run(self.broker.create_groups())
        self.channels: Any = self.raw.pubsub(ignore_subscribe_messages=True)
        self.channels.psubscribe(f"{T}:c:*")
        self.channels.get_message(timeout=60)  # the confirmation
        self.queue = Queue(LIMIT, EPOCH_MS)
        self.entries: list[tuple[Entry, Item]] = []
        self.deliveries: list[tuple[Delivery, Item]] = []
        self.ends = 0
        self.heard: dict[bytes, list[bytes]] = defaultdict(list)

    def run(self, step: Any) -> Any:
        return self.loop.run_until_complete(step)

    def learn(self) -> None:
        """Entries that the scripts made get their ids from the records."""
        for request in self.queue.open():
            if request.item and not request.item.eid:
                place = self.fields(request)[2]
                stream, number, eid = parse_place(place)
                assert name_of(stream, number) == request.item.stream
                request.item.eid = eid
        for items in self.queue.items.values():
            items.sort(key=lambda item: [int(part) for part in item.eid.split("-")])

    def fields(self, request: Request) -> list[str]:
        data = self.raw.get(f"{T}:r:{request.rid}")
        assert data is not None, "an accepted request has no record"
        head: bytes = data.partition(b"\n")[0]
        return head.decode().split("|")

    # --- what must hold

    @invariant()
    def the_server_holds_what_the_model_says(self) -> None:
        queue = self.queue
        pipe = self.raw.pipeline(transaction=False)
        pipe.zrange(f"{T}:open", 0, -1)
        pipe.zrange(f"{T}:later", 0, -1, withscores=True)
        pipe.xlen(f"{T}:dead")
        pipe.hgetall(f"{T}:tenants")
        for stream in queue.streams():
            pipe.xrange(f"{T}:s:{stream}")
            pipe.xpending_range(f"{T}:s:{stream}", "w", "-", "+", 100)
        open_, later, dead, counts, *streams = pipe.execute(raise_on_error=False)
        assert not [answer for answer in streams if isinstance(answer, Exception)], "a stream is gone"
        assert sorted(rid.decode() for rid in open_) == sorted(request.rid for request in queue.open())
        assert len(open_) <= LIMIT
        assert [(rid.decode(), at - EPOCH_MS) for rid, at in later] == [
            (request.rid, request.due_ms) for request in queue.later()
        ]
        assert dead == queue.dead
        assert {field.decode(): int(number) for field, number in counts.items()} == queue.counts()
        for stream, there, pending in zip(queue.streams(), streams[::2], streams[1::2], strict=True):
            items = queue.items[stream]
            assert [eid.decode() for eid, _ in there] == [item.eid for item in items if item.is_there]
            assert [
                (one["message_id"].decode(), one["consumer"].decode(), one["times_delivered"])
                for one in pending
            ] == [(item.eid, item.owner, 1) for item in queue.pending(stream)]

    @invariant()
    def nothing_waits_where_nobody_looks(self) -> None:
        assert int(self.raw.hget(f"{T}:control", "sub_lanes_top") or 1) == self.queue.top
        known = {f"{T}:s:{stream}".encode() for stream in self.queue.streams()}
        assert {key for key in self.raw.keys(f"{T}:s:*") if self.raw.xlen(key)} <= known

    @invariant()
    def the_ledger_is_what_the_model_says(self) -> None:
        booked: dict[tuple[int, str, str], int] = {}
        for key in self.raw.keys(f"{T}:usage:*"):
            day = date(*time.strptime(key.decode()[-8:], "%Y%m%d")[:3])
            for field, number in self.raw.hgetall(key).items():
                tenant, _, name = field.decode().rpartition("|")
                booked[(day - date(1970, 1, 1)).days, tenant, name] = int(number)
        assert booked == dict(+self.queue.usage)

    @invariant()
    def records_are_what_the_model_says(self) -> None:
        pipe = self.raw.pipeline(transaction=False)
        for request in self.queue.requests:
            pipe.get(f"{T}:r:{request.rid}")
            pipe.pttl(f"{T}:r:{request.rid}")
        answers = pipe.execute()
        for request, data, life in zip(self.queue.requests, answers[::2], answers[1::2], strict=True):
            assert data is not None, "an accepted request has no record"
            record = Record.parse(data)
            counts = (record.epoch, record.attempts, record.crashes, record.solo_losses)
            assert STATE_LETTERS[record.state] == request.state
            assert counts == (request.epoch, request.attempts, request.crashes, request.solo)
            assert (record.tenant, record.owner) == (request.tenant, request.owner)
            if request.is_open:
                item = request.item
                assert record.deadline_at_ms == request.deadline_ms + EPOCH_MS
                head, _, rest = data.partition(b"\n")
                place, lane = head.decode().split("|")[2:10:7]
                assert lane == request.lane[0]
                if item:
                    stream, number, eid = parse_place(place)
                    assert (name_of(stream, number), eid) == (item.stream, item.eid)
                else:
                    assert place == ""
                assert rest == (b"" if item else request.submission.payload)
                assert life == -1
            else:
                assert record.end is not None
                assert record.end.id == f"{request.epoch}-1"
                assert life > 0
                assert data.split(b"|")[1].startswith(b"+") == (request.unbilled is not None)
            # Only what its workers died of, while it ran alone, may ever be called dead.
            assert request.state != "P" or request.solo >= 2

    @invariant()
    def logs_and_channels_tell_each_event_once(self) -> None:
        self.listen()
        pipe = self.raw.pipeline(transaction=False)
        for request in self.queue.requests:
            pipe.xrange(f"{T}:ev:{request.rid}")
            pipe.pttl(f"{T}:ev:{request.rid}")
        answers = pipe.execute()
        for request, log, life in zip(self.queue.requests, answers[::2], answers[1::2], strict=True):
            frames = self.heard[f"{T}:c:{request.tenant}:{request.rid}".encode()]
            places = [frame.partition(b" ")[0].partition(b",")[0].decode() for frame in frames]
            assert places == request.events
            ends = [frame for frame in frames if msgpack.unpackb(frame.partition(b" ")[2])["type"] == "end"]
            assert len(ends) == (not request.is_open)
            if request.submission.envelope.stream:
                logged = [(id_.decode(), fields[b"f"]) for id_, fields in log]
                assert logged == list(zip(places, frames, strict=True))
                assert not log or life > 0
            else:
                assert log == []
            assert_in_order(places)
        assert len(self.heard) <= len(self.queue.requests)

    def listen(self) -> None:
        self.channels.ping("end")
        while (message := self.channels.get_message(timeout=60))["type"] != "pong":
            self.heard[message["channel"]].append(message["data"])

    def teardown(self) -> None:
        if not hasattr(self, "heard"):
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
        for tenant in TENANTS:
            mine = [request for request in self.queue.requests if request.tenant == tenant]
            self.run(self.broker.cancel([request.rid for request in mine], tenant))
            for request in mine:
                self.queue.cancel(request, tenant)
        self.broker._sub_lanes = self.queue.top
        self.run(self.broker.read("w1", STREAMS, 1000, block_ms=None))
        for owner in OWNERS:
            self.run(self.broker.hand_back(owner, crashed=True))
        garbage = [item for items in self.queue.items.values() for item in items if not item.request]
        self.queue.dead += len(garbage)
        for items in self.queue.items.values():
            items.clear()
        self.the_server_holds_what_the_model_says()
        self.records_are_what_the_model_says()
        self.logs_and_channels_tell_each_event_once()
        for key in (*self.raw.keys(f"{T}:r:*"), *self.raw.keys(f"{T}:ev:*")):
            assert self.raw.pttl(key) > 0


def assert_in_order(places: Sequence[str]) -> None:
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
