"""What a request changes in its logits, against transformers' processors and against sums by hand."""

import math

import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from sampler_rows import VOCAB, row, sampled, tokens
from streamfleet_common.errors import GenerationFailed, InvalidRequest
from streamfleet_common.schemas import Sampling
from streamfleet_worker.engine import edits
from streamfleet_worker.engine.sampler import Row, sample


def edited(logits: torch.Tensor, *rows: Row) -> torch.Tensor:
    """The logits from which the next token is chosen."""
    changed = logits.clone()
    changes = {place: made.edits for place, made in enumerate(rows) if made.edits is not None}
    assert edits.apply(changed, changes) == {}
    return changed


def some_logits(rows: int = 1, seed: int = 1) -> torch.Tensor:
    """Of both signs."""
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


def ids(*token_ids: int) -> torch.Tensor:
    return torch.tensor([token_ids])


# --- penalties and bias ----------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [1.3, 0.5, 10.0])
def test_the_repetition_penalty_is_that_of_transformers(penalty: float) -> None:
    logits = some_logits()
    prompt, answer = [3, 5, 3, 3, 39], [7, 7, 5, 0]
    ours = edited(logits, row(Sampling(repetition_penalty=penalty), prompt=prompt, answer=answer))
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(ids(*prompt, *answer), logits)
    assert torch.equal(ours, theirs)


def test_the_repetition_penalty_makes_tokens_of_either_sign_less_likely() -> None:
    logits = torch.tensor([[4.0, -4.0, 0.0, 1.0]])
    one = row(Sampling(repetition_penalty=2.0), prompt=[0, 1], answer=[2], vocab=4)
    assert edited(logits, one).tolist() == [[2.0, -8.0, 0.0, 1.0]]


def test_presence_and_frequency_count_the_answer_alone() -> None:
    # As OpenAI's documentation has it: each coming costs the frequency penalty, and the first the other.
    logits = torch.tensor([[1.0, 2.0, 3.0, -4.0, 5.0]])
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    one = row(sampling, prompt=[4, 4, 0], answer=[1, 3, 1, 1], vocab=5)
    assert edited(logits, one).tolist() == [[1.0, 2.0 - 0.75 - 0.5, 3.0, -4.0 - 0.25 - 0.5, 5.0]]
    encourage = row(Sampling(frequency_penalty=-2.0), answer=[2, 2], vocab=5)
    assert edited(logits, encourage).tolist() == [[1.0, 2.0, 7.0, -4.0, 5.0]]


def test_bias_comes_first_then_repetition_then_presence_and_frequency() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    sampling = Sampling(
        logit_bias={1: -6.0, 2: 3.0}, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5
    )
    one = row(sampling, prompt=[0], answer=[1, 2, 2], vocab=3)
    assert edited(logits, one).tolist() == [[1 / 2, (2 - 6) * 2 - 0.5 - 1, (3 + 3) / 2 - 2 * 0.5 - 1]]


def test_a_bias_is_that_of_transformers_and_the_last_word_on_a_token_counts() -> None:
    logits = some_logits()
    one = row(Sampling(logit_bias=((3, 9.0), (7, -2.5), (3, 1.5))))
    theirs = SequenceBiasLogitsProcessor([[[3], 1.5], [[7], -2.5]])(ids(0), logits)
    assert torch.equal(edited(logits, one), theirs)


def test_a_bias_can_force_and_forbid_a_token() -> None:
    logits = some_logits(2)
    best = int(logits[1].argmax())
    found = tokens(
        logits, [row(Sampling(logit_bias={17: 1000.0})), row(Sampling(logit_bias={best: -1000.0}))]
    )
    assert found[0] == 17
    assert found[1] == int(logits[1].topk(2).indices[1])


def test_ids_past_the_logits_do_no_harm() -> None:
    logits = some_logits()
    sampling = Sampling(logit_bias={VOCAB: 5.0}, repetition_penalty=1.5, presence_penalty=1.0)
    made = row(sampling, prompt=[VOCAB + 7], eos=frozenset({VOCAB + 1}), min_tokens=3, bad_words=((VOCAB,),))
    assert torch.equal(edited(logits, made), logits)


def test_penalties_see_the_row_s_own_tokens_alone() -> None:
    # A short row without a penalty beside a long one with: padding is no token, and no row is another's.
    logits = some_logits(2, seed=3)
    short = row(prompt=[1])
    long = row(Sampling(frequency_penalty=1.05), prompt=[0] * 30, answer=[0, 4, 4, 9] * 6)
    together = edited(logits, short, long)
    assert torch.equal(together[0], logits[0])
    assert torch.equal(together[1:], edited(logits[1:], long))
    expected = logits[1].clone()
    for token_id, count in ((0, 6), (4, 12), (9, 6)):
        expected[token_id] -= 1.05 * count
    assert together[1].tolist() == pytest.approx(expected.tolist(), abs=1e-5)


def test_a_penalty_works_on_each_token_as_it_comes() -> None:
    logits = torch.tensor([[0.0, 0.1, 0.2, 1.25]])
    one = row(Sampling(frequency_penalty=0.5), vocab=4)
    found = []
    for _ in range(8):
        (token_id,) = tokens(logits, [one])
        found.append(token_id)
        one.append(token_id)
    # 3 falls from 1.25 over 0.75 and 0.25 to -0.25; 2, 1 and 0 are then ahead of it once each.
    assert found == [3, 3, 3, 2, 1, 0, 3, 2]


# --- bans ------------------------------------------------------------------------------------


@pytest.mark.parametrize("answer", [[], [4], [9, 4], [4, 9], [4, 9, 4], [1, 1], [4, 5, 6]])
def test_bad_words_are_those_of_transformers(answer: list[int]) -> None:
    logits = some_logits()
    runs = [[8], [4, 9], [4, 9, 4], [1, 1], [4, 5, 6, 7]]
    ours = edited(logits, row(answer=answer, bad_words=tuple(map(tuple, runs))))
    theirs = NoBadWordsLogitsProcessor(runs)(ids(30, *answer), logits)
    assert torch.equal(ours, theirs)


def test_a_bad_word_does_not_begin_in_the_prompt() -> None:
    logits = some_logits()
    made = row(prompt=[4], bad_words=((4, 9), ()))
    assert torch.equal(edited(logits, made), logits)


@pytest.mark.parametrize("count", [0, 2, 3, 4])
def test_min_tokens_is_that_of_transformers_over_all_end_tokens(count: int) -> None:
    logits = some_logits()
    made = row(
        answer=[1] * count,
        min_tokens=3,
        eos=frozenset({5, 9}),
        stop_token_ids=frozenset({9, 11}),
        prompt=[1, 1],
    )
    theirs = MinNewTokensLengthLogitsProcessor(2, 3, [5, 9, 11])(ids(1, 1, *[1] * count), logits)
    changes = {0: made.edits} if made.edits else {}
    ours = logits.clone()
    edits.apply(ours, changes)
    assert torch.equal(ours, theirs)


def test_ignored_end_tokens_may_come() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 2] = 5.0
    assert tokens(logits, [row(ignore_eos=True)]) == [2]
    # They end nothing, so min_tokens has no reason to hold them back.
    assert tokens(logits, [row(ignore_eos=True, min_tokens=5)]) == [2]
    assert tokens(logits, [row(min_tokens=5)]) == [0]
    one = row(ignore_eos=True, min_tokens=5, stop_token_ids=frozenset({0}))
    assert tokens(torch.zeros(1, VOCAB), [one]) == [1]


# --- guides ----------------------------------------------------------------------------------


class Choice:
    """A guide to one of some runs of tokens, then an end; a matcher of itself."""

    def __init__(self, *runs: tuple[int, ...]) -> None:
        self.runs = [(*run, 2) for run in runs]
        self.done: tuple[int, ...] = ()

    def matcher(self) -> "Choice":
        return Choice(*(run[:-1] for run in self.runs))

    def fill(self, bitmask: torch.Tensor) -> None:
        assert bitmask.dtype == torch.int32
        for run in self.runs:
            if run[: len(self.done)] == self.done and len(run) > len(self.done):
                token_id = run[len(self.done)]
                bit = 1 << token_id % 32
                bitmask[token_id // 32] |= bit - (1 << 32) * (bit >= 1 << 31)

    def accept(self, token_id: int) -> None:
        self.done += (token_id,)
        if not any(run[: len(self.done)] == self.done for run in self.runs):
            raise ValueError("no such run")


@pytest.mark.parametrize("vocab", [VOCAB, 64, 1000])
@pytest.mark.parametrize("temperature", [0.0, 1.0, 100.0])
def test_a_guided_row_takes_allowed_tokens_only(vocab: int, temperature: float) -> None:
    runs = ((7, 31, 32), (7, vocab - 1), (33,))
    guide = Choice(*runs)
    generator = torch.Generator().manual_seed(6)
    ends = set()
    for seed in range(30):
        made = row(Sampling(temperature=temperature), guide=guide, seed=seed, vocab=vocab)
        free = row(Sampling(temperature=temperature), seed=seed, vocab=vocab)
        answer: list[int] = []
        while 2 not in answer:
            logits = torch.randn(2, vocab, generator=generator)
            token_id, other = tokens(logits, [made, free])
            assert other == tokens(logits[1:], [free])[0]
            made.append(token_id)
            answer.append(token_id)
        ends.add(tuple(answer[:-1]))
    assert ends == set(runs)


def test_rows_of_one_guide_go_their_own_ways() -> None:
    guide = Choice((4, 5), (6, 7))
    logits = torch.zeros(2, VOCAB)
    logits[1, 6] = 1.0
    first, second = row(guide=guide), row(guide=guide)
    assert tokens(logits, [first, second]) == [4, 6]
    first.append(4)
    second.append(6)
    assert tokens(logits, [first, second]) == [5, 7]


def test_a_token_that_does_not_fit_is_the_caller_s_to_know() -> None:
    with pytest.raises(ValueError, match="no such run"):
        row(guide=Choice((4, 5)), answer=[9])


@pytest.mark.parametrize("error", [ValueError("odd"), InvalidRequest("odd")])
def test_a_guide_that_fails_fails_its_row_alone(error: Exception) -> None:
    class Broken(Choice):
        def matcher(self) -> "Broken":
            return self

        def fill(self, bitmask: torch.Tensor) -> None:
            raise error

    found = sample(
        torch.zeros(12, VOCAB), [*(row() for _ in range(10)), row(guide=Broken()), row(guide=Choice((9,)))]
    )
    assert [sampled(one).token_id for one in found[:10]] == [0] * 10
    assert isinstance(found[10], type(error) if isinstance(error, InvalidRequest) else GenerationFailed)
    assert "odd" in str(found[10])
    assert sampled(found[11]).token_id == 9


def test_a_guide_and_a_ban_that_leave_nothing_are_told() -> None:
    (found,) = sample(torch.zeros(1, VOCAB), [row(guide=Choice(()), min_tokens=1)])
    assert isinstance(found, GenerationFailed)
    assert found.reason == "all_banned"


def test_an_unguided_row_is_not_touched_by_edits_of_others() -> None:
    logits = some_logits(3)
    rows = [row(), row(Sampling(repetition_penalty=1.2, logit_bias={1: 2.0}), guide=Choice((9,))), row()]
    changed = edited(logits, *rows)
    assert torch.equal(changed[[0, 2]], logits[[0, 2]])
    assert [place for place, value in enumerate(changed[1]) if value > -math.inf] == [9]
