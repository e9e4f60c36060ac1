"""Random draws of tokens: temperature, the cuts, inverse of the cumulative distribution.

A draw is a function of its own logits, parameters and number alone, to the bit on a CPU: no step of it sees
how many rows there are. Equals are treated as transformers does: `top_k` keeps all that equal the k-th, and
`typical_p` all that are as typical as the last; `top_p` keeps as many as it needs, here those of lower id
first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import torch

from streamfleet_worker.engine.blocks import BLOCK, moved
from streamfleet_worker.engine.typical import cut_to_typical, typical

if TYPE_CHECKING:
    from streamfleet_common.schemas import Sampling
    from streamfleet_worker.engine.blocks import Blocks

_MASK = (1 << 64) - 1
_ROUNDING = 1e-6
"""Probabilities are float32's: a nucleus that lacks this share of its mass is full."""
_LIKELIEST = 64
"""Tokens that are looked at first: nearly always they hold all that the cuts leave."""
_WIDE = 256
"""The same for a `top_k` that is not below that."""
_ROWS = 16
"""Rows whose whole vocabulary is worked on at once on a CPU: memory for more might not be kept for reuse."""
_BIN = 16
"""Low bits of a probability that its histogram ignores: bins are up to 0.8 % wide."""


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): every bit of the input moves all bits."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for the token at `index`, the same wherever and whenever it is asked for."""
    gamma = 0x9E3779B97F4A7C15
    bits = _mix((_mix((seed + gamma) & _MASK) + (index + 1) * gamma) & _MASK)
    return (bits >> 11) / (1 << 53)


@dataclass(frozen=True, slots=True)
class Draw:
    """What decides a token besides the logits of its row."""

    row: int
    sampling: Sampling
    """Its temperature is above 0."""
    number: float
    """In [0, 1): where in the cumulative distribution the token lies."""

    def kind(self, vocab_size: int) -> int:
        """0: cut by nothing, 1: not by `top_k` or `min_p`, 2: by one of these, 3: by a large `top_k`."""
        cuts = self.sampling
        if 0 < cuts.top_k < vocab_size:
            return 2 if cuts.top_k < _LIKELIEST else 3
        if cuts.min_p > 0:
            return 2
        return 1 if cuts.top_p < 1 or cuts.typical_p < 1 else 0


class Draws:
    """The draws of one step, ordered by what they must see: all tokens, the mass of all, the likeliest.

    Args:
        blocks: the logits of all rows of the step.
        draws: at least one, in the order of rows.
        vocab_size: ids below it are tokens.
    """

    def __init__(self, blocks: Blocks, draws: Sequence[Draw], vocab_size: int) -> None:
        kinds: tuple[list[Draw], ...] = ([], [], [], [])
        for draw in draws:
            kinds[draw.kind(vocab_size)].append(draw)
        self._draws = [draw for kind in kinds for draw in kind]
        ends = accumulate(map(len, kinds), initial=0)
        self._uncut, self._nuclei, limited, self._wide = (slice(*pair) for pair in pairwise(ends))
        self._narrow = slice(self._nuclei.start, limited.stop)
        self.blocks = blocks
        self._vocab_size = vocab_size
        self.rows = [draw.row for draw in self._draws]
        """Their rows, in the order in which `likely` gives tokens."""
        table = torch.tensor([self._numbers(draw) for draw in self._draws], dtype=torch.float64)
        columns = moved(table, blocks.values.device)[:, :, None].unbind(1)
        rows, temperature, u, top_k, top_p, min_p, self._typical_p = columns
        self._is_typical = any(draw.sampling.typical_p < 1 for draw in self._draws)
        self._rows = rows[:, 0].long()
        # One that is taken for 0 would make 0 / 0 of the best.
        self._temperature = temperature.clamp(min=torch.finfo(torch.float32).tiny)
        self._u, self._top_k, self._top_p, self._min_p = u, top_k.long(), top_p, min_p
        self._best = blocks.best[self._rows, None]

    def _numbers(self, draw: Draw) -> tuple[float, ...]:
        cuts = draw.sampling
        top_k = cuts.top_k if 0 < cuts.top_k < self._vocab_size else self._vocab_size
        return draw.row, cuts.temperature, draw.number, top_k, cuts.top_p, cuts.min_p, cuts.typical_p

    def likely(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens, as far as the likeliest tokens hold all that a cut leaves.

        Returns:
            int64 and bool, `[len(rows)]`: the tokens, and which of them `thorough` has to draw instead.
            Tokens of rows with a NaN are void.
        """
        tokens = [self._pick(part, self._probabilities(part)) for part in self._parts(self._uncut)]
        unsure = torch.zeros(len(self._draws), dtype=torch.bool, device=self._rows.device)
        for part, count in ((self._narrow, _LIKELIEST), (self._wide, _WIDE)):
            if part.start < part.stop:
                found, unsure[part] = self._among_likeliest(part, count)
                tokens.append(found)
        return torch.cat(tokens), unsure

    def thorough(self, rows: Sequence[int]) -> torch.Tensor:
        """The tokens of some of the rows, from all that their cuts leave; int64 `[len(rows)]`."""
        order = {row: place for place, row in enumerate(self.rows)}
        places = [order[row] for row in rows]
        if self._rows.device.type == "cpu":
            return torch.cat([self._draw_alone(place) for place in places])
        return self._draw_sorted(moved(torch.tensor(places), self._rows.device))

    # --- all tokens -------------------------------------------------------------------------

    def _parts(self, places: slice) -> Iterator[slice]:
        size = _ROWS if self._rows.device.type == "cpu" else len(self._draws)
        return (
            slice(start, min(start + size, places.stop)) for start in range(places.start, places.stop, size)
        )

    def _probabilities(self, which: slice) -> torch.Tensor:
        """Of all tokens, float32 `[n, blocks * BLOCK]`."""
        first, last = self.rows[which.start], self.rows[which.stop - 1]
        if last - first == which.stop - which.start - 1:
            logits = self.blocks.values[first : last + 1].flatten(1)  # without a copy
        else:
            logits = self.blocks.values.index_select(0, self._rows[which]).flatten(1)
        # Minus the best first: a tiny temperature then sends the others to -inf, not the best to +inf.
        scores = (logits - self._best[which]).div_(self._temperature[which].float())
        return torch.softmax(scores, dim=-1, out=scores if scores.device.type == "cpu" else None)

    def _pick(self, which: slice, weights: torch.Tensor) -> torch.Tensor:
        """Tokens, int64 `[n]`, by weights of all tokens, float32 `[n, blocks * BLOCK]`."""
        blocks = weights.view(len(weights), -1, BLOCK)
        block, rest = _inverse(blocks.sum(dim=-1).double(), self._u[which])
        inside = blocks.gather(1, block[:, :, None].expand(-1, -1, BLOCK))[:, 0].double()
        tokens = block * BLOCK + _inverse(inside, rest)[0]
        return tokens[:, 0].clamp_(max=self._vocab_size - 1)

    def _draw_alone(self, place: int) -> torch.Tensor:
        """One token, int64 `[1]`. Sorts little, and waits for what it needs to know: for a CPU."""
        draw, which = self._draws[place], slice(place, place + 1)
        logits = self.blocks.values[draw.row].flatten()
        probabilities = self._probabilities(which)
        own = probabilities[0]
        if 0 < draw.sampling.top_k < self._vocab_size:
            own.masked_fill_(logits < logits.topk(draw.sampling.top_k).values[-1], 0)
        if draw.sampling.min_p > 0:
            own.masked_fill_(own < draw.sampling.min_p * own.max(), 0)
        if draw.sampling.top_p < 1:
            _cut_to_nucleus(own, logits, self._top_p[place])
        if draw.sampling.typical_p < 1:
            cut_to_typical(own, draw.sampling.typical_p)
        return self._pick(which, probabilities)

    def _draw_sorted(self, which: torch.Tensor) -> torch.Tensor:
        """Tokens, int64 `[n]`. Sorts all, and waits for nothing: for a GPU."""
        logits = self.blocks.values.index_select(0, self._rows[which]).flatten(1)
        values, ids = logits.sort(stable=True, dim=-1, descending=True)
        return self._among(which, values, ids)[0]

    # --- the likeliest ----------------------------------------------------------------------

    def _among_likeliest(self, part: slice, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        values, ids = self.blocks.likeliest(self._rows[part], count)
        tokens, whole, edge = self._among(part, values, ids, self._totals(part, ids[:, :1]))
        # A nucleus without a limit is whole if it ends before the last: equals of that one may be missing.
        inside = edge > values[:, -1:]
        inside[max(0, self._nuclei.stop - part.start) :] = False
        return tokens, ~(whole | inside)[:, 0]

    def _totals(self, part: slice, best_ids: torch.Tensor) -> torch.Tensor:
        """What all tokens weigh where the best weighs 1, float64 `[n, 1]`; 0 if that need not be known."""
        totals = torch.zeros_like(best_ids, dtype=torch.float64)
        for some in self._parts(slice(part.start, self._nuclei.stop)):
            own = slice(some.start - part.start, some.stop - part.start)
            totals[own] = self._probabilities(some).gather(1, best_ids[own]).double().reciprocal()
        return totals

    def _among(
        self,
        which: slice | torch.Tensor,
        values: torch.Tensor,
        ids: torch.Tensor,
        totals: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Draw from some tokens, as if their rows held no others.

        Args:
            which: the draws.
            values: the largest logits of their rows, the best first, float32 `[n, m]`.
            ids: of their tokens, int64.
            totals: what all tokens weigh, for rows of which these are not the whole.

        Returns:
            int64, `[n]`: the tokens. Bool, `[n, 1]`: whether these are the whole of what `top_k` and `min_p`
            leave, or of all probability. Float32, `[n, 1]`: the least logit that the cuts leave.
        """
        top_k, top_p = self._top_k[which], self._top_p[which]
        weights = ((values - values[:, :1]).double() / self._temperature[which]).exp()
        kth = values.gather(1, top_k.clamp(max=values.shape[1]) - 1)
        limited = (values >= kth) & (weights >= self._min_p[which])
        count = limited.sum(dim=-1, keepdim=True).clamp_(min=1)
        whole = (count < values.shape[1]) | torch.isneginf(values[:, -1:])
        mass = weights.cumsum(dim=-1)
        total = mass.gather(1, count - 1)
        if totals is not None:
            total = torch.where(whole, total, totals)
        full = (mass < _full(top_p, total)).sum(dim=-1, keepdim=True) + 1
        count = torch.where(top_p < 1, torch.minimum(full, count), count)
        edge = values.gather(1, count - 1)
        # From here on in the order of ids, that of the sum; equals of the least are kept in it, too.
        ids, order = ids.sort(dim=-1)
        values, weights = values.gather(1, order), weights.gather(1, order)
        above, level = values > edge, values == edge
        room = count - above.sum(dim=-1, keepdim=True)
        weights *= above | (level & (level.cumsum(dim=-1) <= room))
        if self._is_typical:
            weights *= typical(weights, self._typical_p[which])
        place, _ = _inverse(weights, self._u[which])
        return ids.gather(1, place)[:, 0].clamp_(max=self._vocab_size - 1), whole, edge


def _full(top_p: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """The mass, above 0, at which a nucleus is full."""
    return (top_p * mass * (1 - _ROUNDING)).clamp(min=torch.finfo(torch.float64).tiny)


def _cut_to_nucleus(probabilities: torch.Tensor, logits: torch.Tensor, top_p: torch.Tensor) -> None:
    """Make the probabilities outside the nucleus 0; both float32 `[m]`, `top_p` `[1]`.

    A histogram of the probabilities shows in which bin the nucleus ends, so only that one is sorted.
    """
    bins = probabilities.view(torch.int32) >> _BIN  # in their order, as none is negative
    mass = probabilities.new_zeros(1 << (31 - _BIN), dtype=torch.float64)
    mass.scatter_add_(0, bins.long(), probabilities.double())
    mass = mass.flip(0).cumsum(0)
    total = mass[-1:]
    full = _full(top_p, total)
    found = int(torch.minimum(torch.searchsorted(mass, full), torch.searchsorted(mass, total)))
    last = len(mass) - 1 - found
    members = (bins == last).nonzero()[:, 0]
    members = members[logits[members].argsort(stable=True, descending=True)]
    reached = probabilities[members].double().cumsum(0) + (mass[found - 1] if found else 0)
    probabilities.masked_fill_(bins < last, 0)
    probabilities[members[int((reached < full).sum()) + 1 :]] = 0


def _inverse(weights: torch.Tensor, u: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the cumulative weights pass `u` of their total, and how far into that weight `u` reaches.

    Args:
        weights: float64, `[n, m]`.
        u: float64, `[n, 1]`, from 0 to 1.

    Returns:
        int64, `[n, 1]`: a place whose weight is not 0. Float64, `[n, 1]`: from 0 to 1.
    """
    mass = weights.cumsum(dim=-1)
    total = mass[:, -1:].contiguous()
    target = u * total
    found = torch.searchsorted(mass, target, right=True)
    # Rounding may put the target on the very end; the last weight above 0 is where the total is reached.
    found = torch.minimum(found, torch.searchsorted(mass, total)).clamp_(max=weights.shape[1] - 1)
    own = weights.gather(1, found)
    return found, ((target - mass.gather(1, found) + own) / own).clamp_(0, 1)
