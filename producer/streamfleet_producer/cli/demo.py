"""`streamfleet demo`: a broker, a worker and a real model on this machine, answering at once."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Annotated

import typer
from rich.console import Console

from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_producer.cli.demo_lines import WIDTH, Lines
from streamfleet_producer.cli.demo_screen import Screen
from streamfleet_producer.cli.demo_story import story
from streamfleet_producer.cli.exchange import Exchange, Question
from streamfleet_producer.cli.terminal import FAILED, complain, program, run, say, stdout
from streamfleet_producer.cli.workers import Workers
from streamfleet_producer.client import Client

QUEUE = "smollm2"
MODEL = "smollm2"
MAX_DELAY_MS = 60
"""Long enough that all questions make the first batch, also on a slow machine."""
POLL_S = 0.05
LEAST_WIDTH = 40
LEAST_HEIGHT = 10

# Ones that a model of 135 million parameters answers well, in one sentence.
QUESTIONS = (
    Question("What is the capital of France?", "."),
    Question("What causes the tides?", "."),
    Question("What is a volcano?", "."),
    Question("What is snow?", "."),
    Question("What is a library?", "."),
    Question("Describe the moon over the sea.", "."),
)
MAX_TOKENS = 40
MAX_TOKENS_OF_OTHERS = 64

Face = Screen | Lines


def demo(
    questions: Annotated[
        list[str] | None,
        typer.Argument(metavar="QUESTION", help="What to ask instead of six questions of ours."),
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, max=4096, help="Longest answer, in tokens.", show_default=False)
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Plain lines, also on a terminal.")] = False,
) -> None:
    """Watch several answers stream at once.

    Starts a broker and a worker on this machine, which end with the command and leave nothing behind.
    The model is small (SmolLM2, 135M parameters); the first time it is unpacked, which takes up to a minute.
    """
    if not all(text.strip() for text in questions or ()):
        raise typer.BadParameter("a question is empty: there is nothing to answer")
    asked = [Question(text) for text in questions] if questions else list(QUESTIONS)
    limit = max_tokens or (MAX_TOKENS_OF_OTHERS if questions else MAX_TOKENS)
    exchanges = [Exchange(number, question) for number, question in enumerate(asked, 1)]
    console = stdout()
    raise typer.Exit(run(_demo(_face(console, plain), exchanges, limit)))


def _face(console: Console, plain: bool) -> Face:
    fits = console.width >= LEAST_WIDTH and console.height >= LEAST_HEIGHT
    live = console.is_terminal and not console.is_dumb_terminal and fits and not plain
    if live:
        return Screen(console)
    return Lines(min(WIDTH, console.width)) if console.is_terminal else Lines()


async def _demo(face: Face, exchanges: Sequence[Exchange], max_tokens: int) -> int:
    with EmbeddedBroker() as broker:
        face.done("Broker", f"Valkey {broker.version} on {broker.url}")
        worker = Workers(_settings(broker.url))
        try:
            model = os.environ.get("STREAMFLEET_MODEL", MODEL)
            with face.waiting("Worker", f"loading {model} (unpacked the first time: up to a minute)"):
                started = await _until(worker, None)
            if not started:
                return _worker_ended(worker, "while starting")
            face.done("Worker", worker.description)
            asking = asyncio.ensure_future(_ask(face, broker.url, exchanges, max_tokens))
            try:
                if not await _until(worker, asking):
                    return _worker_ended(worker, "before all was answered")
            finally:
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
            metrics = await asyncio.to_thread(worker.metrics)
            face.story(story(exchanges, metrics), _next_steps())
            return 0 if all(exchange.state == "done" for exchange in exchanges) else FAILED
        finally:
            worker.kill()


def _next_steps() -> list[str]:
    name = program()
    return [f"{name} up", f'{name} stream "Why is the sky blue?" --queue {QUEUE}']


def _settings(redis_url: str) -> dict[str, object]:
    settings: dict[str, object] = {"redis_url": redis_url, "queue": QUEUE}
    if "STREAMFLEET_MAX_DELAY_MS" not in os.environ:
        settings["max_delay_ms"] = MAX_DELAY_MS
    return settings


async def _until(worker: Workers, work: asyncio.Future[None] | None) -> bool:
    """Wait for `work`, or for the worker to be ready; False if the worker ends first."""
    while not (worker.ready if work is None else work.done()):
        if worker.status is not None or worker.why_one_ended is not None:
            return False
        if work is None:
            await asyncio.sleep(POLL_S)
        else:
            await asyncio.wait([work], timeout=POLL_S)
    if work is not None:
        await work
    return True


async def _ask(face: Face, redis_url: str, exchanges: Sequence[Exchange], max_tokens: int) -> None:
    async with Client(redis_url, QUEUE) as fleet, face.board(exchanges, max_tokens):
        await asyncio.gather(*(exchange.run(fleet, face.changed, max_tokens) for exchange in exchanges))


def _worker_ended(worker: Workers, when: str) -> int:
    complain(f"the worker ended {when}: {worker.why_ended()}")
    say("The end of its log:", "dim")
    for line in worker.tail():
        say(f"  {line}", "dim")
    return FAILED
