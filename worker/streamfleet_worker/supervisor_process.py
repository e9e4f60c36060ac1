"""The supervisor's process: opens the workers' door, starts them, and brings it the signals.

It does not import the engine: it has to stay small, and alive when a worker takes all memory.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

import structlog

from streamfleet_common import logs
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.errors import BrokerUnavailable, StreamfleetError
from streamfleet_common.settings import misspelled
from streamfleet_worker.child import Child
from streamfleet_worker.settings import WorkerSettings
from streamfleet_worker.supervised import Supervision
from streamfleet_worker.supervisor import Supervisor

if TYPE_CHECKING:
    from streamfleet_worker.host_page import HostPage

# `-P`: a file called like one of our imports, in the folder where the user happens to be, is none of ours.
COMMAND = (sys.executable, "-P", "-m", "streamfleet_worker")
BACKLOG = 128
HUGE_PAGES: Mapping[str, str] = MappingProxyType({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"})
"""Lets the C library of a worker ask for huge pages, which it must be told before the process starts. A step
reads all of the model's weights, and is about a twentieth faster so. Other systems take no notice."""

log = structlog.get_logger()


def main(settings: WorkerSettings, command: Sequence[str] = COMMAND) -> int:
    """Keep `settings.workers` processes of `command`; the exit status is the supervisor's, see its `run`."""
    supervision = Supervision.of(os.environ)
    name = f"{socket.gethostname()}:{os.getpid()}"
    logs.configure(settings.log_format, settings.log_level, queue=settings.queue, supervisor=name)
    for variable, meant in misspelled(WorkerSettings, os.environ).items():
        log.warning("unknown setting", variable=variable, did_you_mean=meant)
    try:
        return asyncio.run(_run(settings, command, name, supervision))
    except StreamfleetError as error:
        log.error(str(error), code=error.code)
        return 1


async def _run(
    settings: WorkerSettings, command: Sequence[str], name: str, supervision: Supervision | None
) -> int:
    environment = {**HUGE_PAGES, **os.environ, "STREAMFLEET_WORKERS": "0"}
    tells = settings.http_port is not None
    with contextlib.ExitStack() as stack:
        door = stack.enter_context(_door(settings)) if tells else None
        page: HostPage | None = None

        def start(number: int, served: Callable[[], None]) -> Child:
            # Unique to each life of a worker, so that one life's work is never taken for another's.
            child_name = f"{name}.{number}:{uuid.uuid4().hex[:8]}"
            child = Child(command, child_name, environment, str(number), tells=tells, served=served)
            if page is not None and child.tally is not None:
                child.tally.heard = partial(page.heard, child)
            return child

        connections = Connections.open(settings.redis_url)
        try:
            broker = Broker(connections, settings.queue)
            supervisor = Supervisor(
                settings.workers,
                start,
                broker.hand_back,
                drain_timeout_s=settings.drain_timeout_s,
                lease_s=settings.lease_s,
                max_crashes=settings.max_crashes,
            )
            if door is not None:
                page = stack.enter_context(_served(settings, supervisor, door))
                reading = asyncio.create_task(page.keep())
                stack.callback(reading.cancel)
            _listen_to_signals(supervisor, supervision)
            # So that there is a connection when it is needed, also to a Redis that answers slowly.
            warming = asyncio.create_task(_warm_up(broker, name))
            try:
                return await supervisor.run()
            finally:
                warming.cancel()
        finally:
            await connections.close()


def _listen_to_signals(supervisor: Supervisor, supervision: Supervision | None) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.stop)
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as `nohup` would have it
        # A terminal that goes away takes with it what runs in it.
        loop.add_signal_handler(signal.SIGHUP, supervisor.stop if os.isatty(0) else supervisor.roll)
    if supervision is not None:
        supervision.watch(supervisor.orphaned)


def _door(settings: WorkerSettings) -> socket.socket:
    """The listening socket.

    Raises:
        StreamfleetError: the port is taken.
    """
    try:
        door = socket.create_server((settings.http_host, settings.http_port or 0), backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        why = getattr(error, "strerror", None) or error
        raise StreamfleetError(
            f"cannot listen on {settings.http_host}:{settings.http_port} ({why}): choose another "
            "STREAMFLEET_HTTP_HOST or STREAMFLEET_HTTP_PORT"
        ) from error
    door.setblocking(False)
    return door


@contextlib.contextmanager
def _served(settings: WorkerSettings, supervisor: Supervisor, door: socket.socket) -> Iterator[HostPage]:
    """The page of all workers, served at the door."""
    # Not needed by who wants none.
    from prometheus_client import CollectorRegistry  # noqa: PLC0415

    from streamfleet_worker.health import HealthServer  # noqa: PLC0415
    from streamfleet_worker.host_page import HostPage  # noqa: PLC0415

    page = HostPage(supervisor, settings.queue)
    registry = CollectorRegistry()
    registry.register(page)
    probes = {"/healthz": page.unhealthy, "/readyz": page.unready}
    server = HealthServer(settings.http_host, 0, registry, probes, door)
    log.info("listening", host=settings.http_host, port=server.start())
    try:
        yield page
    finally:
        server.close()


async def _warm_up(broker: Broker, name: str) -> None:
    with contextlib.suppress(BrokerUnavailable):
        # Nobody of that name ever held anything.
        await broker.hand_back(name, crashed=False)
