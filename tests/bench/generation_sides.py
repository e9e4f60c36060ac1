"""The sides of `generation.py` that run in our environment, each in a process of its own.

    python generation_sides.py {alone,static,transformers,ours,exact,forward} SETUP

`alone` and `static` are `model.generate`, for each request by itself and for batches that run until their
last row ends. `transformers` is that library's continuous batching. `ours` is the engine in process with
`exact` off, `exact` the same with it on. `forward` is the ceiling: the time that our model alone takes for
decode steps of a full batch, whose rows have contexts as long as those of the jobs, with nothing around it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import engines
from generation_jobs import request_of
from generation_side import Job, Pieces, Result, Setup, Side, serve, timed
from streamfleet_worker.engine import devices, models
from streamfleet_worker.engine.base import Finished, Tokens

CEILING_STEPS = 64
PAGE = 256
"""Tokens of a page of transformers' cache, its default; no prompt here is so long that two share one."""
RESULT_LIMIT_S = 600.0


class Generate:
    """`model.generate` for so many requests at a time."""

    def __init__(self, setup: Setup, batch: int) -> None:
        self._setup = setup
        self._batch = batch
        self._model: Any = models.load(setup.model, "cpu", setup.precision, pack=False).model

    def reset(self) -> None:
        pass

    def run(self, jobs: Sequence[Job]) -> Result:
        parts = [jobs[i : i + self._batch] for i in range(0, len(jobs), self._batch)]
        return timed(
            lambda: [answer for part in parts for answer in generate(self._model, self._setup, part)]
        )


@torch.inference_mode()
def generate(model: Any, setup: Setup, jobs: Sequence[Job]) -> list[list[int]]:
    """One batch the transformers way: left-padded, and all rows run until the last one ends."""
    width = max(len(job.prompt_token_ids) for job in jobs)
    pads = [width - len(job.prompt_token_ids) for job in jobs]
    ids = [[0] * pad + job.prompt_token_ids for pad, job in zip(pads, jobs, strict=True)]
    mask = [[0] * pad + [1] * (width - pad) for pad in pads]
    output = model.generate(
        torch.tensor(ids, device=model.device),
        attention_mask=torch.tensor(mask, device=model.device),
        max_new_tokens=max(job.max_tokens for job in jobs),
        do_sample=False,
        pad_token_id=0,
        eos_token_id=setup.eos_token_ids,
    )
    return [
        setup.useful(row, job.max_tokens) for row, job in zip(output[:, width:].tolist(), jobs, strict=True)
    ]


class TransformersBatching:
    """transformers' own continuous batching, with as many rows as ours and room for all of them."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        model: Any = models.load(setup.model, "cpu", setup.precision, pack=False).model
        config: Any = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False, eos_token_id=setup.eos_token_ids
        )
        longest = max(len(job.prompt_token_ids) + job.max_tokens for job in setup.jobs)
        self._manager = model.init_continuous_batching(
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(
                max_requests_per_batch=setup.batch,
                max_batch_tokens=512,
                page_size=PAGE,
                # By itself it would take most of the machine's memory.
                num_blocks=setup.batch * (-(-longest // PAGE) + 1),
            ),
        )
        self._manager.start()

    def reset(self) -> None:
        pass

    def run(self, jobs: Sequence[Job]) -> Result:
        return timed(lambda: self._answers(jobs))

    def _answers(self, jobs: Sequence[Job]) -> list[list[int]]:
        for number, job in enumerate(jobs):
            self._manager.add_request(
                job.prompt_token_ids,
                request_id=str(number),
                max_new_tokens=job.max_tokens,
                eos_token_id=self._setup.eos_token_ids,
            )
        found: dict[int, list[int]] = {}
        while len(found) < len(jobs):
            output = self._manager.get_result(timeout=RESULT_LIMIT_S)
            if output is None or output.error is not None:
                raise RuntimeError(f"transformers gave no answer: {output and output.error}")
            if output.is_finished():
                found[int(output.request_id)] = list(output.generated_tokens)
        return [found[number] for number in range(len(jobs))]


class Ours:
    """The engine in process; a new one for each round, since the prefix cache would remember the last."""

    def __init__(self, setup: Setup, *, exact: bool) -> None:
        self._setup = setup
        self._exact = exact
        self._loaded = models.load(setup.model, "cpu", setup.precision)

    def reset(self) -> None:
        self._engine = engines.make_engine(
            self._loaded, self._setup.batch, self._setup.max_seq_len, exact=self._exact
        )

    def run(self, jobs: Sequence[Job]) -> Result:
        requests = [request_of(job) for job in jobs]
        if not self._setup.records:
            return timed(lambda: engines.answers(engines.run(self._engine, requests)))
        pieces = [Pieces(job, time.perf_counter()) for job in jobs]
        records: list[dict[str, Any]] = []

        def seen(number: int, event: object) -> None:
            if isinstance(event, Tokens):
                pieces[number]()
            elif isinstance(event, Finished):
                size = None if event.launch is None else event.launch.size
                tokens = len(event.choices[0].token_ids)
                # Here they are in the engine at once; what they wait for is a row.
                records.append(pieces[number].record(tokens, event.timing.wait_ms, size or None))

        result = timed(lambda: engines.answers(engines.run(self._engine, requests, seen=seen)))
        return replace(result, records=records)


class Forward:
    """Only what the model's own passes take, seen from inside an engine whose batch stays full."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._loaded = models.load(setup.model, "cpu", setup.precision)

    def reset(self) -> None:
        self._engine = engines.make_engine(
            self._loaded, self._setup.batch, self._setup.max_seq_len, exact=False, prefix_cache_bytes=0
        )
        runner: Any = self._engine._runner
        self._clock = _Clock()
        runner.run, runner.logits = self._clock.around(runner.run), self._clock.around(runner.logits)

    def run(self, jobs: Sequence[Job]) -> Result:
        rows = [Job(prompt, CEILING_STEPS + 1) for prompt in self._prompts()]
        engines.add(self._engine, [request_of(row, ignore_eos=True) for row in rows])
        seconds, cpu, steps = 0.0, 0.0, 0
        while self._engine.due_in() is not None:
            before = self._clock.seconds, self._clock.cpu_seconds
            step = self._engine.step()
            if step.rows == self._setup.batch and not step.prompt_tokens:
                seconds += self._clock.seconds - before[0]
                cpu += self._clock.cpu_seconds - before[1]
                steps += 1
        return Result(seconds, steps * self._setup.batch, {"process": cpu})

    def _prompts(self) -> list[list[int]]:
        """One for each row, so long that the steps pass through the contexts that the jobs' steps have."""
        jobs = self._setup.jobs
        contexts = sorted(len(job.prompt_token_ids) + at for job in jobs for at in range(job.max_tokens))
        batch = self._setup.batch
        middles = [contexts[(2 * row + 1) * len(contexts) // (2 * batch)] for row in range(batch)]
        words = [token_id for job in jobs for token_id in job.prompt_token_ids]
        # Each begins elsewhere: rows do not share what they read.
        lengths = [max(1, middle - CEILING_STEPS // 2) for middle in middles]
        return [[words[(37 * row + at) % len(words)] for at in range(n)] for row, n in enumerate(lengths)]


class _Clock:
    """The time spent in some functions."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.cpu_seconds = 0.0

    def around(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def clocked(*arguments: Any) -> Any:
            began, cpu = time.perf_counter(), time.process_time()
            try:
                return function(*arguments)
            finally:
                self.seconds += time.perf_counter() - began
                self.cpu_seconds += time.process_time() - cpu

        return clocked


SIDES: dict[str, Callable[[Setup], Side]] = {
    "alone": lambda setup: Generate(setup, 1),
    "static": lambda setup: Generate(setup, setup.batch),
    "transformers": TransformersBatching,
    "ours": lambda setup: Ours(setup, exact=False),
    "exact": lambda setup: Ours(setup, exact=True),
    "forward": Forward,
}

if __name__ == "__main__":
    name, where = sys.argv[1:]
    given = Setup.read(Path(where))
    devices.set_threads(given.threads)
    serve(SIDES[name], given)
