"""Logits to token ids, strictly per row: a row's token depends on its own logits, parameters and seed.

The order is temperature, top_k, top_p, draw. Both cuts keep the likeliest tokens, those of lower id first
among equals. The draw is the inverse of the cumulative distribution, in float64 and in order of ids, at a
number that depends on seed and token index alone. It is the same token in any batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from streamfleet_common.schemas import Sampling

_MASK = (1 << 64) - 1
_LIKELIEST = 64
"""Tokens that `top_p` looks at first; nearly always they hold its mass, and sorting all is spared."""


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
    """What decides a row's next token besides its logits."""

    sampling: Sampling
    seed: int
    index: int
    """The token's place in the answer, from 0."""


def sample(logits: torch.Tensor, draws: Sequence[Draw]) -> list[int | None]:
    """The next token of each row.

    Args:
        logits: float32, `[rows, vocab_size]`.
        draws: one for each row.

    Returns:
        One id for each row; None where the logits are no numbers to choose by (a NaN, an infinite or no
        finite maximum). The other rows do not notice.
    """
    best = logits.amax(dim=-1)
    chosen = logits.argmax(dim=-1)  # the first, so the lowest id, of equals
    drawn = [i for i, draw in enumerate(draws) if draw.sampling.temperature > 0]
    if drawn:
        rows = torch.tensor(drawn, device=logits.device)
        # Apple's GPUs have no float64.
        place = "cpu" if logits.device.type == "mps" else logits.device
        found = _sample(logits[rows].to(place), best[rows].to(place), [draws[i] for i in drawn])
        chosen[rows] = found.to(logits.device)
    usable = torch.isfinite(best).tolist()
    return [token if good else None for token, good in zip(chosen.tolist(), usable, strict=True)]


def logprobs(logits: torch.Tensor, token_ids: Sequence[int]) -> list[float]:
    """Natural log-probabilities of tokens under the model's own distribution.

    It is `log_softmax` in float32 of the logits as they came: before temperature, `top_k` and `top_p`.

    Args:
        logits: float32, `[rows, vocab_size]`.
        token_ids: one for each row.
    """
    targets = torch.tensor(token_ids, device=logits.device)
    scores = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])
    found: list[float] = scores[:, 0].tolist()
    return found


def _sample(logits: torch.Tensor, best: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """Token ids, `[rows]`, of rows with a temperature; void for rows that hold a NaN."""
    device = logits.device
    temperature = torch.tensor([d.sampling.temperature for d in draws], device=device)
    # One that float32 takes for 0 would make 0 / 0 of the best.
    temperature.clamp_(min=torch.finfo(temperature.dtype).tiny)
    # Minus the maximum first: a tiny temperature then sends the others to -inf, not the best to +inf.
    scores = (logits - best[:, None]) / temperature[:, None]
    weights = scores.double().exp()
    kept = _kept(scores, weights, draws)
    if kept is not None:
        weights = weights * kept
    # Sums are taken as the last of the cumulative ones: that order is fixed for a row, while a plain
    # sum may be split between threads by the number of rows.
    cumulative = weights.cumsum(dim=-1)
    total = cumulative[:, -1:].contiguous()
    numbers = [uniform(d.seed, d.index) for d in draws]
    u = torch.tensor(numbers, dtype=torch.float64, device=device)[:, None]
    found = torch.searchsorted(cumulative, u * total, right=True)
    # Rounding may put u * total on the very end; the last token with any weight begins where the sum
    # first reaches its total.
    last = torch.searchsorted(cumulative, total)
    return torch.minimum(found, last)[:, 0].clamp_(max=logits.shape[-1] - 1)


def _kept(scores: torch.Tensor, weights: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor | None:
    """Which tokens `top_k` and `top_p` leave, bool `[rows, vocab_size]`; None if they cut nothing.

    Both leave the likeliest tokens, so for each row all that is to be found is how many.
    """
    vocab = scores.shape[-1]
    limits = [min(draw.sampling.top_k or vocab, vocab) for draw in draws]
    nuclei = [draw.sampling.top_p for draw in draws]
    if all(k == vocab for k in limits) and all(p >= 1 for p in nuclei):
        return None
    device = scores.device
    size = min(vocab, max(_LIKELIEST, *(k for k in (*limits, 0) if k < vocab)))
    top = torch.topk(scores, size).values
    limit = torch.tensor(limits, device=device)
    nucleus = torch.tensor(nuclei, dtype=torch.float64, device=device)

    cumulative = top.double().exp().cumsum(dim=-1)
    cut = cumulative.gather(1, (limit - 1).clamp(max=size - 1)[:, None])[:, 0]
    mass = nucleus * torch.where(limit < vocab, cut, weights.cumsum(dim=-1)[:, -1])
    needed = (cumulative < mass[:, None]).sum(dim=-1) + 1
    count = torch.where(nucleus < 1, torch.minimum(needed, limit), limit)
    edge = top.gather(1, (count - 1).clamp(max=size - 1)[:, None])
    for row in torch.nonzero(count > size)[:, 0].tolist():
        # No cut at all, or a nucleus wider than what was sorted.
        ordered = torch.sort(scores[row], descending=True).values
        reached = (ordered.double().exp().cumsum(dim=-1) < mass[row]).sum() + 1
        count[row] = reached.clamp(max=vocab) if nuclei[row] < 1 else vocab
        edge[row] = ordered[count[row] - 1]

    kept = scores >= edge
    if bool((kept.sum(dim=-1) == count).all()):
        return kept
    above, equal = scores > edge, scores == edge
    room = count[:, None] - above.sum(dim=-1, keepdim=True)
    return above | (equal & (equal.cumsum(dim=-1) <= room))
