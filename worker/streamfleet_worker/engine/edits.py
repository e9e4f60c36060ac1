"""What a request changes in its logits before a token is chosen: bias, penalties, bans, its guide.

In this order. The repetition penalty is that of CTRL (Keskar et al., 2019), over prompt and answer; presence
and frequency penalties are those of the OpenAI API, over the answer.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from streamfleet_common.errors import GenerationFailed, StreamfleetError
from streamfleet_worker.engine.blocks import moved

if TYPE_CHECKING:
    from streamfleet_worker.engine.guide import Matcher
    from streamfleet_worker.engine.prepared import Prepared

_ROWS = 8
"""Guided rows whose masks are spread out at once."""
_SIGN = -(1 << 31)
_NEGATIVE_INFINITY = -(1 << 23)
"""The bits of a float32, as an int32; without the sign those of infinity."""


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
        self.biased, self.bias = array("q", bias), array("f", bias.values())
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
        self.any = bool(bias or self.penalised or self._runs or self.matcher or self.bans())
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
    biased = {row: edit.biased for row, edit in edits.items()}
    _add(logits, biased, _joined("f", (edit.bias for edit in edits.values())))
    _penalise(logits, {row: edit for row, edit in edits.items() if edit.penalised})
    banned = {row: array("q", edit.bans()) for row, edit in edits.items()}
    _add(logits, banned, array("f", [-math.inf]) * sum(map(len, banned.values())))
    return _guide(logits, {row: edit.matcher for row, edit in edits.items() if edit.matcher is not None})


def _joined(kind: str, parts: Iterable[array[Any]]) -> array[Any]:
    joined = array(kind)
    for part in parts:
        joined += part
    return joined


def _places(logits: torch.Tensor, ids: Mapping[int, array[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the tokens of rows are in the flat logits, and whose each is, counted in the order of rows."""
    lengths = torch.tensor([len(own) for own in ids.values()])
    owners = moved(torch.arange(len(ids)).repeat_interleave(lengths), logits.device)
    starts = moved(torch.tensor([row * logits.shape[1] for row in ids]), logits.device)
    flat = torch.frombuffer(_joined("q", ids.values()), dtype=torch.int64)
    return moved(flat, logits.device) + starts[owners], owners


def _add(logits: torch.Tensor, ids: Mapping[int, array[int]], values: array[float]) -> None:
    """Add numbers to the logits of tokens, by row. A NaN stays one, as it would not if written over."""
    if values:
        added = moved(torch.frombuffer(values, dtype=torch.float32), logits.device)
        logits.view(-1).index_add_(0, _places(logits, ids)[0], added)


def _penalise(logits: torch.Tensor, edits: Mapping[int, Edits]) -> None:
    """Sparse: only tokens that were seen are touched, those of all rows at once."""
    counts = _joined("f", (edit.counts for edit in edits.values()))
    if not counts:
        return
    device, flat = logits.device, logits.view(-1)
    places, owners = _places(logits, {row: edit.seen for row, edit in edits.items()})
    often = moved(torch.frombuffer(counts, dtype=torch.float32), device)
    penalties = moved(torch.tensor([edit.penalties for edit in edits.values()]).T.contiguous(), device)
    repetition, presence, frequency = (penalty.index_select(0, owners) for penalty in penalties)
    values = flat.index_select(0, places)
    values = torch.where(values < 0, values * repetition, values / repetition)
    values -= frequency * often + presence * often.clamp(max=1)
    flat.scatter_(0, places, values)


def _guide(logits: torch.Tensor, matchers: Mapping[int, Matcher]) -> dict[int, StreamfleetError]:
    """Ban what each row's matcher does not allow."""
    errors: dict[int, StreamfleetError] = {}
    rows = list(matchers)
    width = logits.shape[1]
    # A mask's bit goes where a float has its sign, and makes the rest of it an infinity.
    shifts = 31 - torch.arange(32, dtype=torch.int32, device=logits.device)
    for start in range(0, len(rows), _ROWS):
        part = rows[start : start + _ROWS]
        masks = torch.zeros(len(part), -(-width // 32), dtype=torch.int32)
        for row, mask in zip(part, masks, strict=True):
            try:
                matchers[row].fill(mask)
            except StreamfleetError as error:
                errors[row] = error
            except Exception as error:  # noqa: BLE001  one row's fault must not touch the others
                errors[row] = GenerationFailed(f"the guide failed on this answer: {error}"[:1000])
        signs = moved(masks, logits.device)[:, :, None] << shifts & _SIGN
        limits = (signs ^ _NEGATIVE_INFINITY).view(torch.float32).flatten(1)[:, :width]
        for row, limit in zip(part, limits, strict=True):
            logits[row].clamp_(max=limit)
    return errors
