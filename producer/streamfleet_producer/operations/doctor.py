"""All checks of a fleet: this side, the server, each queue."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import version

from streamfleet_common.acl import Role
from streamfleet_common.codec import VERSION
from streamfleet_common.connections import Connections
from streamfleet_common.errors import BrokerUnavailable, ModelNotFound
from streamfleet_common.settings import Durability
from streamfleet_producer.names import listed
from streamfleet_producer.operations.checkup import Check
from streamfleet_producer.operations.operator_broker import OperatorBroker
from streamfleet_producer.operations.queue_checks import check_queue
from streamfleet_producer.operations.queue_facts import Inspector
from streamfleet_producer.operations.rights import check_rights
from streamfleet_producer.operations.server_checks import check_server
from streamfleet_producer.operations.server_facts import ServerFacts, ask_server


async def examine(
    connections: Connections,
    *,
    level: Durability = "fast",
    queues: Sequence[str] = (),
    role: Role | None = None,
    user: str | None = None,
) -> list[Check]:
    """Look at everything, and change nothing.

    Args:
        connections: to the server.
        level: what the server must keep.
        queues: these alone; else all that there are.
        role: see whether a user has the rights of this role.
        user: that user; else the one we are.

    Raises:
        ModelNotFound: there is no such queue.
    """
    checks = [_client()]
    try:
        server = await ask_server(connections, level)
    except BrokerUnavailable as error:
        return [*checks, Check("server", "reachable", "fault", error.message, _way_in(error))]
    checks += [Check("server", "reachable", "ok", "it answers"), *check_server(server)]
    try:
        names: list[str] | None = await OperatorBroker(connections, "any").queues()
    except BrokerUnavailable as error:
        if error.reason != "forbidden":
            raise
        words = "this user may not list them: name them with --queue"
        checks.append(Check("server", "queues", "unseen", words))
        names = None
    missing = [name for name in queues if names is not None and name not in names]
    if missing:
        raise ModelNotFound(
            f"no worker has ever announced queue {missing[0]!r}; the queues there are: {listed(names or ())}",
            known=names,
        )
    chosen = list(queues) or names or []
    if role is not None:
        checks.append(await check_rights(connections, role, user, chosen, knows_newer=_knows_newer(server)))
    if names == []:
        words = "no worker has ever announced one"
        checks.append(Check("server", "queues", "warning", words, "streamfleet worker --queue NAME"))
    for name in chosen:
        checks += await _queue(connections, name)
    return checks


async def _queue(connections: Connections, name: str) -> list[Check]:
    try:
        return check_queue(await Inspector(connections, name).facts())
    except BrokerUnavailable as error:
        if error.reason != "forbidden":
            raise
        return [
            Check(f"queue {name}", "seen", "unseen", "this user may not look at it: take the role operator")
        ]


def _client() -> Check:
    own = f"streamfleet {version('streamfleet')}, protocol {VERSION}"
    return Check(
        "client", "versions", "ok", f"{own}, redis-py {version('redis')}, Python {platform.python_version()}"
    )


def _knows_newer(server: ServerFacts) -> bool:
    parts = server.facts.version
    return not parts or parts >= (7, 2)


def _way_in(error: BrokerUnavailable) -> str:
    return {
        "forbidden": "the user and password in STREAMFLEET_REDIS_URL, or what the user is granted",
        "loading": "wait: it reads its data from disk",
        "read_only": "point STREAMFLEET_REDIS_URL at the primary",
    }.get(error.reason, "STREAMFLEET_REDIS_URL, and whether the server runs: redis-cli -u URL PING")
