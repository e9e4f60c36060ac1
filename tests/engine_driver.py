"""Drives an engine step by step, under a clock that the test holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from streamfleet_common.schemas import GenerateRequest, Prefill
from streamfleet_worker.engine.base import Arrival, Engine, Finished, Key, Step, Tokens


class Clock:
    """Time that passes when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Heard:
    """Everything one request brought forth."""

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    prefill: Prefill | None = None
    end: Finished | None = None

    @property
    def finished(self) -> Finished:
        assert self.end is not None
        return self.end

    @property
    def text(self) -> str:
        return self.finished.choices[0].text

    @property
    def reason(self) -> str:
        return self.finished.choices[0].finish_reason


class Driver:
    """Drives an engine by hand and sorts what it brings forth, checking the rules every output keeps."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine = engine
        self.clock = clock
        self.heard: dict[str, Heard] = {}

    def add(self, name: str, deadline: float = 1e9, **fields: Any) -> Key:
        request = GenerateRequest.model_validate(fields)
        return self.add_prepared(name, self.engine.prepare(request), deadline)

    def add_prepared(self, name: str, prepared: Any, deadline: float = 1e9) -> Key:
        key = (name, 1)
        arrival = Arrival(prepared, accepted_at=self.clock.now, deadline_at=deadline)
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
                    assert len(tokens.token_ids) == len(tokens.texts)
                    assert len(tokens.logprobs) in (0, len(tokens.token_ids))
                    heard.token_ids += tokens.token_ids
                    heard.texts += tokens.texts
                    heard.logprobs += tokens.logprobs
                case Finished() as end:
                    heard.end = end
                    assert (end.error is None) == (end.state == "done")
                    choice = end.choices[0]
                    assert "".join(heard.texts) == choice.text
                    assert tuple(heard.token_ids) == choice.token_ids
                    assert tuple(heard.logprobs) == choice.logprobs
                    assert end.prefill == heard.prefill
        return step

    def run(self) -> Mapping[str, Heard]:
        """Step until nothing is left, letting the clock jump over delays."""
        while (due := self.engine.due_in()) is not None:
            self.clock.now += due
            self.step()
        return self.heard
