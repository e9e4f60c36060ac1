"""The sampler against transformers' own processors, and against plain arithmetic."""

import math
from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from streamfleet_common.schemas import Sampling
from streamfleet_worker.engine.sampler import Draw, logprobs, sample, uniform


def distribution(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """What transformers would draw from, `[vocab_size]`."""
    warpers: list[Any] = [TemperatureLogitsWarper(sampling.temperature)]
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    scores = logits[None]
    for warper in warpers:
        scores = warper(None, scores)
    return torch.softmax(scores[0].double(), dim=-1)


def draws(logits: torch.Tensor, sampling: Sampling, count: int) -> torch.Tensor:
    """How often each token comes in `count` draws, `[vocab_size]`."""
    rows = logits.expand(count, -1)
    found = sample(rows, [Draw(sampling, seed=9, index=i) for i in range(count)])
    return torch.bincount(torch.tensor(found), minlength=logits.shape[-1])


@pytest.mark.parametrize("vocab", [12, 500])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0),
        Sampling(temperature=0.5),
        Sampling(temperature=2.0, top_k=5),
        Sampling(temperature=1.0, top_p=0.7),
        Sampling(temperature=1.3, top_k=8, top_p=0.8),
        Sampling(temperature=3.0, top_p=0.99),
        Sampling(temperature=3.0, top_k=200, top_p=0.95),
        Sampling(temperature=1.0, top_p=0.0),
        Sampling(temperature=1.0, top_k=1),
        Sampling(temperature=1.0, top_k=1_000_000),
    ],
)
def test_support_and_frequency_are_those_of_transformers(vocab: int, sampling: Sampling) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(3)) * 2
    expected = distribution(logits, sampling)
    count = 4000
    found = draws(logits, sampling, count)
    assert not found[expected == 0].any(), "drawn from outside the support"
    likely = expected * count >= 5
    chi_square = ((found - expected * count) ** 2 / (expected * count))[likely].sum().item()
    freedom = int(likely.sum()) - 1
    # Mean and spread of a chi-square: 5 spreads above the mean is no accident.
    assert chi_square <= freedom + 5 * math.sqrt(2 * max(freedom, 1))


def test_greedy_takes_the_likeliest_and_of_equals_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -3.0, -0.5]])
    assert sample(logits, [Draw(Sampling(), 0, 0)] * 3) == [1, 0, 3]
    wide = torch.zeros(2, 5000)
    wide[:, [77, 4321]] = 1.0
    assert sample(wide, [Draw(Sampling(), 0, 0)] * 2) == [77, 77]


def test_cuts_keep_the_lower_ids_of_equals() -> None:
    logits = torch.zeros(6)
    assert set(draws(logits, Sampling(temperature=1.0, top_k=2), 200).nonzero().flatten().tolist()) == {0, 1}
    half = draws(logits, Sampling(temperature=1.0, top_p=0.5), 200)
    assert set(half.nonzero().flatten().tolist()) == {0, 1, 2}


def test_tiny_temperatures_are_as_good_as_greedy() -> None:
    logits = torch.tensor([1.0, 9.0, 8.99, -4.0])
    assert draws(logits, Sampling(temperature=1e-9), 50).tolist() == [0, 50, 0, 0]
    # Less than float32 can tell from 0.
    assert draws(logits, Sampling(temperature=1e-50), 50).tolist() == [0, 50, 0, 0]
    assert draws(logits, Sampling(temperature=5e-324, top_k=2, top_p=0.5), 50).tolist() == [0, 50, 0, 0]


def test_a_draw_depends_on_seed_and_index_alone() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(16, 300, generator=generator)
    kinds = [
        Sampling(),
        Sampling(temperature=1.0),
        Sampling(temperature=0.8, top_k=20),
        Sampling(temperature=1.2, top_p=0.9),
        Sampling(temperature=1.2, top_k=50, top_p=0.9),
    ]
    asked = [Draw(kinds[row % 5], seed=row, index=row * 3) for row in range(16)]
    together = sample(logits, asked)
    alone = [sample(logits[row : row + 1], [asked[row]])[0] for row in range(16)]
    order = [5, 3, 11, 0, 15]
    shuffled = sample(logits[order], [asked[row] for row in order])
    assert together == alone
    assert shuffled == [together[row] for row in order]
    assert (
        sample(logits[:1].expand(40, -1), [Draw(kinds[1], 1, i) for i in range(40)])
        != [sample(logits[:1], [Draw(kinds[1], 1, 0)])[0]] * 40
    )


def test_uniform_numbers_are_uniform_and_unlike() -> None:
    numbers = [uniform(seed, index) for seed in range(60) for index in range(60)]
    assert len(set(numbers)) == len(numbers)
    assert 0 <= min(numbers) <= max(numbers) < 1
    tenths = torch.bincount(torch.tensor([int(10 * u) for u in numbers]), minlength=10)
    assert ((tenths - 360) ** 2 / 360).sum().item() < 9 + 5 * math.sqrt(18)
    pairs = torch.tensor([[uniform(7, i), uniform(7, i + 1)] for i in range(2000)]).T
    assert abs(torch.corrcoef(pairs)[0, 1].item()) < 0.1


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_k=3, top_p=0.9)])
def test_a_bad_row_fails_alone(bad: float, sampling: Sampling) -> None:
    logits = torch.randn(5, 40, generator=torch.Generator().manual_seed(5))
    asked = [Draw(sampling, seed=row, index=0) for row in range(5)]
    healthy = sample(logits, asked)
    logits[2, 7] = bad
    assert sample(logits, asked) == [*healthy[:2], None, *healthy[3:]]
    logits[2] = -math.inf
    assert sample(logits, asked)[2] is None


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((50, 30), -math.inf)
    logits[:, [4, 20]] = 0.0
    found = sample(logits, [Draw(Sampling(temperature=2.0), 3, i) for i in range(50)])
    assert set(found) == {4, 20}


def test_logprobs_are_the_models_own() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
    expected = [2.0 - math.log(math.e + math.e**2 + math.e**3), -math.log(3)]
    assert logprobs(logits, [1, 2]) == pytest.approx(expected, abs=1e-6)
