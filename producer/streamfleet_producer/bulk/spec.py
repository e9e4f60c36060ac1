"""What an RQ job is told: the only argument of it, JSON and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from streamfleet_common.errors import InvalidRequest
from streamfleet_common.message import Message, QueueName, Tenant, Text, problems
from streamfleet_common.schemas import MAX_RESULT_TTL_MS
from streamfleet_producer.bulk.dialects import DialectName
from streamfleet_producer.bulk.feeder import MAX_WINDOW, WINDOW
from streamfleet_producer.bulk.input_file import MAX_BYTES, MAX_LINES

RESULT_TTL_S = 3600
MAX_PAIRS = 16
_Path = Annotated[str, Field(min_length=1, max_length=4096)]
_Key = Annotated[Text, Field(max_length=64)]
_Value = Annotated[Text, Field(max_length=512)]


class Spec(Message):
    """A bulk job. It names files and a queue, never a server: whoever runs it has a Redis of its own."""

    id: Annotated[str, Field(pattern=r"^batch_[0-9a-f]{32}$")]
    tenant: Tenant = "default"
    queue: QueueName
    input_path: _Path
    output_path: _Path
    error_path: _Path
    dialect: DialectName = "streamfleet"
    window: Annotated[int, Field(ge=1, le=MAX_WINDOW)] = WINDOW
    """At most so many lines are under way."""
    result_ttl_s: Annotated[int, Field(ge=1, le=MAX_RESULT_TTL_MS // 1000)] = RESULT_TTL_S
    """How long an answer waits in Redis for a job that was killed before it was written; seconds."""
    max_lines: Annotated[int, Field(ge=1, le=MAX_LINES)] = MAX_LINES
    max_bytes: Annotated[int, Field(ge=1, le=MAX_BYTES)] = MAX_BYTES
    expires_at: Annotated[int, Field(ge=0)] = 0
    """Unix time at which what is not answered is given up; 0 for never."""
    files_kept_s: Annotated[int, Field(ge=0)] = 0
    """How long after its end output and errors are kept; 0 for ever. Seconds."""
    endpoint: Annotated[str, Field(max_length=64)] = ""
    """Where the caller said that its lines go, for `Batch`."""
    metadata: Annotated[dict[_Key, _Value], Field(max_length=MAX_PAIRS)] = Field(default_factory=dict)
    """The caller's own words, for `Batch`."""

    @classmethod
    def read(cls, fields: Any) -> Spec:
        """The spec in a job's argument, as it came out of Redis.

        Raises:
            InvalidRequest: it is none.
        """
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            faults = problems(error)
            raise InvalidRequest(f"not a bulk job: {'; '.join(faults)}", problems=faults) from None

    @property
    def paths(self) -> tuple[Path, Path, Path]:
        """Input, output and errors."""
        return Path(self.input_path), Path(self.output_path), Path(self.error_path)

    def refuse_outside(self, folders: list[Path]) -> None:
        """Refuse files that lie elsewhere: whoever may write to Redis must not name any file of the machine.

        Raises:
            InvalidRequest: one of the files is not in one of these folders, whatever links lead to it.
        """
        for path in self.paths:
            place = path.resolve()
            if not path.is_absolute() or not any(place.is_relative_to(folder) for folder in folders):
                raise InvalidRequest(
                    f"{path} is outside the folders of this RQ worker ({', '.join(map(str, folders))}): "
                    "start it with `streamfleet bulk worker --folder …` that holds the job's files"
                )
