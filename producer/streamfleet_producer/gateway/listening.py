"""The socket on which a gateway listens."""

from __future__ import annotations

import socket

BACKLOG = 2048
"""Connections that are not accepted yet."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free one.

    It is made with the number of the protocol, not with 0 as `socket.create_server` does: asyncio sends small
    pieces at once only on connections that say they are TCP, and otherwise they wait for 40 ms.

    Raises:
        OSError: the name is unknown, or the port is taken.
    """
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    family, kind, protocol, _, address = found[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(BACKLOG)
    except OSError:
        listening.close()
        raise
    return listening
