"""A worker process like `python -m streamfleet_worker`, but for its engine, named by the first argument.

With STREAMFLEET_WORKERS, a supervisor of such.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from streamfleet_common.errors import ModelLoadFailed
from streamfleet_common.schemas import Request
from streamfleet_common.settings import read
from streamfleet_worker import engines, supervisor_process, worker
from streamfleet_worker import process as program
from streamfleet_worker.engine.base import Engine, Step
from streamfleet_worker.engine.scripted import Script, ScriptedEngine
from streamfleet_worker.engines import SEQUENCES
from streamfleet_worker.settings import WorkerSettings


class SlowEngine(ScriptedEngine):
    """A step takes a while. Once there is a file called `die` or `hang`, that is what it does."""

    def step(self) -> Step:
        time.sleep(0.01)
        while Path(os.environ["LAME_FOLDER"], "hang").exists():
            time.sleep(0.01)
        if Path(os.environ["LAME_FOLDER"], "die").exists():
            raise MemoryError("told to die")
        return super().step()


class StuckEngine(ScriptedEngine):
    """Its prompts never come ready."""

    def prepare(self, request: Request, scope: str = "") -> Script:
        Path(os.environ["LAME_FOLDER"], "preparing").touch()
        time.sleep(3600)
        return super().prepare(request, scope)


def stuck(_: WorkerSettings) -> Callable[[], Engine]:
    worker.LAST_WORDS_S = 0.2
    return StuckEngine


def slow(settings: WorkerSettings) -> Callable[[], Engine]:
    return lambda: SlowEngine(max_batch_size=settings.max_batch_size or SEQUENCES)


def loading(_: WorkerSettings) -> Callable[[], Engine]:
    def build() -> Engine:
        Path(os.environ["LAME_FOLDER"], "loading").touch()
        time.sleep(3600)
        raise AssertionError

    return build


def unloadable(_: WorkerSettings) -> Callable[[], Engine]:
    def build() -> Engine:
        raise ModelLoadFailed("no model 'x': name another")

    return build


def crashing(_: WorkerSettings) -> Callable[[], Engine]:
    def build() -> Engine:
        raise RuntimeError("CUDA says no")

    return build


if __name__ == "__main__":
    engines.builder = globals()[sys.argv[1]]
    settings = read(WorkerSettings)
    if settings.workers:
        sys.exit(supervisor_process.main(settings, [sys.executable, *sys.argv]))
    sys.exit(program.main(settings))
