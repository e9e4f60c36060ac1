"""What a fleet has to do while it is looked at: streams, vectors, and all that may go wrong with them."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from contextlib import suppress

import httpx

from proof_fleet import CHAT, EMBED
from streamfleet_common.errors import StreamfleetError
from streamfleet_common.schemas import GenerateRequest, Lane
from streamfleet_producer import Client, EmbedRequest

LANES: tuple[Lane, ...] = ("high", "normal", "bulk")
PREFACE = "You are a patient guide who explains the world to children in short and simple words. "
SUBJECTS = ("the moon", "a volcano", "snow", "the tides", "a library", "bees", "a bridge", "the wind")
LONG_WORDS = 900
"""More than MiniLM reads."""
STREAMS = 6
Act = Callable[[int], Coroutine[None, None, str]]


class Load:
    """Acts that go on side by side until `stop`; `done` counts how each kind of them ended."""

    def __init__(self, url: str, gateway: str, seed: int) -> None:
        self._url = url
        self._gateway = gateway
        self._random = random.Random(seed)
        self._stop = asyncio.Event()
        self.done: Counter[str] = Counter()

    def stop(self) -> None:
        """Begin nothing more; `run` returns when what is under way has ended."""
        self._stop.set()

    async def run(self) -> None:
        """Do all of it, again and again."""
        async with (
            Client(self._url, queue=CHAT) as self._chat,
            Client(self._url, queue=EMBED) as self._embed,
            httpx.AsyncClient(base_url=self._gateway, timeout=120) as self._http,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(STREAMS):
                group.create_task(self._again(self._stream, 0.1))
            for act, pause_s in (
                (self._vectors, 0.15),
                (self._cut, 1.0),
                (self._leave, 2.0),
                (self._too_late, 1.5),
                (self._too_long, 3.0),
                (self._burst, 12.0),
                (self._over_http, 0.5),
                (self._wrong_over_http, 2.0),
                (self._leave_over_http, 4.0),
            ):
                group.create_task(self._again(act, pause_s))

    async def _again(self, act: Act, pause_s: float) -> None:
        for turn in itertools.count():
            try:
                self.done[await act(turn)] += 1
            except (StreamfleetError, httpx.HTTPError) as error:
                self.done[type(error).__name__] += 1
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stop.wait(), pause_s * self._random.uniform(0.5, 1.5))
            if self._stop.is_set():
                return

    def _prompt(self) -> str:
        return f"{PREFACE}Tell me about {self._random.choice(SUBJECTS)}, number {self._random.randrange(99)}."

    def _request(self, least: int = 8, most: int = 48) -> GenerateRequest:
        return GenerateRequest(prompt=self._prompt(), max_tokens=self._random.randint(least, most))

    async def _stream(self, turn: int) -> str:
        async with self._chat.stream(self._request(), lane=self._random.choice(LANES)) as tokens:
            async for _ in tokens:
                pass
        return "streamed"

    async def _vectors(self, turn: int) -> str:
        # A third of the texts come again and again.
        texts = [
            f"What is {self._random.choice(SUBJECTS)}? {self._random.choice((0, self._random.random()))}"
            for _ in range(self._random.randint(1, 6))
        ]
        await self._embed.run(EmbedRequest(texts=texts), lane=self._random.choice(LANES))
        return "embedded"

    async def _cut(self, turn: int) -> str:
        text = " ".join(self._random.choices(SUBJECTS, k=LONG_WORDS))
        await self._embed.run(EmbedRequest(texts=[text], truncate=True))
        prompt = " ".join(self._random.choices(SUBJECTS, k=40))
        await self._chat.run(GenerateRequest(prompt=prompt, truncate=32, max_tokens=4))
        return "cut"

    async def _leave(self, turn: int) -> str:
        async with self._chat.stream(self._request(200, 300)) as tokens:
            async for _ in tokens:
                break  # leaving cancels it
        return "left"

    async def _too_late(self, turn: int) -> str:
        # Who waits for its end would sweep it; so the worker does.
        await self._chat.submit(self._request(200, 300), deadline_s=0.3)
        return "too late"

    async def _too_long(self, turn: int) -> str:
        if turn % 2:
            await self._embed.run(EmbedRequest(texts=["far " * LONG_WORDS]))
        else:
            await self._chat.run(GenerateRequest(prompt="far " * LONG_WORDS, max_tokens=4))
        return "not too long"

    async def _burst(self, turn: int) -> str:
        requests = [self._request(4, 12) for _ in range(60)]
        await self._chat.run_many(requests, lane="bulk", return_exceptions=True)
        return "burst"

    async def _over_http(self, turn: int) -> str:
        kinds = {
            "/v1/embeddings": {"model": EMBED, "input": f"A text of {self._random.choice(SUBJECTS)}"},
            "/v1/completions": {"model": CHAT, "prompt": self._prompt(), "max_tokens": 8},
        }
        path, body = self._random.choice(list(kinds.items()))
        answer = await self._http.post(path, json=body)
        return f"HTTP {answer.status_code}"

    async def _wrong_over_http(self, turn: int) -> str:
        body = {"model": f"no-such-{turn}" if turn % 2 else EMBED, "input": "a text" if turn % 2 else []}
        answer = await self._http.post("/v1/embeddings", json=body)
        return f"HTTP {answer.status_code}"

    async def _leave_over_http(self, turn: int) -> str:
        body = {"model": CHAT, "prompt": self._prompt(), "max_tokens": 300, "stream": True}
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                break
        return "left over HTTP"


async def leave_waiting(url: str, how_many: int) -> list[str]:
    """Submit long requests that nobody waits for; gives their ids."""
    async with Client(url, queue=CHAT) as client:
        request = GenerateRequest(prompt=PREFACE, max_tokens=300, ignore_eos=True)
        return [(await client.submit(request)).id for _ in range(how_many)]
