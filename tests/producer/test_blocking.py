"""The same client without an event loop."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from hand_worker import HandWorker, delta
from streamfleet_producer import (
    BrokerUnavailable,
    Cancelled,
    GenerateRequest,
    InvalidRequest,
    Restart,
    Start,
)
from streamfleet_producer.blocking import Client

REQUEST = GenerateRequest(prompt="hello", max_tokens=8)


@pytest.fixture
def serving(redis_url: str) -> Iterator[None]:
    """A worker on a thread of its own that echoes prompts, in two deltas where they are streamed."""
    ready, stop = threading.Event(), threading.Event()

    async def serve() -> None:
        async with HandWorker(redis_url) as worker:
            await worker.announce()
            ready.set()
            while not stop.is_set():
                entries = await worker.broker.read("w1", ("normal",), 32, block_ms=20)
                for work in await worker.begin(entries):
                    text = work.prompt
                    if text == "silence":
                        continue
                    if work.envelope.stream:
                        await worker.emit(work, delta(text[:2]))
                        await worker.emit(work, delta(text[2:], 2))
                    await worker.finish(work, text)

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    ready.wait()
    yield
    stop.set()
    thread.join()


def test_run_stream_and_the_rest(redis_url: str, serving: None) -> None:
    with Client(redis_url, queue="q") as fleet:
        assert fleet.run(REQUEST).text == "hello"
        assert [answer.text for answer in fleet.run_many([REQUEST] * 3)] == ["hello"] * 3
        bad = GenerateRequest(prompt="x" * 100_000)
        outcomes = fleet.run_many([REQUEST, bad], return_exceptions=True, deadline_s=30)
        assert len(outcomes) == 2
        with fleet.stream(REQUEST) as tokens:
            assert [event.text for event in tokens] == ["he", "llo"]
        assert tokens.result.text == "hello"
        with fleet.attach(tokens.id) as again:
            kinds = [type(event).__name__ for event in again.events()]
            assert kinds == ["Start", "Delta", "Delta"]
            assert not {Start, Restart} & {type(event) for event in again}
        with fleet.stream(REQUEST) as tokens:
            assert tokens.wait().text == "hello"
        assert tokens.ticket.id == tokens.id
        ticket = fleet.submit(REQUEST, idempotency_key="k")
        assert fleet.result(ticket.id, timeout=30).text == "hello"
        assert fleet.status(ticket.id).state == "done"
        assert fleet.cancel(ticket.id) == "done"
        assert [card.worker for card in fleet.models()] == ["w1"]
        assert fleet.queues() == ["q"]
        assert fleet.depth().open == 0


def test_many_threads_share_one_client(redis_url: str, serving: None) -> None:
    prompts = [f"prompt {number}" for number in range(40)]
    with Client(redis_url, queue="q") as fleet, ThreadPoolExecutor(8) as threads:

        def ask(prompt: str) -> str:
            with fleet.stream(GenerateRequest(prompt=prompt)) as tokens:
                streamed = "".join(event.text for event in tokens)
            assert fleet.run(GenerateRequest(prompt=prompt)).text == streamed
            return streamed

        assert list(threads.map(ask, prompts)) == prompts


def test_leaving_a_stream_early_cancels(redis_url: str, serving: None) -> None:
    with Client(redis_url, queue="q") as fleet:
        with fleet.stream(GenerateRequest(prompt="silence")) as tokens:
            pass
        assert fleet.status(tokens.id).state == "cancelled"


def test_errors_are_raised_here(redis_url: str, serving: None) -> None:
    with Client(redis_url, queue="q", max_request_bytes=1000) as fleet:
        with pytest.raises(InvalidRequest):
            fleet.run(GenerateRequest(prompt="x" * 2000))
        with pytest.raises(InvalidRequest), fleet.stream(GenerateRequest(prompt="x" * 2000)):
            pass


def test_a_client_that_cannot_be_opened_leaves_no_thread() -> None:
    with pytest.raises(BrokerUnavailable):
        Client("http://localhost").open()
    assert not [thread for thread in threading.enumerate() if thread.name == "streamfleet"]


def test_closing_ends_a_thread_that_waits(redis_url: str, serving: None) -> None:
    fleet = Client(redis_url, queue="q").open()
    ticket = fleet.submit(GenerateRequest(prompt="silence"))
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(fleet.result, ticket.id)
        while not fleet._client._open_link().waiting:
            pass
        fleet.close()
        with pytest.raises(Cancelled):
            waiting.result()
    fleet.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "streamfleet"]


def test_a_closed_client_says_so_and_may_be_opened_again(redis_url: str, serving: None) -> None:
    fleet = Client(redis_url, queue="q")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not open"):
            fleet.run(REQUEST)
        with fleet:
            assert fleet.run(REQUEST).text == "hello"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_fork_needs_a_client_of_its_own(redis_url: str, serving: None) -> None:
    with Client(redis_url, queue="q") as fleet:
        assert fleet.run(REQUEST).text == "hello"
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                fleet.run(REQUEST)
            except RuntimeError as error:
                os.write(write, str(error).encode())
            fleet.close()  # does not hang
            os._exit(0)
        os.close(write)
        os.waitpid(child, 0)
        assert b"open a new one in each process" in os.read(read, 1000)
        os.close(read)
        assert fleet.run(REQUEST).text == "hello"


def test_it_is_not_for_its_own_loop(redis_url: str) -> None:
    with Client(redis_url, queue="q") as fleet:

        async def inside() -> None:
            with pytest.raises(RuntimeError, match="own event loop"):
                fleet.depth()

        fleet._running().call(inside())
