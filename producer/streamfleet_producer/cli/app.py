"""All commands of `streamfleet`, put together."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from streamfleet_producer.cli.acl import acl
from streamfleet_producer.cli.bulk import bulk
from streamfleet_producer.cli.call import call
from streamfleet_producer.cli.cancel import cancel
from streamfleet_producer.cli.classify import classify
from streamfleet_producer.cli.dead import dead
from streamfleet_producer.cli.decide import decide
from streamfleet_producer.cli.demo import demo
from streamfleet_producer.cli.doctor import doctor
from streamfleet_producer.cli.drain import drain
from streamfleet_producer.cli.embed import embed
from streamfleet_producer.cli.explain import explain
from streamfleet_producer.cli.exporter import exporter
from streamfleet_producer.cli.gateway import gateway
from streamfleet_producer.cli.keys import keys
from streamfleet_producer.cli.load import load
from streamfleet_producer.cli.move import move
from streamfleet_producer.cli.pause import pause, resume
from streamfleet_producer.cli.queues import queues
from streamfleet_producer.cli.report import report
from streamfleet_producer.cli.rerank import rerank
from streamfleet_producer.cli.result import result
from streamfleet_producer.cli.schema import schema
from streamfleet_producer.cli.status import status
from streamfleet_producer.cli.stream import stream
from streamfleet_producer.cli.submit import submit
from streamfleet_producer.cli.terminal import EXIT_CODES, Command, Group
from streamfleet_producer.cli.top import top
from streamfleet_producer.cli.up import up
from streamfleet_producer.cli.usage import usage
from streamfleet_producer.cli.worker import worker

app = typer.Typer(
    name="streamfleet",
    help="A fleet of inference workers behind Redis streams: validated requests in, tokens out.",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"streamfleet {version('streamfleet')}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[  # noqa: ARG001 - answered by its callback
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    # A model may answer what this terminal's encoding lacks; better a `?` than a crash.
    for file in (sys.stdout, sys.stderr):
        if hasattr(file, "reconfigure"):
            file.reconfigure(errors="replace")


for command in (
    *(demo, up, worker, gateway, exporter),
    *(stream, submit, result, status, explain, cancel),
    *(embed, classify, rerank, decide, call),
    *(queues, top, usage, schema, acl),
    *(pause, resume, drain, move, doctor),
    *(load, report),
):
    app.command(cls=Command, epilog=EXIT_CODES)(command)

app.add_typer(bulk)
app.add_typer(dead)
app.add_typer(keys)
