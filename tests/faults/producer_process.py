"""A producer to be killed. It says what it does, a line each, and goes on when a line comes in.

    python producer_process.py URL LINE_URL

Over the first URL it streams a request under the key `stream`; over the second it submits one under the key
`unanswered` once it is told to, and it listens for one under the key `never` without submitting it. Given one
URL it asks for one stream after the other.
"""

from __future__ import annotations

import asyncio
import sys
from itertools import count

from streamfleet_common.schemas import GenerateRequest
from streamfleet_producer import Client

QUEUE = "q"
ENDLESS = GenerateRequest(prompt="ECHO 3000 TICK 20", max_tokens=3000)
DEADLINE_S = 1.0


def say(*words: str) -> None:
    sys.stdout.write(" ".join(words) + "\n")
    sys.stdout.flush()


async def told() -> None:
    await asyncio.to_thread(sys.stdin.readline)


async def once(url: str, line_url: str) -> None:
    async with Client(url, QUEUE) as client, Client(line_url, QUEUE) as other:
        await other.models()
        async with client.stream(ENDLESS, idempotency_key="stream", deadline_s=DEADLINE_S) as tokens:
            await anext(tokens)
            channels = client._open_link()._subscriber
            never = client._intake.rid("never")
            await channels.subscribe([(client._open_link().channel(never), _Deaf())])
            say("streaming")
            await told()
            await other.submit(ENDLESS, idempotency_key="unanswered", deadline_s=DEADLINE_S)
            say("answered")
            await told()


class _Deaf:
    """Listens to nothing that it hears."""

    def heard(self, data: bytes) -> None:
        pass

    def missed(self) -> None:
        pass


async def again_and_again(url: str) -> None:
    async with Client(url, QUEUE) as client:

        async def ask(number: int) -> None:
            for turn in count():
                request = GenerateRequest(prompt="ECHO 5 TICK 20")
                async with client.stream(
                    request, idempotency_key=f"{number}-{turn}", deadline_s=60
                ) as tokens:
                    say("accepted", tokens.id)
                    async for _ in tokens:
                        pass

        await asyncio.gather(*(ask(number) for number in range(8)))


if __name__ == "__main__":
    asyncio.run(once(*sys.argv[1:]) if len(sys.argv) > 2 else again_and_again(sys.argv[1]))
