"""What a queue knows of its tenants: their shares, what they have open, what they have used."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from datetime import UTC, date, datetime, timedelta
from typing import Any

from streamfleet_common import usage
from streamfleet_common.errors import InvalidRequest, Undecodable
from streamfleet_common.shares import Share, check_tenant
from streamfleet_common.steps import Steps
from streamfleet_common.usage import KEPT_DAYS, Usage


class TenantSteps(Steps):
    """Shares, and the ledger."""

    async def shares(self) -> dict[str, Share]:
        """The shares that count now, by tenant; one that cannot be read limits nobody, and is left out."""
        found: Any = await self._calls.ask(lambda: self._commands.hgetall(self.keys.shares))
        shares = {}
        for tenant, written in found.items():
            try:
                shares[tenant.decode("utf-8", "replace")] = Share.parse(written)
            except Undecodable:
                continue
        return shares

    async def set_shares(self, shares: Mapping[str, Share]) -> None:
        """Put these in the place of all shares there are; `EVERYBODY` names that of all other tenants.

        Raises:
            InvalidRequest: a name that no tenant can have.
        """
        for tenant in shares:
            check_tenant(tenant)
        written: dict[Any, Any] = {tenant: share.written for tenant, share in shares.items()}

        def write() -> Awaitable[Any]:
            # All at once: between two commands, nobody would be limited.
            pipe = self._commands.pipeline(transaction=True)
            pipe.delete(self.keys.shares)
            if written:
                pipe.hset(self.keys.shares, mapping=written)
            return pipe.execute()

        await self._calls.ask(write)

    async def open_of(self, tenant: str) -> tuple[int, int]:
        """How many requests of a tenant are open, and how many tokens these may take."""
        found: Any = await self._calls.ask(
            lambda: self._commands.hmget(self.keys.tenants, [tenant, f"{tenant}|t"])
        )
        requests, tokens = (int(number) if number and number.isdigit() else 0 for number in found)
        return requests, tokens

    async def usage(self, *, since: date | None = None, tenant: str | None = None) -> list[Usage]:
        """The ledger from this day (UTC) to today, by day and tenant; today alone unless `since` is given.

        Raises:
            InvalidRequest: a name that no tenant can have, or a day that is kept no longer.
        """
        if tenant is not None:
            check_tenant(tenant)
        seconds, _ = await self._calls.ask(self._commands.time)
        today = datetime.fromtimestamp(int(seconds), UTC).date()
        first = today if since is None else since
        if first < today - timedelta(days=KEPT_DAYS):
            raise InvalidRequest(
                f"usage is kept for {KEPT_DAYS} days: ask for {today - timedelta(KEPT_DAYS)} or later"
            )
        days = [first + timedelta(number) for number in range((today - first).days + 1)]

        def ask() -> Awaitable[list[Any]]:
            pipe = self._commands.pipeline(transaction=False)
            for day in days:
                if tenant is None:
                    pipe.hgetall(self.keys.usage(day))
                else:
                    pipe.hmget(self.keys.usage(day), usage.fields_of(tenant))
            return pipe.execute()

        rows: list[Usage] = []
        for day, found in zip(days, await self._calls.ask(ask) if days else [], strict=True):
            if tenant is not None:
                names = [name.encode() for name in usage.fields_of(tenant)]
                found = [pair for pair in zip(names, found, strict=True) if pair[1] is not None]  # noqa: PLW2901
            rows += usage.parse(self.keys.queue, day, found)
        return rows
