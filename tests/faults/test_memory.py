"""F8: the server runs out of memory under load, and mends by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from faults.figures import keep
from faults.load import at_rest, ended
from faults.scene import Scene, until
from hired import submit
from streamfleet_common.broker import Broker
from streamfleet_common.errors import BrokerUnavailable
from streamfleet_common.housekeeping import Housekeeping
from streamfleet_common.schemas import Envelope, GenerateRequest
from streamfleet_common.submissions import Submission
from streamfleet_worker import presence

ROWS = 8
MAXMEMORY = 16 * 1024 * 1024
PROMPT = "x" * 100_000
RESULT_TTL_MS = 1000
CARD_LIFE_MS = 400


async def used(scene: Scene) -> int:
    memory: Any = await scene.server.control.info("memory")
    return int(memory["used_memory"])


async def one_more(broker: Broker) -> str:
    """Submit a request with a large prompt; gives the reason of a refusal, or "accepted"."""
    request = GenerateRequest(prompt=PROMPT, max_tokens=1)
    submission = Submission.of(Envelope(request=request, result_ttl_ms=RESULT_TTL_MS))
    try:
        (answer,) = await broker.submit([submission])
    except BrokerUnavailable as error:
        return str(error.reason)
    return str(answer.reason) if answer.outcome == "full" else answer.outcome


async def fill(broker: Broker) -> tuple[int, str, list[float]]:
    """Submit until one is refused: how many were accepted, why, and what the next ten refusals took."""
    now = asyncio.get_running_loop().time
    count, answer = 0, "accepted"
    while answer == "accepted":
        answer = await one_more(broker)
        count += answer == "accepted"
        await asyncio.sleep(0.005)
    took = []
    for _ in range(10):
        began = now()
        assert await one_more(broker) == answer
        took.append(now() - began)
    return count, answer, took


async def test_a_crowded_server_refuses_before_it_is_full_and_heals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(presence, "ANNOUNCE_S", 0.1)
    # What a card says of memory holds as long as the card.
    monkeypatch.setitem(Housekeeping.announce.__kwdefaults__ or {}, "life_ms", CARD_LIFE_MS)
    flags = ("--maxmemory", str(MAXMEMORY))
    async with Scene(rows=ROWS, flags=flags) as scene:
        scene.hold()
        run = await submit(scene.broker, ["ECHO 9"] * 2 * ROWS, result_ttl_ms=60_000)
        before = await scene.running(run)
        count, why, took = await fill(scene.broker)
        share = await used(scene) / MAXMEMORY
        assert await scene.running(run) == before
        scene.let_go()
        records = await ended(scene.broker, run)
        # What waited is served now, its results run out, and there is room again.
        await at_rest(scene.broker)
        healed_s = await heals(scene)
    keep(
        "F8 80 %",
        f"requests of 100 kB until one is refused, maxmemory {MAXMEMORY >> 20} MiB",
        f"{count} accepted, then `full` ({why}) at {share:.0%} of it, each within {1000 * max(took):.0f} ms; "
        f"{len(records)} running ones done; taken again {healed_s:.1f} s after the queue was empty "
        f"(a card lives {CARD_LIFE_MS / 1000:g} s here)",
        "refused before it is full, within 100 ms; running ones finish; heals",
    )
    assert why == "memory"
    assert share < 1
    assert {record.state for record in records} == {"done"}
    assert {record.attempts for record in records} == {1}


async def test_a_full_server_refuses_and_heals_while_what_runs_goes_on() -> None:
    async with Scene(rows=ROWS) as scene:
        scene.hold()
        prompts = ["ECHO 9"] * 2 * ROWS
        run = await submit(scene.broker, prompts, result_ttl_ms=RESULT_TTL_MS, stream=True)
        wait = await submit(scene.broker, ["x" * 50_000] * 40, result_ttl_ms=RESULT_TTL_MS)
        before = await scene.running(run)
        full = await used(scene)
        await scene.server.control.config_set("maxmemory", full)
        count, why, took = await fill(scene.broker)
        assert await scene.running(run) == before
        scene.let_go()
        records = await ended(scene.broker, [*run, *wait])
        healed_s = await heals(scene)
    keep(
        "F8 full",
        f"maxmemory set to what is used, {2 * ROWS} streams run, {len(wait)} requests wait",
        f"{count} more accepted, then refused ({why}), each within {1000 * max(took):.0f} ms; all "
        f"{len(records)} done; taken again {healed_s:.1f} s after the last end",
        "refused within 100 ms; running ones finish; heals after the result TTL",
    )
    assert why == "out_of_memory"
    assert {record.state for record in records} == {"done"}
    assert {record.attempts for record in records} == {1}


async def heals(scene: Scene) -> float:
    """Wait until a request is taken; gives how long it took, in seconds."""

    async def taken() -> bool:
        return await one_more(scene.broker) == "accepted"

    return await until(taken)
