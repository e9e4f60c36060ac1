"""What can be wrong with a line of a bulk file; each is told in the error file, and costs that line alone."""

from __future__ import annotations

from streamfleet_common.errors import DeadlineExceeded, InvalidRequest


class BadLine(InvalidRequest):
    """The line is no request."""

    code = "invalid_line"


class BrokenLine(BadLine):
    """The line is no JSON object."""

    code = "invalid_json_line"


class LongLine(BadLine):
    """The line has more bytes than a line may have; `limit`."""

    code = "line_too_long"
    limit: int


class BadCustomId(BadLine):
    """The line has no `custom_id`, or none that can be one."""

    code = "invalid_custom_id"


class DuplicateCustomId(BadLine):
    """An earlier line has the same `custom_id`."""

    code = "duplicate_custom_id"


class UnknownRoute(BadLine):
    """The line's `method` and `url` name nothing that can be asked in bulk; `known`."""

    code = "invalid_url"
    known: list[str]


class BatchExpired(DeadlineExceeded):
    """The whole job's time was over before this line was answered."""

    code = "batch_expired"
