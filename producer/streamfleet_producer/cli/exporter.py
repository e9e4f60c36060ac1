"""`streamfleet exporter`: the exporter of metrics in the foreground."""

from __future__ import annotations

import json
import os
import sys
from typing import Annotated

from typer import Option

from streamfleet_common.errors import Unsupported
from streamfleet_producer.cli.workers import environment
from streamfleet_producer.early_end import hold
from streamfleet_producer.exporter.extra import missing

# `-P`: a file called like one of our imports, in the folder where the user happens to be, is none of ours.
COMMAND = (sys.executable, "-P", "-m", "streamfleet_producer.exporter")


def exporter(
    *,
    exporter_host: Annotated[str | None, Option("--host", help="Where to listen.")] = None,
    exporter_port: Annotated[
        int | None, Option("--port", help="9108 unless given; 0 picks a free one.")
    ] = None,
    queue: Annotated[
        list[str] | None,
        Option("--queue", "-q", help="A queue to tell of; several times for several. All if none."),
    ] = None,
    exporter_timeout_s: Annotated[
        float | None, Option("--timeout-s", help="How long reading Redis may take for one page.")
    ] = None,
    redis_url: Annotated[str | None, Option(help="Where Redis is.")] = None,
) -> None:
    """Serve the queues' figures for Prometheus, from Redis alone.

    It needs no worker alive. Ctrl-C ends it with exit status 0. What is not given comes from the environment
    (STREAMFLEET_EXPORTER_PORT, STREAMFLEET_EXPORTER_QUEUES, ...).
    """
    lacking = missing()
    if lacking is not None:
        raise Unsupported(lacking, feature="exporter")
    settings = {
        "exporter_host": exporter_host,
        "exporter_port": exporter_port,
        "exporter_queues": json.dumps(queue) if queue else None,
        "exporter_timeout_s": exporter_timeout_s,
        "redis_url": redis_url,
    }
    # The exporter takes this process over: signals and exit status are its own.
    hold()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(COMMAND[0], COMMAND, environment(settings))  # noqa: S606 - no shell is wanted
