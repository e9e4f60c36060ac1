"""Peers of other versions: one older or newer is understood, all others are refused by name."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest

from gated_engine import GatedEngine
from hired import Hired
from streamfleet_common import codec
from streamfleet_common.cards import Card, Limits
from streamfleet_common.errors import InvalidRequest, Undecodable
from streamfleet_common.message import Message
from streamfleet_common.schemas import Delta, End, Envelope, GenerateRequest, Sampling
from streamfleet_producer import Client
from wire import peer

TESTS = Path(__file__).parents[1]
PATIENCE_S = 60
N = codec.VERSION


async def started(role: str, version: int, url: str) -> Process:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return await asyncio.create_subprocess_exec(
        *(sys.executable, str(TESTS / "wire" / "peer.py"), role, str(version), url),
        stdin=PIPE,
        stdout=PIPE,
        env={**os.environ, "PYTHONPATH": path},
    )


async def client_of(version: int, url: str) -> dict[str, Any]:
    """What a client of another version tells of its requests."""
    process = await started("client", version, url)
    async with asyncio.timeout(PATIENCE_S):
        out, _ = await process.communicate()
    told: dict[str, Any] = json.loads(out)
    return told


@asynccontextmanager
async def worker_of(version: int, url: str) -> AsyncIterator[None]:
    """A worker of another version."""
    process = await started("worker", version, url)
    assert process.stdout is not None
    try:
        async with asyncio.timeout(PATIENCE_S):
            while (line := await process.stdout.readline()) != b"ready\n":
                assert line, "the worker ended"  # else a line of its log
        yield
    finally:
        async with asyncio.timeout(PATIENCE_S):
            await process.communicate(b"")
    assert process.returncode == 0


UNDERSTOOD = {
    "models": ["m"],
    "result": "tok0 tok1",
    "text": "tok0 tok1 tok2",
    "usage": 3,
    "cancel": "cancelled",
    "status": "cancelled",
}


# --- on a live fleet


async def test_a_newer_client_is_served(redis_url: str) -> None:
    hired = await Hired(redis_url, "w1", GatedEngine(model="m")).start()
    try:
        told = await client_of(N + 1, redis_url)
    finally:
        await hired.dismiss()
    del told["id"]
    assert told == UNDERSTOOD


async def test_a_newer_worker_serves(redis_url: str) -> None:
    async with worker_of(N + 1, redis_url):
        told = await peer.client(redis_url)
    del told["id"]
    assert told == UNDERSTOOD


async def test_a_client_two_versions_ahead_is_refused_by_name(redis_url: str) -> None:
    hired = await Hired(redis_url, "w1", GatedEngine(model="m")).start()
    try:
        told = await client_of(N + 2, redis_url)
    finally:
        await hired.dismiss()
    assert told["models"] == []
    kind, message = told["error"]
    assert kind == "Undecodable"
    assert f"event of protocol version {N}; this side understands {N + 1}, {N + 2}, {N + 3}" in message
    # And whoever asks with our version reads why.
    async with Client(redis_url, "q") as fleet:
        assert (await fleet.status(told["id"])).state == "failed"
        with pytest.raises(Undecodable, match=f"request of protocol version {N + 2}; .* upgrade the older"):
            await fleet.result(told["id"])


async def test_a_worker_two_versions_ahead_is_refused_by_name(redis_url: str) -> None:
    async with worker_of(N + 2, redis_url):
        told = await peer.client(redis_url)
    assert told["models"] == []
    kind, message = told["error"]
    assert kind == "Undecodable"
    assert f"event of protocol version {N + 2}; this side understands " in message


# --- messages one by one

RID = "00" + "ab" * 16
ENVELOPE = Envelope(rid=RID, request=GenerateRequest(prompt="Hi", sampling=Sampling(temperature=0.5)))
CARD = Card(
    worker="w",
    queue="q",
    model="m",
    limits=Limits(max_batch_size=1, max_seq_len=2, max_queue_depth=3, max_request_bytes=4),
)
MESSAGES: list[tuple[Any, Any]] = [
    (ENVELOPE, codec.decode_envelope),
    (Delta(token_ids=(1,), texts=("a",)), codec.decode_event),
    (End(state="done"), codec.decode_event),
    (CARD, codec.decode_card),
]


def of_version(message: Any, version: int, *places: str) -> bytes:
    """The message as of this version, with an unknown field at each of these places."""
    fields = msgpack.unpackb(codec.encode(message))
    fields["v"] = version
    for place in places:
        at = fields
        for name in filter(None, place.split(".")):
            at = at[name]
        at["novelty"] = None
    packed: bytes = msgpack.packb(fields)
    return packed


@pytest.mark.parametrize(("message", "decode"), MESSAGES)
def test_a_newer_message_may_have_fields_that_we_do_not_know(message: Any, decode: Any) -> None:
    assert decode(of_version(message, N + 1, "")) == message
    with pytest.raises(InvalidRequest, match="novelty: unknown field"):
        decode(of_version(message, N, ""))


def test_a_newer_message_may_have_them_at_every_level() -> None:
    places = ("", "request", "request.sampling")
    assert codec.decode_envelope(of_version(ENVELOPE, N + 1, *places)) == ENVELOPE
    assert codec.decode_card(of_version(CARD, N + 1, "", "limits")) == CARD


def test_a_newer_message_is_held_to_the_bounds_that_we_know() -> None:
    fields = {"rid": RID, "novelty": 1, "request": {"prompt": "Hi", "max_tokens": 0}}
    with pytest.raises(InvalidRequest, match="max_tokens"):
        codec.decode_envelope(msgpack.packb({"v": N + 1, **fields}))


@pytest.mark.parametrize(("message", "decode"), MESSAGES)
def test_an_older_message_is_read_with_the_defaults_of_what_it_lacks(
    message: Any, decode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = codec.encode(message)
    assert set(msgpack.unpackb(older)) < set(type(message).model_fields) | {"v"}
    monkeypatch.setattr(codec, "VERSION", N + 1)
    assert decode(older) == message
    # What an older peer sends and nobody knows is a mistake: no field is dropped while it is understood.
    with pytest.raises(InvalidRequest, match="novelty: unknown field"):
        decode(of_version(message, N, ""))


@pytest.mark.parametrize("ours", [1, 2, 5])
@pytest.mark.parametrize(("message", "decode"), MESSAGES)
def test_all_others_are_refused_by_name(
    message: Any, decode: Any, ours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec, "VERSION", ours)
    for version in range(9):
        data = of_version(message, version)
        if version >= 1 and abs(version - ours) <= 1:
            assert decode(data) == message
        else:
            with pytest.raises(Undecodable, match=f"of protocol version {version};") as caught:
                decode(data)
            understood = [str(one) for one in (ours - 1, ours, ours + 1) if one >= 1]
            assert f"understands {', '.join(understood)}:" in str(caught.value)


def test_only_what_has_no_default_must_be_sent() -> None:
    """Of what messages are made of: a field without a default could never be added."""
    kinds: dict[str, type[Message]] = {
        "envelope": Envelope,
        "generate": GenerateRequest,
        "end": End,
        "card": Card,
    }
    required = {
        name: sorted(field for field, about in kind.model_fields.items() if about.is_required())
        for name, kind in kinds.items()
    }
    assert required == {
        "envelope": ["request"],
        "generate": [],
        "end": ["state"],
        "card": ["limits", "model", "queue", "worker"],
    }
