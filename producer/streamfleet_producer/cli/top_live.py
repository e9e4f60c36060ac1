"""The live view: reads again and again, draws, and does what keys order."""

from __future__ import annotations

import asyncio
from typing import Any

from rich.console import Console

from streamfleet_common.connections import Connections, redacted
from streamfleet_common.errors import BrokerUnavailable, StreamfleetError
from streamfleet_producer.cli.top_frame import frame
from streamfleet_producer.cli.top_reading import FleetReader
from streamfleet_producer.cli.top_rows import EndedRates, queue_rows, worker_rows
from streamfleet_producer.cli.top_screen import Screen
from streamfleet_producer.cli.top_view import Order, View
from streamfleet_producer.operations import control
from streamfleet_producer.operations.operator_broker import OperatorBroker

LETTERS_AT_ONCE = 100
MOST_ORDERS = 100
"""Of more that wait, keys are dropped."""
LEAST_SILENCE_S = 1.0
"""What took no longer is not called silence, however short the intervals are."""


class LiveTop:
    """From the first picture to the key that ends it.

    Args:
        connections: to Redis.
        reader: of what is shown.
        console: of the terminal.
        fd: where keys come from.
        interval_s: between two readings.
    """

    def __init__(
        self, connections: Connections, reader: FleetReader, console: Console, fd: int, interval_s: float
    ) -> None:
        self._connections = connections
        self._reader = reader
        self._interval_s = interval_s
        self._redis = redacted(connections.url)
        self._view = View()
        self._rates = EndedRates()
        self._orders: asyncio.Queue[Order] = asyncio.Queue(MOST_ORDERS)
        self._soon = asyncio.Event()
        self._clock = asyncio.get_running_loop().time
        self._answered_at = self._clock()
        self._over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._screen = Screen(
            console,
            fd,
            lambda width, height: frame(self._view, self._redis, interval_s, width, height),
            self._press,
            self._fail,
        )

    async def run(self) -> None:
        """Show it until the user has seen enough.

        Raises:
            BrokerUnavailable: the first reading failed; later ones are said on the screen and tried again.
        """
        await self._read()
        with self._screen.taken():
            tasks: list[asyncio.Task[Any]] = [
                asyncio.create_task(self._keep_reading()),
                asyncio.create_task(self._obey()),
                asyncio.create_task(self._watch()),
            ]
            try:
                await asyncio.wait([self._over, *tasks], return_when=asyncio.FIRST_COMPLETED)
                for done in (self._over, *tasks):
                    if done.done():
                        done.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

    # --- reading

    async def _read(self) -> None:
        reading = await self._reader.read()
        self._answered_at = self._clock()
        self._view.take(reading, queue_rows(reading, self._rates.take(reading)), worker_rows(reading))

    async def _keep_reading(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._soon.wait()
            except TimeoutError:
                pass
            self._soon.clear()
            try:
                await self._read()
            except BrokerUnavailable as error:
                self._view.trouble = f"not read since then: {error.message}"
            self._screen.refresh()

    async def _watch(self) -> None:
        """Say that a picture is old, long before a reading gives up."""
        limit_s = max(LEAST_SILENCE_S, 2 * self._interval_s)
        while True:
            await asyncio.sleep(min(1.0, limit_s - self._interval_s))
            silent_s = self._clock() - self._answered_at
            if silent_s >= limit_s:
                self._view.silent_s = silent_s
                self._screen.refresh()

    # --- keys

    def _press(self, key: str) -> None:
        order = self._view.press(key) if key else Order("quit")
        if order is not None:
            if order.deed == "quit":
                if not self._over.done():
                    self._over.set_result(None)
                return
            if order.deed == "read":
                self._soon.set()
            elif not self._orders.full():
                self._orders.put_nowait(order)
        self._screen.refresh()

    def _fail(self, error: BaseException) -> None:
        if not self._over.done():
            self._over.set_exception(error)

    async def _obey(self) -> None:
        while True:
            order = await self._orders.get()
            try:
                message = await self._do(order)
            except StreamfleetError as error:
                message = error.message
            self._view.message = message or self._view.message
            self._soon.set()
            self._screen.refresh()

    async def _do(self, order: Order) -> str:
        """Do it; gives what there is to say."""
        broker = OperatorBroker(self._connections, order.queue)
        if order.deed == "pause":
            await control.pause(broker)
            return f"queue {order.queue} is paused: new requests are refused, accepted ones go on"
        if order.deed == "resume":
            await control.resume(broker)
            return f"queue {order.queue} is open: it takes new requests"
        if order.deed == "drain":
            asked = await control.drain(broker, order.worker)
            alone = "" if asked.others else "; no other serves its queue"
            return f"asked to drain{alone}: {order.worker}"
        after = self._view.letters[-1].id if order.deed == "more_letters" and self._view.letters else ""
        self._view.take_letters(order.queue, await broker.dead_letters(after=after, count=LETTERS_AT_ONCE))
        return ""
