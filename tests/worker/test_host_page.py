"""The page of all workers of a host, by itself: what it adds up, leaves out, and says to probes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from streamfleet_worker import host_page
from streamfleet_worker.host_page import SILENT_S, HostPage
from streamfleet_worker.metrics import Metrics
from streamfleet_worker.tally import Tally


class FakeTally:
    """Answers what it was told to."""

    def __init__(self) -> None:
        self.answer: Tally | None = None

    async def ask(self, limit_s: float) -> Tally | None:
        assert limit_s == host_page.ASK_S
        return self.answer


class FakeChild:
    def __init__(self, scene: Scene, slot: int) -> None:
        self.tally = FakeTally()
        self.ended = self.told_to_stop = False
        self.ready = asyncio.Event()
        self._metrics = Metrics("q", "1", str(slot))
        self._scene = scene

    def tell(self, *, tokens: int, unready: str | None = None, unhealthy: str | None = None) -> FakeChild:
        """Have it generate so many tokens more, and answer from now on."""
        self._metrics._counts["generation_tokens"] += tokens
        self.tally.answer = Tally.of(unhealthy, unready, self._metrics.registry.collect())
        self._scene.page.heard(cast(Any, self), self.tally.answer)
        return self


class Scene:
    """A supervisor of two posts, its page, and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.posts = [SimpleNamespace(number=number, child=None) for number in (1, 2)]
        self.children: list[FakeChild] = []
        self.supervisor = SimpleNamespace(posts=self.posts, children=self.children, restarts=3)
        self.page = HostPage(cast(Any, self.supervisor), "q", lambda: self.now)
        self.registry = CollectorRegistry()
        self.registry.register(self.page)

    def begin(self, slot: int) -> FakeChild:
        child = FakeChild(self, slot)
        self.posts[slot - 1].child = child
        self.children.append(child)
        return child

    async def series(self, *names: str) -> dict[str, float]:
        text = (await asyncio.to_thread(generate_latest, self.registry)).decode()
        lines = [line.rpartition(" ") for line in text.splitlines()]
        return {
            name.removeprefix("streamfleet_"): float(value)
            for name, _, value in lines
            if any(name.startswith(f"streamfleet_{wanted}") for wanted in names)
        }

    async def probes(self) -> tuple[str | None, str | None]:
        return await asyncio.to_thread(self.page.unhealthy), await asyncio.to_thread(self.page.unready)


TOKENS = 'generation_tokens_total{queue="q"}'
RUNNING = "num_requests_running"


@pytest.fixture
async def scene() -> Scene:
    return Scene()


async def test_counts_are_summed_and_gauges_told_apart(scene: Scene) -> None:
    scene.begin(1).tell(tokens=5)
    scene.begin(2).tell(tokens=7)
    assert await scene.series("generation_tokens_total", RUNNING) == {
        TOKENS: 12,
        f'{RUNNING}{{queue="q",worker="1"}}': 0,
        f'{RUNNING}{{queue="q",worker="2"}}': 0,
    }


async def test_who_does_not_answer_or_has_ended_keeps_its_counts_and_loses_its_gauges(scene: Scene) -> None:
    one, other = scene.begin(1).tell(tokens=5), scene.begin(2).tell(tokens=7)
    one.tally.answer = None
    other.ended = True
    assert await scene.series("generation_tokens_total", RUNNING) == {TOKENS: 12}
    scene.children.remove(other)
    scene.begin(2).tell(tokens=1)
    assert (await scene.series("generation_tokens_total", RUNNING)) == {
        TOKENS: 13,
        f'{RUNNING}{{queue="q",worker="2"}}': 0,
    }


async def test_while_one_drains_the_slot_is_its_successor_s(scene: Scene) -> None:
    old = scene.begin(1).tell(tokens=5)
    scene.posts[0].child = None
    new = scene.begin(1).tell(tokens=0)
    old.told_to_stop = True
    new.ready.set()
    old.tell(tokens=2)
    found = await scene.series("generation_tokens_total", RUNNING, "supervisor", "worker_restarts")
    assert found == {
        TOKENS: 7,
        f'{RUNNING}{{queue="q",worker="1"}}': 0,
        'supervisor_workers{queue="q",state="starting"}': 0,
        'supervisor_workers{queue="q",state="ready"}': 1,
        'supervisor_workers{queue="q",state="draining"}': 1,
        'supervisor_workers{queue="q",state="down"}': 1,
        'worker_restarts_total{queue="q"}': 3,
    }


async def test_it_is_ready_as_soon_as_one_worker_is(scene: Scene) -> None:
    one = scene.begin(1)
    assert await scene.probes() == (None, "no worker is ready (1: no answer; 2: no answer)")
    one.tell(tokens=0, unready="starting")
    other = scene.begin(2).tell(tokens=0, unready="draining")
    assert (await scene.probes())[1] == "no worker is ready (1: starting; 2: draining)"
    other.tell(tokens=0)
    assert (await scene.probes())[1] is None


async def test_it_is_healthy_as_long_as_one_worker_may_be(scene: Scene) -> None:
    one, other = scene.begin(1).tell(tokens=0, unhealthy="it hangs"), scene.begin(2)
    assert (await scene.probes())[0] is None, "the other one has never answered: it may be loading"
    other.tell(tokens=0).tally.answer = None
    scene.now += SILENT_S
    assert (await scene.probes())[0] is None
    scene.now += 1
    assert (await scene.probes())[0] == "no worker is healthy (1: it hangs; 2: no answer for 11 s)"
    one.ended = other.ended = True
    assert (await scene.probes())[0] is None, "others will be started"


async def test_a_loop_that_stands_still_is_said_and_fails_the_scrape(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_page, "LOOP_LIMIT_S", 0.01)
    found: list[object] = []

    def look() -> None:
        found.extend(_said(scene.page))

    thread = asyncio.get_running_loop().run_in_executor(None, look)
    while len(found) < 3:  # and nothing is awaited
        pass
    await thread
    assert found == ["the supervisor's event loop does not move"] * 2 + [TimeoutError]


def _said(page: HostPage) -> Iterable[object]:
    yield page.unhealthy()
    yield page.unready()
    try:
        list(page.collect())
    except TimeoutError as error:
        yield type(error)
