"""The face of bulk jobs: what is taken, what is told, and to whom."""

from __future__ import annotations

import hashlib
import hmac
import threading
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import redis

from streamfleet_common.errors import (
    BrokerUnavailable,
    Conflict,
    InvalidRequest,
    QueueFull,
    RequestNotFound,
)
from streamfleet_producer.bulk import batches as module
from streamfleet_producer.bulk.batch import Batch, Counts
from streamfleet_producer.bulk.batches import Batches
from streamfleet_producer.bulk.jobs import RUN, BulkQueue, queue
from streamfleet_producer.bulk.settings import RQ_QUEUE

LINE = '{"custom_id": "a", "request": {"prompt": "p"}}\n'


@pytest.fixture
def jobs(redis_url: str) -> Iterator[Batches]:
    with Batches(redis_url) as made:
        yield made


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


def create(jobs: Batches, folder: Path, number: int = 0, lines: int = 1, **options: Any) -> Batch:
    source = folder / f"in{number}.jsonl"
    source.write_text(LINE * lines)
    paths = [folder / f"{kind}{number}.jsonl" for kind in ("out", "err")]
    return jobs.create(source, *paths, **({"fleet_queue": "q"} | options))


def test_a_job_waits_for_a_worker_and_is_found(jobs: Batches, tmp_path: Path) -> None:
    made = create(jobs, tmp_path, lines=3, metadata={"who": "me"}, tenant="t")
    assert made.status == "validating"
    assert made.counts == Counts(total=3)
    assert not made.is_over
    assert made.spec.metadata == {"who": "me"}
    assert Path(made.spec.output_path).read_bytes() == b""
    assert jobs.get(made.id, "t") == made
    assert jobs.list("t") == [made]
    assert jobs.workers() == 0


def test_tenants_do_not_see_each_other(jobs: Batches, tmp_path: Path) -> None:
    made = create(jobs, tmp_path, tenant="one")
    for ask in (jobs.get, jobs.cancel):
        with pytest.raises(RequestNotFound):
            ask(made.id, "two")
    assert jobs.list("two") == []
    with pytest.raises(RequestNotFound):
        jobs.list("two", after=made.id)
    assert jobs.get(made.id, "one").status == "validating"


@pytest.mark.parametrize("id", ["", "batch_" + "0" * 32, "a:b", "x" * 5000, "batch_*", "ä"])
def test_what_is_no_id_is_not_found(jobs: Batches, id: str) -> None:  # noqa: A002
    with pytest.raises(RequestNotFound):
        jobs.get(id)


def test_the_newest_come_first_page_by_page(jobs: Batches, tmp_path: Path) -> None:
    made = [create(jobs, tmp_path, number).id for number in range(5)]
    newest = made[::-1]
    assert [batch.id for batch in jobs.list(limit=2)] == newest[:2]
    assert [batch.id for batch in jobs.list(after=newest[1], limit=2)] == newest[2:4]
    assert [batch.id for batch in jobs.list(after=newest[3], limit=2)] == newest[4:]
    assert jobs.list(after=newest[4]) == []


def test_a_job_that_is_gone_is_passed_over(jobs: Batches, tmp_path: Path, raw: Any) -> None:
    made = [create(jobs, tmp_path, number).id for number in range(3)]
    raw.delete(f"rq:job:{made[1]}")
    assert [batch.id for batch in jobs.list()] == [made[2], made[0]]


def test_a_job_that_nobody_has_taken_is_cancelled_at_once(jobs: Batches, tmp_path: Path, raw: Any) -> None:
    made = create(jobs, tmp_path)
    cancelled = jobs.cancel(made.id)
    assert cancelled.status == "cancelled"
    assert cancelled.is_over
    assert raw.lrange(f"rq:queue:{RQ_QUEUE}", 0, -1) == []
    assert 0 < raw.ttl(f"rq:job:{made.id}") <= module.KEPT_S
    assert jobs.cancel(made.id) == cancelled


def test_a_job_that_somebody_runs_is_being_cancelled(jobs: Batches, tmp_path: Path, raw: Any) -> None:
    made = create(jobs, tmp_path)
    raw.delete(f"rq:queue:{RQ_QUEUE}")  # a worker has taken it
    assert jobs.cancel(made.id).status == "cancelling"
    assert raw.exists(module.cancel_key(made.id)) == 1


def test_files_that_cannot_be_are_refused_before_there_is_a_job(
    jobs: Batches, tmp_path: Path, raw: Any
) -> None:
    source, output, errors = (tmp_path / name for name in ("in", "out", "err"))
    with pytest.raises(InvalidRequest, match="there is no file"):
        jobs.create(source, output, errors, fleet_queue="q")
    source.write_text(LINE * 4)
    with pytest.raises(InvalidRequest, match="more than 3 lines"):
        jobs.create(source, output, errors, fleet_queue="q", max_lines=3)
    with pytest.raises(InvalidRequest, match="bytes, at most 10"):
        jobs.create(source, output, errors, fleet_queue="q", max_bytes=10)
    with pytest.raises(InvalidRequest, match="three files"):
        jobs.create(source, source, errors, fleet_queue="q")
    assert not output.exists()
    output.write_text("precious")
    with pytest.raises(InvalidRequest, match="not empty"):
        jobs.create(source, output, errors, fleet_queue="q")
    assert output.read_text() == "precious"
    assert raw.llen(f"rq:queue:{RQ_QUEUE}") == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"fleet_queue": "no such name"},
        {"tenant": "a:b"},
        {"window": 0},
        {"window": 10**6},
        {"result_ttl_s": 0},
        {"metadata": {f"{number}": "" for number in range(17)}},
        {"metadata": {"a": "x" * 513}},
        {"max_lines": 10**7},
        {"dialect": "other"},
    ],
    ids=str,
)
def test_arguments_that_cannot_be_are_refused(jobs: Batches, tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        create(jobs, tmp_path, **wrong)


def test_no_more_jobs_wait_than_may(jobs: Batches, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING", 2)
    create(jobs, tmp_path, 0)
    create(jobs, tmp_path, 1)
    with pytest.raises(QueueFull) as caught:
        create(jobs, tmp_path, 2)
    assert caught.value.retry_after > 0
    assert not (tmp_path / "out2.jsonl").exists()


def test_a_redis_that_is_away_is_told() -> None:
    with Batches("redis://:secret@localhost:1/0") as jobs, pytest.raises(BrokerUnavailable) as caught:
        jobs.list()
    assert "secret" not in caught.value.message


@pytest.mark.parametrize("url", ["redis+sentinel://host:26379/name/0", "http://host", "redis://host:x"])
def test_what_rq_cannot_use_is_no_url(url: str) -> None:
    with pytest.raises(BrokerUnavailable) as caught:
        Batches(url)
    assert caught.value.reason == "bad_url"


def test_a_job_that_was_written_by_others_is_unknown(jobs: Batches, redis_url: str, raw: Any) -> None:
    name = "batch_" + "1" * 32
    with redis.Redis.from_url(redis_url) as connection:
        foreign = queue(connection, RQ_QUEUE)
        foreign.enqueue_call("os.system", args=("true",), job_id=name)
        foreign.enqueue_call(RUN, args=({"id": "batch_" + "2" * 32},), job_id="batch_" + "3" * 32)
        raw.hset("rq:job:batch_" + "4" * 32, mapping={"data": b"\x80\x04N."})
    for digit in "134":
        with pytest.raises(RequestNotFound):
            jobs.get("batch_" + digit * 32)


def test_a_key_makes_one_job(jobs: Batches, tmp_path: Path, raw: Any) -> None:
    about: dict[str, Any] = {"key": "k", "secret": b"s", "endpoint": "/e", "metadata": {"a": "b"}}
    source = tmp_path / "in0.jsonl"
    first = create(jobs, tmp_path, **about)
    by_hand = hmac.new(b"s", b"batch\0k", hashlib.sha256).hexdigest()
    assert first.id == f"batch_{by_hand[:32]}"
    outputs = (tmp_path / "other-out", tmp_path / "other-err")
    assert jobs.create(source, *outputs, fleet_queue="q", **about) == first
    assert not outputs[0].exists()
    source.unlink()  # which is no matter any more
    assert jobs.created(input_path=source, **about) == first
    assert raw.lrange(f"rq:queue:{RQ_QUEUE}", 0, -1) == [first.id.encode()]

    others: tuple[dict[str, Any], ...] = ({"endpoint": "/f"}, {"metadata": None})
    for other in others:
        with pytest.raises(Conflict):
            create(jobs, tmp_path, **(about | other))
    with pytest.raises(Conflict):
        create(jobs, tmp_path, 1, **about)
    assert create(jobs, tmp_path, 2, **(about | {"secret": b"t"})).id != first.id
    assert create(jobs, tmp_path, 3, **(about | {"key": "l"})).id != first.id


def test_a_key_whose_creator_died_makes_its_job_later(
    jobs: Batches, tmp_path: Path, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(BulkQueue, "enqueue_call", dies)
        with pytest.raises(KeyboardInterrupt):
            create(jobs, tmp_path, key="k")
    assert jobs.created("k", tmp_path / "in0.jsonl") is None
    made = create(jobs, tmp_path, key="k")
    assert jobs.list() == [made]
    assert raw.lrange(f"rq:queue:{RQ_QUEUE}", 0, -1) == [made.id.encode()]


def test_of_calls_with_one_key_at_once_one_makes_the_job(
    jobs: Batches, tmp_path: Path, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "in"
    source.write_text(LINE)
    # All have found nothing when the first one is put into the queue.
    everybody = threading.Barrier(4)
    enqueue = BulkQueue.enqueue_call

    def together(*args: Any, **options: Any) -> Any:
        everybody.wait(60)
        return enqueue(*args, **options)

    monkeypatch.setattr(BulkQueue, "enqueue_call", together)

    def call(number: int) -> Batch:
        return jobs.create(
            source, tmp_path / f"out{number}", tmp_path / f"err{number}", fleet_queue="q", key="k"
        )

    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(call, range(4)))
    assert made == [made[0]] * 4
    assert raw.lrange(f"rq:queue:{RQ_QUEUE}", 0, -1) == [made[0].id.encode()]


def test_no_url_stands_in_a_job(jobs: Batches, tmp_path: Path, raw: Any) -> None:
    made = create(jobs, tmp_path)
    data = zlib.decompress(raw.hget(f"rq:job:{made.id}", "data"))
    assert b"out0.jsonl" in data
    assert b"redis://" not in data
