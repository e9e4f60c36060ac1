"""What facts about a server mean for each level of durability, and the words that mend it."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from streamfleet_common.durability import Facts, judge
from streamfleet_common.settings import Durability, FleetSettings

INFO = {
    "redis_version": "7.2.4",
    "role": "master",
    "cluster_enabled": "0",
    "maxmemory": "0",
    "maxmemory_policy": "noeviction",
    "aof_enabled": "1",
    "aof_last_write_status": "ok",
    "slave0": "ip=10.0.0.2,port=6379,state=online,offset=1,lag=0",
}
CONFIG = {
    "appendfsync": "everysec",
    "no-appendfsync-on-rewrite": "no",
    "client-output-buffer-limit": "normal 0 0 0 slave 268435456 67108864 60 pubsub 8388608 2097152 10",
    "min-replicas-to-write": "1",
    "min-replicas-max-lag": "10",
}
LEVELS: tuple[Durability, ...] = ("fast", "safe", "replicated")


def judged(
    level: Durability, info: dict[str, str] | None = None, *, waits: bool | None = True, **config: str
) -> list[tuple[str, str]]:
    settings = CONFIG | {name.replace("_", "-"): value for name, value in config.items()}
    facts = Facts(INFO | (info or {}), settings, None if level == "fast" else waits)
    return [(finding.severity, finding.setting) for finding in judge(facts, level)]


def test_a_server_that_is_set_up() -> None:
    assert judged("fast") == []
    assert judged("safe", appendfsync="always") == []
    assert judged("replicated") == []


@pytest.mark.parametrize(
    ("info", "config", "setting", "severities"),
    [
        ({"redis_version": "6.2.14"}, {}, "redis_version", "rrr"),
        ({"role": "slave"}, {}, "role", "rrr"),
        ({"cluster_enabled": "1"}, {}, "cluster_enabled", "www"),
        ({"maxmemory": "1", "maxmemory_policy": "allkeys-lru"}, {}, "maxmemory-policy", "rrr"),
        ({"maxmemory": "1", "maxmemory_policy": "allkeys-random"}, {}, "maxmemory-policy", "rrr"),
        ({"maxmemory_policy": "allkeys-lru"}, {}, "maxmemory-policy", "www"),
        ({"maxmemory": "1", "maxmemory_policy": "volatile-lru"}, {}, "maxmemory-policy", "wrr"),
        ({"maxmemory_policy": "volatile-ttl"}, {}, "maxmemory-policy", "www"),
        ({"aof_enabled": "0"}, {}, "appendonly", "wrw"),
        ({"aof_last_write_status": "err"}, {}, "aof_last_write_status", "wrw"),
        ({}, {"appendfsync": "no"}, "appendfsync", "wrw"),
        ({}, {"client_output_buffer_limit": "pubsub 0 0 0"}, "client-output-buffer-limit", "www"),
        ({}, {"client_output_buffer_limit": "pubsub 67108864 0 0"}, "client-output-buffer-limit", "www"),
        ({"slave0": "ip=10.0.0.2,state=wait_bgsave,lag=0"}, {}, "connected_slaves", "--r"),
        ({}, {"min_replicas_to_write": "0"}, "min-replicas-to-write", "--w"),
        ({}, {"min_replicas_max_lag": "11"}, "min-replicas-max-lag", "--w"),
    ],
)
def test_what_each_fault_means(
    info: dict[str, str], config: dict[str, str], setting: str, severities: str
) -> None:
    for level, letter in zip(LEVELS, severities, strict=True):
        expected = {"r": ["refuse"], "w": ["warn"], "-": []}[letter]
        everything: dict[str, Any] = {"appendfsync": "always"} | config
        found = judged(level, info, **everything)
        assert [severity for severity, name in found if name == setting] == expected, level
        assert len(found) == len(expected), level


@pytest.mark.parametrize(
    ("fsync", "on_rewrite", "waits", "expected"),
    [
        ("always", "no", True, []),
        ("always", "yes", True, []),  # the wait sees through it
        ("everysec", "no", True, [("warn", "appendfsync")]),
        ("always", "no", False, []),
        ("always", "yes", False, [("refuse", "no-appendfsync-on-rewrite")]),
        ("everysec", "no", False, [("refuse", "waitaof")]),
    ],
)
def test_safe_needs_a_sync_before_the_answer(
    fsync: str, on_rewrite: str, waits: bool, expected: list[tuple[str, str]]
) -> None:
    assert judged("safe", waits=waits, appendfsync=fsync, no_appendfsync_on_rewrite=on_rewrite) == expected


def test_replicated_needs_the_wait() -> None:
    assert judged("replicated", waits=False) == [("refuse", "wait")]


def test_the_gravest_comes_first() -> None:
    found = judged("safe", {"role": "slave"}, client_output_buffer_limit="pubsub 0 0 0", appendfsync="no")
    assert [severity for severity, _ in found] == ["refuse", "refuse", "warn"]


@pytest.mark.parametrize(
    ("info", "config", "unseen"),
    [(INFO, None, "CONFIG GET"), ({}, CONFIG, "INFO"), ({}, None, "INFO and CONFIG GET")],
)
def test_what_could_not_be_seen_is_said(
    info: dict[str, str], config: dict[str, str] | None, unseen: str
) -> None:
    (finding,) = judge(Facts(info, config), "fast")
    assert (finding.severity, finding.setting) == ("warn", "acl")
    assert f"may not run {unseen}, so" in finding.words


def test_the_words_say_how_to_mend_it() -> None:
    facts = Facts(INFO | {"aof_enabled": "0"}, CONFIG)
    (finding,) = judge(facts, "fast")
    assert "CONFIG SET appendonly yes" in finding.words


def test_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STREAMFLEET_DURABILITY", raising=False)
    assert FleetSettings().durability == "fast"
    monkeypatch.setenv("STREAMFLEET_DURABILITY", "replicated")
    assert FleetSettings().durability == "replicated"
    monkeypatch.setenv("STREAMFLEET_DURABILITY", "often")
    with pytest.raises(ValidationError):
        FleetSettings()
