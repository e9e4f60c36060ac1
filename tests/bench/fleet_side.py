"""The fleet as a side of `generation.py`: the jobs through Redis, every token streamed to a client.

    python fleet_side.py SETUP

A server, one worker, and this process as the client, which reads one stream for each job. Every round has new
ones, as the engine in process is a new one: the prefix cache would remember the last round.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from generation_jobs import request_of
from generation_side import Job, Pieces, Result, Setup, serve
from load import cpu_us
from server import process, serving
from streamfleet_producer import Client

HERE = Path(__file__).parent
QUEUE = "bench"
START_LIMIT_S = 300.0


class FleetSide:
    """A fleet of one worker."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._runner = asyncio.Runner()
        self._stack = ExitStack()
        self._client: Client | None = None

    def reset(self) -> None:
        self.close()
        broker = self._stack.enter_context(serving(None, aof=False))
        worker = self._stack.enter_context(
            process([sys.executable, "-m", "streamfleet_worker"], self._environment(broker.url), HERE)
        )
        self._pids = {"worker": worker.pid, "redis": broker.pid}
        self._runner.run(self._open(broker.url))

    def run(self, jobs: Sequence[Job]) -> Result:
        before = self._cpu_seconds()
        self._records: list[dict[str, Any]] = []
        self._began = began = time.perf_counter()
        answers = self._runner.run(self._answers(jobs))
        seconds = time.perf_counter() - began
        used = {name: total - before[name] for name, total in self._cpu_seconds().items()}
        return Result(seconds, sum(map(len, answers)), used, answers, self._records)

    def close(self) -> None:
        if self._client is not None:
            self._runner.run(self._client.close())
            self._client = None
        self._stack.close()

    def _environment(self, url: str) -> dict[str, str]:
        setup = self._setup
        return {
            "STREAMFLEET_REDIS_URL": url,
            "STREAMFLEET_QUEUE": QUEUE,
            "STREAMFLEET_MODEL": setup.model,
            "STREAMFLEET_DEVICE": "cpu",
            "STREAMFLEET_PRECISION": setup.precision,
            "STREAMFLEET_THREADS": str(setup.threads),
            "STREAMFLEET_MAX_BATCH_SIZE": str(setup.batch),
            "STREAMFLEET_MAX_SEQ_LEN": str(setup.max_seq_len),
            "STREAMFLEET_EXACT": "false",
            "STREAMFLEET_LOG_LEVEL": "error",
        }

    async def _open(self, url: str) -> None:
        self._client = await Client(url, queue=QUEUE).open()
        async with asyncio.timeout(START_LIMIT_S):
            while not await self._client.models():  # noqa: ASYNC110 (another process makes it true)
                await asyncio.sleep(0.05)

    async def _answers(self, jobs: Sequence[Job]) -> list[list[int]]:
        return await asyncio.gather(*map(self._answer, jobs))

    async def _answer(self, job: Job) -> list[int]:
        assert self._client is not None
        if not self._setup.records:
            async with self._client.stream(request_of(job)) as tokens:
                return [token_id async for delta in tokens for token_id in delta.token_ids]
        pieces = Pieces(job, self._began)
        answer: list[int] = []
        async with self._client.stream(request_of(job)) as tokens:
            async for delta in tokens:
                pieces()
                answer += delta.token_ids
        end = tokens.result
        queued_ms = max(0, end.started_at_ms - end.queued_at_ms)
        size = 0 if end.batch is None else end.batch.size
        self._records.append(pieces.record(len(answer), queued_ms, size or None))
        return answer

    def _cpu_seconds(self) -> dict[str, float]:
        parts = {name: cpu_us(pid) / 1e6 for name, pid in self._pids.items()}
        return {"client": time.process_time(), **parts}


def main() -> None:
    """Serve until standard input ends."""
    setup = Setup.read(Path(sys.argv[1]))
    made: list[FleetSide] = []

    def make(given: Setup) -> FleetSide:
        made.append(FleetSide(given))
        return made[0]

    try:
        serve(make, setup)
    finally:
        for side in made:
            side.close()


if __name__ == "__main__":
    main()
