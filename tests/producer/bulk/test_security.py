"""What stands in RQ's Redis is never code: no pickle, no function, callback or address but ours."""

from __future__ import annotations

import asyncio
import json
import pickle
import socket
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from rq import Queue
from rq.job import Job

from command import environment
from hand_worker import HandWorker
from streamfleet_common.schemas import Choice
from streamfleet_producer.bulk.batch import Batch
from streamfleet_producer.bulk.batches import Batches
from streamfleet_producer.bulk.jobs import RUN, queue
from streamfleet_producer.bulk.settings import RQ_QUEUE

PROGRAM = (sys.executable, str(Path(__file__).with_name("without_pickle.py")))
LIMIT_S = 90.0
CANARY = "from pathlib import Path\nPath(__file__).with_suffix('.sung').touch()\ndef sing(*_, **__): pass\n"


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
def jobs(redis_url: str) -> Iterator[Batches]:
    with Batches(redis_url) as made:
        yield made


def was_imported(canary: Path) -> bool:
    return canary.exists()


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that is there once the module `canary` has been imported."""
    (tmp_path / "canary.py").write_text(CANARY)
    return tmp_path / "canary.sung"


def create(jobs: Batches, folder: Path, lines: int = 3) -> Batch:
    source = folder / "in.jsonl"
    source.write_text(
        "".join(
            json.dumps({"custom_id": f"c{number}", "request": {"prompt": "p"}}) + "\n"
            for number in range(lines)
        )
    )
    return jobs.create(source, folder / "out.jsonl", folder / "err.jsonl", fleet_queue="q")


async def worked_off(redis_url: str, folder: Path) -> str:
    """Run the process that dies of pickle until the queue is empty; gives what it has said."""
    process = await asyncio.create_subprocess_exec(
        *PROGRAM,
        env=environment(STREAMFLEET_REDIS_URL=redis_url, STREAMFLEET_BULK_FOLDER=str(folder))
        | {"PYTHONPATH": str(folder.parent)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    async with asyncio.timeout(LIMIT_S):
        said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return said.decode()


@asynccontextmanager
async def served(redis_url: str) -> AsyncIterator[None]:
    async with HandWorker(redis_url) as worker:
        await worker.announce()
        choice = Choice(text="re", token_ids=(1,), finish_reason="length")
        async with worker.serving(lambda _: {"choices": (choice,)}):
            yield


def test_the_trap_works() -> None:
    ended = subprocess.run([*PROGRAM, "probe"], capture_output=True, timeout=LIMIT_S, check=False)
    assert (ended.returncode, ended.stderr) == (86, b"pickle was used\n")


async def test_a_job_and_the_cron_work_without_pickle_and_leave_none_in_redis(
    redis_url: str, jobs: Batches, raw: Any, tmp_path: Path
) -> None:
    made = create(jobs, tmp_path)
    async with served(redis_url):
        await worked_off(redis_url, tmp_path)
    ended = jobs.get(made.id)
    assert (ended.status, ended.counts.completed) == ("completed", 3)
    kinds = {name.decode().split(":")[1] for name in raw.scan_iter("rq:*")}
    assert {"job", "results", "cron_scheduler"} <= kinds
    names = [name.decode() for name in raw.scan_iter("rq:job:*") if raw.type(name) == b"hash"]
    assert {"rq:job:upkeep_sweep-queues", "rq:job:upkeep_replay-dead-q", f"rq:job:{made.id}"} <= set(names)
    for name in names:
        assert raw.hget(name, "status") == b"finished", name
        function, instance, args, kwargs = json.loads(zlib.decompress(raw.hget(name, "data")))
        assert (function.startswith("streamfleet_producer.bulk."), instance, kwargs) == (True, None, {})
        assert isinstance(args, list)
        if meta := raw.hget(name, "meta"):
            json.loads(meta)
    found = list(values(raw))
    assert len(found) > 50
    for value in found:
        assert_no_pickle(value)


def values(raw: Any) -> Iterator[bytes]:
    """Every value of every key of RQ's, and what was compressed in it."""
    for name in raw.scan_iter("rq:*"):
        match raw.type(name):
            case b"string":
                found = [raw.get(name)]
            case b"hash":
                found = list(raw.hgetall(name).values())
            case b"list":
                found = raw.lrange(name, 0, -1)
            case b"set":
                found = list(raw.smembers(name))
            case b"zset":
                found = raw.zrange(name, 0, -1)
            case b"stream":
                found = [value for _, fields in raw.xrange(name) for value in fields.values()]
            case kind:
                raise AssertionError(f"{name} is a {kind}")
        for value in found:
            if value is None:  # it expired meanwhile
                continue
            yield value
            try:
                yield zlib.decompress(value)
            except zlib.error:
                continue


def assert_no_pickle(value: bytes) -> None:
    # Protocols 2 and later begin with this byte, which begins no UTF-8; those before are text, and end so.
    assert value[:1] != b"\x80", value[:40]
    if value.endswith(b".") and value != b".":
        with pytest.raises(Exception):  # noqa: B017, PT011 - whatever tells that it is none
            pickle.loads(value)


async def test_foreign_jobs_are_refused_and_never_imported(
    redis_url: str,
    jobs: Batches,
    raw: Any,
    tmp_path: Path,
    canary: Path,
) -> None:
    with redis.Redis.from_url(redis_url) as connection, socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        foreign = queue(connection, RQ_QUEUE)
        folder = tmp_path / "folder"
        folder.mkdir()
        spec = create(jobs, folder).spec.model_dump(mode="json")
        enqueue_function(foreign, "function", "canary.sing")
        enqueue_function(foreign, "method", "format", instance="{0.__class__}")
        enqueue_function(foreign, "nothing", None)
        enqueue_function(foreign, "number", 7)
        called = enqueue_function(foreign, "callback", RUN, args=[spec])
        for kind in ("success", "failure", "stopped"):
            raw.hset(called.key, f"{kind}_callback_name", "canary.sing")
        hooked = enqueue_function(foreign, "hooked", "canary.sing")
        address = f"http://127.0.0.1:{listening.getsockname()[1]}/"
        hook = {"url": address, "job_status": "failed"}
        raw.hset(hooked.key, "webhooks", json.dumps([hook]))
        again = enqueue_function(foreign, "again", "canary.sing")
        raw.hset(again.key, "retries_left", 1000)
        # RQ's own way: pickled, by somebody else's queue.
        theirs = Queue(RQ_QUEUE, connection=connection)
        pickled = theirs.enqueue_call("canary.sing", job_id="pickled")
        assert raw.hget(pickled.key, "data")
        # And what is no job at all.
        raw.hset("rq:job:broken", mapping={"data": b"\xff", "origin": RQ_QUEUE, "result_ttl": "x"})
        raw.rpush(foreign.key, "broken")
        outside = create(jobs, tmp_path)
        async with served(redis_url):
            said = await worked_off(redis_url, folder)
        with pytest.raises(BlockingIOError):
            listening.accept()
    assert not was_imported(canary)
    for name in ("function", "method", "nothing", "number", "callback", "hooked", "again", "pickled"):
        assert raw.hget(f"rq:job:{name}", "status") == b"failed", name
    assert raw.llen(f"rq:queue:{RQ_QUEUE}") == 0
    # Ours was done among them.
    assert jobs.get(spec["id"]).status == "completed", said
    # Files that lie elsewhere are not touched.
    ended = jobs.get(outside.id)
    assert (ended.status, ended.counts.completed) == ("failed", 0)
    assert ended.error is not None
    assert "outside the folders" in ended.error.message
    assert outside.spec.paths[1].read_bytes() == b""


def enqueue_function(
    foreign: Queue, name: str, function: object, *, instance: object = None, args: list[Any] | None = None
) -> Job:
    """As somebody writes it who may write to Redis: any name, in JSON."""
    job = foreign.enqueue_call("placeholder", job_id=name)
    data = json.dumps([function, instance, args or [], {}]).encode()
    foreign.connection.hset(job.key, "data", zlib.compress(data))
    return job
