"""F6: the line of one worker, of all workers, or of the clients fails in all the ways in which lines do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from chaos.proxy import ChaosProxy
from faults.figures import keep
from faults.load import Load, ended, rid_of
from faults.scene import QUEUE, Scene, pause, until
from streamfleet_common import subscriber
from streamfleet_common.schemas import GenerateRequest
from streamfleet_producer import Client

Fault = Callable[[Scene, ChaosProxy, float], Awaitable[None]]


async def cut(_: Scene, line: ChaosProxy, __: float) -> None:
    line.cut()


async def black_hole(_: Scene, line: ChaosProxy, seconds: float) -> None:
    line.is_black_hole = True
    await pause(seconds)
    line.heal()


async def half_open(scene: Scene, line: ChaosProxy, seconds: float) -> None:
    line.is_half_open = True
    # Whoever is behind this line is not told of it, and goes on talking to nobody.
    for kind in ("normal", "pubsub"):
        await scene.server.kill_clients(kind)
    await pause(seconds)
    line.heal()


async def delay(_: Scene, line: ChaosProxy, seconds: float) -> None:
    line.delay_s = 0.5
    await pause(seconds)
    line.delay_s = 0.0


async def lose_replies(_: Scene, line: ChaosProxy, __: float) -> None:
    lost = line.lost
    line.drop_next_reply(b"EVALSHA", 3)

    async def over() -> bool:
        # Several scripts may go over one line before it is cut, which loses all their replies at once.
        return line._to_lose == 0 and line.lost > lost

    await until(over)


QUICK: list[tuple[str, Fault, float]] = [
    ("cut", cut, 0.0),
    ("black hole 0.3 s", black_hole, 0.3),
    ("half-open", half_open, 0.3),
    ("delay 0.5 s", delay, 0.6),
    ("next 3 replies lost", lose_replies, 0.0),
]
LONG: list[tuple[str, Fault, float]] = [
    ("cut", cut, 0.0),
    ("black hole 1 s", black_hole, 1.0),
    ("black hole 5 s", black_hole, 5.0),
    ("black hole 30 s", black_hole, 30.0),
    ("half-open 5 s", half_open, 5.0),
    ("delay 0.5 s", delay, 10.0),
    ("next 3 replies lost", lose_replies, 0.0),
]


_SLOW = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.mark.parametrize(
    ("side", "faults"),
    [
        pytest.param("worker", QUICK, id="worker-quick"),
        # A subscription in a black hole takes seconds to be missed: it has a test of its own.
        pytest.param("client", [fault for fault in QUICK if fault[1] is not black_hole], id="client-quick"),
        pytest.param("worker", LONG, id="worker-long", marks=_SLOW),
        pytest.param("fleet", LONG, id="fleet-long", marks=_SLOW),
        pytest.param("client", LONG, id="client-long", marks=_SLOW),
    ],
)
async def test_a_line_that_fails_loses_and_doubles_nothing(
    side: str, faults: list[tuple[str, Fault, float]]
) -> None:
    length = "long" if faults is LONG else "quick"
    async with Scene(all_behind_line=side == "fleet") as scene:
        line = scene.client_line if side == "client" else scene.worker_line
        async with Load(scene.client_line.url) as load:
            for name, fault, seconds in faults:
                await fault(scene, line, seconds)
                served_s = await load.served()
                keep(
                    f"F6 {side}, {name} ({length})",
                    f"the line of the {side} fails under load",
                    f"answers {served_s:.2f} s after the mend",
                    "again within seconds",
                )
        account = await load.account(scene.broker)
    keep(f"F6 {side} ({length})", "the requests under all of these", str(account), "0 lost, 0 doubled")
    assert account.is_whole(), account
    assert set(account.states) == {"done"}


@pytest.mark.parametrize(
    "silence_s",
    [pytest.param(1.0, id="quick"), pytest.param(3.0, id="as it comes", marks=pytest.mark.slow)],
)
async def test_what_a_dead_subscription_misses_is_found_in_the_log(silence_s: float) -> None:
    async with Scene(workers=1) as scene:
        engine = scene.workers[0].engine
        async with Client(scene.client_line.url, QUEUE, silence_s=silence_s) as client:
            engine.is_open, engine.allowed = False, engine.taken + 2
            request = GenerateRequest(prompt="ECHO 6")
            async with client.stream(request, idempotency_key="gap") as tokens:
                first = await anext(tokens)
                shown = [first.text]
                # Only the subscription has anything on its line; what it loses, nobody tells it.
                scene.client_line.is_black_hole = True
                engine.is_open = True
                (record,) = await ended(scene.broker, [rid_of("gap")])
                scene.client_line.heal()
                ended_at = asyncio.get_running_loop().time()
                shown += [delta.text async for delta in tokens]
                healed_s = asyncio.get_running_loop().time() - ended_at
    keep(
        f"F6 silent gap, silence_s {silence_s:g}",
        "the end of a stream published into a dead subscription",
        f"the whole text {healed_s:.2f} s after it",
        "within 5 s",
    )
    assert record.state == "done"
    assert "".join(shown) == "tok0 tok1 tok2 tok3 tok4 tok5"


@pytest.mark.parametrize(
    "answer_s", [pytest.param(1.0, id="quick"), pytest.param(3.0, id="as it comes", marks=pytest.mark.slow)]
)
async def test_who_subscribes_on_a_dead_line_is_answered_over_a_new_one(
    answer_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subscriber, "ANSWER_S", answer_s)
    now = asyncio.get_running_loop().time
    async with Scene(workers=1) as scene, Client(scene.client_line.url, QUEUE) as client:
        await client.run(GenerateRequest(prompt="ECHO 1"), idempotency_key="before")
        # An idle line loses nothing; so something is to be sent on each.
        scene.client_line.is_black_hole = True
        asked = asyncio.create_task(client.run(GenerateRequest(prompt="ECHO 1"), idempotency_key="after"))
        began = now()
        await pause(0.2)
        scene.client_line.heal()
        end = await asked
    keep(
        f"F6 dead subscription, given up after {answer_s:g} s",
        "a request whose subscription is sent into a dead line",
        f"answered after {now() - began:.1f} s",
        "within 5 s",
    )
    assert end.text == "tok0"
