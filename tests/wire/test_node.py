"""A producer in JavaScript, written from docs/protocol.md, beside the Python client on the same fleet."""

from __future__ import annotations

import asyncio
import shutil
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gated_engine import GatedEngine
from hand_worker import HandWorker, delta
from hired import Hired
from streamfleet_common import codec
from streamfleet_common.errors import GenerationFailed
from streamfleet_common.scripts import Script
from streamfleet_producer import Client, Delta, GenerateRequest, StreamfleetError
from streamfleet_producer.intake import keyed_rid
from wire.node_peer import (
    NODE_FOLDER,
    PATIENCE_S,
    NodeError,
    NodePeer,
    NoNode,
    node_peer,
    node_program,
    packages,
)
from wire.page import blocks

pytestmark = pytest.mark.timeout(120)  # the packages may have to be fetched


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, their packages, and the scripts as the page and the command line have them."""
    try:
        modules = packages()
    except NoNode as error:
        pytest.skip(str(error))
    home = tmp_path_factory.mktemp("node")
    for source in NODE_FOLDER.glob("*.*"):
        shutil.copy(source, home)
    (home / "node_modules").symlink_to(modules, target_is_directory=True)
    (home / "submit.lua").write_text(blocks("lua")[0])
    (home / "cancel.lua").write_text(Script.load("cancel").text)
    return home


@pytest.fixture
async def worker(redis_url: str) -> AsyncIterator[HandWorker]:
    async with HandWorker(redis_url) as worker:
        await worker.announce()
        yield worker


@pytest.fixture
async def node(home: Path, redis_url: str) -> AsyncIterator[NodePeer]:
    async with node_peer(home, redis_url) as peer:
        yield peer


@pytest.fixture
async def fleet(redis_url: str) -> AsyncIterator[Client]:
    async with Client(redis_url, "q", silence_s=60) as fleet:
        yield fleet


def texts_of(events: list[dict[str, Any]]) -> str:
    return "".join(text for event in events if event["type"] == "delta" for text in event["texts"])


# --- with a worker as it is


async def test_it_reads_what_the_python_client_reads(redis_url: str, node: NodePeer, fleet: Client) -> None:
    hired = await Hired(redis_url, "w1", GatedEngine(model="m")).start()
    try:
        request = {"kind": "generate", "prompt": "ECHO 50 TICK 1", "max_tokens": 40, "n": 2, "logprobs": True}
        rid = "00" + "1" * 32
        theirs = [event async for event in node.read("stream", request, {"rid": rid})]
        end = await fleet.result(rid)
        async with fleet.attach(rid) as tokens:
            ours = [event async for event in tokens.events()]
    finally:
        await hired.dismiss()
    assert [event["type"] for event in theirs[:-1]] == [event.type for event in ours]
    for mine, other in zip(ours, theirs, strict=False):
        if isinstance(mine, Delta):
            same = (other.get("index", 0), other["token_ids"], other["texts"], other["logprobs"])
            assert same == (mine.index, list(mine.token_ids), list(mine.texts), list(mine.logprobs))
    last = theirs[-1]
    assert last["complete"]
    for choice, other in zip(end.choices, last["choices"], strict=True):
        assert choice.text == other["text"] != ""
        assert choice.finish_reason == other["finish_reason"] == "length"
        texts = [one for one in theirs if one["type"] == "delta" and one.get("index", 0) == choice.index]
        assert texts_of(texts) == choice.text
    assert last["usage"] == end.usage.model_dump(exclude_defaults=True)


async def test_an_answer_at_once(redis_url: str, node: NodePeer, fleet: Client) -> None:
    hired = await Hired(redis_url, "w1", GatedEngine(model="m")).start()
    try:
        end = await node.call("run", {"prompt": "ECHO 3"}, {"key": "k", "lane": "high"})
        rid = keyed_rid(b"default", "k")
        assert end["choices"][0]["text"] == (await fleet.result(rid)).text == "tok0 tok1 tok2"
        # The same key is the same request; another request under it is refused.
        assert await node.call("submit", {"prompt": "ECHO 3"}, {"key": "k"}) == {
            "rid": rid,
            "outcome": "duplicate",
        }
        assert await node.call("run", {"prompt": "ECHO 3"}, {"key": "k"}) == end
        with pytest.raises(NodeError, match="conflict"):
            await node.call("submit", {"prompt": "ECHO 4"}, {"key": "k"})
        with pytest.raises(StreamfleetError, match="another request"):
            await fleet.submit(GenerateRequest(prompt="ECHO 4"), idempotency_key="k")
        embedded = await node.call("run", {"kind": "embed", "texts": ["a"]})
        assert (embedded["state"], embedded["error"]["code"]) == ("failed", "unsupported")
    finally:
        await hired.dismiss()


# --- with a worker that does what is asked of it


async def test_a_gap_is_read_from_the_log(worker: HandWorker, node: NodePeer) -> None:
    events = node.read("stream", {"prompt": "hello"})
    (work,) = await worker.take()
    assert (await anext(events))["type"] == "start"
    await worker.emit(work, delta("ab"))
    assert (await anext(events))["texts"] == ["a", "b"]
    await worker.log(work, delta("cd", 2))  # nobody is told
    await worker.log(work, delta("ef", 4))
    await worker.emit(work, delta("g", 6))
    assert texts_of([await anext(events) for _ in range(3)]) == "cdefg"
    await worker.log(work, delta("h", 7))
    await worker.finish(work, "abcdefgh")
    rest = [event async for event in events]
    assert texts_of(rest) == "h"
    assert (rest[-1]["type"], rest[-1]["complete"]) == ("end", True)


async def test_large_frames_are_read_from_the_log_and_the_record(worker: HandWorker, node: NodePeer) -> None:
    large = Delta(token_ids=(1,), texts=("x" * 20_000,))
    events = node.read("stream", {"prompt": "hello"})
    (work,) = await worker.take()
    await worker.emit(work, large)
    await worker.emit(work, delta("y", 1))
    await worker.finish(work, "x" * 20_000 + "y")
    seen = [event async for event in events]
    assert texts_of(seen) == "x" * 20_000 + "y" == seen[-1]["choices"][0]["text"]
    assert [event["type"] for event in seen] == ["start", "delta", "delta", "end"]
    answers = node.read("stream", {"prompt": "again"}, {"stream": False})
    (work,) = await worker.take()
    await worker.finish(work, "z" * 20_000)
    assert [event async for event in answers][-1]["choices"][0]["text"] == "z" * 20_000


async def test_a_lost_worker_is_told(worker: HandWorker, node: NodePeer, fleet: Client) -> None:
    rid = "00" + "2" * 32
    events = node.read("stream", {"prompt": "hello"}, {"rid": rid})
    (work,) = await worker.take()
    await worker.emit(work, delta("ab"))
    seen = [await anext(events) for _ in range(2)]
    await worker.lose(work)
    (again,) = await worker.take()
    await worker.emit(work, delta("zombie", 2))  # of the first attempt: refused
    await worker.emit(again, delta("AB"))
    await worker.finish(again, "AB")
    seen += [event async for event in events]
    assert [event["type"] for event in seen] == ["start", "delta", "restart", "start", "delta", "end"]
    assert texts_of(seen[2:]) == "AB" == (await fleet.result(rid)).text
    assert seen[-1]["complete"]


async def test_a_lost_line_is_made_good(worker: HandWorker, node: NodePeer) -> None:
    events = node.read("stream", {"prompt": "hello"})
    (work,) = await worker.take()
    await worker.emit(work, delta("a"))
    assert [(await anext(events))["type"] for _ in range(2)] == ["start", "delta"]
    await worker.cut_subscribers()
    await worker.emit(work, delta("b", 1))
    await worker.finish(work, "ab")
    rest = [event async for event in events]
    assert texts_of(rest) == "b"
    assert rest[-1]["complete"]


async def test_cancel_and_status(worker: HandWorker, node: NodePeer, fleet: Client) -> None:
    submitted = await node.call("submit", {"prompt": "hello"})
    rid = submitted["rid"]
    assert submitted["outcome"] == "accepted"
    assert await node.call("status", rid) == (await fleet.status(rid)).state == "queued"
    (work,) = await worker.take()
    assert await node.call("status", rid) == "running"
    assert await node.call("cancel", rid) == "cancelled"
    assert not await worker.finish(work, "too late")
    assert await node.call("status", rid) == (await fleet.status(rid)).state == "cancelled"
    assert await node.call("cancel", rid) == "cancelled"
    assert await node.call("cancel", "00" + "f" * 32) is None
    assert await node.call("status", "00" + "f" * 32) is None
    # What one cancels, the other hears of.
    events = node.read("stream", {"prompt": "bye"}, {"rid": "00" + "3" * 32})
    await worker.take()
    assert (await anext(events))["type"] == "start"
    assert await fleet.cancel("00" + "3" * 32) == "cancelled"
    (last,) = [event async for event in events]
    assert (last["state"], last["error"]["code"]) == ("cancelled", "cancelled")


async def test_what_is_left_and_joined(worker: HandWorker, node: NodePeer) -> None:
    submitted = await node.call("submit", {"prompt": "hello"}, {"stream": True})
    (work,) = await worker.take()
    log = worker.broker.keys.log(work.rid)
    async with worker.redis.pipeline(transaction=False) as pipe:
        for place in range(1, 1501):  # more than a page of the log
            frame = f"{work.delivery.epoch}-{place} ".encode() + codec.encode(delta("x", place))
            pipe.xadd(log, {"f": frame}, id=f"{work.delivery.epoch}-{place}")
        await pipe.execute()
    work.seq = 1500
    await worker.finish(work, "x" * 1500)
    seen = [event async for event in node.read("attach", submitted["rid"])]
    assert (len(seen), texts_of(seen)) == (1502, "x" * 1500)
    assert seen[-1]["complete"]


async def test_a_reader_comes_back_to_where_he_left(
    worker: HandWorker, node: NodePeer, home: Path, redis_url: str
) -> None:
    rid = "00" + "5" * 32
    first = node.read("stream", {"prompt": "hello"}, {"rid": rid})
    (work,) = await worker.take()
    await worker.emit(work, delta("ab"))
    await worker.emit(work, delta("cd", 2))
    seen = [await anext(first) for _ in range(2)]
    assert (seen[1]["texts"], seen[1]["place"]) == (["a", "b"], "1-1")
    async with node_peer(home, redis_url) as other:
        later = other.read("attach", rid, "1-1")
        assert (await anext(later))["texts"] == ["c", "d"]
        await worker.finish(work, "abcd")
        assert [event["type"] async for event in later] == ["end"]
    assert texts_of([event async for event in first]) == "cd"


async def test_refusals(worker: HandWorker, node: NodePeer, home: Path, redis_url: str) -> None:
    await worker.announce(max_queue_depth=1)
    await node.call("submit", {"prompt": "hello"})
    with pytest.raises(NodeError, match="full: requests") as caught:
        await node.call("submit", {"prompt": "hello"})
    assert caught.value.details["retryAfterMs"] > 0
    async with node_peer(home, redis_url, "nobody") as other:
        with pytest.raises(NodeError, match="nobody has ever served"):
            await other.call("submit", {"prompt": "hello"})


async def test_a_failure(worker: HandWorker, node: NodePeer, fleet: Client) -> None:
    events = node.read("stream", {"prompt": "hello"}, {"rid": "00" + "4" * 32})
    (work,) = await worker.take()
    await worker.fail(work, GenerationFailed("told to", retryable=True))
    last = [event async for event in events][-1]
    assert last["error"]["message"] == "told to"
    assert last["error"]["details"] == {"retryable": True}
    with pytest.raises(GenerationFailed, match="told to"):
        await fleet.result("00" + "4" * 32)


# --- what the page shows


async def test_the_small_producer_of_the_page(worker: HandWorker, home: Path, redis_url: str) -> None:
    node, _ = node_program()
    (source,) = blocks("js")
    program = home / "small.mjs"
    program.write_text(
        source.replace("redis://localhost:6379/0", redis_url).replace("{q:smollm2:0}", "{q:q:0}")
    )
    process = await asyncio.create_subprocess_exec(str(node), str(program), cwd=home, stdout=PIPE)
    (work,) = await worker.take()
    await worker.emit(work, delta("Cold."))
    await worker.emit(work, Delta(token_ids=(9,), texts=("x" * 20_000,)))
    await worker.finish(work, "Cold." + "x" * 20_000)
    async with asyncio.timeout(PATIENCE_S):
        out, _ = await process.communicate()
    assert out.decode().split()[:2] == ["Cold." + "x" * 20_000, "done"]


async def test_it_needs_no_more_rights_than_the_page_says(
    worker: HandWorker, home: Path, redis_url: str
) -> None:
    (rule,) = blocks("acl")
    rights = rule.replace("\\", "").replace("docs", "q").split()
    await worker.redis.execute_command("ACL", "SETUSER", "page", "reset", "on", ">secret", *rights)  # type: ignore[no-untyped-call]
    async with node_peer(home, redis_url.replace("://", "://page:secret@")) as peer:
        events = peer.read("stream", {"prompt": "hello"})
        (work,) = await worker.take()
        await worker.log(work, delta("a"))
        await worker.emit(work, delta("b", 1))
        await worker.finish(work, "ab")
        assert texts_of([event async for event in events]) == "ab"
        left = await peer.call("submit", {"prompt": "hello"})
        assert await peer.call("cancel", left["rid"]) == "cancelled"
        assert await peer.call("status", left["rid"]) == "cancelled"
