"""OpenAI's own client, of a gateway."""

from __future__ import annotations

from typing import Any

from openai import AsyncOpenAI

from gateway_process import Gateway


def client_of(gateway: Gateway, **settings: Any) -> AsyncOpenAI:
    """It tries nothing twice, unless the settings say so."""
    return AsyncOpenAI(base_url=f"{gateway.url}/v1", **{"api_key": "any", "max_retries": 0, **settings})
