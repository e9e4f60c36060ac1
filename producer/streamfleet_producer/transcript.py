"""What a reader was shown of a request, and whether the next event may follow it. No Redis, no asyncio."""

from __future__ import annotations

from typing import Literal

from streamfleet_common.frames import Frame
from streamfleet_common.schemas import Choice, Delta, End, Event, Restart

Verdict = Literal["next", "old", "gap"]
LOST = "the worker was lost, or failed and the request is tried again"
"""Why a text begins anew, where nobody says so: a reader sees the new attempt alone."""


class Tokens:
    """The tokens of each choice, as they were shown."""

    def __init__(self) -> None:
        self.ids: dict[int, list[int]] = {}
        self.texts: dict[int, list[str]] = {}

    def add(self, delta: Delta) -> None:
        if delta.index in self.ids:
            self.ids[delta.index].extend(delta.token_ids)
            self.texts[delta.index].extend(delta.texts)
        else:
            self.ids[delta.index] = list(delta.token_ids)
            self.texts[delta.index] = list(delta.texts)

    def rest_of(self, choice: Choice) -> Delta | None:
        """What `choice` has beyond these tokens, shown with its last token.

        Raises:
            ValueError: the choice does not begin with these tokens and their text.
        """
        ids = self.ids.get(choice.index, [])
        text = "".join(self.texts.get(choice.index, []))
        if list(choice.token_ids[: len(ids)]) != ids or not choice.text.startswith(text):
            raise ValueError("what was shown is not how the answer begins")
        missing, rest = choice.token_ids[len(ids) :], choice.text[len(text) :]
        if not missing:
            if rest:
                raise ValueError("there is text without a token")
            return None
        return Delta(
            index=choice.index,
            token_ids=missing,
            texts=("",) * (len(missing) - 1) + (rest,),
            logprobs=choice.logprobs[len(ids) :],
        )

    def agree_with(self, choice: Choice) -> bool:
        """Whether these tokens and the choice's are the same, as far as both go."""
        ids = self.ids.get(choice.index, ())
        return all(ours == theirs for ours, theirs in zip(ids, choice.token_ids, strict=False))

    def or_longer(self, other: Tokens) -> Tokens:
        """Of each choice the longer list of the two; one must begin with the other."""
        longest = Tokens()
        for tokens in (self, other):
            for index, ids in tokens.ids.items():
                if len(ids) >= len(longest.ids.get(index, ())):
                    longest.ids[index] = ids
                    longest.texts[index] = tokens.texts[index]
        return longest


class Transcript:
    """The place reached in a request's events: `epoch`, and `seq` within it.

    An event follows iff it is the next of its epoch, or opens a higher one; so none is taken twice, and none
    of an attempt that has been given up.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self.seq = 0
        self.shown = Tokens()
        """Of the current epoch."""
        self.void = Tokens()
        """What was shown before the last restart."""
        self.hole = False
        """An event is missing that the log does not have: only the end can help."""

    def judge(self, frame: Frame, *, logged: bool = False) -> Verdict:
        """Whether a frame (no end) follows. One that leaves a gap is "gap".

        A `logged` frame may open an epoch without its start: all that the log has has been read before it.
        """
        if frame.epoch == self.epoch:
            if frame.seq == self.seq + 1:
                return "next"
            return "old" if frame.seq <= self.seq else "gap"
        if frame.epoch < self.epoch:
            return "old"
        return "next" if frame.seq <= int(logged) else "gap"

    def apply(self, frame: Frame, event: Event) -> Restart | None:
        """Go on to a frame that follows. Gives a restart if what was shown is void now."""
        restart = None
        if frame.epoch > self.epoch:
            reason = event.reason if isinstance(event, Restart) else LOST
            restart = self._open(frame.epoch, reason)
        self.seq = frame.seq
        if isinstance(event, Delta):
            self.shown.add(event)
        return restart

    def proves(self, end: End) -> bool:
        """Whether the end says that nothing is missing, and of another attempt.

        A server that lost data counts epochs anew, so that two attempts may bear the same number.
        """
        counted = end.of == self.epoch > 0 and self.seq == end.last_seq
        return counted and all(map(self.shown.agree_with, end.choices))

    def complete(self, end: End) -> list[Restart | Delta]:
        """The events that are missing before an end, made of the whole text that it carries.

        Raises:
            ValueError: what was shown is not how the answer begins, so nothing can make it whole.
        """
        made: list[Restart | Delta] = []
        if end.of != self.epoch and self.epoch:
            restart = self._open(end.of, LOST)
            if restart is not None:
                made.append(restart)
        indices = {choice.index for choice in end.choices}
        if not indices.issuperset(self.shown.ids):
            raise ValueError("a choice that was shown is not in the answer")
        made += [rest for choice in end.choices if (rest := self.shown.rest_of(choice)) is not None]
        return made

    def _open(self, epoch: int, reason: str) -> Restart | None:
        # An attempt of which nothing but the start was seen takes nothing back.
        restart = Restart(reason=reason) if self.seq > 0 else None
        self.void, self.shown = self.shown, Tokens()
        self.epoch, self.seq, self.hole = epoch, 0, False
        return restart


class Replay:
    """A new attempt, checked token by token against what was shown of the last.

    While both agree nothing is shown twice; beyond that the text goes on. So a reader of deltas alone sees
    one text, which is that of the final attempt.
    """

    def __init__(self, shown: Tokens) -> None:
        self.shown = shown
        self._at = dict.fromkeys(shown.ids, 0)
        self._unsaid = {index: "".join(texts) for index, texts in shown.texts.items()}
        """What of the text shown before has not come again."""

    def caught_up(self) -> bool:
        """Whether everything shown before has come again."""
        return not any(self._unsaid.values()) and all(
            self._at[index] == len(ids) for index, ids in self.shown.ids.items()
        )

    def take(self, delta: Delta) -> Delta | None:
        """What is new in a delta; None if it was all shown.

        Raises:
            ValueError: the attempts differ.
        """
        ids = self.shown.ids.get(delta.index, [])
        at = self._at.get(delta.index, 0)
        known = min(len(ids) - at, len(delta.token_ids))
        if list(delta.token_ids[:known]) != ids[at : at + known]:
            raise ValueError("the attempts differ")
        texts = self._unshown(delta)
        if any(texts[:known]):
            raise ValueError("the attempts differ")
        if known:
            self._at[delta.index] = at + known
        if known == len(delta.token_ids):
            return None
        return Delta(
            index=delta.index,
            token_ids=delta.token_ids[known:],
            texts=texts[known:],
            logprobs=delta.logprobs[known:],
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
