"""`streamfleet decide`: questions about a state, answered by the likeliest of their options."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from streamfleet_common.decisions import DecideRequest, Decision, Question
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.message import problems
from streamfleet_producer.cli import line_options, options
from streamfleet_producer.cli.terminal import in_one_line, print_json, print_table, run, stdout
from streamfleet_producer.cli.worker_watch import WorkerWatch
from streamfleet_producer.ticket import DEADLINE_S, Options

_REQUEST: TypeAdapter[DecideRequest] = TypeAdapter(DecideRequest)


def decide(
    file: Annotated[
        str | None,
        typer.Argument(
            metavar="FILE|-", help="A request as JSON: its state, its questions.", show_default=False
        ),
    ] = None,
    *,
    state: Annotated[
        str | None,
        typer.Option(help="What is asked about; `-` reads it from stdin.", show_default=False),
    ] = None,
    question: Annotated[
        list[str] | None,
        typer.Option(metavar="<id: text>", help="A question; may be repeated.", show_default=False),
    ] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            help="An option of every --question; without any they are yes and no.", show_default=False
        ),
    ] = None,
    model: line_options.Model = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut a state that is too long.")] = False,
    queue: options.Queue = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    lane: options.QueueLane = "normal",
    deadline: options.Deadline = DEADLINE_S,
    json: options.Json = False,
) -> None:
    """Decide questions about a text, a JSON document or a chat.

    The file is a JSON document such as {"state": "...", "questions": [{"id": "tone", "criteria": "What is the
    tone?", "options": ["calm", "angry"]}]}. With --json the answers are one document, by the questions' ids.
    """
    if (file is None) == (state is None):
        raise InvalidRequest("give either a file or --state")
    if file is not None and (question or option):
        raise InvalidRequest("--question and --option go with --state; a file has its own")
    request = _read(file) if file is not None else _request(str(state), question or (), option or ())
    given = {"model": model or request.model, "truncate": truncate or request.truncate}
    run(
        _decide(
            redis_url, queue, request.model_copy(update=given), Options(lane=lane, deadline_s=deadline), json
        )
    )


async def _decide(
    redis_url: str, queue: str | None, request: DecideRequest, more: Options, json: bool
) -> None:
    opened = options.open_client(redis_url, queue, kind="decide", model=request.model)
    async with opened as fleet, WorkerWatch(fleet):
        end = await fleet.run(request, **more)
    if json:
        print_json({answer.id: answer.model_dump(mode="json", exclude={"id"}) for answer in end.answers})
    else:
        _table(end.answers)


def _read(file: str) -> DecideRequest:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text("utf-8", "replace")
    except OSError as error:
        raise InvalidRequest(f"{file} cannot be read: {error.strerror}") from None
    try:
        return _REQUEST.validate_json(text)
    except ValidationError as error:
        faults = problems(error)
        raise InvalidRequest(f"{file} is no request: {'; '.join(faults)}", problems=faults) from None


def _request(state: str, questions: Sequence[str], given: Sequence[str]) -> DecideRequest:
    made = []
    for asked in questions:
        name, colon, criteria = asked.partition(":")
        if not colon:
            raise InvalidRequest(f"--question {asked!r} has no id: write it as `tone: What is the tone?`")
        fields: dict[str, Any] = {"options": given} if given else {"type": "yes_no"}
        made.append(Question(id=name.strip(), criteria=criteria.strip(), **fields))
    return DecideRequest(state=sys.stdin.read() if state == "-" else state, questions=made)


def _table(answers: Sequence[Decision]) -> None:
    rows = []
    for answer in answers:
        others = [
            f"{option} {share:.3f}"
            for option, share in answer.probabilities.items()
            if option != answer.option
        ]
        share = f"{answer.probabilities[answer.option]:.3f}"
        rows.append(
            [in_one_line(text, None) for text in (answer.id, answer.option, share, ", ".join(others))]
        )
    if sys.stdout.isatty() and rows:
        beside = sum(max(len(row[column]) for row in rows) + 2 for column in range(3))
        rows = [[*row[:3], in_one_line(row[3], max(20, stdout().width - beside))] for row in rows]
    print_table(("question", "answer", "share", "others"), rows, {"share"})
