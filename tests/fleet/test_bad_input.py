"""Whatever comes in, its sender gets a typed error that says what to do, and the workers serve on."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import msgpack
import pytest
import redis.asyncio

from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.errors import (
    BrokerUnavailable,
    InvalidRequest,
    ModelNotFound,
    RequestNotFound,
    TooLong,
)
from streamfleet_common.schemas import Envelope
from streamfleet_common.submissions import Submission
from streamfleet_producer import Client, GenerateRequest, Sampling

pytestmark = pytest.mark.slow  # a real fleet; what is refused where has tests of its own


@pytest.fixture(autouse=True)
async def _serves_on(fleet: Client) -> AsyncIterator[None]:
    """After each of these, a good request is answered as before, and nothing is left in the queue."""
    good = GenerateRequest(prompt="def good(self):", max_tokens=5)
    before = await fleet.run(good, timeout=60)
    yield
    after = await fleet.run(good, timeout=60)
    assert after.token_ids == before.token_ids
    assert (await fleet.depth()).open == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": ""}, "prompt is empty"),
        ({"prompt": " \n"}, "prompt is empty"),
        ({"prompt_token_ids": []}, "prompt_token_ids is empty"),
        ({"messages": []}, "messages is empty"),
        ({}, "exactly one of prompt, prompt_token_ids and messages"),
        ({"prompt": "a", "prompt_token_ids": [5]}, "exactly one"),
        ({"prompt": "a", "max_tokens": -1}, "integer from 1 to 32768"),
        ({"prompt": "a", "max_tokens": 0}, "integer from 1 to 32768"),
        ({"prompt": "a", "max_tokens": "7"}, "integer from 1 to 32768"),
        ({"prompt": "a", "sampling": {"temperature": float("nan")}}, "finite number"),
        ({"prompt": "a", "sampling": {"temperature": -0.1}}, "greater than or equal to 0"),
        ({"prompt": "a", "sampling": {"top_p": 1.1}}, "less than or equal to 1"),
        ({"prompt": "a", "ignore_eos_token": True}, "ignore_eos_token: unknown field"),
        ({"prompt": "a", "stop": [""]}, "at least 1"),
        ({"prompt": "a", "stop": ["x"] * 9}, "at most 8"),
        ({"prompt": "x" * 2_000_000}, "at most 200000"),
        ({"prompt_token_ids": [5, -1]}, "prompt_token_ids.1"),
    ],
    ids=str,
)
async def test_refused_where_it_is_made(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        GenerateRequest(**fields)
    assert said in str(refusal.value)


async def test_every_problem_is_listed() -> None:
    fields: dict[str, Any] = {"prompt": "a", "sampling": {"temperature": float("nan")}, "tempersture": 1}
    with pytest.raises(InvalidRequest) as refusal:
        GenerateRequest(max_tokens=-1, **fields)
    assert len(refusal.value.problems) == 3


async def test_prompt_and_answer_over_the_context(fleet: Client) -> None:
    # The workers hold 256 tokens: 8 + 248 fit, 8 + 249 do not.
    fits = await fleet.run(GenerateRequest(prompt_token_ids=[5] * 8, max_tokens=248), timeout=60)
    assert fits.usage.prompt_tokens == 8
    with pytest.raises(TooLong) as refusal:
        await fleet.run(GenerateRequest(prompt_token_ids=[5] * 8, max_tokens=249))
    details = refusal.value.details
    assert (details["prompt_tokens"], details["max_tokens"], details["limit"]) == (8, 249, 256)
    assert "ask for at most 248" in str(refusal.value)


async def test_text_over_the_context_is_found_by_the_worker(fleet: Client) -> None:
    with pytest.raises(TooLong) as refusal:
        await fleet.run(GenerateRequest(prompt="import " * 500, max_tokens=5), timeout=60)
    assert refusal.value.details["limit"] == 256
    assert refusal.value.details["prompt_tokens"] > 256


@pytest.mark.parametrize("by_hand", [False, True], ids=["client", "by hand"])
async def test_token_outside_the_vocabulary(fleet: Client, fleet_url: str, by_hand: bool) -> None:
    request = GenerateRequest(prompt_token_ids=[5, 1024], max_tokens=5)

    async def ask() -> None:
        if by_hand:  # past the client's own check
            await fleet.result(await submit(fleet_url, Envelope(request=request)), timeout=60)
        else:
            await fleet.run(request)

    with pytest.raises(InvalidRequest) as refusal:
        await ask()
    assert "1024" in str(refusal.value)


async def test_wrong_model_and_unknown_queue(fleet: Client, fleet_url: str) -> None:
    with pytest.raises(ModelNotFound, match="gpt-9"):
        await fleet.run(GenerateRequest(prompt="a", model="gpt-9"))
    async with Client(fleet_url, queue="nowhere") as lost:
        with pytest.raises(ModelNotFound, match="tiny"):
            await lost.run(GenerateRequest(prompt="a"))


async def test_request_over_the_byte_limit(fleet: Client) -> None:
    # 100,000 characters of four bytes each: within the count of characters, over 256 KiB.
    with pytest.raises(InvalidRequest, match="262144"):
        await fleet.run(GenerateRequest(prompt="😀" * 100_000))


async def test_unknown_id(fleet: Client) -> None:
    for ask in (fleet.status, fleet.cancel, fleet.result):
        with pytest.raises(RequestNotFound):
            await ask("00" * 17)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02\x03",
        b"\x91" * 100_000,
        msgpack.packb({"v": 9}),
        msgpack.packb({"v": 1}),
        msgpack.packb({"v": 1, "request": {"kind": "generate", "prompt": "a", "max_tokens": float("nan")}}),
        msgpack.packb({"v": 1, "request": {"kind": "paint", "prompt": "a"}}),
    ],
    ids=lambda payload: payload[:12].hex() or "empty",
)
async def test_submitted_bytes_that_are_no_request(fleet: Client, fleet_url: str, payload: bytes) -> None:
    rid = await submit(fleet_url, Envelope(request=GenerateRequest(prompt="a")), payload)
    with pytest.raises(InvalidRequest):
        await fleet.result(rid, timeout=60)


async def test_garbage_in_the_streams_ends_in_the_dead_letter(fleet: Client, fleet_url: str) -> None:
    async with redis.asyncio.Redis.from_url(fleet_url) as by_hand:
        tag = "{q:tiny:0}"
        before = await by_hand.xlen(f"{tag}:dead")
        entries: list[dict[Any, Any]] = [
            {"junk": "x"},
            {"r": "", "p": ""},
            {"r": b"\xff\xfe", "p": b"\xc1"},
            {"r": "00" * 17, "p": "no such record"},
            {"r": "a|b\nc", "p": "x" * 300_000},
        ]
        for lane in ("high", "normal", "bulk"):
            for fields in entries:
                await by_hand.xadd(f"{tag}:s:{lane}", fields)
        async with asyncio.timeout(60):
            while await by_hand.xlen(f"{tag}:dead") < before + 15:  # noqa: ASYNC110 (the workers do it)
                await asyncio.sleep(0.01)
        for lane in ("high", "normal", "bulk"):
            assert await by_hand.xlen(f"{tag}:s:{lane}") == 0
            assert (await by_hand.xpending(f"{tag}:s:{lane}", "w"))["pending"] == 0
        assert await by_hand.xlen(f"{tag}:dead") == before + 15
        # What was in them is nobody's business but its sender's.
        letters: Any = await by_hand.xrange(f"{tag}:dead")
        assert not any(b"no such record" in value for _, letter in letters for value in letter.values())


async def test_no_redis() -> None:
    async def ask() -> None:
        async with Client("redis://127.0.0.1:1/0", queue="tiny") as nobody:
            await nobody.run(GenerateRequest(prompt="a"))

    with pytest.raises(BrokerUnavailable, match="cannot be reached"):
        await ask()


async def test_greedy_with_top_p_at_both_ends(fleet: Client) -> None:
    expected = await fleet.run(GenerateRequest(prompt="def f(", max_tokens=8))
    for top_p in (1.0, 0.0):
        sampling = Sampling(temperature=0.0, top_p=top_p)
        answer = await fleet.run(GenerateRequest(prompt="def f(", max_tokens=8, sampling=sampling))
        assert answer.token_ids == expected.token_ids


async def submit(url: str, envelope: Envelope, payload: bytes | None = None) -> str:
    """Submit as any client could, past the checks of ours; gives the id."""
    connections = Connections.open(url)
    made = Submission.of(envelope)
    submission = made if payload is None else dataclasses.replace(made, payload=payload)
    try:
        (outcome,) = await Broker(connections, "tiny").submit([submission])
    finally:
        await connections.close()
    assert outcome.outcome == "accepted"
    return envelope.rid
