"""Secrets that lie in files, as Docker, Kubernetes and systemd hand them to a process.

A variable of the environment is seen by whoever may look at the process, and is passed on to its children;
a file is seen by whoever may read it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

from streamfleet_common.errors import InvalidRequest

SUFFIX = "_FILE"
MAX_BYTES = 64 * 1024
SECRETS = ("redis_url", "rq_url")
"""The settings that may hold a password."""


def read_secret(path: Path) -> str:
    """What a file holds, without the line feed at its end.

    Raises:
        InvalidRequest: it cannot be read, is empty, is no text or has several lines.
    """
    try:
        if path.stat().st_size > MAX_BYTES:
            raise InvalidRequest(f"{path} is over {MAX_BYTES} bytes: no secret is so long")
        text = path.read_text("utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} is no text") from None
    secret = text.removesuffix("\n").removesuffix("\r")
    if not secret or "\n" in secret:
        raise InvalidRequest(f"{path} must hold one line, the secret alone")
    return secret


def secret_of(name: str, environment: Mapping[str, str] | None = None) -> str | None:
    """The secret in the file that NAME_FILE names; None where that is not set, or NAME itself is.

    Raises:
        InvalidRequest: the file cannot be read, or holds no secret.
    """
    env = os.environ if environment is None else environment
    named = env.get(name + SUFFIX)
    if not named or name in env:
        return None
    try:
        return read_secret(Path(named))
    except InvalidRequest as error:
        raise InvalidRequest(f"{name}{SUFFIX}: {error.message}") from None


class SecretFiles(PydanticBaseSettingsSource):
    """Settings from files: STREAMFLEET_REDIS_URL_FILE names one that holds what the URL is."""

    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:  # noqa: ARG002
        """The secret of one setting; None where no file is named."""
        if field_name not in SECRETS:
            return None, field_name, False
        prefix = str(self.config.get("env_prefix", ""))
        return secret_of(f"{prefix}{field_name}".upper()), field_name, False

    def __call__(self) -> dict[str, Any]:
        """All of them."""
        found = {}
        for name, field in self.settings_cls.model_fields.items():
            value, key, _ = self.get_field_value(field, name)
            if value is not None:
                found[key] = value
        return found
