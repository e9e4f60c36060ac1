"""Ends that are told late, as over a slow line."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Bill, Finish


def hold_finishes(monkeypatch: pytest.MonkeyPatch) -> asyncio.Event:
    """Let no end be told by anybody before the event is set."""
    told, plain = asyncio.Event(), Broker.finish

    async def finish(self: Broker, finishes: Sequence[Finish], bills: Sequence[Bill] = ()) -> list[bool]:
        await told.wait()
        return await plain(self, finishes, bills)

    monkeypatch.setattr(Broker, "finish", finish)
    return told
