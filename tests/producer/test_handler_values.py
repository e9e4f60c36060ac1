"""Tests of what goes to a handler, and of the secrets in it."""

from __future__ import annotations

import datetime as dt

import pytest
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    RootModel,
    Secret,
    SecretBytes,
    SecretStr,
    SerializerFunctionWrapHandler,
    field_serializer,
    model_serializer,
)

from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.handler_values import plain_input


class Login(BaseModel):
    user: str = "ada"
    password: SecretStr = Field(SecretStr("hunter2"), serialization_alias="pass")
    key: SecretBytes = SecretBytes("clé".encode())


class Round(BaseModel):
    logins: tuple[Login, ...] = (Login(), Login(password=SecretStr("")))
    named: dict[int, SecretStr] = {7: SecretStr("seven")}
    born: Secret[dt.date] = Secret(dt.date(2024, 2, 29))
    inner: Secret[Login] = Secret(Login())
    seen: dt.datetime = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    none: SecretStr | None = None


def test_the_secrets_of_a_model_are_sent_as_they_are() -> None:
    login = {"user": "ada", "pass": "hunter2", "key": "clé"}

    assert plain_input(Login()) == login
    assert plain_input(RootModel[SecretStr](SecretStr("x"))) == "x"
    assert plain_input(Round()) == {
        "logins": [login, {**login, "pass": ""}],
        "named": {"7": "seven"},
        "born": "2024-02-29",
        "inner": login,
        "seen": "2026-01-02T00:00:00Z",
        "none": None,
    }


def test_what_is_sent_is_what_was_given_when_it_is_read() -> None:
    class Blob(BaseModel):
        model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

        key: SecretBytes
        sent: bytes

    blob = Blob(key=SecretBytes(b"\xff\xfe"), sent=b"\xff\xfe")

    assert plain_input(blob) == {"key": "__4=", "sent": "__4="}
    with pytest.raises(InvalidRequest, match="input: a Login that has no form in JSON"):
        plain_input(Login(key=SecretBytes(b"\xff")))


def test_what_a_model_makes_of_its_secrets_itself_is_sent() -> None:
    class Short(BaseModel):
        password: SecretStr
        rest: list[SecretStr]

        @field_serializer("password", when_used="json")
        def first(self, value: SecretStr) -> str:
            return value.get_secret_value()[:1]

        @field_serializer("rest", when_used="json")
        def count(self, value: list[SecretStr]) -> int:
            return len(value)

    class Wrapped(BaseModel):
        password: SecretStr

        @model_serializer(mode="wrap")
        def wrapped(self, inner: SerializerFunctionWrapHandler) -> dict[str, object]:
            return {"v": 1, **inner(self)}

    assert plain_input(Short(password=SecretStr("xyz"), rest=[SecretStr("a")])) == {
        "password": "x",
        "rest": 1,
    }
    assert plain_input(Wrapped(password=SecretStr("xyz"))) == {"v": 1, "password": "xyz"}


def test_a_secret_that_is_a_key_is_refused() -> None:
    class Keyed(BaseModel):
        by: dict[SecretStr, int]

    with pytest.raises(InvalidRequest, match="no form in JSON"):
        plain_input(Keyed(by={SecretStr("x"): 1}))
