"""Output and errors: whole lines, one writer, and what is left of them after a crash."""

from __future__ import annotations

import json
import resource
import signal
from pathlib import Path
from typing import Any

import pytest

from streamfleet_common.errors import Conflict, InvalidRequest
from streamfleet_producer.bulk.answered import Answered, id_digest, line_digest
from streamfleet_producer.bulk.result_files import ResultFiles, create, encoded


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    return tmp_path / "out", tmp_path / "err"


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_lines_are_there_once_they_are_written(paths: tuple[Path, Path]) -> None:
    results = ResultFiles.open(*paths)
    results.answer(encoded({"custom_id": "a", "text": "ä\n"}))
    results.refuse(encoded({"custom_id": None, "line": 7}))
    assert lines(paths[0]) == [{"custom_id": "a", "text": "ä\n"}]
    assert lines(paths[1]) == [{"custom_id": None, "line": 7}]
    assert (results.completed, results.failed) == (1, 1)
    results.close()


def test_who_goes_on_knows_what_is_there_and_adds_to_it(paths: tuple[Path, Path]) -> None:
    results = ResultFiles.open(*paths)
    results.answer(encoded({"custom_id": "a"}))
    results.refuse(encoded({"custom_id": "b"}))
    results.refuse(encoded({"custom_id": None, "line": 7}))
    results.close()
    results = ResultFiles.open(*paths)
    assert (results.completed, results.failed) == (1, 2)
    read = results.answered.read
    assert [read(id_digest(name)) for name in "abc"] == [False, False, True]
    assert [read(line_digest(number)) for number in (7, 8)] == [False, True]
    results.answer(encoded({"custom_id": "c"}))
    results.close()
    assert lines(paths[0]) == [{"custom_id": "a"}, {"custom_id": "c"}]


@pytest.mark.parametrize(
    "torn",
    [
        b'{"custom_id":"b","answer":{"te',
        b'{"custom_id":"b"}',
        b"{",
        b"\0\0\0\0",
        b'{"custom_id":"b"\0\0\0}\n',
        b'\0\0\0\n{"custom_id":"b"}\n',
        b'{"custom_id":"a"}\n',
        b'[]\n{"custom_id":"b"}\n',
        b'{"custom_id":null}\n',
        b'{"custom_id":"\xff"}\n',
    ],
)
def test_what_a_crash_has_torn_is_cut_off_and_asked_again(paths: tuple[Path, Path], torn: bytes) -> None:
    paths[0].write_bytes(b'{"custom_id":"a"}\n' + torn)
    results = ResultFiles.open(*paths)
    assert paths[0].read_bytes() == b'{"custom_id":"a"}\n'
    assert results.completed == 1
    assert results.answered.read(id_digest("b")) is True
    results.close()


@pytest.mark.parametrize("torn", [b'{"custom_id":"a","ans', b'{"id":"batch_req_1', b"{", b"\0\0", b""])
def test_a_torn_first_line_leaves_nothing(paths: tuple[Path, Path], torn: bytes) -> None:
    paths[0].write_bytes(torn)
    ResultFiles.open(*paths).close()
    assert paths[0].read_bytes() == b""


@pytest.mark.parametrize("foreign", [b"root:x:0:0\n", b"secret", b"\x7fELF\n", b'{"name": 1}\n', b"{}\n"])
def test_a_file_of_somebody_else_is_left_alone(paths: tuple[Path, Path], foreign: bytes) -> None:
    paths[1].write_bytes(foreign)
    with pytest.raises(InvalidRequest, match="something else"):
        ResultFiles.open(*paths)
    assert paths[1].read_bytes() == foreign


def test_nobody_else_writes_at_the_same_time(paths: tuple[Path, Path]) -> None:
    first = ResultFiles.open(*paths)
    with pytest.raises(Conflict, match="another process"):
        ResultFiles.open(*paths)
    first.close()
    ResultFiles.open(*paths).close()


def test_a_disk_that_is_full_leaves_whole_lines(paths: tuple[Path, Path]) -> None:
    results = ResultFiles.open(*paths)
    line = encoded({"custom_id": "a", "answer": "x" * 60})
    results.answer(line)
    handler, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(line) + 40, limits[1]))
        with pytest.raises(OSError, match="too large"):
            results.answer(encoded({"custom_id": "b", "answer": "y" * 60}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert paths[0].read_bytes() == line
    # Somebody has made room: what comes next is a line of its own.
    results.answer(encoded({"custom_id": "c"}))
    results.close()
    assert [one["custom_id"] for one in lines(paths[0])] == ["a", "c"]


def test_links_are_not_followed(paths: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "target").write_bytes(b"")
    paths[0].symlink_to(tmp_path / "target")
    with pytest.raises(InvalidRequest, match="cannot be written"):
        ResultFiles.open(*paths)


def test_a_new_file_is_made_for_its_owner_alone(tmp_path: Path) -> None:
    create(tmp_path / "new")
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0
    create(tmp_path / "new")  # empty: nothing is lost
    (tmp_path / "old").write_bytes(b"x")
    with pytest.raises(InvalidRequest, match="not empty"):
        create(tmp_path / "old")
    with pytest.raises(InvalidRequest, match="cannot be written"):
        create(tmp_path / "none" / "new")


def test_a_line_is_to_be_answered_once() -> None:
    answered = Answered()
    answered.add(id_digest("old"))
    assert answered.read(id_digest("new")) is True
    assert answered.read(id_digest("new")) is None
    assert answered.read(id_digest("old")) is False
    assert answered.read(id_digest("old")) is None
    assert id_digest("7") != line_digest(7)
