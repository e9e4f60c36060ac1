"""OpenAI's own client, of a gateway."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

from gateway_process import Gateway


def client_of(gateway: Gateway, **settings: Any) -> AsyncOpenAI:
    """It tries nothing twice, unless the settings say so."""
    # Without the certificates of the world, whose reading takes a tenth of a second.
    http = DefaultAsyncHttpxClient(verify=False)
    given = {"api_key": "any", "max_retries": 0, "http_client": http, **settings}
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", **given)
