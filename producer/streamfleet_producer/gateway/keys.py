"""Who may ask: tenants, and the keys that name them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tenant:
    """On whose behalf a request comes. `secret` makes the ids that follow from its idempotency keys."""

    name: str = "default"
    secret: bytes | None = None


ANYBODY = Tenant()
"""Who everybody is where there are no keys."""


class KeyRing:
    """Tells the tenant of a key."""

    def tenant(self, authorization: str | None) -> Tenant | None:  # noqa: ARG002
        """Whom an `Authorization` header names; None if it is missing, or no key of anybody's."""
        return ANYBODY
