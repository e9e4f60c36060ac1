"""`streamfleet schema`: JSON Schema of what is sent, for producers in other languages."""

from __future__ import annotations

import json as jsons
import sys
from typing import Annotated

import typer

from streamfleet_common import wire_schemas
from streamfleet_producer.cli import options
from streamfleet_producer.cli.terminal import print_json, print_table


def schema(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="A message, `event` for any of them, a kind of request, `frame`, `record`, or a script.",
            show_default=False,
        ),
    ] = None,
    *,
    json: options.Json = False,
) -> None:
    """Print the JSON Schema of a message, or what messages there are.

    Without a name, --json prints one schema with all of them in its $defs. On the wire messages are msgpack;
    docs/protocol.md says the rest.
    """
    if name in wire_schemas.FORMS:
        words = wire_schemas.FORMS[name]
        if json:
            print_json({name: words})
        else:
            print(words)
    elif name in wire_schemas.SCRIPTS:
        text = wire_schemas.script(name)
        if json:
            print_json({name: text})
        else:
            sys.stdout.write(text)
    elif name is not None:
        made = wire_schemas.schema(name)
        if json:
            print_json(made)
        else:
            print(jsons.dumps(made, indent=2, ensure_ascii=False))
    elif json:
        print_json(wire_schemas.document())
    else:
        print_table(("name", "what it is"), [(one, _what(one)) for one in _names()])


def _names() -> list[str]:
    return [*wire_schemas.names(), *wire_schemas.FORMS, *wire_schemas.SCRIPTS]


def _what(name: str) -> str:
    """What a name stands for, in a line."""
    if name in wire_schemas.FORMS:
        return f"no map, but said in words: `streamfleet schema {name}`"
    if name in wire_schemas.SCRIPTS:
        return "A script for Redis, its text as it is sent."
    if name == "event":
        return "Any of the events."
    kind = {**wire_schemas.MESSAGES, **wire_schemas.REQUESTS}[name]
    return (kind.__doc__ or "").strip().splitlines()[0]
