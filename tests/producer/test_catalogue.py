"""What is refused before it is submitted, and what is not."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from hand_worker import HandWorker
from streamfleet_common.broker import Broker
from streamfleet_common.cards import Card
from streamfleet_producer import (
    BrokerUnavailable,
    Client,
    DecideRequest,
    GenerateRequest,
    InvalidRequest,
    ModelNotFound,
    Question,
    Sampling,
    TooLong,
    Undecodable,
    Unsupported,
)
from streamfleet_producer.catalogue import Catalogue

REQUEST = GenerateRequest(prompt="hello", max_tokens=8)


@pytest.fixture
async def bare_worker(redis_url: str) -> AsyncIterator[HandWorker]:
    """One that has announced nothing yet."""
    async with HandWorker(redis_url) as worker:
        yield worker


async def test_an_unknown_queue_is_refused_with_those_that_there_are(
    redis_url: str, worker: HandWorker
) -> None:
    async with Client(redis_url, queue="smolm2") as fleet:
        with pytest.raises(ModelNotFound, match="there are: q") as caught:
            await fleet.submit(REQUEST)
        assert caught.value.known == ["q"]
        with pytest.raises(ModelNotFound):
            await fleet.stream(REQUEST).__aenter__()
        with pytest.raises(ModelNotFound):
            await fleet.run_many([REQUEST])


async def test_without_any_queue_the_url_is_suspected(redis_url: str) -> None:
    async with Client(redis_url, queue="q") as fleet:
        with pytest.raises(ModelNotFound, match="Check the URL"):
            await fleet.submit(REQUEST)


async def test_a_queue_without_a_worker_takes_requests_that_wait(
    redis_url: str, bare_worker: HandWorker
) -> None:
    await bare_worker.announce()
    await bare_worker.announce(life_ms=0)
    async with Client(redis_url, queue="q") as fleet:
        assert await fleet.models() == []
        assert (await fleet.submit(REQUEST)).state == "queued"


async def test_a_refusal_is_never_made_from_old_cards(redis_url: str, bare_worker: HandWorker) -> None:
    async with Client(redis_url, queue="q", card_life_s=3600) as fleet:
        with pytest.raises(ModelNotFound):
            await fleet.submit(REQUEST)
        await bare_worker.announce()
        await fleet.submit(REQUEST)
        with pytest.raises(ModelNotFound):
            await fleet.submit(REQUEST.model_copy(update={"model": "new"}))
        await bare_worker.announce(model="new")
        await fleet.submit(REQUEST.model_copy(update={"model": "new"}))


async def test_cards_are_asked_for_once_while_they_live(
    worker: HandWorker, fleet: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = fleet._open_link().broker
    real, calls = broker.cards, []

    async def cards() -> object:
        calls.append(1)
        return await real()

    monkeypatch.setattr(broker, "cards", cards)
    await asyncio.gather(*(fleet.submit(REQUEST) for _ in range(10)))
    await fleet.submit(REQUEST)
    assert len(calls) == 1


async def test_a_model_that_is_not_served(worker: HandWorker, fleet: Client) -> None:
    with pytest.raises(ModelNotFound, match="does not serve model 'gpt' but m") as caught:
        await fleet.submit(GenerateRequest(prompt="hello", model="gpt"))
    assert caught.value.known == ["m"]
    await fleet.submit(GenerateRequest(prompt="hello", model="m"))


async def test_a_task_that_is_not_done(redis_url: str, bare_worker: HandWorker) -> None:
    await bare_worker.announce(tasks=["embed"])
    async with Client(redis_url, queue="q") as fleet:
        with pytest.raises(Unsupported, match="does embed, not generate") as caught:
            await fleet.submit(REQUEST)
        assert caught.value.feature == "generate"


async def test_questions_go_to_workers_that_decide(redis_url: str, bare_worker: HandWorker) -> None:
    request = DecideRequest(state="s", questions=[Question(id="q", criteria="c", type="yes_no")])
    await bare_worker.announce(tasks=["generate", "decide"])
    async with Client(redis_url, queue="q") as fleet:
        assert (await fleet.submit(request)).state == "queued"
    await bare_worker.announce(tasks=["generate"])
    async with Client(redis_url, queue="q") as fleet:
        with pytest.raises(Unsupported, match="does generate, not decide"):
            await fleet.submit(request)


async def test_token_ids_outside_the_vocabulary(redis_url: str, bare_worker: HandWorker) -> None:
    await bare_worker.announce(vocab_size=100)
    async with Client(redis_url, queue="q") as fleet:
        with pytest.raises(InvalidRequest) as caught:
            await fleet.submit(GenerateRequest(prompt_token_ids=(5, 100, 7, 2000), stop_token_ids=(100,)))
        assert caught.value.problems == [
            "prompt_token_ids.1: token id 100 is outside the vocabulary of 100",
            "prompt_token_ids.3: token id 2000 is outside the vocabulary of 100",
            "stop_token_ids.0: token id 100 is outside the vocabulary of 100",
        ]
        await fleet.submit(GenerateRequest(prompt_token_ids=(0, 99)))
        with pytest.raises(InvalidRequest) as caught:
            await fleet.submit(
                GenerateRequest(prompt="a", sampling=Sampling(logit_bias={99: 1, 191_222: -100}))
            )
        assert caught.value.problems == [
            "sampling.logit_bias.1: token id 191222 is outside the vocabulary of 100"
        ]
        with pytest.raises(InvalidRequest) as caught:
            await fleet.submit(GenerateRequest(prompt_token_ids=(100,) * 1000))
        assert len(caught.value.problems) == 11
        assert caught.value.problems[-1] == "and 990 more"


async def test_a_prompt_that_leaves_no_room(redis_url: str, bare_worker: HandWorker) -> None:
    await bare_worker.announce(max_seq_len=10)
    async with Client(redis_url, queue="q") as fleet:
        with pytest.raises(TooLong) as caught:
            await fleet.submit(GenerateRequest(prompt_token_ids=(1,) * 7, max_tokens=4))
        assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.limit) == (7, 4, 10)
        await fleet.submit(GenerateRequest(prompt_token_ids=(1,) * 6, max_tokens=4))
        await fleet.submit(GenerateRequest(prompt="a b c d e f g h i j k", max_tokens=8))  # the worker counts


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"max_tokens": "fit"}, (10, 1)),
        ({"max_tokens": "fit", "min_tokens": 5}, (10, 5)),
        ({"max_tokens": 6, "truncate": 5}, (5, 6)),
    ],
)
async def test_what_fits_if_asked_to_must_fit_at_all(
    redis_url: str, bare_worker: HandWorker, fields: dict[str, Any], found: tuple[int, int]
) -> None:
    await bare_worker.announce(max_seq_len=10)
    async with Client(redis_url, queue="q") as fleet:
        with pytest.raises(TooLong) as caught:
            await fleet.submit(GenerateRequest(prompt_token_ids=(1,) * 10, **fields))
        assert (caught.value.prompt_tokens, caught.value.max_tokens) == found
        shorter = {**fields, "prompt_token_ids": (1,) * 5}
        if fields["max_tokens"] == "fit":
            await fleet.submit(GenerateRequest(**shorter))
        await fleet.submit(GenerateRequest(**{**shorter, "max_tokens": 5, "min_tokens": 0}))


async def test_the_most_generous_worker_decides(redis_url: str, bare_worker: HandWorker) -> None:
    await bare_worker.announce(max_seq_len=10, vocab_size=10)
    async with HandWorker(redis_url, name="w2") as second, Client(redis_url, queue="q") as fleet:
        await second.announce(max_seq_len=20, vocab_size=0)
        await fleet.submit(GenerateRequest(prompt_token_ids=(11,) * 12, max_tokens=8))


@pytest.mark.parametrize(("ours", "theirs"), [(1000, 100_000), (100_000, 1000)])
async def test_a_request_over_either_limit_of_bytes(
    redis_url: str, bare_worker: HandWorker, ours: int, theirs: int
) -> None:
    await bare_worker.announce(max_request_bytes=theirs)
    async with Client(redis_url, queue="q", max_request_bytes=ours) as fleet:
        with pytest.raises(Undecodable, match="max_request_bytes") as caught:
            await fleet.submit(GenerateRequest(prompt="x" * 2000))
        assert caught.value.limit == 1000
        await fleet.submit(GenerateRequest(prompt="x" * 500))


async def test_a_reading_that_nobody_waits_for_fails_in_silence() -> None:
    reported: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    failing = asyncio.Event()

    class Gone:
        async def cards(self) -> list[Card]:
            await failing.wait()
            raise BrokerUnavailable("gone")

    catalogue = Catalogue(cast(Broker, Gone()), "q")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await catalogue.read()
    failing.set()
    await catalogue.settle()
    gc.collect()
    assert reported == []
