"""A worker is killed amid a stream: whether the reader sees it is up to what both workers promise."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import pytest
import redis

from delivery.workers import WorkerProcess
from eventually import eventually
from hired_view import echo
from server_view import events_of
from streamfleet_common.errors import GenerationFailed
from streamfleet_common.schemas import Delta, GenerateRequest, Prefill, Restart, Start
from streamfleet_producer import Client
from streamfleet_producer.token_stream import TokenStream
from streamfleet_producer.transcript import DIFFERS, LOST, StreamEvent

Launch = Callable[..., WorkerProcess]
LEASE_S = 1.2
KILLED = "CRASH@20:1"
"""In its first attempt, with 20 tokens made and most of them shown."""


class Reader:
    """Reads all events of a stream."""

    def __init__(self) -> None:
        self.events: list[StreamEvent] = []

    async def read(self, tokens: TokenStream) -> None:
        async for event in tokens.events():
            self.events.append(event)

    @property
    def tokens(self) -> int:
        return sum(len(event.token_ids) for event in self.events if isinstance(event, Delta))

    @property
    def standing(self) -> list[Delta]:
        """The deltas since the last restart."""
        places = [place for place, event in enumerate(self.events) if isinstance(event, Restart)]
        return [event for event in self.events[max(places, default=0) :] if isinstance(event, Delta)]

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.standing)

    @property
    def reasons(self) -> list[str]:
        return [event.reason for event in self.events if isinstance(event, Restart)]


async def read_across_a_kill(
    launch: Launch, redis_url: str, request: GenerateRequest, classes: tuple[str, str]
) -> tuple[Reader, TokenStream, list[str]]:
    """Read a stream whose first worker is killed, and a second one there then; gives both names."""
    first = launch(lease_s=LEASE_S, exact=classes[0])
    names = [await first.ready()]
    reader = Reader()
    async with Client(redis_url, queue="q") as client, client.stream(request) as tokens:
        reading = asyncio.create_task(reader.read(tokens))
        assert await first.ended() == -signal.SIGKILL
        await eventually(lambda: reader.tokens > 0, "some of what it said")
        names.append(await launch(lease_s=LEASE_S, exact=classes[1]).ready())
        async with asyncio.timeout(60):
            await reading
    return reader, tokens, names


async def test_of_one_class_the_stream_goes_on_as_if_nothing_had_happened(
    launch: Launch, redis_url: str, raw: redis.Redis
) -> None:
    request = GenerateRequest(
        prompt=f"ECHO 30 TICK 10 {KILLED}",
        logprobs=True,
        top_logprobs=2,
        prompt_logprobs=True,
        echo=True,
        n=2,
    )
    reader, tokens, names = await read_across_a_kill(launch, redis_url, request, ("kind", "kind"))
    end = tokens.result
    assert (end.worker, end.attempt, end.exact) == (names[1], 2, "kind")
    starts = [event for event in reader.events if isinstance(event, Start)]
    assert [(start.worker, start.exact) for start in starts] == [(names[0], "kind")]
    assert sum(isinstance(event, Prefill) for event in reader.events) == 1
    assert reader.reasons == []
    for choice in end.choices:
        mine = [event for event in reader.events if isinstance(event, Delta) and event.index == choice.index]
        assert "".join(event.text for event in mine) == choice.text
        assert sum((event.token_ids for event in mine), ()) == choice.token_ids == tuple(range(30))
        assert sum((event.logprobs for event in mine), ()) == choice.logprobs
        assert sum((event.top_logprobs for event in mine), ()) == choice.top_logprobs
    # Both attempts are in the log all the same: it is the reader that leaves out what was shown.
    assert sum(place.endswith("-0") for place in events_of(raw, tokens.id)) == 2


@pytest.mark.parametrize(
    "classes",
    [
        ("", ""),
        ("kind", "another"),
        *(pytest.param(one, marks=pytest.mark.slow) for one in (("kind", ""), ("", "kind"))),
    ],
)
async def test_without_that_promise_it_begins_anew(
    launch: Launch, redis_url: str, classes: tuple[str, str]
) -> None:
    request = GenerateRequest(prompt=f"ECHO 30 TICK 10 {KILLED}")
    reader, tokens, names = await read_across_a_kill(launch, redis_url, request, classes)
    assert reader.reasons == [LOST]
    assert [event.worker for event in reader.events if isinstance(event, Start)] == names
    assert reader.text == tokens.result.text == echo(30)
    assert reader.tokens > 30, "some came twice"


async def test_a_promise_that_is_broken_shows(launch: Launch, redis_url: str) -> None:
    request = GenerateRequest(prompt=f"ECHO 30 TICK 10 SIGNED@5 {KILLED}")
    reader, tokens, names = await read_across_a_kill(launch, redis_url, request, ("kind", "kind"))
    assert reader.reasons == [DIFFERS]
    assert [event.worker for event in reader.events if isinstance(event, Start)] == names
    # What the new attempt has said before it differed comes in one piece.
    first = reader.standing[0]
    assert first.text.startswith(echo(5))
    assert len(first.token_ids) >= 6
    assert reader.text == tokens.result.text
    assert "~3." in reader.text


async def test_who_would_rather_fail_than_see_it_fails_all_the_same(launch: Launch, redis_url: str) -> None:
    # It is the server that decides, and it cannot tell whose the next attempt would be.
    request = GenerateRequest(prompt=f"ECHO 30 TICK 10 {KILLED}")
    first = launch(lease_s=LEASE_S, exact="kind")
    await first.ready()
    async with Client(redis_url, queue="q") as client, client.stream(request, on_restart="fail") as tokens:
        reading = asyncio.create_task(Reader().read(tokens))
        await first.ended()
        await launch(lease_s=LEASE_S, exact="kind").ready()
        with pytest.raises(GenerationFailed) as caught:
            async with asyncio.timeout(60):
                await reading
    assert caught.value.retryable
