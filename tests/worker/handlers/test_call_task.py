"""What is asked of a handler's worker before anything runs."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from streamfleet_common.errors import InvalidRequest, ModelNotFound, Unsupported
from streamfleet_common.one_shot import CallRequest, EmbedRequest
from streamfleet_common.schemas import GenerateRequest
from streamfleet_worker import handler
from streamfleet_worker.handlers.call_task import CallTask


class Order(BaseModel):
    lines: list[int]
    note: str = ""


@handler("shop")
def serve(batch: list[Order]) -> list[int]:
    return [sum(order.lines) for order in batch]


@handler("sum", deterministic=True)
def add(batch: list[dict[str, float]]) -> list[float]:
    return [sum(one.values()) for one in batch]


def test_a_call_is_one_item() -> None:
    job = CallTask(serve.handler).prepare(CallRequest(handler="shop", input={"lines": [1, 2]}))

    (item,) = job.items
    assert (job.n, item.length, item.group, item.digest) == (1, 0, None, None)
    assert item.value.take() == Order(lines=[1, 2])
    assert item.bytes >= len('{"lines":[1,2]}')
    assert job.answer([(3,)]) == {"outputs": (3,)}
    assert job.answer([["a", "b"]]) == {"outputs": ("a", "b")}


def test_each_taker_of_an_input_has_its_own() -> None:
    (item,) = CallTask(serve.handler).prepare(CallRequest(handler="shop", input={"lines": [1]})).items

    first, second = item.value.take(), item.value.take()
    first.lines.append(2)

    assert second == item.value.take() == Order(lines=[1])


def test_other_requests_are_refused() -> None:
    task = CallTask(serve.handler)

    for request in (GenerateRequest(prompt="x"), EmbedRequest(texts=["x"])):
        with pytest.raises(Unsupported) as unsupported:
            task.prepare(request)
        assert unsupported.value.feature == request.kind
    with pytest.raises(ModelNotFound) as not_found:
        task.prepare(CallRequest(handler="shoe", input={}))
    assert not_found.value.known == ["shop"]


def test_an_input_that_does_not_fit_is_refused_with_all_that_is_wrong() -> None:
    with pytest.raises(InvalidRequest) as caught:
        CallTask(serve.handler).prepare(
            CallRequest(handler="shop", input={"lines": [1, "secret"], "note": 5})
        )

    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["lines.1", "note"]
    assert "handler 'shop' takes no such input" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_text_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot be written as JSON"):
        CallTask(serve.handler).prepare(CallRequest(handler="shop", input={"note": "\ud800"}))


def test_equal_inputs_have_equal_digests() -> None:
    def digest(given: object) -> bytes | None:
        return CallTask(add.handler).prepare(CallRequest(handler="sum", input=given)).items[0].digest

    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) is not None
    different = [{}, {"a": 1}, {"a": 1.5}, {"b": 1}, {"a": 1, "b": 1}, {"a": 10}]
    assert len({digest(one) for one in different}) == len(different)
