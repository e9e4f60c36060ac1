"""Milliseconds a step of the sampler takes, beside transformers' logits processors.

    python tests/bench/sampling.py
    python tests/bench/sampling.py --batch 32 --vocab 49152 --rounds 30 --json result.json

Both get the same logits and parameters in turn, on one thread; ours makes its result objects, theirs a tensor
of ids. Logits are either peaked, falling with the logarithm of the rank as a language model's do, or flat.
Times are the thread's own CPU time: the least of all rounds, which a busy machine disturbs the least, and the
median.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from streamfleet_common.schemas import Sampling
from streamfleet_worker.engine.prepared import Prepared
from streamfleet_worker.engine.sampler import Row, sample

PROMPT_TOKENS = 300
ANSWER_TOKENS = 50


@dataclass(frozen=True)
class Case:
    name: str
    sampling: Sampling = field(default_factory=Sampling)
    theirs: tuple[Any, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)


def cases() -> list[Case]:
    temperature = TemperatureLogitsWarper(0.8)
    bias = {7: 1.0, 8: -1.0}
    return [
        Case("greedy"),
        Case("temperature", Sampling(temperature=0.8), (temperature,)),
        Case("top_p 0.9", Sampling(temperature=0.8, top_p=0.9), (temperature, TopPLogitsWarper(0.9))),
        Case("top_k 50", Sampling(temperature=0.8, top_k=50), (temperature, TopKLogitsWarper(50))),
        Case("top_k 100", Sampling(temperature=0.8, top_k=100), (temperature, TopKLogitsWarper(100))),
        Case(
            "top_k 50, top_p 0.9",
            Sampling(temperature=0.8, top_k=50, top_p=0.9),
            (temperature, TopKLogitsWarper(50), TopPLogitsWarper(0.9)),
        ),
        Case("min_p 0.05", Sampling(temperature=0.8, min_p=0.05), (temperature, MinPLogitsWarper(0.05))),
        Case(
            "greedy, repetition 1.1",
            Sampling(repetition_penalty=1.1),
            (RepetitionPenaltyLogitsProcessor(1.1),),
        ),
        Case(
            "greedy, bias",
            Sampling(logit_bias=bias),
            (SequenceBiasLogitsProcessor([[[token_id], value] for token_id, value in bias.items()]),),
        ),
        Case("greedy, logprobs", fields={"logprobs": True}),
        Case("greedy, top 5 logprobs", fields={"logprobs": True, "top_logprobs": 5}),
    ]


def make_logits(kind: str, batch: int, vocab: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(5)
    noise = torch.randn(batch, vocab, generator=source)
    if kind == "flat":
        return noise * 2
    falling = torch.arange(1, vocab + 1).log() * -1.6
    ranks = torch.stack([torch.randperm(vocab, generator=source) for _ in range(batch)])
    return falling[ranks] + noise * 0.5


def make_rows(case: Case, prompts: torch.Tensor, vocab: int) -> list[Row]:
    rows = []
    for seed, ids in enumerate(prompts.tolist()):
        prepared = Prepared(
            prompt_token_ids=tuple(ids[:PROMPT_TOKENS]),
            max_tokens=1000,
            sampling=case.sampling,
            **case.fields,
        )
        rows.append(Row(prepared, seed, frozenset({0}), vocab))
        for token_id in ids[PROMPT_TOKENS:]:
            rows[-1].append(token_id)
    return rows


def peer(case: Case, logits: torch.Tensor, ids: Any) -> torch.Tensor:
    """A step as `model.generate` makes it."""
    scores = LogitsProcessorList(case.theirs)(ids, logits)
    if case.sampling.temperature == 0:
        if case.fields:
            scores = torch.log_softmax(scores, dim=-1)
            scores.topk(case.fields.get("top_logprobs", 1))
        return scores.argmax(dim=-1)
    return torch.multinomial(torch.softmax(scores, dim=-1), 1)


def timed(step: Callable[[], Any]) -> float:
    began = time.thread_time()
    step()
    return (time.thread_time() - began) * 1000


def measure(case: Case, logits: torch.Tensor, rounds: int) -> dict[str, float]:
    batch, vocab = logits.shape
    source = torch.Generator().manual_seed(6)
    ids = torch.randint(vocab, (batch, PROMPT_TOKENS + ANSWER_TOKENS), generator=source)
    rows = make_rows(case, ids, vocab)
    ours, theirs = [], []
    for _ in range(rounds + 2):
        fresh = logits.clone()
        ours.append(timed(lambda fresh=fresh: sample(fresh, rows)))  # type: ignore[misc]
        fresh = logits.clone()
        theirs.append(timed(lambda fresh=fresh: peer(case, fresh, ids)))  # type: ignore[misc]
    # The first two have the pages of memory to fetch.
    ours, theirs = ours[2:], theirs[2:]
    return {
        "ours_ms": min(ours),
        "ours_median_ms": statistics.median(ours),
        "transformers_ms": min(theirs),
        "transformers_median_ms": statistics.median(theirs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=49_152)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, dict[str, float]]] = {}
    print(f"batch {options.batch}, vocabulary {options.vocab}, ms of CPU time a step: least (median)")
    for kind in ("peaked", "flat"):
        logits = make_logits(kind, options.batch, options.vocab)
        found[kind] = {}
        for case in cases():
            times = found[kind][case.name] = measure(case, logits, options.rounds)
            ratio = times["transformers_ms"] / times["ours_ms"]
            print(
                f"{kind:7} {case.name:24} {times['ours_ms']:8.2f} ({times['ours_median_ms']:.2f})   "
                f"transformers {times['transformers_ms']:8.2f} ({times['transformers_median_ms']:.2f})   "
                f"{ratio:5.1f}x",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
