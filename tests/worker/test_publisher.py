"""The publisher over a Redis that answers when a test lets it."""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest

from eventually import eventually
from streamfleet_common import codec
from streamfleet_common.broker import Broker
from streamfleet_common.deliveries import Bill, Delivery, Emission, Entry, Finish
from streamfleet_common.errors import BrokerUnavailable, DeadlineExceeded, GenerationFailed, InvalidRequest
from streamfleet_common.one_shot import Classification, Embedding, Label, Rank
from streamfleet_common.schemas import Choice, Delta, End, Prefill, Timing, Usage
from streamfleet_common.schemas import Parts as PartsEvent
from streamfleet_worker import publisher as publisher_module
from streamfleet_worker.engine.base import Arrival, Finished, Key, Output, Parts, Tokens
from streamfleet_worker.metrics import Metrics
from streamfleet_worker.publisher import Publisher

IDENTITY = End(state="done", model="m", revision="r", worker="w1")


class StubBroker:
    """Keeps what it is sent, as the log and the records would."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.waiting = 0
        self.failures = 0
        """So many calls are carried out, and their replies lost."""
        self.fenced: set[str] = set()
        self.emits: list[list[Emission]] = []
        self.log: dict[str, dict[int, Any]] = {}
        self.ends: dict[str, End] = {}
        self.finishes: list[list[str]] = []
        self.returned: set[str] = set()
        """Those that are tried again where that is wished for."""
        self.bills: list[tuple[str, str, int, int]] = []
        """Request, fence, tokens of prompt and answer."""
        self.retries: set[str] = set()
        """Those that came with the wish for another try."""
        self.pauses: dict[str, int | None] = {}
        """After how many ms, if that was said."""

    async def emit(self, emissions: Sequence[Emission]) -> list[bool]:
        await self._pass()
        self.emits.append(list(emissions))
        for emission in emissions:
            rid = emission.delivery.entry.rid
            if rid not in self.fenced and emission.body:
                # As the log does: what it has already is not added again.
                self.log.setdefault(rid, {}).setdefault(emission.seq, codec.decode_event(emission.body))
        self._lose()
        return [emission.delivery.entry.rid not in self.fenced for emission in emissions]

    async def finish(self, finishes: Sequence[Finish], bills: Sequence[Bill] = ()) -> list[bool]:
        bodies = [codec.encode(finish.end) for finish in finishes]
        await self._pass()
        rids = [finish.delivery.entry.rid for finish in finishes]
        if rids:
            self.finishes.append(rids)
        for finish in finishes:
            finish.went_back = finish.retry and finish.delivery.entry.rid in self.returned
        self.bills += [(one.rid, one.fence, one.prompt_tokens, one.completion_tokens) for one in bills]
        self.retries |= {finish.delivery.entry.rid for finish in finishes if finish.retry}
        self.pauses |= {finish.delivery.entry.rid: finish.retry_after_ms for finish in finishes}
        for rid, body in zip(rids, bodies, strict=True):
            if rid not in self.fenced:
                event = codec.decode_event(body)
                assert isinstance(event, End)
                self.ends.setdefault(rid, event)
        self._lose()
        return [rid not in self.fenced for rid in rids]

    async def _pass(self) -> None:
        self.waiting += 1
        await self.open.wait()
        self.waiting -= 1

    def _lose(self) -> None:
        if self.failures:
            self.failures -= 1
            raise BrokerUnavailable("the reply was lost")

    def events(self, rid: str) -> list[Any]:
        """The log of a request, which must have no holes."""
        log = self.log.get(rid, {})
        assert sorted(log) == list(range(1, len(log) + 1))
        return [log[seq] for seq in sorted(log)]

    def text(self, rid: str) -> str:
        return "".join(event.text for event in self.events(rid) if isinstance(event, Delta))


class Desk:
    """A publisher at work, and what it tells."""

    def __init__(self, broker: StubBroker) -> None:
        self.forgotten: list[Key] = []
        self.freed = 0
        self.memory = {"weights": 100}
        self.leases_ran_out = False
        self.metrics = Metrics("q", "0")
        self.publisher = Publisher(
            cast(Broker, broker),
            self.metrics,
            forget=self.forgotten.extend,
            freed=self._freed,
            memory=lambda: self.memory,
            ran_out=lambda: self.leases_ran_out,
        )
        self.task = asyncio.create_task(self.publisher.run(IDENTITY))

    def _freed(self) -> None:
        self.freed += 1

    def hold(self, rid: str, *, stream: bool = True, kind: str = "", deadline_at_ms: int = 9_000_000) -> Key:
        delivery = Delivery(Entry(rid, f"{rid}-0", "normal", b""), "w1", 1, 1000, 900, deadline_at_ms, 1, 0)
        self.publisher.hold(delivery, tenant="t", stream=stream, kind=kind)
        return delivery.key

    def take(self, *outputs: tuple[Key, Any], at: float | None = None) -> None:
        self.publisher.take([Output(key, event) for key, event in outputs], at)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(f"streamfleet_{name}", {"queue": "q", **labels})


@pytest.fixture
def broker() -> StubBroker:
    return StubBroker()


@pytest.fixture
async def desk(broker: StubBroker, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    monkeypatch.setattr(publisher_module, "MAX_BACKOFF_S", 0.01)
    made = Desk(broker)
    yield made
    made.task.cancel()
    await asyncio.gather(made.task, return_exceptions=True)


def tokens(*texts: str, first: int = 0) -> Tokens:
    return Tokens(0, list(range(first, first + len(texts))), list(texts))


def done(texts: Iterable[str]) -> Finished:
    whole = list(texts)
    choice = Choice(text="".join(whole), token_ids=tuple(range(len(whole))), finish_reason="eos")
    return Finished(
        "done", choices=(choice,), usage=Usage(prompt_tokens=2, completion_tokens=len(whole)), seed=7
    )


async def test_a_stream_is_told_in_order_and_its_end_says_what_it_was(broker: StubBroker, desk: Desk) -> None:
    key = desk.hold("a")
    prefill = Prefill(token_ids=(1,), texts=("p",), logprobs=(None,))
    finished = done(["x", "y"])
    finished.prefill = prefill
    desk.take((key, prefill), (key, tokens("x")), (key, tokens("y", first=1)), (key, finished))
    await desk.publisher.wait_empty()
    assert [type(event).__name__ for event in broker.events("a")] == ["Prefill", "Delta"]
    end = broker.ends["a"]
    assert (end.model, end.revision, end.worker, end.seed) == ("m", "r", "w1", 7)
    assert (end.of, end.last_seq, end.prefill) == (1, 2, None)
    assert desk.metric("request_success_total", finished_reason="eos") == 1
    assert desk.metric("e2e_request_latency_seconds_count") == 1
    assert desk.metric("request_generation_tokens_sum") == 2


async def test_a_one_shot_request_tells_its_end_alone(broker: StubBroker, desk: Desk) -> None:
    key = desk.hold("a", stream=False)
    finished = done(["x"])
    finished.prefill = Prefill(token_ids=(1,), texts=("p",), logprobs=(None,))
    desk.take((key, finished.prefill), (key, tokens("x")), (key, finished))
    await desk.publisher.wait_empty()
    assert broker.emits == []
    assert broker.ends["a"].prefill == finished.prefill
    assert broker.ends["a"].last_seq == 0


async def test_while_a_call_is_stuck_tokens_merge_and_nothing_is_lost(broker: StubBroker, desk: Desk) -> None:
    broker.open.clear()
    keys = [desk.hold(rid) for rid in "abc"]
    desk.take(*[(key, tokens("0")) for key in keys])
    await eventually(lambda: broker.waiting == 1, "a call that waits")
    texts = ["0"]
    for step in range(1, 2000):
        texts.append(str(step))
        desk.take(*[(key, tokens(str(step), first=step)) for key in keys])
    desk.take(*[(key, done(texts)) for key in keys])
    # What waits is one delta a request, however long it takes: as much as the answer itself, no more.
    assert [len(desk.publisher._held[key].tokens) for key in keys] == [1, 1, 1]
    assert broker.waiting == 1
    broker.open.set()
    await desk.publisher.wait_empty()
    for rid in "abc":
        assert [len(event.token_ids) for event in broker.events(rid)] == [1, 1999]
        assert broker.text(rid) == broker.ends[rid].text == "".join(texts)
        assert broker.ends[rid].last_seq == 2


async def test_it_says_since_when_the_oldest_event_waits(broker: StubBroker, desk: Desk) -> None:
    publisher = desk.publisher
    broker.open.clear()
    a, b, whole = desk.hold("a"), desk.hold("b"), desk.hold("c", stream=False)
    desk.take((whole, tokens("x")), at=5.0)
    assert publisher.waiting_since() is None, "the end will tell it"
    desk.take((a, tokens("0")), at=10.0)
    assert publisher.waiting_since() == 10.0
    await eventually(lambda: broker.waiting == 1, "a call that waits")
    desk.take((a, tokens("1", first=1)), at=20.0)
    desk.take((b, tokens("0")), (whole, done(["x"])), at=30.0)
    assert publisher.waiting_since() == 10.0, "it is on its way, and no further"
    broker.open.set()
    broker.open.clear()
    await eventually(lambda: broker.waiting == 1 and broker.log, "the next call")
    assert publisher.waiting_since() == 20.0
    desk.take((b, tokens("1", first=1)), at=40.0)
    publisher.lose([a, b])
    broker.open.set()
    await eventually(lambda: publisher.waiting_since() is None, "nothing that waits")
    assert broker.ends.keys() == {"c"}
    before = time.perf_counter()
    desk.take((desk.hold("d"), tokens("0")))
    since = publisher.waiting_since()
    assert since is not None
    assert before <= since <= time.perf_counter()


async def test_all_of_a_step_goes_out_in_one_call_of_each_kind(broker: StubBroker, desk: Desk) -> None:
    keys = [desk.hold(rid) for rid in "abcd"]
    desk.take(*[(key, event) for key in keys for event in (tokens("x"), done(["x"]))])
    await desk.publisher.wait_empty()
    assert [len(emissions) for emissions in broker.emits] == [4]
    assert broker.finishes == [["a", "b", "c", "d"]]


async def test_choices_stay_apart(broker: StubBroker, desk: Desk) -> None:
    broker.open.clear()
    key = desk.hold("a")
    desk.take((key, tokens("-")))
    await eventually(lambda: broker.waiting == 1, "a call that waits")
    for index in (0, 1, 0, 1):
        desk.take((key, Tokens(index, [1], [str(index)], [-0.5], [((1, -0.5), (2, -1.0 - index))])))
    broker.open.set()
    await eventually(lambda: len(broker.log.get("a", {})) == 3, "both choices")
    assert broker.events("a")[1:] == [
        Delta(
            index=index,
            token_ids=(1, 1),
            texts=(str(index), str(index)),
            logprobs=(-0.5, -0.5),
            top_logprobs=(((1, -0.5), (2, -1.0 - index)),) * 2,
        )
        for index in (0, 1)
    ]


async def test_lists_of_the_engine_are_left_alone(broker: StubBroker, desk: Desk) -> None:
    broker.open.clear()
    key = desk.hold("a")
    first = Tokens(0, [0], ["x"], [-0.5], [((0, -0.5),)])
    desk.take((key, first), (key, Tokens(0, [1], ["y"], [-0.5], [((1, -0.5),)])))
    assert first == Tokens(0, [0], ["x"], [-0.5], [((0, -0.5),)])


async def test_a_call_whose_reply_was_lost_is_made_again_and_doubles_nothing(
    broker: StubBroker, desk: Desk
) -> None:
    broker.failures = 2
    key = desk.hold("a")
    desk.take((key, tokens("x")))
    await eventually(lambda: len(broker.emits) == 3, "three calls")
    assert broker.emits[0] == broker.emits[1] == broker.emits[2]
    broker.failures = 2
    desk.take((key, done(["x"])))
    await desk.publisher.wait_empty()
    assert broker.text("a") == "x"
    assert broker.finishes == [["a"]] * 3
    assert desk.metric("request_success_total", finished_reason="eos") == 1


async def test_fenced_means_cancel_and_silence(broker: StubBroker, desk: Desk) -> None:
    lost, kept = desk.hold("lost"), desk.hold("kept")
    broker.fenced.add("lost")
    desk.take((lost, tokens("x")), (kept, tokens("x")))
    await eventually(lambda: desk.forgotten == [lost], "the loss")
    assert not desk.publisher.holds(lost)
    emitted = len(broker.emits)
    desk.take((lost, tokens("y")), (lost, done(["x", "y"])))
    desk.take((kept, done(["x"])))
    await desk.publisher.wait_empty()
    assert list(broker.ends) == ["kept"]
    assert len(broker.emits) == emitted
    assert desk.metric("fenced_writes_total") == 1


async def test_lost_and_finished_in_one_step_it_writes_no_end(broker: StubBroker, desk: Desk) -> None:
    key = desk.hold("a")
    broker.fenced.add("a")
    desk.take((key, tokens("x")), (key, done(["x"])))
    await desk.publisher.wait_empty()
    assert broker.finishes == []
    assert desk.forgotten == [key]


async def test_what_is_lost_is_a_lost_lease_only_if_the_leases_have_run_out(
    broker: StubBroker, desk: Desk
) -> None:
    desk.publisher.lose([desk.hold("cancelled"), desk.hold("overdue", deadline_at_ms=1000)])
    desk.publisher.lose([desk.hold("drained")], "handed_back")
    assert desk.metric("leases_lost_total") == 0
    assert desk.metric("request_failure_total", error_type="cancelled") == 1
    desk.leases_ran_out = True
    broker.fenced.add("a")
    desk.take((desk.hold("a"), tokens("x")))
    await desk.publisher.wait_empty()
    kept = desk.hold("b")
    desk.publisher.lose([("a", 1), kept])
    assert desk.metric("leases_lost_total") == 2, "each once, whoever hears of it first"
    assert desk.metric("request_failure_total", error_type="cancelled") == 1


async def test_an_end_that_was_refused_is_no_success(broker: StubBroker, desk: Desk) -> None:
    key = desk.hold("a", stream=False)
    broker.fenced.add("a")
    desk.take((key, done(["x"])))
    await desk.publisher.wait_empty()
    assert desk.metric("request_success_total", finished_reason="eos") == 0
    assert desk.metric("fenced_writes_total") == 1


async def test_an_attempt_that_another_follows_is_no_failed_request(broker: StubBroker, desk: Desk) -> None:
    later = Finished("failed", error=GenerationFailed("later", retryable=True))
    broker.returned.add("a")
    desk.take((desk.hold("a"), later), (desk.hold("b"), later))  # the policy of b lets it try no more
    await desk.publisher.wait_empty()
    assert broker.retries == {"a", "b"}
    assert desk.metric("request_failure_total", error_type="generation_failed") == 1
    assert desk.metric("e2e_request_latency_seconds_count") == 1


async def test_what_is_lost_is_forgotten_and_its_end_never_told(broker: StubBroker, desk: Desk) -> None:
    lost, kept, ended = desk.hold("lost"), desk.hold("kept"), desk.hold("ended", stream=False)
    broker.open.clear()
    desk.take((ended, done(["x"])))
    await eventually(lambda: broker.waiting == 1, "a call that waits")
    desk.take((lost, tokens("x")), (kept, tokens("x")))
    # A renewal says so, while the publisher waits for its own answer.
    desk.publisher.lose([lost, ended, ("never held", 1)])
    assert desk.forgotten == [lost, ended]
    desk.take((lost, done(["x"])), (kept, done(["x"])))
    broker.open.set()
    await desk.publisher.wait_empty()
    assert (list(broker.log), sorted(broker.ends)) == (["kept"], ["ended", "kept"])
    assert desk.metric("request_success_total", finished_reason="eos") == 1, (
        "what was not ours is not counted"
    )


async def test_what_is_lost_is_billed(broker: StubBroker, desk: Desk) -> None:
    streams, quiet, begun, waiting, ended = (
        desk.hold(rid, stream=rid != "quiet", kind="generate")
        for rid in ("stream", "quiet", "begun", "waiting", "ended")
    )
    ready = cast(Arrival, SimpleNamespace(prepared=SimpleNamespace(prompt_tokens=30)))
    desk.publisher.prepared(dict.fromkeys((streams, quiet, begun, waiting, ended), ready))
    desk.publisher.begun([streams, quiet, begun, ended, ("never held", 1)])
    for key in (streams, quiet):
        desk.take((key, Prefill(token_ids=(1,), texts=("p",), logprobs=(None,))))
        desk.take((key, tokens("x", "y")), (key, Tokens(1, [7], ["z"])), (key, Tokens(1, [], ["rest"])))
    broker.open.clear()
    usage = Usage(prompt_tokens=30, completion_tokens=9)
    desk.publisher.lose([streams, quiet, begun, waiting])
    broker.fenced.add("ended")
    desk.take((ended, tokens("x")), (ended, Finished("done", usage=usage)))
    assert desk.publisher.held == 4, "one that is held, and three bills"
    broker.open.set()
    broker.failures = 1
    await desk.publisher.wait_empty()
    assert sorted(set(broker.bills)) == [
        ("begun", "|1|nbegun-0|w1|", 30, 0),
        ("ended", "|1|nended-0|w1|", 30, 9),
        ("quiet", "|1|nquiet-0|w1|", 30, 3),
        ("stream", "|1|nstream-0|w1|", 30, 3),
    ]
    assert (broker.finishes, desk.publisher.held) == ([], 0)


@pytest.mark.parametrize("how", ["an end on its way", "handed back", "nothing computed", "another kind"])
async def test_what_is_lost_without_a_bill(broker: StubBroker, desk: Desk, how: str) -> None:
    key = desk.hold("a", stream=False, kind="embed" if how == "another kind" else "generate")
    desk.publisher.prepared({key: cast(Arrival, SimpleNamespace(prepared=SimpleNamespace(prompt_tokens=3)))})
    if how != "nothing computed":
        desk.publisher.begun([key])
    if how == "an end on its way":
        broker.open.clear()
        desk.take((key, done(["x"])))
        await eventually(lambda: broker.waiting == 1, "a call that waits")
    desk.publisher.lose([key], "handed_back" if how == "handed back" else "lost")
    broker.open.set()
    await desk.publisher.wait_told()
    assert desk.publisher.held == 0
    assert broker.bills == []


async def test_losing_the_last_one_leaves_it_empty(desk: Desk) -> None:
    key = desk.hold("a")
    waiting = asyncio.create_task(desk.publisher.wait_empty())
    desk.publisher.lose([key])
    async with asyncio.timeout(60):
        await waiting
    assert (desk.publisher.held, desk.freed) == (0, 1)


async def test_what_is_held_is_ours_to_keep_until_its_end_is_told(broker: StubBroker, desk: Desk) -> None:
    running, ended = desk.hold("running"), desk.hold("ended", stream=False)
    broker.open.clear()
    desk.take((ended, done(["x"])))
    await eventually(lambda: broker.waiting == 1, "a call that waits")
    assert {one.key for one in desk.publisher.deliveries()} == {running, ended}
    assert [one.key for one in desk.publisher.unfinished()] == [running], "it can be handed back"
    broker.open.set()
    await eventually(lambda: desk.publisher.held == 1, "the end")
    assert [one.key for one in desk.publisher.deliveries()] == [running]


@pytest.mark.parametrize(
    ("finished", "is_wanted"),
    [
        (Finished("failed", error=GenerationFailed("later", retryable=True)), True),
        (Finished("failed", error=GenerationFailed("never")), False),
        (Finished("failed", error=InvalidRequest("never")), False),
        (Finished("expired", error=DeadlineExceeded("too late")), False),
        (done(["x"]), False),
    ],
    ids=["retryable", "for good", "invalid", "expired", "done"],
)
async def test_only_a_failure_that_may_pass_is_tried_again(
    broker: StubBroker, desk: Desk, finished: Finished, is_wanted: bool
) -> None:
    key = desk.hold("a", stream=False)
    desk.take((key, finished))
    await desk.publisher.wait_empty()
    assert broker.retries == ({"a"} if is_wanted else set())


@pytest.mark.parametrize(
    ("after_s", "pause_ms"),
    [
        (None, None),
        (0.0, 0),
        (0.25, 250),
        (0.0004, 0),
        (60, 60_000),
        # An hour at most, as on the server; and what is no time at all ends no publisher.
        (1e12, 3_600_000),
        (float("inf"), 3_600_000),
        (float("nan"), 3_600_000),
        (-5.0, 0),
    ],
)
async def test_how_long_it_waits_for_its_next_try(
    broker: StubBroker, desk: Desk, after_s: float | None, pause_ms: int | None
) -> None:
    key = desk.hold("a", stream=False)
    error = GenerationFailed("later", retryable=True)
    desk.take((key, Finished("failed", error=error, retry_after_s=after_s)))
    async with asyncio.timeout(60):
        await desk.publisher.wait_empty()
    assert broker.retries == {"a"}
    assert broker.pauses == {"a": pause_ms}


# --- parts of an output


async def test_parts_merge_while_a_call_is_stuck_and_the_end_has_all(broker: StubBroker, desk: Desk) -> None:
    broker.open.clear()
    key, silent = desk.hold("a"), desk.hold("silent", stream=False)
    desk.take((key, Parts([0])))
    await eventually(lambda: broker.waiting == 1, "a call that waits")
    given = [0, *({"n": number, "of": ["a", None, 1.5]} for number in range(1, 500))]
    for part in given[1:]:
        desk.take((key, Parts([part])), (silent, Parts([part])))
    finished = Finished("done", outputs=tuple(given))
    desk.take((key, finished), (silent, finished))
    broker.open.set()
    await desk.publisher.wait_empty()
    first, second = broker.events("a")
    assert isinstance(first, PartsEvent)
    assert isinstance(second, PartsEvent)
    assert [*first.values, *second.values] == given
    assert len(first.values) == 1
    for rid in ("a", "silent"):
        assert list(broker.ends[rid].outputs) == given
        assert broker.ends[rid].output == given[-1]
    assert broker.ends["a"].last_seq == 2
    assert "silent" not in broker.log


async def test_a_part_without_bytes_fails_its_request_alone(broker: StubBroker, desk: Desk) -> None:
    odd, good = desk.hold("odd"), desk.hold("good")
    desk.take((odd, Parts([object()])), (good, Parts(["x"])))
    desk.take((good, Finished("done", outputs=("x",))))
    await desk.publisher.wait_empty()
    assert {rid: end.state for rid, end in broker.ends.items()} == {"odd": "failed", "good": "done"}
    assert desk.forgotten == [odd]


async def test_parts_of_what_is_lost_are_not_told(broker: StubBroker, desk: Desk) -> None:
    key = desk.hold("a")
    broker.open.clear()
    other = desk.hold("other")
    desk.take((other, Parts([1])))
    await eventually(lambda: broker.waiting == 1, "a call that waits")
    desk.take((key, Parts([1])))
    desk.publisher.lose([key])
    desk.take((key, Parts([2])), (other, Finished("done", outputs=(1,))))
    broker.open.set()
    await desk.publisher.wait_empty()
    assert list(broker.log) == ["other"]


# --- what an end says


async def test_each_end_tells_the_memory_of_its_time(broker: StubBroker, desk: Desk) -> None:
    first, second = desk.hold("first", stream=False), desk.hold("second")
    desk.take((first, done(["x"])), (second, tokens("x")))
    await eventually(lambda: "first" in broker.ends, "the first end")
    desk.memory = {"weights": 100, "buffers": 7}
    desk.take((second, Finished("failed", error=GenerationFailed("it failed"))))
    await desk.publisher.wait_empty()
    assert dict(broker.ends["first"].memory) == {"weights": 100}
    assert dict(broker.ends["second"].memory) == {"weights": 100, "buffers": 7}


async def test_an_end_has_all_that_one_shot_work_gives(broker: StubBroker, desk: Desk) -> None:
    key = desk.hold("a", stream=False)
    finished = Finished(
        "done",
        embeddings=(Embedding(data=struct.pack("<2f", 0.5, -2.0)),),
        classifications=(Classification(labels=(Label(label="good", score=0.75),)),),
        ranking=(Rank(index=1, score=0.5), Rank(index=0, score=0.25)),
        usage=Usage(prompt_tokens=5, truncated=1, cut_tokens=3),
        timing=Timing(wait_ms=1, tokenize_ms=2, device_ms=3, batches=4),
    )
    desk.take((key, finished))
    await desk.publisher.wait_empty()
    end = broker.ends["a"]
    assert list(end.embeddings[0].vector) == [0.5, -2.0]
    assert (end.classifications, end.ranking) == (finished.classifications, finished.ranking)
    assert (end.usage, end.timing) == (finished.usage, finished.timing)


@pytest.mark.parametrize("bad", ["\ud83d", 7])
async def test_a_delta_without_bytes_fails_its_request_alone(
    broker: StubBroker, desk: Desk, bad: Any
) -> None:
    odd, good = desk.hold("odd"), desk.hold("good")
    desk.take((odd, tokens("x")), (good, tokens("x")))
    desk.take((odd, Tokens(0, [1], [bad])), (good, tokens("y", first=1)))
    await eventually(lambda: "odd" in broker.ends, "the failure")
    assert broker.ends["odd"].state == "failed"
    assert desk.forgotten == [odd]
    desk.take((odd, done(["x", "?"])), (good, done(["x", "y"])))
    await desk.publisher.wait_empty()
    assert broker.ends["good"].text == "xy"
    assert desk.metric("fenced_writes_total") == 0


async def test_an_end_without_bytes_fails_its_request_alone(broker: StubBroker, desk: Desk) -> None:
    keys = [desk.hold(rid, stream=False) for rid in ("good", "odd", "fine")]
    odd = done(["x"])
    odd.choices = (odd.choices[0].model_copy(update={"text": "\ud83d"}),)
    desk.take((keys[0], done(["x"])), (keys[1], odd), (keys[2], done(["y"])))
    await desk.publisher.wait_empty()
    assert {rid: end.state for rid, end in broker.ends.items()} == {
        "good": "done",
        "odd": "failed",
        "fine": "done",
    }


async def test_what_is_held_is_known_by_its_place(desk: Desk) -> None:
    assert desk.publisher.places() == set()
    keys = [desk.hold("a"), desk.hold("b")]
    assert desk.publisher.places() == {"na-0", "nb-0"}
    desk.publisher.lose(keys[:1])
    assert desk.publisher.places() == {"nb-0"}
