"""The oracle: whatever a request asks of an encoder, it gets the same alone and in any company.

Random requests come to one busy engine in random order, at random moments, and share its batches. Each of
their items is then run by itself. In exact mode answers are the same to the bit; otherwise they lie within
a tolerance that is stated here, and in the documentation.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from encoder_driver import encoder, needs_minilm, run
from engine_driver import Clock, Driver
from streamfleet_common.one_shot import ClassifyRequest, EmbedRequest, RerankRequest
from streamfleet_common.schemas import Request
from streamfleet_worker.engine import minilm
from streamfleet_worker.engine.base import EngineInfo, Finished
from streamfleet_worker.engine.encoder_exactness import LENGTH_STEP, EncoderExactness
from streamfleet_worker.engine.encoder_model import EncoderModel
from streamfleet_worker.engine.encoder_runner import EncoderRunner
from streamfleet_worker.engine.item import Done
from streamfleet_worker.engine.micro_batch import MicroBatchEngine
from streamfleet_worker.engine.tasks.encoder_task import EncoderTask

TOLERANCE = {"float32": 5e-6, "bfloat16": 0.02}
"""Of numbers of a vector of length one, and of probabilities."""

TEXT = (
    "heap tree sort list def return class import string value key none true index error raise while for in "
    "not and or is if else encode decode json text width line the of to a that be it with as on by this"
)


class RandomRequests:
    """Requests for what a model does, of one to eight texts of one to 60 words; some come twice."""

    def __init__(self, loaded: EncoderModel, seed: int) -> None:
        self._loaded = loaded
        self._source = random.Random(seed)
        self._said: list[str] = []

    def __call__(self, items: int) -> list[Request]:
        requests: list[Request] = []
        while items > 0:
            request = self._request(min(items, self._source.choice([1, 1, 1, 2, 3, 8])))
            requests.append(request)
            items -= request.n
        return requests

    def _request(self, n: int) -> Request:
        texts = tuple(self._text() for _ in range(n))
        choose = self._source.choice
        cut: dict[str, Any] = {"truncate": True, "truncate_side": choose(["left", "right"])}
        labels = self._loaded.labels
        if not labels:
            return EmbedRequest(
                texts=texts,
                pooling=choose([None, None, "cls", "mean", "last"]),
                normalize=choose([True, True, False]),
                dimensions=choose([None, None, 7, 32]),
                **cut,
            )
        if len(labels) == 1:
            return RerankRequest(
                query=self._text(9), documents=texts, raw_scores=choose([True, False]), **cut
            )
        pairs = tuple(self._text() for _ in texts) if choose([True, False]) else ()
        return ClassifyRequest(texts=texts, pairs=pairs, multi_label=choose([None, True, False]), **cut)

    def _text(self, most: int = 60) -> str:
        if self._said and self._source.random() < 0.1:
            return self._source.choice(self._said)
        words = self._source.choices(TEXT.split(), k=min(most, 1 + int(self._source.expovariate(1 / 15))))
        text = " ".join(words)
        if most == 60:
            self._said.append(text)
        return text


def together(
    loaded: EncoderModel, runner: EncoderRunner, requests: list[Request], seed: int, *, uniform: bool
) -> list[Finished]:
    """All of them in one engine, in random order; every seventh comes twice, and the second is cancelled."""
    source = random.Random(seed)
    task = EncoderTask(loaded, token_cache_bytes=1 << 20)
    info = EngineInfo(
        loaded.name, "", task.tasks, "", loaded.precision, 7, task.max_seq_len, loaded.vocab_size, window=4
    )
    clock = Clock()
    engine = MicroBatchEngine(
        task,
        runner,
        info,
        max_delay_s=0.05,
        max_batch_tokens=600,
        length_step=LENGTH_STEP,
        uniform=uniform,
        clock=clock,
    )
    driver = Driver(engine, clock)
    order = source.sample(range(len(requests)), len(requests))
    batches = rows = 0
    while order or engine.due_in() is not None:
        for _ in range(min(len(order), source.choice([0, 0, 1, 3, 6]))):
            number = order.pop()
            driver.add_prepared(str(number), engine.prepare(requests[number]))
            if number % 7 == 0:
                doomed = driver.add_prepared(f"x{number}", engine.prepare(requests[number]))
                engine.cancel([doomed])
        clock.now += source.choice([0.001, 0.02, 0.06])
        step = driver.step()
        batches += step.rows > 0
        rows += step.rows
    assert rows > 1.5 * batches  # company there was
    return [driver.heard[str(number)].finished for number in range(len(requests))]


def alone(loaded: EncoderModel, runner: EncoderRunner, request: Request) -> Finished:
    """Each item by itself, filled up as the engine does it."""
    job = EncoderTask(loaded).prepare(request)
    results = []
    for item in job.items:
        [outcome] = run(runner, [item], -(-item.length // LENGTH_STEP) * LENGTH_STEP)
        assert isinstance(outcome, Done)
        results.append(outcome.value)
    return Finished("done", usage=job.usage, **job.answer(results))


def fields(finished: Finished) -> tuple[Any, ...]:
    assert finished.state == "done", finished.error
    return finished.embeddings, finished.classifications, finished.ranking, finished.usage


def check_exact(loaded: EncoderModel, items: int, seed: int) -> None:
    runner = EncoderRunner(loaded)
    found = EncoderExactness.find(loaded, runner, max_batch_size=7, max_seq_len=loaded.max_positions)
    assert found.name
    requests = RandomRequests(loaded, seed)(items)
    company = together(loaded, runner, requests, seed, uniform=True)
    other = EncoderRunner(loaded, found.granule)
    for request, finished in zip(requests, company, strict=True):
        assert fields(finished) == fields(alone(loaded, other, request)), request


def check_close(loaded: EncoderModel, items: int, seed: int) -> float:
    """Without exact mode; gives the largest difference."""
    runner = EncoderRunner(loaded)
    requests = RandomRequests(loaded, seed)(items)
    company = together(loaded, runner, requests, seed, uniform=False)
    worst = 0.0
    for request, finished in zip(requests, company, strict=True):
        expected = alone(loaded, runner, request)
        assert finished.usage == expected.usage
        for mine, theirs in zip(numbers(finished), numbers(expected), strict=True):
            size = max(1.0, float(theirs.norm()))
            worst = max(worst, float((mine - theirs).abs().max()) / size)
    return worst


def numbers(finished: Finished) -> list[torch.Tensor]:
    """Vectors, probabilities by label, or scores by document."""
    if finished.embeddings:
        return [torch.tensor(one.vector.tolist()) for one in finished.embeddings]
    if finished.ranking:
        return [torch.tensor([rank.score for rank in sorted(finished.ranking, key=lambda r: r.index)])]
    return [
        torch.tensor([label.score for label in sorted(one.labels, key=lambda label: label.label)])
        for one in finished.classifications
    ]


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["bert", "classifier", "reranker"])
def test_answers_are_the_same_bits_in_any_company(kind: str, precision: str) -> None:
    check_exact(encoder(kind, precision), items=50, seed=3)


def test_nor_do_they_depend_on_it_where_weights_are_not_packed() -> None:
    """Kernels then compute one row otherwise than several: batches are filled up to whole granules."""
    check_exact(encoder("classifier", pack=False), items=50, seed=4)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["bert", "classifier"])
def test_answers_are_close_where_batches_are_mixed(kind: str, precision: str) -> None:
    assert check_close(encoder(kind, precision), items=40, seed=5) <= TOLERANCE[precision]


@needs_minilm
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_one_text_alone_with_31_shorter_and_with_31_longer(precision: str) -> None:
    loaded = encoder(minilm.ALIAS, precision)
    task, runner = EncoderTask(loaded), EncoderRunner(loaded)

    def vector(*companions: str) -> torch.Tensor:
        job = task.prepare(EmbedRequest(texts=("the heap is a tree of sorted keys", *companions)))
        results = [outcome.value for outcome in run(runner, list(job.items)) if isinstance(outcome, Done)]
        return torch.tensor(job.answer(results)["embeddings"][0].vector.tolist())

    alone = vector()
    for words in (2, 20):
        company = vector(*(" ".join(TEXT.split()[at : at + words]) for at in range(31)))
        assert (alone - company).abs().max() <= TOLERANCE[precision] / 4


@needs_minilm
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "kind", [minilm.ALIAS, "bert", "classifier", "reranker", "roberta_reranker", "llama"]
)
def test_500_random_items(kind: str, precision: str) -> None:
    loaded = encoder(kind, precision)
    check_exact(loaded, items=500, seed=11)
    assert check_close(loaded, items=500, seed=12) <= TOLERANCE[precision]
