"""What only a process can go through: it sleeps, its interpreter is held, a request kills it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import redis

from delivery.workers import Nursery, WorkerProcess
from eventually import eventually
from hired import end, ends, eventually_so, record, submit
from server_view import assert_drained, calls_of, dead_of, log_of, now_ms
from streamfleet_common.broker import Broker
from streamfleet_common.errors import GenerationFailed
from streamfleet_common.schemas import Delta, End, GenerateRequest, Restart, Retry
from streamfleet_producer import Client
from streamfleet_producer.token_stream import TokenStream

Launch = Callable[..., WorkerProcess]
LEASE_S = 1.2


class Reader:
    """Reads a stream with its restarts, and keeps the text that stands."""

    def __init__(self) -> None:
        self.text = ""
        self.restarts = 0

    async def read(self, tokens: TokenStream) -> None:
        async for event in tokens.events():
            if isinstance(event, Restart):
                self.text, self.restarts = "", self.restarts + 1
            elif isinstance(event, Delta):
                self.text += event.text

    @property
    def epochs(self) -> set[str]:
        """In which the tokens of the text were made, as they say themselves."""
        return set(re.findall(r"~(\d+)\.", self.text))


async def test_a_worker_that_slept_for_three_leases_has_lost_its_work_and_its_voice(
    broker: Broker, launch: Launch, redis_url: str, raw: redis.Redis
) -> None:
    sleeper = launch(lease_s=LEASE_S, max_batch_size=1, http_port=0)
    sleepers_name = await sleeper.ready()
    reader = Reader()
    async with Client(redis_url, queue="q") as client:
        request = GenerateRequest(prompt="ECHO 40 TICK 30 SIGNED")
        async with client.stream(request) as tokens:
            reading = asyncio.create_task(reader.read(tokens))
            await eventually(lambda: len(reader.text.split()) >= 5, "five tokens")
            slept_at_ms = now_ms(raw)
            sleeper.signal(signal.SIGSTOP)
            heir = launch(lease_s=LEASE_S)
            name = await heir.ready()
            async with asyncio.timeout(60):
                await reading
            await eventually(lambda: now_ms(raw) > slept_at_ms + 3000 * LEASE_S, "three leases")
            logged = log_of(raw, tokens.id)
            sleeper.signal(signal.SIGCONT)
    # It learns that it has lost the request: its one row is free, and it is as good as any other now.
    heir.end()
    again = await end(broker, (await submit(broker, ["again"]))[0])
    assert (again.text, again.worker) == ("again", sleepers_name)
    answer = await end(broker, tokens.id)
    assert (answer.state, answer.worker, answer.attempt, answer.of) == ("done", name, 2, 3)
    assert reader.restarts == 1
    assert (reader.text, reader.epochs) == (answer.text, {"3"})
    assert log_of(raw, tokens.id) == logged, "nothing was added to what stood"
    await eventually(lambda: sleeper.metric("request_success_total") == 1, "the count of the last one")
    await eventually(lambda: sleeper.metric("leases_lost_total") == 1, "the count of the lost one")
    found = await record(broker, tokens.id)
    assert (found.crashes, found.solo_losses) == (1, 0)


async def test_a_step_that_holds_the_interpreter_for_less_than_a_lease_costs_nothing(
    broker: Broker, launch: Launch, raw: redis.Redis
) -> None:
    crew = [launch(lease_s=LEASE_S) for _ in range(2)]
    for worker in crew:
        await worker.ready()
    (rid,) = await submit(broker, [f"ECHO 6 BLOCK@3:{0.8 * LEASE_S:.2f} SIGNED"], stream=True)
    answer = await end(broker, rid)
    assert (answer.state, answer.attempt, answer.of) == ("done", 1, 1)
    assert (await record(broker, rid)).crashes == 0


async def test_one_that_holds_it_for_longer_loses_the_request_but_tells_nothing_twice(
    broker: Broker, launch: Launch, redis_url: str, raw: redis.Redis
) -> None:
    crew = [launch(lease_s=LEASE_S) for _ in range(2)]
    for worker in crew:
        await worker.ready()
    async with Client(redis_url, queue="q") as client:
        # It holds up whoever runs it. The second one is lost too, unless its lease was longer, with nobody
        # left to sweep; two tries are enough to see what becomes of the first.
        request = GenerateRequest(prompt=f"ECHO 6 BLOCK@3:{2.5 * LEASE_S:.2f} SIGNED")

        async def held_up() -> tuple[Reader, str, End]:
            reader = Reader()
            async with client.stream(request, retry=Retry(attempts=2)) as tokens:
                with contextlib.suppress(GenerationFailed):
                    await reader.read(tokens)
            return reader, tokens.id, await end(broker, tokens.id)

        reader, rid, answer = await held_up()
        if answer.attempt == 1:  # the whole machine stood still meanwhile: nobody could take it away
            reader, rid, answer = await held_up()
    assert answer.attempt == 2
    if answer.state == "done":
        assert (reader.text, reader.epochs) == (answer.text, {"3"})
    else:
        assert answer.error is not None
        assert "its worker was lost" in answer.error.message
        assert len(reader.epochs) <= 1
    places = [place for place, _ in log_of(raw, rid)]
    assert places[-1].endswith("-1")
    assert sum(place.endswith("-0") for place in places) == 2, "two starts, and one end behind them"
    assert places == sorted(places, key=lambda place: tuple(map(int, place.split("-"))))
    # Both wake up, find that they have lost it, and go on.
    rids = await submit(broker, ["ECHO 5 TICK 20"] * 16)
    assert {one.attempt for one in await ends(broker, rids)} == {1}
    assert [worker.status for worker in crew] == [None, None]


@pytest.mark.parametrize(
    "fault",
    ["CRASH@8", *(pytest.param(fault, marks=pytest.mark.slow) for fault in ("OOM@8", "HANG@8"))],
)
async def test_a_request_that_takes_its_worker_down_ends_alone(
    broker: Broker, nursery: Nursery, redis_url: str, raw: redis.Redis, fault: str
) -> None:
    # Where nothing hangs, a machine that stands still must not look as if something did.
    limit = {"step_limit_s": 0.5} if fault.startswith("HANG") else {}
    crew = [await Post(nursery, broker, redis_url, **limit).fill() for _ in range(3)]
    keeping = [asyncio.create_task(post.keep()) for post in crew]
    try:
        before = await submit(broker, ["ECHO 10 TICK 10"] * 25, stream=True)
        async with Client(redis_url, queue="q") as client:
            # It takes so long to strike that others could well join it.
            ticket = await client.submit(GenerateRequest(prompt=f"ECHO 9 TICK 25 {fault}"))
            after = await submit(broker, ["ECHO 10 TICK 10"] * 500)
            with pytest.raises(GenerationFailed, match="workers die of this request") as caught:
                await client.result(ticket.id)
            assert not caught.value.retryable
        answers = await ends(broker, before + after)
        # It cost so many workers, and no more.
        await eventually(lambda: sum(len(post.losses) for post in crew) >= 4, "the last worker's end")
        assert sum(len(post.losses) for post in crew) == 4
    finally:
        for task in keeping:
            task.cancel()
        await asyncio.gather(*keeping, return_exceptions=True)
        for post in crew:
            post.worker.end()
    poison = await record(broker, ticket.id)
    # Twice in company, since the first loss says nothing about one of them; then alone.
    assert (poison.state, poison.attempts, poison.crashes, poison.solo_losses) == ("dead", 4, 4, 2)
    assert {answer.text for answer in answers} == {" ".join(f"tok{i}" for i in range(10))}
    if fault.startswith("CRASH"):
        held = sorted(count for post in crew for count in post.losses)
        assert held[:2] == [1, 1], "what ran alone had no company, though there was enough of it"
        assert held[2] > 1, "and before that it had"
    innocents = await broker.status(before + after, "default")
    assert all(one is not None and one.crashes <= 2 for one in innocents)
    (letter,) = dead_of(raw)
    assert letter["rid"].decode() == ticket.id
    assert "payload" not in letter, "nobody has asked for prompts in the dead letters"
    assert_drained(raw)


@pytest.fixture
def supervisor(redis_url: str) -> Iterator[subprocess.Popen[bytes]]:
    """A supervisor of three workers; told to end after the test, which it must do in order."""
    settings = {"REDIS_URL": redis_url, "QUEUE": "q", "ENGINE": "scripted", "WORKERS": "3"}
    environment = os.environ | {f"STREAMFLEET_{name}": value for name, value in settings.items()}
    command = [sys.executable, "-m", "streamfleet_worker"]
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as process:
        yield process
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.slow
async def test_under_a_supervisor_too(
    broker: Broker, supervisor: subprocess.Popen[bytes], raw: redis.Redis
) -> None:
    await eventually_so(lambda: _serve(broker, 3), "three workers")
    (poison,) = await submit(broker, ["ECHO 9 TICK 25 CRASH@8"])
    rids = await submit(broker, ["ECHO 10 TICK 10"] * 49)
    assert {answer.state for answer in await ends(broker, [poison, *rids])} == {"dead", "done"}
    found = await record(broker, poison)
    assert (found.state, found.crashes, found.solo_losses) == ("dead", 4, 2)
    assert [letter["rid"].decode() for letter in dead_of(raw)] == [poison]
    assert supervisor.poll() is None
    assert_drained(raw)


async def _serve(broker: Broker, count: int) -> bool:
    return len(await broker.cards()) == count


class Post:
    """A worker's place, filled again as a supervisor does it: what its worker held goes back first."""

    def __init__(self, nursery: Nursery, broker: Broker, url: str, **settings: float) -> None:
        self._nursery = nursery
        self._broker = broker
        self._url = url
        self._settings = settings
        self._name = ""
        self.worker: WorkerProcess
        self.losses: list[int] = []
        """How much each of its workers held when it was lost, unless it gave that back itself."""

    async def fill(self) -> Post:
        self.worker = self._nursery.worker(self._url, max_batch_size=8, **self._settings)
        self._name = await self.worker.ready()
        return self

    async def keep(self) -> None:
        while True:
            await self._ended()
            self.losses.append((await self._broker.hand_back(self._name, crashed=True)).requests)
            await self.fill()

    async def _ended(self) -> None:
        while self.worker.status is None:  # noqa: ASYNC110 (a process has no event for us)
            await asyncio.sleep(0.01)


async def test_idle_a_worker_takes_hardly_any_time(launch: Launch, raw: redis.Redis) -> None:
    worker = launch()
    await worker.ready()
    reads = calls_of(raw, "xreadgroup")
    await eventually(lambda: calls_of(raw, "xreadgroup") > reads, "a look for work")
    began, cpu_s, reads = now_ms(raw), worker.cpu_s(), calls_of(raw, "xreadgroup")
    await eventually(lambda: now_ms(raw) > began + 2500, "some time")
    assert calls_of(raw, "xreadgroup") > reads, "it goes on looking"
    assert worker.cpu_s() - cpu_s < 0.02 * (now_ms(raw) - began) / 1000


async def test_told_to_end_an_idle_worker_does_not_wait_for_its_drain_timeout(
    broker: Broker, launch: Launch
) -> None:
    worker = launch(drain_timeout_s=3600)
    await worker.ready()
    worker.signal(signal.SIGTERM)
    assert await worker.ended() == 0
    assert await broker.cards() == []


async def test_told_to_end_a_busy_worker_hands_over_what_it_cannot_finish(
    broker: Broker, launch: Launch
) -> None:
    leaver = launch(drain_timeout_s=0.3)
    await leaver.ready()
    rids = await submit(broker, ["ECHO 60 TICK 20"] * 6)

    async def all_run() -> bool:
        return (await broker.depth()).running == 6

    await eventually_so(all_run, "a batch")
    stayer = launch()
    name = await stayer.ready()
    leaver.signal(signal.SIGTERM)
    assert await leaver.ended() == 0
    for answer in await ends(broker, rids):
        assert (answer.state, answer.worker, answer.attempt) == ("done", name, 2)
    for rid in rids:
        assert (await record(broker, rid)).crashes == 0, "a drain is nobody's fault"
