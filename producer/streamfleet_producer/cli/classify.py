"""`streamfleet classify`: texts to labels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer

from streamfleet_common.one_shot import ClassifyRequest
from streamfleet_common.schemas import End
from streamfleet_producer.cli import line_options, options
from streamfleet_producer.cli.asking import text_item, together
from streamfleet_producer.cli.line_job import LineJob
from streamfleet_producer.cli.line_output import LineOutput
from streamfleet_producer.cli.lines import Lines
from streamfleet_producer.cli.terminal import leaving_quietly, run
from streamfleet_producer.ticket import DEADLINE_S, Options


def classify(
    source: line_options.Source = None,
    *,
    file: line_options.File = None,
    top_k: Annotated[int | None, typer.Option(help="Only the k likeliest.", show_default=False)] = None,
    multi_label: Annotated[
        bool | None,
        typer.Option(
            "--multi-label/--single-label",
            help="Labels have probabilities of their own, or share one; else the model's way.",
            show_default=False,
        ),
    ] = None,
    model: line_options.Model = None,
    truncate: line_options.Truncate = False,
    truncate_side: line_options.TruncateSide = "right",
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
    """Give texts labels with their probabilities, a line of JSON each.

    For models that read two texts, a JSON line (--jsonl) has the second one in the field `pair`. A line that
    fails has an `error` in the place of its `labels`; the exit status is 1 then.
    """

    def request(values: Sequence[Any]) -> ClassifyRequest:
        return ClassifyRequest(
            texts=[value[0] for value in values],
            pairs=[value[1] for value in values if value[1] is not None],
            model=model,
            multi_label=multi_label,
            top_k=top_k,
            truncate=truncate,
            truncate_side=truncate_side,
        )

    def taken(end: End) -> list[dict[str, Any]]:
        return [{"labels": [label.model_dump() for label in found.labels]} for found in end.classifications]

    async def work() -> int:
        async with options.open_client(redis_url, queue, kind="classify", model=model) as fleet:
            more = Options(lane=lane, deadline_s=deadline)
            asked = partial(together, fleet, request=request, taken=taken, more=more)
            item = partial(text_item, jsonl=jsonl, keep=text, pair=True)
            out = LineOutput(output, resume=resume)
            return await LineJob(fleet, lines, out, item, asked, fail_fast).run()

    lines = Lines.of(source or (), file)
    with leaving_quietly():
        raise typer.Exit(run(work()))
