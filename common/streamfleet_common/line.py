"""One connection over which calls go one behind the other, without waiting for each other's answers.

The library takes a connection from a pool for each command, packs it in Python and waits under a timeout of
its own: some 60 µs of CPU a call more than it takes here. A call that is cancelled leaves its answer to be
thrown away when it comes. Behind each command goes a PING with its number, and an answer counts only once
that number has come back: whatever may swallow an answer on its way, no call ever gets that of another.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from typing import Any

import hiredis
from redis import exceptions as redis_errors
from redis._parsers.hiredis import NOT_ENOUGH_DATA, _AsyncHiredisParser
from redis.asyncio import ConnectionPool

READ_BYTES = 65_536
WRITE_BYTES = 1_048_576
"""A caller waits while so much has not left yet."""
LATE_S = 0.25
"""A timer that comes so late says that this process stood still, not that the server did."""


class Line:
    """Calls over one connection, made when it is needed and made anew when it breaks.

    `pool` says how to connect. An answer that is `timeout_s` overdue breaks the connection: all who wait on
    it fail then, since nobody knows any more whose answer would be next. Time in which this process itself
    stood still (a machine that is moved, starved or paused) does not count: the answer may lie unread.
    """

    def __init__(self, pool: ConnectionPool, timeout_s: float) -> None:
        self._pool = pool
        self._timeout_s = timeout_s
        self._wire: _Wire | None = None
        self._connecting: asyncio.Task[_Wire] | None = None
        self._retired: set[_Wire] = set()

    @staticmethod
    def suits(pool: object) -> bool:
        """Whether this pool's connections are of the kind that a line can read from."""
        kwargs = getattr(pool, "connection_kwargs", {})
        return kwargs.get("parser_class", _AsyncHiredisParser) is _AsyncHiredisParser

    async def call(self, *words: Any) -> Any:
        """Send a command and wait for its answer.

        Raises:
            redis.exceptions.RedisError, OSError: as the library's own clients do.
        """
        wire = self._wire
        if wire is None or wire.is_broken:
            wire = await self._connected()
        return await wire.call(words)

    async def _connected(self) -> _Wire:
        # All who want it share one attempt: behind a dead line each would wait for all before him otherwise.
        if self._connecting is None:
            self._connecting = asyncio.create_task(self._connect(), name="line-connect")
            self._connecting.add_done_callback(self._settle)
        connecting = self._connecting
        try:
            return await asyncio.shield(connecting)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if connecting.cancelled() and (task is None or not task.cancelling()):
                # It is the line that was closed; whoever calls over it goes on.
                raise redis_errors.ConnectionError("the connection was closed") from None
            raise

    async def _connect(self) -> _Wire:
        connection: Any = self._pool.make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
        except BaseException:
            await connection.disconnect(nowait=True)
            raise
        self._wire = _Wire(connection, self._timeout_s)
        return self._wire

    def _settle(self, connecting: asyncio.Task[_Wire]) -> None:
        self._connecting = None
        if not connecting.cancelled():
            connecting.exception()  # those who wanted it may have been cancelled meanwhile

    def renew(self) -> None:
        """Connect anew for the next call; those under way end over the old connection."""
        wire, self._wire = self._wire, None
        if wire is not None:
            self._retired = {old for old in self._retired if not old.is_broken} | {wire}
            wire.retire()

    async def close(self) -> None:
        """End the connection; whoever still waits gets a `ConnectionError`."""
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        wires, self._wire = {self._wire, *self._retired}, None
        for wire in wires:
            if wire is not None:
                await wire.close()


class _Wire:
    """One life of the connection."""

    def __init__(self, connection: Any, timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s
        # No public way; the tests hold these against the pinned library.
        self._stream: asyncio.StreamReader = connection._reader  # noqa: SLF001
        self._writer: asyncio.StreamWriter = connection._writer  # noqa: SLF001
        self._parser: Any = connection._parser._reader  # noqa: SLF001
        self._loop = asyncio.get_running_loop()
        self._waiting: deque[tuple[asyncio.Future[Any], float, bytes]] = deque()
        self._number = 0
        self._answers: list[Any] = []
        self._timer: asyncio.TimerHandle | None = None
        self._excused = b""
        self._retired = False
        self.is_broken = False
        self._reading = asyncio.create_task(self._read(), name="line")

    async def call(self, words: tuple[Any, ...]) -> Any:
        pack: Any = hiredis.pack_command  # typed as taking one word
        self._number += 1
        number = b"%d" % self._number
        packed = pack(words) + pack(("PING", number))
        future = self._loop.create_future()
        self._waiting.append((future, self._loop.time(), number))
        if self._timer is None:
            self._judge_at(self._loop.time() + self._timeout_s)
        self._writer.write(packed)
        if self._writer.transport.get_write_buffer_size() > WRITE_BYTES:
            # If the line breaks meanwhile, the future says so.
            with contextlib.suppress(OSError):
                await self._writer.drain()
        return await future

    async def _read(self) -> None:
        error: Exception
        try:
            while True:
                data = await self._stream.read(READ_BYTES)
                if not data:
                    raise redis_errors.ConnectionError("Connection closed by server.")
                self._parser.feed(data)
                while (reply := self._parser.gets()) is not NOT_ENOUGH_DATA:
                    if not isinstance(reply, hiredis.PushNotification):
                        self._take(reply)
                if self._retired and not self._waiting:
                    raise redis_errors.ConnectionError("the connection was given up")
        except (redis_errors.RedisError, OSError) as broken:
            error = broken
        except IndexError:
            error = redis_errors.InvalidResponse("an answer that nobody asked for")
        self._break(error)
        await self._connection.disconnect(nowait=True)

    def _take(self, reply: Any) -> None:
        if not self._answers:
            self._answers.append(reply)
            return
        answer = self._answers.pop()
        future, _, number = self._waiting.popleft()
        # A server that refuses to work (busy, loading, demoted) refuses both; and a user who may not PING is
        # told so each time.
        is_refused = isinstance(reply, Exception) and (
            isinstance(answer, Exception) or isinstance(reply, redis_errors.NoPermissionError)
        )
        if reply != number and not is_refused:
            self._waiting.appendleft((future, 0.0, number))
            raise redis_errors.ConnectionError("an answer was lost on its way")
        if future.done():
            return  # whoever asked has been cancelled
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)

    def _judge_at(self, when: float) -> None:
        self._timer = self._loop.call_at(when, self._judge)

    def _judge(self) -> None:
        timer, self._timer = self._timer, None
        if not self._waiting or timer is None:
            return
        now = self._loop.time()
        late_s = now - timer.when()
        _, since, number = self._waiting[0]
        # Once for each: a process that is always late would never give up a dead server.
        if late_s > LATE_S and number != self._excused:
            self._excused = number
            # What came meanwhile has not been read, and a server that stood still too has not sent it yet.
            self._judge_at(now + min(late_s, self._timeout_s))
            return
        overdue_s = now - since - self._timeout_s
        if overdue_s < 0:
            self._judge_at(now - overdue_s)
            return
        self._break(redis_errors.TimeoutError(f"no answer for {self._timeout_s:g} s"))
        self._reading.cancel()
        self._writer.transport.abort()

    def _break(self, error: Exception) -> None:
        self.is_broken = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._waiting and self._answers and isinstance(self._answers[0], Exception):
            # A demoted server unblocks whoever waits with a last word, and hangs up.
            self._take(self._waiting[0][2])
        while self._waiting:
            future, _, _ = self._waiting.popleft()
            if not future.done():
                # Each his own: a traceback grows on the exception that is raised.
                future.set_exception(type(error)(*error.args))

    def retire(self) -> None:
        """Take no further calls, and end with the last answer."""
        self._retired = True
        if not self._waiting:
            self._break(redis_errors.ConnectionError("the connection was given up"))
            self._reading.cancel()
            self._writer.transport.abort()

    async def close(self) -> None:
        self._break(redis_errors.ConnectionError("the connection was closed"))
        self._reading.cancel()
        await asyncio.wait([self._reading])
        with contextlib.suppress(OSError):
            await self._connection.disconnect()
