"""`streamfleet load`: load a queue, and say how it did."""

from __future__ import annotations

import asyncio
import json as json_lib
import shlex
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from streamfleet_common.cards import Card
from streamfleet_common.errors import InvalidRequest, ModelNotFound
from streamfleet_common.message import problems
from streamfleet_common.one_shot import CallRequest
from streamfleet_common.schemas import Lane, Request
from streamfleet_producer.bulk.input_file import InputFile
from streamfleet_producer.cli import options
from streamfleet_producer.cli.report import numbers
from streamfleet_producer.cli.terminal import FAILED, print_json, print_table, program, run, say
from streamfleet_producer.load import LoadRun, Plan
from streamfleet_producer.report.comparison import COUNTS, compared, latency_quantities, measured
from streamfleet_producer.report.figures import MEASURES
from streamfleet_producer.report.machine import machine, versions
from streamfleet_producer.report.reading import Run, read
from streamfleet_producer.report.records import Head, RequestLine, SampleLine, encode
from streamfleet_producer.ticket import Options

MOST_PROMPTS = 100_000
MOST_PROMPT_BYTES = 64 * 1024 * 1024
DEADLINE_S = 60.0
_REQUEST: TypeAdapter[Request] = TypeAdapter(Request)


def load(
    prompts: Annotated[
        Path,
        typer.Option(
            "--prompts",
            "-p",
            metavar="<file>",
            help="JSONL: a request on each line, as `bulk` takes; sent in turn.",
            show_default=False,
        ),
    ],
    *,
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second, whatever comes of them (open loop).", show_default=False),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency", "-c", help="Callers that each wait for their answer.", show_default=False
        ),
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long requests are sent.")] = 30.0,
    warmup: Annotated[
        float, typer.Option(min=0.0, help="Of these, so many first seconds do not count.")
    ] = 0.0,
    poisson: Annotated[
        bool, typer.Option("--poisson", help="At the rate, but at random, as people come.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Of what is drawn at random.")] = 0,
    records: Annotated[
        Path | None,
        typer.Option(metavar="<file>", help="Write what `report` draws.", show_default=False),
    ] = None,
    label: Annotated[
        str | None, typer.Option(help="What plots call this run; else the queue.", show_default=False)
    ] = None,
    queue: options.Queue = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    lane: options.QueueLane = "normal",
    deadline: options.Deadline = DEADLINE_S,
    json: options.Json = False,
) -> None:
    """Load a queue for a while and print what callers saw of it.

    With --rate latencies count from the time at which a request was due, so a fleet that stalls cannot hide
    it. A line of the file is a request, {"prompt": "...", "max_tokens": 64}, or one of `bulk`. Not on a fleet
    that others need: it takes what it can get.
    """
    if warmup >= seconds:
        raise InvalidRequest("the warm-up has to be shorter than the load: raise --seconds")
    plan = Plan(
        seconds=seconds,
        rate=rate,
        callers=concurrency,
        poisson=poisson,
        seed=seed,
        options=Options(lane=lane, deadline_s=deadline),
    )
    asked = run(_requests(prompts))
    told = _Told(prompts, label, warmup, lane=lane, deadline_s=deadline)
    shown = compared([run(_load(redis_url, queue, asked, plan, records=records, told=told))])
    if json:
        print_json([numbers(one) for one in shown])
    for one in shown if not json else ():
        if len(shown) > 1:
            print(f"{one.drawn.name}:")
        figures = one.figures
        print_table(
            [quantity.name for quantity in COUNTS],
            [[quantity.text(figures) for quantity in COUNTS]],
            {quantity.name for quantity in COUNTS},
        )
        heads = [quantity.name for quantity in latency_quantities("e2e")]
        rows = [
            [MEASURES[name][0], *(quantity.text(figures) for quantity in latency_quantities(name))]
            for name in measured([one])
        ]
        if rows:
            print()
            print_table(["", *heads], rows, {*heads})
        for code, count in figures.series.errors.most_common():
            say(f"{count:,} requests: {code}", "red")
    if records is not None:
        say(f"{records}: draw it with `{program()} report {records}`", "dim")
    if not any(one.figures.done for one in shown):
        raise typer.Exit(FAILED)


class _Told:
    """What a head says besides the plan."""

    def __init__(
        self, prompts: Path, label: str | None, warmup_s: float, *, lane: Lane, deadline_s: float
    ) -> None:
        self.prompts = prompts
        self.label = label
        self.warmup_s = warmup_s
        self.lane = lane
        self.deadline_s = deadline_s

    def head(self, queue: str, plan: Plan, cards: Sequence[Card], prompts: int) -> Head:
        """The head of a run; nothing of it is secret: the URL, which may hold a password, stays out."""
        how = ["--rate", f"{plan.rate:g}"] if plan.rate is not None else ["--concurrency", str(plan.callers)]
        command = ["streamfleet", "load", "--queue", queue, *how, "--seconds", f"{plan.seconds:g}"]
        command += ["--warmup", f"{self.warmup_s:g}"] if self.warmup_s else []
        command += ["--poisson", "--seed", str(plan.seed)] if plan.poisson else []
        command += ["--lane", self.lane] if self.lane != "normal" else []
        command += ["--deadline", f"{self.deadline_s:g}", "--prompts", self.prompts.name]
        card = cards[0]
        rows = sum(one.limits.max_batch_size for one in cards)
        model = {
            "name": card.model,
            "revision": card.revision,
            "device": card.device,
            "precision": card.precision,
        }
        return Head(
            label=(self.label or queue)[:80],
            command=shlex.join(command)[:2000],
            began_at=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            loop="closed" if plan.rate is None else "open",
            warmup_ms=self.warmup_s * 1000,
            machine=machine(),
            versions=versions(),
            model={name: value for name, value in model.items() if value},
            settings={
                "queue": queue,
                "workers": str(len(cards)),
                "rows of all batches": str(rows),
                "longest sequence": f"{card.limits.max_seq_len:,} tokens",
                "queue's limit": f"{card.limits.max_queue_depth:,} requests",
                "prompts": f"{prompts:,}, in turn",
            },
        )


async def _load(
    redis_url: str,
    queue: str | None,
    asked: Sequence[Request],
    plan: Plan,
    *,
    records: Path | None,
    told: _Told,
) -> Run:
    first = asked[0]
    model = first.handler if isinstance(first, CallRequest) else first.model
    async with options.open_client(redis_url, queue, kind=first.kind, model=model) as fleet:
        cards = await fleet.models()
        if not cards:
            raise ModelNotFound(
                f"no worker serves the queue {fleet.queue!r} now: start one, then load it", known=[]
            )
        head = told.head(fleet.queue, plan, cards, len(asked))
        # Not before there is something to be written: an older run may be in it.
        with _file(records) as (file, path):
            file.write(encode(head))
            try:
                await LoadRun(fleet, asked, plan, lambda line: _put(file, line)).run()
            except asyncio.CancelledError:
                if records is not None:
                    say(f"{records} has what had ended by then", "yellow")
                raise
            file.flush()
            return read(path)


def _put(file: IO[bytes], line: RequestLine | SampleLine) -> None:
    file.write(encode(line))


async def _requests(path: Path) -> list[Request]:
    source = InputFile(path, max_lines=MOST_PROMPTS, max_bytes=MOST_PROMPT_BYTES)
    source.count()
    found = []
    async for line in source.lines():
        try:
            if line.data is None:
                raise InvalidRequest("the line is too long for a request")
            found.append(_request(line.data))
        except InvalidRequest as error:
            raise InvalidRequest(
                f"{path}, line {line.number}: {error.message}", problems=error.problems
            ) from None
    return found


def _request(data: bytes) -> Request:
    try:
        told = json_lib.loads(data)
    except (ValueError, RecursionError):
        raise InvalidRequest(
            'it is no JSON; a request looks like {"prompt": "...", "max_tokens": 64}'
        ) from None
    if isinstance(told, dict) and isinstance(told.get("request"), dict):
        told = told["request"]  # a line of `bulk`
    try:
        return _REQUEST.validate_python(told)
    except ValidationError as error:
        faults = problems(error)
        raise InvalidRequest(f"the request is not valid: {'; '.join(faults)}", problems=faults) from None


@contextmanager
def _file(path: Path | None) -> Iterator[tuple[IO[bytes], Path]]:
    """The file of records, or one that is gone afterwards."""
    if path is None:
        with tempfile.NamedTemporaryFile(prefix="streamfleet-", suffix=".jsonl") as file:
            yield file, Path(file.name)
        return
    try:
        opened = path.open("wb")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be written: {error.strerror}") from None
    with opened:
        yield opened, path
