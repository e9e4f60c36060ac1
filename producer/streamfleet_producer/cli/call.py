"""`streamfleet call`: handlers, by name."""

from __future__ import annotations

import json as documents
import shlex
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from streamfleet_common.errors import InvalidRequest, StreamfleetError
from streamfleet_common.one_shot import CallRequest
from streamfleet_common.schemas import Request
from streamfleet_producer.cli import line_options, options
from streamfleet_producer.cli.asking import answers
from streamfleet_producer.cli.example_input import example_input
from streamfleet_producer.cli.line_job import Item, LineJob, Outcome
from streamfleet_producer.cli.line_output import LineOutput
from streamfleet_producer.cli.lines import Lines
from streamfleet_producer.cli.terminal import leaving_quietly, print_json, run
from streamfleet_producer.cli.worker_watch import WorkerWatch
from streamfleet_producer.client import Client
from streamfleet_producer.ticket import DEADLINE_S, Options


def call(
    handler: Annotated[str, typer.Argument(metavar="HANDLER", help="Its name.", show_default=False)],
    input: Annotated[  # noqa: A002 (the field's word)
        str | None,
        typer.Argument(
            metavar="INPUT", help="What it takes, as JSON; `-` reads it from stdin.", show_default=False
        ),
    ] = None,
    *,
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="<file>",
            help="Call it for each line of this file, a JSON document each; `-` is stdin.",
            show_default=False,
        ),
    ] = None,
    output: line_options.Output = None,
    resume: line_options.Resume = False,
    fail_fast: line_options.FailFast = False,
    stream: Annotated[
        bool, typer.Option("--stream", help="Print each part of the output as it comes.")
    ] = False,
    queue: options.Queue = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    lane: options.QueueLane = "normal",
    deadline: options.Deadline = DEADLINE_S,
    json: options.JsonErrors = False,  # noqa: ARG001 - remembered by its callback
) -> None:
    """Call a handler, and print its output as a line of JSON.

    For the lines of a file each answer is a line with the `output`, or with an `error`; the exit status is 1
    if there is any.
    """
    if (input is None) == (file is None):
        raise InvalidRequest("give either an input or --file")
    more = Options(lane=lane, deadline_s=deadline)

    async def one() -> None:
        async with options.open_client(redis_url, queue, kind="call", model=handler) as fleet:
            value = await _input(fleet, handler, str(input))
            async with WorkerWatch(fleet):
                await _call(fleet, handler, value, more, stream=stream)

    async def each() -> int:
        async with options.open_client(redis_url, queue, kind="call", model=handler) as fleet:
            asked = partial(_asked, fleet, handler, more)
            out = LineOutput(output, resume=resume)
            return await LineJob(fleet, Lines((), file), out, _document, asked, fail_fast).run()

    with leaving_quietly():
        if file is not None:
            if stream:
                raise InvalidRequest("--stream is for one input; the lines of a file are answered whole")
            raise typer.Exit(run(each()))
        if output is not None or resume or fail_fast:
            raise InvalidRequest("--output, --resume and --fail-fast go with --file")
        run(one())


async def _call(fleet: Client, handler: str, value: Any, more: Options, *, stream: bool) -> None:
    if not stream:
        print_json(await fleet.call(handler, value, **more))
        return
    async with fleet.call_stream(handler, value, **more) as parts:
        async for part in parts:
            print_json(part)


async def _input(fleet: Client, handler: str, given: str) -> Any:
    """The value that an argument is.

    Raises:
        InvalidRequest: it is none, with what the handler takes instead.
    """
    item = _document(sys.stdin.read() if given == "-" else given)
    if not item.fault:
        return item.value
    if _is_file(given):
        raise InvalidRequest(f"the input is no JSON but a file: it goes with --file {shlex.quote(given)}")
    wanted = example_input(await fleet.models(), handler)
    takes = "a text has quotes" if wanted is None else f"handler {handler!r} takes what looks like this"
    like = shlex.quote(wanted or documents.dumps("a text"))
    raise InvalidRequest(f"the input is no JSON; {takes}: {like}")


async def _asked(fleet: Client, handler: str, more: Options, values: Sequence[Any]) -> list[Outcome]:
    requests: list[Request] = [CallRequest(handler=handler, input=value) for value in values]
    ends = await answers(fleet, requests, more)
    return [end if isinstance(end, StreamfleetError) else {"output": end.output} for end in ends]


def _document(text: str) -> Item:
    try:
        return Item(documents.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return Item(None, fault="the line is no JSON" if text.strip() else "the line is empty")


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except (OSError, ValueError):  # too long for a name, or no name at all
        return False


def _refuse(constant: str) -> None:
    raise ValueError(constant)
