"""What no role may do, or only others: each of it is tried, as a user with the rights of the role."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from deploy.guarded import TENANT, Guarded
from streamfleet_common import acl
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.errors import BrokerUnavailable, InvalidRequest

T, OTHER = "{q:q:0}", "{q:other:0}"
RID = "00" + "a" * 32
ROLES = (*acl.ROLES, TENANT)
Command = tuple[str | int, ...]

EVERYBODY: tuple[Command, ...] = (
    # The server is not theirs.
    *(("KEYS", "*"), ("RANDOMKEY",), ("DBSIZE",), ("FLUSHALL",), ("FLUSHDB",), ("SWAPDB", 0, 1)),
    *(("CONFIG", "GET", "requirepass"), ("CONFIG", "SET", "maxmemory", 1), ("DEBUG", "SLEEP", 0)),
    *(("SAVE",), ("BGSAVE",), ("SHUTDOWN", "NOSAVE"), ("REPLICAOF", "NO", "ONE"), ("MODULE", "LIST")),
    *(
        ("ACL", "LIST"),
        ("ACL", "SETUSER", "x"),
        ("ACL", "LOG"),
        ("CLIENT", "LIST"),
        ("CLIENT", "KILL", "ID", 1),
    ),
    *(("SCRIPT", "FLUSH"), ("FUNCTION", "FLUSH"), ("LATENCY", "RESET"), ("COMMAND",)),
    # What shows the prompts of others.
    *(("MONITOR",), ("SLOWLOG", "GET"), ("XINFO", "STREAM", f"{T}:s:normal", "FULL")),
    *(("PSUBSCRIBE", "*"), ("PSUBSCRIBE", f"{T}:c:*"), ("SSUBSCRIBE", "x"), ("PUBSUB", "CHANNELS")),
    *(("DUMP", f"{T}:r:{RID}"), ("SORT", f"{T}:open"), ("COPY", f"{T}:r:{RID}", f"{T}:r:x")),
    *(("XREAD", "STREAMS", f"{T}:s:normal", 0), ("XREAD", "STREAMS", f"{T}:ev:{RID}", 0)),
    # Another queue.
    *(("GET", f"{OTHER}:r:{RID}"), ("MGET", f"{OTHER}:r:{RID}"), ("XLEN", f"{OTHER}:s:normal")),
    *(("HGETALL", f"{OTHER}:workers"), ("SUBSCRIBE", f"{OTHER}:c:default:{RID}")),
    *(("EVAL", "return 1", 1, OTHER), ("EVAL", f"return redis.call('GET', '{OTHER}:r:{RID}')", 1, T)),
    *(("EVAL", "return redis.call('KEYS', '*')", 1, T), ("EVAL", "return 1", 1, "anything")),
    # Names that are nobody's.
    *(("SET", "anything", 1), ("GET", "anything"), ("PUBLISH", "anything", 1), ("SUBSCRIBE", "anything")),
)
"""Refused to all roles."""

OTHERS: dict[str, tuple[Command, ...]] = {
    "producer": (
        # Not even the names of the requests of others, nor what they say.
        *(("XRANGE", f"{T}:s:normal", "-", "+"), ("ZRANGE", f"{T}:open", 0, -1), ("SCAN", 0)),
        *(("XRANGE", f"{T}:dead", "-", "+"), ("XADD", f"{T}:dead", "*", "a", "b"), ("DEL", f"{T}:s:normal")),
        *(
            ("XREADGROUP", "GROUP", "w", "me", "STREAMS", f"{T}:s:normal", ">"),
            ("XPENDING", f"{T}:s:normal", "w"),
        ),
        *(("XCLAIM", f"{T}:s:normal", "w", "me", 0, "1-1"), ("XGROUP", "DESTROY", f"{T}:s:normal", "w")),
        *(("HSET", f"{T}:workers", "w", 1), ("HSET", f"{T}:control", "paused", 1)),
        *(("HSET", f"{T}:shares", "*", "0|0|0"), ("HSET", "streamfleet:queues", "x", 1), ("GET", "rq:job:x")),
    ),
    TENANT: (
        ("SUBSCRIBE", f"{T}:c:default:{RID}"),
        ("PUBLISH", f"{T}:c:default:{RID}", "1-0 x"),
        ("XRANGE", f"{T}:s:normal", "-", "+"),
        ("ZRANGE", f"{T}:open", 0, -1),
    ),
    "gateway": (
        *(("XREADGROUP", "GROUP", "w", "me", "STREAMS", f"{T}:s:normal", ">"), ("SCAN", 0)),
        *(("XCLAIM", f"{T}:s:normal", "w", "me", 0, "1-1"), ("XRANGE", f"{T}:dead", "-", "+")),
        *(("HSET", f"{T}:workers", "w", 1), ("HSET", "streamfleet:queues", "x", 1), ("GET", "rq:job:x")),
    ),
    "worker": (
        *(("SUBSCRIBE", f"{T}:c:default:{RID}"), ("XRANGE", f"{T}:dead", "-", "+"), ("SCAN", 0)),
        *(("HSET", f"{T}:shares", "*", "0|0|0"), ("HGETALL", f"{T}:shares"), ("HKEYS", "streamfleet:queues")),
        *(("GET", "rq:job:x"), ("XTRIM", f"{T}:s:normal", "MAXLEN", 0)),
    ),
    "bulk": (
        *(
            ("XREADGROUP", "GROUP", "w", "me", "STREAMS", f"{T}:s:normal", ">"),
            ("HSET", f"{T}:workers", "w", 1),
        ),
        # What RQ may is for RQ's keys alone.
        *(("RENAME", f"{T}:s:normal", "rq:mine"), ("RENAME", "rq:queue:x", f"{T}:s:normal")),
        *(("LRANGE", f"{T}:s:normal", 0, -1), ("PERSIST", f"{T}:r:{RID}"), ("SUBSCRIBE", "rq:other")),
        *(("HSET", f"{T}:shares", "*", "0|0|0"), ("HSET", "streamfleet:queues", "x", 1)),
    ),
    "metrics": (
        # Numbers, and never a request or an answer; and nothing is written.
        *(("XRANGE", f"{T}:s:normal", "-", "+"), ("XRANGE", f"{T}:dead", "-", "+"), ("GET", f"{T}:r:{RID}")),
        *(("MGET", f"{T}:r:{RID}"), ("XRANGE", f"{T}:ev:{RID}", "-", "+"), ("ZRANGE", f"{T}:open", 0, -1)),
        *(("HSET", f"{T}:control", "paused", 1), ("ZADD", f"{T}:open", 1, "x"), ("DEL", f"{T}:open")),
        *(("EVAL", "return 1", 0), ("SUBSCRIBE", f"{T}:c:default:{RID}"), ("PUBLISH", f"{T}:c:a:b", "x")),
        *(("HGETALL", f"{T}:usage:20260101"), ("HGETALL", f"{T}:shares"), ("SCAN", 0)),
    ),
    "operator": (
        # It may end requests, not listen to them.
        *(("SUBSCRIBE", f"{T}:c:default:{RID}"), ("XRANGE", f"{T}:ev:{RID}", "-", "+"), ("SCAN", 0)),
        *(
            ("XREADGROUP", "GROUP", "w", "me", "STREAMS", f"{T}:s:normal", ">"),
            ("ZRANGE", f"{T}:open", 0, -1),
        ),
        *(("HSET", f"{T}:workers", "w", 1), ("HSET", "streamfleet:queues", "x", 1), ("GET", "rq:job:x")),
    ),
}


@contextmanager
def line(guarded: Guarded, user: str) -> Iterator[Any]:
    """One connection of this user."""
    with redis.Redis.from_url(guarded.url(user), single_connection_client=True, protocol=3) as client:
        yield client


@pytest.mark.parametrize("role", ROLES)
def test_what_is_refused(guarded: Guarded, role: str) -> None:
    guarded.raw.xadd(f"{T}:s:normal", {"r": RID, "p": "a prompt"})
    guarded.raw.set(f"{OTHER}:r:{RID}", "a record")
    allowed = []
    with line(guarded, role) as client:
        for command in (*EVERYBODY, *OTHERS[role]):
            try:
                client.execute_command(*command)
            except redis.exceptions.NoPermissionError:
                continue
            except redis.ResponseError as error:
                # Of a script's call, the server says so in other words.
                if "executing the script can't" in str(error) or "ACL failure in script" in str(error):
                    continue
                allowed.append((command, str(error)))
                continue
            allowed.append((command, "answered"))
    assert allowed == []
    assert len(guarded.refusals()) > 0


def test_nobody_gets_in_without_a_password(guarded: Guarded) -> None:
    guarded.raw.execute_command("ACL", "SETUSER", *acl.user("bare", "metrics", is_redis_70=True).split()[1:])
    for user in (*ROLES, "bare"):
        for password in ("", "wrong", user):
            with pytest.raises(redis.AuthenticationError):
                guarded.raw.execute_command("AUTH", user, password)


async def test_a_refusal_says_what_it_is(guarded: Guarded) -> None:
    connections = Connections.open(guarded.url("metrics"))
    for asking in (Broker(connections, "q").sweep(), Broker(connections, "other").depth()):
        with pytest.raises(BrokerUnavailable) as caught:
            await asking
        assert caught.value.reason == "forbidden", caught.value
        assert "pass-of" not in str(caught.value)
    await connections.close()
    # A script that is let in and then refused one of its commands.
    connections = Connections.open(guarded.url("producer"))
    with pytest.raises(BrokerUnavailable) as caught:
        await Broker(connections, "q").sweep()
    assert caught.value.reason == "forbidden", caught.value
    await connections.close()


def test_the_lines_hold_no_password_and_nothing_broad() -> None:
    for role in acl.ROLES:
        line_ = acl.user("u", role, queues=["a", "b"], password=b"a secret")
        assert "a secret" not in line_
        words = line_.replace("(", " ").replace(")", " ").split()
        assert not [word for word in words if word.startswith("+@")], role
        assert not {"~*", "&*", "allkeys", "allchannels", "allcommands", "nopass", "+config", "+client"} & {
            *words
        }
        assert all(T.replace("q:q", f"q:{queue}") in line_ for queue in "ab")


@pytest.mark.parametrize("bad", ["", "a b", "a*", "x" * 65, "a\nuser evil on nopass ~* +@all", "{x}", "ü"])
def test_names_that_would_mean_something_else(bad: str) -> None:
    with pytest.raises(InvalidRequest):
        acl.user("u", "producer", queues=[bad])
    with pytest.raises(InvalidRequest):
        acl.user("u", "producer", tenants=[bad])
    with pytest.raises(InvalidRequest):
        acl.user(bad, "producer")


@pytest.mark.parametrize("role", [role for role in acl.ROLES if role != "producer"])
def test_who_ends_the_requests_of_all_is_for_all_tenants(role: acl.Role) -> None:
    with pytest.raises(InvalidRequest):
        acl.user("u", role, tenants=["t"])
