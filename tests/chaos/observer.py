"""Looks at Redis from aside, over connections of its own: the whole queue at a glance, and all channels."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import redis.asyncio
from redis.exceptions import RedisError, ResponseError

from chaos.history import WORK_STREAMS, Glimpse, History, Loss, Remains, Sighting, Stream
from chaos.server import ChaosServer
from streamfleet_common.frames import Frame
from streamfleet_common.keys import Keys
from streamfleet_common.records import Record

GLIMPSE_S = 0.1
RECONNECT_S = 0.05
GONE = -2  # what PTTL says of a key that has run out meanwhile
LOG_AGE_MS = 2000
"""How long after its end a log is read: enough for a late event to get there."""

# One script, so that nothing moves while it looks.
_LOOK = """
local T = KEYS[1]
local time = redis.call('TIME')
local waiting = 0
for at = 1, #ARGV do
  local length = redis.pcall('XLEN', T .. ':s:' .. ARGV[at])
  if type(length) == 'number' then waiting = waiting + length end
end
local rids = redis.call('ZRANGE', T .. ':open', 0, -1)
local running = {}
for at = 1, #rids do
  local record = redis.call('GET', T .. ':r:' .. rids[at])
  if record and string.sub(record, 1, 1) == 'R' then
    local epoch, place, owner = string.match(record, '^R%d+|(%d+)|([^|]*)|([^|]*)|')
    running[#running + 1] = {rids[at], epoch, place, owner}
  end
end
return {time[1] * 1000 + math.floor(time[2] / 1000), #rids,
  redis.call('HGET', T .. ':control', 'max_queue_depth') or '0', waiting,
  redis.call('ZCARD', T .. ':later'), redis.call('HGET', T .. ':sweep', 'grace_until') or '0', running}
"""


class Observer:
    """Keeps a history up to date; an async context manager, entered before anybody else connects."""

    def __init__(self, server: ChaosServer, keys: Keys, history: History) -> None:
        self.server = server
        self.keys = keys
        self.history = history
        self.alone: dict[str, str] = {}
        """Which worker runs a suspect alone, and which, as of the last look: worker to rid."""
        self._tasks: list[asyncio.Task[None]] = []
        self._eye: redis.asyncio.Redis
        self.graces = 0
        """How often nothing was taken from anybody for a lease."""
        self._grace_until_ms = 0
        self._read: set[str] = set()
        self._unfreed: list[Loss] = []
        self._lost_at: dict[int, float] = {}

    async def __aenter__(self) -> Observer:
        self._eye = self.server.client()
        self.history.remains.clients_before = await self.server.clients()
        self._tasks = [asyncio.create_task(self._watch()), asyncio.create_task(self._listen())]
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Look no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._eye.aclose()

    # --- while it runs

    async def look(self) -> Glimpse | None:
        """The queue now; None if Redis is away."""
        try:
            found: Any = await self._eye.eval(_LOOK, 1, self.keys.tag, *WORK_STREAMS)
        except (RedisError, OSError):
            return None
        now, depth, limit, waiting, later, grace_until, running = found
        rows = [tuple(value.decode() for value in row) for row in running]
        glimpse = Glimpse(
            at_ms=now,
            open=depth,
            limit=int(limit),
            waiting=waiting,
            later=later,
            grace_until_ms=int(grace_until),
            running={rid: (int(epoch), owner) for rid, epoch, _, owner in rows},
        )
        self.alone = {owner: rid for rid, _, place, owner in rows if place.startswith("S")}
        if glimpse.limit:
            self.history.glimpses.append(glimpse)
        if glimpse.grace_until_ms != self._grace_until_ms:
            self._grace_until_ms = glimpse.grace_until_ms
            self.outage(0.0)
            self.graces += 1
        self._see_freed(glimpse)
        return glimpse

    async def lost(self, loss: Loss) -> None:
        """A worker is gone: note what it held, and watch it be freed."""
        at = asyncio.get_running_loop().time()
        self.history.losses.append(loss)
        while (glimpse := await self.look()) is None:
            loss.outages += 1
            await asyncio.sleep(GLIMPSE_S)
        loss.held.update(
            {rid: epoch for rid, (epoch, owner) in glimpse.running.items() if owner == loss.worker}
        )
        if loss.held and loss.is_watched:
            loss.outages += glimpse.grace_until_ms > glimpse.at_ms
            self._lost_at[id(loss)] = at
            self._unfreed.append(loss)

    def outage(self, seconds: float) -> None:
        """Redis is away, or still, for so long."""
        self.history.outage_ms += round(seconds * 1000)
        for loss in self._unfreed:
            loss.outages += 1

    def _see_freed(self, glimpse: Glimpse) -> None:
        now = asyncio.get_running_loop().time()
        for loss in tuple(self._unfreed):
            for rid, epoch in loss.held.items():
                if rid not in loss.freed_ms and glimpse.running.get(rid) != (epoch, loss.worker):
                    loss.freed_ms[rid] = (now - self._lost_at[id(loss)]) * 1000
            if len(loss.freed_ms) == len(loss.held):
                self._unfreed.remove(loss)

    async def _watch(self) -> None:
        while True:
            glimpse = await self.look()
            if glimpse is not None:
                with contextlib.suppress(RedisError, OSError):
                    await self._read_logs(glimpse.at_ms)
            await asyncio.sleep(GLIMPSE_S)

    async def _read_logs(self, now_ms: int) -> None:
        """Keep the logs of what has ended, which Redis forgets after a minute."""
        ended = {seen.rid: seen.frame.times[2] for seen in self.history.sightings if seen.frame.is_end}
        for rid, at_ms in ended.items():
            if rid not in self._read and now_ms - at_ms > LOG_AGE_MS:
                self._read.add(rid)
                log = await self._log(rid)
                if log:
                    self.history.remains.logs[rid] = log

    async def _log(self, rid: str) -> list[Frame]:
        entries: Any = await self._eye.xrange(self.keys.log(rid))
        return [Frame.parse(fields[b"f"]) for _, fields in entries]

    async def _listen(self) -> None:
        prefix = f"{self.keys.tag}:c:".encode()
        while True:
            client = self.server.client()
            try:
                async with client.pubsub() as channels:
                    await channels.psubscribe(f"{self.keys.tag}:c:*")
                    while True:
                        message = await channels.get_message(ignore_subscribe_messages=True, timeout=None)
                        if message is not None:
                            tenant, _, rid = message["channel"].removeprefix(prefix).decode().partition(":")
                            seen = Sighting(tenant, rid, Frame.parse(message["data"]))
                            self.history.sightings.append(seen)
            except (RedisError, OSError):
                await asyncio.sleep(RECONNECT_S)
            finally:
                await client.aclose()

    # --- afterwards

    async def settle(self) -> None:
        """Write down what is left in Redis."""
        remains, control = self.history.remains, self.server.control
        names: Any = await control.keys("*")
        tag = self.keys.tag + ":"
        for name in sorted(key.decode() for key in names):
            life_ms = int(await control.pttl(name))
            if name.startswith(tag) and life_ms != GONE:
                remains.lives[name.removeprefix(tag)] = life_ms
        for key in remains.lives:
            kind, _, rid = key.partition(":")
            if kind == "r":
                raw: Any = await control.get(tag + key)
                if raw is not None:
                    remains.records[rid] = Record.parse(raw)
            elif kind == "ev":
                await self._compare_log(remains, rid)
        for stream in WORK_STREAMS:
            remains.streams[stream] = await self._stream(f"{tag}s:{stream}")
        open_: Any = await control.zrange(self.keys.open, 0, -1)
        remains.open = [rid.decode() for rid in open_]
        remains.later = await control.zcard(f"{tag}later")
        tenants: Any = await control.hgetall(f"{tag}tenants")
        remains.tenants = {name.decode(): int(count) for name, count in tenants.items()}
        ledger = {"requests": remains.booked, "completion_tokens": remains.charged}
        for key in remains.lives:
            if key.startswith("usage:"):
                day: Any = await control.hgetall(tag + key)
                for field, count in day.items():
                    tenant, _, what = field.decode().rpartition("|")
                    sums = ledger.get(what)
                    if sums is not None:
                        sums[tenant] = sums.get(tenant, 0) + int(count)
        letters: Any = await control.xrange(self.keys.dead)
        remains.dead = [
            {name.decode(): value.decode("utf-8", "replace") for name, value in fields.items()}
            for _, fields in letters
        ]
        await self.close()
        remains.clients = await self.server.clients()

    async def _compare_log(self, remains: Remains, rid: str) -> None:
        log = await self._log(rid)
        if log and log != remains.logs.setdefault(rid, log):  # it may have run out by now
            remains.grown_logs.add(rid)

    async def _stream(self, name: str) -> Stream:
        control = self.server.control
        found = Stream(length=await control.xlen(name))
        with contextlib.suppress(ResponseError):  # no such group
            consumers: Any = await control.xinfo_consumers(name, "w")
            found.consumers = [consumer["name"].decode() for consumer in consumers]
            found.pending = sum(consumer["pending"] for consumer in consumers)
        return found
