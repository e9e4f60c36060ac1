"""One trace of a real fleet as a tree, for docs/tracing.md: `python tests/tracing/capture.py`.

A broker, a gateway and two workers with the model `smollm2`, each a process of its own, and a collector here.
The first worker that begins the request is killed in the middle, so that the second begins it again.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from command import environment, running
from otlp_collector import collecting
from spans import Kept
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_producer import Client

HEADER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
KILLED_AT = 6
"""Lines of the answer after which its worker is killed."""
MARK = 26
"""Columns of the bar that shows when a span was."""
SAID = {
    "request": ("streamfleet.attempt", "streamfleet.outcome"),
    "prefill": ("streamfleet.batch.size", "streamfleet.batch.reason"),
    "decode": ("gen_ai.usage.output_tokens",),
    "batch": ("streamfleet.batch.size", "streamfleet.batch.reason"),
}


def tree(spans: Iterable[Kept]) -> list[str]:
    """Lines: name, beginning and length in milliseconds, a bar, and what is worth saying."""
    by_parent: dict[str | None, list[Kept]] = {}
    for span in sorted(spans, key=lambda span: (span.began, -span.ended)):
        by_parent.setdefault(span.parent, []).append(span)
    ids = {span.id for found in by_parent.values() for span in found}
    roots = [span for parent, found in by_parent.items() if parent not in ids for span in found]
    first = min(span.began for span in roots)
    whole = max(span.ended for span in roots) - first
    lines = []

    def walk(span: Kept, depth: int) -> None:
        at, length = span.began - first, span.ended - span.began
        left = min(round(at / whole * MARK), MARK - 1)
        bar = " " * left + "━" * max(1, round(length / whole * MARK))
        lines.append(f"{'  ' * depth + span.name:24}{at / 1e6:7.1f}{length / 1e6:8.1f}  {bar[:MARK]}")
        pairs = [(name.rpartition(".")[2], span.attributes.get(name)) for name in SAID.get(span.name, ())]
        if said := " ".join(f"{name}={value}" for name, value in pairs if value is not None):
            lines.append(f"{'  ' * (depth + 1)}{said}")
        for below in by_parent.get(span.id, ()):
            walk(below, depth + 1)

    for root in roots:
        walk(root, 0)
    return lines


async def _served(url: str, workers: int) -> None:
    async with asyncio.timeout(120), Client(url, queue="q") as client:
        while len(await client.models()) < workers:  # noqa: ASYNC110 (other processes make it true)
            await asyncio.sleep(0.1)


def main() -> None:
    """Run the fleet once and print the trace."""
    with ExitStack() as stack:
        collector = stack.enter_context(collecting())
        broker = stack.enter_context(EmbeddedBroker())
        env = environment(
            STREAMFLEET_ENGINE="generation",
            STREAMFLEET_MODEL="smollm2",
            STREAMFLEET_REDIS_URL=broker.url,
            STREAMFLEET_QUEUE="q",
            STREAMFLEET_LOG_FORMAT="json",
            STREAMFLEET_GATEWAY_PORT="0",
            OTEL_EXPORTER_OTLP_ENDPOINT=collector.url,
        )
        workers = stack.enter_context(running("worker", "--workers", "2", env=env))
        gateway = stack.enter_context(running("gateway", env=env))
        url = gateway.wait_for("gateway listens").partition('"url": "')[2].partition('"')[0]
        asyncio.run(_served(broker.url, 2))
        body = {"model": "q", "prompt": "The three primary colours are", "max_tokens": 16, "stream": True}
        headers = {"traceparent": HEADER}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=120) as answer:
            sys.stdout.write(f"traceresponse: {answer.headers['traceresponse']}\n\n")
            for number, _ in enumerate(answer.iter_lines()):
                if number == KILLED_AT:
                    _kill(asyncio.run(_runner(broker.url, answer.headers["x-request-id"])))
        for process in (workers, gateway):
            process.process.terminate()
            process.end()
        sys.stdout.write("\n".join([*tree(collector.spans()), ""]))


async def _runner(url: str, request_id: str) -> str:
    async with Client(url, queue="q") as client:
        return (await client.status(request_id.partition(":")[2])).worker


def _kill(worker: str) -> None:
    # A name has only the supervisor's number in it: the process is found by what its environment says.
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and worker.encode() in _environment(entry):
            os.kill(int(entry.name), signal.SIGKILL)


def _environment(entry: Path) -> bytes:
    try:
        return (entry / "environ").read_bytes()
    except OSError:
        return b""


if __name__ == "__main__":
    main()
