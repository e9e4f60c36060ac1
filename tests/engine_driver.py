"""Drives an engine step by step, under a clock that the test holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamfleet_common.schemas import Choice, GenerateRequest, Prefill
from streamfleet_worker.engine.base import Arrival, Engine, Finished, Key, Step, Tokens


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Told:
    """The deltas of one choice, joined."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[tuple[tuple[int, float], ...]] = field(default_factory=list)


@dataclass
class Heard:
    """Everything one request brought forth; the short names are those of its first choice."""

    told: dict[int, Told] = field(default_factory=lambda: defaultdict(Told))
    prefill: Prefill | None = None
    end: Finished | None = None

    @property
    def token_ids(self) -> list[int]:
        return self.told[0].token_ids

    @property
    def texts(self) -> list[str]:
        return self.told[0].texts

    @property
    def logprobs(self) -> list[float | None]:
        return self.told[0].logprobs

    @property
    def finished(self) -> Finished:
        assert self.end is not None
        return self.end

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self.finished.choices

    @property
    def text(self) -> str:
        return self.choices[0].text

    @property
    def reason(self) -> str:
        return self.choices[0].finish_reason


class Driver:
    """Drives an engine by hand and sorts what it brings forth, checking the rules every output keeps."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine = engine
        self.clock = clock
        self.heard: dict[str, Heard] = {}

    def add(self, name: str, deadline: float = 1e9, scope: str = "", **fields: Any) -> Key:
        request = GenerateRequest.model_validate(fields)
        return self.add_prepared(name, self.engine.prepare(request, scope), deadline, scope)

    def add_prepared(self, name: str, prepared: Any, deadline: float = 1e9, scope: str = "") -> Key:
        key = (name, 1)
        arrival = Arrival(prepared, accepted_at=self.clock.now, deadline_at=deadline, scope=scope)
        self.engine.add({key: arrival})
        self.heard.setdefault(name, Heard())
        return key

    def step(self) -> Step:
        step = self.engine.step()
        for output in step.outputs:
            heard = self.heard[output.key[0]]
            assert heard.end is None, "an output after the end"
            match output.event:
                case Prefill() as prefill:
                    assert not heard.token_ids
                    heard.prefill = prefill
                case Tokens() as tokens:
                    _take(heard.told[tokens.index], tokens)
                case Finished() as end:
                    heard.end = end
                    _check(heard, end)
        return step

    def run(self) -> Mapping[str, Heard]:
        """Step until nothing is left, letting the clock jump over delays."""
        while (due := self.engine.due_in()) is not None:
            self.clock.now += due
            self.step()
        return self.heard


def _take(told: Told, tokens: Tokens) -> None:
    # What an end from outside lets go has a text without a token.
    assert len(tokens.texts) == max(1, len(tokens.token_ids))
    assert len(tokens.logprobs) in (0, len(tokens.token_ids))
    assert len(tokens.top_logprobs) in (0, len(tokens.token_ids))
    told.token_ids += tokens.token_ids
    told.texts += tokens.texts
    told.logprobs += tokens.logprobs
    told.top_logprobs += tokens.top_logprobs


def _check(heard: Heard, end: Finished) -> None:
    """The end holds what the deltas told."""
    assert (end.error is None) == (end.state == "done")
    assert [choice.index for choice in end.choices] == list(range(len(end.choices)))
    assert heard.told.keys() <= {choice.index for choice in end.choices}
    for choice in end.choices:
        told = heard.told[choice.index]
        assert "".join(told.texts) == choice.text
        assert tuple(told.token_ids) == choice.token_ids
        assert tuple(told.logprobs) == choice.logprobs
        assert tuple(told.top_logprobs) == choice.top_logprobs
        assert choice.last_token_id == (told.token_ids[-1] if told.token_ids else None)
    assert end.prefill == heard.prefill
    assert end.usage.completion_tokens == sum(len(choice.token_ids) for choice in end.choices)
