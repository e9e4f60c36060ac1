"""What a step of the generation engine costs outside of the model's forward pass.

    python tests/bench/overhead.py [--rows 32] [--batches 8] [--top 16] [--json]

The real engine with a model that takes no time: in place of its layers and its output head stand prepared
logits, whose likeliest tokens are those of plain text. All rows decode greedily and stream every token; each
batch of them starts anew with short prompts. What is counted is all the rest: to plan the step, to build its
input, to keep the cache, to choose the tokens, to make them text and outputs. Only steps of full batches
count.

`engine` is the engine alone. `worker` has a worker around it, a server, and a client in another process that
reads all the streams: the CPU time of the engine's thread and of the event loop, on which the publisher runs.
The profile is of the engine alone: samples by the innermost function of ours, see `sampler.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import engines
from generation_jobs import FILLER, TOPICS, request_of
from generation_side import Job
from sampler import Sampler
from server import add_options, serving
from streamfleet_common import logs
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_producer import Client
from streamfleet_worker.engine import devices, models
from streamfleet_worker.engine.base import Step
from streamfleet_worker.engine.generation import GenerationEngine
from streamfleet_worker.worker import Worker

HERE = Path(__file__).parent
QUEUE = "bench"
PROMPT_TOKENS = 24
MAX_SEQ_LEN = 1024
VARIANTS = 8
"""Prepared logits: no batch of them may stay in the processor's caches from one step to the next."""
CLIENT_LIMIT_S = 300.0
GOAL_MS = 1.5


class NoModel:
    """Stands for the layers and the output head of a model."""

    def __init__(self, loaded: models.LoadedModel, rows: int) -> None:
        words = loaded.tokenizer.encode(FILLER + " ".join(TOPICS))
        shape = (1, rows, loaded.vocab_size)
        self._logits = [torch.randn(shape, dtype=torch.float32).to(loaded.dtype) for _ in range(VARIANTS)]
        for number, logits in enumerate(self._logits):
            for row in range(rows):
                logits[0, row, words[(number + row) % len(words)]] = 40.0
        width = loaded.model.get_input_embeddings().embedding_dim
        self._hidden = torch.zeros(1, 1, width, dtype=loaded.dtype)
        self._calls = 0

    def install(self, engine: GenerationEngine) -> None:
        runner: Any = engine._runner
        runner._body, runner._head = self._body, self._head

    def _body(self, *, input_ids: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(last_hidden_state=self._hidden.expand(-1, input_ids.shape[1], -1))

    def _head(self, *, input_ids: torch.Tensor, **_: Any) -> Any:
        self._calls += 1
        return SimpleNamespace(logits=self._logits[self._calls % VARIANTS][:, : input_ids.shape[1]])


@dataclass
class Meter:
    """Times of an engine's full steps, taken on the thread that runs them."""

    rows: int
    cpu_ms: list[float] = field(default_factory=list)
    wall_ms: list[float] = field(default_factory=list)
    steps: int = 0
    """Not only the full ones."""

    def install(self, engine: Any) -> None:
        step = engine.step

        def metered() -> Step:
            cpu, began = time.thread_time(), time.perf_counter()
            done: Step = step()
            cpu, wall = time.thread_time() - cpu, time.perf_counter() - began
            self.steps += 1
            if done.rows == self.rows and not done.prompt_tokens:
                self.cpu_ms.append(cpu * 1000)
                self.wall_ms.append(wall * 1000)
            return done

        engine.step = metered

    def figures(self) -> dict[str, float]:
        return {
            "full_steps": len(self.cpu_ms),
            "cpu_ms": statistics.mean(self.cpu_ms),
            "cpu_p50_ms": statistics.median(self.cpu_ms),
            "wall_p50_ms": statistics.median(self.wall_ms),
        }


def make_engine(loaded: models.LoadedModel, options: argparse.Namespace) -> tuple[GenerationEngine, Meter]:
    """An engine without a model, and what it is measured with."""
    engine = engines.make_engine(loaded, options.rows, MAX_SEQ_LEN, max_delay_s=0.0, exact=False)
    NoModel(loaded, options.rows).install(engine)
    meter = Meter(options.rows)
    meter.install(engine)
    return engine, meter


def jobs(options: argparse.Namespace) -> list[Job]:
    """One batch."""
    return [Job([1 + row, *range(3, PROMPT_TOKENS + 2)], options.tokens) for row in range(options.rows)]


def run_engine(engine: GenerationEngine, options: argparse.Namespace) -> None:
    """All batches, one after the other."""
    requests = [request_of(job, ignore_eos=True) for job in jobs(options)]
    for _ in range(options.batches):
        engines.run(engine, requests)


def measure_engine(loaded: models.LoadedModel, options: argparse.Namespace) -> dict[str, Any]:
    """The engine alone: its figures, then its profile."""
    engine, meter = make_engine(loaded, options)
    run_engine(engine, options)
    figures: dict[str, Any] = meter.figures()
    sampler = Sampler()
    sampler.start()
    run_engine(engine, options)
    sampler.stop()
    total = sum(sampler.functions.values())
    each = {name: count / total for name, count in sampler.functions.most_common(options.top)}
    return {**figures, "profile": {name: share * figures["cpu_ms"] for name, share in each.items()}}


async def measure_worker(url: str, loaded: models.LoadedModel, options: argparse.Namespace) -> dict[str, Any]:
    """A worker with that engine, while a client in another process reads its streams."""
    meters: list[Meter] = []

    def build() -> GenerationEngine:
        engine, meter = make_engine(loaded, options)
        meters.append(meter)
        return engine

    connections = Connections.open(url)
    worker = Worker(Broker(connections, QUEUE), build, name="bench", max_queue_depth=100_000, version="0")
    assert await worker.start()
    running = asyncio.create_task(worker.run())
    began = time.thread_time()
    client = await asyncio.create_subprocess_exec(
        *(sys.executable, __file__, "--client", url),
        *("--rows", str(options.rows), "--tokens", str(options.tokens), "--batches", str(options.batches)),
    )
    async with asyncio.timeout(CLIENT_LIMIT_S):
        if await client.wait() != 0:
            raise SystemExit("the client failed")
    loop_ms = (time.thread_time() - began) * 1000
    worker.stop()
    await running
    await connections.close()
    figures = meters[0].figures()
    return {**figures, "event_loop_cpu_ms": loop_ms / meters[0].steps}


async def be_client(options: argparse.Namespace) -> None:
    """Stream all batches, and check that nothing is missing."""

    async def stream(fleet: Client, job: Job) -> int:
        async with fleet.stream(request_of(job, ignore_eos=True)) as tokens:
            return sum([len(delta.token_ids) async for delta in tokens])

    async with Client(options.client, queue=QUEUE) as fleet:
        for _ in range(options.batches):
            counts = await asyncio.gather(*(stream(fleet, job) for job in jobs(options)))
            assert counts == [options.tokens] * options.rows, counts


def report(loaded: models.LoadedModel, found: dict[str, Any], options: argparse.Namespace) -> None:
    """The table and the profile."""
    engine, worker = found["engine"], found["worker"]
    print(
        f"{loaded.precision}, {options.rows} rows, vocabulary {loaded.vocab_size}, all greedy and streamed;"
        f"\n{engine['full_steps']} full steps; milliseconds a step outside the forward pass:"
        f"\n{'':28} {'CPU':>7} {'CPU p50':>9} {'wall p50':>9} {'goal':>7}"
    )
    for name, row, goal in (("engine", engine, f"≤ {GOAL_MS:g}"), ("its thread in a worker", worker, "")):
        medians = f"{row['cpu_p50_ms']:>9.2f} {row['wall_p50_ms']:>9.2f}"
        print(f"{name:28} {row['cpu_ms']:>7.2f} {medians} {goal:>7}")
    print(f"{'event loop with publisher':28} {worker['event_loop_cpu_ms']:>7.2f}")
    print(f"{'worker, on one core':28} {worker['cpu_ms'] + worker['event_loop_cpu_ms']:>7.2f}")
    print("the engine's, by function:")
    for name, ms in engine["profile"].items():
        print(f"{ms:7.3f}  {ms / engine['cpu_ms']:4.0%}  {name}")


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2", help="its tokenizer and sizes are used")
    parser.add_argument("--precision", default="bfloat16", choices=[*devices.PRECISIONS])
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256, help="of each answer")
    parser.add_argument("--batches", type=int, default=8)
    parser.add_argument("--top", type=int, default=16, help="functions in the profile")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--client", help=argparse.SUPPRESS)
    add_options(parser, aof=False)
    options = parser.parse_args()
    if options.client:
        asyncio.run(be_client(options))
        return

    logs.configure("console", "error", worker="bench")
    devices.set_threads(1)
    loaded = models.load(options.model, "cpu", options.precision)
    found = {"engine": measure_engine(loaded, options)}
    with serving(options.server, aof=False) as broker:
        found["worker"] = asyncio.run(measure_worker(broker.url, loaded, options))
    if options.json:
        print(json.dumps(found, indent=2))
    else:
        report(loaded, found, options)


if __name__ == "__main__":
    main()
