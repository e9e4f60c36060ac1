"""Decisions of a classifier in the engine: the same bits alone and in any company."""

from __future__ import annotations

import pytest

from engine_driver import Clock, Driver
from random_decisions import RandomDecisions
from streamfleet_common.decisions import DecideRequest, Decision
from streamfleet_worker.engine.encoder_engine import encoder_engine
from streamfleet_worker.engine.encoder_model import load_encoder
from tiny_encoder import Kind, tiny_encoder


def answers(driver: Driver, name: str) -> tuple[Decision, ...]:
    end = driver.heard[name].finished
    assert end.state == "done", end.error
    return end.answers


@pytest.mark.parametrize("kind", ["reranker", "roberta_reranker"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_answers_have_the_same_bits_alone_and_in_company(kind: Kind, precision: str) -> None:
    encoder = load_encoder(str(tiny_encoder(kind)), "cpu", precision)
    engine = encoder_engine(encoder, max_batch_size=8, preload=False)
    if not engine.info.exact:
        pytest.skip("this machine promises no bits in this precision")
    assert "decide" in engine.info.tasks
    driver = Driver(engine, Clock())
    requests = [request.model_copy(update={"truncate": True}) for request in RandomDecisions(7)(30)]
    for number, request in enumerate(requests):
        driver.add_prepared(f"alone {number}", engine.prepare(request))
        driver.run()
    for number, request in enumerate(requests):
        driver.add_prepared(f"company {number}", engine.prepare(request))
        if number % 4 == 3:
            driver.step()
    driver.run()
    for number, request in enumerate(requests):
        found = answers(driver, f"company {number}")
        assert found == answers(driver, f"alone {number}")
        assert [answer.id for answer in found] == [question.id for question in request.questions]
        usage = driver.heard[f"company {number}"].finished.usage
        assert usage == driver.heard[f"alone {number}"].finished.usage
        assert bool(usage.prompt_tokens) == bool(found)


def test_no_questions_are_answered_at_once() -> None:
    driver = Driver(
        encoder_engine(load_encoder(str(tiny_encoder("reranker")), "cpu"), preload=False), Clock()
    )
    driver.add_prepared("none", driver.engine.prepare(DecideRequest(state="text")))
    assert driver.engine.due_in() == 0
    assert driver.step().rows == 0
    assert answers(driver, "none") == ()
