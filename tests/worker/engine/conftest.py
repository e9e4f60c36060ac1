from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine_driver import Clock, Driver
from streamfleet_worker.engine import models
from streamfleet_worker.engine.generation import GenerationEngine
from tiny_model import tiny_model


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(scope="session")
def llama() -> models.LoadedModel:
    return models.load(str(tiny_model("llama")), device="cpu", pack=False)


@pytest.fixture(scope="session")
def gpt2() -> models.LoadedModel:
    return models.load(str(tiny_model("gpt2")), device="cpu", pack=False)


@pytest.fixture
def drive(clock: Clock) -> Callable[..., Driver]:
    def make(loaded: models.LoadedModel, **settings: Any) -> Driver:
        return Driver(GenerationEngine(loaded, clock=clock, **settings), clock)

    return make
