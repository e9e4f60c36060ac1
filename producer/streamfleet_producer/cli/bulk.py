"""`streamfleet bulk`: files of requests, answered by RQ jobs that outlive whoever started them."""

from __future__ import annotations

import asyncio
import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from streamfleet_common.errors import Unsupported
from streamfleet_common.schemas import Failure
from streamfleet_producer.bulk.batch import Batch
from streamfleet_producer.bulk.feeder import MAX_WINDOW, WINDOW
from streamfleet_producer.bulk.plan import Plan
from streamfleet_producer.bulk.settings import BulkSettings, settings
from streamfleet_producer.cli import options
from streamfleet_producer.cli.progress import Progress
from streamfleet_producer.cli.terminal import (
    EXIT_CODES,
    FAILED,
    Command,
    Group,
    in_one_line,
    print_json,
    print_table,
    program,
    run,
    say,
)

if TYPE_CHECKING:
    from streamfleet_producer.bulk.batches import Batches

LOOK_EVERY_S = 0.3
PLAN = Plan()
_HEADS = ("id", "status", "total", "completed", "failed", "queue", "output")
_RIGHT = {"total", "completed", "failed"}

BatchId = Annotated[
    str, typer.Argument(metavar="ID", help="The job's id, as `bulk run` printed it.", show_default=False)
]
RqUrl = Annotated[
    str | None,
    Option(
        "--rq-url", help="The Redis of the jobs (STREAMFLEET_RQ_URL); else the fleet's.", show_default=False
    ),
]
FleetUrl = Annotated[
    str | None,
    Option("--redis-url", help="Where Redis is (STREAMFLEET_REDIS_URL).", show_default=False),
]

bulk = typer.Typer(
    name="bulk",
    help="Files of requests, answered by jobs that go on.",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
)


@bulk.command("run", cls=Command, epilog=EXIT_CODES)
def run_(
    source: Annotated[Path, typer.Argument(metavar="IN.JSONL", help="A request on each line.")],
    output: Annotated[Path, typer.Argument(metavar="OUT.JSONL", help="Where answers go; a new file.")],
    *,
    errors: Annotated[
        Path | None,
        Option(
            "--errors",
            help="Where errors go; else beside the output, as OUT.errors.jsonl.",
            show_default=False,
        ),
    ] = None,
    queue: options.Queue = None,
    openai: Annotated[bool, Option("--openai", help="Lines have the form of OpenAI's batches.")] = False,
    window: Annotated[int, Option(min=1, max=MAX_WINDOW, help="Lines under way, at most.")] = WINDOW,
    expires: Annotated[int, Option(min=0, help="Seconds after which the rest is given up; 0 never.")] = 0,
    detach: Annotated[bool, Option("--detach", help="Do not wait for its end.")] = False,
    redis_url: FleetUrl = None,
    rq_url: RqUrl = None,
    json: options.Json = False,
) -> None:
    """Answer every line of a file.

    A job does it, so Ctrl-C leaves it running. Each line is answered once in the output or the error file, in
    whatever order; lines are told apart by their `custom_id`. The exit status is 1 if a line failed.
    """
    told = _told(redis_url, rq_url)
    with _batches(told) as batches:
        batch = batches.create(
            source,
            output,
            errors or output.with_name(f"{output.stem}.errors.jsonl"),
            fleet_queue=queue or run(_only_queue(told)),
            dialect="openai" if openai else "streamfleet",
            window=window,
            expires_in_s=expires,
        )
        if detach:
            if json:
                print_json(_document(batch))
            else:
                print(batch.id)
            return
        _wait(batches, batch.id, json=json)


@bulk.command(cls=Command, epilog=EXIT_CODES)
def status(
    id: BatchId,  # noqa: A002 (the word of the whole API)
    *,
    wait: Annotated[bool, Option("--wait", help="Show how far it is until it ends.")] = False,
    redis_url: FleetUrl = None,
    rq_url: RqUrl = None,
    json: options.Json = False,
) -> None:
    """Show where a job stands, or wait for its end."""
    with _batches(_told(redis_url, rq_url)) as batches:
        if wait:
            _wait(batches, id, json=json)
        else:
            _show(batches.get(id), json=json)


@bulk.command(cls=Command, epilog=EXIT_CODES)
def cancel(
    id: BatchId,  # noqa: A002
    *,
    redis_url: FleetUrl = None,
    rq_url: RqUrl = None,
    json: options.Json = False,
) -> None:
    """End a job early: what is under way is cancelled, what is answered is kept."""
    with _batches(_told(redis_url, rq_url)) as batches:
        _show(batches.cancel(id), json=json)


@bulk.command("list", cls=Command, epilog=EXIT_CODES)
def list_(
    *,
    limit: Annotated[int, Option(min=1, max=100, help="The newest so many.")] = 20,
    redis_url: FleetUrl = None,
    rq_url: RqUrl = None,
    json: options.Json = False,
) -> None:
    """List the jobs, newest first."""
    with _batches(_told(redis_url, rq_url)) as batches:
        found = batches.list(limit=limit)
    if json:
        print_json([_document(batch) for batch in found])
    elif found:
        print_table(_HEADS, [_row(batch) for batch in found], _RIGHT)
    else:
        say("no bulk jobs")


@bulk.command(cls=Command, epilog=EXIT_CODES)
def worker(
    *,
    folder: Annotated[
        list[Path] | None,
        Option(
            help="A folder whose files jobs may read and write; else the current one.", show_default=False
        ),
    ] = None,
    lease: Annotated[
        int | None,
        Option(min=2, help="Seconds of silence after which its job is another's.", show_default=False),
    ] = None,
    burst: Annotated[bool, Option("--burst", help="End when no job is left.")] = False,
    redis_url: FleetUrl = None,
    rq_url: RqUrl = None,
) -> None:
    """Run an RQ worker for bulk jobs in the foreground.

    It runs streamfleet's own jobs and no other, whatever stands in Redis, on files in its folders. Ctrl-C
    lets another worker go on with its job. Start it again if it is killed, and several for several jobs at
    once.
    """
    _need_rq()
    from streamfleet_producer.bulk.worker import serve  # noqa: PLC0415 - needs the extra

    serve(_told(redis_url, rq_url, folder, lease), burst=burst)


@bulk.command(cls=Command, epilog=EXIT_CODES)
def cron(
    *,
    warm_up: Annotated[
        list[str] | None, Option(metavar="QUEUE", help="Ask this queue for next to nothing, now and then.")
    ] = None,
    replay_dead: Annotated[
        list[str] | None, Option(metavar="QUEUE", help="Send the dead letters of this queue again, slowly.")
    ] = None,
    replay_rate: Annotated[float, Option(help="Dead letters a minute.")] = PLAN.replay_per_minute,
    dead_days: Annotated[
        float, Option(min=0, help="Days after which dead letters go.")
    ] = PLAN.dead_kept_days,
    redis_url: FleetUrl = None,
    rq_url: RqUrl = None,
) -> None:
    """Put the jobs of upkeep into the queue in time: sweeps, old files, old dead letters.

    One of these for a fleet is enough; `streamfleet bulk worker` runs the jobs.
    """
    plan = Plan(
        dead_kept_days=dead_days,
        warm_up_queues=tuple(warm_up or ()),
        replay_queues=tuple(replay_dead or ()),
        replay_per_minute=replay_rate,
    )
    _need_rq()
    from streamfleet_producer.bulk.schedule import serve_cron  # noqa: PLC0415 - needs the extra

    serve_cron(_told(redis_url, rq_url), plan)


# --- parts


def _need_rq() -> None:
    if find_spec("rq") is None:
        raise Unsupported(
            "bulk jobs need the Python package 'rq': pip install 'streamfleet[bulk]'", feature="bulk"
        )


def _told(
    redis_url: str | None, rq_url: str | None, folders: list[Path] | None = None, lease_s: int | None = None
) -> BulkSettings:
    told = settings()
    changes: dict[str, Any] = {
        "redis_url": redis_url,
        "rq_url": rq_url,
        "rq_lease_s": lease_s,
        "bulk_folder": os.pathsep.join(map(str, folders)) if folders else None,
    }
    return told.model_copy(update={name: value for name, value in changes.items() if value is not None})


def _batches(told: BulkSettings) -> Batches:
    _need_rq()
    from streamfleet_producer.bulk.batches import Batches  # noqa: PLC0415 - needs the extra

    return Batches(told.jobs_url, told.rq_queue, lease_s=told.rq_lease_s)


async def _only_queue(told: BulkSettings) -> str:
    async with options.open_client(told.redis_url, None) as fleet:
        return fleet.queue


def _wait(batches: Batches, id: str, *, json: bool) -> None:  # noqa: A002
    try:
        batch = run(_followed(batches, id))
    except typer.Exit:
        say(
            f"{id} goes on: `{program()} bulk status {id} --wait` comes back to it, "
            f"`{program()} bulk cancel {id}` ends it",
            "yellow",
        )
        raise
    _show(batch, json=json)
    if batch.status != "completed" or batch.counts.failed:
        raise typer.Exit(FAILED)


async def _followed(batches: Batches, id: str) -> Batch:  # noqa: A002
    """Show how far a job is until it ends."""
    batch = await asyncio.to_thread(batches.get, id)
    is_warned = False
    shown = 0
    with Progress(batch.counts.total, to_terminal=False) as progress:
        while not batch.is_over:
            done = batch.counts.completed + batch.counts.failed
            progress.advance(done - shown)
            shown = done
            if not is_warned and not await asyncio.to_thread(batches.workers):
                is_warned = True
                progress.say(
                    f"no RQ worker serves bulk jobs now: start one with `{program()} bulk worker` "
                    f"in a folder that holds the files; {id} waits for it"
                )
            await asyncio.sleep(LOOK_EVERY_S)
            batch = await asyncio.to_thread(batches.get, id)
    return batch


def _show(batch: Batch, *, json: bool) -> None:
    if json:
        print_json(_document(batch))
        return
    counts = batch.counts
    print(
        f"{batch.id}: {batch.status}, {counts.completed} answered, {counts.failed} failed, "
        f"{counts.in_flight} under way, {counts.total} in all"
    )
    if batch.error is not None:
        say(batch.error.message, "red")
    elif counts.failed:
        say(f"see {batch.spec.error_path}", "yellow")


def _row(batch: Batch) -> list[str]:
    counts = batch.counts
    numbers = (counts.total, counts.completed, counts.failed)
    return [
        batch.id,
        batch.status,
        *map(str, numbers),
        batch.spec.queue,
        in_one_line(batch.spec.output_path, None),
    ]


def _document(batch: Batch) -> dict[str, Any]:
    counts = batch.counts
    return {
        "id": batch.id,
        "status": batch.status,
        "queue": batch.spec.queue,
        "input": batch.spec.input_path,
        "output": batch.spec.output_path,
        "errors": batch.spec.error_path,
        "counts": {
            "total": counts.total,
            "completed": counts.completed,
            "failed": counts.failed,
            "in_flight": counts.in_flight,
        },
        "created_at": batch.created_at,
        "times": batch.times,
        "runs": batch.runs,
        "error": None if batch.error is None else Failure.of(batch.error).model_dump(mode="json"),
    }
