"""Drawn tokens, end to end: over many seeds they are those that transformers' processors say, as often."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList
from transformers.generation import logits_process as processors

from engine_driver import Driver
from reference_model import reference
from streamfleet_worker.engine.models import LoadedModel

Make = Callable[..., Driver]
PROMPT = [40, 50, 60, 70]
REQUESTS, CHOICES = 24, 64
DRAWS = REQUESTS * CHOICES

Pair = tuple[int, ...]


def hf(**sampling: Any) -> LogitsProcessorList:
    """The library's processors, in the order that `Sampling` tells."""
    make: dict[str, Callable[[Any], Any]] = {
        "logit_bias": lambda bias: processors.SequenceBiasLogitsProcessor(
            [[[token_id], value] for token_id, value in bias.items()]
        ),
        "repetition_penalty": processors.RepetitionPenaltyLogitsProcessor,
        "temperature": processors.TemperatureLogitsWarper,
        "min_p": processors.MinPLogitsWarper,
        "top_k": processors.TopKLogitsWarper,
        "top_p": processors.TopPLogitsWarper,
        "typical_p": processors.TypicalLogitsWarper,
    }
    return LogitsProcessorList([build(sampling[name]) for name, build in make.items() if name in sampling])


def distribution(token_ids: Sequence[int], sampling: dict[str, Any]) -> torch.Tensor:
    """Of the token after these, by the library; float64."""
    logits = reference("llama").logits(token_ids)[-1:]
    process: Any = hf(**sampling)
    processed: torch.Tensor = process(torch.tensor([list(token_ids)]), logits)
    return processed.double().softmax(dim=-1)[0]


def draw(driver: Driver, sampling: dict[str, Any], length: int) -> Counter[Pair]:
    """Answers of so many tokens, over many seeds."""
    found: Counter[Pair] = Counter()
    for number in range(REQUESTS):
        driver.add(
            str(number),
            prompt_token_ids=PROMPT,
            max_tokens=length,
            n=CHOICES,
            ignore_eos=True,
            sampling={**sampling, "seed": number},
        )
    for heard in driver.run().values():
        found.update(choice.token_ids for choice in heard.choices)
    assert found.total() == DRAWS
    return found


def deviation(found: Counter[Pair], expected: dict[Pair, float]) -> float:
    """Pearson's chi-square as a number of standard deviations (Wilson and Hilferty, 1931).

    Cells in which less than 8 are expected are put together.
    """
    cells, rest = [], [0.0, 0.0]
    for pair, probability in sorted(expected.items(), key=lambda item: item[1]):
        cell = [found[pair], DRAWS * probability]
        if min(cell[1], rest[1] or 8) < 8:
            rest = [rest[0] + cell[0], rest[1] + cell[1]]
            if rest[1] >= 8:
                cells.append(rest)
                rest = [0.0, 0.0]
        else:
            cells.append(cell)
    if rest[1]:
        cells[-1] = [cells[-1][0] + rest[0], cells[-1][1] + rest[1]]
    assert sum(cell[1] for cell in cells) == pytest.approx(DRAWS)
    square = math.fsum((seen - meant) ** 2 / meant for seen, meant in cells)
    k = len(cells) - 1
    assert k > 1
    cube_root: float = (square / k) ** (1 / 3)
    return (cube_root - (1 - 2 / (9 * k))) / math.sqrt(2 / (9 * k))


@pytest.mark.parametrize(
    "sampling",
    [
        {"temperature": 1.0},
        {"temperature": 0.3},
        {"temperature": 0.4, "top_k": 17},
        {"temperature": 0.4, "top_p": 0.7},
        {"temperature": 0.3, "min_p": 0.15},
        {"temperature": 0.5, "min_p": 0.05, "top_k": 60, "top_p": 0.8},
        {"temperature": 0.4, "typical_p": 0.6},
        {"temperature": 0.2, "repetition_penalty": 1.8},
        {"temperature": 0.3, "top_k": 40, "logit_bias": {467: -2.0, 9: 3.0, 70: 2.5}},
    ],
    ids=str,
)
def test_support_and_frequency(sampling: dict[str, Any], llama: LoadedModel, drive: Make) -> None:
    found = draw(drive(llama, max_batch_size=64, max_seq_len=64, max_delay_s=0), sampling, length=1)
    expected: dict[Pair, float] = {
        (i,): p for i, p in enumerate(distribution(PROMPT, sampling).tolist()) if p
    }
    assert found.keys() <= expected.keys()
    # With the seeds fixed it is the same number each time; 4 would be one chance in 30,000.
    assert deviation(found, expected) < 4


def test_tokens_of_an_answer_are_drawn_apart_from_each_other(llama: LoadedModel, drive: Make) -> None:
    sampling = {"temperature": 0.5, "top_k": 4}
    found = draw(drive(llama, max_batch_size=64, max_seq_len=64, max_delay_s=0), sampling, length=2)
    expected: dict[Pair, float] = {}
    for first, p in enumerate(distribution(PROMPT, sampling).tolist()):
        if p:
            after = distribution([*PROMPT, first], sampling).tolist()
            expected |= {(first, second): p * q for second, q in enumerate(after) if q}
    assert len(expected) == 16
    assert found.keys() == expected.keys()
    assert deviation(found, expected) < 4


def test_the_measure_would_notice(llama: LoadedModel, drive: Make) -> None:
    found = draw(drive(llama, max_batch_size=64, max_seq_len=64, max_delay_s=0), {"temperature": 0.3}, 1)
    wrong = distribution(PROMPT, {"temperature": 0.27}).tolist()
    expected: dict[Pair, float] = {(i,): p for i, p in enumerate(wrong)}
    assert deviation(found, expected) > 4
