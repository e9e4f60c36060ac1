"""F4: the server is killed under load and comes back with its append-only file; its disk may be slow."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from chaos.server import binaries
from faults.figures import keep
from faults.load import Load
from faults.scene import QUEUE, Scene, pause
from faults.shims import compiled
from gated_engine import GatedEngine
from hired import Hired
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from topology.nodes import Node

SLOW_MS = 1500
BINARIES = binaries()


@pytest.mark.parametrize(
    ("product", "times"),
    [
        pytest.param(next(iter(BINARIES)), 1, id="quick"),
        *(
            pytest.param(product, 10, id=product, marks=[pytest.mark.slow, pytest.mark.timeout(300)])
            for product in BINARIES
        ),
    ],
)
async def test_a_killed_server_comes_back_with_all_that_it_accepted(product: str, times: int) -> None:
    slowest_s = 0.0
    async with Scene(binary=BINARIES[product]) as scene:
        async with Load(scene.client_line.url) as load:
            for _ in range(times):
                for end in (scene.server.kill, scene.server.terminate):
                    await end()
                    await scene.server.start()
                    slowest_s = max(slowest_s, await load.served(more=8))
        account = await load.account(scene.broker)
    keep(
        f"F4 healthy disk, {product}, {2 * times} restarts",
        f"{times} times SIGKILL and {times} times SIGTERM under load, the file read again",
        f"{account}, {len(load.forgotten)} accepts lost; first answer at most {slowest_s:.1f} s after",
        "0 lost",
    )
    assert not load.forgotten
    assert account.is_whole(), account
    assert set(account.states) == {"done"}
    assert account.crashes == 0


# --- a slow disk


@pytest.fixture
def shim(tmp_path: Path) -> Path:
    return compiled("slow_disk_shim", tmp_path)


def slowed(program: Path, shim: Path, folder: Path, ms: int) -> Path:
    """The server program, on a slow disk."""
    wrapper = folder / "server"
    wrapper.write_text(f'#!/bin/sh\nSLOW_DISK_MS={ms} LD_PRELOAD={shim} exec {program} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper


class SlowDisk:
    """A server on a slow disk, and two workers of its queue."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.connections = Connections.open(node.url)
        self.broker = Broker(self.connections, QUEUE)
        self._workers: list[Hired] = []

    async def __aenter__(self) -> SlowDisk:
        for name in ("w1", "w2"):
            hired = Hired(self.node.url, name, GatedEngine(), lease_s=5.0)
            self._workers.append(await hired.start())
        return self

    async def __aexit__(self, *_: object) -> None:
        for hired in self._workers:
            await hired.dismiss()
        await self.connections.close()

    async def crash(self) -> None:
        await asyncio.to_thread(self.node.kill)
        await asyncio.to_thread(self.node.start)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("product", BINARIES)
async def test_what_a_slow_disk_loses_is_taken_again_under_the_same_id(
    product: str, shim: Path, tmp_path: Path
) -> None:
    program = slowed(BINARIES[product].path, shim, tmp_path, SLOW_MS)
    with Node(program, appendfsync="everysec") as node:
        async with SlowDisk(node) as fleet:
            async with Load(node.url) as load:
                for _ in range(5):
                    await pause(2.2)  # the file is synced once a second
                    await fleet.crash()
                    await load.served(more=8)
            account = await load.account(fleet.broker)
    keep(
        f"F4 slow disk, fast, {product}",
        f"5 times SIGKILL under load, appendfsync everysec, {SLOW_MS} ms a sync",
        f"{len(load.forgotten)} of {account.accepted} accepts lost, each submitted again under its id; "
        f"{account}; of {account.faded} that were answered nothing is left",
        "each lost accept can be submitted again",
    )
    assert not account.lost
    assert set(account.states) == {"done"}
    assert not account.doubled
    assert set(load.forgotten) <= set(load.accepts)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("product", BINARIES)
async def test_at_safe_a_slow_disk_loses_nothing_that_was_accepted(
    product: str, shim: Path, tmp_path: Path
) -> None:
    binary = BINARIES[product]
    waits = binary.version_info >= (7, 2)
    ms, sync = (600, "everysec") if waits else (60, "always")
    program = slowed(binary.path, shim, tmp_path, ms)
    with Node(program, appendfsync=sync) as node:
        async with SlowDisk(node) as fleet:
            async with Load(node.url, durability="safe", producers=16) as load:
                for _ in range(5):
                    await pause(2.2)
                    await fleet.crash()
                    await load.served(more=8)
            account = await load.account(fleet.broker)
    keep(
        f"F4 slow disk, safe, {product}",
        f"5 times SIGKILL under load, appendfsync {sync}, {ms} ms a sync, durability safe",
        f"{len(load.forgotten)} of {account.accepted} accepts lost; {account}",
        "0 lost",
    )
    assert not load.forgotten
    assert not account.lost
    assert set(account.states) == {"done"}
