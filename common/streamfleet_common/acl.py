"""Users of Redis by role: the least that each needs, as rules of Redis's ACL.

A script runs with the rights of whoever calls it, so a role has all commands that its scripts make, and only
those. What no rule can separate is said in docs/security.md: who may submit to a queue may also write its
records by hand.

Rights to keys are split as the server splits them: `%R~` to read values, `%W~` to write them, `~` for both.
A producer so adds to the streams of work without being able to read in them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from streamfleet_common.errors import InvalidRequest
from streamfleet_common.keys import QUEUES, Keys

Role = Literal["producer", "worker", "gateway", "bulk", "metrics", "operator"]
ROLES: tuple[Role, ...] = get_args(Role)
ANY = "*"


@dataclass(frozen=True, slots=True)
class _Rights:
    """Of one role. Names of keys stand behind the queue's tag; commands are written as Redis writes them."""

    both: str = ""
    read: str = ""
    write: str = ""
    queues: Literal["", "%R~", "%W~"] = "%R~"
    """On the list of all queues."""
    channels: bool = True
    """Its channels are those of its tenants: to hear them, or to tell them of events."""
    commands: str = ""
    jobs: bool = False
    """RQ's keys, too."""


NEWER = frozenset({"client|setinfo", "waitaof"})
"""What Redis 7.0 does not know, whose ACLs may not name it then."""
_CONNECT = "ping select time info role client|setinfo client|setname"
_SCRIPTS = "eval evalsha"
_PROVE = "wait waitaof"
"""For `durability`: the mark is written, then waited for."""
_END = "mget set xadd pexpire publish xack xdel zrem hincrby hget hset hdel"
"""What the end of a request takes, written by whomever."""
_SUBMIT = f"{_END} hmget mset zadd zcard"
_SWEEP = (
    f"{_END} hmget zadd zcard zrange zrangebyscore del xlen xpending xrange xrevrange xinfo|groups "
    "xinfo|consumers xgroup|delconsumer xgroup|destroy"
)
_ASK = "get mget hget hmget hgetall hkeys hexists xlen xpending zcard"
_HEAR = "subscribe unsubscribe"
_STREAMS = "s:*"
_OPEN = "r:* tenants sweep usage:*"
"""What a submission and an end read and write."""

_RIGHTS: dict[Role, _Rights] = {
    "producer": _Rights(
        both=f"{_OPEN} ev:* mark",
        read="workers control shares",
        write=f"{_STREAMS} open later",
        commands=f"{_CONNECT} {_SCRIPTS} {_PROVE} {_SUBMIT} {_HEAR} get hexists hgetall hkeys xrange",
    ),
    "gateway": _Rights(
        both=f"{_OPEN} ev:* mark {_STREAMS} open later control shares",
        read="workers",
        write="dead",
        commands=f"{_CONNECT} {_SCRIPTS} {_PROVE} {_SUBMIT} {_SWEEP} {_ASK} {_HEAR} multi exec",
    ),
    "worker": _Rights(
        both=f"{_OPEN} ev:* {_STREAMS} open later control workers",
        write="dead batches",
        queues="%W~",
        commands=f"{_CONNECT} {_SCRIPTS} {_SWEEP} hexists hgetall mset xreadgroup xclaim xgroup|create pttl",
    ),
    "bulk": _Rights(
        both=f"{_OPEN} ev:* mark {_STREAMS} open later control dead",
        read="workers shares",
        commands=f"{_CONNECT} {_SCRIPTS} {_PROVE} {_SUBMIT} {_SWEEP} {_ASK} {_HEAR} xtrim",
        jobs=True,
    ),
    "metrics": _Rights(
        read=f"{_STREAMS} open later control workers dead sweep tenants",
        channels=False,
        commands=f"{_CONNECT} hget hmget hgetall hkeys xlen xpending zcard xinfo|groups xinfo|consumers",
    ),
    "operator": _Rights(
        both=f"{_OPEN} {_STREAMS} mark open later control shares dead",
        read="workers batches",
        write="ev:*",
        commands=(
            f"{_CONNECT} {_SCRIPTS} {_PROVE} {_SUBMIT} {_ASK} del xrange xtrim multi exec "
            "getrange zscan zcount zscore xinfo|groups xinfo|consumers acl|whoami"
        ),
    ),
}
_JOBS = "~rq:* ~streamfleet:batch:* ~streamfleet:batches:* &rq:pubsub:*"
_JOB_COMMANDS = (
    f"{_CONNECT} {_SCRIPTS} client|info script|load del exists expire persist scan rename get set "
    "hget hgetall hset hexists hincrby hincrbyfloat blmove lmove llen lrange lrem lpos lpop rpush "
    "sadd srem scard smembers zadd zcard zrange zrangebyscore zrevrange zrem zremrangebyrank "
    "zremrangebyscore zscore xadd xlen xread xrevrange publish subscribe unsubscribe watch unwatch "
    "multi exec discard"
)
"""What RQ and our use of it call. SCAN, for the lists of batches, shows the names of all keys."""
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


def user(
    name: str,
    role: Role,
    *,
    queues: Sequence[str] = (),
    tenants: Sequence[str] = (),
    password: bytes | None = None,
    is_redis_70: bool = False,
) -> str:
    """The line of this user for a file of ACLs.

    Args:
        name: of the user.
        role: what it does.
        queues: those it may work on; none stands for all there will ever be.
        tenants: those whose requests it may hear; none stands for all. Of a producer alone.
        password: its SHA-256 stands in the line; without one nobody can log in yet.
        is_redis_70: leave away what that server does not know.

    Raises:
        InvalidRequest: a name that no user, queue or tenant can have, or tenants of another role.
    """
    rights = _RIGHTS[role]
    for what, names in (("user", [name]), ("queue", queues), ("tenant", tenants)):
        for one in names:
            if not _NAME.fullmatch(one):
                raise InvalidRequest(
                    f"{one[:80]!r} cannot name a {what}: take 1 to 64 of letters, digits, '_', '.' and '-'"
                )
    if tenants and role != "producer":
        # Whoever sweeps ends requests of all, and must be able to tell them: a script is not taken back.
        raise InvalidRequest(f"role {role} is for all tenants: name them for producers alone")
    words = ["user", name, "on", "resetpass", "resetkeys", "resetchannels", "clearselectors"]
    if password is not None:
        words.append(f"#{hashlib.sha256(password).hexdigest()}")
    tags = [Keys(queue).tag for queue in queues or [ANY]]
    words += _keys(rights, tags)
    if rights.channels:
        words += [f"&{tag}:c:{tenant}:*" for tag in tags for tenant in tenants or [ANY]]
    left_out = NEWER if is_redis_70 else frozenset()
    words.append(_granted(rights.commands, left_out))
    if rights.jobs:
        words.append(f"({_JOBS} {_granted(_JOB_COMMANDS, left_out)})")
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class Needs:
    """What a role needs on one queue: commands, and keys that stand for all of their pattern."""

    commands: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]


def needs(role: Role, queue: str) -> Needs:
    """What a user must be granted to do this role's work on this queue."""
    rights = _RIGHTS[role]

    def keys(*lists: str) -> list[str]:
        return [f"{Keys(queue).tag}:{name.replace('*', 'x')}" for names in lists for name in names.split()]

    reads, writes = keys(rights.both, rights.read), keys(rights.both, rights.write)
    (writes if rights.queues == "%W~" else reads).append(QUEUES)
    return Needs(tuple(sorted(set(rights.commands.split()))), tuple(reads), tuple(writes))


def _granted(commands: str, left_out: frozenset[str]) -> str:
    return " ".join(["-@all", *(f"+{command}" for command in sorted(set(commands.split()) - left_out))])


def _keys(rights: _Rights, tags: Sequence[str]) -> list[str]:
    words = [rights.queues + QUEUES] if rights.queues else []
    for tag in tags:
        if "eval" in rights.commands.split():
            words.append(f"~{tag}")  # what scripts are given as their key
        for sign, names in (("~", rights.both), ("%R~", rights.read), ("%W~", rights.write)):
            words += [f"{sign}{tag}:{name}" for name in names.split()]
    return words
