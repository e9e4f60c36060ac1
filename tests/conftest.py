"""Fixtures every test may ask for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import redis

from streamfleet_common.embedded import EmbeddedBroker

LONG = (
    "chaos/test_chaos.py",
    "fleet/test_up.py",
    "fleet/test_bad_input.py",
    "fleet/test_one_shot.py",
    "worker/test_supervisor_process.py",
    "worker/test_process.py",
    "fleet/test_killed_worker.py",
    "fleet/test_demo.py",
    "delivery/test_stop_points.py",
    "bench/test_one_shot.py",
    "bench/test_benchmarks.py",
    "faults/test_poison.py",
    "faults/test_recovery.py",
    "packaging/test_types.py",
    "packaging/test_wheel.py",
)
"""Files of few tests that take long."""
TOGETHER = (
    "fleet/test_bad_input.py",
    "fleet/test_bulk.py",
    "fleet/test_cache_isolation.py",
    "fleet/test_decide.py",
    "fleet/test_generation.py",
    "fleet/test_openai.py",
    "fleet/test_tgi.py",
    "fleet/test_tgi_client.py",
)
"""One fleet serves them all."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the long files, then those of many tests: nobody waits for what comes last."""
    files = [item.nodeid.partition("::")[0] for item in items]
    counts = Counter(files)
    order = {file: (not file.endswith(LONG), -count, file) for file, count in counts.items()}
    items[:] = [items[at] for at in sorted(range(len(items)), key=lambda at: order[files[at]])]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give out whole files, in the order of the collection, and those that share a fleet to one process."""
    from xdist.scheduler import LoadFileScheduling  # noqa: PLC0415 (only there with it)

    if config.getoption("dist") != "loadfile":
        return None

    class Files(LoadFileScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return "fleet" if file.endswith(TOGETHER) else file

    config.option.loadscopereorder = False
    return Files(config, log)


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedBroker]:
    """A real server, one per test process; ask for `redis_url` unless you mean to break it."""
    with EmbeddedBroker() as broker:
        yield broker


@pytest.fixture
def redis_url(server: EmbeddedBroker) -> str:
    """The URL of a real and empty server."""
    server.start()  # does nothing, unless the test before killed it
    with redis.Redis.from_url(server.url) as client:
        client.flushall()
    return server.url
