"""Locally typical sampling: which tokens are about as surprising as a token is expected to be.

Meister, Pimentel, Wiher and Cotterell, "Locally Typical Sampling" (2022). The surprise of a token is minus
the logarithm of its probability, the expected one the entropy of the distribution. The tokens nearest to it
are kept until their probabilities reach `typical_p`, and with the last of them all that are as near.
"""

from __future__ import annotations

import torch

_ROUNDING = 1e-6
"""Probabilities are float32's: a set that lacks this share of its mass is full."""
_BIN = 16
"""Low bits of a distance that its histogram ignores: bins are up to 0.8 % wide."""


def typical(weights: torch.Tensor, typical_p: torch.Tensor) -> torch.Tensor:
    """Which tokens are kept of each row; bool, `[n, m]`.

    Args:
        weights: of all tokens that there are, 0 of those that are out already; float64, `[n, m]`.
        typical_p: float64, `[n, 1]`; 1 keeps all.
    """
    distances, shares = _distances(weights)
    ordered, order = distances.sort(stable=True, dim=-1)
    mass = shares.gather(1, order).cumsum(dim=-1)
    count = (mass < typical_p * (1 - _ROUNDING)).sum(dim=-1, keepdim=True).clamp_(max=weights.shape[1] - 1)
    return (distances <= ordered.gather(1, count)) | (typical_p >= 1)


def cut_to_typical(probabilities: torch.Tensor, typical_p: float) -> None:
    """Make the probabilities of one row's other tokens 0; float32 `[m]`, in place.

    A histogram of the distances shows in which bin the set ends, so only that one is sorted. It waits to know
    which: for a CPU.
    """
    (distances,), (shares,) = _distances(probabilities[None].double())
    bins = distances.float().view(torch.int32) >> _BIN  # in their order, as none is negative
    mass = shares.new_zeros(1 << (31 - _BIN))
    mass.scatter_add_(0, bins.long(), shares)
    mass = mass.cumsum(dim=0)
    full = mass.new_tensor([typical_p * (1 - _ROUNDING)])
    found = int(torch.minimum(torch.searchsorted(mass, full), torch.searchsorted(mass, mass[-1:])))
    members = (bins == found).nonzero()[:, 0]
    ordered, order = distances[members].sort(stable=True)
    reached = shares[members][order].cumsum(dim=0) + (mass[found - 1] if found else 0)
    last = ordered[min(int((reached < full).sum()), len(ordered) - 1)]
    probabilities.masked_fill_(distances > last, 0)


def _distances(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """How far each token's surprise is from the expected one, infinite where there is no weight; the shares.

    Sums run along a row one by one: so they do not depend on how many rows there are.
    """
    shares = weights / weights.cumsum(dim=-1)[:, -1:]
    surprise = -shares.log()
    expected = (shares * surprise.masked_fill(shares == 0, 0)).cumsum(dim=-1)[:, -1:]
    return (surprise - expected).abs(), shares
