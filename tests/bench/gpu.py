"""That the generation engine is right and fast on a GPU, on a machine that has one.

    python tests/bench/gpu.py
    python tests/bench/gpu.py --device cpu --requests 8 --scale 0.25

Right, in float32: greedy answers are those of `model.generate` for each request by itself, whatever company
they had; sampled ones come again with their seeds; with CUDA graphs it is all the same. If the engine says
that it is exact, log-probabilities and sampled answers have the same bits in any company. Fast, in the
precision of the device: one by one, in static batches, ours, and ours with CUDA graphs, in rounds that take
turns.

The exit status is 1 if anything is wrong, and 0 if there is no GPU, which it says.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

import engines
from generation_jobs import make_jobs, request_of
from generation_side import Job, Setup
from generation_sides import generate
from streamfleet_common.schemas import GenerateRequest, Sampling
from streamfleet_worker.engine import devices, models
from streamfleet_worker.engine.base import Finished
from streamfleet_worker.engine.generation import GenerationEngine

MAX_SEQ_LEN = 1024


class Bench:
    """One model in one precision: by itself, and in our engines."""

    def __init__(self, options: argparse.Namespace, precision: str) -> None:
        self._batch = options.batch
        self.plain = models.load(options.model, options.device, precision, pack=False)
        self.loaded = models.load(options.model, options.device, precision)
        self.jobs = make_jobs(self.loaded.tokenizer, options.requests, options.scale)
        self.setup = Setup(
            model=options.model,
            folder="",
            precision=precision,
            threads=options.threads,
            batch=options.batch,
            max_seq_len=min(MAX_SEQ_LEN, self.loaded.max_positions),
            eos_token_ids=sorted(self.loaded.eos_token_ids),
            jobs=self.jobs,
        )

    @property
    def graphs(self) -> bool:
        """Whether there can be CUDA graphs."""
        return self.loaded.device.type == "cuda"

    def engine(self, **options: Any) -> GenerationEngine:
        # Without a prefix cache: what comes again is computed again.
        return engines.make_engine(
            self.loaded, self._batch, self.setup.max_seq_len, prefix_cache_bytes=0, **options
        )

    def generate(self, batch: int, jobs: Sequence[Job] | None = None) -> list[list[int]]:
        """What `model.generate` gives, for so many requests at a time."""
        jobs = self.jobs if jobs is None else jobs
        parts = [jobs[i : i + batch] for i in range(0, len(jobs), batch)]
        return [answer for part in parts for answer in generate(self.plain.model, self.setup, part)]


def prove(bench: Bench) -> dict[str, Any]:
    """What is right: each finding as how many answers of how many; `exact` is what the engine says."""
    greedy = [request_of(job, logprobs=True) for job in bench.jobs]
    sampled = [
        request_of(job, logprobs=True, sampling=Sampling(temperature=0.8, top_p=0.95, seed=number))
        for number, job in enumerate(bench.jobs)
    ]
    engine = bench.engine(exact=True)
    together = engines.run(engine, greedy, random.Random(11))
    alone = [engines.run(engine, [request])[0] for request in greedy]
    drawn = engines.run(engine, sampled, random.Random(12))
    drawn_alone = [engines.run(engine, [request])[0] for request in sampled]
    found: dict[str, Any] = {
        "exact": engine.info.exact,
        "greedy, as generate gives it": agreement(engines.answers(together), bench.generate(1)),
        "greedy, alone as in company": agreement(engines.answers(alone), engines.answers(together)),
        "sampled, twice": agreement(drawn, engines.run(engine, sampled, random.Random(12)), bits),
    }
    if engine.info.exact:
        found["log-probabilities, alone as in company"] = agreement(alone, together, bits)
        found["sampled, alone as in company"] = agreement(drawn_alone, drawn, bits)
    if bench.graphs:
        recorded = engines.run(bench.engine(exact=False, cuda_graphs=True), greedy, random.Random(11))
        found["greedy, with CUDA graphs"] = agreement(engines.answers(recorded), engines.answers(together))
    return found


def bits(end: Finished) -> tuple[object, ...]:
    """All numbers of an answer."""
    return end.choices[0].token_ids, end.choices[0].logprobs


def agreement(
    some: Sequence[Any], others: Sequence[Any], of: Callable[[Any], Any] = lambda it: it
) -> list[int]:
    """How many agree, and of how many."""
    return [sum(of(one) == of(other) for one, other in zip(some, others, strict=True)), len(some)]


def race(bench: Bench, rounds: int) -> dict[str, Any]:
    """Tokens per second of each side, and how many times that is what static batches give."""
    requests = [request_of(job) for job in bench.jobs]
    sides: dict[str, Callable[[], list[list[int]]]] = {
        # One in four: it takes its time.
        "one by one": lambda: bench.generate(1, bench.jobs[::4]),
        "static batches": lambda: bench.generate(bench.setup.batch),
        "ours": _ours(bench.engine(exact=False), requests),
    }
    if bench.graphs:
        sides["ours, CUDA graphs"] = _ours(bench.engine(exact=False, cuda_graphs=True), requests)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for round_ in range(rounds + 1):
        for name, side in sides.items():
            began = time.perf_counter()
            tokens = sum(map(len, side()))
            rate = tokens / (time.perf_counter() - began)
            if round_:  # the first one warms up
                rates[name].append(rate)
    static = rates["static batches"]
    return {
        name: {
            "tokens_per_s": statistics.median(values),
            "by_static": statistics.median(v / s for v, s in zip(values, static, strict=True)),
        }
        for name, values in rates.items()
    }


def _ours(engine: GenerationEngine, requests: list[GenerateRequest]) -> Callable[[], list[list[int]]]:
    return lambda: engines.answers(engines.run(engine, requests))


def report(bench: Bench, found: dict[str, Any]) -> None:
    """In words."""
    print(f"on {bench.loaded.device_name}, {len(bench.jobs)} requests, batch {bench.setup.batch}")
    for name, finding in found["right"].items():
        text = (finding or "no") if name == "exact" else f"{finding[0]} of {finding[1]}"
        print(f"  {name:42} {text}")
    print(f"  {bench.loaded.precision:24} {'tokens/s':>9} {'by static':>10}")
    for name, row in found["fast"].items():
        print(f"  {name:24} {row['tokens_per_s']:>9.1f} {row['by_static']:>10.2f}")


def main() -> int:
    """Prove and race."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--precision", default="auto", help="of the race")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the answers' lengths")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("there is no GPU here, so nothing is proved (--device cpu runs the same on a CPU)")
        return 0
    devices.set_threads(options.threads)
    found: dict[str, Any] = {"right": prove(Bench(options, "float32"))}
    bench = Bench(options, options.precision)
    found["fast"] = race(bench, options.rounds)
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        report(bench, found)
    wrong = [name for name, finding in found["right"].items() if name != "exact" and finding[0] < finding[1]]
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
