"""The sampler's face: greedy choice, draws that depend on their row alone, rows that fail alone."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sampler_rows import VOCAB, named, row, sampled, tokens
from streamfleet_common.errors import GenerationFailed
from streamfleet_common.schemas import Sampling
from streamfleet_worker.engine.draw import uniform
from streamfleet_worker.engine.sampler import Row, sample

DRAWS = [
    Sampling(temperature=1.0),
    Sampling(temperature=0.8, top_k=20),
    Sampling(temperature=0.8, top_k=100),
    Sampling(temperature=1.2, top_p=0.9),
    Sampling(temperature=3.0, top_p=0.99),
    Sampling(temperature=1.2, min_p=0.2),
    Sampling(temperature=1.2, top_k=50, top_p=0.9, min_p=0.01),
    Sampling(temperature=1.2, typical_p=0.8),
    Sampling(temperature=1.2, top_k=50, typical_p=0.5),
]


class Even:
    """A guide that allows even ids only."""

    def matcher(self) -> "Even":
        return self

    def fill(self, bitmask: torch.Tensor) -> None:
        bitmask[:] = 0x55555555

    def accept(self, token_id: int) -> None:
        assert token_id % 2 == 0


def test_greedy_takes_the_likeliest_and_of_equals_the_lowest_id() -> None:
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 5.0, 5.0, 5.0], [-1.0, -2.0, -3.0, -0.5]])
    assert tokens(logits, [row() for _ in range(3)]) == [1, 0, 3]
    wide = torch.zeros(2, 5000)
    wide[:, [77, 4321]] = 1.0
    assert tokens(wide, [row(), row()]) == [77, 77]


def test_greedy_asks_for_no_seed_and_ignores_the_cuts() -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    best = int(logits.argmax())
    for sampling in (Sampling(), Sampling(top_p=0.0), Sampling(top_p=1.0), Sampling(top_k=3, min_p=1.0)):
        assert {tokens(logits, [row(sampling, seed=seed)])[0] for seed in range(5)} == {best}


def test_no_rows_give_nothing() -> None:
    assert sample(torch.zeros(0, VOCAB), []) == []


# --- one row, whatever the others ------------------------------------------------------------


def requests() -> st.SearchStrategy[dict[str, Any]]:
    """Fields of one row, with any mixture of features."""
    some_id = st.integers(0, VOCAB - 1)
    sampling = st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.0, 0.3, 1.0, 5.0]),
        top_k=st.sampled_from([0, 0, 1, 5, 64, 1000]),
        top_p=st.sampled_from([1.0, 1.0, 0.9, 0.5, 0.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.1]),
        typical_p=st.sampled_from([1.0, 1.0, 0.7, 0.1]),
        repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.7]),
        presence_penalty=st.sampled_from([0.0, 0.0, 0.5]),
        frequency_penalty=st.sampled_from([0.0, 0.0, 1.05]),
        logit_bias=st.dictionaries(some_id, st.sampled_from([-5.0, 0.5, 3.0]), max_size=3),
    )
    top = st.sampled_from([0, 0, 3, 20])
    return st.fixed_dictionaries(
        {
            "sampling": sampling,
            "seed": st.integers(0, 2**53),
            "prompt": st.lists(some_id, min_size=1, max_size=8),
            "answer": st.lists(some_id.filter(lambda token_id: token_id % 2 == 0), max_size=8),
            "bad_words": st.lists(st.lists(some_id, min_size=1, max_size=2).map(tuple), max_size=3).map(
                tuple
            ),
            "min_tokens": st.sampled_from([0, 6]),
            "guide": st.sampled_from([None, None, Even()]),
            "top_logprobs": top,
            "logprobs": st.booleans(),
        }
    )


def made(fields: dict[str, Any], vocab: int) -> Row:
    return row(vocab=vocab, **{**fields, "top_logprobs": fields["top_logprobs"] * fields["logprobs"]})


@settings(max_examples=60, deadline=None)
@given(
    asked=st.lists(requests(), min_size=2, max_size=7),
    vocab=st.sampled_from([VOCAB, 64, 301, 5000]),
    scale=st.sampled_from([0.2, 3.0]),
    coarse=st.booleans(),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_a_row_gets_the_same_bits_alone_and_in_any_company(
    *, asked: list[dict[str, Any]], vocab: int, scale: float, coarse: bool, seed: int, data: st.DataObject
) -> None:
    logits = torch.randn(len(asked), vocab, generator=torch.Generator().manual_seed(seed)) * scale
    if coarse:
        logits = logits.bfloat16().float()  # with many equals
    together = sample(logits.clone(), [made(fields, vocab) for fields in asked])
    order = data.draw(st.permutations(range(len(asked))))[: data.draw(st.integers(1, len(asked)))]
    fewer = sample(logits[order].clone(), [made(asked[place], vocab) for place in order])
    alone = [sample(logits[[i]].clone(), [made(asked[i], vocab)])[0] for i in range(len(asked))]
    assert list(map(told, together)) == list(map(told, alone))
    assert list(map(told, fewer)) == [told(together[place]) for place in order]


def told(found: object) -> object:
    return str(found) if isinstance(found, GenerationFailed) else found


def test_bits_are_the_same_at_the_size_of_a_real_vocabulary() -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(2 * len(DRAWS), 50_257, generator=generator)
    logits[::2] *= 4
    rows = [row(DRAWS[place // 2], seed=place, answer=[5] * place) for place in range(len(logits))]
    together = tokens(logits, rows)
    alone = [tokens(logits[[place]], [rows[place]])[0] for place in range(len(rows))]
    order = [5, 3, 11, 0, 9]
    assert together == alone
    assert tokens(logits[order], [rows[place] for place in order]) == [together[place] for place in order]


def test_a_draw_depends_on_seed_and_place() -> None:
    logits = torch.zeros(1, VOCAB)
    flat = Sampling(temperature=1.0)
    by_seed = {tokens(logits, [row(flat, seed=seed)])[0] for seed in range(200)}
    by_place = {tokens(logits, [row(flat, answer=[0] * place)])[0] for place in range(200)}
    assert by_seed == by_place == set(range(VOCAB))
    assert tokens(logits, [row(flat, seed=7, answer=[9, 9])]) == tokens(
        logits, [row(flat, seed=7, answer=[1, 3])]
    )


def test_count_is_the_place_of_the_next_token() -> None:
    one = row()
    assert one.count == 0
    one.append(5)
    one.append(6)
    assert one.count == 2


def test_uniform_numbers_are_uniform_and_unlike() -> None:
    numbers = [uniform(seed, index) for seed in range(60) for index in range(60)]
    assert len(set(numbers)) == len(numbers)
    assert 0 <= min(numbers) <= max(numbers) < 1
    tenths = torch.bincount(torch.tensor([int(10 * u) for u in numbers]), minlength=10)
    assert ((tenths - 360) ** 2 / 360).sum().item() < 9 + 5 * math.sqrt(18)
    pairs = torch.tensor([[uniform(7, i), uniform(7, i + 1)] for i in range(2000)]).T
    assert abs(torch.corrcoef(pairs)[0, 1].item()) < 0.1


# --- failures --------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("sampling", [Sampling(), *DRAWS], ids=named)
@pytest.mark.parametrize("vocab", [VOCAB, 1000])
def test_a_bad_row_fails_alone(bad: float, sampling: Sampling, vocab: int) -> None:
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(5))
    rows = [row(sampling, seed=place, logprobs=True, top_logprobs=2) for place in range(5)]
    healthy = sample(logits.clone(), rows)
    logits[2, 7] = bad
    found = sample(logits.clone(), rows)
    assert found[:2] + found[3:] == healthy[:2] + healthy[3:]
    assert isinstance(found[2], GenerationFailed)
    assert found[2].reason == "not_finite"
    logits[2] = -math.inf
    found = sample(logits.clone(), rows)
    assert found[:2] + found[3:] == healthy[:2] + healthy[3:]
    assert isinstance(found[2], GenerationFailed)
    assert found[2].reason == "not_finite"


def test_a_nan_is_seen_behind_a_ban() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[0, 2] = logits[1, 3] = math.nan
    rows = [row(min_tokens=1), row(guide=Even()), row(guide=Even())]
    first, second, third = sample(logits, rows)
    assert isinstance(first, GenerationFailed)
    assert isinstance(second, GenerationFailed)
    assert sampled(third).token_id == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_an_allowed_token_fails_alone_and_says_why(temperature: float) -> None:
    sampling = Sampling(temperature=temperature)
    banned = row(sampling, bad_words=tuple((token_id,) for token_id in range(VOCAB)))
    found = sample(torch.zeros(3, VOCAB), [row(sampling), banned, row(sampling)])
    assert isinstance(found[1], GenerationFailed)
    assert found[1].reason == "all_banned"
    assert "bad_words" in str(found[1])
    assert [sampled(found[0]), sampled(found[2])]
