"""Lines between a client and Redis that fall silent without a word, mid-stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from hand_worker import HandWorker, delta
from lossy_proxy import LossyProxy
from streamfleet_common import connections as connections_module
from streamfleet_common import subscriber as subscriber_module
from streamfleet_producer import Client, GenerateRequest, TokenStream

REQUEST = GenerateRequest(prompt="hello", max_tokens=8)
TEXT = "abcdefghij"


@pytest.fixture
async def proxy(redis_url: str) -> AsyncIterator[LossyProxy]:
    async with LossyProxy(redis_url) as made:
        yield made


async def text_of(tokens: TokenStream) -> str:
    async with asyncio.timeout(60):
        return "".join([event.text async for event in tokens])


@pytest.mark.parametrize("line_comes_back", [True, False])
async def test_a_stream_survives_a_network_that_swallows_everything_for_a_while(
    worker: HandWorker, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch, line_comes_back: bool
) -> None:
    # The line of messages is given up after its own silence; or never, and then the log alone has to do.
    monkeypatch.setattr(subscriber_module, "SILENCE_S", 0.1 if line_comes_back else 3600)
    monkeypatch.setattr(connections_module, "COMMAND_TIMEOUT_S", 0.2)
    async with (
        Client(proxy.url, queue="q", silence_s=0.05) as fleet,
        fleet.stream(REQUEST) as tokens,
    ):
        [work] = await worker.take()
        await worker.emit(work, delta(TEXT[0], 0))
        assert (await anext(tokens)).text == TEXT[0]
        reading = asyncio.create_task(text_of(tokens))
        proxy.is_mute = True
        for place in range(1, 5):
            await worker.emit(work, delta(TEXT[place], place))
        asked = proxy.count(b"XRANGE")
        async with asyncio.timeout(60):
            while proxy.count(b"XRANGE") == asked:  # noqa: ASYNC110 (it is asked in vain)
                await asyncio.sleep(0.005)
        proxy.is_mute = False
        for place in range(5, len(TEXT)):
            await worker.emit(work, delta(TEXT[place], place))
        await worker.finish(work, TEXT)
        assert await reading == TEXT[1:]
        assert tokens.result.text == TEXT


async def test_without_any_messages_the_log_alone_brings_the_whole_text(
    redis_url: str, worker: HandWorker
) -> None:
    async with (
        Client(redis_url, queue="q", silence_s=0.02) as fleet,
        fleet.stream(REQUEST) as tokens,
    ):
        await fleet._open_link()._subscriber.close()
        reading = asyncio.create_task(text_of(tokens))
        [work] = await worker.take()
        for place, letter in enumerate(TEXT):
            await worker.emit(work, delta(letter, place))
            await fleet.depth()  # so that the reader has had its turn
        await worker.finish(work, TEXT)
        assert await reading == TEXT


async def test_an_answer_comes_through_a_network_that_swallowed_its_message(
    worker: HandWorker, proxy: LossyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections_module, "COMMAND_TIMEOUT_S", 0.2)
    async with Client(proxy.url, queue="q", silence_s=0.05) as fleet:
        running = asyncio.create_task(fleet.run(REQUEST))
        [work] = await worker.take()
        proxy.is_mute = True
        await worker.finish(work, "abc")
        proxy.is_mute = False
        async with asyncio.timeout(60):
            assert (await running).text == "abc"
