"""Whose key it is, as the key file says at that moment."""

from __future__ import annotations

import datetime as dt
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.gateway.key_file import KeyEntry, KeyFile, TenantEntry, hash_of, new_key, new_tenant
from streamfleet_producer.gateway.keys import ANYBODY, KeyRing

DAY = dt.date(2027, 1, 31)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.day = DAY

    def ring(self, path: Path | None) -> KeyRing:
        return KeyRing(path, now=lambda: self.now, today=lambda: self.day)


def entry(key: str, **fields: Any) -> KeyEntry:
    # Not by the code under test: what the file keeps is SHA-256, and nothing else.
    return KeyEntry(sha256=hashlib.sha256(key.encode()).hexdigest(), created=DAY, **fields)


def add(path: Path, tenant: str, *keys: KeyEntry, **limits: int) -> None:
    with KeyFile.edited(path) as tenants:
        tenants[tenant] = new_tenant().changed({"keys": keys, **limits})


def test_without_a_file_everybody_is_the_default_tenant() -> None:
    assert Clock().ring(None).tenant(None) is ANYBODY
    assert Clock().ring(None).tenant("Bearer whatever") is ANYBODY


def test_a_key_names_its_tenant_and_nothing_else_does(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path, "acme", entry("one"), entry("two"))
    add(path, "other", entry("three"))
    ring = Clock().ring(path)
    named = {key: ring.tenant(f"Bearer {key}") for key in ("one", "two", "three")}
    assert {key: tenant.name for key, tenant in named.items() if tenant} == {
        "one": "acme",
        "two": "acme",
        "three": "other",
    }
    secrets = {tenant.secret for tenant in named.values() if tenant}
    assert len(secrets) == 2
    assert all(secret is not None and len(secret) == 32 for secret in secrets)
    for wrong in (None, "", "Bearer", "Bearer ", "one", "Basic one", "Bearer One", "Bearer one two"):
        assert ring.tenant(wrong) is None
    assert ring.tenant("bearer  one ") == named["one"]


def test_the_file_holds_no_key_and_is_the_owners_alone(tmp_path: Path) -> None:
    path, key = tmp_path / "keys.json", new_key()
    add(path, "acme", KeyEntry(sha256=hash_of(key), created=DAY))
    assert key not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(key) >= 3 + 43  # 256 bits, six to a character
    assert new_key() != key


def test_a_change_counts_within_a_second(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    add(path, "acme", entry("old"))
    ring = clock.ring(path)
    add(path, "acme", entry("new"))
    assert ring.tenant("Bearer old") is not None
    clock.now += 1.0
    assert ring.tenant("Bearer old") is None
    assert ring.tenant("Bearer new") is not None
    assert ring.changes == 2


@pytest.mark.parametrize("broken", ["", "{", '{"tenants": []}', '{"tenants": {"a b": {}}}'])
def test_a_broken_file_leaves_the_keys_of_before(tmp_path: Path, broken: str) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    add(path, "acme", entry("key"))
    ring = clock.ring(path)
    path.write_text(broken)
    clock.now += 1.0
    assert ring.tenant("Bearer key") is not None
    path.unlink()
    clock.now += 1.0
    assert ring.tenant("Bearer key") is not None
    add(path, "acme")
    clock.now += 1.0
    assert ring.tenant("Bearer key") is None


def test_a_gateway_does_not_begin_with_a_broken_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(InvalidRequest, match=r"no key file .*streamfleet keys add"):
        Clock().ring(path)
    path.write_text(json.dumps({"tenants": {"acme": {"secret": 7, "spelt": 1}}}))
    with pytest.raises(InvalidRequest) as caught:
        Clock().ring(path)
    assert len(caught.value.problems) == 2


def test_a_key_is_valid_until_the_day_it_expires(tmp_path: Path) -> None:
    path, clock = tmp_path / "keys.json", Clock()
    add(path, "acme", entry("key", expires=DAY + dt.timedelta(days=1)))
    ring = clock.ring(path)
    assert ring.tenant("Bearer key") is not None
    clock.day += dt.timedelta(days=1)
    assert ring.tenant("Bearer key") is None


def test_an_edit_that_is_not_valid_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path, "acme", entry("key"), max_open_requests=3)
    before = path.read_bytes()
    with pytest.raises(InvalidRequest), KeyFile.edited(path) as tenants:
        tenants["a b"] = new_tenant()
    with pytest.raises(InvalidRequest), KeyFile.edited(path):
        raise InvalidRequest("while it was edited")
    assert path.read_bytes() == before
    read: TenantEntry = KeyFile.read(path).tenants["acme"]
    assert (read.max_open_requests, read.max_open_tokens, read.tokens_per_day) == (3, 0, 0)
