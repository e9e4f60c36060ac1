"""F5: connections are cut by the server, again and again."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from faults.figures import keep
from faults.load import Load
from faults.scene import Scene, pause

HERTZ = 5


async def cut_normal(scene: Scene) -> int:
    return await scene.server.kill_clients("normal")


async def cut_pubsub(scene: Scene) -> int:
    return await scene.server.kill_clients("pubsub")


async def cut_one(scene: Scene) -> int:
    listed: Any = await scene.server.control.client_list()
    own = await scene.server.control.client_id()
    others = [client["id"] for client in listed if int(client["id"]) != own]
    return int(await scene.server._command("CLIENT", "KILL", "ID", random.choice(others)))


CUTS: dict[str, Callable[[Scene], Awaitable[int]]] = {
    "normal": cut_normal,
    "pubsub": cut_pubsub,
    "one by id": cut_one,
}


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(0.4, id="quick"),
        pytest.param(10.0, id="long", marks=[pytest.mark.slow, pytest.mark.timeout(180)]),
    ],
)
async def test_whatever_connections_are_cut_nothing_is_lost_or_doubled(seconds: float) -> None:
    async with Scene() as scene:
        async with Load(scene.client_line.url) as load:
            for name, cut in CUTS.items():
                killed = 0
                for _ in range(round(seconds * HERTZ)):
                    killed += await cut(scene)
                    await pause(1 / HERTZ)
                served_s = await load.served()
                assert killed > 0
                keep(
                    f"F5 {name}, {seconds:g} s",
                    f"CLIENT KILL at {HERTZ} Hz, {killed} connections cut",
                    f"answers {served_s:.2f} s after the last cut",
                    "again within 2 s",
                )
        account = await load.account(scene.broker)
    keep(f"F5 {seconds:g} s", "the requests under all of these cuts", str(account), "0 lost, 0 doubled")
    assert account.is_whole(), account
    assert set(account.states) == {"done"}
    assert account.crashes == 0
