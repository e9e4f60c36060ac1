"""The gateway's settings, read once at its start."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from streamfleet_common.message import QueueName
from streamfleet_common.settings import FleetSettings


class GatewaySettings(FleetSettings):
    """How one gateway listens, and what it lets through."""

    gateway_host: str = "127.0.0.1"
    """Where to listen; 0.0.0.0 for everybody who can reach this machine, and then with `keys_file`."""
    gateway_port: int = Field(8000, ge=0, le=65_535)
    """0 picks a free one."""
    gateway_names: tuple[str, ...] = ()
    """Names with dots that it is reached by, as a JSON list. Without `keys_file` no other is answered to:
    whoever has a name can point it here, and a browser would take his page for ours."""
    gateway_queues: tuple[str, ...] = ()
    """The queues that can be reached, as a JSON list; none names all there are."""
    tgi_model: str | None = None
    """What TGI's routes, whose requests name no model, are served by: a model or a queue. Else the only one
    that generates."""
    no_worker: Literal["wait", "refuse"] = "wait"
    """What becomes of a request for a queue that has no live worker: it waits for one until its deadline, or
    it is refused with status 503."""
    keys_file: Path | None = None
    """A file of tenants and their API keys; without one everybody is the tenant "default"."""
    request_timeout_s: float = Field(600.0, gt=0.0, le=86_400.0)
    """The deadline of a request that names none; status 504 after it."""
    max_body_bytes: int = Field(1_048_576, ge=1024, le=1_073_741_824)
    """Of a request's body; files have a bound of their own."""
    max_headers: int = Field(64, ge=8, le=1000)
    """Header fields of a request."""
    max_header_bytes: int = Field(16_384, ge=1024, le=1_048_576)
    """Names and values of a request's header fields together."""
    max_requests: int = Field(4096, ge=1, le=1_000_000)
    """Requests under way; more are refused with status 429."""
    max_connections: int = Field(8192, ge=1, le=1_000_000)
    """Open connections; on more of them every request is refused with status 503."""
    heartbeat_s: float = Field(15.0, gt=0.0, le=600.0)
    """After so long without an event a stream gets a comment, so that nobody between takes it for dead."""
    tls_certificate: Path | None = None
    """A PEM file, the chain included; with `tls_key` the gateway speaks HTTPS."""
    tls_key: Path | None = None
    files_dir: Path | None = None
    """Where uploaded files lie, and what batches answer; without a folder there are no such routes."""
    max_file_bytes: int = Field(100 * 1024 * 1024, ge=1024)
    max_files_bytes: int = Field(10 * 1024**3, ge=1024)
    """Of all files of all tenants together."""
    file_ttl_s: float = Field(30 * 86_400.0, gt=0.0)
    """After so long an uploaded file is deleted."""
    rq_url: str | None = None
    """The Redis of bulk jobs; the fleet's own if not said."""
    rq_queue: QueueName = "streamfleet-bulk"
    """RQ's queue of bulk jobs."""
    tokenizers: dict[str, Path] = Field(default_factory=dict)
    """By queue, the tokenizer.json of its model, as a JSON map: what is too long is then refused at once.
    Needs the extra `tokenizers`. Chat messages are counted by the worker alone, which has their template."""
    drain_timeout_s: float = Field(30.0, ge=0.0, le=3600.0)
    """How long answers may go on once the gateway is told to end."""
    log_format: Literal["auto", "json", "console"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
