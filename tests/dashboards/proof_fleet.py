"""A fleet of real processes to be scraped: server, exporter, gateway, and the workers of two queues."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx

from prometheus_process import free_port
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_producer import Client

CHAT, EMBED = "chat", "embed"
QUEUES = (CHAT, EMBED)
LEASE_S = 3.0
ROWS = 10
"""The most that each of the two workers of `chat` runs at once."""
DEPTH = 200
PAUSED = "chat-b"
"""The worker that stands still for a while."""
START_S = 300.0  # models are unpacked the first time
POLL_S = 0.1
COMMAND = (sys.executable, "-c", "from streamfleet_producer.cli import main; main()")


class ProofFleet:
    """All of it, from `with` to its end. Logs lie in `folder`; `ports` are those of the pages of metrics.

    Two workers serve SmolLM2 on the queue `chat`, and one that a supervisor keeps serves MiniLM on `embed`.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stack = ExitStack()
        self._started: dict[str, subprocess.Popen[bytes]] = {}
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self.ports = {name: free_port() for name in ("chat-a", "chat-b", "embed-a", "exporter", "gateway")}
        self.url = ""

    @property
    def gateway(self) -> str:
        """The URL of the gateway."""
        return f"http://127.0.0.1:{self.ports['gateway']}"

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            broker = stack.enter_context(
                EmbeddedBroker(extra_args=("--maxmemory", "256mb", "--maxmemory-policy", "noeviction"))
            )
            self.url = broker.url
            stack.callback(self._end)
            for name in ("chat-a", PAUSED):
                self._worker(CHAT, name, model="smollm2", max_batch_size=str(ROWS), max_seq_len="512")
            one_shot = {"model": "minilm", "answer_cache_mib": "4", "max_delay_ms": "30"}
            self._worker(EMBED, "embed-a", **one_shot, workers="1")
            self._start("exporter", "exporter", "--port", str(self.ports["exporter"]))
            self._start("gateway", "gateway", "--port", str(self.ports["gateway"]))
            self._wait()
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def pause(self) -> None:
        """Stop a worker of `chat`, as a machine does that has other things to do: it falls silent."""
        self._workers[PAUSED].send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        self._workers[PAUSED].send_signal(signal.SIGCONT)

    def kill_workers(self) -> None:
        """Kill all workers at once: nobody is left to hand anything back."""
        for process in self._workers.values():
            process.kill()
            process.wait()

    def _worker(self, queue: str, name: str, **settings: str) -> None:
        self._workers[name] = self._start(
            name,
            "worker",
            queue=queue,
            http_port=str(self.ports[name]),
            lease_s=f"{LEASE_S:.0f}",
            max_queue_depth=str(DEPTH),
            **settings,
        )

    def _start(self, name: str, *arguments: str, **settings: str) -> subprocess.Popen[bytes]:
        ours = {f"STREAMFLEET_{key.upper()}": value for key, value in settings.items()}
        kept = {key: value for key, value in os.environ.items() if not key.startswith("STREAMFLEET_")}
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [*COMMAND, *arguments],
                env={**kept, "STREAMFLEET_REDIS_URL": self.url, **ours},
                stdout=log,
                stderr=log,
            )
        self._started[name] = process
        return process

    def _wait(self) -> None:
        """Return once there is a page of metrics at each port, and each queue has a worker."""
        late_at = time.monotonic() + START_S
        waited = {f"http://127.0.0.1:{port}/metrics" for port in self.ports.values()}
        while waited or not asyncio.run(self._are_served()):
            for name, process in self._started.items():
                if process.poll() is not None:
                    log = (self._folder / f"{name}.log").read_text(errors="replace")
                    raise RuntimeError(f"{name} ended with {process.returncode}:\n{log[-2000:]}")
            if time.monotonic() > late_at:
                raise TimeoutError(f"no answer from {sorted(waited)}; logs are in {self._folder}")
            waited = {url for url in waited if not _answers(url)}
            time.sleep(POLL_S)

    async def _are_served(self) -> bool:
        for queue in QUEUES:
            async with Client(self.url, queue=queue) as client:
                if len(await client.models()) < (2 if queue == CHAT else 1):
                    return False
        return True

    def _end(self) -> None:
        for process in self._started.values():
            process.send_signal(signal.SIGCONT)
            process.terminate()
        for process in self._started.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=10).status_code == 200
    except httpx.HTTPError:
        return False
