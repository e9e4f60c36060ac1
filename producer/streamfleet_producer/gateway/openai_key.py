"""Idempotency keys: a request with one, and what it is made of, when it is sent again."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping

from streamfleet_common.errors import RequestNotFound
from streamfleet_producer.client import Client
from streamfleet_producer.gateway.keys import Tenant
from streamfleet_producer.intake import keyed_rid

RETRY = "x-stainless-retry-count"
"""The header in which OpenAI's client tells its own tries; the first one is 0."""
MOST_TRIES = 32
_MAX_CHARS = 256


async def key_to_use(
    client: Client, tenant: Tenant, headers: Mapping[str, str], key: str | None, count: int = 1
) -> str | None:
    """The key under which a request is to be sent on, or the `count` requests that it is made of.

    A request that was given up or came too late has no answer to be given again: its key begins anew. Where
    the client tries again by itself, so does that of one that failed.
    """
    if key is None:
        return None
    is_retry = headers.get(RETRY, "0") != "0"
    dead = ("cancelled", "expired", "failed", "dead") if is_retry else ("cancelled", "expired")
    secret = tenant.name.encode() if tenant.secret is None else tenant.secret

    async def state(one: str | None) -> str:
        try:
            return (await client.status(keyed_rid(secret, one or ""))).state
        except RequestNotFound:
            return ""

    told = key
    for again in range(1, MOST_TRIES):
        # One prompt that fails or is left takes those along that had not ended, and only those.
        states = await asyncio.gather(*map(state, keys_of(told, count)))
        if not any(found in dead for found in states):
            break
        told = _made(key, f"try {again}")
    return told


def keys_of(key: str | None, count: int) -> list[str | None]:
    """The keys of the requests that one request is made of."""
    if key is None:
        return [None] * count
    return [key, *(_made(key, str(place)) for place in range(1, count))]


def _made(key: str, what: str) -> str:
    made = f"{key}\n{what}"  # which no header holds, so that it is nobody's own key
    return made if len(made) <= _MAX_CHARS else hashlib.sha256(made.encode()).hexdigest()
