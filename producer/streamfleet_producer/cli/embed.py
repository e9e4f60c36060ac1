"""`streamfleet embed`: texts to vectors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal

import typer

from streamfleet_common.one_shot import Embedding, EmbedRequest, Pooling
from streamfleet_common.schemas import End
from streamfleet_producer.cli import line_options, options
from streamfleet_producer.cli.asking import text_item, together
from streamfleet_producer.cli.line_job import LineJob
from streamfleet_producer.cli.line_output import LineOutput
from streamfleet_producer.cli.lines import Lines
from streamfleet_producer.cli.terminal import leaving_quietly, run
from streamfleet_producer.ticket import DEADLINE_S, Options

Format = Literal["float", "base64"]


def embed(
    source: line_options.Source = None,
    *,
    file: line_options.File = None,
    pooling: Annotated[
        Pooling | None,
        typer.Option(help="What makes the vector; else the model's way.", show_default=False),
    ] = None,
    normalize: Annotated[
        bool | None,
        typer.Option(
            "--normalize/--no-normalize",
            help="Length 1 or not; else the model's way.",
            show_default=False,
        ),
    ] = None,
    dimensions: Annotated[
        int | None, typer.Option(help="Keep so many first numbers.", show_default=False)
    ] = None,
    model: line_options.Model = None,
    truncate: line_options.Truncate = False,
    truncate_side: line_options.TruncateSide = "right",
    format: Annotated[  # noqa: A002 (the option's name)
        Format, typer.Option(help="Numbers, or their float32 bytes in base64.")
    ] = "float",
    jsonl: line_options.Jsonl = False,
    text: line_options.KeepText = False,
    output: line_options.Output = None,
    resume: line_options.Resume = False,
    fail_fast: line_options.FailFast = False,
    queue: options.Queue = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    lane: options.QueueLane = "normal",
    deadline: options.Deadline = DEADLINE_S,
    json: options.JsonErrors = False,  # noqa: ARG001 - remembered by its callback
) -> None:
    """Turn texts into vectors, a line of JSON each.

    A line that fails has an `error` in the place of its `embedding`; the exit status is 1 then.
    """

    def request(values: Sequence[Any]) -> EmbedRequest:
        return EmbedRequest(
            texts=[value[0] for value in values],
            model=model,
            pooling=pooling,
            normalize=normalize,
            dimensions=dimensions,
            truncate=truncate,
            truncate_side=truncate_side,
        )

    def taken(end: End) -> list[dict[str, Any]]:
        return [{"embedding": _shown(embedding, format)} for embedding in end.embeddings]

    async def work() -> int:
        async with options.open_client(redis_url, queue, kind="embed", model=model) as fleet:
            more = Options(lane=lane, deadline_s=deadline)
            asked = partial(together, fleet, request=request, taken=taken, more=more)
            item = partial(text_item, jsonl=jsonl, keep=text)
            out = LineOutput(output, resume=resume)
            return await LineJob(fleet, lines, out, item, asked, fail_fast).run()

    lines = Lines.of(source or (), file)
    with leaving_quietly():
        raise typer.Exit(run(work()))


def _shown(embedding: Embedding, form: Format) -> str | list[float]:
    return embedding.base64 if form == "base64" else embedding.numbers
