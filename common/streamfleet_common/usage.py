"""The ledger: what each tenant has used, by day."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date

KEPT_DAYS = 400
"""How long the scripts keep a day."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What a tenant has used of a queue on a day (UTC, of the end of its requests)."""

    queue: str
    day: date
    tenant: str
    requests: int = 0
    """All that have ended, however."""
    failed: int = 0
    """Those of them that failed, or are dead letters."""
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def __add__(self, other: Usage) -> Usage:
        """The sum, under the names of the first one."""
        return Usage(
            self.queue,
            self.day,
            self.tenant,
            self.requests + other.requests,
            self.failed + other.failed,
            self.prompt_tokens + other.prompt_tokens,
            self.completion_tokens + other.completion_tokens,
        )


FIELDS = ("requests", "failed", "prompt_tokens", "completion_tokens")
"""Of each tenant in a day's hash, behind its name and a bar."""


def fields_of(tenant: str) -> list[str]:
    """What a day's hash says of one tenant."""
    return [f"{tenant}|{name}" for name in FIELDS]


def parse(queue: str, day: date, found: Mapping[bytes, bytes] | Iterable[tuple[bytes, bytes]]) -> list[Usage]:
    """A day of a queue, by tenant; what somebody wrote there by hand is left out."""
    numbers: dict[str, dict[str, int]] = {}
    for field, value in dict(found).items():
        tenant, _, name = field.decode("utf-8", "replace").rpartition("|")
        if name in FIELDS and value.isdigit():
            numbers.setdefault(tenant, {})[name] = int(value)
    return [Usage(queue, day, tenant, **numbers[tenant]) for tenant in sorted(numbers)]
