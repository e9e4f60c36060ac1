from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine_driver import Clock, Driver
from streamfleet_worker.engine import generation, models
from streamfleet_worker.engine.generation import GenerationEngine
from tiny_model import Kind, tiny_model

Runner = Callable[..., Any]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def load() -> Callable[..., models.LoadedModel]:
    """Load a tiny model once; plain linear layers unless told otherwise."""
    loaded: dict[tuple[Kind, str, bool], models.LoadedModel] = {}

    def get(kind: Kind, precision: str = "float32", *, pack: bool = False) -> models.LoadedModel:
        key = (kind, precision, pack)
        if key not in loaded:
            folder = str(tiny_model(kind))
            loaded[key] = models.load(folder, device="cpu", precision=precision, pack=pack)
        return loaded[key]

    return get


@pytest.fixture(scope="session")
def llama(load: Callable[..., models.LoadedModel]) -> models.LoadedModel:
    return load("llama")


@pytest.fixture(scope="session")
def gpt2(load: Callable[..., models.LoadedModel]) -> models.LoadedModel:
    return load("gpt2")


@pytest.fixture
def drive(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Driver]:
    """Make an engine and a driver of it.

    `runner` stands in for the engine's model runner, and with a `granule` the engine is exact without a
    warm-up.
    """

    def make(
        loaded: models.LoadedModel, *, runner: Runner | None = None, granule: int = 1, **settings: Any
    ) -> Driver:
        with monkeypatch.context() as patch:
            if runner is not None:
                patch.setattr(generation, "ModelRunner", runner)
            engine: Any = GenerationEngine(loaded, clock=clock, **settings)
        engine._runner.granule = granule
        return Driver(engine, clock)

    return make


@pytest.fixture(scope="session")
def granule(llama: models.LoadedModel) -> int:
    """At which the tiny Llama is exact on this machine."""
    engine: Any = GenerationEngine(llama, max_seq_len=256)
    engine.warm_up()
    assert engine.info.exact
    found: int = engine._runner.granule
    return found
