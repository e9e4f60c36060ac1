"""Handlers on the engine's thread, through the engine: what each call ends with."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import numpy as np
import pytest
from pydantic import BaseModel, Field, model_validator

from served_handler import ServedHandler, told
from streamfleet_common.codec import MAX_RESULT_BYTES
from streamfleet_common.errors import GenerationFailed, InvalidRequest, QueueFull, Unsupported
from streamfleet_common.schemas import Failure
from streamfleet_worker import END, Retry, handler
from streamfleet_worker.engine.answer_cache import AnswerCache
from streamfleet_worker.handlers.handler import Handler

Serve = Callable[..., ServedHandler]


class Review(BaseModel):
    text: str
    marks: list[int] = []


class Mood(BaseModel):
    label: str
    score: float = Field(ge=0, le=1)


def test_each_call_gets_its_own_output(serve: Serve) -> None:
    batches: list[list[str]] = []

    @handler("h", max_batch_size=4)
    def predict(batch: list[Review]) -> list[Mood | Exception]:
        batches.append([review.text for review in batch])
        return [Mood(label=review.text.upper(), score=0.25) for review in batch]

    ends = serve(predict.handler).ask(*({"text": f"r{n}"} for n in range(10)))

    assert [told(end) for end in ends] == [{"label": f"R{n}", "score": 0.25} for n in range(10)]
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert all(end.timing.batches == 1 for end in ends)


def test_an_async_handler_is_awaited(serve: Serve) -> None:
    async def double(value: int) -> int:
        await asyncio.sleep(0)
        return 2 * value

    @handler("h")
    async def predict(batch: list[int]) -> list[int]:
        return list(await asyncio.gather(*map(double, batch)))

    assert [told(end) for end in serve(predict.handler).ask(1, 2, 3)] == [2, 4, 6]


def test_what_a_handler_hands_on_is_awaited_too(serve: Serve) -> None:
    async def double(batch: list[int]) -> list[int]:
        return [2 * value for value in batch]

    @handler("h")
    def predict(batch: list[int]) -> list[int]:
        return cast("list[int]", double(batch))

    assert [told(end) for end in serve(predict.handler).ask(1, 2)] == [2, 4]


def test_collate_makes_what_the_function_takes(serve: Serve) -> None:
    shapes = []

    def stack(inputs: list[list[float]]) -> np.ndarray[Any, Any]:
        return np.stack([np.asarray(one) for one in inputs])

    @handler("h", collate=stack)
    def total(batch: np.ndarray[Any, Any]) -> list[float]:
        shapes.append(batch.shape)
        return list(batch.sum(axis=1))

    served = serve(total.handler)

    assert [told(end) for end in served.ask([1, 2, 3], [4, 5, 6])] == [6.0, 15.0]
    assert shapes == [(2, 3)]
    # What does not stack is found out, and fails alone.
    ends = served.ask([1, 2, 3], [1], [4, 5, 6])
    assert [end.state for end in ends] == ["done", "done", "done"]


def test_an_input_that_is_none_is_refused(serve: Serve) -> None:
    @handler("h")
    def predict(batch: list[Review]) -> list[str]:
        return [review.text for review in batch]

    with pytest.raises(InvalidRequest) as caught:
        serve(predict.handler).ask({"text": 3, "marks": ["x"]})
    assert [problem.partition(":")[0] for problem in caught.value.problems] == ["text", "marks.0"]


# --- errors of items --------------------------------------------------------------------------


def test_an_exception_in_its_place_fails_one_call(serve: Serve) -> None:
    raised = {"busy": QueueFull("not now", limit=1, retry_after=2.0), "bad": InvalidRequest("not that")}

    @handler("h")
    def predict(batch: list[str]) -> list[str | Exception]:
        return [raised.get(text, ValueError(f"no {text}") if text == "odd" else text) for text in batch]

    ends = serve(predict.handler).ask("a", "odd", "busy", "bad", "b")

    assert [end.state for end in ends] == ["done", "failed", "failed", "failed", "done"]
    assert [told(ends[0]), told(ends[4])] == ["a", "b"]
    assert isinstance(ends[1].error, GenerationFailed)
    assert told(ends[1]) == "handler 'h' failed on this input: ValueError: no odd"
    assert not ends[1].error.retryable
    assert isinstance(ends[2].error, QueueFull)
    assert isinstance(ends[3].error, InvalidRequest)


def test_an_output_that_is_none_fails_one_call(serve: Serve) -> None:
    given: dict[str, Any] = {
        "a": Mood(label="x", score=0.5),
        "b": {"label": "y", "score": 7},
        "c": {"label": "z", "score": 1},
        "d": None,
        "e": END,
        "f": {"label": "f", "score": float("nan")},
        "g": {"label": "g"},
    }

    @handler("h")
    def predict(batch: list[str]) -> list[Mood]:
        return [given[text] for text in batch]

    ends = serve(predict.handler).ask(*given)

    assert [end.state for end in ends] == ["done", "failed", "done", *["failed"] * 4]
    assert told(ends[0]) == {"label": "x", "score": 0.5}
    fit = "handler 'h' gave an output that does not fit Mood: "
    assert told(ends[1]) == f"{fit}score should be less than or equal to 1"
    assert told(ends[2]) == {"label": "z", "score": 1.0}
    assert told(ends[3]) == f"{fit}the output should be a valid dictionary or instance of Mood"
    assert "which is for handlers that yield" in told(ends[4])
    assert told(ends[6]) == f"{fit}score is missing"


def test_one_place_is_not_told_as_many(serve: Serve) -> None:
    @handler("h")
    def predict(batch: list[str]) -> list[str]:
        return cast("list[str]", np.array(batch) if batch == ["array"] else [])

    served = serve(predict.handler)

    (array,), (none,) = served.ask("array"), served.ask("none")
    assert told(array) == (
        "handler 'h' returned ndarray: "
        "a list with 1 place is wanted, one for each input (.tolist() makes one)"
    )
    assert told(none) == "handler 'h' returned 0 places for 1 input: one is wanted for each, in their order"


def test_an_output_that_no_result_holds_fails_one_call(serve: Serve) -> None:
    @handler("h")
    def fill(batch: list[int]) -> list[str]:
        return ["x" * size for size in batch]

    ends = serve(fill.handler).ask(10, MAX_RESULT_BYTES, MAX_RESULT_BYTES - 70_000)

    assert [end.state for end in ends] == ["done", "failed", "done"]
    assert "bytes of output for one input, and a result holds" in told(ends[1])


def test_retry_in_its_place_puts_one_call_off(serve: Serve) -> None:
    @handler("h")
    def predict(batch: list[str]) -> list[str | Exception]:
        return [Retry(1.5) if text == "later" else text for text in batch]

    ends = serve(predict.handler).ask("a", "later", "b")

    assert [end.retry_after_s for end in ends] == [None, 1.5, None]
    assert [end.state for end in ends] == ["done", "failed", "done"]
    assert ends[1].error is not None
    assert ends[1].error.retryable


@pytest.mark.parametrize("error", [Retry(1.5), MemoryError("full"), RuntimeError("CUDA out of memory")])
def test_who_asked_learns_that_it_may_be_sent_again(serve: Serve, error: Exception) -> None:
    @handler("h")
    def predict(batch: list[str]) -> list[str]:
        raise error

    (end,) = serve(predict.handler).ask("a")

    assert end.error is not None
    assert Failure.of(end.error).error().retryable


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_validator_that_would_end_the_process_fails_its_call(serve: Serve, error: BaseException) -> None:
    class Strange(BaseModel):
        @model_validator(mode="before")
        @classmethod
        def leave(cls, _given: Any) -> Any:
            raise error

    @handler("h")
    def predict(batch: list[Strange]) -> list[str]:
        return ["?" for _ in batch]

    with pytest.raises(GenerationFailed, match=f"a validator of handler 'h' raised {type(error).__name__}"):
        serve(predict.handler).add([{}])


def test_an_error_that_cannot_be_told_fails_its_call(serve: Serve) -> None:
    class Mute:
        def __str__(self) -> str:
            raise RuntimeError("no words")

    @handler("h")
    def predict(batch: list[str]) -> list[str | Exception]:
        return [Unsupported(text, feature=Mute()) if text == "b" else text for text in batch]

    ends = serve(predict.handler).ask("a", "b")

    assert told(ends[0]) == "a"
    assert told(ends[1]) == "it failed on this request: Unsupported"


def test_retry_that_is_raised_puts_all_off(serve: Serve) -> None:
    calls = []

    @handler("h")
    def predict(batch: list[str]) -> list[str]:
        calls.append(len(batch))
        raise Retry(3)

    ends = serve(predict.handler).ask("a", "b", "c")

    assert [end.retry_after_s for end in ends] == [3.0, 3.0, 3.0]
    assert calls == [3]


# --- errors of batches ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda batch: batch[:-1], "handler 'h' returned 2 places for 3 inputs"),
        (lambda batch: [*batch, "more"], "handler 'h' returned 4 places for 3 inputs"),
        (lambda batch: None, "handler 'h' returned NoneType: a list with 3 places is wanted"),
        (lambda batch: np.array([1, 2, 3]), "handler 'h' returned ndarray: a list with 3"),
        (dict.fromkeys, "handler 'h' returned dict: a list with 3"),
        (lambda batch: "abc", "handler 'h' returned str: a list with 3"),
        (lambda batch: (one for one in batch), "handler 'h' returned generator: a list with 3"),
    ],
)
def test_a_result_of_another_form_fails_all_at_once(
    serve: Serve, given: Callable[[list[str]], Any], words: str
) -> None:
    calls = []

    @handler("h")
    def predict(batch: list[str]) -> list[str]:
        calls.append(len(batch))
        return cast("list[str]", given(batch))

    ends = serve(predict.handler).ask("a", "b", "c")

    assert all(told(end).startswith(words) for end in ends)
    assert calls == [3], "no item is to blame, so none is looked for"


def test_what_makes_it_raise_fails_alone(serve: Serve) -> None:
    """Also what is no Exception, and would end the thread."""
    raised = {
        "bug": KeyError("x"),
        "exit": SystemExit(3),
        "cancel": asyncio.CancelledError(),
        "stop": StopIteration("s"),
        "ours": InvalidRequest("not that"),
    }

    @handler("h", max_batch_size=32)
    def predict(batch: list[str]) -> list[str]:
        for text in batch:
            if text in raised:
                raise raised[text]
        return batch

    inputs = [f"a{n}" for n in range(27)]
    for place, text in enumerate(raised):
        inputs.insert(5 * place, text)
    served = serve(predict.handler)
    ends = dict(zip(inputs, served.ask(*inputs), strict=True))

    assert {text for text, end in ends.items() if end.state != "done"} == set(raised)
    assert all(told(end) == text for text, end in ends.items() if text not in raised)
    assert told(ends["bug"]) == "handler 'h' failed: KeyError: 'x'"
    assert told(ends["exit"]) == "handler 'h' failed: SystemExit: 3"
    assert told(ends["cancel"]) == "handler 'h' failed: CancelledError: "
    assert told(ends["stop"]) == "handler 'h' failed: StopIteration: s"
    assert isinstance(ends["ours"].error, InvalidRequest)
    # The handler, and what waits for it, live on.
    assert [told(end) for end in served.ask(*"0123456789")] == list("0123456789")


def test_an_async_handler_that_raises_fails_alone_too(serve: Serve) -> None:
    @handler("h")
    async def predict(batch: list[str]) -> list[str]:
        await asyncio.sleep(0)
        if "exit" in batch:
            raise SystemExit(1)
        if "cancel" in batch:
            task = asyncio.current_task()
            assert task is not None
            task.cancel()
            await asyncio.sleep(0)
        return batch

    served = serve(predict.handler)

    assert [end.state for end in served.ask("a", "exit", "cancel", "b")] == [
        "done",
        "failed",
        "failed",
        "done",
    ]
    assert told(served.ask("c")[0]) == "c"


def test_without_bisection_all_fail_and_nothing_runs_twice(serve: Serve) -> None:
    calls = []

    @handler("h", bisect=False)
    def send(batch: list[str]) -> list[str]:
        calls.append(list(batch))
        raise OSError("gone")

    ends = serve(send.handler).ask("a", "b", "c")

    # Its words may quote another's input.
    assert {told(end) for end in ends} == {"the batch that it ran in failed (OSError)"}
    assert calls == [["a", "b", "c"]]


def test_a_lack_of_memory_is_told_as_one(serve: Serve) -> None:
    """The engine takes smaller batches for a while; the request may be tried again."""

    @handler("h")
    def predict(batch: list[str]) -> list[str | Exception]:
        if "large" in batch:
            raise MemoryError("no room")
        return [MemoryError("none here") if text == "in place" else text for text in batch]

    ends = serve(predict.handler).ask("a", "large", "in place", "b")

    assert [end.state for end in ends] == ["done", "failed", "failed", "done"]
    assert [end.error is not None and end.error.retryable for end in ends] == [False, True, True, False]


def test_a_handler_that_changes_its_inputs_gets_them_afresh(serve: Serve) -> None:
    """What raises is run again in parts: each time with inputs as they came."""
    seen: list[list[int]] = []

    @handler("h")
    def predict(batch: list[Review]) -> list[int]:
        reviews = list(batch)
        batch.clear()
        for review in reviews:
            review.marks.append(0)
            seen.append(list(review.marks))
            if review.text == "bad":
                raise ValueError("bad")
        return [len(review.marks) for review in reviews]

    ends = serve(predict.handler).ask(
        {"text": "a", "marks": [7]}, {"text": "bad", "marks": [7]}, {"text": "b", "marks": [7]}
    )

    assert [end.state for end in ends] == ["done", "failed", "done"]
    assert told(ends[0]) == told(ends[2]) == 2
    assert all(marks == [7, 0] for marks in seen)


def test_an_output_that_changes_later_is_as_it_was_given(serve: Serve) -> None:
    kept: list[int] = []

    @handler("h", max_batch_size=1)
    def count(batch: list[str]) -> list[list[int]]:
        kept.append(len(kept))
        return [kept]

    assert [told(end) for end in serve(count.handler).ask("a", "b", "c")] == [[0], [0, 1], [0, 1, 2]]


# --- sharing ----------------------------------------------------------------------------------


def test_equal_calls_share_a_computation_if_they_may(serve: Serve) -> None:
    def counted(*, deterministic: bool) -> tuple[Handler, list[Any]]:
        calls: list[Any] = []

        @handler("h", deterministic=deterministic)
        def count(batch: list[dict[str, Any]]) -> list[int]:
            calls.extend(batch)
            return [len(one) for one in batch]

        return count.handler, calls

    inputs = [{"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 2.0}, {"a": 1}]
    one, calls = counted(deterministic=True)
    served = serve(one)
    assert [told(end) for end in served.ask(*inputs)] == [2, 2, 2, 1]
    assert calls == [inputs[0], inputs[2], inputs[3]]
    served.ask(inputs[0])
    assert len(calls) == 4, "nothing is kept unless there is a cache"

    one, calls = counted(deterministic=True)
    served = serve(one, AnswerCache(1 << 20))
    served.ask(*inputs)
    assert told(served.ask(inputs[1])[0]) == 2
    assert len(calls) == 3

    one, calls = counted(deterministic=False)
    serve(one, AnswerCache(1 << 20)).ask(*inputs)
    assert calls == inputs


def test_secrets_that_are_written_alike_are_told_apart(serve: Serve) -> None:
    from pydantic import SecretStr  # noqa: PLC0415

    @handler("h", deterministic=True)
    def reveal(batch: list[SecretStr]) -> list[str]:
        return [one.get_secret_value() for one in batch]

    assert [told(end) for end in serve(reveal.handler).ask("one", "two")] == ["one", "two"]


def test_it_all_happens_on_one_thread_that_is_not_the_engines() -> None:
    threads: list[int] = []

    def build() -> Iterator[int]:
        threads.append(threading.get_ident())
        yield 1
        threads.append(threading.get_ident())

    @handler("h", context={"model": build})
    def predict(batch: list[str], model: int) -> list[int]:
        threads.append(threading.get_ident())
        return [model for _ in batch]

    served = ServedHandler(predict.handler)
    served.ask("a")
    served.ask("b")
    served.close()
    assert len(threads) == 4
    assert len(set(threads)) == 1
    assert threading.get_ident() not in threads


def test_calls_that_nobody_wants_keep_their_places(serve: Serve) -> None:
    """5 of 8 are cancelled before the batch begins, 3 of 8 while it runs; ten more then succeed."""
    served: ServedHandler
    during: list[Any] = []
    sizes: list[int] = []

    @handler("h", max_batch_size=8)
    def predict(batch: list[int]) -> list[int]:
        sizes.append(len(batch))
        served.engine.cancel(during)
        return [value * 10 for value in batch]

    served = serve(predict.handler)
    keys = served.add(range(8))
    served.engine.cancel(keys[:5])
    assert [told(end) for end in served.run(keys[5:])] == [50, 60, 70]

    keys = served.add(range(8))
    during.extend(keys[2:5])
    left = keys[:2] + keys[5:]
    assert [told(end) for end in served.run(left)] == [0, 10, 50, 60, 70]
    assert sizes == [3, 8]

    during.clear()
    assert [told(end) for end in served.ask(*range(10))] == [value * 10 for value in range(10)]
    assert len(served.ends) == 3 + 5 + 10
