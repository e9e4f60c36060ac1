"""A client with a tokenizer: what it counts, what is refused before the queue, what is left to workers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import tiny_tokenizers
from hand_worker import HandWorker
from streamfleet_common.token_layout import TokenLayout
from streamfleet_producer import (
    ChatMessage,
    Client,
    DecideRequest,
    GenerateRequest,
    ModelNotFound,
    Question,
    TokenCounter,
    TooLong,
    Unsupported,
    blocking,
)

LAYOUT = TokenLayout(text=1, state=2, question=2, option=1)
SHORT = GenerateRequest(prompt="hello world", max_tokens=5)  # 8 tokens with their control token
LONG = GenerateRequest(prompt="hello world " * 3, max_tokens=5)  # 12
QUESTION = Question(id="q", criteria="do not", options=["hello", "hello world"])


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    tiny_tokenizers.word_piece().save_pretrained(tmp_path)
    return tmp_path / "tokenizer.json"


@pytest.fixture
async def counted(redis_url: str, tokenizer: Path) -> AsyncIterator[tuple[Client, HandWorker]]:
    """A client that counts, and a worker of 10 tokens."""
    async with HandWorker(redis_url) as worker, Client(redis_url, queue="q", tokenizer=tokenizer) as fleet:
        await worker.announce(max_seq_len=10, layout=LAYOUT, tasks=("generate", "decide"))
        yield fleet, worker


async def test_requests_are_counted(counted: tuple[Client, HandWorker]) -> None:
    fleet, _ = counted
    assert await fleet.count_tokens(SHORT) == 2 + 1
    request = DecideRequest(state="hello", questions=[QUESTION])
    assert await fleet.count_tokens(request) == (2 + 1) + (2 + 2) + (1 + 1) + (2 + 1)
    with pytest.raises(ModelNotFound):
        await fleet.count_tokens(SHORT.model_copy(update={"model": "other"}))


async def test_a_program_without_an_event_loop_counts_too(
    counted: tuple[Client, HandWorker], redis_url: str, tokenizer: Path
) -> None:
    def count() -> int:
        counter = TokenCounter.from_file(tokenizer)
        with blocking.Client(redis_url, queue="q", tokenizer=counter) as fleet:
            return fleet.count_tokens(SHORT)

    assert await asyncio.to_thread(count) == 3


async def test_what_is_too_long_is_never_queued(counted: tuple[Client, HandWorker]) -> None:
    fleet, _ = counted
    with pytest.raises(TooLong) as caught:
        await fleet.count_tokens(LONG)
    assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.limit) == (7, 5, 10)
    with pytest.raises(TooLong):
        await fleet.run(LONG)
    with pytest.raises(TooLong):
        await fleet.submit(LONG)
    with pytest.raises(TooLong):
        await fleet.stream(LONG).__aenter__()
    with pytest.raises(TooLong):
        await fleet.run_many([LONG])
    with pytest.raises(TooLong) as caught:
        await fleet.submit(DecideRequest(state="hello hello", questions=[QUESTION]))
    assert (caught.value.question, caught.value.options, caught.value.fit) == ("q", 2, 1)
    assert (await fleet.depth()).open == 0
    await fleet.submit(SHORT)
    assert (await fleet.depth()).open == 1


async def test_the_most_generous_worker_that_lives_now_decides(
    counted: tuple[Client, HandWorker], redis_url: str
) -> None:
    fleet, _ = counted
    with pytest.raises(TooLong):
        await fleet.submit(LONG)
    async with HandWorker(redis_url, name="w2") as other:
        await other.announce(max_seq_len=12, layout=LAYOUT)
        # The client has the old cards at hand.
        await fleet.submit(LONG)
        assert await fleet.count_tokens(LONG) == 7
        # One more token for nothing: 13.
        await other.announce(max_seq_len=12, layout=TokenLayout(text=2))
        await fleet.models()
        with pytest.raises(TooLong) as caught:
            await fleet.submit(LONG)
        assert (caught.value.prompt_tokens, caught.value.limit) == (8, 12)


async def test_what_cannot_be_counted_is_left_to_the_worker(counted: tuple[Client, HandWorker]) -> None:
    fleet, worker = counted
    chat = GenerateRequest(messages=[ChatMessage(role="user", content="hello " * 20)])
    with pytest.raises(Unsupported, match="messages are counted by the worker alone"):
        await fleet.count_tokens(chat)
    await fleet.submit(chat)
    await worker.announce(max_seq_len=10)
    await fleet.models()
    with pytest.raises(Unsupported, match="does not say what its worker puts around"):
        await fleet.count_tokens(LONG)
    await fleet.submit(LONG)
    await worker.announce(life_ms=0)
    await fleet.models()
    with pytest.raises(Unsupported, match="no worker of this queue lives"):
        await fleet.count_tokens(LONG)
    await fleet.submit(LONG)
    assert (await fleet.depth()).open == 3


async def test_without_a_tokenizer_nothing_is_counted(
    counted: tuple[Client, HandWorker], redis_url: str
) -> None:
    async with Client(redis_url, queue="q") as fleet:
        with pytest.raises(Unsupported, match=r'Client\(…, tokenizer="path/to/tokenizer\.json"\)') as caught:
            await fleet.count_tokens(SHORT)
        assert caught.value.feature == "count_tokens"
        await fleet.submit(LONG)
