"""Log-probabilities: those of the model itself, whatever the request changes."""

import math
from typing import Any

import pytest
import torch

from sampler_rows import VOCAB, row, sampled
from streamfleet_common.schemas import Sampling
from streamfleet_worker.engine.sampler import Sampled, sample, score

LOGITS = [1.0, 2.0, 3.0]
LOG_Z = math.log(math.e + math.e**2 + math.e**3)


def one(logits: torch.Tensor, sampling: Sampling | None = None, **fields: Any) -> Sampled:
    (found,) = sample(logits.clone(), [row(sampling, logprobs=True, vocab=logits.shape[1], **fields)])
    return sampled(found)


def test_none_unless_asked_for() -> None:
    (found,) = sample(torch.tensor([LOGITS]), [row(vocab=3)])
    assert found == Sampled(2, None, ())
    assert one(torch.tensor([LOGITS])).top == ()


@pytest.mark.parametrize(
    ("sampling", "token_id"),
    [
        (Sampling(), 2),
        (Sampling(logit_bias={0: 50.0}), 0),
        (Sampling(temperature=100.0, logit_bias={1: 1000.0}), 1),
        (Sampling(temperature=1e-3, top_k=1), 2),
        (Sampling(repetition_penalty=10.0), 1),
    ],
    ids=["greedy", "bias", "bias, hot", "cold", "penalty"],
)
def test_they_are_the_model_s_own_before_bias_penalties_and_temperature(
    sampling: Sampling, token_id: int
) -> None:
    found = one(torch.tensor([LOGITS]), sampling, prompt=[2], top_logprobs=3)
    assert found.token_id == token_id
    assert found.logprob == pytest.approx(LOGITS[token_id] - LOG_Z, abs=1e-6)
    assert [token for token, _ in found.top] == [2, 1, 0]
    assert [value for _, value in found.top] == pytest.approx([3 - LOG_Z, 2 - LOG_Z, 1 - LOG_Z], abs=1e-6)


@pytest.mark.parametrize("vocab", [25, 64, 5000])
@pytest.mark.parametrize("coarse", [False, True])
def test_the_likeliest_are_those_of_log_softmax(vocab: int, coarse: bool) -> None:
    logits = torch.randn(20, vocab, generator=torch.Generator().manual_seed(2)) * 3
    if coarse:
        logits = logits.round()
    rows = [row(logprobs=True, top_logprobs=place, vocab=vocab) for place in range(20)]
    scores = torch.log_softmax(logits, dim=-1)
    for place, found in enumerate(map(sampled, sample(logits.clone(), rows))):
        values = logits[place].tolist()
        order = sorted(range(vocab), key=lambda token_id: (-values[token_id], token_id))[:place]
        assert found.top == tuple((token_id, scores[place, token_id].item()) for token_id in order)
        assert found.logprob == scores[place, found.token_id].item()


def test_of_equals_the_lower_ids_are_listed_however_many_there_are() -> None:
    found = one(torch.zeros(1, 5000), top_logprobs=20)
    assert [token for token, _ in found.top] == list(range(20))
    assert [value for _, value in found.top] == pytest.approx([-math.log(5000)] * 20, abs=1e-5)
    logits = torch.zeros(1, 5000)
    logits[0, [4000, 17]] = 1.0
    assert [token for token, _ in one(logits, top_logprobs=5).top] == [17, 4000, 0, 1, 2]


def test_what_cannot_come_is_not_listed() -> None:
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, [4, 9]] = 0.0
    found = one(logits, top_logprobs=5)
    assert [token for token, _ in found.top] == [4, 9]
    # Not even where the vocabulary is shorter than the list.
    assert len(one(torch.tensor([LOGITS]), top_logprobs=20).top) == 3


def test_bans_do_not_change_them() -> None:
    logits = torch.tensor([LOGITS])
    found = one(logits, bad_words=((2,),), top_logprobs=1)
    assert (found.token_id, found.top[0][0]) == (1, 2)
    assert found.logprob == pytest.approx(2 - LOG_Z, abs=1e-6)


def test_a_prompt_is_scored_by_the_tokens_that_came() -> None:
    logits = torch.tensor([LOGITS, [0.0, 0.0, 0.0]])
    logprobs, top = score(logits, [1, 2], 0)
    assert logprobs == pytest.approx([2 - LOG_Z, -math.log(3)], abs=1e-6)
    assert top == [(), ()]
    assert score(logits[:0], [], 3) == ([], [])


def test_scores_of_a_long_prompt_are_those_of_log_softmax() -> None:
    logits = torch.randn(37, 3001, generator=torch.Generator().manual_seed(9))
    logits[5] = 0.0  # all equal
    came = torch.randint(3001, (37,), generator=torch.Generator().manual_seed(10)).tolist()
    logprobs, top = score(logits, came, 4)
    expected = torch.log_softmax(logits, dim=-1)
    assert logprobs == expected[torch.arange(37), came].tolist()
    for place in range(37):
        values = logits[place].tolist()
        order = sorted(range(3001), key=lambda token_id: (-values[token_id], token_id))[:4]
        assert top[place] == tuple((token_id, expected[place, token_id].item()) for token_id in order)
    assert score(logits[5:6], came[5:6], 4) == (logprobs[5:6], top[5:6])


def test_a_score_that_is_no_number_is_left_to_the_caller() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[1, 0] = math.nan
    logits[2, 5] = -math.inf
    logprobs, _ = score(logits, [5, 5, 5], 2)
    assert logprobs[0] == pytest.approx(-math.log(VOCAB))
    assert math.isnan(logprobs[1])
    assert logprobs[2] == -math.inf
