"""The exporter's settings, read once at its start."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from streamfleet_common.figures_reader import MOST_QUEUES
from streamfleet_common.message import QueueName
from streamfleet_common.settings import FleetSettings


class ExporterSettings(FleetSettings):
    """Where one exporter listens, and of which queues it tells."""

    exporter_host: str = "127.0.0.1"
    """Where to listen; 0.0.0.0 for everybody who can reach this machine: it asks for no key."""
    exporter_port: int = Field(9108, ge=0, le=65_535)
    """0 picks a free one."""
    exporter_queues: Annotated[tuple[QueueName, ...], Field(max_length=MOST_QUEUES)] = ()
    """The queues it tells of, as a JSON list; none names all that workers announce."""
    exporter_timeout_s: float = Field(5.0, ge=0.1, le=60.0)
    """How long reading Redis may take for one page. Less than Prometheus waits for it."""
    log_format: Literal["auto", "json", "console"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
