"""The worker's process: reads the settings, builds the parts, runs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import uuid
from importlib.metadata import version
from typing import TYPE_CHECKING

import structlog

from streamfleet_common import durability, logs, tracing
from streamfleet_common.broker import Broker
from streamfleet_common.connections import Connections
from streamfleet_common.errors import BrokerUnavailable, StreamfleetError
from streamfleet_common.settings import Durability, misspelled
from streamfleet_worker import engines, interpreter
from streamfleet_worker.health import HealthServer
from streamfleet_worker.metrics import ALONE
from streamfleet_worker.settings import WRONG_SETTINGS, WorkerSettings, chosen
from streamfleet_worker.supervised import Supervision
from streamfleet_worker.tally import Tally
from streamfleet_worker.tally_server import TallyServer
from streamfleet_worker.watchdog import Watchdog
from streamfleet_worker.worker import Worker

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from streamfleet_worker.request_spans import RequestSpans

log = structlog.get_logger()


def main(settings: WorkerSettings | None = None) -> int:
    """Run one worker, with what the environment says if no settings are given.

    The exit status is 0 after a drain, 1 after a failure, 2 for wrong settings.
    """
    settings = settings or chosen()
    if settings is None:
        return WRONG_SETTINGS
    supervision = Supervision.of(os.environ)
    # Unique to this process, so that two lives of one worker are never taken for each other.
    name = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
    if supervision is not None and supervision.name is not None:
        name = supervision.name
    logs.configure(settings.log_format, settings.log_level, queue=settings.queue, worker=name)
    if supervision is None:  # or the supervisor has said so
        for variable, meant in misspelled(WorkerSettings, os.environ).items():
            log.warning("unknown setting", variable=variable, did_you_mean=meant)
    interpreter.disown_forks()
    status, abandoned = asyncio.run(_run(settings, name, supervision))
    if abandoned:
        # Python would wait for a thread that prepares, and tear one that is inside the model's code out of
        # it, which aborts the process.
        sys.stderr.flush()
        os._exit(status)
    return status


async def _run(settings: WorkerSettings, name: str, supervision: Supervision | None) -> tuple[int, bool]:
    """The exit status, and whether a thread is left that only the end of the process will end."""
    worker: Worker | None = None
    logs.watch_loop()
    provider, spans = _tracing(settings.queue, name)
    watchdog = Watchdog(settings.step_limit_s)
    status = 0
    try:
        connections = Connections.open(settings.redis_url)
        try:
            await _check_durability(connections, settings.durability)
            worker = Worker(
                Broker(connections, settings.queue, durability=settings.durability),
                engines.builder(settings),
                name=name,
                max_queue_depth=settings.max_queue_depth,
                version=version("streamfleet"),
                slot=(supervision and supervision.slot) or ALONE,
                max_queue_tokens=settings.max_queue_tokens,
                keep_payload=settings.dead_letter_payload,
                sub_lanes=settings.sub_lanes,
                lease_s=settings.lease_s,
                step_limit_s=settings.step_limit_s,
                drain_timeout_s=settings.drain_timeout_s,
                moved=watchdog.stroke,
                spans=spans,
            )
            await _serve(settings, worker, supervision)
        finally:
            watchdog.close()
            await connections.close()
            if provider is not None:
                await asyncio.to_thread(tracing.close, provider)
    except StreamfleetError as error:
        log.error(str(error), code=error.code)
        if supervision is not None and isinstance(error, BrokerUnavailable):
            supervision.tell("no_broker")
        log.debug("where it came from", exc_info=error)
        status = 1
    return status, worker is not None and worker.abandoned


def _tracing(queue: str, worker: str) -> tuple[TracerProvider | None, RequestSpans | None]:
    if not tracing.wanted(os.environ):
        return None, None
    try:
        from streamfleet_worker.request_spans import RequestSpans, SpanIds  # noqa: PLC0415 (needs an extra)
    except ImportError:
        tracing.warn_missing()
        return None, None
    ids = SpanIds()
    instance = {"service.instance.id": worker, "streamfleet.queue": queue}
    provider = tracing.provider("streamfleet-worker", version("streamfleet"), ids, **instance)
    return provider, None if provider is None else RequestSpans(provider, ids, queue, worker)


async def _check_durability(connections: Connections, level: Durability) -> None:
    """Say what the server lacks for this level.

    Raises:
        BrokerUnavailable: it cannot keep what the level promises.
    """
    refused = []
    for finding in await durability.check(connections, level):
        if finding.severity == "refuse":
            refused.append(finding.words)
        else:
            log.warning(finding.words, setting=finding.setting, durability=level)
    if refused:
        raise BrokerUnavailable(
            f"the server does not keep what STREAMFLEET_DURABILITY={level} promises: {'; '.join(refused)}",
            reason="not_durable",
        )


async def _serve(settings: WorkerSettings, worker: Worker, supervision: Supervision | None) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, worker.stop)
    if supervision is not None:
        supervision.watch(worker.stop)
        worker.metrics.first_success = lambda: supervision.tell("served")
    serves = {"handler": settings.handler} if settings.handler else {"model": settings.model}
    log.info("starting", engine=settings.engine, **serves)
    # Before the model is loaded: a taken port is found at once, and probes see the loading.
    health = _health(settings, worker, supervision)
    try:
        if await worker.start():
            interpreter.settle()
            if supervision is not None:
                supervision.tell("ready")
            await worker.run()
    finally:
        if health is not None:
            health.close()


def _health(
    settings: WorkerSettings, worker: Worker, supervision: Supervision | None
) -> HealthServer | TallyServer | None:
    vitals, registry = worker.vitals, worker.metrics.registry
    if supervision is not None and (wire := supervision.tally_socket()) is not None:
        # The supervisor has the page, of all its workers.
        tally = TallyServer(wire, lambda: Tally.of(vitals.unhealthy(), vitals.unready(), registry.collect()))
        tally.start()
        return tally
    if settings.http_port is None:
        return None
    probes = {"/healthz": vitals.unhealthy, "/readyz": vitals.unready}
    health = HealthServer(settings.http_host, settings.http_port, registry, probes)
    try:
        port = health.start()
    except OSError as error:
        raise StreamfleetError(
            f"cannot listen on {settings.http_host}:{settings.http_port} ({error.strerror or error}): "
            "choose another STREAMFLEET_HTTP_HOST or STREAMFLEET_HTTP_PORT"
        ) from error
    log.info("listening", host=settings.http_host, port=port)
    return health
