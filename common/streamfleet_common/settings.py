"""Settings that both sides share, from the environment: every name with the prefix `STREAMFLEET_`."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from streamfleet_common.errors import InvalidRequest
from streamfleet_common.message import QueueName, problems

_S = TypeVar("_S", bound=BaseSettings)


class FleetSettings(BaseSettings):
    """Where the fleet is."""

    model_config = SettingsConfigDict(env_prefix="STREAMFLEET_", frozen=True, extra="ignore")

    redis_url: str = "redis://localhost:6379/0"
    """`redis://`, `rediss://` (TLS) or `unix://`."""
    queue: QueueName = "default"


def read(settings: type[_S]) -> _S:
    """Read settings from the environment.

    Raises:
        InvalidRequest: with every variable that is wrong.
    """
    try:
        return settings()
    except ValidationError as error:
        prefix = settings.model_config.get("env_prefix", "")
        faults = [_shout(prefix + fault) for fault in problems(error)]
        raise InvalidRequest(f"settings are not valid: {'; '.join(faults)}", problems=faults) from None


def _shout(fault: str) -> str:
    # A setting is known to its user by the name of its variable.
    name, colon, rest = fault.partition(":")
    return name.upper() + colon + rest
