"""What a server tells of itself, as far as this user may ask."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamfleet_common import durability
from streamfleet_common.calls import Calls
from streamfleet_common.connections import Connections
from streamfleet_common.durability import Facts
from streamfleet_common.settings import Durability

PINGS = 50
SETTINGS = (
    "timeout",
    "tcp-keepalive",
    "maxclients",
    "min-string-size-avoid-copy-reply",
)
SLOW_LOOKED_AT = 20


@dataclass(frozen=True, slots=True)
class Slow:
    """A call that stands in the server's slow log, without its arguments: they may hold prompts."""

    command: str
    took_ms: float
    ago_s: float


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What was told; None where the server would not."""

    level: Durability
    facts: Facts
    ping_ms: tuple[float, ...]
    """Each from the call to the answer, shortest first."""
    config: Mapping[str, str] | None
    """Those of `SETTINGS` that it knows."""
    ahead_s: float
    """By how much its clock is ahead of ours."""
    unsure_s: float
    """How far that may be off: half the time of the question."""
    user: str | None
    is_default_open: bool | None
    """Whether the user `default` needs no password."""
    slow: tuple[Slow, ...] | None = None
    cluster: Mapping[str, str] | None = field(default=None)
    """Of a node of a cluster: what CLUSTER INFO says."""

    @property
    def info(self) -> Mapping[str, str]:
        return self.facts.info

    def number(self, name: str) -> float | None:
        """A number of INFO; None if it was not told."""
        try:
            return float(self.info[name])
        except (KeyError, ValueError):
            return None


async def ask_server(connections: Connections, level: Durability) -> ServerFacts:
    """Ask a server what there is to know about it.

    Raises:
        BrokerUnavailable: it cannot be asked at all.
    """
    calls = Calls(connections, "")
    redis: Any = connections.commands
    facts = await durability.ask(connections, level)
    pings = []
    for _ in range(PINGS):
        before = time.perf_counter()
        await calls.ask(redis.ping)
        pings.append((time.perf_counter() - before) * 1000)
    before = time.time()
    found = await calls.ask(redis.time)
    after = time.time()
    ahead_s = int(found[0]) + int(found[1]) / 1e6 - (before + after) / 2
    shown = await calls.permitted(lambda: redis.config_get(*SETTINGS))
    config = None if shown is None else {_text(key): _text(value) for key, value in shown.items()}
    user = await calls.permitted(redis.acl_whoami)
    default = await calls.permitted(lambda: redis.acl_getuser("default"))
    cluster: Any = None
    if facts.info.get("cluster_enabled") == "1":
        cluster = await calls.permitted(lambda: redis.execute_command("CLUSTER INFO"))
    return ServerFacts(
        level=level,
        facts=facts,
        ping_ms=tuple(sorted(pings)),
        config=config,
        ahead_s=ahead_s,
        unsure_s=(after - before) / 2,
        user=None if user is None else _text(user),
        is_default_open=None if not isinstance(default, dict) else _is_open(default),
        slow=_slow(await calls.permitted(lambda: redis.slowlog_get(SLOW_LOOKED_AT)), found),
        cluster=None if cluster is None else _pairs(cluster),
    )


def _is_open(user: Mapping[Any, Any]) -> bool:
    flags = {_text(flag) for flag in user.get("flags", ())}
    # The library tells what Redis lists under `flags` in fields of its own, too.
    is_on = user.get("enabled", "on" in flags)
    return bool(is_on) and "nopass" in flags


def _slow(found: Any, now: Any) -> tuple[Slow, ...] | None:
    if found is None:
        return None
    slow = []
    for one in found:
        words = _text(one["command"]).split(" ", 1)
        slow.append(Slow(words[0].upper(), one["duration"] / 1000, max(0.0, int(now[0]) - one["start_time"])))
    return tuple(slow)


def _pairs(found: Any) -> dict[str, str]:
    if isinstance(found, dict):
        return {_text(key): _text(value) for key, value in found.items()}
    lines = [line.partition(":") for line in _text(found).splitlines()]
    return {key: value.strip() for key, _, value in lines}


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
