"""What a request changes in its logits before a token is chosen: bias, penalties, bans, its guide.

In this order. The repetition penalty is that of CTRL (Keskar et al., 2019), over prompt and answer; presence
and frequency penalties are those of the OpenAI API, over the answer.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from streamfleet_common.errors import GenerationFailed, StreamfleetError
from streamfleet_worker.engine.blocks import moved

if TYPE_CHECKING:
    from streamfleet_worker.engine.guide import Matcher
    from streamfleet_worker.engine.prepared import Prepared

_ROWS = 8
"""Guided rows whose masks are spread out at once."""


class Edits:
    """The changes of one row, and what they remember of its answer.

    Args:
        prepared: the request.
        ends: ids of the tokens that end the text.
        vocab_size: logits a row; ids from it on have none.
    """

    def __init__(self, prepared: Prepared, ends: frozenset[int], vocab_size: int) -> None:
        sampling = prepared.sampling
        bias = {
            token_id: value for token_id, value in dict(sampling.logit_bias).items() if token_id < vocab_size
        }
        self.biased = torch.tensor(list(bias), dtype=torch.int64)
        self.bias = torch.tensor(list(bias.values()), dtype=torch.float32)
        self.penalties = (
            sampling.repetition_penalty,
            sampling.presence_penalty,
            sampling.frequency_penalty,
        )
        self.penalised = self.penalties != (1, 0, 0)
        prompt = prepared.prompt_token_ids if sampling.repetition_penalty != 1 else ()
        seen = dict.fromkeys(token_id for token_id in prompt if token_id < vocab_size)
        self._places = {token_id: place for place, token_id in enumerate(seen)}
        self.seen = array("q", seen)
        """Tokens that a penalty may fall on, each once."""
        self.counts = array("f", bytes(4 * len(seen)))
        """How often the answer holds each of them."""
        self._runs = [(run[:-1], run[-1]) for run in prepared.bad_words if run and run[-1] < vocab_size]
        self._ends = [token_id for token_id in sorted(ends) if token_id < vocab_size]
        self._min_tokens = prepared.min_tokens
        self._answer: list[int] = []
        self.matcher = None if prepared.guide is None else prepared.guide.matcher()
        self.any = bool(bias) or self.penalised or bool(self._runs or self.matcher or self.bans())
        """Whether the request asks for any change."""

    def append(self, token_id: int) -> None:
        """Take the next token of the answer."""
        self._answer.append(token_id)
        if self.penalised:
            place = self._places.setdefault(token_id, len(self.seen))
            if place == len(self.seen):
                self.seen.append(token_id)
                self.counts.append(0)
            self.counts[place] += 1
        if self.matcher is not None:
            self.matcher.accept(token_id)

    def bans(self) -> list[int]:
        """Tokens that may not come next, whatever their logits."""
        banned = [last for before, last in self._runs if not before or self._ends_in(before)]
        return banned + self._ends if len(self._answer) < self._min_tokens else banned

    def _ends_in(self, run: tuple[int, ...]) -> bool:
        return tuple(self._answer[-len(run) :]) == run


def apply(logits: torch.Tensor, edits: Mapping[int, Edits]) -> dict[int, StreamfleetError]:
    """Change the logits of rows in place. What is banned becomes -inf; a NaN stays one.

    Args:
        logits: float32, `[rows, vocab_size]`, contiguous.
        edits: by row.

    Returns:
        What went wrong, by row; the logits of these rows are void.
    """
    _add_bias(logits, edits)
    _penalise(logits, {row: edit for row, edit in edits.items() if edit.penalised})
    width = logits.shape[1]
    banned = [row * width + token_id for row, edit in edits.items() for token_id in edit.bans()]
    if banned:
        # Added, not written over: a NaN must be seen.
        places = moved(torch.tensor(banned), logits.device)
        logits.view(-1).index_add_(0, places, logits.new_full((len(banned),), -math.inf))
    matchers = [(row, edit.matcher) for row, edit in edits.items() if edit.matcher is not None]
    return _guide(logits, matchers) if matchers else {}


def _add_bias(logits: torch.Tensor, edits: Mapping[int, Edits]) -> None:
    places = [edit.biased + row * logits.shape[1] for row, edit in edits.items() if len(edit.biased)]
    if places:
        values = torch.cat([edit.bias for edit in edits.values()])
        device = logits.device
        logits.view(-1).index_add_(0, moved(torch.cat(places), device), moved(values, device))


def _penalise(logits: torch.Tensor, edits: Mapping[int, Edits]) -> None:
    """Sparse: only tokens that were seen are touched, those of all rows at once."""
    seen, counts = array("q"), array("f")
    for edit in edits.values():
        seen += edit.seen
        counts += edit.counts
    if not seen:
        return
    device = logits.device
    lengths = torch.tensor([len(edit.seen) for edit in edits.values()])
    starts = torch.tensor([row * logits.shape[1] for row in edits]).repeat_interleave(lengths)
    places = moved(torch.frombuffer(seen, dtype=torch.int64) + starts, device)
    often = moved(torch.frombuffer(counts, dtype=torch.float32), device)
    penalties = torch.tensor([edit.penalties for edit in edits.values()]).repeat_interleave(lengths, 0)
    repetition, presence, frequency = moved(penalties, device).unbind(dim=1)
    flat = logits.view(-1)
    values = flat[places]
    values = torch.where(values < 0, values * repetition, values / repetition)
    flat[places] = values - frequency * often - presence * (often > 0)


def _guide(logits: torch.Tensor, matchers: Sequence[tuple[int, Matcher]]) -> dict[int, StreamfleetError]:
    errors: dict[int, StreamfleetError] = {}
    width = logits.shape[1]
    # What each value of a byte of a mask adds to the logits of its 8 tokens.
    allowed = torch.arange(256, device=logits.device)[:, None] >> torch.arange(8, device=logits.device) & 1
    added = torch.where(allowed > 0, 0.0, -math.inf)
    for start in range(0, len(matchers), _ROWS):
        part = matchers[start : start + _ROWS]
        masks = torch.zeros(len(part), -(-width // 32), dtype=torch.int32)
        for mask, (row, matcher) in zip(masks, part, strict=True):
            try:
                matcher.fill(mask)
            except StreamfleetError as error:
                errors[row] = error
            except Exception as error:  # noqa: BLE001  one row's fault must not touch the others
                errors[row] = GenerationFailed(f"the guide failed on this answer: {error}"[:1000])
        rows = moved(torch.tensor([row for row, _ in part]), logits.device)
        bytes_ = moved(masks.view(torch.uint8), logits.device)
        logits.index_add_(0, rows, added[bytes_.int()].flatten(1)[:, :width])
    return errors
