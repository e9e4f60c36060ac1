"""The tokens of a request as they were shown, choice by choice, or the parts of its output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from streamfleet_common.schemas import Choice, Delta, Parts

Likeliest = tuple[tuple[int, float], ...]


@dataclass(slots=True)
class Line:
    """Those of one choice; parallel, as in a `Delta`."""

    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top_logprobs: list[Likeliest] = field(default_factory=list)


class Shown:
    """What was shown of each choice; of a handler's output each part."""

    def __init__(self) -> None:
        self.lines: dict[int, Line] = {}
        self.parts: list[Any] = []

    def add(self, event: Delta | Parts) -> None:
        if isinstance(event, Parts):
            self.parts.extend(event.values)
            return
        line = self.lines.get(event.index)
        if line is None:
            line = self.lines[event.index] = Line()
        line.ids.extend(event.token_ids)
        line.texts.extend(event.texts)
        line.logprobs.extend(event.logprobs)
        line.top_logprobs.extend(event.top_logprobs)

    def events(self) -> list[Delta | Parts]:
        """All of it again, an event a choice, and one for all parts."""
        parts = [Parts(values=tuple(self.parts))] if self.parts else []
        return parts + [
            Delta(
                index=index,
                token_ids=tuple(line.ids),
                texts=tuple(line.texts),
                logprobs=tuple(line.logprobs),
                top_logprobs=tuple(line.top_logprobs),
            )
            for index, line in self.lines.items()
        ]

    def rest_of(self, choice: Choice) -> Delta | None:
        """What `choice` has beyond this, shown with its last token, if one is new.

        Raises:
            ValueError: the choice does not begin with these tokens and their text.
        """
        line = self.lines.get(choice.index, _NOTHING)
        known, text = len(line.ids), "".join(line.texts)
        if list(choice.token_ids[:known]) != line.ids or not choice.text.startswith(text):
            raise ValueError("what was shown is not how the answer begins")
        missing, rest = choice.token_ids[known:], choice.text[len(text) :]
        if not missing and not rest:
            return None
        if not missing and choice.finish_reason in _COMPLETE:
            raise ValueError("there is text without a token, and the answer was not cut off")
        return Delta(
            index=choice.index,
            token_ids=missing,
            texts=("",) * (len(missing) - 1) + (rest,),
            logprobs=choice.logprobs[known:],
            top_logprobs=choice.top_logprobs[known:],
        )

    def parts_missing_of(self, outputs: Sequence[Any]) -> Parts | None:
        """What `outputs` has beyond these parts, if anything.

        Raises:
            ValueError: the outputs do not begin with these parts.
        """
        if not self.begin(outputs):
            raise ValueError("what was shown is not how the output begins")
        missing = tuple(outputs[len(self.parts) :])
        return Parts(values=missing) if missing else None

    def agree_with(self, choice: Choice) -> bool:
        """Whether these tokens and the choice's are the same, as far as both go."""
        ids = self.lines.get(choice.index, _NOTHING).ids
        return all(ours == theirs for ours, theirs in zip(ids, choice.token_ids, strict=False))

    def begin(self, outputs: Sequence[Any]) -> bool:
        """Whether these parts are how the outputs begin."""
        return list(outputs[: len(self.parts)]) == self.parts


_COMPLETE = ("eos", "stop", "length")
_NOTHING = Line()
