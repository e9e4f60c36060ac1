"""The crew of `streamfleet up`, with workers and a clock of the test's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

from streamfleet_producer.cli.crew import Crew
from streamfleet_producer.cli.worker_process import WorkerProcess


class FakeWorker:
    def __init__(self, settings: Mapping[str, object]) -> None:
        self.settings = dict(settings)
        self.ready = False
        self.status: int | None = None
        self.port = 4000
        self.description = "a model"
        self.metrics_url = "http://here/metrics"
        self.killed = False

    def why_ended(self) -> str:
        return "a reason"

    def kill(self) -> None:
        self.killed = True

    def terminate(self) -> None:
        self.status = 0


class Scene:
    """A crew of two, its workers as they were started, and what it said."""

    def __init__(self) -> None:
        self.now = 0.0
        self.started: list[FakeWorker] = []
        self.said: list[str] = []
        self.crew = Crew(2, {"queue": "q"}, self.said.append, self._start, lambda: self.now)
        self.crew.start()

    def _start(self, settings: Mapping[str, object]) -> WorkerProcess:
        self.started.append(FakeWorker(settings))
        return cast(WorkerProcess, self.started[-1])

    def serve(self) -> None:
        for worker in self.started:
            worker.ready = True
        self.crew.tick()

    def tick_at(self, now: float) -> None:
        self.now = now
        self.crew.tick()


def test_each_is_announced_once_it_serves() -> None:
    scene = Scene()
    scene.started[1].ready = True
    scene.crew.tick()
    scene.crew.tick()

    assert scene.said == ["worker 2  a model", "          metrics http://here/metrics"]
    assert not scene.crew.all_ready
    scene.serve()
    assert scene.crew.all_ready


def test_a_dead_worker_is_replaced_at_the_same_port() -> None:
    scene = Scene()
    scene.serve()
    scene.started[0].status = 137
    scene.tick_at(10.0)

    assert scene.said[-1] == "worker 1  ended: a reason; another starts in 1 s"
    assert scene.started[0].killed
    scene.tick_at(10.9)
    assert len(scene.started) == 2
    scene.tick_at(11.0)
    assert scene.started[2].settings == {"queue": "q", "http_port": 4000}
    assert scene.crew.hopeless() is None


def test_pauses_grow_and_begin_anew_after_a_sound_life() -> None:
    scene = Scene()
    scene.serve()
    pauses = []
    for _ in range(7):
        scene.started[-1].status = 1
        scene.crew.tick()
        pauses.append(int(scene.said[-1].split()[-2]))
        scene.tick_at(scene.now + 30.0)
    assert pauses == [1, 2, 4, 8, 16, 30, 30]

    scene.now += 61.0
    scene.started[-1].status = 1
    scene.crew.tick()
    assert scene.said[-1].endswith("another starts in 1 s")


def test_a_worker_that_ends_before_any_served_is_hopeless() -> None:
    scene = Scene()
    assert scene.crew.hopeless() is None
    scene.started[1].status = 1

    assert scene.crew.hopeless() is cast(WorkerProcess, scene.started[1])


def test_all_are_told_to_drain() -> None:
    scene = Scene()
    assert not scene.crew.gone
    scene.crew.terminate()

    assert scene.crew.gone
