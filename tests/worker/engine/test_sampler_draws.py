"""What is drawn from, and how often, against transformers' processors and plain sums."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from sampler_rows import drawn, kept, named, row, sampled, tokens
from streamfleet_common.schemas import Sampling
from streamfleet_worker.engine import sampler
from streamfleet_worker.engine.blocks import Blocks
from streamfleet_worker.engine.draw import Draw, Draws, _inverse, uniform

CUTS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.5),
    Sampling(temperature=2.0, top_k=5),
    Sampling(temperature=1.0, top_p=0.7),
    Sampling(temperature=1.3, top_k=8, top_p=0.8),
    Sampling(temperature=3.0, top_p=0.99),
    Sampling(temperature=3.0, top_k=100),
    Sampling(temperature=3.0, top_k=200, top_p=0.95),
    Sampling(temperature=1.5, min_p=0.1),
    Sampling(temperature=2.0, min_p=0.05, top_k=20, top_p=0.8),
    Sampling(temperature=3.0, min_p=0.05, top_k=280, top_p=0.9),
    Sampling(temperature=1.0, top_p=0.0),
    Sampling(temperature=1.0, top_k=1),
    Sampling(temperature=1.0, min_p=1.0),
    Sampling(temperature=1.0, top_k=1_000_000),
    Sampling(temperature=2.0, typical_p=0.6),
    Sampling(temperature=1.0, typical_p=0.2),
    Sampling(temperature=1.0, typical_p=1e-9),
    Sampling(temperature=1.0, top_p=0.9, typical_p=0.7),
    Sampling(temperature=2.0, top_k=30, typical_p=0.9),
    Sampling(temperature=3.0, min_p=0.05, top_k=280, top_p=0.9, typical_p=0.5),
]


def theirs(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """What transformers would draw from, cut in the order that `Sampling` names; float64 `[vocab_size]`."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits[None].double())
    warpers: list[Any] = []
    if sampling.min_p:
        warpers.append(MinPLogitsWarper(sampling.min_p))
    if sampling.top_k:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    for warper in warpers:
        scores = warper(None, scores)
    if sampling.top_p < 1:
        # Which equals it keeps is left to its sort: this makes the lower ids a trace likelier.
        traces = torch.arange(scores.shape[1], dtype=torch.float64) * 1e-10
        scores = torch.where(
            TopPLogitsWarper(sampling.top_p)(None, scores - traces).isneginf(), -math.inf, scores
        )
    if sampling.typical_p < 1:
        scores = TypicalLogitsWarper(sampling.typical_p)(None, scores)
    return torch.softmax(scores[0], dim=-1)


def grid(
    logits: torch.Tensor, sampling: Sampling, count: int, monkeypatch: pytest.MonkeyPatch
) -> torch.Tensor:
    """How often each token comes when the drawing number takes `count` even steps from 0 to 1."""
    monkeypatch.setattr(sampler, "uniform", lambda seed, _: (seed + 0.5) / count)
    rows = [row(sampling, seed=place, vocab=len(logits)) for place in range(count)]
    return torch.bincount(torch.tensor(tokens(logits.repeat(count, 1), rows)), minlength=len(logits))


@pytest.mark.parametrize("vocab", [12, pytest.param(64, marks=pytest.mark.slow), 300])
@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("sampling", CUTS, ids=named)
def test_support_and_shares_are_those_of_transformers(
    vocab: int, coarse: bool, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No share is below 1 / count, so each token that may be drawn is.
    count = 1024
    logits = torch.rand(vocab, generator=torch.Generator().manual_seed(3)) * sampling.temperature
    if coarse:
        logits = (logits * 8 / sampling.temperature).round() / 8 * sampling.temperature
    expected = theirs(logits, sampling)
    assert expected[expected > 0].min() > 1 / count
    found = grid(logits, sampling, count, monkeypatch)
    assert torch.equal(found > 0, expected > 0)
    assert (found - expected * count).abs().max() <= 1


@pytest.mark.parametrize(
    "sampling",
    [
        CUTS[1],
        *CUTS[15::6],
        *(pytest.param(cut, marks=pytest.mark.slow) for cut in (*CUTS[5:12:4], *CUTS[3:12:4], *CUTS[18::6])),
    ],
    ids=named,
)
def test_frequencies_over_seeds_and_places_are_those_of_transformers(sampling: Sampling) -> None:
    logits = torch.randn(200, generator=torch.Generator().manual_seed(3)) * 2
    expected, count = theirs(logits, sampling), 4000
    rows = [row(sampling, seed=place % 50, vocab=200, answer=[0] * (place // 50)) for place in range(count)]
    found = torch.bincount(torch.tensor(tokens(logits.repeat(count, 1), rows)), minlength=200)
    assert not found[expected == 0].any()
    likely = expected * count >= 5
    chi_square = ((found - expected * count) ** 2 / (expected * count))[likely].sum().item()
    freedom = int(likely.sum()) - 1
    # Mean and spread of a chi-square: 5 spreads above the mean is no accident.
    assert chi_square <= freedom + 5 * math.sqrt(2 * max(freedom, 1))


@settings(max_examples=150, deadline=None)
@given(
    vocab=st.integers(1, 400),
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.1, 1.0, 6.0]),
    steps=st.sampled_from([0, 2, 64]),
    temperature=st.sampled_from([0.05, 0.7, 1.0, 3.0, 100.0]),
    top_k=st.one_of(st.just(0), st.integers(1, 450)),
    top_p=st.one_of(st.just(1.0), st.floats(0, 1)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    typical_p=st.one_of(st.just(1.0), st.floats(0, 1, exclude_min=True)),
    number=st.floats(0, 1, exclude_max=True),
)
def test_a_draw_is_the_inverse_of_plain_sums(
    *,
    vocab: int,
    seed: int,
    scale: float,
    steps: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
    number: float,
) -> None:
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(seed)) * scale
    if steps:
        logits = (logits * steps).round() / steps
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, typical_p=typical_p)
    # Near a limit float32 may decide otherwise than float64: any token that one of these leaves room for.
    allowed = set()
    for shift in (-1e-5, 0.0, 1e-5):
        near = {"top_p": top_p, "min_p": min_p, "typical_p": typical_p}
        near = {name: min(1.0, max(0.0, value + shift * (0 < value < 1))) for name, value in near.items()}
        shares = kept(logits[0].tolist(), sampling.model_copy(update=near), shift)
        allowed |= drawn(shares, number - 1e-5, number + 1e-5)
    draws = Draws(Blocks(logits), [Draw(0, sampling, number)], vocab)
    found, unsure = draws.likely()
    ways = {int(draws.thorough([0])), int(draws._draw_sorted(torch.tensor([0])))}
    if not unsure:
        ways.add(int(found))
    assert ways <= allowed


def support(logits: torch.Tensor, sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> set[int]:
    return set(grid(logits, sampling, 500, monkeypatch).nonzero()[:, 0].tolist())


@pytest.mark.parametrize("vocab", [6, 200])
def test_equals_of_the_kth_are_kept_and_a_nucleus_takes_the_lower_ids(
    vocab: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A sixth each, or as good as: behind the six nothing can be drawn.
    logits = torch.full((vocab,), -100.0)
    logits[:6] = 0.0
    assert support(logits, Sampling(temperature=1.0, top_k=2), monkeypatch) == {0, 1, 2, 3, 4, 5}
    assert support(logits, Sampling(temperature=1.0, min_p=1.0), monkeypatch) == {0, 1, 2, 3, 4, 5}
    assert support(logits, Sampling(temperature=1.0, top_p=0.5), monkeypatch) == {0, 1, 2}
    assert support(logits, Sampling(temperature=1.0, top_p=0.51), monkeypatch) == {0, 1, 2, 3}
    assert support(logits, Sampling(temperature=1.0, top_p=0.0), monkeypatch) == {0}
    logits[4] = 1.0
    assert support(logits, Sampling(temperature=1.0, top_k=2), monkeypatch) == {0, 1, 2, 3, 4, 5}
    # e / (e + 5) is 0.35, each other 0.13.
    assert support(logits, Sampling(temperature=1.0, top_p=0.4), monkeypatch) == {0, 4}


def test_a_nucleus_of_more_equals_than_are_looked_at_first(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.zeros(300)
    assert support(logits, Sampling(temperature=1.0, top_p=0.0), monkeypatch) == {0}
    assert support(logits, Sampling(temperature=1.0, top_p=0.5), monkeypatch) == set(range(150))
    assert support(logits, Sampling(temperature=1.0, min_p=1.0), monkeypatch) == set(range(300))
    assert support(logits, Sampling(temperature=1.0, top_k=2), monkeypatch) == set(range(300))
    logits[[7, 250]] = 0.5
    assert support(logits, Sampling(temperature=1.0, top_p=0.5), monkeypatch) == {*range(149), 250}


def test_min_p_comes_before_top_p(monkeypatch: pytest.MonkeyPatch) -> None:
    # min_p leaves 0.5, 0.3 of all, so top_p 0.6 is met by 0.5 / 0.8; of the whole it would take both.
    logits = torch.tensor([0.5, 0.3, 0.1, 0.1]).log()
    assert support(logits, Sampling(temperature=1.0, top_p=0.6, min_p=0.3), monkeypatch) == {0}
    assert support(logits, Sampling(temperature=1.0, top_p=0.6), monkeypatch) == {0, 1}
    # And top_k leaves the same.
    assert support(logits, Sampling(temperature=1.0, top_p=0.6, top_k=2), monkeypatch) == {0}


def test_cuts_look_at_probabilities_after_temperature(monkeypatch: pytest.MonkeyPatch) -> None:
    # At temperature 0.5 the shares 0.5, 0.3, 0.2 become 25, 9, 4 of 38.
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    assert support(logits, Sampling(temperature=1.0, top_p=0.6), monkeypatch) == {0, 1}
    assert support(logits, Sampling(temperature=0.5, top_p=0.6), monkeypatch) == {0}
    assert support(logits, Sampling(temperature=1.0, min_p=0.35), monkeypatch) == {0, 1, 2}
    assert support(logits, Sampling(temperature=0.5, min_p=0.35), monkeypatch) == {0, 1}


@pytest.mark.parametrize("top_p", [1.0, 0.0])
def test_top_p_of_1_and_of_0_are_taken(top_p: float) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    found = {
        tokens(logits, [row(Sampling(temperature=1.0, top_p=top_p), seed=n, vocab=3)])[0] for n in range(200)
    }
    assert found == ({0, 1, 2} if top_p else {1})


@pytest.mark.parametrize("temperature", [1e-9, 1e-50, 5e-324])  # two of them less than float32 knows
@pytest.mark.parametrize(
    "cuts", [{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.1}, {"top_k": 70, "top_p": 0.9}]
)
@pytest.mark.parametrize("vocab", [4, 500])
def test_tiny_temperatures_are_as_good_as_greedy(
    temperature: float, cuts: dict[str, Any], vocab: int
) -> None:
    logits = torch.full((50, vocab), -4.0)
    logits[:, :3] = torch.tensor([1.0, 9.0, 8.99])
    rows = [row(Sampling(temperature=temperature, **cuts), seed=seed, vocab=vocab) for seed in range(50)]
    assert set(tokens(logits, rows)) == {1}


@pytest.mark.parametrize("cuts", [{}, {"top_k": 4}, {"top_p": 0.999}, {"min_p": 0.5}])
def test_forbidden_tokens_are_never_drawn(cuts: dict[str, Any]) -> None:
    logits = torch.full((200, 300), -math.inf)
    logits[:, [4, 20, 299]] = 0.0
    rows = [row(Sampling(temperature=100.0, **cuts), seed=seed, vocab=300) for seed in range(200)]
    assert set(tokens(logits, rows)) == {4, 20, 299}
    logits[:, [4, 299]] = -math.inf
    assert set(tokens(logits, rows)) == {20}


def test_far_apart_logits_do_not_overflow() -> None:
    logits = torch.full((3, 100), -3e38)
    logits[:, 9] = 3e38
    rows = [
        row(Sampling(temperature=t, top_p=p), vocab=100) for t, p in ((1.0, 1.0), (1e-3, 0.9), (100.0, 1.0))
    ]
    assert tokens(logits, rows) == [9, 9, 9]


def test_few_allowed_tokens_are_known_to_be_all() -> None:
    logits = torch.full((1, 5000), -math.inf)
    logits[0, ::1000] = 0.0
    for cuts in ({"top_p": 0.5}, {"top_k": 60}, {"top_k": 200}, {"min_p": 0.5}):
        _, unsure = Draws(Blocks(logits), [Draw(0, Sampling(temperature=1.0, **cuts), 0.5)], 5000).likely()
        assert not unsure.any()


def test_a_place_without_weight_is_never_the_one() -> None:
    weights = torch.tensor([[0.0, 0.0, 3.0, 0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    found = {}
    for number in (0.0, 0.5, 0.75, 1.0):
        place, rest = _inverse(weights, torch.tensor([[number]], dtype=torch.float64))
        found[number] = (place.item(), rest.item())
    assert found == {0.0: (2, 0.0), 0.5: (2, pytest.approx(2 / 3)), 0.75: (4, 0.0), 1.0: (4, 1.0)}


def test_the_ends_of_the_drawing_number_are_inside() -> None:
    logits = torch.zeros(2, 100)
    logits[:, [0, 99]] = -math.inf
    for cuts in ({}, {"top_p": 0.9999}, {"top_k": 98}):
        sampling = Sampling(temperature=1.0, **cuts)
        draws = [Draw(0, sampling, 0.0), Draw(1, sampling, math.nextafter(1.0, 0.0))]
        all_ = Draws(Blocks(logits), draws, 100)
        assert all_.thorough([0, 1]).tolist() == [1, 98]
        found, unsure = all_.likely()
        assert all(maybe or token == end for token, maybe, end in zip(found, unsure, (1, 98), strict=True))


def test_a_number_is_a_hash_of_seed_and_place() -> None:
    # SplitMix64 of seed 1234567 begins so: https://rosettacode.org/wiki/Pseudo-random_numbers/Splitmix64
    state, numbers = 1234567, []
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
        numbers.append(z ^ z >> 31)
    assert numbers == [6457827717110365317, 3203168211198807973]
    # Ours takes the first of the seed as the state of the place's own.
    state = numbers[0] + 0x9E3779B97F4A7C15
    z = state % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    assert uniform(1234567, 0) == ((z ^ z >> 31) >> 11) / 2**53


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_a_gpu_draws_the_same() -> None:
    logits = torch.randn(16 * len(CUTS), 1000, generator=torch.Generator().manual_seed(8))
    rows = [row(CUTS[seed % len(CUTS)], seed=seed, vocab=1000) for seed in range(len(logits))]
    there = [sampled(found).token_id for found in sampler.sample(logits.cuda(), rows)]
    # Sums in another order may move a token over an edge, once in a long while.
    assert sum(a != b for a, b in zip(there, tokens(logits, rows), strict=True)) <= 1
