"""The oracle: whatever a request asks for, it gets the same to the bit alone and in any company.

Requests arrive and are cancelled at random steps of one small, busy engine, with prompts in chunks and
beginnings from the prefix cache. Each is then run alone in an engine of its own, which has other sizes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from engine_driver import Driver, Heard
from random_requests import RandomRequests, is_plainly_greedy
from reference_model import BFLOAT16_GAP, reference
from streamfleet_common.schemas import Timing
from streamfleet_worker.engine import sampler
from streamfleet_worker.engine.models import LoadedModel
from tiny_model import Kind

Make = Callable[..., Driver]
Load = Callable[..., LoadedModel]
Fields = dict[str, Any]
Place = tuple[str, int, int]
"""A request, one of its choices, and a token of that."""


class Logits:
    """Every logit from which a token was chosen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._sample = sampler.sample

    @contextmanager
    def of(self, driver: Driver) -> Iterator[dict[Place, torch.Tensor]]:
        engine: Any = driver.engine
        found: dict[Place, torch.Tensor] = {}

        def sample(logits: torch.Tensor, rows: Any) -> Any:
            names = {
                id(sequence.row): (key[0], index)
                for key, answer in engine._answers.items()
                for index, sequence in answer.running.items()
            }
            for values, row in zip(logits, rows, strict=True):
                place = (*names[id(row)], row.count)
                # A pass that is run again gives what it gave.
                assert place not in found or torch.equal(found[place], values)
                found[place] = values.clone()
            return self._sample(logits, rows)

        with self._patch.context() as patch:
            patch.setattr(sampler, "sample", sample)
            yield found


@pytest.fixture
def logits(monkeypatch: pytest.MonkeyPatch) -> Logits:
    return Logits(monkeypatch)


def together(driver: Driver, requests: dict[str, Fields], seed: int) -> None:
    """All of them in one engine; every seventh is sent twice, and the second one cancelled on its way."""
    source = random.Random(seed)
    todo = list(requests)
    doomed = {}
    cancelled = 0
    while todo or driver.engine.due_in() is not None:
        for _ in range(min(len(todo), source.choice([0, 0, 1, 1, 3]))):
            name = todo.pop(0)
            driver.add(name, **requests[name])
            if int(name) % 7 == 0:
                doomed[f"x{name}"] = driver.add(f"x{name}", **{**requests[name], "max_tokens": 40})
        driver.clock.now += 0.01
        driver.step()
        for name in [name for name in doomed if source.random() < 0.15]:
            driver.engine.cancel([doomed.pop(name)])
            cancelled += driver.heard[name].end is None
    assert cancelled > len(requests) // 20


def comparable(heard: Heard) -> Any:
    end = heard.finished
    return replace(end, launch=None, timing=Timing(), usage=end.usage.model_copy(update={"cached_tokens": 0}))


def warm(driver: Driver) -> int:
    """Warm an engine up, and tell the granule that was found."""
    engine: Any = driver.engine
    engine.warm_up()
    assert engine.info.exact
    granule: int = engine._runner.granule
    return granule


def check(
    loaded: LoadedModel,
    drive: Make,
    logits: Logits,
    *,
    count: int,
    seed: int,
    busy: Fields,
    alone: Fields,
) -> tuple[Driver, dict[str, Fields]]:
    requests = {str(number): fields for number, fields in enumerate(RandomRequests(seed)(count))}
    company = drive(loaded, max_seq_len=256, **busy)
    granule = warm(company)
    with logits.of(company) as ours:
        together(company, requests, seed)
    cached = 0
    for name, fields in requests.items():
        driver = drive(loaded, max_seq_len=256, granule=granule, **alone)
        with logits.of(driver) as theirs:
            driver.add(name, **fields)
            driver.run()
        assert comparable(company.heard[name]) == comparable(driver.heard[name]), (name, fields)
        mine = {place: values for place, values in ours.items() if place[0] == name}
        assert mine.keys() == theirs.keys()
        for place, values in theirs.items():
            assert torch.equal(mine[place], values), place
        cached += company.heard[name].finished.usage.cached_tokens
    assert cached > 0
    assert company.engine.room().running == 0
    return company, requests


BUSY = {"max_batch_size": 5, "prefill_chunk": 32}
ALONE = {"max_batch_size": 2, "prefill_chunk": 512, "prefix_cache_bytes": 0}


@pytest.mark.parametrize(
    ("kind", "precision", "pack"),
    [("llama", "float32", False), ("llama", "bfloat16", True), ("gpt2", "float32", True)],
)
def test_random_requests(  # noqa: PLR0917  (fixtures)
    kind: Kind, precision: str, pack: bool, load: Load, drive: Make, logits: Logits
) -> None:
    loaded = load(kind, precision, pack=pack)
    check(loaded, drive, logits, count=18, seed=11, busy=BUSY, alone=ALONE)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("kind", "precision", "chunk"),
    [
        ("llama", "float32", 32),
        ("llama", "bfloat16", 64),
        ("gpt2", "float32", 64),
        ("mistral", "bfloat16", 32),
        ("gemma2", "float32", 64),
    ],
)
def test_200_random_requests(  # noqa: PLR0917  (fixtures)
    kind: Kind, precision: str, chunk: int, load: Load, drive: Make, logits: Logits
) -> None:
    """And greedy ones are those of `generate`; in bfloat16, up to where rounding decides."""
    loaded = load(kind, precision, pack=True)
    busy = {"max_batch_size": 9, "prefill_chunk": chunk}
    company, requests = check(loaded, drive, logits, count=200, seed=chunk, busy=busy, alone=ALONE)
    greedy = {name: fields for name, fields in requests.items() if is_plainly_greedy(fields)}
    assert len(greedy) > 30
    parted = 0
    for name, fields in greedy.items():
        gap = gap_to_generate(kind, loaded.dtype, company.heard[name], fields)
        assert gap < (BFLOAT16_GAP if precision == "bfloat16" else 1e-6), name
        parted += gap > 0
    assert parted < len(greedy) / 2


def gap_to_generate(kind: Kind, dtype: torch.dtype, heard: Heard, fields: Fields) -> float:
    model, prompt = reference(kind, dtype), fields["prompt_token_ids"]
    ends = [2, *fields.get("stop_token_ids", ())]
    count = 256 - len(prompt) if fields["max_tokens"] == "fit" else fields["max_tokens"]
    expected = model.generate(prompt, count, eos_token_id=ends)
    if "stop" in fields:
        expected = expected[: len(heard.token_ids)]
    return model.gap(prompt, expected, heard.token_ids)
