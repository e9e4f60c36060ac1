"""Files in a folder: bounded, expiring, and each tenant's own."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from streamfleet_common.errors import InvalidRequest, RequestNotFound
from streamfleet_producer.gateway.file_store import FileStore
from streamfleet_producer.gateway.refusals import BodyTooLarge


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> FileStore:
    return FileStore(tmp_path / "files", max_file_bytes=100, max_files_bytes=250, ttl_s=60, clock=clock)


def everything(store: FileStore) -> list[str]:
    return sorted(name for _, _, names in os.walk(store.folder) for name in names)


def test_what_is_uploaded_is_there(store: FileStore) -> None:
    file = store.add("acme", io.BytesIO(b"one\ntwo\n"), "in.jsonl")
    known, path = store.get("acme", file.id)
    assert known == file
    assert path.read_bytes() == b"one\ntwo\n"
    assert (file.filename, file.purpose) == ("in.jsonl", "batch")
    assert (file.created_at, file.expires_at) == (1_000_000, 1_000_060)
    assert store.total_bytes() == 8
    store.delete("acme", file.id)
    assert everything(store) == []


def test_a_file_is_kept_as_long_as_it_says_and_no_longer_than_any(store: FileStore, clock: Clock) -> None:
    short = store.add("acme", io.BytesIO(b"x"), "x", ttl_s=20)
    long = store.add("acme", io.BytesIO(b"x"), "x", ttl_s=100)
    assert (short.expires_at, long.expires_at) == (1_000_020, 1_000_060)
    store.hold("acme", short.id, 30)
    store.hold("acme", long.id, 30)
    assert [store.get("acme", file.id)[0].expires_at for file in (short, long)] == [1_000_030, 1_000_060]
    clock.now += 29
    assert store.remove_expired() == 0
    clock.now += 1
    assert store.remove_expired() == 1
    with pytest.raises(RequestNotFound):
        store.hold("acme", short.id, 30)


def test_a_tenant_sees_its_own_files_alone(store: FileStore) -> None:
    mine = store.add("acme", io.BytesIO(b"x"), "x")
    for tenant in ("other", ".", "..", "acme_"):
        with pytest.raises(RequestNotFound):
            store.get(tenant, mine.id)
        with pytest.raises(RequestNotFound):
            store.delete(tenant, mine.id)
        assert store.list(tenant) == []
    theirs = store.add("..", io.BytesIO(b"y"), "y")
    assert [file.id for file, _ in store.list("..")] == [theirs.id]
    for tenant in ("._", ".._", "...", "."):
        assert store.list(tenant) == []
        with pytest.raises(RequestNotFound):
            store.get(tenant, theirs.id)
    assert store.get("..", theirs.id)[1].is_relative_to(store.folder)
    assert [file.id for file, _ in store.list("acme")] == [mine.id]


@pytest.mark.parametrize(
    "id_", ["", "x", "../acme", "file-" + "0" * 32, "file-" + "0" * 31 + "/", "file-x.json"]
)
def test_what_is_no_id_names_nothing(store: FileStore, id_: str) -> None:
    with pytest.raises(RequestNotFound):
        store.get("acme", id_)


def test_a_file_and_all_files_are_bounded_and_nothing_is_left_of_a_refused_one(store: FileStore) -> None:
    with pytest.raises(BodyTooLarge, match="max_file_bytes"):
        store.add("acme", io.BytesIO(b"x" * 101), "large")
    assert everything(store) == []
    for tenant in ("acme", "other"):
        store.add(tenant, io.BytesIO(b"x" * 100), "fits")
    with pytest.raises(BodyTooLarge, match="max_files_bytes"):
        store.add("third", io.BytesIO(b"x" * 51), "beside the others")
    store.add("third", io.BytesIO(b"x" * 50), "fits")
    assert store.total_bytes() == 250


def test_files_expire_and_are_removed(store: FileStore, clock: Clock) -> None:
    old = store.add("acme", io.BytesIO(b"x"), "old")
    output, path = store.reserve("acme", "output")
    path.write_bytes(b"y")
    clock.now += 30
    young = store.add("acme", io.BytesIO(b"z"), "young")
    assert {file.id for file, _ in store.list("acme")} == {old.id, output.id, young.id}
    clock.now += 30
    assert [file.id for file, _ in store.list("acme")] == [young.id]
    with pytest.raises(RequestNotFound):
        store.get("acme", old.id)
    assert store.remove_expired() == 2
    assert everything(store) == sorted([young.id, f"{young.id}.json"])


def test_leftovers_go_when_a_file_would(store: FileStore, clock: Clock) -> None:
    file = store.add("acme", io.BytesIO(b"x"), "x")
    folder = store.folder / "acme"
    (folder / "file-leftover").write_bytes(b"torn")
    (folder / "torn.json").write_bytes(b"{")
    for path in folder.iterdir():
        os.utime(path, (clock.now, clock.now))
    clock.now += 59
    assert store.remove_expired() == 0
    clock.now += 1
    assert store.remove_expired() == 3
    assert everything(store) == []
    assert file.expires_at == clock.now


def test_a_folder_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(InvalidRequest, match="files_dir"):
        FileStore(tmp_path / "file" / "folder", max_file_bytes=1, max_files_bytes=1, ttl_s=1)
