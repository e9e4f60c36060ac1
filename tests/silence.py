"""Owners that fall silent, without waiting for it: a test sets how long ago a lease was renewed."""

from __future__ import annotations

from typing import Any

from broker_parts import begin_waiting
from server_view import RID, T, fields_of, now_ms, pending_in
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Swept
from streamfleet_common.keys import LETTERS

LEASE_MS = 3_600_000
"""So long that no lease runs out by itself while a test runs, however slow the machine is."""
SILENT_MS = LEASE_MS + 1000


def age(raw: Any, owner: str | None = None, ms: int = SILENT_MS) -> None:
    """Let `owner`, or everybody, have been silent for `ms` about all that was given out."""
    for stream in LETTERS:
        for entry in pending_in(raw, stream):
            if owner is None or entry["owner"] == owner:
                raw.xclaim(f"{T}:s:{stream}", "w", entry["owner"], 0, [entry["eid"]], idle=ms, justid=True)


def calm(raw: Any) -> None:
    """As if somebody had swept all the time: nobody is given grace."""
    raw.hset(f"{T}:sweep", mapping={"last": now_ms(raw), "grace_until": 0})


async def sweep(broker: Broker, raw: Any) -> Swept:
    """A sweep in calm times."""
    calm(raw)
    return await broker.sweep(lease_ms=LEASE_MS)


async def lose(broker: Broker, raw: Any, owner: str = "w1") -> Swept:
    """The owner falls silent, and a sweep finds out."""
    age(raw, owner)
    return await sweep(broker, raw)


async def lose_often(broker: Broker, raw: Any, times: int) -> None:
    """All that waits is begun and lost by so many owners, one after the other."""
    for number in range(times):
        await begin_waiting(broker, f"lost{number}")
        await lose(broker, raw, f"lost{number}")


def backdate(raw: Any, stream: str = "normal") -> None:
    """Let all entries of a stream, none of them read yet, be as old as can be."""
    key = f"{T}:s:{stream}"
    entries = raw.xrange(key)
    raw.delete(key)
    raw.xgroup_create(key, "w", id="0", mkstream=True)
    for number, (_, fields) in enumerate(entries, 1):
        rid = fields[b"r"].decode()
        place = fields_of(raw, rid)[2]
        raw.xadd(key, fields, id=f"{number}-1")
        record = raw.get(f"{T}:r:{rid}")
        raw.set(f"{T}:r:{rid}", record.replace(f"|{place}|".encode(), f"|{place[0]}{number}-1|".encode(), 1))


def wake(raw: Any, rid: str = RID) -> None:
    """Let the pause before a request's next try be over."""
    assert raw.zadd(f"{T}:later", {rid: now_ms(raw)}, xx=True, ch=True) == 1
