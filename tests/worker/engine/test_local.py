"""The engine in one's own process: any thread, no Redis."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from streamfleet_common.errors import DeadlineExceeded, GenerationFailed, TooLong
from streamfleet_common.one_shot import CallRequest
from streamfleet_common.schemas import GenerateRequest, Sampling
from streamfleet_worker import handler
from streamfleet_worker.engine.base import Finished, Tokens
from streamfleet_worker.engine.local import Local, load
from streamfleet_worker.handlers.engine import handler_engine
from tiny_model import tiny_model

PROMPT = [40, 50, 60, 70]


@pytest.fixture
def model() -> Iterator[Local]:
    with load(str(tiny_model()), "cpu", max_batch_size=4) as model:
        yield model


def ask(n: int = 0, **fields: object) -> GenerateRequest:
    return GenerateRequest.model_validate({"prompt_token_ids": [*PROMPT, 80 + n], "max_tokens": 12, **fields})


def test_it_says_what_it_is(model: Local) -> None:
    assert model.model_id == str(tiny_model())
    assert model.device.startswith("CPU")
    assert model.max_row_tokens == 512
    assert model.memory["weights"] > 0
    assert model.count_tokens(ask()) == 5
    with pytest.raises(TooLong):
        model.count_tokens(ask(max_tokens=600))


def test_many_threads_get_what_each_would_get_alone(model: Local) -> None:
    alone = [model.run(ask(n)).choices[0].token_ids for n in range(12)]
    assert len(set(alone)) > 6
    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(lambda n: model.run(ask(n)).choices[0].token_ids, range(12)))
    assert together == alone


def test_a_stream_is_the_answer_in_parts_and_may_be_left(model: Local) -> None:
    whole = model.run(ask())
    parts = list(model.stream(ask()))
    assert isinstance(parts[-1], Finished)
    assert [i for part in parts if isinstance(part, Tokens) for i in part.token_ids] == list(
        whole.choices[0].token_ids
    )
    left = model.stream(ask(max_tokens=400, ignore_eos=True))
    next(left)
    left.close()
    assert model.run(ask()).choices[0].token_ids == whole.choices[0].token_ids


def test_what_names_no_seed_draws_another_answer_in_each_engine(model: Local) -> None:
    request = ask(ignore_eos=True, sampling=Sampling(temperature=2.0))
    with load(str(tiny_model()), "cpu", preload=False) as other:
        answers = [one.run(request).choices[0] for one in (model, other)]
    assert answers[0].seed != answers[1].seed
    assert answers[0].token_ids != answers[1].token_ids
    again = ask(ignore_eos=True, sampling=Sampling(temperature=2.0, seed=answers[1].seed))
    assert model.run(again).choices[0].token_ids == answers[1].token_ids


def test_errors_are_raised(model: Local) -> None:
    with pytest.raises(DeadlineExceeded):
        model.run(ask(max_tokens=400, ignore_eos=True), timeout_s=0.0)
    with pytest.raises(TooLong):
        model.run(ask(max_tokens=600))


def test_closing_ends_whoever_waits() -> None:
    model = load(str(tiny_model()), "cpu", preload=False)
    begun, errors = threading.Event(), []

    def read() -> None:
        try:
            for _ in model.stream(ask(max_tokens=500, ignore_eos=True, sampling=Sampling(temperature=1.0))):
                begun.set()
        except GenerationFailed as error:
            errors.append(str(error))

    thread = threading.Thread(target=read)
    thread.start()
    assert begun.wait(60)
    model.close()
    thread.join(60)
    assert not thread.is_alive()
    assert errors in (["the engine was closed"], [])
    with pytest.raises(GenerationFailed):
        model.run(ask())
    assert model.memory == {}


def test_what_runs_on_a_thread_of_its_own_is_heard() -> None:
    @handler("double")
    def double(batch: list[int]) -> list[int]:
        return [2 * value for value in batch]

    with Local(handler_engine(double.handler)) as local:
        assert local.run(CallRequest(handler="double", input=21), timeout_s=60).outputs == (42,)
