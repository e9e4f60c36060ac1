"""Pause, resume, drain and move with real workers, as functions and as somebody types them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import redis
from typer.testing import CliRunner, Result

from broker_parts import card, submission
from command import environment
from gated_engine import GatedEngine
from hired import Hired, ends, eventually_so, submit
from server_view import T, assert_drained, now_ms, waiting_in
from streamfleet_common.connections import Connections
from streamfleet_common.errors import DeadlineExceeded, InvalidRequest, ModelNotFound, RequestNotFound
from streamfleet_producer.cli.app import app
from streamfleet_producer.operations import control, lanes
from streamfleet_producer.operations.operator_broker import OperatorBroker


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
async def broker(redis_url: str) -> AsyncIterator[OperatorBroker]:
    connections = Connections.open(redis_url)
    yield OperatorBroker(connections, "q")
    await connections.close()


def typed(url: str, *arguments: str) -> Result:
    return CliRunner().invoke(app, arguments, env=environment(STREAMFLEET_REDIS_URL=url))


async def test_a_paused_queue_goes_on_with_what_it_has(broker: OperatorBroker, redis_url: str) -> None:
    hired = await Hired(redis_url, "w1", GatedEngine(is_open=False)).start()
    before = await submit(broker, ["a b c", "d e f"])
    paused = await control.pause(broker)
    assert (paused.is_paused, paused.has_changed, paused.queued + paused.running) == (True, True, 2)
    assert not (await control.pause(broker)).has_changed
    (refused,) = await broker.submit([submission()])
    assert (refused.outcome, refused.reason) == ("full", "paused")
    hired.engine.is_open = True
    assert {end.state for end in await ends(broker, before)} == {"done"}
    resumed = await control.resume(broker)
    assert (resumed.is_paused, resumed.has_changed) == (False, True)
    assert not (await control.resume(broker)).has_changed
    assert [end.state for end in await ends(broker, await submit(broker, ["g"]))] == ["done"]
    await hired.dismiss()


async def test_a_worker_that_drains_is_waited_for(broker: OperatorBroker, redis_url: str, raw: Any) -> None:
    first = await Hired(redis_url, "w1", GatedEngine(is_open=False), lease_s=1.5).start()
    running = await submit(broker, ["a b c"])
    await eventually_so(lambda: _has_work(first), "a request that runs")
    second = await Hired(redis_url, "w2", GatedEngine(), lease_s=1.5).start()
    asked = await control.drain(broker, "w1")
    assert (asked.is_first, asked.others) == (True, ("w2",))
    assert not (await control.drain(broker, "w1")).is_first
    with pytest.raises(DeadlineExceeded, match="w1"):
        await control.drained(broker, "w1", within_s=0.0)
    first.engine.is_open = True
    await control.drained(broker, "w1", within_s=60.0)
    await first.ended()
    assert [end.state for end in await ends(broker, running)] == ["done"]
    # Its mark goes with its card, and the other one goes on.
    assert raw.hkeys(f"{T}:workers") == [b"w2"]
    assert not [field for field in raw.hkeys(f"{T}:control") if field.startswith(b"drain:")]
    assert [end.state for end in await ends(broker, await submit(broker, ["d"]))] == ["done"]
    await first.dismiss()
    await second.dismiss()


async def _has_work(hired: Hired) -> bool:
    return bool(hired.engine.added)


async def test_a_worker_that_is_not_there_is_refused(broker: OperatorBroker, raw: Any) -> None:
    await broker.announce(card("w1"))
    raw.hset(f"{T}:control", mapping={"drain:old": "yes", "drain:held-up": now_ms(raw)})
    with pytest.raises(RequestNotFound, match="those that are: w1") as caught:
        await control.drain(broker, "w3")
    assert caught.value.known == ["w1"]
    # Somebody wrote the one by hand, for a worker long gone; the other may come back.
    marks = {field for field in raw.hkeys(f"{T}:control") if field.startswith(b"drain:")}
    assert marks == {b"drain:held-up"}
    for number in range(2, 14):
        await broker.announce(card(f"x{number:02}"))
    with pytest.raises(RequestNotFound, match=r"w1, x02, .*x10 and 3 more$") as caught:
        await control.drain(broker, "w3")
    assert len(caught.value.known) == 13


@pytest.mark.parametrize(
    "act",
    [
        control.pause,
        control.resume,
        lambda broker: control.drain(broker, "w"),
        lambda broker: lanes.move(broker, to="bulk", source="normal"),
    ],
)
async def test_a_queue_that_nobody_announced_is_refused(broker: OperatorBroker, raw: Any, act: Any) -> None:
    with pytest.raises(ModelNotFound, match="queue 'q'"):
        await act(broker)
    assert raw.keys("*") == []


async def test_what_waits_is_moved_under_a_worker(broker: OperatorBroker, redis_url: str, raw: Any) -> None:
    hired = await Hired(redis_url, "w1", GatedEngine(is_open=False)).start()
    many = await submit(broker, [f"p{number}" for number in range(40)])
    await eventually_so(lambda: _has_work(hired), "a request that runs")
    moved = await lanes.move(broker, to="high", source="normal", limit=10)
    # Those that the worker had by then are left with it.
    assert len(moved.moved) + len(moved.left.get("running", [])) == 10
    rest = await lanes.move(broker, to="bulk", source="normal")
    waiting = set(waiting_in(raw, "high")) | set(waiting_in(raw, "bulk"))
    assert waiting <= {*moved.moved, *rest.moved}
    again = await lanes.move(broker, to="high", rids=many[-2:])
    assert {one.outcome for one in again.moves} <= {"moved", "running"}
    hired.engine.is_open = True
    assert {end.state for end in await ends(broker, many)} == {"done"}
    assert sorted(hired.engine.added) == sorted(set(hired.engine.added)), "one ran twice"
    await hired.dismiss()
    assert_drained(raw)


async def test_which_are_moved(broker: OperatorBroker, raw: Any) -> None:
    await broker.announce(card("w1", max_queue_depth=100))
    acme = [submission(tenant="acme") for _ in range(4)]
    other = [submission(tenant="beta") for _ in range(3)]
    await broker.submit([*other[:1], *acme, *other[1:]])
    moved = await lanes.move(broker, to="bulk", source="normal", tenant="acme", limit=3)
    assert moved.moved == [one.envelope.rid for one in acme[:3]]
    assert (moved.left, moved.words) == ({}, "")
    assert waiting_in(raw, "bulk") == moved.moved
    foreign = await lanes.move(broker, to="high", tenant="acme", rids=[other[0].envelope.rid])
    assert (foreign.moved, foreign.words) == ([], "1 not to be found")
    assert len((await lanes.move(broker, to="bulk", source="normal")).moved) == 4


@pytest.mark.parametrize(
    "wanted",
    [
        {"to": "bulk"},
        {"to": "bulk", "source": "bulk"},
        {"to": "bulk", "rids": ["x"]},
        {"to": "bulk", "source": "normal", "tenant": "a b"},
    ],
    ids=str,
)
async def test_what_cannot_be_moved(broker: OperatorBroker, wanted: dict[str, Any]) -> None:
    await broker.announce(card("w1"))
    with pytest.raises(InvalidRequest):
        await lanes.move(broker, **wanted)


def test_as_somebody_types_it(raw: Any, redis_url: str) -> None:
    one, two = submission(), submission()

    async def prepare() -> None:
        connections = Connections.open(redis_url)
        broker = OperatorBroker(connections, "q")
        await broker.announce(card("w1", max_queue_depth=100), life_ms=600_000)
        await broker.submit([one, two])
        await connections.close()

    asyncio.run(prepare())
    paused = typed(redis_url, "pause", "q")
    assert paused.exit_code == 0
    assert paused.stdout.startswith("queue q is paused: it refuses new requests; 2 waiting and 0 running")
    (row,) = json.loads(typed(redis_url, "queues", "--json").stdout)
    assert (row["state"], row["queued"], row["draining"]) == ("paused", 2, 0)
    drain = typed(redis_url, "drain", "q", "w1", "--json")
    assert json.loads(drain.stdout)["others"] == []
    assert json.loads(typed(redis_url, "queues", "--json").stdout)[0]["draining"] == 1
    late = typed(redis_url, "drain", "q", "w1", "--wait", "--timeout", "0")
    assert late.exit_code == 124
    assert "w1 drains already" in late.stdout
    assert json.loads(typed(redis_url, "resume", "q", "--json").stdout)["has_changed"]
    moved = typed(redis_url, "move", "q", "--from", "normal", "--to", "bulk", "--limit", "1")
    assert (moved.exit_code, moved.stdout) == (0, "moved 1 to bulk\n")
    rids = [one.envelope.rid, two.envelope.rid, "00" + "f" * 32]
    named = typed(redis_url, "move", "q", "--to", "bulk", *rids)
    assert (named.exit_code, named.stdout) == (1, "moved 1 to bulk\n")
    assert named.stderr == "left where they are: 1 there already, 1 not to be found\n"
    for arguments, status in (
        (("move", "q", "--to", "bulk"), 2),
        (("move", "q", "--from", "nowhere", "--to", "bulk"), 2),
        (("move", "q", "--from", "normal"), 2),
        (("drain", "q", "w9"), 5),
        (("pause", "nobodys"), 5),
    ):
        assert typed(redis_url, *arguments).exit_code == status, arguments


def test_dead_letters_in_words(raw: Any, redis_url: str) -> None:
    call = environment(STREAMFLEET_REDIS_URL=redis_url)
    raw.hset("streamfleet:queues", "q", 1)
    one = submission("a secret prompt", tenant="acme")
    names = ("rid", "why", "tenant", "lane", "accepted", "attempts", "crashes", "solo", "worker", "bytes")
    values = (
        one.envelope.rid,
        "died of it",
        "acme",
        "bulk",
        1_700_000_000_000,
        4,
        4,
        2,
        "w1",
        len(one.payload),
    )
    told: dict[str, Any] = dict(zip(names, values, strict=True))
    raw.xadd(f"{T}:dead", told | {"payload": one.payload}, id="1700000001000-0")
    raw.xadd(f"{T}:dead", told, id="1700000002000-0")

    def said(*arguments: str, status: int = 0) -> Result:
        done = CliRunner().invoke(app, ["dead", *arguments], env=call)
        assert done.exit_code == status, done.output
        return done

    words = said("show", "1700000001000-0").stdout
    for line in (
        f"request   {one.envelope.rid}",
        "accepted  2023-11-14 22:13:20",
        "buried    2023-11-14 22:13:21",
        "attempts  4: 4 workers were lost, 2 of them ran nothing else",
        f"payload   {len(one.payload)} bytes, kept: --payload shows it, `dead replay` sends it again",
    ):
        assert line in words.splitlines()
    assert "secret" not in words
    assert '"prompt": "a secret prompt"' in said("show", "1700000001000-0", "--payload").stdout
    whole = json.loads(said("show", "1700000001000-0", "--payload", "--json").stdout)
    assert whole["envelope"]["request"]["prompt"] == "a secret prompt"
    assert "envelope" not in json.loads(said("show", "1700000001000-0", "--json").stdout)
    assert "not kept" in said("show", "1700000002000-0").stdout
    said("show", "1700000002000-0", "--payload", status=2)
    first = said("list", "--limit", "1")
    assert first.stderr == "there are more: --after 1700000001000-0\n"
    second = said("list", "--limit", "1", "--after", "1700000001000-0")
    assert (len(second.stdout.splitlines()), second.stderr) == (2, "")
    assert said("list", "--after", "1700000002000-0").stderr == "no dead letters behind 1700000002000-0\n"
