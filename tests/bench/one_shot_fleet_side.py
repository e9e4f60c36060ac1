"""The fleet as sides of `one_shot.py`: the texts through Redis, to one worker and back to one client.

    python one_shot_fleet_side.py {fleet,fleet-whole} SETUP

A server, one worker, and this process as the client. `fleet` sends each text as a request of its own, all of
them at once, as many callers would; `fleet-whole` sends all of them as one request.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from load import cpu_us
from one_shot_side import Setup, Vectors, serve
from server import process, serving
from streamfleet_producer import Client, EmbedRequest

HERE = Path(__file__).parent
QUEUE = "bench"
START_LIMIT_S = 300.0


class FleetSide:
    """A fleet of one worker, until `close`."""

    def __init__(self, setup: Setup, *, whole: bool) -> None:
        self._setup = setup
        self._whole = whole
        self._runner = asyncio.Runner()
        self._stack = ExitStack()
        broker = self._stack.enter_context(serving(None, aof=False))
        worker = self._stack.enter_context(
            process([sys.executable, "-m", "streamfleet_worker"], self._environment(broker.url), HERE)
        )
        self._pids = {"worker": worker.pid, "redis": broker.pid}
        self._client = self._runner.run(self._open(broker.url))

    def embed(self, texts: Sequence[str]) -> Vectors:
        return self._runner.run(self._embed(texts))

    def cpu_seconds(self) -> dict[str, float]:
        parts = {name: cpu_us(pid) / 1e6 for name, pid in self._pids.items()}
        return {"client": time.process_time(), **parts}

    def close(self) -> None:
        self._runner.run(self._client.close())
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
            "STREAMFLEET_EXACT": "false",
            "STREAMFLEET_LOG_LEVEL": "error",
        }

    async def _open(self, url: str) -> Client:
        client = await Client(url, queue=QUEUE).open()
        async with asyncio.timeout(START_LIMIT_S):
            while not await client.models():  # noqa: ASYNC110 (another process makes it true)
                await asyncio.sleep(0.05)
        return client

    async def _embed(self, texts: Sequence[str]) -> Vectors:
        parts = [texts] if self._whole else [[text] for text in texts]
        ends = await asyncio.gather(*(self._client.run(EmbedRequest(texts=part)) for part in parts))
        return [embedding.vector for end in ends for embedding in end.embeddings]


def main() -> None:
    """Serve until standard input ends."""
    name, where = sys.argv[1:]
    made: list[FleetSide] = []

    def make(setup: Setup) -> FleetSide:
        made.append(FleetSide(setup, whole=name == "fleet-whole"))
        return made[0]

    try:
        serve(make, Setup.read(Path(where)))
    finally:
        for side in made:
            side.close()


if __name__ == "__main__":
    main()
