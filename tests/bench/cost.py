"""What the protocol costs the server: CPU of each step and each streamed delta, and bytes of each request.

    python tests/bench/cost.py [--server redis-server] [--json]
    python tests/bench/cost.py --part growth --sizes 1000,10000,100000,1000000

The steps are taken by hand, so neither client nor engine counts; batches of 32, requests and results of 200
bytes, deltas of 40, a listener on every request's channel. CPU is the server's own, over thousands of
requests; the least of the rounds is the one that others disturbed least, the median is printed beside it.

`growth` fills a queue and takes the same steps with so many others waiting, then with so many running, in
turn with an empty queue on the same server; bytes are the server's used memory over them. A million open
requests want 3 GB of memory for server and client.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from broker_hand import BrokerHand, fresh, result, submission
from server import add_options, describe, serving
from streamfleet_common.deliveries import Delivery

PARTS = ("steps", "emit", "growth")
STEPS = ("listen", "submit", "take", "finish", "leave")
BATCH = 32
FILL = 128
BYTES = 200
DELTA_BYTES = 40
DELTAS = 64
"""Of each request: enough that the log's first entry does not show."""
NEED_BYTES = 3000
"""Server and client together, for each open request."""

_T = TypeVar("_T")


class Meter:
    """Server CPU, by step."""

    def __init__(self, hand: BrokerHand) -> None:
        self._hand = hand
        self.us: dict[str, float] = {}

    async def over(self, step: str, doing: Awaitable[None]) -> None:
        before = await self._hand.cpu_us()
        await doing
        self.us[step] = self.us.get(step, 0.0) + await self._hand.cpu_us() - before


async def cycle(hand: BrokerHand, count: int, tenants: int = 1) -> dict[str, float]:
    """Take new requests, a multiple of the batch, through their whole life; CPU µs a request, by step."""
    template, end = submission(BYTES, stream=False), result(BYTES)
    requests = fresh(template, count, tenants)
    meter = Meter(hand)
    taken: list[Delivery] = []

    async def take() -> None:
        for _ in range(count // BATCH):
            taken.extend(await hand.take(BATCH))

    async def leave() -> None:
        await each(requests, BATCH, hand.leave)
        await hand.settle()

    await meter.over("listen", each(requests, BATCH, hand.listen))
    await meter.over("submit", each(requests, BATCH, hand.submit))
    await meter.over("take", take())
    await meter.over("finish", each(taken, BATCH, lambda some: hand.finish(some, end)))
    await meter.over("leave", leave())
    return {step: us / count for step, us in meter.us.items()}


async def each(items: Sequence[_T], size: int, step: Callable[[Sequence[_T]], Awaitable[None]]) -> None:
    """Take a step for all of these, in batches."""
    for first in range(0, len(items), size):
        await step(items[first : first + size])


# --- the parts


async def steps(hand: BrokerHand, options: argparse.Namespace) -> dict[str, Any]:
    """CPU of each step, on a queue with nothing else in it."""
    rounds = []
    for _ in range(options.rounds):
        await hand.flush()
        rounds.append(await cycle(hand, options.requests, options.tenants))
    return {"rounds": rounds, **summary(rounds)}


async def emit(hand: BrokerHand, options: argparse.Namespace) -> dict[str, Any]:
    """CPU of a delta: one call for 32 requests that stream, each with a listener."""
    template, end = submission(BYTES, stream=True), result(BYTES)
    rounds = []
    for _ in range(options.rounds):
        await hand.flush()
        meter = Meter(hand)
        generations = max(1, options.requests // (BATCH * DELTAS // 4))
        for _ in range(generations):
            requests = fresh(template, BATCH)
            await hand.listen(requests)
            await hand.submit(requests)
            taken = await hand.take(BATCH)

            async def deltas(of: list[Delivery] = taken) -> None:
                for seq in range(1, DELTAS + 1):
                    await hand.emit(of, seq, b"d" * DELTA_BYTES)

            await meter.over("emit", deltas())
            await hand.finish(taken, end)
            await hand.leave(requests)
        rounds.append({"emit": meter.us["emit"] / (generations * BATCH * DELTAS)})
    return {"rounds": rounds, **summary(rounds)}


async def growth(hand: BrokerHand, options: argparse.Namespace) -> list[dict[str, Any]]:
    """CPU of each step with others open, and bytes of each of those."""
    async with hand.another("empty") as beside:
        return [await _grown(hand, beside, size, options) for size in options.sizes]


async def _grown(
    hand: BrokerHand, beside: BrokerHand, size: int, options: argparse.Namespace
) -> dict[str, Any]:
    end = result(BYTES)
    row: dict[str, Any] = {"open": size}

    async def cost() -> dict[str, Any]:
        """In turn with a queue that holds nothing: a host that slows down slows both."""
        rounds, empty = [], []
        for _ in range(options.rounds):
            rounds.append(await cycle(hand, options.requests))
            empty.append(await cycle(beside, options.requests))
        return {**summary(rounds), "nothing_open": summary(empty)}

    template = submission(BYTES, stream=False)
    await hand.flush()
    # Every script is known then, and every buffer has the size that it will have later.
    await hand.submit(fresh(template, FILL))
    await hand.finish(await hand.take(FILL), end)
    await hand.flush()
    await beside.prepare()
    nothing = await hand.memory()
    for first in range(0, size, FILL):
        await hand.submit(fresh(template, min(FILL, size - first)))
    row["queued_bytes"] = (await hand.memory() - nothing) / size
    row["others_queued"] = await cost()

    # Each cycle took the oldest and left its own: there are as many as before.
    before = await hand.memory() - size * row["queued_bytes"]
    taken: list[Delivery] = []
    while len(taken) < size:
        taken += await hand.take(min(FILL, size - len(taken)))
    row["running_bytes"] = (await hand.memory() - before) / size
    row["others_running"] = await cost()

    before = await hand.memory() - size * row["running_bytes"]
    await each(taken, FILL, lambda some: hand.finish(some, end))
    row["finished_bytes"] = (await hand.memory() - before) / size
    return row


def summary(rounds: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """The least and the median of each step, and of their sum."""
    for one in rounds:
        one["sum"] = sum(one.values())
    return {
        "least": {step: round(min(one[step] for one in rounds), 2) for step in rounds[0]},
        "median": {step: round(statistics.median(one[step] for one in rounds), 2) for step in rounds[0]},
    }


async def measure(part: str, url: str, options: argparse.Namespace) -> Any:
    """One part on one server."""
    async with BrokerHand(url, sub_lanes=options.sub_lanes) as hand:
        await cycle(hand, BATCH)
        return await {"steps": steps, "emit": emit, "growth": growth}[part](hand, options)


# --- what is shown


def show_steps(results: dict[str, Any]) -> None:
    """Server by server, least and median."""
    print(f"\nCPU µs of the server a request, batches of {BATCH}")
    _head("", (*STEPS, "sum"))
    for server, result_ in results.items():
        for which in ("least", "median"):
            _row(f"{server}, {which}", [result_[which][step] for step in (*STEPS, "sum")])


def show_emit(results: dict[str, Any]) -> None:
    """Server by server, least and median."""
    print(f"\nCPU µs of the server a streamed delta, {BATCH} a call")
    _head("", ("least", "median"))
    for server, result_ in results.items():
        _row(server, [result_[which]["emit"] for which in ("least", "median")])


def show_growth(results: dict[str, Any]) -> None:
    """Size by size: CPU with others waiting and with others running, then bytes."""
    print("\nCPU µs of the server a request (least of the rounds) with so many others open, and with none")
    columns = ("submit", "take", "finish", "sum")
    _head("others", (*columns, "none", "more, %"))
    for rows in results.values():
        for others in ("queued", "running"):
            for row in rows:
                found = row[f"others_{others}"]
                least, none = found["least"], found["nothing_open"]["least"]["sum"]
                more = 100 * (least["sum"] / none - 1)
                _row(f"{row['open']:,} {others}", [*(least[step] for step in columns), none, more])
    print(f"\nBytes of the server a request, {BYTES} B of payload or result included")
    _head("open", ("queued", "running", "finished"))
    for rows in results.values():
        for row in rows:
            _row(f"{row['open']:,}", [row[f"{state}_bytes"] for state in ("queued", "running", "finished")])


def _head(first: str, columns: Sequence[str]) -> None:
    print(f"{first:>26}" + "".join(f"{column:>10}" for column in columns))


def _row(first: str, values: Sequence[float]) -> None:
    print(f"{first:>26}" + "".join(f"{value:>10.1f}" for value in values))


def check_memory(sizes: Sequence[int]) -> None:
    """Raises `SystemExit` if this machine cannot hold the largest of these."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    need = max(sizes) * NEED_BYTES
    if need > free:
        raise SystemExit(
            f"{max(sizes):,} open requests want {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        )


def main() -> None:
    """Run the parts and print them."""
    parser = argparse.ArgumentParser(description="What the protocol costs the server.")
    parser.add_argument("--part", action="append", choices=PARTS, help="may be repeated; all by default")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=3200, help="a round, in batches of 32")
    parser.add_argument(
        "--sizes",
        type=lambda text: [int(size) for size in text.split(",")],
        default=[1_000, 10_000, 100_000],
        help="open requests at which `growth` measures",
    )
    parser.add_argument("--tenants", type=int, default=1, help="whose requests `steps` takes, in turn")
    parser.add_argument("--sub-lanes", type=int, default=1, help="of each lane")
    parser.add_argument("--json", action="store_true")
    add_options(parser, aof=False)
    options = parser.parse_args()
    options.requests = max(1, options.requests // BATCH) * BATCH
    parts = options.part or PARTS
    if "growth" in parts:
        check_memory(options.sizes)

    found: dict[str, dict[str, Any]] = {}
    for part in parts:
        found[part] = {}
        for aof in (False,) if part == "growth" else (False, True):
            with serving(options.server, aof=aof) as broker:
                found[part][describe(broker, aof=aof)] = asyncio.run(measure(part, broker.url, options))
        if not options.json:
            {"steps": show_steps, "emit": show_emit, "growth": show_growth}[part](found[part])
    if options.json:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
