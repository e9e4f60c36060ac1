"""`streamfleet rerank`: documents in the order in which they answer a query."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

import typer

from streamfleet_common.errors import InvalidRequest
from streamfleet_common.one_shot import Rank
from streamfleet_producer.cli import line_options, options
from streamfleet_producer.cli.asking import text_item
from streamfleet_producer.cli.lines import Lines
from streamfleet_producer.cli.terminal import (
    in_one_line,
    leaving_quietly,
    print_json,
    print_table,
    run,
    stdout,
)
from streamfleet_producer.cli.worker_watch import WorkerWatch
from streamfleet_producer.ticket import DEADLINE_S, Options

BLOCK = 1024
BESIDE = 16
"""Columns of the table that are not the document's."""

Query = Annotated[str, typer.Argument(metavar="QUERY", help="What the documents answer.", show_default=False)]


def rerank(
    query: Query,
    source: line_options.Source = None,
    *,
    file: line_options.File = None,
    top_n: Annotated[int | None, typer.Option(help="Only the n best.", show_default=False)] = None,
    raw_scores: Annotated[
        bool, typer.Option("--raw-scores", help="The model's own, without bounds.")
    ] = False,
    model: line_options.Model = None,
    truncate: line_options.Truncate = False,
    truncate_side: line_options.TruncateSide = "right",
    jsonl: Annotated[bool, typer.Option("--jsonl", help="Lines are JSON with a field `text`.")] = False,
    queue: options.Queue = None,
    redis_url: options.RedisUrl = options.DEFAULT_URL,
    lane: options.QueueLane = "normal",
    deadline: options.Deadline = DEADLINE_S,
    json: options.Json = False,
) -> None:
    """Put documents in the order in which they answer a query.

    Each is a line of the file; empty ones are left out. With --json each is a line of the answer, with its
    `index` (lines count from 0), its `score` and its `document`.
    """

    async def work() -> None:
        documents = await _documents(Lines.of(source or (), file), jsonl=jsonl)
        async with (
            options.open_client(redis_url, queue, kind="rerank", model=model) as fleet,
            WorkerWatch(fleet),
        ):
            ranks = await fleet.rerank(
                query,
                [text for _, text in documents],
                model=model,
                top_n=top_n,
                raw_scores=raw_scores,
                truncate=truncate,
                truncate_side=truncate_side,
                **Options(lane=lane, deadline_s=deadline),
            )
        (_as_json if json else _as_table)(documents, ranks)

    with leaving_quietly():
        run(work())


async def _documents(lines: Lines, *, jsonl: bool) -> list[tuple[int, str]]:
    """Those that are not empty, with the numbers of their lines."""
    item = partial(text_item, jsonl=jsonl, keep=False)
    found: list[tuple[int, str]] = []
    number = 0
    async for block in lines.blocks(BLOCK):
        for line in block:
            read: Any = item(line.text) if line.text.strip() else None
            fault = line.fault or (read.fault if read else "")
            if fault:
                raise InvalidRequest(f"line {number + 1}: {fault}")
            if read:
                found.append((number, read.value[0]))
            number += 1
    return found


def _as_json(documents: Sequence[tuple[int, str]], ranks: Sequence[Rank]) -> None:
    for rank in ranks:
        number, text = documents[rank.index]
        print_json({"index": number, "score": rank.score, "document": text})


def _as_table(documents: Sequence[tuple[int, str]], ranks: Sequence[Rank]) -> None:
    room = max(20, stdout().width - BESIDE) if sys.stdout.isatty() else None
    rows = [
        [str(place), f"{rank.score:.4f}", in_one_line(documents[rank.index][1], room)]
        for place, rank in enumerate(ranks, 1)
    ]
    print_table(("rank", "score", "document"), rows, {"rank", "score"})
