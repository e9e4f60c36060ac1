"""Faults in what calls Redis are noticed too: a library left to itself, groups made too late, deaf ears."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from redis.exceptions import ConnectionError as RedisConnectionError

import eventually
from broker_mutants import CLIENT
from lossy_proxy import LossyProxy
from streamfleet_common import subscriber as subscriber_module
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.line import Line
from streamfleet_common.listeners import tell
from streamfleet_common.subscriber import Subscriber

pytestmark = pytest.mark.usefixtures("impatient")
NOTICED = (AssertionError, pytest.fail.Exception)


@pytest.fixture
def library_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """A command is sent again when its reply was lost, as the library does by itself."""
    call = Line.call

    async def insist(line: Line, *words: Any) -> Any:
        with contextlib.suppress(RedisConnectionError):
            return await call(line, *words)
        return await call(line, *words)

    monkeypatch.setattr(Line, "call", insist)


async def test_a_library_that_repeats(
    library_retries: None, lossy: Broker, proxy: LossyProxy, raw: Any
) -> None:
    # Scripts are made for being repeated; it is reads that the library must not repeat.
    with pytest.raises(NOTICED):
        await CLIENT["library retry on"](lossy, proxy, raw)


@pytest.fixture
async def deaf(monkeypatch: pytest.MonkeyPatch, connections: Connections) -> AsyncIterator[Subscriber]:
    """A subscriber that takes no notice of a second confirmation, the only sign of a gap."""

    def tell_messages(method: Callable[..., None], *args: bytes) -> None:
        if method.__name__ != "missed":
            tell(method, *args)

    monkeypatch.setattr(subscriber_module, "tell", tell_messages)
    monkeypatch.setattr(eventually, "PATIENCE_S", 0.5)
    made = Subscriber(connections)
    yield made
    await made.close()


async def test_confirmations_that_nobody_looks_at(deaf: Subscriber, raw: Any) -> None:
    with pytest.raises(NOTICED):
        await CLIENT["ignore_subscribe_messages"](deaf, raw)


async def test_groups_that_begin_with_the_next_entry(
    monkeypatch: pytest.MonkeyPatch, connections: Connections
) -> None:
    make = connections.commands.xgroup_create

    async def make_late(key: str, group: str, **options: Any) -> Any:
        return await make(key, group, **{**options, "id": "$"})

    monkeypatch.setattr(connections.commands, "xgroup_create", make_late)
    with pytest.raises(NOTICED):
        await CLIENT["groups are made at $"](connections)
