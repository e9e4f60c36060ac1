"""The proof that what a script did would outlive a failure, waited for before anybody is told "accepted".

The script and the wait go out in one piece on one connection, since WAIT and WAITAOF speak of what their own
connection wrote: on another of the pool they would pass at once, and prove nothing.

* `safe`: WAITAOF, on this server's disk. Before Redis 7.2 there is none, and `appendfsync always` stands in:
  with it a reply is sent after its fsync.
* `replicated`: WAIT, in the memory of one replica. A failover then finds it, if that replica is promoted or
  the one that is has seen more.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.settings import Durability

CONFIRM_MS = 4000
"""How long a wait may take: below the timeout of a reply, and above two fsyncs of `everysec`."""
# A duplicate writes nothing, and its wait would pass at once while the first acceptance is still on its way.
# So something is always written; the disk and the replicas keep the order.
MARK = "#!lua flags=allow-oom\nreturn redis.call('set', KEYS[1], '1', 'px', 60000)"

_Permitted = Callable[[Callable[[], Awaitable[Any]]], Awaitable[Any]]


class Confirmation:
    """What one level of durability waits for.

    `where` names the server in errors; `permitted` asks a question and gives None where it may not be asked.
    """

    def __init__(self, level: Durability, where: str, permitted: _Permitted) -> None:
        self._level = level
        self._where = where
        self._permitted = permitted
        self._wait: tuple[str | int, ...] | None = {
            "fast": None,
            "safe": ("WAITAOF", 1, 0, CONFIRM_MS),
            "replicated": ("WAIT", 1, CONFIRM_MS),
        }[level]

    @property
    def is_needed(self) -> bool:
        return self._wait is not None

    async def run(self, redis: Any, script: Sequence[str], tag: str, args: Sequence[Any]) -> Any:
        """Run `script`, the command with its text or name; give its reply once what it did is confirmed.

        What it only found done (a duplicate) is confirmed as well.

        Raises:
            BrokerUnavailable: `reason="not_durable"` where nothing was confirmed; the script did run.
        """
        pipe = redis.pipeline(transaction=False)
        pipe.execute_command(*script, 1, tag, *args)
        if self._wait is not None:
            pipe.execute_command("EVAL", MARK, 1, f"{tag}:mark")
            pipe.execute_command(*self._wait)
        reply, *proof = await pipe.execute(raise_on_error=False)
        if isinstance(reply, Exception):
            raise reply
        if proof:
            await self._check(redis, *proof)
        return reply

    async def _check(self, redis: Any, mark: Any, held: Any) -> None:
        if isinstance(held, Exception) and "unknown command" in str(held):
            if self._level == "safe" and await self._is_always(redis):
                self._wait = None
                return
            raise self._unconfirmed("knows no WAITAOF: take Redis 7.2, any Valkey, or appendfsync always")
        for answer in (mark, held):
            if isinstance(answer, Exception):
                raise self._unconfirmed(f"did not confirm it ({answer})") from answer
        count = held[0] if isinstance(held, list) else held
        if count < 1:
            place = "on its disk" if self._level == "safe" else "on a replica"
            raise self._unconfirmed(f"did not have it {place} within {CONFIRM_MS / 1000:g} s")

    async def _is_always(self, redis: Any) -> bool:
        names = ("appendonly", "appendfsync", "no-appendfsync-on-rewrite")
        found: Mapping[Any, Any] = await self._permitted(lambda: redis.config_get(*names)) or {}
        return [_text(found, name) for name in names] == ["yes", "always", "no"]

    def _unconfirmed(self, why: str) -> BrokerUnavailable:
        return BrokerUnavailable(
            f"the request may have been accepted, but it is not {self._level}: Redis at {self._where} {why}; "
            "submit it again with the same id",
            reason="not_durable",
        )


def _text(found: Mapping[Any, Any], name: str) -> str:
    value = found.get(name, found.get(name.encode(), ""))
    return value.decode() if isinstance(value, bytes) else str(value)
