"""Settings that both sides share, from the environment: every name with the prefix `STREAMFLEET_`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Literal, TypeVar

from pydantic import ValidationError
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from streamfleet_common.errors import InvalidRequest
from streamfleet_common.message import QueueName, problems
from streamfleet_common.secret_files import SECRETS, SUFFIX, SecretFiles

Durability = Literal["fast", "safe", "replicated"]
"""What "accepted" outlives: a crash of Redis but for its last seconds; any crash of it; the loss of it."""

_S = TypeVar("_S", bound=BaseSettings)
_FIELD = re.compile(r'field "(\w+)"')


class FleetSettings(BaseSettings):
    """Where the fleet is."""

    model_config = SettingsConfigDict(env_prefix="STREAMFLEET_", frozen=True, extra="ignore")

    redis_url: str = "redis://localhost:6379/0"
    """`redis://`, `rediss://` (TLS), `unix://` or `redis+sentinel://host:port,host:port/NAME/0`. One with a
    password lies better in a file, which STREAMFLEET_REDIS_URL_FILE names."""
    queue: QueueName = "default"
    durability: Durability = "fast"

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """What is set otherwise counts; after that, secrets may lie in files."""
        others = (init_settings, env_settings, dotenv_settings, file_secret_settings)
        return (*others, SecretFiles(settings_cls))


def read(settings: type[_S]) -> _S:
    """Read settings from the environment.

    Raises:
        InvalidRequest: with every variable that is wrong.
    """
    prefix = settings.model_config.get("env_prefix", "")
    try:
        return settings()
    except ValidationError as error:
        faults = [_shout(prefix + fault) for fault in problems(error)]
    except SettingsError as error:
        # A list or a map that is not even JSON; the library tells which only in its words.
        field = _FIELD.search(str(error))
        name = _shout(prefix + field[1]) if field else str(error)
        faults = [f'{name}: JSON is wanted, like ["a", "b"] for a list or {{"a": "b"}} for a map']
    raise InvalidRequest(f"settings are not valid: {'; '.join(faults)}", problems=faults)


def misspelled(settings: type[BaseSettings], variables: Iterable[str]) -> dict[str, str]:
    """Variables that are no setting but look like one, each with the one it looks like.

    Others with our prefix are left in peace: a cluster sets some of its own, named after its services.
    """
    prefix = settings.model_config.get("env_prefix", "")
    known = {name.upper() for name in settings.model_fields}
    known |= {name.upper() + SUFFIX for name in SECRETS}
    found = {}
    for variable in variables:
        name = variable.removeprefix(prefix)
        if variable.startswith(prefix) and name not in known:
            for meant in get_close_matches(name, known, n=1, cutoff=0.8):
                found[variable] = prefix + meant
    return found


def _shout(fault: str) -> str:
    # A setting is known to its user by the name of its variable.
    name, colon, rest = fault.partition(":")
    return name.upper() + colon + rest
