"""Servers for the tests of how a fleet is set up."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from deploy.guarded import Guarded, users
from topology.nodes import Node, servers


@pytest.fixture(params=servers(), scope="module")
def _guarded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    file = tmp_path_factory.mktemp("acl") / "users.acl"
    file.write_text(users(request.param))
    with Node(request.param, aclfile=str(file)) as node:
        yield Guarded(node)


@pytest.fixture
def guarded(_guarded: Guarded) -> Guarded:
    """The server, empty, with all forgotten that was refused."""
    _guarded.raw.flushall()
    _guarded.forget()
    return _guarded
