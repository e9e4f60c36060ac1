"""A checked decide request: its state, questions and options in tokens, and what of them is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from streamfleet_common.schemas import Sampling
from streamfleet_worker.engine.prepared import Prepared

if TYPE_CHECKING:
    from streamfleet_common.decisions import Question

Ids = tuple[int, ...]

_NO_DRAW = Sampling()


@dataclass(frozen=True, slots=True)
class Asked:
    """A question in tokens."""

    question: Question
    head: Ids
    """From the end of the state up to where the answer begins."""
    options: tuple[Ids, ...]
    temperature: float

    @property
    def longest(self) -> int:
        """Tokens of the question and its longest option."""
        return len(self.head) + max(map(len, self.options))

    @property
    def groups(self) -> dict[Ids, list[int]]:
        """Options, by their place, that are alike but for the last token: one pass scores them all.

        Of options of one token each, as "yes" and "no" are to most models, there is one group.
        """
        groups: dict[Ids, list[int]] = {}
        for place, option in enumerate(self.options):
            groups.setdefault(option[:-1], []).append(place)
        return groups


@dataclass(frozen=True, slots=True)
class Part:
    """What one sequence computes: some options of one question, alike but for their last token."""

    question: int
    options: tuple[int, ...]
    """Their places in the question."""
    prepared: Prepared
    """With their last tokens as its candidates."""
    scored_from: int
    """Where they begin in its prompt."""


@dataclass(frozen=True, slots=True)
class PreparedDecision:
    """What `DecisionPreparer.prepare` gives."""

    state: Ids
    """With all that stands before it; every prompt of the request begins with these tokens."""
    questions: tuple[Asked, ...]
    n: int
    """Rows of the batch that it takes: its parts."""
    cut_tokens: int = 0
    """Tokens that `truncate` took from the state."""

    @classmethod
    def of(cls, state: Ids, questions: tuple[Asked, ...], cut_tokens: int = 0) -> PreparedDecision:
        return cls(state, questions, sum(len(asked.groups) for asked in questions), cut_tokens)

    @property
    def prompt_tokens(self) -> int:
        """The state's tokens once, each question's and each option's."""
        asked = (ids for one in self.questions for ids in (one.head, *one.options))
        return len(self.state) + sum(map(len, asked))

    def parts(self) -> Iterator[Part]:
        """The sequences that it takes, question by question."""
        for place, asked in enumerate(self.questions):
            before = self.state + asked.head
            for shared, options in asked.groups.items():
                last = tuple(asked.options[option][-1] for option in options)
                prepared = Prepared(before + shared, max_tokens=0, sampling=_NO_DRAW, candidates=last)
                yield Part(place, tuple(options), prepared, len(before))
