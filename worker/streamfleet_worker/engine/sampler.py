"""Logits to token ids, strictly per row: a row's token depends on its own logits, request and answer.

The order is that of `Sampling`: bias, penalties, bans, guide, then greedy choice or a draw. Log-probabilities
are the model's own, before all of it. Randomness is counter-based: the number that draws a token is a hash of
the seed and the token's place in the answer. On a CPU a row's token is the same to the bit in any batch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from streamfleet_common.errors import GenerationFailed, StreamfleetError
from streamfleet_worker.engine import edits
from streamfleet_worker.engine.blocks import Blocks, moved
from streamfleet_worker.engine.draw import Draw, Draws, uniform
from streamfleet_worker.engine.edits import Edits

if TYPE_CHECKING:
    from streamfleet_worker.engine.prepared import Prepared

Top = tuple[tuple[int, float], ...]
"""The likeliest tokens and their log-probabilities, the best first, of equals the lower id."""

_LISTED = 32
"""Tokens from which the likeliest are listed; more than may be asked for, so that equals are seen."""
_SCORED_ROWS = 8
"""Rows whose log-probabilities are computed at once on a CPU: more would not stay in its caches."""


class Row:
    """One answer while it grows: what its request asks of each token, and what that must remember.

    Args:
        prepared: the request.
        seed: of its draws.
        eos_token_ids: the model's own end tokens.
        vocab_size: logits a row.
    """

    __slots__ = ("_count", "edits", "logprobs", "sampling", "seed", "top_logprobs")

    def __init__(self, prepared: Prepared, seed: int, eos_token_ids: frozenset[int], vocab_size: int) -> None:
        self.sampling = prepared.sampling
        self.seed = seed
        self.logprobs = prepared.logprobs
        self.top_logprobs = prepared.top_logprobs if prepared.logprobs else 0
        ends = prepared.stop_token_ids if prepared.ignore_eos else prepared.stop_token_ids | eos_token_ids
        changes = Edits(prepared, ends, vocab_size)
        self.edits = changes if changes.any else None
        self._count = 0

    @property
    def count(self) -> int:
        """Tokens of the answer so far: the place of the next one."""
        return self._count

    def append(self, token_id: int) -> None:
        """Take the next token of the answer.

        Raises:
            Exception: whatever the guide's matcher raises on a token that does not fit.
        """
        self._count += 1
        if self.edits is not None:
            self.edits.append(token_id)


@dataclass(slots=True)
class Sampled:
    """A token of an answer."""

    token_id: int
    logprob: float | None
    """None unless asked for."""
    top: Top
    """Empty unless asked for."""


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> list[Sampled | StreamfleetError]:
    """The next token of each row.

    Two transfers from the device at most; one, as long as no row asks for log-probabilities and the likeliest
    tokens hold all that the cuts leave.

    Args:
        logits: float32, `[rows, vocab_size]`. May be overwritten.
        rows: one for each row of the logits; they do not change.

    Returns:
        For each row a token, or why there is none: its logits are no numbers to choose by (a NaN, an infinite
        maximum), or every token is banned. The other rows do not notice.
    """
    if not rows:
        return []
    if logits.device.type == "mps":
        logits = logits.cpu()  # Apple's GPUs have no float64, and share the CPU's memory
    raw = logits.contiguous()
    logits, failed = _edit(raw, rows)
    draws = _draws(logits, rows)
    if draws is None or len(draws.rows) < len(rows):
        chosen = _argmax(logits)
        best = logits.gather(1, chosen[:, None])[:, 0]
    else:
        chosen, best = logits.new_zeros(len(rows), dtype=torch.int64), draws.blocks.best
    unsure = torch.zeros_like(best)
    if draws is not None:
        places = moved(torch.tensor(draws.rows), logits.device)
        chosen[places], found = draws.likely()
        unsure[places] = found.float()
    ids, bests, again = torch.stack((chosen.double(), best.double(), unsure.double())).tolist()
    for place, number in enumerate(bests):
        if not math.isfinite(number):
            failed.setdefault(place, _no_choice(number, rows[place]))
    late = [place for place, needed in enumerate(again) if needed and place not in failed]
    asked = [place for place, row in enumerate(rows) if row.logprobs and place not in failed]
    if draws is not None and late:
        chosen[moved(torch.tensor(late), logits.device)] = draws.thorough(late)
    top = max((rows[place].top_logprobs for place in asked), default=0)
    lines: list[Sequence[float]] = []
    if late or asked:
        scores = _scores(raw, asked, chosen, top)
        numbers = torch.cat((chosen.double(), scores.flatten())).tolist()
        ids, lines = numbers[: len(rows)], _lines(numbers[len(rows) :], scores.shape[1])
    results: list[Sampled | StreamfleetError] = [
        failed[place] if place in failed else Sampled(int(token_id), None, ())
        for place, token_id in enumerate(ids)
    ]
    for place, line in zip(asked, lines, strict=True):
        logprob, likeliest = _read(line, rows[place].top_logprobs, raw[place])
        results[place] = Sampled(int(ids[place]), logprob, likeliest)
    return results


def score(logits: torch.Tensor, token_ids: Sequence[int], top: int) -> tuple[list[float], list[Top]]:
    """Natural log-probabilities of the tokens that came, and the likeliest in their places.

    They are those of the model's own distribution: `log_softmax` in float32.

    Args:
        logits: float32, `[n, vocab_size]`.
        token_ids: the token that came at each place.
        top: how many of the likeliest to list, at most 31.

    Returns:
        Log-probabilities, which are not finite where the logits are not; and the lists, empty if `top` is 0.
    """
    if not token_ids:
        return [], []
    if logits.device.type == "mps":
        logits = logits.cpu()
    came = moved(torch.tensor(token_ids), logits.device)
    lines = _scores(logits, range(len(token_ids)), came, top).tolist()
    found = [_read(line, top, row) for line, row in zip(lines, logits, strict=True)]
    return [logprob for logprob, _ in found], [likeliest for _, likeliest in found]


# --- choice -------------------------------------------------------------------------------------


def _edit(logits: torch.Tensor, rows: Sequence[Row]) -> tuple[torch.Tensor, dict[int, StreamfleetError]]:
    changes = {place: row.edits for place, row in enumerate(rows) if row.edits is not None}
    if not changes:
        return logits, {}
    if any(rows[place].logprobs for place in changes):
        logits = logits.clone()
    return logits, edits.apply(logits, changes)


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest token of each row, of equals the lowest id, and a NaN before all: int64 `[rows]`."""
    if logits.device.type == "cpu":
        # A tenth of what torch takes.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def _draws(logits: torch.Tensor, rows: Sequence[Row]) -> Draws | None:
    draws = [
        Draw(place, row.sampling, uniform(row.seed, row.count))
        for place, row in enumerate(rows)
        if row.sampling.temperature > 0
    ]
    return Draws(Blocks(logits), draws, logits.shape[1]) if draws else None


def _no_choice(best: float, row: Row) -> GenerationFailed:
    if best == -math.inf and row.edits is not None:
        return GenerationFailed(
            "no token may come next: bad_words, min_tokens and guide together rule out every one",
            reason="all_banned",
        )
    return GenerationFailed(
        "the model gave no usable numbers (NaN or infinity) for this request", reason="not_finite"
    )


# --- log-probabilities --------------------------------------------------------------------------


def _scores(logits: torch.Tensor, rows: Sequence[int], token_ids: torch.Tensor, top: int) -> torch.Tensor:
    """Log-probabilities of tokens and of the likeliest, a line for each of some rows; see `_read`.

    Args:
        logits: float32, `[…, vocab_size]`.
        rows: which of its rows, `[n]`.
        token_ids: int64, a token for each row of the logits.
        top: how many of the likeliest.

    Returns:
        float64, `[n, 2 + 2 * top]`: that of the token; those of the likeliest, -inf where there are no more;
        1 if so many are equal that others may be as likely as the last of these, else 0; their ids.
    """
    places = moved(torch.tensor(rows, dtype=torch.int64), logits.device)
    ids, unlisted, unsure = _likeliest(logits, places, top)
    wanted = torch.cat((token_ids[places, None], ids), dim=1)
    size = _SCORED_ROWS if logits.device.type == "cpu" else max(1, len(rows))
    found = [
        torch.log_softmax(logits.index_select(0, part), dim=-1).gather(1, columns)
        for part, columns in zip(torch.split(places, size), torch.split(wanted, size), strict=True)
    ]
    scores = torch.cat(found)
    scores[:, 1:].masked_fill_(unlisted, -math.inf)
    return torch.cat((scores.double(), unsure.double(), ids.double()), dim=1)


def _likeliest(
    logits: torch.Tensor, rows: torch.Tensor, top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The ids of the likeliest tokens, `[n, top]`; which of them there are not; which rows are unsure."""
    if not top:
        return rows.new_zeros(len(rows), 0), rows.new_zeros(len(rows), 0).bool(), rows.new_zeros(len(rows), 1)
    values, ids = Blocks(logits).likeliest(rows, _LISTED)
    last = values[:, -1:]
    # In the order of ids first, so that of equals the lower comes first.
    ids, order = ids.sort(dim=-1)
    values, order = values.gather(1, order).sort(stable=True, dim=-1, descending=True)
    values, ids = values[:, :top], ids.gather(1, order)[:, :top]
    unlisted = torch.isneginf(values)
    unsure = (values[:, -1:] == last) & ~unlisted[:, -1:]
    return ids.masked_fill(unlisted, 0), unlisted, unsure


def _read(line: Sequence[float], top: int, logits: torch.Tensor) -> tuple[float, Top]:
    """A token's log-probability and the `top` likeliest, from a line of `_scores` and the row's logits."""
    middle = len(line) // 2
    logprob, logprobs, unsure, ids = line[0], line[1:middle], line[middle], line[middle + 1 :]
    logprobs, ids = logprobs[:top], ids[:top]
    if unsure and top:
        order = torch.sort(logits, stable=True, dim=-1, descending=True).indices[:top]
        ids, logprobs = order.tolist(), torch.log_softmax(logits, dim=-1)[order].tolist()
    likeliest = zip(ids, logprobs, strict=True)
    return logprob, tuple((int(token_id), value) for token_id, value in likeliest if value > -math.inf)


def _lines(numbers: Sequence[float], width: int) -> list[Sequence[float]]:
    return [numbers[start : start + width] for start in range(0, len(numbers), width)]
