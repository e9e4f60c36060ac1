"""The leases over a broker that answers as the test says."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from eventually import eventually
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Delivery, Entry, Renewal
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_worker.engine.base import Key
from streamfleet_worker.leases import MAX_RENEW_S, Leases


def delivery(rid: str, epoch: int = 1) -> Delivery:
    return Delivery(Entry(rid, f"{rid}-0", "normal", b""), "w1", epoch, 0, 0, 0, 1, 0)


class StubBroker:
    def __init__(self) -> None:
        self.lost: set[str] = set()
        self.drain = False
        self.down = False
        self.hangs = False
        self.asked: list[list[str]] = []

    async def renew(self, owner: str, deliveries: Sequence[Delivery]) -> Renewal:
        assert owner == "w1"
        self.asked.append([one.entry.rid for one in deliveries])
        if self.hangs:
            await asyncio.Event().wait()
        if self.down:
            raise BrokerUnavailable("gone")
        return Renewal([one.entry.rid not in self.lost for one in deliveries], self.drain)


class Holder:
    """What a worker holds, and what its leases tell it."""

    def __init__(self, *, lease_s: float = 0.016) -> None:
        self.broker = StubBroker()
        self.held = [delivery("a"), delivery("b", 3)]
        self.is_moving = True
        self.lost: list[Key] = []
        self.drains = 0
        self.now = 0.0
        self.leases = Leases(
            cast(Broker, self.broker),
            "w1",
            lease_s=lease_s,
            held=lambda: self.held,
            moving=lambda: self.is_moving,
            lost=self._lose,
            drain=self._drain,
            clock=lambda: self.now,
        )

    def _lose(self, keys: list[Key]) -> None:
        self.lost += keys
        self.held = [one for one in self.held if one.key not in keys]

    def _drain(self) -> None:
        self.drains += 1


async def test_what_is_held_is_renewed_and_what_is_lost_is_told_by_its_epoch() -> None:
    holder = Holder()
    await holder.leases.renew()
    assert (holder.broker.asked, holder.lost) == ([["a", "b"]], [])
    holder.broker.lost = {"b"}
    await holder.leases.renew()
    assert holder.lost == [("b", 3)]
    await holder.leases.renew()
    assert holder.broker.asked[2:] == [["a"]], "what is lost is not asked for again"


async def test_leases_have_run_out_once_the_last_good_renewal_began_one_ago() -> None:
    holder = Holder(lease_s=15.0)
    told: list[bool] = []
    holder.leases._lost = lambda _: told.append(holder.leases.ran_out)
    holder.now = 14.0
    holder.broker.lost = {"b"}
    await holder.leases.renew()
    holder.now = 28.0
    assert not holder.leases.ran_out
    await holder.leases.renew()
    holder.now = 43.0
    await holder.leases.renew()
    assert told == [False, False, True]
    assert not holder.leases.ran_out


async def test_with_nothing_to_keep_it_still_asks_whether_to_drain() -> None:
    holder = Holder()
    holder.held = []
    holder.broker.drain = True
    await holder.leases.renew()
    assert (holder.broker.asked, holder.drains, holder.lost) == ([[]], 1, [])


async def test_it_goes_on_while_redis_is_away_and_loses_nothing_by_it() -> None:
    holder = Holder()
    holder.broker.down = True
    keeping = asyncio.create_task(holder.leases.keep())
    await eventually(lambda: len(holder.broker.asked) >= 3, "vain renewals")
    assert (holder.lost, holder.leases.renewed_at) == ([], 0.0)
    holder.now = 7.0
    holder.broker.down = False
    await eventually(lambda: holder.leases.renewed_at == 7.0, "a renewal")
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_renewal_that_takes_too_long_is_begun_anew() -> None:
    holder = Holder(lease_s=0.1)
    holder.broker.hangs = True
    keeping = asyncio.create_task(holder.leases.keep())
    await eventually(lambda: len(holder.broker.asked) >= 3, "several calls")
    holder.now, holder.broker.hangs = 7.0, False
    await eventually(lambda: holder.leases.renewed_at == 7.0, "a renewal")
    assert holder.lost == []
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


async def test_a_worker_whose_engine_hangs_renews_nothing() -> None:
    holder = Holder()
    keeping = asyncio.create_task(holder.leases.keep())
    await eventually(lambda: len(holder.broker.asked) >= 2, "renewals")
    holder.is_moving = False
    looks = 0

    def stopped() -> bool:
        nonlocal looks
        looks += 1
        return False

    holder.leases._moving = stopped
    asked = len(holder.broker.asked)
    await eventually(lambda: looks >= 3, "looks at the engine")
    assert len(holder.broker.asked) == asked
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)


@pytest.mark.parametrize(("lease_s", "period_s"), [(15.0, MAX_RENEW_S), (2.0, 0.25), (3600.0, MAX_RENEW_S)])
def test_a_lease_outlives_many_renewals(lease_s: float, period_s: float) -> None:
    # Sweepers take nothing within half a lease of a pause, so several renewals must fit into the other half.
    assert Holder(lease_s=lease_s).leases._period_s == period_s <= lease_s / 8
