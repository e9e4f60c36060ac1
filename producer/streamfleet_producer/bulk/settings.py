"""Settings of bulk jobs, from the environment."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field

from streamfleet_common.message import QueueName
from streamfleet_common.settings import FleetSettings, read

RQ_QUEUE = "streamfleet-bulk"
LEASE_S = 15


class BulkSettings(FleetSettings):
    """Where bulk jobs are kept, and who may run them."""

    rq_url: str | None = None
    """The Redis of the jobs themselves; the fleet's own if not given."""
    rq_queue: QueueName = RQ_QUEUE
    """RQ's queue of bulk jobs."""
    rq_lease_s: Annotated[int, Field(ge=2, le=3600)] = LEASE_S
    """How long an RQ worker may be silent before its job is given to another; seconds."""
    bulk_folder: str = ""
    """Folders whose files jobs may read and write, as in PATH; the current one if not given."""

    @property
    def jobs_url(self) -> str:
        """Where the jobs are kept."""
        return self.rq_url or self.redis_url

    @property
    def folders(self) -> list[Path]:
        """Folders whose files jobs may read and write, as absolute paths without links."""
        named = [name for name in self.bulk_folder.split(os.pathsep) if name]
        return [Path(name).resolve() for name in named or ["."]]


def settings() -> BulkSettings:
    """Read them from the environment.

    Raises:
        InvalidRequest: with every variable that is wrong.
    """
    return read(BulkSettings)
