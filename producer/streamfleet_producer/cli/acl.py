"""`streamfleet acl`: users of Redis by role, for its file of ACLs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from streamfleet_common import acl as rules
from streamfleet_common.errors import InvalidRequest
from streamfleet_common.secret_files import read_secret
from streamfleet_producer.cli.terminal import print_json, say


def acl(
    role: Annotated[
        str, typer.Argument(metavar="ROLE", help=f"One of {', '.join(rules.ROLES)}.", show_default=False)
    ],
    *,
    user: Annotated[
        str | None, typer.Option(help="The name of the user; else that of the role.", show_default=False)
    ] = None,
    queue: Annotated[
        list[str] | None, typer.Option("--queue", "-q", help="A queue; else all.", show_default=False)
    ] = None,
    tenant: Annotated[
        list[str] | None,
        typer.Option(
            help="Of a producer: a tenant whose requests it may hear; else all.", show_default=False
        ),
    ] = None,
    password_file: Annotated[
        Path | None, typer.Option(help="Its password. The line holds SHA-256 of it.", show_default=False)
    ] = None,
    redis_70: Annotated[
        bool, typer.Option("--redis-7.0", help="For Redis 7.0, which knows fewer commands.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON, for scripts.")] = False,
) -> None:
    """Print a line for the ACL file of Redis: a user with a role.

    docs/security.md says what each role may do. Without a password nobody can log in as this user.
    """
    if role not in rules.ROLES:
        raise InvalidRequest(f"there is no role {role[:40]!r}: take one of {', '.join(rules.ROLES)}")
    password = None if password_file is None else read_secret(password_file)
    line = rules.user(
        user or role,
        role,
        queues=queue or (),
        tenants=tenant or (),
        password=None if password is None else password.encode(),
        is_redis_70=redis_70,
    )
    if password is None:
        say("without --password-file: nobody can log in as this user yet")
    if json:
        print_json({"user": user or role, "role": role, "line": line})
    else:
        print(line)
