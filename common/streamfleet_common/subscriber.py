"""One pub/sub connection for all the requests that a process waits for.

Pub/sub forgets: what is published while a connection is down is gone. So the connection's own liveness is
checked, it is made anew when it fails, and everybody on it is told that something may be missing.

The library's own `PubSub` is not used: it keeps every channel it was ever asked for until the server's
answer passes through its message loop, reconnects by itself, and knows one caller at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Iterable, Iterator
from typing import Any

import hiredis
from redis._parsers.hiredis import NOT_ENOUGH_DATA, _AsyncHiredisParser
from redis.exceptions import AuthenticationError, NoPermissionError, RedisError

from streamfleet_common.calls import verdict
from streamfleet_common.connections import Connections, redacted
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.listeners import Ear, Ears, Listener, give_up, tell
from streamfleet_common.subscriptions import Subscriptions

SILENCE_S = 10.0
"""A connection that brought nothing for so long is asked for a sign of life, and given as long again."""
ANSWER_S = 3.0
"""A connection that brought nothing at all for so long after a subscription is dead. Shorter than a caller
waits in `subscribe`, so that a new connection answers him yet."""
CONNECT_S = 10.0
"""How long a new connection may take to be greeted; the library waits for that without a limit."""
MAX_BACKOFF_S = 5.0
LEAVE_AFTER_S = 0.05
LEAVE_AT_ONCE = 64
"""Channels that were left are told to the server together: so many at once, or what there is after a while.
A channel with nothing on it costs nothing, and a command for each costs more than the subscription did."""


class Subscriber:
    """Subscriptions by exact channel name; a channel may have several listeners.

    Callers change only what is wanted (`_ears`); one task writes it to the server, one reads. So nobody who
    is cancelled can break the connection, and what is wanted at one moment goes out in one command.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._ears = Ears()
        self._task: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        # In order, so that those who wait are confirmed, and then submit, in the order in which they came.
        self._changed: dict[str, None] = {}
        self._wake = asyncio.Event()
        self._left = 0
        self._leaving: asyncio.TimerHandle | None = None
        self._ping = False
        self._heard_at = 0.0
        self._asked_at = 0.0
        """When the first subscription since then was asked for."""
        self._unanswered: asyncio.TimerHandle | None = None
        self._dead = False
        self._known = Subscriptions()
        """What the server knows of us on the present connection."""

    async def subscribe(self, listeners: Iterable[tuple[str, Listener]], timeout_s: float = 5.0) -> None:
        """Listen on channels, all in one command, and wait until the server has confirmed every one.

        Raises:
            BrokerUnavailable: not confirmed within `timeout_s`; nothing is listened to then.
        """
        loop = asyncio.get_running_loop()
        new = [(channel, self._ears.add(channel, listener)) for channel, listener in listeners]
        for channel, ear in new:
            if channel in self._known.live:
                ear.ready.set_result(None)
        if any(channel not in self._known.asked for channel, _ in new):
            self._changed.update(dict.fromkeys(channel for channel, _ in new))
            self._write_soon()
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="subscriber")
        # A bare timer: `asyncio.timeout` and `gather` cost as much as all the rest here.
        timer = loop.call_later(timeout_s, give_up, [ear for _, ear in new])
        try:
            for _, ear in new:
                await ear.ready
        except BaseException as error:
            for channel, ear in new:
                self._remove(channel, ear)
            if isinstance(error, (TimeoutError, RedisError)):
                raise self._unavailable(error) from self._failure
            raise
        finally:
            timer.cancel()

    def hand_over(self, channel: str, old: Listener, new: Listener) -> bool:
        """Let one listener take another's place. False, and no change, if the server does not listen now.

        That is so while a lost connection has not been made anew, and the channel confirmed on it.
        """
        return channel in self._known.live and self._ears.hand_over(channel, old, new)

    def listens(self, channel: str, listener: Listener) -> bool:
        """Whether a listener is on a channel."""
        return any(ear.listener is listener for ear in self._ears.of(channel))

    def unsubscribe(self, channels: Iterable[str], listener: Listener | None = None) -> None:
        """Stop listening, all on these channels or one `listener`; messages on their way are dropped.

        The server is told soon, in the background.
        """
        for channel in channels:
            for ear in self._ears.of(channel):
                if listener is None or ear.listener is listener:
                    self._remove(channel, ear)

    async def close(self) -> None:
        """Stop; whoever still waits in `subscribe` gets `BrokerUnavailable`."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        self._ears.fail(BrokerUnavailable("the subscriber was closed", reason="closed"))
        self._ears.clear()
        self._changed.clear()
        self._write_soon()

    # --- what is wanted

    def _remove(self, channel: str, ear: Ear) -> None:
        if not self._ears.remove(channel, ear):
            return
        if channel not in self._known.asked:
            # The server never heard of it. While it is away, nothing else would take these off.
            self._changed.pop(channel, None)
            return
        self._changed[channel] = None
        self._left += 1
        if self._left >= LEAVE_AT_ONCE:
            self._write_soon()
        elif self._leaving is None:
            self._leaving = asyncio.get_running_loop().call_later(LEAVE_AFTER_S, self._write_soon)

    def _write_soon(self) -> None:
        self._left = 0
        if self._leaving is not None:
            self._leaving.cancel()
            self._leaving = None
        self._wake.set()

    def _unavailable(self, error: Exception) -> BrokerUnavailable:
        where = redacted(self._connections.url)
        if isinstance(error, (AuthenticationError, NoPermissionError)):
            found = verdict(error)
            return BrokerUnavailable(
                f"Redis at {where}, for subscriptions, {found.words}", reason=found.reason
            )
        why = str(self._failure or "") or "no answer"  # a plain timeout has no words
        return BrokerUnavailable(
            f"Redis at {where} cannot be reached for subscriptions ({why}): "
            "is it running, and is the URL right?",
            reason="unreachable",
        )

    # --- the connection

    async def _run(self) -> None:
        pool: Any = self._connections.pubsub.connection_pool
        failures = 0
        while True:
            connection = None
            try:
                async with asyncio.timeout(CONNECT_S):
                    connection = await pool.get_connection()
                self._failure = None
                self._changed.update(dict.fromkeys(self._ears))
                self._write_soon()
                await self._talk(connection)
            except (RedisError, OSError, TimeoutError) as error:
                self._failure = error
                # A connection that worked has earned a quick return.
                failures = 1 if self._known.live else failures + 1
            finally:
                self._known.clear()
                self._ping = self._dead = False
                if self._unanswered is not None:
                    self._unanswered.cancel()
                    self._unanswered = None
                if connection is not None:
                    with contextlib.suppress(RedisError, OSError):
                        await connection.disconnect(nowait=True)
                    await pool.release(connection)
            # Only now, so that whoever is told finds the refused connection gone.
            if isinstance(self._failure, (AuthenticationError, NoPermissionError)):
                self._ears.fail(self._failure)
            # Full jitter, so that a fleet does not come back all at once.
            await asyncio.sleep(random.uniform(0, min(MAX_BACKOFF_S, 0.05 * 2 ** min(failures, 10))))

    async def _talk(self, connection: Any) -> None:
        writing = asyncio.create_task(self._write(connection), name="subscriber-writer")
        try:
            await self._read(connection)
        finally:
            writing.cancel()
            await asyncio.wait([writing])

    async def _write(self, connection: Any) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._dead:
                    raise ConnectionError(f"no answer for {ANSWER_S:g} s")
                changed, self._changed = self._changed, {}
                new, gone = self._known.change(changed, self._ears)
                commands = []
                if new:
                    commands.append(_packed("SUBSCRIBE", *new))
                    self._await_answer()
                if gone:
                    commands.append(_packed("UNSUBSCRIBE", *gone))
                if self._ping:
                    self._ping = False
                    commands.append(_packed("PING"))
                if commands:
                    await connection.send_packed_command(commands, check_health=False)
        except (RedisError, OSError):
            # Ends the reading too, and with it this connection.
            await connection.disconnect(nowait=True)

    def _await_answer(self) -> None:
        loop = asyncio.get_running_loop()
        if self._asked_at <= self._heard_at:
            self._asked_at = loop.time()
        if self._unanswered is None:
            self._unanswered = loop.call_at(self._asked_at + ANSWER_S, self._judge, self._asked_at)

    def _judge(self, asked_at: float) -> None:
        self._unanswered = None
        if self._known.owed and self._heard_at < asked_at:
            self._dead = True
            self._wake.set()
        elif self._known.owed:
            self._await_answer()

    async def _read(self, connection: Any) -> None:
        loop = asyncio.get_running_loop()
        self._heard_at = loop.time()
        asked_at: float | None = None
        while True:
            heard_at = self._heard_at
            # From the question on, not from the last word: this process may have stood still in between.
            since = heard_at if asked_at is None else asked_at
            # One timeout for a silence, not one for a message: making it costs as much as reading that.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(since + SILENCE_S):
                    await self._read_on(connection)
            if self._heard_at != heard_at:
                asked_at = None
            elif asked_at is not None:
                raise TimeoutError(f"silent for {2 * SILENCE_S:.0f} s")
            else:
                asked_at = loop.time()
                self._ping = True
                self._write_soon()

    async def _read_on(self, connection: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            reply = await connection.read_response(
                timeout=math.inf, disconnect_on_error=False, push_request=True
            )
            if reply is None:
                # What the library makes of a line that TCP gave up (ETIMEDOUT): at once, and ever again.
                raise ConnectionError("the connection timed out")
            self._heard_at = loop.time()
            self._take(reply)
            for more in _waiting_replies(connection):
                self._take(more)

    def _take(self, reply: object) -> None:
        if not isinstance(reply, list) or len(reply) < 3:
            return  # a pong
        kind, name, data = reply[0], reply[1], reply[2]
        if kind == b"message":
            for ear in self._ears.of(name.decode()):
                tell(ear.listener.heard, data)
        elif kind == b"subscribe":
            self._confirm(name.decode())

    def _confirm(self, channel: str) -> None:
        if not self._known.confirm(channel):
            return
        for ear in self._ears.of(channel):
            if not ear.ready.done():
                ear.ready.set_result(None)
            else:
                # It was confirmed on a connection before this one.
                tell(ear.listener.missed)


def _packed(*words: str) -> bytes:
    # Ten times as fast as the library's own packing, which is in Python.
    pack: Any = hiredis.pack_command  # typed as taking one word
    packed: bytes = pack(words)
    return packed


def _waiting_replies(connection: Any) -> Iterator[Any]:
    """What the server has sent besides the reply just read: some of it was read from the socket with that.

    The library gives one reply a call, at ten times the cost of taking them from its parser. Other parsers
    than that of hiredis are left alone, and give theirs one by one.
    """
    parser = connection._parser  # noqa: SLF001 (no public way; the tests hold it against the pinned library)
    if not isinstance(parser, _AsyncHiredisParser):
        return
    reader: Any = parser._reader  # noqa: SLF001
    while (reply := reader.gets()) is not NOT_ENOUGH_DATA:
        if isinstance(reply, RedisError):
            raise reply
        yield reply
