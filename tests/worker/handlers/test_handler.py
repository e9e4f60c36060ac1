"""The decorator: what it reads off a function, what it refuses, and that the function stays what it was."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from streamfleet_worker import END, Retry, handler
from streamfleet_worker.engine.item import RetryLater
from streamfleet_worker.handlers.handler import Handler

if TYPE_CHECKING:
    from decimal import Context as OnlyForCheckers


class Review(BaseModel):
    model_config = ConfigDict(populate_by_name=True)

    text: str = Field(min_length=1, alias="body")


class Mood(BaseModel):
    label: str
    score: float = Field(ge=0, le=1)


class Point(TypedDict):
    x: float


class Model:
    def label(self, text: str) -> str:
        return "good" if "good" in text else "bad"


def load_model() -> Model:
    return Model()


@handler("sentiment", max_batch_size=4, max_delay_ms=50, context={"model": load_model})
def predict(batch: list[Review], model: Model) -> list[Mood | Exception]:
    """Say what each review feels like."""
    return [Mood(label=model.label(review.text), score=0.5) for review in batch]


def refused(function: Callable[..., Any], **options: Any) -> str:
    with pytest.raises((TypeError, ValueError)) as caught:
        handler("h", **options)(function)
    return str(caught.value)


def input_schema(made: Handler) -> Any:
    return json.loads(made.card().input_schema)


def output_schema(made: Handler) -> Any:
    return json.loads(made.card().output_schema)


def test_the_function_stays_callable_as_it_was() -> None:
    assert predict([Review(text="good")], Model()) == [Mood(label="good", score=0.5)]
    assert predict([Review(text="sad")], model=Model()) == [Mood(label="bad", score=0.5)]
    assert predict.__name__ == "predict"  # type: ignore[attr-defined]
    assert predict.__doc__ == "Say what each review feels like."
    # Nothing is checked: what it gives is what the user's code gives.
    assert predict.handler.function([], model=Model()) == []


def test_it_knows_its_handler() -> None:
    made = predict.handler

    assert (made.name, made.max_batch_size, made.max_delay_ms) == ("sentiment", 4, 50)
    assert (made.bisect, made.deterministic, made.processes, made.timeout_s) == (True, False, 0, None)
    assert made.path == f"{__name__}:predict"
    assert made.revision == hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:16]


def test_the_card_has_the_schemas_as_json_has_them() -> None:
    card = predict.handler.card()

    # By alias, which is how it is read and written; errors are no part of what comes back.
    assert json.loads(card.input_schema)["required"] == ["body"]
    assert json.loads(card.output_schema)["required"] == ["label", "score"]
    assert not card.streams


def test_any_type_that_pydantic_takes_will_do() -> None:
    @handler("h")
    def numbers(batch: Sequence[list[float]]) -> list[str]:
        return [str(sum(one)) for one in batch]

    @handler("h")
    def points(batch: list[Point]) -> list[float | None]:
        return [one["x"] for one in batch]

    assert input_schema(numbers.handler) == {"items": {"type": "number"}, "type": "array"}
    assert output_schema(numbers.handler) == {"type": "string"}
    assert input_schema(points.handler)["properties"] == {"x": {"title": "X", "type": "number"}}
    assert output_schema(points.handler) == {"anyOf": [{"type": "number"}, {"type": "null"}]}


def test_what_is_not_annotated_is_any_json_value() -> None:
    @handler("h")
    def echo(batch):  # type: ignore[no-untyped-def]
        return batch

    @handler("h")
    def bare(batch: list) -> list:  # type: ignore[type-arg]
        return batch

    for made in (echo.handler, bare.handler):
        assert (made.card().input_schema, made.card().output_schema) == ("", "")


def test_annotations_that_are_for_checkers_only_are_left_alone() -> None:
    @handler("h", context={"given": dict})
    def fine(batch: list[str], given: OnlyForCheckers) -> list[str]:
        return batch

    assert input_schema(fine.handler) == {"type": "string"}


def test_a_generator_streams_and_its_parts_are_what_its_lists_hold() -> None:
    @handler("h")
    def words(batch: list[str]) -> Iterator[list[str | Exception | None]]:
        yield list(batch)

    @handler("h")
    def counts(batch: list[str]) -> Generator[list[int | None], None, None]:
        yield [1 for _ in batch]

    @handler("h")
    async def later(batch: list[str]) -> AsyncIterator[list[float | None]]:
        yield [1.0 for _ in batch]

    @handler("h")
    def handed_on(batch: list[str]) -> Iterator[list[str | None]]:
        return words(batch)  # type: ignore[return-value]

    for made, kind in (
        (words.handler, "string"),
        (counts.handler, "integer"),
        (later.handler, "number"),
        (handed_on.handler, "string"),
    ):
        assert made.card().streams
        assert output_schema(made) == {"type": kind}


def test_with_a_collate_the_inputs_are_what_it_takes() -> None:
    def total(inputs: list[list[float]]) -> dict[int, float]:
        return {place: sum(one) for place, one in enumerate(inputs)}

    @handler("h", collate=total)
    def spread(batch: dict[int, float]) -> list[float]:
        return list(batch.values())

    @handler("h", collate=tuple)
    def of_anything(batch: tuple[Any, ...]) -> list[Any]:
        return list(batch)

    assert input_schema(spread.handler) == {"items": {"type": "number"}, "type": "array"}
    assert of_anything.handler.card().input_schema == ""


def test_a_schema_that_is_too_large_is_left_out() -> None:
    fields: dict[str, Any] = {"__annotations__": {f"field_{n}": int for n in range(2000)}}
    large: Any = type("Large", (BaseModel,), {**fields, "__module__": __name__})

    def give(batch: Any) -> Any:
        return batch

    give.__annotations__ = {"batch": list[large], "return": list[str]}
    made = handler("h")(give).handler

    assert made.card().input_schema == ""
    assert output_schema(made) == {"type": "string"}


# --- refused when it is written ---------------------------------------------------------------


def test_a_parameter_without_a_context_is_refused() -> None:
    def give(batch: list[str], model: Model, scale: float) -> list[str]:
        return batch

    words = refused(give, context={"model": load_model})
    assert "give takes scale, and context= has no such name" in words


def test_a_context_without_a_parameter_is_refused() -> None:
    def give(batch: list[str], model: Model) -> list[str]:
        return batch

    assert "context= has modle" in refused(give, context={"model": Model, "modle": Model})
    # The batch is no context, whatever its name.
    assert "context= has batch" in refused(give, context={"model": Model, "batch": Model})


def test_defaults_and_keywords_need_no_context() -> None:
    @handler("h", context={"extra": dict, "model": Model})
    def give(batch: list[str], *, model: Model, scale: float = 2.0, **others: Any) -> list[str]:
        return batch

    assert list(give.handler.contexts) == ["extra", "model"]


def test_a_context_is_a_function_without_arguments() -> None:
    def give(batch: list[str], model: Any) -> list[str]:
        return batch

    assert "context 'model' is Model: give a function that makes it" in refused(
        give, context={"model": Model()}
    )
    words = refused(give, context={"model": lambda path: path})
    assert "cannot be called without arguments" in words
    assert "'path'" in words


def test_annotations_without_a_place_for_each_item_are_refused() -> None:
    def one(batch: Review) -> list[str]:
        return []

    def gives(batch: list[str]) -> str:
        return ""

    def yields(batch: list[str]) -> list[str]:  # type: ignore[misc]
        yield []

    def yields_one(batch: list[str]) -> Iterator[str]:
        yield ""

    assert "'batch' of" in refused(one)
    assert "Review, which has no place for each item: write list[Input]" in refused(one)
    assert "returns is annotated as str" in refused(gives)
    assert "Iterator[list[Output | None]]" in refused(yields)
    assert "yields is annotated as str" in refused(yields_one)


def test_types_that_json_has_no_place_for_are_refused() -> None:
    def takes(batch: list[Model]) -> list[str]:
        return []

    def gives(batch: list[str]) -> list[Model | Exception]:
        return []

    assert "'batch' of" in refused(takes)
    assert "cannot be written as JSON" in refused(takes)
    assert "what " in refused(gives)
    assert "cannot be written as JSON" in refused(gives)


def test_an_annotation_that_cannot_be_read_is_refused() -> None:
    class Local(BaseModel):
        text: str

    def give(batch: list[Local]) -> list[str]:
        return []

    assert "name 'Local' is not defined" in refused(give)


def test_what_is_no_function_is_refused() -> None:
    assert "is no function" in refused(Model)
    assert "is no function" in refused(Model().label)
    assert "is no function" in refused(len)
    assert "must take the batch" in refused(lambda *, batch: batch)
    with pytest.raises(TypeError, match=r'write @handler\("sentiment"\)'):
        handler(lambda batch: batch)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_batch_size": 0}, "max_batch_size is from 1 to 4096, not 0"),
        ({"max_delay_ms": -1}, "max_delay_ms is from 0 to 60000, not -1"),
        ({"max_delay_ms": float("nan")}, "max_delay_ms"),
        ({"processes": -1}, "processes is from 0 to 256, not -1"),
        ({"timeout_s": 1.0}, "timeout_s needs processes="),
        ({"timeout_s": 0.0, "processes": 1}, "timeout_s is a number of seconds above 0"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], words: str) -> None:
    assert words in refused(lambda batch: batch, **options)


def test_an_option_that_is_misspelled_is_told_apart() -> None:
    assert refused(lambda batch: batch, batch_size=4) == (
        "handler() takes no batch_size: did you mean max_batch_size?"
    )
    assert "did you mean context?" in refused(lambda batch: batch, contexts={})
    assert "handler() takes no gpu: it takes max_batch_size, max_delay_ms, " in refused(
        lambda batch: batch, gpu=1
    )


def test_the_name_is_bounded() -> None:
    for name in ("", "n" * 201):
        with pytest.raises(ValueError, match="1 to 200 characters"):
            handler(name)


def test_a_function_within_a_function_cannot_run_in_other_processes() -> None:
    def give(batch: list[str]) -> list[str]:
        return batch

    assert "where no other process finds it" in refused(give, processes=1)


# --- marks ------------------------------------------------------------------------------------


def test_retry_is_an_exception_with_a_time() -> None:
    assert Retry(2).after_s == 2.0
    assert isinstance(Retry(0), RetryLater)
    for after in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="give a number of seconds"):
            Retry(after)


def test_end_is_one_value_and_no_output() -> None:
    assert copy.deepcopy(END) is END
    with pytest.raises(TypeError):
        json.dumps(END)  # so that it is never taken for an output
