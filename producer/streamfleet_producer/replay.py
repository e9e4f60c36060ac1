"""A new attempt beside what was shown of the last."""

from __future__ import annotations

from streamfleet_common.schemas import Delta, Parts
from streamfleet_producer.shown import Line, Shown


class Replay:
    """A new attempt, checked token by token, and part by part, against what was shown.

    While both agree nothing is shown twice; beyond that the text goes on. So a reader sees one text, which is
    that of the final attempt. `to_the_bit` compares the log-probabilities that come again, too.
    """

    def __init__(self, shown: Shown, *, to_the_bit: bool = False) -> None:
        self.shown = shown
        """All that was shown, what this attempt has added included."""
        self._to_the_bit = to_the_bit
        self._at: dict[int, int] = {}
        self._unsaid = {index: "".join(line.texts) for index, line in shown.lines.items()}
        """What of the text shown before has not come again."""
        self._parts_at = 0

    def caught_up(self) -> bool:
        """Whether everything shown before has come again."""
        return (
            not any(self._unsaid.values())
            and self._parts_at == len(self.shown.parts)
            and all(self._at.get(index, 0) == len(line.ids) for index, line in self.shown.lines.items())
        )

    def take(self, event: Delta | Parts) -> Delta | Parts | None:
        """What is new in an event; None if it was all shown.

        Raises:
            ValueError: the attempts differ.
        """
        return self._take_parts(event) if isinstance(event, Parts) else self._take_delta(event)

    def _take_delta(self, delta: Delta) -> Delta | None:
        line = self.shown.lines.setdefault(delta.index, Line())
        at = self._at.get(delta.index, 0)
        known = min(len(line.ids) - at, len(delta.token_ids))
        texts = self._unshown(delta)
        is_behind = known < len(delta.token_ids) and self._unsaid[delta.index]
        if is_behind or any(texts[:known]) or not self._same(delta, line, at, known):
            raise ValueError("the attempts differ")
        self._at[delta.index] = at + len(delta.token_ids)
        if known == len(delta.token_ids) and not any(texts):
            return None
        new = Delta(
            index=delta.index,
            token_ids=delta.token_ids[known:],
            texts=texts[known:],
            logprobs=delta.logprobs[known:],
            top_logprobs=delta.top_logprobs[known:],
        )
        self.shown.add(new)
        return new

    def _take_parts(self, parts: Parts) -> Parts | None:
        known = self.shown.parts[self._parts_at :][: len(parts.values)]
        if list(parts.values[: len(known)]) != known:
            raise ValueError("the attempts differ")
        self._parts_at += len(parts.values)
        if len(known) == len(parts.values):
            return None
        new = Parts(values=parts.values[len(known) :])
        self.shown.add(new)
        return new

    def _same(self, delta: Delta, line: Line, at: int, known: int) -> bool:
        if list(delta.token_ids[:known]) != line.ids[at : at + known]:
            return False
        if not self._to_the_bit:
            return True
        return not (
            (delta.logprobs and list(delta.logprobs[:known]) != line.logprobs[at : at + known])
            or (delta.top_logprobs and list(delta.top_logprobs[:known]) != line.top_logprobs[at : at + known])
        )

    def _unshown(self, delta: Delta) -> tuple[str, ...]:
        # Not token by token: what was made of a whole answer has all its text with its last token.
        texts = []
        unsaid = self._unsaid.get(delta.index, "")
        for text in delta.texts:
            both = min(len(text), len(unsaid))
            if text[:both] != unsaid[:both]:
                raise ValueError("the attempts differ")
            unsaid = unsaid[both:]
            texts.append(text[both:])
        self._unsaid[delta.index] = unsaid
        return tuple(texts)
