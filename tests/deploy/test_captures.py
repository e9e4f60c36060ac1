"""What the pages show of terminals: it fits one, and each block ends."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.cells import cell_len

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
WIDTH = 80
_FENCE = re.compile(r"^(?P<indent> *)(?P<ticks>`{3,}|~{3,})(?P<info>.*)$")


def blocks(text: str) -> Iterator[tuple[int, str, list[str]]]:
    """Of each fenced block the number of its first line, what its fence says, and its lines.

    Raises:
        ValueError: a block does not end.
    """
    opened: tuple[int, str, str] | None = None
    body: list[str] = []
    for number, line in enumerate(text.splitlines(), 1):
        fence = _FENCE.match(line)
        if opened is None:
            if fence is not None:
                opened, body = (number, fence["ticks"], fence["info"].strip()), []
        elif fence is not None and fence["ticks"].startswith(opened[1]) and not fence["info"].strip():
            yield opened[0] + 1, opened[2], body
            opened = None
        else:
            body.append(line)
    if opened is not None:
        raise ValueError(f"the block of line {opened[0]} does not end")


def faults(text: str) -> list[str]:
    """What is wrong with the captures of a page, with the numbers of the lines."""
    found = []
    for first, kind, lines in blocks(text):
        if kind != "console":
            continue
        for number, line in enumerate(lines, first):
            if cell_len(line) > WIDTH:
                found.append(f"{number}: {cell_len(line)} columns")
            if line != line.rstrip():
                found.append(f"{number}: ends with blanks")
            if any(unicodedata.category(char) == "Cc" for char in line):
                found.append(f"{number}: holds control characters")
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_captures_fit_a_terminal(page: Path) -> None:
    assert faults(page.read_text()) == []


def test_there_are_captures() -> None:
    kinds = [kind for page in PAGES for _, kind, _ in blocks(page.read_text())]
    assert "console" in kinds


def test_what_does_not_fit_is_found() -> None:
    wide = f"```console\n$ streamfleet top\n{'x' * 80}\n{'x' * 81}\n{'模' * 41}\n```\n"
    assert faults(wide) == ["4: 81 columns", "5: 82 columns"]
    assert faults("```console\n$ x\n\x1b[1mbold\n```") == ["3: holds control characters"]
    assert faults("```console\nQUEUE \n```") == ["2: ends with blanks"]
    assert faults(f"```sh\n{'x' * 81}\n```") == []
    with pytest.raises(ValueError, match="line 1"):
        faults("```console\n$ x\n")
    with pytest.raises(ValueError, match="line 4"):
        faults("```sh\nx\n```\n```\n```sh\n")
