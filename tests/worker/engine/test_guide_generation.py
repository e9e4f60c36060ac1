"""Guided rows in the engine: beside others, and to each kind of end."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from engine_driver import Driver
from streamfleet_common import schemas
from streamfleet_worker.engine.guide_compiler import GuideCompiler
from streamfleet_worker.engine.models import LoadedModel

Add = Callable[..., Any]

SCHEMA = {
    "type": "object",
    "properties": {
        "verdict": {"enum": ["yes", "no", "größer"]},
        "score": {"type": "integer", "minimum": 0, "maximum": 100},
        "sure": {"type": "boolean"},
    },
    "required": ["verdict", "score", "sure"],
    "additionalProperties": False,
}


@pytest.fixture
def driver(llama: LoadedModel, drive: Callable[..., Driver]) -> Driver:
    return drive(llama, max_batch_size=8, max_seq_len=400)


@pytest.fixture
def add(llama: LoadedModel, driver: Driver) -> Add:
    """Add a request, guided if it has a `guide`."""
    compiler = GuideCompiler(llama.tokenizer, llama.vocab_size, llama.eos_token_ids)

    def put(name: str, guide: dict[str, Any] | None = None, **fields: Any) -> None:
        request = schemas.GenerateRequest.model_validate({"prompt": "def f(x):", **fields})
        prepared: Any = driver.engine.prepare(request)
        if guide is not None:
            prepared = replace(prepared, guide=compiler.compile(schemas.Guide.model_validate(guide)))
        driver.add_prepared(name, prepared)

    return put


def test_guided_answers_have_their_form_and_end_by_themselves(driver: Driver, add: Add) -> None:
    for seed in range(4):
        add(f"choice{seed}", {"choice": ["yes", "no", "größer"]}, sampling={"temperature": 2.0, "seed": seed})
        add(
            f"schema{seed}",
            {"json_schema": SCHEMA},
            sampling={"temperature": 2.0, "seed": seed},
            max_tokens=380,
        )
    add("greedy", {"regex": "[0-9]{4}-[0-9]{2}"})
    heard = driver.run()
    for name, one in heard.items():
        assert one.reason == "eos", name
        if name.startswith("schema"):
            found = json.loads(one.text)
            assert found.keys() == {"verdict", "score", "sure"}
            assert found["verdict"] in ("yes", "no", "größer")
            assert 0 <= found["score"] <= 100
        elif name.startswith("choice"):
            assert one.text in ("yes", "no", "größer")
    assert len({one.text for one in heard.values()}) > 4


def test_a_guided_answer_that_is_cut_says_so(driver: Driver, add: Add) -> None:
    add("a", {"json_schema": SCHEMA}, max_tokens=3)
    driver.run()
    assert driver.heard["a"].reason == "length"
    with pytest.raises(json.JSONDecodeError):
        json.loads(driver.heard["a"].text)


def test_an_unguided_row_is_the_same_beside_a_guided_one(driver: Driver, add: Add) -> None:
    add("alone", max_tokens=20)
    driver.run()
    add("beside", max_tokens=20)
    add("guided", {"regex": "[ab]{30}"}, max_tokens=40)
    driver.run()
    assert driver.heard["beside"].text == driver.heard["alone"].text
    assert set(driver.heard["guided"].text) <= {"a", "b"}
    assert len(driver.heard["guided"].text) == 30


def test_each_of_several_answers_goes_its_own_way(driver: Driver, add: Add) -> None:
    options = [f"{i}{i}" for i in range(10)]
    add("a", {"choice": options}, n=6, sampling={"temperature": 5.0, "seed": 3})
    driver.run()
    texts = [choice.text for choice in driver.heard["a"].finished.choices]
    assert len(texts) == 6
    assert set(texts) <= set(options)
    assert len(set(texts)) > 1
