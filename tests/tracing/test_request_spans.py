"""The spans of one attempt, computed by hand from its times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import spans
from spans import Kept
from streamfleet_common.deliveries import Delivery, Entry
from streamfleet_common.schemas import Batch, Choice, End, Failure, Timing, Usage
from streamfleet_worker.publisher import Held

RID = "00" + "4b" * 16
PARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
ACCEPTED_MS, TAKEN_MS = 1_796_000_000_000, 1_796_000_000_250
S_NS, MS_NS = 10**9, 10**6


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    spans.forget()
    yield
    spans.forget()


def held(**fields: Any) -> Held:
    entry = Entry(RID, "1-0", "normal", b"")
    delivery = Delivery(entry, "w0", 1, TAKEN_MS, ACCEPTED_MS, TAKEN_MS + 9000, 1, 0)
    return Held(delivery, "acme", stream=False, kind="embed", held_at=50.0, **fields)


def made(one: Held, end: End, at: float) -> dict[str, Kept]:
    spans.worker_spans("w0").ended(one, end, at)
    return {span.name: span for span in spans.kept()}


def times(span: Kept) -> tuple[int, int]:
    """Milliseconds since acceptance."""
    return (
        round((span.began - ACCEPTED_MS * MS_NS) / MS_NS),
        round((span.ended - ACCEPTED_MS * MS_NS) / MS_NS),
    )


def test_one_shot_work_has_its_batch_and_neither_prefill_nor_decode() -> None:
    timing = Timing(wait_ms=20, tokenize_ms=4, device_ms=30, batches=2)
    batch = Batch(id="w0/7", size=5, padded_ratio=0.25, reason="delay")
    end = End(state="done", model="minilm", timing=timing, batch=batch, usage=Usage(prompt_tokens=9))
    one = held(traceparent=PARENT, prepared_at=50.01, finished_at=50.08)
    by_name = made(one, end, 50.09)
    assert {name: times(span) for name, span in by_name.items()} == {
        "request": (0, 340),
        "queue wait": (0, 250),
        "tokenize": (250, 260),
        "wait": (260, 280),
        "batch": (280, 330),
        "publish": (330, 340),
    }
    said = by_name["batch"].attributes
    assert (said["streamfleet.batches"], said["streamfleet.device_ms"]) == (2, 30.0)
    assert (said["streamfleet.batch.id"], said["streamfleet.batch.reason"]) == ("w0/7", "delay")
    assert (said["streamfleet.batch.size"], said["streamfleet.batch.padded_ratio"]) == (5, 0.25)
    request = by_name["request"]
    assert (request.trace_id, request.parent) == ("a" * 32, "b" * 16)
    assert request.attributes["gen_ai.operation.name"] == "embeddings"
    assert request.attributes["gen_ai.request.model"] == "minilm"
    assert request.attributes["streamfleet.tenant"] == "acme"


def test_a_generation_whose_times_add_up_to_too_much_ends_where_it_ended() -> None:
    choice = Choice(text="a", token_ids=(1, 2), finish_reason="eos")
    timing = Timing(wait_ms=5, prefill_ms=10, decode_ms=1000)
    end = End(state="done", choices=(choice,), timing=timing, usage=Usage(completion_tokens=2))
    by_name = made(held(prepared_at=50.0, finished_at=50.1), end, 50.1)
    assert times(by_name["prefill"]) == (255, 265)
    assert times(by_name["decode"]) == (265, 350)
    assert times(by_name["publish"]) == (350, 350)
    assert by_name["request"].attributes["gen_ai.response.finish_reasons"] == ("eos",)


def test_what_never_came_into_the_engine_has_no_part_there() -> None:
    end = End(state="failed", error=Failure(code="too_long", message="canary-3 is too long"))
    by_name = made(held(finished_at=50.002), end, 50.004)
    assert sorted(by_name) == ["publish", "queue wait", "request"]
    assert (by_name["request"].is_error, by_name["request"].error) == (True, "too_long")
    assert "canary" not in repr(by_name)


def test_a_clock_that_was_set_back_makes_no_span_that_ends_before_it_begins() -> None:
    one = held(prepared_at=50.0, finished_at=50.0)
    one.delivery.now_ms = ACCEPTED_MS - 5000
    by_name = made(one, End(state="done"), 50.0)
    assert all(span.began <= span.ended for span in by_name.values())


def test_an_attempt_names_the_one_before_it() -> None:
    worker = spans.worker_spans("w0")
    one, other = held(traceparent=PARENT), held(traceparent=PARENT)
    other.delivery.attempts, other.delivery.epoch = 2, 5
    worker.left(one, "lost", 51.0)
    worker.ended(other, End(state="done"), 51.0)
    first, second = [span for span in spans.kept() if span.name == "request"]
    assert first.attributes["streamfleet.outcome"] == "lost"
    assert (first.links, second.links) == ((), ((first.trace_id, first.id),))
    assert first.id != second.id


def test_spans_that_cannot_be_made_are_no_reason_to_lose_a_request() -> None:
    one = held()
    one.delivery.entry.rid = "not of this world"  # no digits for a trace's id
    spans.worker_spans("w0").ended(one, End(state="done"), 51.0)
    spans.worker_spans("w0").left(one, "lost", 51.0)
    assert list(spans.kept()) == []
