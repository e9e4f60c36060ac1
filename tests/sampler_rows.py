"""Rows for tests of the sampler, and plain arithmetic to compare it with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from streamfleet_common.errors import StreamfleetError
from streamfleet_common.schemas import Sampling
from streamfleet_worker.engine.prepared import Prepared
from streamfleet_worker.engine.sampler import Row, Sampled, sample

VOCAB = 40
EOS = frozenset({2})


def row(
    sampling: Sampling | None = None,
    *,
    answer: Sequence[int] = (),
    seed: int = 0,
    eos: frozenset[int] = EOS,
    vocab: int = VOCAB,
    prompt: Sequence[int] = (1,),
    **fields: Any,
) -> Row:
    """A row of a request with these fields, after some tokens of its answer."""
    prepared = Prepared(
        prompt_token_ids=tuple(prompt), max_tokens=100, sampling=sampling or Sampling(), **fields
    )
    made = Row(prepared, seed, eos, vocab)
    for token_id in answer:
        made.append(token_id)
    return made


def named(sampling: Sampling) -> str:
    """What of it is not left at its default, as the name of a test."""
    return (
        ",".join(f"{name}={getattr(sampling, name)}" for name in sorted(sampling.model_fields_set))
        or "greedy"
    )


def tokens(logits: torch.Tensor, rows: Sequence[Row]) -> list[int]:
    """The sampled ids of rows of which none fails; the logits stay as they are."""
    return [found.token_id for found in map(sampled, sample(logits.clone(), rows))]


def sampled(found: Sampled | StreamfleetError) -> Sampled:
    if isinstance(found, StreamfleetError):
        raise found
    return found


def kept(logits: Sequence[float], sampling: Sampling, slack: float = 0.0) -> dict[int, float]:
    """The tokens to draw from, in the order of ids, and their probabilities: plain sums in float64.

    A token is as typical as another if it is farther from the expected surprise by no more than the slack.
    """
    best = max(logits)
    weights = [math.exp((logit - best) / sampling.temperature) for logit in logits]
    order = sorted(range(len(logits)), key=lambda token_id: (-logits[token_id], token_id))
    order = [token_id for token_id in order if weights[token_id] >= sampling.min_p]
    if 0 < sampling.top_k < len(order):
        order = [token_id for token_id in order if logits[token_id] >= logits[order[sampling.top_k - 1]]]
    if sampling.top_p < 1:
        full = sampling.top_p * math.fsum(weights[token_id] for token_id in order)
        count = 1
        while count < len(order) and math.fsum(weights[i] for i in order[:count]) < full * (1 - 1e-6):
            count += 1
        order = order[:count]
    if sampling.typical_p < 1:
        order = _typical({token_id: weights[token_id] for token_id in order}, sampling.typical_p, slack)
    total = math.fsum(weights[token_id] for token_id in order)
    return {token_id: weights[token_id] / total for token_id in sorted(order)}


def _typical(weights: dict[int, float], typical_p: float, slack: float) -> list[int]:
    total = math.fsum(weights.values())
    surprises = {token_id: -math.log(weight / total) for token_id, weight in weights.items() if weight}
    expected = math.fsum(weights[token_id] / total * surprise for token_id, surprise in surprises.items())
    order = sorted(surprises, key=lambda token_id: abs(surprises[token_id] - expected))
    full = typical_p * (1 - 1e-6) * total
    count = 1
    while count < len(order) and math.fsum(weights[token_id] for token_id in order[:count]) < full:
        count += 1
    last = abs(surprises[order[count - 1]] - expected)
    return [token_id for token_id in order if abs(surprises[token_id] - expected) <= last + slack]


def drawn(shares: dict[int, float], start: float, stop: float) -> set[int]:
    """The tokens whose parts of the cumulative distribution meet an interval."""
    found, below = set(), 0.0
    for token_id, share in shares.items():
        if below <= stop and start <= below + share:
            found.add(token_id)
        below += share
    return found
