"""The servers that the tests of failures and topologies run on."""

from __future__ import annotations

from pathlib import Path

import pytest

from topology.nodes import servers


@pytest.fixture(params=servers())
def program(request: pytest.FixtureRequest) -> Path:
    """A server program; the test runs with each that there is."""
    path: Path = request.param
    return path
