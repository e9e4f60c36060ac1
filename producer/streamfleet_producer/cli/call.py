"""`streamfleet call`: handlers, by name."""

from __future__ import annotations

import json as documents
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from streamfleet_common.errors import InvalidRequest, StreamfleetError
from streamfleet_common.one_shot import CallRequest
from streamfleet_common.schemas import Request
from streamfleet_producer.cli import line_options, options
from streamfleet_producer.cli.asking import answers
from streamfleet_producer.cli.line_job import Item, LineJob, Outcome
from streamfleet_producer.cli.line_output import LineOutput
from streamfleet_producer.cli.lines import Lines
from streamfleet_producer.cli.terminal import leaving_quietly, print_json, run
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
    with leaving_quietly():
        if file is not None:
            if stream:
                raise InvalidRequest("--stream is for one input; the lines of a file are answered whole")
            work = _call_lines(
                redis_url,
                queue,
                handler,
                lines=Lines((), file),
                output=LineOutput(output, resume=resume),
                more=more,
                fail_fast=fail_fast,
            )
            raise typer.Exit(run(work))
        if output is not None or resume or fail_fast:
            raise InvalidRequest("--output, --resume and --fail-fast go with --file")
        value = _document(sys.stdin.read() if input == "-" else str(input))
        if value.fault:
            raise InvalidRequest(f"the input is no JSON; a text has quotes: {documents.dumps('a text')}")
        run(_call(redis_url, queue, handler, value.value, more=more, stream=stream))


async def _call(
    redis_url: str, queue: str | None, handler: str, value: Any, *, more: Options, stream: bool
) -> None:
    async with options.open_client(redis_url, queue) as fleet:
        if not stream:
            print_json(await fleet.call(handler, value, **more))
            return
        async with fleet.call_stream(handler, value, **more) as parts:
            async for part in parts:
                print_json(part)


async def _call_lines(
    redis_url: str,
    queue: str | None,
    handler: str,
    *,
    lines: Lines,
    output: LineOutput,
    more: Options,
    fail_fast: bool,
) -> int:
    async with options.open_client(redis_url, queue) as fleet:

        async def asked(values: Sequence[Any]) -> list[Outcome]:
            requests: list[Request] = [CallRequest(handler=handler, input=value) for value in values]
            ends = await answers(fleet, requests, more)
            return [end if isinstance(end, StreamfleetError) else {"output": end.output} for end in ends]

        return await LineJob(lines, output, _document, asked, fail_fast).run()


def _document(text: str) -> Item:
    try:
        return Item(documents.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        return Item(None, fault="the line is no JSON")


def _refuse(constant: str) -> None:
    raise ValueError(constant)
