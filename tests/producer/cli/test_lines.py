"""Lines in and lines out, whatever the files hold."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from streamfleet_common.errors import InvalidRequest
from streamfleet_producer.cli.line_output import LineOutput
from streamfleet_producer.cli.lines import MAX_LINE_BYTES, Line, Lines


def read(lines: Lines, most: int = 1000) -> list[list[Line]]:
    async def all_blocks() -> list[list[Line]]:
        return [block async for block in lines.blocks(most)]

    return asyncio.run(all_blocks())


def texts(lines: Lines) -> list[str]:
    return [line.text for block in read(lines) for line in block]


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", []),
        (b"\n", [""]),
        (b"a", ["a"]),
        (b"a\n", ["a"]),
        (b"a\nb", ["a", "b"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        (b"a\n\n \nb\n", ["a", "", " ", "b"]),
        (b"\xef\xbb\xbfa\n\xef\xbb\xbfb\n", ["a", "\ufeffb"]),
        (b"a\rb\x0bc\x0cd\xe2\x80\xa8e\n", ["a\rb\x0bc\x0cd\u2028e"]),
        (b"\xff\xfe\n\xed\xa0\x80\n", ["\ufffd\ufffd", "\ufffd\ufffd\ufffd"]),
        ("é\n\U0001f40d".encode(), ["é", "\U0001f40d"]),
        (b"a\0b\n", ["a\0b"]),
    ],
)
def test_the_lines_of_a_file(tmp_path: Path, data: bytes, wanted: list[str]) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(data)
    lines = Lines.of([str(path)])
    assert texts(lines) == wanted
    assert lines.count() == len(wanted)


def test_lines_that_lie_across_reads_are_whole(tmp_path: Path) -> None:
    wanted = ["é" * (number % 977) for number in range(2000)]  # over a megabyte, read in pieces
    path = tmp_path / "in.txt"
    path.write_text("\n".join(wanted), "utf-8")
    assert texts(Lines.of([str(path)])) == wanted
    assert Lines.of([str(path)]).count() == 2000


def test_blocks_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("a\n" * 10)
    assert [len(block) for block in read(Lines.of([str(path)]), 4)] == [4, 4, 2]
    assert [len(block) for block in read(Lines.of(["a", "b", "c"]), 2)] == [2, 1]


@pytest.mark.parametrize("end", [b"", b"\n", b"\nafter\n"])
def test_a_line_too_long_is_told_and_not_kept(tmp_path: Path, end: bytes) -> None:
    path = tmp_path / "in.txt"
    path.write_bytes(b"before\n" + b"x" * (5 * MAX_LINE_BYTES) + end)
    found = [line for block in read(Lines.of([str(path)])) for line in block]
    assert [line.text for line in found] == ["before", "", *(["after"] if b"after" in end else [])]
    assert found[1].fault == "the line is over 1048576 bytes"
    assert len(found) == Lines.of([str(path)]).count()


def test_a_pipe_gives_what_is_there_without_waiting_for_more() -> None:
    async def slowly() -> list[list[Line]]:
        reading, writing = os.pipe()
        blocks = Lines((), Path(f"/dev/fd/{reading}")).blocks(10)
        found = []
        for data in (b"a\nb", b"c\nd\n", b"e"):
            os.write(writing, data)
            if b"\n" in data:
                async with asyncio.timeout(60):
                    found.append(await anext(blocks))
        os.close(writing)
        found += [block async for block in blocks]
        os.close(reading)
        return found

    found = asyncio.run(slowly())
    assert [[line.text for line in block] for block in found] == [["a"], ["bc", "d"], ["e"]]


def test_a_pipe_that_says_nothing_can_be_left() -> None:
    async def leave() -> None:
        reading, writing = os.pipe()
        waiting = asyncio.ensure_future(anext(Lines((), Path(f"/dev/fd/{reading}")).blocks(10)))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        os.close(writing)
        os.close(reading)

    asyncio.run(leave())


def test_nobody_can_tell_how_many_lines_a_pipe_will_have() -> None:
    reading, writing = os.pipe()
    assert Lines((), Path(f"/dev/fd/{reading}")).count() is None
    os.close(writing)
    os.close(reading)


@pytest.mark.parametrize(
    "given", [["a text"], ["a text.txt and more"], ["a", "b"], ["x" * 5000], ["a\0b"], ["README"]]
)
def test_arguments_that_are_no_files_are_the_lines(
    given: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert texts(Lines.of(given)) == given


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ([], "nothing was given"),
        (["nowhere.txt"], "there is no file nowhere.txt"),
        (["in/nowhere.jsonl"], "there is no file in/nowhere.jsonl"),
        (["."], "is a folder"),
        ([""], "the text is empty"),
        ([" "], "the text is empty"),
    ],
)
def test_what_can_only_be_a_mistake_is_refused(
    given: list[str], fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidRequest, match=fault):
        Lines.of(given)


def test_a_file_that_is_gone_or_closed_to_us_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="cannot be read: No such file"):
        read(Lines((), tmp_path / "gone"))
    with pytest.raises(InvalidRequest, match="cannot be read: Is a directory"):
        read(Lines((), tmp_path))


def test_a_file_may_be_named_as_one(tmp_path: Path) -> None:
    path = tmp_path / "in.txt"
    path.write_text("a\nb\n")
    assert texts(Lines.of((), path)) == ["a", "b"]
    with pytest.raises(InvalidRequest, match="give either --file"):
        Lines.of(["a"], path)


# --- out

FAILED = '{"id": 2, "error": {"code": "too_long", "message": "no"}}\n'
OLD = f'{{"a": 1}}\n{FAILED}{{"output": {{"error": {{"code": "mine", "message": "kept"}}}}}}\n'
"""A line that is well, one that failed, one whose answer only looks like that."""


def put(path: Path, *records: dict[str, Any], resume: bool = False) -> LineOutput:
    output = LineOutput(path, resume=resume)
    output.write(records)
    output.close()
    return output


def test_a_line_for_each_record(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    output = put(path, {"a": "é\n"}, {"b": [1, 0.5, None]})
    assert path.read_bytes() == '{"a": "é\\n"}\n{"b": [1, 0.5, null]}\n'.encode()
    assert (output.before, output.written) == (0, 2)


@pytest.mark.parametrize("torn", [b"", b'{"a": ', b'{"a": 3}', b"\xff"])
def test_it_goes_on_after_the_last_whole_line(tmp_path: Path, torn: bytes) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"a": 1}\n{"a": 2}\n' + torn)
    output = put(path, {"a": 3}, resume=True)
    assert path.read_text() == '{"a": 1}\n{"a": 2}\n{"a": 3}\n'
    assert (output.before, output.written) == (2, 1)


def test_going_on_with_nothing_is_beginning(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    assert put(path, {"a": 1}, resume=True).before == 0
    assert put(path, resume=True).before == 1
    assert path.read_text() == '{"a": 1}\n'


def test_many_lines_are_counted_in_pieces(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes((b"x" * 999 + b"\n") * 3000 + b"y" * 2_000_000)
    assert put(path, resume=True).before == 3000
    assert path.stat().st_size == 3_000_000


def test_nothing_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text("precious\n")
    with pytest.raises(InvalidRequest, match="is there already: go on with it"):
        LineOutput(path)
    assert path.read_text() == "precious\n"
    with pytest.raises(InvalidRequest, match="cannot be written: No such file"):
        LineOutput(tmp_path / "no" / "out.jsonl")
    with pytest.raises(InvalidRequest, match="name it with --output"):
        LineOutput(None, resume=True)


# --- out, once more where it failed


def old_file(folder: Path, torn: str = "") -> Path:
    path = folder / "out.jsonl"
    path.write_text(OLD + torn)
    path.chmod(0o640)
    return path


@pytest.mark.parametrize("torn", ["", '{"a": '])
def test_lines_that_failed_are_made_anew_in_their_places(tmp_path: Path, torn: str) -> None:
    path = old_file(tmp_path, torn)
    output = LineOutput(path, resume=True)
    assert (output.before, output.failed_before) == (3, 1)
    first, failed, *rest = [*output.kept(2), *output.kept(3)]
    kept = rest[0]
    assert (first, failed, rest[1:]) == (b'{"a": 1}\n', None, [None, None])
    assert first is not None
    assert kept is not None
    output.write([first, {"id": 2, "a": 2}])
    assert path.read_text() == OLD  # as long as it is not done
    output.write([kept, {"a": 4}])
    assert (output.written, output.lines) == (2, 4)
    wanted = OLD.replace(FAILED, '{"id": 2, "a": 2}\n') + '{"a": 4}\n'
    assert path.read_text() == wanted
    output.close()
    assert path.read_text() == wanted
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("done", [0, 1, 2])
def test_what_is_left_early_keeps_all_lines(tmp_path: Path, done: int) -> None:
    path = old_file(tmp_path)
    output = LineOutput(path, resume=True)
    lines: list[bytes | dict[str, Any]] = [line or {"id": 2, "a": 2} for line in output.kept(3)]
    output.write(lines[:done])
    output.close()
    assert path.read_text() == (OLD.replace(FAILED, '{"id": 2, "a": 2}\n') if done == 2 else OLD)
    assert output.lines == 3
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    path = old_file(tmp_path / "there")
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    output = LineOutput(link, resume=True)
    output.write([line or {"a": 2} for line in output.kept(3)])
    output.close()
    assert link.is_symlink()
    assert path.read_text() == OLD.replace(FAILED, '{"a": 2}\n')


def test_a_full_disk_costs_nothing_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    path = old_file(tmp_path)
    output = LineOutput(path, resume=True)
    output.write([b"{}\n", {"a": 2}])
    monkeypatch.setattr("shutil.copyfileobj", full)
    with pytest.raises(OSError, match="No space"):
        output.close()
    assert path.read_text() == OLD
    assert list(tmp_path.iterdir()) == [path]
