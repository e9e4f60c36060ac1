"""`streamfleet up`: a broker, workers and an HTTP gateway on this machine, until Ctrl-C."""

from __future__ import annotations

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from streamfleet_common.connections import redacted
from streamfleet_common.embedded import EmbeddedBroker
from streamfleet_common.errors import BrokerUnavailable, InvalidRequest
from streamfleet_producer.cli.gateway_process import KeptGateway
from streamfleet_producer.cli.options import DEFAULT_URL
from streamfleet_producer.cli.terminal import FAILED, complain, run, say, stderr, stdout
from streamfleet_producer.cli.up_greeting import Example, greeting
from streamfleet_producer.cli.workers import Workers
from streamfleet_producer.client import Client
from streamfleet_producer.gateway.extra import missing

DEFAULT_PORT = 6379
DEFAULT_HTTP_PORT = 8000
PORTS_TRIED = 100
TICK_S = 0.1
DRAIN_S = 45.0
"""Longer than a supervisor gives its workers by its own settings, unless they say otherwise."""
LAST_ANSWERS_S = 1.0
HOST = "127.0.0.1"


def up(
    context: typer.Context,
    *,
    workers: Annotated[int, typer.Option("--workers", "-n", min=1, max=64, help="How many workers.")] = 1,
    model: Annotated[
        str,
        typer.Option(
            envvar="STREAMFLEET_MODEL",
            help="An alias, a folder, a GGUF file, or a hub reference org/name[@revision].",
        ),
    ] = "smollm2",
    handler: Annotated[
        str | None,
        typer.Option(
            envvar="STREAMFLEET_HANDLER",
            metavar="<module:function>",
            help="Serve this function, not a model; the current folder is importable.",
            show_default=False,
        ),
    ] = None,
    queue: Annotated[
        str | None,
        typer.Option(
            "--queue",
            "-q",
            envvar="STREAMFLEET_QUEUE",
            help="Default: the name of the model, or of the handler's module.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Keep the broker's data in this folder; else it goes with the command.", show_default=False
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="The broker's port. Default: 6379, or the next free one.",
            show_default=False,
        ),
    ] = None,
    redis_url: Annotated[
        str | None,
        typer.Option(help="Use this Redis or Valkey server and start none.", show_default=False),
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            envvar="STREAMFLEET_GATEWAY_PORT",
            help="The gateway's port. Default: 8000, or the next free one.",
            show_default=False,
        ),
    ] = None,
    no_gateway: Annotated[bool, typer.Option("--no-gateway", help="Start no HTTP gateway.")] = False,
    device: Annotated[
        str | None, typer.Option(help="auto, cpu, cuda, cuda:1, mps.", show_default=False)
    ] = None,
    precision: Annotated[
        str | None, typer.Option(help="auto, float32, bfloat16, float16, int8.", show_default=False)
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads of each worker's model.", show_default=False)
    ] = None,
    max_batch_size: Annotated[
        int | None, typer.Option(help="Requests in one batch, at most.", show_default=False)
    ] = None,
) -> None:
    """Keep a broker, workers and an HTTP gateway running here.

    It prints where to point a client. What ends is started again. More settings come from the environment
    (STREAMFLEET_MAX_SEQ_LEN, STREAMFLEET_KEYS_FILE, ...). Ctrl-C lets the workers finish what they run (exit
    status 0); a second one ends all at once.
    """
    if redis_url is not None and (data is not None or port is not None):
        raise InvalidRequest(
            "--data and --port are about a broker started here, --redis-url is about another"
        )
    said = context.get_parameter_source("model")
    if handler is not None and said is not None and said.name == "COMMANDLINE":
        raise InvalidRequest("a worker serves either a model or a handler: give --model or --handler")
    name = model if handler is None else handler.partition(":")[0].rpartition(".")[2]
    settings: dict[str, object] = {
        "queue": queue or queue_of(name),
        "model": model,
        "handler": handler,
        "device": device,
        "precision": precision,
        "threads": threads,
        "max_batch_size": max_batch_size,
    }

    def with_gateway(url: str) -> KeptGateway | None:
        return None if no_gateway else _gateway(url, http_port)

    raise typer.Exit(run(_up(workers, settings, redis_url, data, port, with_gateway=with_gateway)))


def queue_of(model: str) -> str:
    """A queue's name for a model: the last part of its reference, as far as a name may hold it."""
    last = model.partition("@")[0].rstrip("/").rpartition("/")[2].removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", last)[:64] or "default"


async def _up(
    count: int,
    settings: dict[str, object],
    redis_url: str | None,
    data: Path | None,
    port: int | None,
    *,
    with_gateway: Callable[[str], KeptGateway | None],
) -> int:
    queue = str(settings["queue"])
    with _broker(redis_url, data, port) as (url, broker):
        async with Client(url, queue) as fleet:
            await fleet.depth()  # whether it can be reached, before anything is started
        gateway = with_gateway(url)
        workers = Workers({**settings, "redis_url": url}, count, _print)
        try:
            plural = "" if count == 1 else "s"
            _print(f"loading   {settings['handler'] or settings['model']} in {count} worker{plural}")
            return await _keep(workers, gateway, broker, url, queue)
        except asyncio.CancelledError:
            # Asked to end, which is how this command is meant to end.
            await _drain(workers, gateway)
            return 0
        finally:
            if gateway is not None:
                gateway.kill()
            workers.kill()


async def _keep(
    workers: Workers, gateway: KeptGateway | None, broker: EmbeddedBroker | None, url: str, queue: str
) -> int:
    """Run until cancelled; gives an exit status if they cannot even start, or the workers no longer do."""
    greeted = False
    while True:
        if gateway is not None:
            gateway.look()
            if gateway.why_not is not None:
                return _give_up(f"the gateway ended while starting: {gateway.why_not}")
        if not workers.has_served and workers.why_one_ended is not None:
            # The next would fare no better.
            return _give_up(f"the worker ended while starting: {workers.why_ended()}")
        if workers.status is not None:
            what = "the workers ended" if workers.has_served else "the worker ended while starting"
            return _give_up(f"{what}: {workers.why_ended()}")
        if not greeted and workers.ready and (gateway is None or gateway.url is not None):
            greeted = True
            await _greet(workers, gateway, url, queue)
        if broker is not None and not broker.is_alive():
            _print("broker    ended; starting it again")
            await asyncio.to_thread(broker.restart)
            _print("broker    is back")
        await asyncio.sleep(TICK_S)


async def _greet(workers: Workers, gateway: KeptGateway | None, url: str, queue: str) -> None:
    where = None if gateway is None else gateway.url
    wants_keys = gateway is not None and gateway.wants_keys
    example = await Example.of(url, queue, workers.facts)
    for words, style in greeting(url, example, where, wants_keys=wants_keys):
        _print(words, style)


async def _drain(workers: Workers, gateway: KeptGateway | None) -> None:
    if stderr().is_terminal:
        say("")  # the line begins with the `^C` that the terminal shows
    say("ending: the workers finish what they run (Ctrl-C again ends all at once)", "dim")
    if gateway is not None:
        gateway.terminate()
    workers.terminate()
    for _ in range(round(DRAIN_S / TICK_S)):
        if workers.status is not None:
            break
        await asyncio.sleep(TICK_S)
    # Its clients get what the workers have finished. What these have handed back nobody answers any more.
    for _ in range(round(LAST_ANSWERS_S / TICK_S)):
        if gateway is None or gateway.status is not None:
            return
        await asyncio.sleep(TICK_S)


@contextmanager
def _broker(
    redis_url: str | None, data: Path | None, port: int | None
) -> Iterator[tuple[str, EmbeddedBroker | None]]:
    """The URL of the broker, and the broker if it is ours."""
    if redis_url is not None:
        _print(f"broker    {redacted(redis_url)}, not started here")
        yield redis_url, None
        return
    chosen = port or _free_port(DEFAULT_PORT, "--port")
    with EmbeddedBroker(data, chosen) as broker:
        kept = f"data in {data}" if data is not None else "data goes with this command"
        url = DEFAULT_URL if chosen == DEFAULT_PORT else f"redis://localhost:{chosen}/0"
        _print(f"broker    Valkey {broker.version} on {url}, {kept}")
        if port is None and chosen != DEFAULT_PORT:
            _print(f"          (port {DEFAULT_PORT} is taken, so it listens on {chosen})")
        # The address it listens on: `localhost` may also lead elsewhere.
        yield broker.url, broker


def _free_port(first: int, option: str) -> int:
    for port in range(first, first + PORTS_TRIED):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            with contextlib.suppress(OSError):
                probe.bind((HOST, port))
                return port
    raise BrokerUnavailable(
        f"no free port from {first} to {first + PORTS_TRIED - 1}: choose one with {option}"
    )


def _gateway(url: str, port: int | None) -> KeptGateway | None:
    lacking = missing()
    if lacking is not None:
        _print(f"gateway   left out: {lacking}")
        return None
    chosen = port or _free_port(DEFAULT_HTTP_PORT, "--http-port")
    if port is None and chosen != DEFAULT_HTTP_PORT:
        _print(f"gateway   (port {DEFAULT_HTTP_PORT} is taken, so it listens on {chosen})")
    return KeptGateway({"redis_url": url, "gateway_port": chosen}, _print)


def _give_up(why: str) -> int:
    complain(why)
    return FAILED


def _print(text: str, style: str = "") -> None:
    stdout().print(Text(text, style=style), soft_wrap=True)
