"""`streamfleet worker`: a worker, or several, in the foreground."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from typer import Option

from streamfleet_producer.cli.workers import COMMAND, environment


def worker(
    *,
    queue: Annotated[str | None, Option("--queue", "-q", help="The queue it serves.")] = None,
    model: Annotated[
        str | None,
        Option(help="An alias (smollm2), a folder, a GGUF file, or a hub reference org/name[@revision]."),
    ] = None,
    handler: Annotated[
        str | None,
        Option(metavar="<module:function>", help="Serve this function; the current folder is importable."),
    ] = None,
    models_file: Annotated[str | None, Option(help="A TOML file with aliases of models.")] = None,
    engine: Annotated[
        str | None,
        Option(help="auto, generation, micro_batch, or scripted: answers without a model."),
    ] = None,
    device: Annotated[str | None, Option(help="auto, cpu, cuda, cuda:1, mps.")] = None,
    precision: Annotated[str | None, Option(help="auto, float32, bfloat16, float16, int8.")] = None,
    threads: Annotated[int | None, Option(help="CPU threads of the model.")] = None,
    max_batch_size: Annotated[int | None, Option(help="Requests in one batch, at most.")] = None,
    max_delay_ms: Annotated[
        float | None, Option(help="How long a request may wait for a batch to fill.")
    ] = None,
    max_seq_len: Annotated[int | None, Option(help="Tokens of prompt and answer together.")] = None,
    max_queue_depth: Annotated[
        int | None, Option(help="Unfinished requests at which the queue refuses more.")
    ] = None,
    workers: Annotated[
        int | None,
        Option(
            "--workers",
            "-n",
            help="Keep so many, and start again who ends; 0 is one that nobody starts again.",
        ),
    ] = None,
    redis_url: Annotated[str | None, Option(help="Where Redis is.")] = None,
    http_port: Annotated[
        int | None, Option(help="Port of /healthz, /readyz and /metrics; 0 picks a free one.")
    ] = None,
    drain_timeout_s: Annotated[
        float | None, Option(help="How long it finishes its requests when told to stop.")
    ] = None,
) -> None:
    """Run one worker in the foreground, or a supervisor of several.

    Ctrl-C lets it finish its requests; its exit status is 0 then. With --workers, SIGHUP replaces the workers
    one by one, each once its successor is ready. What is not given comes from the
    environment (STREAMFLEET_QUEUE, STREAMFLEET_MODEL, ...), else from the worker's own defaults.
    """
    settings = dict(locals())
    # The worker takes this process over: signals and exit status are its own.
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(COMMAND[0], COMMAND, environment(settings))  # noqa: S606 - no shell is wanted
