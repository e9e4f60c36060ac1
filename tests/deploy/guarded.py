"""A server whose users are those of our roles."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from streamfleet_common import acl
from streamfleet_common.embedded_binary import ServerBinary
from topology.nodes import HOST, Node

TENANT = "acme"


class Guarded:
    """A server with a user of each role for the queue `q`, and one more producer that hears one tenant."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.raw: Any = node.raw

    def url(self, role: str) -> str:
        """How this user connects."""
        return f"redis://{role}:{password(role)}@{HOST}:{self.node.port}/0"

    def refusals(self) -> list[tuple[str, str]]:
        """Who was refused what, the last first."""
        found = self.raw.execute_command("ACL", "LOG")
        entries = [dict(zip(entry[::2], entry[1::2], strict=True)) for entry in found]
        return [(entry[b"username"].decode(), entry[b"object"].decode()) for entry in entries]

    def forget(self) -> None:
        """Begin the list of refusals anew."""
        self.raw.execute_command("ACL", "LOG", "RESET")


def password(role: str) -> str:
    return f"pass-of-{role}"


def users(program: Path) -> str:
    """A file of ACLs, as `streamfleet acl` prints its lines."""
    is_old = ServerBinary.at(program).version_info < (7, 2)
    options: dict[str, Any] = {"queues": ["q"], "is_redis_70": is_old}
    lines = [acl.user(role, role, password=password(role).encode(), **options) for role in acl.ROLES]
    lines.append("user default on nopass ~* &* +@all")  # the test itself
    options |= {"tenants": [TENANT], "password": password(TENANT).encode()}
    lines.append(acl.user(TENANT, "producer", **options))
    return "\n".join(lines) + "\n"
