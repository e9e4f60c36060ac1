"""A worker with a real model is killed amid a stream: another one goes on, to the bit, and nobody notices."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from command import environment
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.schemas import Delta, Restart, Start
from streamfleet_producer import Client, GenerateRequest
from tiny_model import tiny_model

LIMIT_S = 150.0
REQUEST = GenerateRequest.model_validate(
    {
        "prompt": "def value(self):",
        "max_tokens": 300,
        "ignore_eos": True,
        "n": 2,
        "logprobs": True,
        "sampling": {"temperature": 1.0},
    }
)


@contextmanager
def worker(url: str) -> Iterator[None]:
    settings = {
        "STREAMFLEET_REDIS_URL": url,
        "STREAMFLEET_QUEUE": "tiny",
        "STREAMFLEET_ENGINE": "generation",
        "STREAMFLEET_MODEL": str(tiny_model("long")),
        "STREAMFLEET_MAX_SEQ_LEN": "1024",
        "STREAMFLEET_LEASE_S": "1.5",
        "STREAMFLEET_LOG_LEVEL": "warning",
    }
    with subprocess.Popen(
        [sys.executable, "-m", "streamfleet_worker"], env=environment(**settings)
    ) as process:
        try:
            yield
        finally:
            process.kill()


async def served(client: Client, workers: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(await client.models()) < workers:  # noqa: ASYNC110 (other processes make it true)
            await asyncio.sleep(0.05)


async def test_a_stream_goes_on_where_its_worker_was_killed() -> None:
    with ExitStack() as stack:
        url = stack.enter_context(EmbeddedBroker()).url
        for _ in range(2):
            stack.enter_context(worker(url))
        async with Client(url, queue="tiny") as client:
            await served(client, 2)
            texts, starts, restarts = ["", ""], [], 0
            async with asyncio.timeout(LIMIT_S), client.stream(REQUEST) as tokens:
                async for event in tokens.events():
                    match event:
                        case Start():
                            starts.append(event)
                        case Restart():
                            restarts += 1
                        case Delta():
                            texts[event.index] += event.text
                            if len(starts) == 1 and len(texts[0]) > 20:
                                os.kill(int(starts[0].worker.split(":")[1]), signal.SIGKILL)
                                starts.append(starts[0])  # once
                end = tokens.result
            assert (end.state, end.attempt, restarts) == ("done", 2, 0)
            assert end.exact == starts[0].exact != ""
            assert end.worker != starts[0].worker
            assert [choice.text for choice in end.choices] == texts
            # Nobody gave a seed; the one that was drawn gives the answer again.
            again = REQUEST.model_copy(
                update={"sampling": REQUEST.sampling.model_copy(update={"seed": end.seed})}
            )
            assert (await client.run(again, timeout=LIMIT_S)).choices == end.choices
