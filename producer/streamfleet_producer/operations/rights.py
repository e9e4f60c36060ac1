"""Whether a user of Redis has the rights of a role."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamfleet_common import acl
from streamfleet_common.acl import Role
from streamfleet_common.calls import Calls
from streamfleet_common.connections import Connections
from streamfleet_common.keys import Keys
from streamfleet_producer.operations.checkup import Check

MOST_NAMED = 6
READING = ("get", "hget", "hgetall", "xlen", "zcard", "mget", "xrange")
WRITING = ("set", "hset", "xadd", "zadd", "hincrby", "xdel")
"""Commands with one of which a key is tried: which of them does not matter to an ACL."""
_DENIED = "has no permissions to run"
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "get": ("KEY",),
    "hget": ("KEY", "f"),
    "hgetall": ("KEY",),
    "xlen": ("KEY",),
    "zcard": ("KEY",),
    "mget": ("KEY",),
    "xrange": ("KEY", "-", "+"),
    "set": ("KEY", "v"),
    "hset": ("KEY", "f", "v"),
    "xadd": ("KEY", "*", "f", "v"),
    "zadd": ("KEY", "1", "m"),
    "hincrby": ("KEY", "f", "1"),
    "xdel": ("KEY", "1-1"),
}


async def check_rights(
    connections: Connections, role: Role, user: str | None, queues: Sequence[str], *, knows_newer: bool
) -> Check:
    """Whether `user` (the one we are, if None) may do all that the role does.

    The server is asked by ACL DRYRUN, which does nothing; an administrator alone may ask that.
    `knows_newer` is false for Redis 7.0.
    """
    calls = Calls(connections, "")
    redis: Any = connections.commands
    if user is None:
        who: Any = await calls.permitted(redis.acl_whoami)
        user = None if who is None else who.decode() if isinstance(who, bytes) else str(who)
    name = f"role {role}"

    async def dry_run(*words: str) -> str | None:
        answer: Any = await calls.permitted(lambda: redis.execute_command("ACL DRYRUN", user, *words))
        return None if answer is None else answer.decode() if isinstance(answer, bytes) else str(answer)

    if user is None or await dry_run("PING") is None:
        return Check(
            "server",
            name,
            "unseen",
            "this user may not ask what it may (ACL DRYRUN), or there is no such user",
            f"as an administrator: streamfleet doctor --role {role} --user NAME",
        )
    tag = Keys(queues[0] if queues else "any").tag
    lacking: list[str] = []
    needs = acl.needs(role, queues[0] if queues else "any")
    keys = [tag, *needs.reads[:1]]
    has_tag = (await dry_run("EVALSHA", "x", "1", tag) or "").startswith("OK")
    for command in needs.commands:
        if not knows_newer and command in acl.NEWER:
            continue
        arity = await _arity(calls, redis, command)
        answers = [await dry_run(*command.split("|"), *[key] * arity) or "" for key in keys]
        if any(answer.startswith("OK") for answer in answers):
            continue
        # Where all keys of the queue's own name are open, a key is refused by a selector alone: RQ's, say.
        if has_tag or all(_DENIED in answer for answer in answers):
            lacking += [f"+{command}"] * all("channel" not in answer for answer in answers)
    granted = set(needs.commands) - {word[1:] for word in lacking}
    for sign, wanted, ways in (("%R~", needs.reads, READING), ("%W~", needs.writes, WRITING)):
        way = next((way for way in ways if way in granted), None)
        for key in wanted if way is not None else ():
            words = [key if word == "KEY" else word for word in _ARGUMENTS[way or ""]]
            answer = await dry_run(way or "", *words)
            if answer is None or not answer.startswith("OK"):
                lacking.append(f"{sign}{key}")
    if not lacking:
        return Check("server", name, "ok", f"user {user!r} may do all that the role does")
    shown = " ".join(lacking[:MOST_NAMED]) + (
        f" and {len(lacking) - MOST_NAMED} more" * (len(lacking) > MOST_NAMED)
    )
    return Check(
        "server",
        name,
        "fault",
        f"user {user!r} lacks {shown}",
        f"give its line in users.acl the rights that `streamfleet acl {role} --user {user}` prints, "
        "then redis-cli ACL LOAD",
    )


async def _arity(calls: Calls, redis: Any, command: str) -> int:
    """How many arguments a command wants at least, besides its own name."""
    found: Any = await calls.permitted(lambda: redis.execute_command("COMMAND", "INFO", command))
    words = 1 + command.count("|")
    try:
        (info,) = found.values() if isinstance(found, dict) else found
        arity = info["arity"] if isinstance(info, dict) else info[1]
    except (TypeError, ValueError, KeyError, IndexError):
        return 3
    return max(0, abs(int(arity)) - words)
