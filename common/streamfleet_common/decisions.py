"""Decisions: questions about a state, each answered by the likeliest of its options."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import BeforeValidator, Field, model_validator

from streamfleet_common.chat import Turns
from streamfleet_common.message import MAX_PROMPT_CHARS, SEQUENCE, LongText, Message, Name, Text

MAX_QUESTIONS = 256
MAX_OPTIONS = 256
"""Of one question."""
MAX_ALL_OPTIONS = 1024
"""Of all questions of a request together."""

YES_NO = ("yes", "no")

_Id = Annotated[Text, Field(min_length=1, max_length=200)]
_Option = Annotated[Text, Field(min_length=1, max_length=1000)]
_Probability = Annotated[float, Field(ge=0.0, le=1.0)]


def _as_json(value: Any) -> Any:
    try:
        if not isinstance(value, str):
            return json.dumps(value, ensure_ascii=False, allow_nan=False)
        json.loads(value, parse_constant=_refuse)
    except (TypeError, ValueError, RecursionError):
        # Without the error's own words, which may quote the value.
        raise ValueError("a JSON document is wanted, or a value that makes one") from None
    return value


def _refuse(constant: str) -> None:
    raise ValueError(constant)


if TYPE_CHECKING:
    # Whoever builds a request may write a list; what it then holds is a tuple all the same.
    _Json = str | Mapping[str, Any] | Sequence[Any] | float | bool
    _Options = Sequence[str]
    _Questions = Sequence["Question"]
    _Temperatures = Mapping[int, float] | Sequence[tuple[int, float]]
else:
    _Json = Annotated[Annotated[str, Field(max_length=MAX_PROMPT_CHARS)], BeforeValidator(_as_json)]
    _Options = Annotated[tuple[_Option, ...], Field(strict=False, max_length=MAX_OPTIONS)]
    _Questions = Annotated[tuple["Question", ...], Field(strict=False, max_length=MAX_QUESTIONS)]
    # Pairs, since JSON and many languages have no maps with numbers as keys; whoever has one may give it.
    _Temperatures = Annotated[
        tuple[
            Annotated[
                tuple[
                    Annotated[int, Field(ge=1, le=MAX_OPTIONS)],
                    Annotated[float, Field(gt=0.0, le=1000.0)],
                ],
                SEQUENCE,
            ],
            ...,
        ],
        BeforeValidator(lambda value: tuple(value.items()) if isinstance(value, Mapping) else value),
        Field(strict=False, max_length=MAX_OPTIONS),
    ]


class Question(Message):
    """A question about the state of a request, and the options of which one answers it."""

    id: _Id
    """Names the answer; its own in the request."""
    type: Literal["choice", "yes_no"] = "choice"
    """"yes_no" is a choice of two, which are "yes" and "no" unless `options` has other words for them."""
    criteria: Annotated[Text, Field(min_length=1, max_length=20_000)]
    """What is asked, in the words that the model sees."""
    options: _Options = ()

    @property
    def choices(self) -> tuple[str, ...]:
        """The options, those that go without saying too."""
        return tuple(self.options) or (YES_NO if self.type == "yes_no" else ())

    @model_validator(mode="after")
    def _consistent(self) -> Question:
        if self.criteria.isspace():
            raise ValueError("criteria is empty: nothing is asked")
        if not self.choices:
            raise ValueError("options is empty: there is nothing to choose from")
        if self.type == "yes_no" and len(self.choices) != len(YES_NO):
            raise ValueError(f"a yes_no question has two options, not {len(self.choices)}")
        seen: set[str] = set()
        for place, option in enumerate(self.options):
            if option.isspace():
                raise ValueError(f"options.{place} is empty: no model can say it")
            if option in seen:
                raise ValueError(f"options.{place} is there already")
            seen.add(option)
        return self


class DecideRequest(Message):
    """Questions about one state: exactly one of `state`, `state_json` and `messages`."""

    kind: Literal["decide"] = "decide"
    model: Name | None = None
    """When given, the queue must serve this model."""
    state: LongText | None = None
    """What the questions are about, as text."""
    state_json: _Json | None = None
    """The same as a JSON document: its text, or any other value, which becomes one."""
    messages: Turns | None = None
    """The same as a chat that others had; none of its turns is the model's own."""
    questions: _Questions = ()
    """None are answered by none, and no model is asked."""
    temperatures: _Temperatures = ()
    """For numbers of options, by what the scores of a question with so many are divided before they become
    probabilities: a map, or pairs, of number and temperature; 1 for any other number."""
    truncate: bool = False
    """Cut a state that is too long: `messages` keep their end, anything else its start. The usage says how
    many tokens were cut. Questions and options are never cut."""

    @property
    def n(self) -> int:
        """Rows of a batch that it takes at most: one for each option."""
        return sum(len(question.choices) for question in self.questions)

    @property
    def text(self) -> str:
        """The state as text: of a chat each turn, with who said it."""
        if self.messages is not None:
            return "\n".join(f"{turn.role}: {turn.text}" for turn in self.messages)
        return self.state or str(self.state_json)

    def temperature(self, options: int) -> float:
        """The temperature of questions with so many options."""
        return dict(self.temperatures).get(options, 1.0)

    @model_validator(mode="after")
    def _one_state(self) -> DecideRequest:
        states = {"state": self.state, "state_json": self.state_json, "messages": self.messages}
        given = [name for name, value in states.items() if value is not None]
        if len(given) != 1:
            found = " and ".join(given) if given else "none of them"
            raise ValueError(f"give exactly one of state, state_json and messages (found {found})")
        value = states[given[0]]
        if not value or (isinstance(value, str) and value.isspace()):
            raise ValueError(f"{given[0]} is empty: there is nothing to decide about")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> DecideRequest:
        place = _repeated(question.id for question in self.questions)
        if place is not None:
            raise ValueError(f"questions.{place}: another question has this id already")
        # A map has become pairs by now.
        pairs = cast("tuple[tuple[int, float], ...]", self.temperatures)
        place = _repeated(count for count, _ in pairs)
        if place is not None:
            raise ValueError(f"temperatures.{place}: this number of options has a temperature already")
        if self.n > MAX_ALL_OPTIONS:
            raise ValueError(
                f"{self.n} options in all questions together are over the limit of {MAX_ALL_OPTIONS}: "
                "ask in several requests"
            )
        return self


class Decision(Message):
    """The answer to one question."""

    id: _Id
    """The question's."""
    option: _Option
    """The likeliest option; of equals the first."""
    probabilities: dict[_Option, _Probability]
    """Of each option, in their order; together they are 1."""
    scores: dict[_Option, float]
    """What the probabilities are made of. Of a language model the logarithm of each option's likelihood; of a
    classifier the number that it gives state, question and option, without bounds: its only logit, or that
    of "entailment"."""

    @classmethod
    def of(cls, question: Question, scores: Sequence[float], temperature: float) -> Decision:
        """The answer to a question whose options have these scores, in their order."""
        best = max(scores)
        weights = [math.exp((score - best) / temperature) for score in scores]
        total = math.fsum(weights)
        options = question.choices
        return cls(
            id=question.id,
            option=options[scores.index(best)],
            probabilities=dict(zip(options, (weight / total for weight in weights), strict=True)),
            scores=dict(zip(options, scores, strict=True)),
        )


def _repeated(values: Iterable[Any]) -> int | None:
    """The place of the first value that has come before."""
    seen: set[Any] = set()
    for place, value in enumerate(values):
        if value in seen:
            return place
        seen.add(value)
    return None
