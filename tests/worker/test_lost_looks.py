"""Workers that were given work whose reply was lost, and have no room for it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import cast

import redis

from eventually import eventually
from gated_engine import GatedEngine
from hired import Hired, ends, events, eventually_so, record, submit, text_of
from hired_view import echo
from streamfleet_common.broker import Broker
from streamfleet_common.keys import Stream
from streamfleet_common.schemas import Start

Hire = Callable[..., Awaitable[Hired]]


async def take_in_its_name(broker: Broker, owner: str, stream: Stream) -> None:
    """What the server does for a look of this worker, whose reply is lost."""
    taken = await broker.take(owner, Start(worker=owner, model="m"), streams=[stream], count=1)
    assert len(taken.started) == 1


async def test_a_full_worker_finds_what_it_has_begun_before_that_counts_as_lost(
    broker: Broker, hire: Hire
) -> None:
    hired = await hire(GatedEngine(is_open=False, max_batch_size=1), lease_s=2.0)
    running, unheard = await submit(broker, ["ECHO 2"]), await submit(broker, ["ECHO 2"])
    await eventually(lambda: hired.engine.added == running, "a full batch")
    await take_in_its_name(broker, "w1", "normal")
    await eventually(lambda: hired.engine.added == running + unheard, "what it had not heard of")
    hired.engine.is_open = True
    for answer in await ends(broker, running + unheard):
        assert (answer.state, answer.attempt) == ("done", 1)
    assert (await record(broker, unheard[0])).crashes == 0


async def test_what_a_server_rolled_back_gives_out_again_goes_on_as_it_was(
    broker: Broker, hire: Hire, raw: redis.Redis
) -> None:
    hired = await hire(GatedEngine(is_open=False))
    (rid,) = await submit(broker, ["ECHO 20"], stream=True)
    hired.engine.allowed = 6
    await eventually(lambda: hired.engine.taken == 6, "some tokens")

    async def are_told() -> bool:
        return text_of(await events(broker, rid)) == echo(6)

    await eventually_so(are_told, "their events")
    # As it was before the worker took it.
    state, _, place, _, _, _, *rest = cast(bytes, raw.get(broker.keys.record(rid))).split(b"|")
    waiting = [b"Q" + state[1:], b"0", place, b"", b"0", b"0", *rest]
    raw.set(broker.keys.record(rid), b"|".join(waiting))
    raw.xgroup_destroy(broker.keys.stream("normal"), "w")

    async def is_taken() -> bool:
        return (await record(broker, rid)).state == "running"

    await eventually_so(is_taken, "the second time")
    hired.engine.is_open = True
    (answer,) = await ends(broker, [rid])
    assert text_of(await events(broker, rid)) == answer.text
    assert hired.engine.added == [rid]


async def test_a_busy_worker_gives_a_suspect_back_and_runs_it_alone_later(broker: Broker, hire: Hire) -> None:
    suspect = await submit(broker, ["ECHO 2"])
    stream: Stream
    for owner, stream in (("x1", "normal"), ("x2", "normal:again")):
        await take_in_its_name(broker, owner, stream)
        assert (await broker.hand_back(owner, crashed=True)).requests == 1
    running = await submit(broker, ["ECHO 2"])
    # In its name before it is there, or it would begin with the suspect.
    await take_in_its_name(broker, "x3", "solo")
    hired = await hire(GatedEngine(is_open=False), lease_s=2.0)
    await eventually(lambda: hired.engine.added == running, "company")
    assert (await broker.hand_back("x3", crashed=False)).requests == 1
    await take_in_its_name(broker, "w1", "solo")

    async def is_back() -> bool:
        return (await record(broker, suspect[0])).state == "queued"

    await eventually_so(is_back, "its return")
    assert hired.engine.added == running
    hired.engine.is_open = True
    assert [answer.state for answer in await ends(broker, running + suspect)] == ["done", "done"]
    assert hired.engine.most_held == 1
    found = await record(broker, suspect[0])
    assert (found.crashes, found.solo_losses) == (2, 0)
