"""`streamfleet gateway`: the HTTP gateway in the foreground."""

from __future__ import annotations

import os
import sys
from typing import Annotated

from typer import Option

from streamfleet_common.errors import Unsupported
from streamfleet_producer.cli.gateway_process import COMMAND
from streamfleet_producer.cli.workers import environment
from streamfleet_producer.early_end import hold
from streamfleet_producer.gateway.extra import missing


def gateway(
    *,
    gateway_host: Annotated[str | None, Option("--host", help="Where to listen.")] = None,
    gateway_port: Annotated[int | None, Option("--port", help="0 picks a free one.")] = None,
    keys_file: Annotated[str | None, Option(help="Tenants and their API keys.")] = None,
    no_worker: Annotated[
        str | None, Option(help="wait, or refuse: requests for a queue without a live worker.")
    ] = None,
    tgi_model: Annotated[str | None, Option(help="What serves TGI's routes.")] = None,
    files_dir: Annotated[str | None, Option(help="A folder for uploaded files and batches.")] = None,
    drain_timeout_s: Annotated[
        float | None, Option(help="How long answers may go on when it is told to stop.")
    ] = None,
    redis_url: Annotated[str | None, Option(help="Where Redis is.")] = None,
) -> None:
    """Serve HTTP: OpenAI's and TGI's routes, and our own. The page at / shows them.

    Ctrl-C lets it finish the answers under way; its exit status is 0 then. What is not given comes from the
    environment (STREAMFLEET_GATEWAY_PORT, STREAMFLEET_KEYS_FILE, ...).
    """
    settings = dict(locals())
    lacking = missing()
    if lacking is not None:
        raise Unsupported(lacking, feature="gateway")
    # The gateway takes this process over: signals and exit status are its own.
    hold()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(COMMAND[0], COMMAND, environment(settings))  # noqa: S606 - no shell is wanted
