"""The file of requests: what its lines are, and what is refused before a job begins."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.bulk.input_file import CHUNK_BYTES, MAX_LINE_BYTES, InputFile, Line


async def read(path: Path) -> list[Line]:
    return [line async for line in InputFile(path).lines()]


def written(folder: Path, data: bytes) -> Path:
    path = folder / "in.jsonl"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\n", [Line(1, b"a"), Line(2, b"b")]),
        (b"a\nb", [Line(1, b"a"), Line(2, b"b")]),
        (b"\n\na\r\n \t\r\nb\n\n", [Line(3, b"a\r"), Line(5, b"b")]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", [Line(1, b"a"), Line(2, b"\xef\xbb\xbfb")]),
        (b"\xff\x00\n", [Line(1, b"\xff\x00")]),
    ],
    ids=["plain", "no end", "blank", "byte order mark", "no text"],
)
async def test_lines_are_told_with_their_numbers(tmp_path: Path, data: bytes, lines: list[Line]) -> None:
    path = written(tmp_path, data)
    assert await read(path) == lines
    assert InputFile(path).count() == len(lines)


async def test_lines_are_whole_wherever_a_chunk_ends(tmp_path: Path) -> None:
    lines = [b"%d" % number * (1 + number * 37 % 3000) for number in range(300)]
    path = written(tmp_path, b"\n".join(lines))
    assert path.stat().st_size > 3 * CHUNK_BYTES
    assert await read(path) == [Line(number, line) for number, line in enumerate(lines, 1)]
    assert InputFile(path).count() == 300


@pytest.mark.parametrize("length", [MAX_LINE_BYTES + 1, 5 * MAX_LINE_BYTES])
@pytest.mark.parametrize("end", [b"\nb\n", b""], ids=["amid", "last"])
async def test_too_long_lines_are_told_once_and_not_kept(tmp_path: Path, length: int, end: bytes) -> None:
    path = written(tmp_path, b"a\n" + b"x" * length + end)
    tracemalloc.start()
    try:
        found = await read(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == [Line(1, b"a"), Line(2, None), *([Line(3, b"b")] if end else [])]
    assert peak < 4 * MAX_LINE_BYTES
    assert InputFile(path).count() == len(found)


async def test_the_longest_line_is_taken(tmp_path: Path) -> None:
    path = written(tmp_path, b"x" * MAX_LINE_BYTES + b"\ny")
    assert await read(path) == [Line(1, b"x" * MAX_LINE_BYTES), Line(2, b"y")]


def test_an_input_over_its_bounds_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, b"a\n" * 10)
    assert InputFile(path, max_lines=10, max_bytes=20).count() == 10
    with pytest.raises(InvalidRequest, match="more than 9 lines"):
        InputFile(path, max_lines=9).count()
    with pytest.raises(InvalidRequest, match="20 bytes, at most 19"):
        InputFile(path, max_bytes=19).count()


@pytest.mark.parametrize("data", [b"", b"\n \n\t\n"], ids=["empty", "blank"])
def test_an_input_without_lines_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InvalidRequest, match="no lines"):
        InputFile(written(tmp_path, data)).count()


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none", Path("/dev/zero")):
        with pytest.raises(InvalidRequest, match="there is no file"):
            InputFile(path).count()
