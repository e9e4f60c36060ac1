"""The workers of a command, as it follows them by their log."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from streamfleet_producer.cli import workers as module
from streamfleet_producer.cli.workers import Workers


class FakeProcess:
    """A supervisor that says what the test has it say."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], on_line: Callable[[str], None]
    ) -> None:
        self.env = env
        self.status: int | None = None
        self._on_line = on_line
        self._lines: list[str] = []

    def lines(self) -> list[str]:
        return self._lines

    def say(self, line: str) -> None:
        self._lines.append(line)
        self._on_line(line)

    def log(self, event: str, **fields: Any) -> None:
        self.say(json.dumps({"level": "info", **fields, "event": event, "timestamp": "now"}))


class Scene:
    """Two workers, their supervisor's process, and what was said about them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made: list[FakeProcess] = []

        def make(*arguments: Any) -> FakeProcess:
            made.append(FakeProcess(*arguments))
            return made[-1]

        monkeypatch.setattr(module, "TiedProcess", make)
        self.said: list[str] = []
        self.workers = Workers({"queue": "q", "model": None}, 2, self.said.append)
        (self.process,) = made

    def start(self, number: int, name: str) -> None:
        self.process.log("worker started", supervisor="s", number=number, worker=name, pid=1)

    def listen(self, port: int) -> None:
        self.process.log("listening", supervisor="s", host="127.0.0.1", port=port)

    def serve(self, name: str, precision: str = "float32") -> None:
        self.process.log(
            "ready", worker=name, model="m", precision=precision, device="cpu (1 thread)", max_batch_size=8
        )

    def end(self, number: int, name: str, reason: str, **fields: Any) -> None:
        self.process.log("worker ended", supervisor="s", number=number, worker=name, reason=reason, **fields)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Scene:
    return Scene(monkeypatch)


def test_the_supervisor_is_told_what_the_command_was_told(scene: Scene) -> None:
    ours = {name: value for name, value in scene.process.env.items() if name.startswith("STREAMFLEET_")}
    assert ours["STREAMFLEET_WORKERS"] == "2"
    assert ours["STREAMFLEET_QUEUE"] == "q"
    assert ours["STREAMFLEET_LOG_FORMAT"] == "json"
    assert "STREAMFLEET_MODEL" not in ours


def test_each_is_announced_once_it_serves(scene: Scene) -> None:
    scene.listen(4000)
    scene.start(1, "a")
    scene.start(2, "b")
    scene.serve("b")
    assert scene.said == [
        "worker 2  m in float32 on cpu, up to 8 requests in a batch",
        "          metrics http://127.0.0.1:4000/metrics",
    ]
    assert (scene.workers.ready, scene.workers.has_served) == (False, True)
    assert not scene.workers.wait_ready(0.0)
    scene.serve("a")
    assert scene.workers.wait_ready(0.0)
    assert scene.said[2:] == ["worker 1  m in float32 on cpu, up to 8 requests in a batch"]


def test_a_worker_without_a_model_has_no_precision_to_speak_of(scene: Scene) -> None:
    scene.start(1, "a")
    scene.serve("a", precision="none")
    assert scene.said[0] == "worker 1  m on cpu, up to 8 requests in a batch"


def test_an_end_is_told_with_its_reason_and_what_follows(scene: Scene) -> None:
    scene.start(1, "a")
    scene.start(2, "b")
    scene.serve("a")
    scene.serve("b")
    scene.end(1, "a", "it was killed by signal 9", again_in_s=1.2)
    assert scene.said[-1] == "worker 1  ended: it was killed by signal 9; another starts in 2 s"
    assert not scene.workers.ready
    assert scene.workers.why_ended() == "it was killed by signal 9"
    scene.start(1, "c")
    scene.serve("c")
    assert scene.workers.ready


def test_an_end_that_was_asked_for_is_no_news(scene: Scene) -> None:
    scene.start(1, "a")
    scene.end(1, "a", "it ended with status 0")
    assert scene.said == []
    assert scene.workers.why_one_ended is None


def test_the_tail_is_the_workers_in_words(scene: Scene) -> None:
    scene.start(1, "a")
    scene.process.log("starting", worker="a", engine="scripted")
    scene.process.say("Traceback (most recent call last):")
    assert scene.workers.tail() == ["info     starting engine=scripted", "Traceback (most recent call last):"]


@pytest.mark.parametrize(
    ("lines", "status", "reason"),
    [
        (["settings are not valid: X"], 2, "settings are not valid: X"),
        (['{"event": "giving up: y", "level": "error"}', '{"event": "stopped"}'], 1, "giving up: y"),
        ([], 137, "it was killed by signal 9"),
        (['{"event": "stopped", "level": "info"}'], 3, "it ended with status 3 and gave no reason"),
    ],
)
def test_why_all_have_ended(scene: Scene, lines: list[str], status: int, reason: str) -> None:
    for line in lines:
        scene.process.say(line)
    scene.process.status = status
    assert scene.workers.why_ended() == reason


# --- what they say themselves


def test_prints_and_warnings_are_passed_on(scene: Scene) -> None:
    scene.start(1, "a")
    scene.start(2, "b")
    scene.serve("a")
    scene.said.clear()
    scene.process.say("from the handler\x1b[31m")
    scene.process.log("slow", worker="b", level="warning", seconds=3)
    scene.process.log("all is well", worker="b")
    scene.process.log("it broke", worker="a", level="error", exception="Traceback:\nValueError: x")
    scene.process.log("unknown setting", supervisor="s", level="warning", variable="X")
    scene.process.log("giving up: 3 crashes", supervisor="s", level="error")  # told by `why_ended`
    assert scene.said == [
        "workers  │ from the handler[31m",
        "worker 2 │ warning  slow seconds=3",
        "worker 1 │ error    it broke",
        "worker 1 │ Traceback:",
        "worker 1 │ ValueError: x",
        "workers  │ warning  unknown setting variable=X",
    ]


def test_the_reason_for_a_failed_start_is_not_told_twice(scene: Scene) -> None:
    scene.start(1, "a")
    for line in ("loading it", "Traceback (most recent call last):", "  File x", "ValueError: no weights"):
        scene.process.say(line)
    scene.end(1, "a", "ValueError: no weights", again_in_s=0.5)
    assert scene.said == [
        "workers  │ loading it",
        "workers  │ Traceback (most recent call last):",
        "workers  │   File x",
    ]
    assert scene.workers.why_ended() == "ValueError: no weights"


def test_last_words_that_are_not_the_reason_are_told(scene: Scene) -> None:
    scene.start(1, "a")
    scene.process.say("almost there")
    assert scene.said == []
    scene.end(1, "a", "it was killed by signal 9", again_in_s=0.5)
    assert scene.said == ["workers  │ almost there"]


def test_what_was_said_before_it_serves_is_told_first(scene: Scene) -> None:
    scene.start(1, "a")
    scene.process.say("loaded")
    scene.serve("a")
    assert scene.said[:2] == [
        "workers  │ loaded",
        "worker 1  m in float32 on cpu, up to 8 requests in a batch",
    ]
