"""Calls to Redis: repeated where that is safe, in pieces where they are large, their errors in our words.

**One table** (`verdict`) says of every error what it means and what to do about it.

**A budget of time, not of tries.** What a call waits for (a restart, a failover, a full disk) lasts seconds,
while a refused connection fails in a millisecond: three tries would be over before anything could change, and
thirty would hammer a server that is just coming back. Scripts and questions may be repeated without harm, so
they are until `BUDGET_S` has passed. Two exceptions: there are always `ATTEMPTS` tries, or one reply that
never comes would use the budget up before a fresh connection is tried; and there are no more than that until
Redis has answered once, since a process that never heard of it more likely has a wrong URL than bad luck.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar, get_args

from redis import exceptions as redis_errors
from redis.asyncio import Redis

from streamfleet_common.confirmation import Confirmation
from streamfleet_common.connections import Connections, redacted
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.refusals import NO_LOGIN, WRONG_LOGIN, by_acl
from streamfleet_common.scripts import Script, ScriptName
from streamfleet_common.settings import Durability

ATTEMPTS = 3
BUDGET_S = 10.0
BACKOFF_S = 0.1
MAX_BACKOFF_S = 5.0
BATCH = 512
"""Requests in one script call: Lua can unpack some 8,000 values, and other clients wait meanwhile."""
BATCH_BYTES = 8 * 1024 * 1024
"""Payload in one script call; Redis cuts off a client that sends more than 1 GB at once."""
TRANSIENT = (redis_errors.ConnectionError, redis_errors.TimeoutError, redis_errors.BusyLoadingError, OSError)
"""What may be gone at the next try."""

_T = TypeVar("_T")


class Action(Enum):
    """What to do about an error. All but the last two wait a little first, and then try again."""

    RETRY = "retry"
    """The server is there, and says: not now."""
    RECONNECT = "reconnect"
    """This connection is of no use, and its idle sisters may not be either."""
    REDISCOVER = "rediscover"
    """The server is the primary no longer: ask DNS or the Sentinels who is, on every connection."""
    RESEND = "resend"
    """The server does not know the script: send its text, at once."""
    REGROUP = "regroup"
    """The stream or its consumer group is gone: make them again, then read again."""
    GIVE_UP = "give_up"


@dataclass(frozen=True, slots=True)
class Verdict:
    """`reason` is that of `BrokerUnavailable`; `words` go on from "Redis at …"."""

    action: Action
    reason: str
    words: str


_UNREACHABLE = (
    "cannot be reached ({error}): is it running, and is the URL right? `streamfleet up` starts one here"
)
_REFUSED = "refused a command ({error}): is it Redis 7.0 or newer, or Valkey 8 or newer?"
_NO_LOGIN = Verdict(Action.GIVE_UP, "forbidden", NO_LOGIN)
_WRONG_LOGIN = Verdict(Action.GIVE_UP, "forbidden", WRONG_LOGIN)
_ABSENT = Verdict(Action.RECONNECT, "unreachable", _UNREACHABLE)
_UNTRUSTED = Verdict(
    Action.RECONNECT,
    "tls",
    "and this client do not trust each other ({error}): check the names, dates and signers of both "
    "certificates, and ssl_ca_certs, ssl_certfile and ssl_keyfile in the URL",
)
_IN_SCRIPT = re.compile(r"ACL failure in script|user executing the script can't")
"""How servers say that a script was let in, but not one of its commands, keys or channels."""
_GONE = Verdict(Action.REGROUP, "refused", "holds none of the queue's streams ({error}): were they deleted?")
_REPLICA = Verdict(Action.REDISCOVER, "read_only", "is a read-only replica: point the URL at the primary")
_ELSEWHERE = Verdict(
    Action.GIVE_UP,
    "cluster",
    "is a node of a cluster that keeps this queue elsewhere ({error}): "
    "streamfleet works with a single server, with Sentinel, or with one node that holds all slots",
)
_DOWN = Verdict(Action.RETRY, "cluster", "is a node of a cluster that is down or moves its slots ({error})")

TABLE = {
    "LOADING": Verdict(Action.RETRY, "loading", "still reads its data from disk: wait until it has"),
    "BUSY": Verdict(
        Action.RETRY, "busy", "runs somebody's long script: wait for it, or end it with SCRIPT KILL"
    ),
    "NOREPLICAS": Verdict(
        Action.RETRY,
        "no_replicas",
        "takes no writes, since it has fewer good replicas than min-replicas-to-write: bring them back",
    ),
    "READONLY": _REPLICA,
    "MASTERDOWN": Verdict(
        Action.REDISCOVER, "read_only", "is a replica that has lost its primary: point the URL at the primary"
    ),
    "NOSCRIPT": Verdict(Action.RESEND, "refused", _REFUSED),
    "NOGROUP": _GONE,
    "WRONGTYPE": _GONE,
    "UNBLOCKED": _GONE,
    "OOM": Verdict(
        Action.GIVE_UP,
        "out_of_memory",
        "is out of memory and takes no more requests: wait for running ones to end, or raise its maxmemory",
    ),
    "MISCONF": Verdict(
        Action.GIVE_UP,
        "cannot_persist",
        "takes no writes, since it cannot write its data to disk: look into its log, and free disk space",
    ),
    "NOAUTH": _NO_LOGIN,
    "WRONGPASS": _WRONG_LOGIN,
    "CLUSTERDOWN": _DOWN,
    "TRYAGAIN": _DOWN,
    "MOVED": _ELSEWHERE,
    "ASK": _ELSEWHERE,
    "CROSSSLOT": _ELSEWHERE,
}
"""By the first word of the server's answer."""


def verdict(error: Exception) -> Verdict:
    """What an error of the client library or the system means, and what to do about it."""
    code = _code(error)
    if code == "UNBLOCKED" and "instance state changed" in str(error):
        return _REPLICA
    if code in TABLE:
        return TABLE[code]
    is_refused = code == "NOPERM" or isinstance(error, redis_errors.AuthorizationError)
    if is_refused or _IN_SCRIPT.search(str(error)):
        return Verdict(Action.GIVE_UP, "forbidden", by_acl(str(error)))
    if isinstance(error, redis_errors.MaxConnectionsError):
        # Ours, all of them at work: closing them would not help.
        return Verdict(Action.RETRY, "unreachable", "cannot be asked ({error})")
    if isinstance(error, TRANSIENT):
        return _UNTRUSTED if "[SSL" in str(error) else _ABSENT
    return Verdict(Action.GIVE_UP, "refused", _REFUSED)


def is_gone(error: BrokerUnavailable) -> bool:
    """Whether a stream or its consumer group is gone, and has to be made again."""
    cause = error.__cause__
    return isinstance(cause, Exception) and verdict(cause).action is Action.REGROUP


def backoff_s(tries: int) -> float:
    """How long to wait after so many vain tries: full jitter, lest a fleet come back all at once."""
    return random.uniform(0, min(MAX_BACKOFF_S, BACKOFF_S * 2 ** min(tries, 16)))


class Calls:
    """Calls on the keys under one tag. `durability` is what a durable script waits for.

    Raises:
        BrokerUnavailable: by every call, when Redis cannot be reached or refuses to work.
    """

    def __init__(
        self,
        connections: Connections,
        tag: str,
        *,
        script_flags: bool = True,
        durability: Durability = "fast",
    ) -> None:
        self._connections = connections
        self._tag = tag
        self._scripts = {name: Script.load(name, flags=script_flags) for name in get_args(ScriptName)}
        self._confirmation = Confirmation(durability, redacted(connections.url), self.permitted)
        self._answered = False

    async def script_in_batches(
        self,
        name: ScriptName,
        head: Sequence[Any],
        items: Sequence[tuple[Any, ...]],
        *,
        client: Redis | None = None,
        durable: bool = False,
        budget_s: float | None = None,
    ) -> list[Any]:
        """One reply an item. If a later batch fails, the earlier ones stand; the whole may be repeated."""
        replies: list[Any] = []
        for batch in batches(items):
            args = [*head]
            for item in batch:
                args += item
            replies += await self.script(name, args, client=client, durable=durable, budget_s=budget_s)
        return replies

    async def script(
        self,
        name: ScriptName,
        args: Sequence[Any],
        *,
        client: Redis | None = None,
        durable: bool = False,
        budget_s: float | None = None,
    ) -> Any:
        """Run one script, which must be safe to repeat, over `client` (`commands` unless given).

        With `durable`, and a level that asks for it, the reply comes only once Redis has confirmed that what
        the script did, or found done, is on disk or on a replica.

        Raises:
            BrokerUnavailable: `reason="not_durable"` where that was not confirmed; the script did run.
        """
        redis = client or self._connections.commands
        script = self._scripts[name]
        if durable and self._confirmation.is_needed:
            return await self.ask(lambda: self._durably(redis, script, args), client=redis, budget_s=budget_s)
        execute = self._execute(redis)
        return await self.ask(lambda: script.call(execute, self._tag, args), client=redis, budget_s=budget_s)

    async def command(self, *words: Any) -> Any:
        """Run a command that is safe to repeat, behind every script that was called before it."""
        execute = self._execute(self._connections.commands)
        return await self.ask(lambda: execute(*words))

    def _execute(self, redis: Redis) -> Callable[..., Awaitable[Any]]:
        line = self._connections.line(redis)
        return redis.execute_command if line is None else line.call

    async def _durably(self, redis: Redis, script: Script, args: Sequence[Any]) -> Any:
        run = self._confirmation.run
        try:
            return await run(redis, ("EVALSHA", script.sha), self._tag, args)
        except redis_errors.NoScriptError:
            return await run(redis, ("EVAL", script.text), self._tag, args)

    async def ask(
        self,
        command: Callable[[], Awaitable[_T]],
        *,
        client: Redis | None = None,
        budget_s: float | None = None,
    ) -> _T:
        """Run a command that is safe to repeat; it is made anew for each try.

        `client` is the one it uses, `commands` unless given; `budget_s` is `BUDGET_S` unless given.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + (BUDGET_S if budget_s is None else budget_s)
        tries = 0
        while True:
            tries += 1
            cancelled = _cancelled()
            try:
                answer = await command()
            except (redis_errors.RedisError, OSError) as error:
                left_s = until - clock() if self._answered else 0.0
                unavailable = await self.failed(error, client)
                if _is_final(verdict(error)) or (tries >= ATTEMPTS and left_s <= 0):
                    raise unavailable from error
                pause_s = backoff_s(tries)
                await asyncio.sleep(pause_s if tries < ATTEMPTS else min(pause_s, left_s))
            else:
                if _cancelled() > cancelled:
                    # The library sends under `wait_for`, which until Python 3.12 may swallow a cancellation.
                    raise asyncio.CancelledError
                self._answered = True
                return answer

    async def once(self, client: Redis, *words: Any) -> Any:
        """Run a command that must not be repeated, over `client`."""
        try:
            return await self._execute(client)(*words)
        except (redis_errors.RedisError, OSError) as error:
            raise await self.failed(error, client) from error

    async def failed(self, error: Exception, client: Redis | None = None) -> BrokerUnavailable:
        """Give up the connections that this error makes worthless; gives what to raise otherwise."""
        action = verdict(error).action
        if action is Action.RECONNECT:
            await self._connections.drop(client or self._connections.commands)
        elif action is Action.REDISCOVER:
            await self._connections.rediscover()
        return self.unavailable(error)

    def unavailable(self, error: Exception) -> BrokerUnavailable:
        """An error of the client library in our words."""
        found = verdict(error)
        # A reset or a timeout often has no words of its own.
        shown = f"{type(error).__name__}: {error}" if isinstance(error, TRANSIENT) else str(error)
        words = found.words.replace("{error}", shown)
        return BrokerUnavailable(f"Redis at {redacted(self._connections.url)} {words}", reason=found.reason)

    async def permitted(self, command: Callable[[], Awaitable[_T]]) -> _T | None:
        """Ask what not every server tells everybody: None where it is forbidden, disabled or unknown."""
        try:
            return await self.ask(command)
        except BrokerUnavailable as error:
            if isinstance(error.__cause__, redis_errors.ResponseError) and error.reason in (
                "forbidden",
                "refused",
            ):
                return None
            raise


def _is_final(found: Verdict) -> bool:
    return found.action in (Action.RESEND, Action.REGROUP, Action.GIVE_UP)


def _cancelled() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def _code(error: Exception) -> str:
    """The first word of what the server said, where the server said something."""
    if not isinstance(error, redis_errors.RedisError):
        return ""
    if error.status_code:
        return error.status_code
    # The library takes the words it knows away, and puts others before those of a pipeline.
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return code
    return str(error).rpartition("caused error: ")[2].partition(" ")[0]


_CODES: dict[type[Exception], str] = {
    redis_errors.BusyLoadingError: "LOADING",
    redis_errors.ReadOnlyError: "READONLY",
    redis_errors.NoScriptError: "NOSCRIPT",
    redis_errors.OutOfMemoryError: "OOM",
    redis_errors.NoPermissionError: "NOPERM",
    redis_errors.AuthenticationError: "WRONGPASS",
    redis_errors.MasterDownError: "MASTERDOWN",
    redis_errors.ClusterDownError: "CLUSTERDOWN",
    redis_errors.TryAgainError: "TRYAGAIN",
    redis_errors.ClusterCrossSlotError: "CROSSSLOT",
    redis_errors.MovedError: "MOVED",
    redis_errors.AskError: "ASK",
}
"""In this order: some are kinds of others."""


def batches(items: Sequence[tuple[Any, ...]]) -> Iterator[list[tuple[Any, ...]]]:
    """The items in pieces that one call may carry, at most `BATCH` and about `BATCH_BYTES` each."""
    batch: list[tuple[Any, ...]] = []
    size = 0
    for item in items:
        bytes_ = sum(len(value) for value in item if isinstance(value, bytes))
        if batch and (len(batch) == BATCH or size + bytes_ > BATCH_BYTES):
            yield batch
            batch, size = [], 0
        batch.append(item)
        size += bytes_
    if batch:
        yield batch
