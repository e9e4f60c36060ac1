"""Decide requests at random, as a service would send them."""

from __future__ import annotations

import random
from typing import Any

from streamfleet_common.decisions import DecideRequest

WORDS = ("self", "return", "the", "def", "text", "value", "is", "not", "list", "string", "if", "None")
"""Text that the tiny models' vocabulary has tokens for."""


class RandomDecisions:
    """Requests told by a seed; several share a state, as those of one conversation would.

    Args:
        seed: of the requests.
        longest: words of the longest state.
    """

    def __init__(self, seed: int, *, longest: int = 60) -> None:
        self._source = random.Random(seed)
        self._states = [self._words(longest) for _ in range(3)]
        self._longest = longest

    def __call__(self, count: int) -> list[DecideRequest]:
        """Some more requests."""
        return [DecideRequest(**self._fields()) for _ in range(count)]

    def _fields(self) -> dict[str, Any]:
        source = self._source
        shared = source.random() < 0.5
        text = source.choice(self._states) if shared else self._words(source.randint(1, self._longest))
        state: dict[str, Any] = source.choice(
            [
                {"state": text},
                {"state_json": {"text": text, "words": len(text.split())}},
                {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes"}]},
            ]
        )
        questions = [self._question(f"q{number}") for number in range(source.randint(0, 5))]
        return {**state, "questions": questions, "temperatures": {2: 0.5, 3: source.uniform(0.2, 5)}}

    def _question(self, name: str) -> dict[str, Any]:
        source = self._source
        asked = {"id": name, "criteria": f"{self._words(source.randint(1, 20))}?"}
        if source.random() < 0.3:
            return {**asked, "type": "yes_no"}
        options = {self._words(source.randint(1, 3)) for _ in range(source.randint(1, 6))}
        return {**asked, "options": sorted(options)}

    def _words(self, count: int) -> str:
        return " ".join(self._source.choice(WORDS) for _ in range(count))
