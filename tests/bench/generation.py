"""Tokens per second of one model: one by one, in static batches, and in our engine.

    python tests/bench/generation.py --check
    python tests/bench/generation.py --precision bfloat16 --requests 64 --json result.json

All contenders get the same requests in the same process on the same threads, so the ratios are what to
read; the absolute figures are those of a machine that may be busy with other things.

`--check` compares instead of measuring: each request's token ids, greedy and in float32, with those that
`model.generate` gives it alone, half of the requests with a stop string.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from streamfleet_common.schemas import ChatMessage, GenerateRequest
from streamfleet_worker.engine import devices, models
from streamfleet_worker.engine.base import Arrival, Finished
from streamfleet_worker.engine.generation import GenerationEngine

TOPICS = (
    "the capital of France", "how bread is baked", "why the sky is blue", "a short story about a fox",
    "the rules of chess", "what a hash table is", "how to plant a tree", "the history of the bicycle",
    "three facts about whales", "a poem about rain", "how vaccines work", "the seasons of the year",
    "how to boil an egg", "what gravity is", "the planets of the solar system", "how rivers form",
)  # fmt: skip
STYLES = ("Tell me about", "Explain in detail", "Write one sentence on", "What should I know of")
LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128)
FOREVER_S = 1e9


@dataclass(frozen=True)
class Job:
    request: GenerateRequest
    prompt_token_ids: list[int]

    @property
    def max_tokens(self) -> int:
        return self.request.max_tokens


@dataclass(frozen=True)
class Result:
    name: str
    seconds: float
    cpu_seconds: float
    tokens: int

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds

    @property
    def cpu_rate(self) -> float:
        """Tokens a CPU-second: what is left of the rate when other programs take their share."""
        return self.tokens / self.cpu_seconds


def make_jobs(loaded: models.LoadedModel, count: int, scale: float, stops: bool) -> list[Job]:
    source = random.Random(7)
    engine = GenerationEngine(loaded, max_seq_len=1024, max_batch_size=1)
    jobs = []
    for number in range(count):
        about = f"{source.choice(STYLES)} {source.choice(TOPICS)}."
        filler = " Be kind, be clear, and use plain words." * source.choice((0, 0, 0, 1, 2, 5))
        request = GenerateRequest(
            messages=(ChatMessage(role="user", content=about + filler),),
            max_tokens=max(1, int(source.choice(LENGTHS) * scale)),
            stop=(". ", "\n\n") if stops and number % 2 else (),
        )
        jobs.append(Job(request, list(engine.prepare(request).prompt_token_ids)))
    return jobs


def timed(name: str, run: Callable[[], list[list[int]]]) -> Result:
    began, cpu = time.perf_counter(), time.process_time()
    answers = run()
    return Result(
        name,
        time.perf_counter() - began,
        time.process_time() - cpu,
        sum(map(len, answers)),
    )


@torch.inference_mode()
def one_by_one(loaded: models.LoadedModel, jobs: list[Job]) -> list[list[int]]:
    return [answer for job in jobs for answer in generate(loaded, [job])]


@torch.inference_mode()
def static_batches(loaded: models.LoadedModel, jobs: list[Job], batch: int) -> list[list[int]]:
    parts = [jobs[i : i + batch] for i in range(0, len(jobs), batch)]
    return [answer for part in parts for answer in generate(loaded, part)]


def generate(loaded: models.LoadedModel, jobs: list[Job]) -> list[list[int]]:
    """The transformers way: left-padded, and all rows run until the last one ends."""
    width = max(len(job.prompt_token_ids) for job in jobs)
    pads = [width - len(job.prompt_token_ids) for job in jobs]
    ids = [[0] * pad + job.prompt_token_ids for pad, job in zip(pads, jobs, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in pads]
    output = loaded.model.generate(
        torch.tensor(ids),
        attention_mask=torch.tensor(mask),
        max_new_tokens=max(job.max_tokens for job in jobs),
        do_sample=False,
        pad_token_id=0,
        eos_token_id=sorted(loaded.eos_token_ids),
    )
    return [
        useful(row[width:].tolist(), job.max_tokens, loaded.eos_token_ids)
        for row, job in zip(output, jobs, strict=True)
    ]


def useful(ids: list[int], max_tokens: int, eos: frozenset[int]) -> list[int]:
    """The tokens that were asked for, without what a row went on for its batch's sake."""
    ids = ids[:max_tokens]
    ends = [place for place, token_id in enumerate(ids) if token_id in eos]
    return ids[: ends[0] + 1] if ends else ids


def ours(
    loaded: models.LoadedModel, jobs: list[Job], batch: int, arrivals: random.Random | None = None
) -> list[Finished]:
    """All jobs through our engine; at once, or a few at each step."""
    engine = GenerationEngine(loaded, max_batch_size=batch, max_seq_len=1024)
    todo = [(number, engine.prepare(job.request)) for number, job in enumerate(jobs)]
    ends: dict[int, Finished] = {}
    while todo or engine.due_in() is not None:
        count = len(todo) if arrivals is None else arrivals.choice((0, 0, 1, 3))
        newcomers, todo = todo[:count], todo[count:]
        now = time.monotonic()
        engine.add({(str(n), 1): Arrival(p, now - 1, now + FOREVER_S) for n, p in newcomers})
        for output in engine.step().outputs:
            if isinstance(output.event, Finished):
                ends[int(output.key[0])] = output.event
    return [ends[number] for number in range(len(jobs))]


def check(loaded: models.LoadedModel, plain: models.LoadedModel, jobs: list[Job], batch: int) -> int:
    """How many of our answers differ from those of `generate`; each is shown."""
    ends = ours(loaded, jobs, batch, random.Random(11))
    faults, stopped = 0, 0
    for number, (job, end) in enumerate(zip(jobs, ends, strict=True)):
        choice = end.choices[0]
        alone = one_by_one(plain, [job])[0]
        if choice.finish_reason == "stop":
            stopped += 1
            alone = alone[: len(choice.token_ids)]
        text = loaded.tokenizer.decode(alone)
        cuts = [text.index(stop) for stop in job.request.stop if stop in text]
        good = list(choice.token_ids) == alone and choice.text == text[: min(cuts, default=None)]
        good = good and (choice.finish_reason == "stop") == bool(cuts)
        if not good:
            faults += 1
            show(f"request {number} differs:\n  alone {alone}\n  ours  {list(choice.token_ids)}")
    show(f"{len(jobs) - faults} of {len(jobs)} equal to generate alone, {stopped} ended by a stop string")
    return faults


def show(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--precision", default="float32", choices=[*devices.PRECISIONS])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the answers' lengths")
    parser.add_argument("--skip", nargs="*", default=(), choices=("one-by-one", "static"))
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    devices.set_threads(args.threads)
    plain = models.load(args.model, "cpu", args.precision, pack=False)
    loaded = models.load(args.model, "cpu", args.precision)
    jobs = make_jobs(loaded, args.requests, args.scale, stops=args.check)
    if args.check:
        return 1 if check(loaded, plain, jobs, args.batch) else 0

    ours(loaded, jobs[:2], args.batch)
    results = [
        timed(
            "ours",
            lambda: [list(end.choices[0].token_ids) for end in ours(loaded, jobs, args.batch)],
        )
    ]
    if "static" not in args.skip:
        results.append(timed("static batches", lambda: static_batches(plain, jobs, args.batch)))
    if "one-by-one" not in args.skip:
        results.append(timed("one by one", lambda: one_by_one(plain, jobs)))
    report(args, results)
    return 0


def report(args: Any, results: list[Result]) -> None:
    base, cpu_base = results[-1].rate, results[-1].cpu_rate
    show(
        f"{args.model} {args.precision}, {args.requests} requests, "
        f"batch {args.batch}, {args.threads} thread(s)"
    )
    show(f"{'':16}{'tokens/s':>10}{'ratio':>8}{'per CPU-s':>11}{'ratio':>8}{'seconds':>9}{'tokens':>8}")
    for r in reversed(results):
        show(
            f"{r.name:16}{r.rate:10.1f}{r.rate / base:8.2f}{r.cpu_rate:11.1f}{r.cpu_rate / cpu_base:8.2f}"
            f"{r.seconds:9.1f}{r.tokens:8}"
        )
    if args.json:
        rows = [
            {
                "name": r.name,
                "tokens_per_s": r.rate,
                "ratio": r.rate / base,
                "tokens_per_cpu_s": r.cpu_rate,
                "cpu_ratio": r.cpu_rate / cpu_base,
                "seconds": r.seconds,
                "cpu_seconds": r.cpu_seconds,
                "tokens": r.tokens,
            }
            for r in results
        ]
        settings = {k: str(v) for k, v in vars(args).items()}
        args.json.write_text(json.dumps({"settings": settings, "results": rows}, indent=2))


if __name__ == "__main__":
    sys.exit(main())
