"""The heart of a job: what is asked, how much at once, what is asked again and what never."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from eventually import eventually
from hand_worker import HandWorker, Work
from streamfleet_common.errors import GenerationFailed, QueueFull, Unsupported
from streamfleet_common.shares import Share
from streamfleet_producer import Client
from streamfleet_producer.bulk.dialects import Asked, DialectName, OwnDialect, dialect
from streamfleet_producer.bulk.feeder import Feeder
from streamfleet_producer.bulk.input_file import Line
from streamfleet_producer.bulk.result_files import ResultFiles

JOB = "batch_" + "0" * 32


def line(custom_id: object, **request: Any) -> bytes:
    return json.dumps({"custom_id": custom_id, "request": {"prompt": f"p{custom_id}", **request}}).encode()


async def source(lines: Sequence[bytes | None]) -> AsyncIterator[Line]:
    for number, data in enumerate(lines, 1):
        yield Line(number, data)


class Run:
    """A run of one job over the files in a folder."""

    def __init__(
        self,
        fleet: Client,
        folder: Path,
        lines: Sequence[bytes | None],
        window: int = 8,
        form: DialectName = "streamfleet",
    ) -> None:
        self.paths = folder / "out", folder / "err"
        self.results = ResultFiles.open(*self.paths)
        self.feeder = Feeder(
            fleet, JOB, dialect(form, fleet.queue), self.results, window=window, result_ttl_s=60
        )
        self.task = asyncio.create_task(self.feeder.run(source(lines)))

    async def ended(self) -> None:
        async with asyncio.timeout(60):
            await self.task
        self.results.close()

    async def killed(self) -> None:
        """As a process is: nobody tells the fleet."""
        for task in (self.task, *self.feeder._under_way):
            task.cancel()
        await asyncio.gather(self.task, *self.feeder._under_way, return_exceptions=True)
        self.results.close()

    def output(self) -> list[Any]:
        return [json.loads(one) for one in self.paths[0].read_text().splitlines()]

    def errors(self) -> list[Any]:
        return [json.loads(one) for one in self.paths[1].read_text().splitlines()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path


async def finish(worker: HandWorker, works: Sequence[Work]) -> None:
    for work in works:
        assert await worker.finish(work, f"re {work.prompt}")


async def test_each_line_is_answered_once_and_in_the_lane_for_bulk(
    fleet: Client, worker: HandWorker, folder: Path
) -> None:
    run = Run(fleet, folder, [line("a"), line("b"), line("c", max_tokens=3)])
    works = await worker.take(3)
    assert {work.envelope.lane for work in works} == {"bulk"}
    await finish(worker, works)
    await run.ended()
    told = {one["custom_id"]: one["answer"]["choices"][0]["text"] for one in run.output()}
    assert told == {"a": "re pa", "b": "re pb", "c": "re pc"}
    assert run.errors() == []


async def test_no_more_than_the_window_is_under_way(fleet: Client, worker: HandWorker, folder: Path) -> None:
    run = Run(fleet, folder, [line(f"{number}") for number in range(10)], window=3)
    taken = await worker.take(3)
    for number in range(7):
        assert run.feeder.in_flight == 3
        assert (await fleet.depth()).queued + (await fleet.depth()).running <= 3
        await finish(worker, taken[:1])
        taken = [*taken[1:], *await worker.take(1)]
        assert number < 7
    await finish(worker, taken)
    await run.ended()
    assert len(run.output()) == 10


async def test_half_of_the_queue_is_left_to_others(fleet: Client, worker: HandWorker, folder: Path) -> None:
    await worker.announce(max_queue_depth=4)
    run = Run(fleet, folder, [line(f"{number}") for number in range(5)], window=100)
    first = await worker.take(2)
    assert run.feeder.in_flight == 2
    await finish(worker, first)
    await finish(worker, await worker.take(2))
    await finish(worker, await worker.take(1))
    await run.ended()


async def test_bad_lines_cost_themselves_alone(fleet: Client, worker: HandWorker, folder: Path) -> None:
    lines = [
        b"{no json",
        b"[]",
        None,
        b'{"request": {"prompt": "p"}}',
        line(""),
        line("x" * 513),
        line(7),
        b'{"custom_id": "\\ud800", "request": {"prompt": "p"}}',
        line("a"),
        line("a"),
        b'{"custom_id": "b"}',
        line("c", kind="nope"),
        line("d", max_tokens="7"),
        b'{"custom_id": "e", "request": {"prompt": "p"}, "more": 1}',
        b'{"custom_id": "f", "request": {"prompt": "p", "sampling": {"temperature": NaN}}}',
        b"[" * 100_000,
    ]
    run = Run(fleet, folder, lines)
    await finish(worker, await worker.take(1))
    await run.ended()
    assert [one["custom_id"] for one in run.output()] == ["a"]
    told = [(one["custom_id"], one.get("line"), one["error"]["code"]) for one in run.errors()]
    assert told == [
        (None, 1, "invalid_json_line"),
        (None, 2, "invalid_json_line"),
        (None, 3, "line_too_long"),
        (None, 4, "invalid_custom_id"),
        (None, 5, "invalid_custom_id"),
        (None, 6, "invalid_custom_id"),
        (None, 7, "invalid_custom_id"),
        (None, 8, "invalid_json_line"),
        (None, 10, "duplicate_custom_id"),
        ("b", None, "invalid_request"),
        ("c", None, "invalid_request"),
        ("d", None, "invalid_request"),
        ("e", None, "invalid_request"),
        (None, 15, "invalid_json_line"),
        (None, 16, "invalid_json_line"),
    ]
    # Another run over the same files has nothing to do.
    again = Run(fleet, folder, lines)
    await again.ended()
    assert again.errors() == run.errors()
    assert len(again.output()) == 1


async def test_what_fails_in_the_fleet_is_told_with_its_code(
    fleet: Client, worker: HandWorker, folder: Path
) -> None:
    run = Run(fleet, folder, [line("a"), line("b"), line("c", model="other")])
    works = {work.prompt: work for work in await worker.take(2)}
    await worker.fail(works["pa"], GenerationFailed("the device is gone"))
    await worker.fail(works["pb"], Unsupported("no guides here", feature="guide"))
    await run.ended()
    told = {one["custom_id"]: one["error"]["code"] for one in run.errors()}
    assert told == {"a": "generation_failed", "b": "unsupported", "c": "model_not_found"}


async def test_a_line_of_several_prompts_takes_one_place_and_is_one_answer(
    fleet: Client, worker: HandWorker, folder: Path
) -> None:
    body = {"prompt": ["a", "b", "c"], "max_tokens": 5}
    whole = {"custom_id": "x", "method": "POST", "url": "/v1/completions", "body": body}
    broken = {**whole, "custom_id": "y", "body": {"prompt": ["d", "e"]}}
    lines = [json.dumps(one).encode() for one in (whole, broken)]
    run = Run(fleet, folder, lines, window=1, form="openai")
    for prompt in "abc":
        (work,) = await worker.take(1)
        assert work.prompt == prompt
        await finish(worker, [work])
    (work,) = await worker.take(1)
    await worker.fail(work, GenerationFailed("no"))
    await run.ended()
    (told,) = run.output()
    assert [choice["text"] for choice in told["response"]["body"]["choices"]] == ["re a", "re b", "re c"]
    (failed,) = run.errors()
    assert (failed["custom_id"], failed["response"]["status_code"]) == ("y", 500)


async def test_who_goes_on_joins_what_was_under_way(fleet: Client, worker: HandWorker, folder: Path) -> None:
    lines = [line(name) for name in "abcd"]
    async with Client(fleet.url, queue="q") as killed:
        run = Run(killed, folder, lines)
        works = await worker.take(4)
        await finish(worker, works[:1])
        await eventually(lambda: run.results.completed == 1)
        killed._link.cancels.post = lambda _: None  # type: ignore[union-attr, method-assign]
        await run.killed()
    # One ends while nobody listens, the others go on.
    await finish(worker, works[1:2])
    again = Run(fleet, folder, lines)
    await eventually(lambda: again.results.completed == 2)
    await finish(worker, works[2:])
    await again.ended()
    assert sorted(one["custom_id"] for one in again.output()) == ["a", "b", "c", "d"]
    # Nothing was computed twice: each request was started once, and nothing waits.
    for work in works:
        assert (await fleet.status(work.rid)).attempt == 1
    assert (await fleet.depth()).queued == 0


async def test_a_full_queue_is_waited_for_as_told(
    fleet: Client, worker: HandWorker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.announce(max_queue_depth=2)
    others = [await fleet.submit(request) for request in two_requests()]
    refused: list[QueueFull] = []
    asked = fleet.run

    async def watched(*args: Any, **options: Any) -> Any:
        try:
            return await asked(*args, **options)
        except QueueFull as error:
            refused.append(error)
            raise

    monkeypatch.setattr(fleet, "run", watched)
    run = Run(fleet, folder, [line("a")])
    await eventually(lambda: refused)
    first = refused[0].retry_after
    for other in others:
        await fleet.cancel(other.id)
    began = asyncio.get_running_loop().time()
    await finish(worker, await worker.take(1))
    await run.ended()
    # Nobody asked again before the time that was told, and nobody in vain after it.
    assert asyncio.get_running_loop().time() - began <= first + 5
    assert len(refused) == 1
    assert [one["custom_id"] for one in run.output()] == ["a"]


async def test_a_line_over_its_tenants_day_is_waited_for_by_nobody(
    fleet: Client, worker: HandWorker, folder: Path
) -> None:
    await worker.broker.set_shares({fleet.tenant: Share(tokens_per_day=100)})
    run = Run(fleet, folder, [line("large", max_tokens=100), line("small", max_tokens=9)], window=1)
    await finish(worker, await worker.take(1))
    await run.ended()
    assert [one["custom_id"] for one in run.output()] == ["small"]
    (refused,) = run.errors()
    assert (refused["custom_id"], refused["error"]["code"]) == ("large", "invalid_request")
    assert "its tenant has 100 a day" in refused["error"]["message"]


async def test_cancelling_ends_what_is_under_way_and_keeps_what_is_done(
    fleet: Client, worker: HandWorker, folder: Path
) -> None:
    run = Run(fleet, folder, [line(f"{number}") for number in range(20)], window=4)
    works = await worker.take(4)
    await finish(worker, works[:1])
    await eventually(lambda: run.results.completed == 1)
    await run.feeder.cancel()
    await run.ended()
    assert [one["custom_id"] for one in run.output()] == ["0"]
    assert run.errors() == []
    for work in works[1:]:
        assert (await fleet.status(work.rid)).state == "cancelled"
    assert (await fleet.depth()).queued == 0


async def test_what_another_run_submitted_is_cancelled_too(
    fleet: Client, worker: HandWorker, folder: Path
) -> None:
    async with Client(fleet.url, queue="q") as killed:
        run = Run(killed, folder, [line("a")])
        (work,) = await worker.take(1)
        killed._link.cancels.post = lambda _: None  # type: ignore[union-attr, method-assign]
        await run.killed()
    again = Run(fleet, folder, [line("a")])
    await eventually(lambda: again.feeder.in_flight)
    await again.feeder.cancel()
    await again.ended()
    assert (await fleet.status(work.rid)).state == "cancelled"


async def test_when_its_time_is_over_all_that_is_left_is_told_so(
    fleet: Client, worker: HandWorker, folder: Path
) -> None:
    run = Run(fleet, folder, [line(f"{number}") for number in range(6)], window=2)
    works = await worker.take(2)
    await finish(worker, works[:1])
    await eventually(lambda: run.results.completed == 1)
    await run.feeder.expire()
    await run.ended()
    assert [one["custom_id"] for one in run.output()] == ["0"]
    assert sorted(one["custom_id"] for one in run.errors()) == ["1", "2", "3", "4", "5"]
    assert {one["error"]["code"] for one in run.errors()} == {"batch_expired"}


async def test_a_request_that_redis_has_lost_is_sent_again(
    fleet: Client, worker: HandWorker, folder: Path
) -> None:
    run = Run(fleet, folder, [line("a")])
    (work,) = await worker.take(1)
    await worker.redis.delete(worker.broker.keys.record(work.rid))
    await worker.redis.zrem(worker.broker.keys.open, work.rid)
    await worker.cut_subscribers()  # who reconnects asks the record
    await finish(worker, await worker.take(1))
    await run.ended()
    assert [one["custom_id"] for one in run.output()] == ["a"]


async def test_a_fault_of_ours_costs_one_line(
    fleet: Client, worker: HandWorker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(fleet, folder, [line("a"), line("b"), line("c")])
    parse = OwnDialect.parse

    def broken(self: OwnDialect, fields: dict[str, Any]) -> Asked:
        if fields["custom_id"] == "a":
            raise RecursionError
        return parse(self, fields)

    def unsayable(*_: object) -> dict[str, Any]:
        return {"custom_id": "b", "answer": float("nan")}

    monkeypatch.setattr(OwnDialect, "parse", broken)
    works = {work.prompt: work for work in await worker.take(2)}
    items = {item.custom_id: item for item in run.feeder._under_way.values()}
    monkeypatch.setattr(type(items["b"].asked), "answer", unsayable)
    await finish(worker, [works["pb"]])
    await eventually(lambda: run.results.failed == 2)
    monkeypatch.undo()
    await finish(worker, [works["pc"]])
    await run.ended()
    assert [one["custom_id"] for one in run.output()] == ["c"]
    told = [(one["custom_id"], one["error"]["code"]) for one in run.errors()]
    assert told == [("a", "invalid_request"), ("b", "generation_failed")]


async def test_a_disk_that_fails_fails_the_job(
    fleet: Client, worker: HandWorker, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(fleet, folder, [line(f"{number}") for number in range(9)], window=2)

    def full(_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run.results, "answer", full)
    await finish(worker, await worker.take(1))
    with pytest.raises(OSError, match="No space left"):
        await run.ended()


def two_requests() -> list[Any]:
    dialect = OwnDialect()
    return [dialect.parse(json.loads(line(name))).requests[0] for name in ("x", "y")]
