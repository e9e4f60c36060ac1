"""`streamfleet keys`: what it does not put into the file."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import pytest

from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.cli import keys
from streamfleet_producer.gateway.key_file import KeyFile


def test_a_key_that_is_dead_at_once_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "keys.json"
    today = dt.datetime.now(dt.UTC).date().isoformat()
    for day in ("2020-01-01", today):
        with pytest.raises(InvalidRequest, match=r"--expires: .* name a day after "):
            keys.add("acme", keys_file=file, expires=day)
    with pytest.raises(InvalidRequest, match="--expires: a day is wanted"):
        keys.add("acme", keys_file=file, expires="tomorrow")
    assert not file.exists()
    assert capsys.readouterr().out == ""
    keys.add("acme", keys_file=file, expires="9999-12-31")
    [key] = KeyFile.read(file).tenants["acme"].keys
    assert key.expires == dt.date(9999, 12, 31)
