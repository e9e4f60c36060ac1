"""`streamfleet keys`: who may ask the gateway, and how much."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Annotated

import typer

from streamfleet_common.errors import InvalidRequest, RequestNotFound
from streamfleet_producer.cli import options
from streamfleet_producer.cli.terminal import EXIT_CODES, Command, Group, print_json, print_table, say
from streamfleet_producer.gateway.key_file import (
    KeyEntry,
    KeyFile,
    TenantEntry,
    hash_of,
    new_key,
    new_tenant,
)

_HEADS = ("tenant", "key", "name", "created", "expires", "open", "open-tokens", "tokens-a-day")
_RIGHT = {"open", "open-tokens", "tokens-a-day"}

keys = typer.Typer(
    name="keys",
    help="Tenants of the gateway: their API keys, and what each may take.",
    cls=Group,
    no_args_is_help=True,
    rich_markup_mode=None,
)

File = Annotated[
    Path,
    typer.Option("--keys-file", envvar="STREAMFLEET_KEYS_FILE", help="Tenants and hashes of their keys."),
]
TenantName = Annotated[str, typer.Argument(metavar="TENANT", help="Letters, digits, `_`, `.` and `-`.")]
MaxOpen = Annotated[
    int | None,
    typer.Option(min=0, help="Unfinished requests in one queue, at most; 0: no limit.", show_default=False),
]
MaxOpenTokens = Annotated[
    int | None,
    typer.Option(min=0, help="Tokens that these may take together; 0: no limit.", show_default=False),
]
TokensPerDay = Annotated[
    int | None,
    typer.Option(min=0, help="Tokens read and written a day (UTC); 0: no limit.", show_default=False),
]


def add(
    tenant: TenantName,
    *,
    keys_file: File,
    name: Annotated[str, typer.Option(help="What the key is for.")] = "",
    expires: Annotated[
        str | None, typer.Option(metavar="YYYY-MM-DD", help="The first day without it.", show_default=False)
    ] = None,
    max_open_requests: MaxOpen = None,
    max_open_tokens: MaxOpenTokens = None,
    tokens_per_day: TokensPerDay = None,
    json: options.Json = False,
) -> None:
    """Make a key for a tenant, who need not be there before. It is shown once, and kept nowhere."""
    key = new_key()
    today = dt.datetime.now(dt.UTC).date()
    entry = KeyEntry(sha256=hash_of(key), name=name, created=today, expires=_day(expires, today))
    with KeyFile.edited(keys_file) as tenants:
        known = tenants.get(tenant) or new_tenant()
        known = _limited(known, max_open_requests, max_open_tokens, tokens_per_day)
        tenants[tenant] = known.model_copy(update={"keys": (*known.keys, entry)})
    if json:
        print_json({"tenant": tenant, "id": entry.id, "key": key})
    else:
        say(f"key {entry.id} of tenant {tenant}; it is not shown again:")
        print(key)


def limits(
    tenant: TenantName,
    *,
    keys_file: File,
    max_open_requests: MaxOpen = None,
    max_open_tokens: MaxOpenTokens = None,
    tokens_per_day: TokensPerDay = None,
) -> None:
    """Change what a tenant may take in one queue; what is not named stays."""
    with KeyFile.edited(keys_file) as tenants:
        tenants[tenant] = _limited(
            _known(tenants, tenant), max_open_requests, max_open_tokens, tokens_per_day
        )


def revoke(
    key: Annotated[str, typer.Argument(metavar="KEY", help="The id of a key, as `list` shows it.")],
    *,
    keys_file: File,
) -> None:
    """Take a key back; gateways refuse it within a second."""
    with KeyFile.edited(keys_file) as tenants:
        for name, entry in tenants.items():
            kept = tuple(one for one in entry.keys if one.id != key)
            if len(kept) < len(entry.keys):
                tenants[name] = entry.model_copy(update={"keys": kept})
                return
    raise RequestNotFound(f"no key {key}: `streamfleet keys list` shows the ids")


def remove(tenant: TenantName, *, keys_file: File) -> None:
    """Remove a tenant with all its keys."""
    with KeyFile.edited(keys_file) as tenants:
        _known(tenants, tenant)
        del tenants[tenant]


def show(*, keys_file: File, json: options.Json = False) -> None:
    """List tenants, their keys and limits."""
    tenants = KeyFile.read(keys_file).tenants
    if json:
        print_json(
            {
                name: {
                    "keys": [
                        {"id": key.id, **key.model_dump(mode="json", exclude={"sha256"})}
                        for key in entry.keys
                    ],
                    **entry.model_dump(exclude={"secret", "keys"}),
                }
                for name, entry in tenants.items()
            }
        )
        return
    rows = []
    for name, entry in sorted(tenants.items()):
        limits_ = (entry.max_open_requests, entry.max_open_tokens, entry.tokens_per_day)
        most = [str(limit or "-") for limit in limits_]
        for key in entry.keys or (None,):
            about = ("-", "-", "-", "-")
            if key is not None:
                about = (key.id, key.name or "-", str(key.created), str(key.expires or "-"))
            rows.append([name, *about, *most])
    print_table(_HEADS, rows, _RIGHT)


def _limited(entry: TenantEntry, requests: int | None, tokens: int | None, a_day: int | None) -> TenantEntry:
    wished = {"max_open_requests": requests, "max_open_tokens": tokens, "tokens_per_day": a_day}
    return entry.model_copy(update={name: limit for name, limit in wished.items() if limit is not None})


def _known(tenants: dict[str, TenantEntry], name: str) -> TenantEntry:
    if name not in tenants:
        raise RequestNotFound(f"no tenant {name}; there are: {', '.join(sorted(tenants)) or 'none'}")
    return tenants[name]


def _day(text: str | None, today: dt.date) -> dt.date | None:
    try:
        day = None if text is None else dt.date.fromisoformat(text)
    except ValueError:
        raise InvalidRequest("--expires: a day is wanted, as 2027-01-31") from None
    if day is not None and day <= today:
        raise InvalidRequest(
            f"--expires: the key would not be valid for a moment: name a day after {today}, today's (UTC)"
        )
    return day


for command in (add, limits, revoke, remove):
    keys.command(cls=Command, epilog=EXIT_CODES)(command)
keys.command("list", cls=Command, epilog=EXIT_CODES)(show)
