"""Shares: how much of a queue one tenant may have."""

from __future__ import annotations

import re
from dataclasses import dataclass

from streamfleet_common.errors import InvalidRequest, Undecodable

EVERYBODY = "*"
"""Stands for each tenant that has no share of its own."""
MAX_NUMBER = 10**12
_TENANT = re.compile(r"[A-Za-z0-9_.-]{1,64}|\*")
_WRITTEN = re.compile(r"(\d+)\|(\d+)\|(\d+)")


@dataclass(frozen=True, slots=True)
class Share:
    """What one tenant may have of a queue; 0 is no limit.

    Raises:
        InvalidRequest: a number is below 0, or over `MAX_NUMBER`.
    """

    max_open_requests: int = 0
    """Accepted and unfinished."""
    max_open_tokens: int = 0
    """That these may take: prompts, and answers at their longest. Who has nothing open may have any one
    request."""
    tokens_per_day: int = 0
    """Used since midnight UTC, and of what is open."""

    def __post_init__(self) -> None:
        for name in ("max_open_requests", "max_open_tokens", "tokens_per_day"):
            number = getattr(self, name)
            if not isinstance(number, int) or isinstance(number, bool) or not 0 <= number <= MAX_NUMBER:
                raise InvalidRequest(
                    f"{name} cannot be {number!r}: take a whole number from 0 (no limit) to 10¹²"
                )

    @property
    def written(self) -> str:
        """As the queue's hash of shares has it."""
        return f"{self.max_open_requests}|{self.max_open_tokens}|{self.tokens_per_day}"

    @classmethod
    def parse(cls, data: bytes) -> Share:
        """Read what `written` wrote.

        Raises:
            Undecodable: no share.
        """
        found = _WRITTEN.fullmatch(data.decode("utf-8", "replace"))
        if found is None or any(int(number) > MAX_NUMBER for number in found.groups()):
            raise Undecodable("not a tenant's share: was the key written by hand?")
        return cls(*map(int, found.groups()))


def check_tenant(name: str) -> None:
    """Whether a share can be given to a tenant of this name, or to `EVERYBODY`.

    Raises:
        InvalidRequest: it cannot.
    """
    if not _TENANT.fullmatch(name):
        raise InvalidRequest(
            f"{name[:80]!r} names no tenant: take 1 to 64 of letters, digits, '_', '.' and '-', "
            f"or {EVERYBODY!r} for all who have no share of their own"
        )
