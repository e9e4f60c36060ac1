"""What docs/protocol.md says in fenced blocks, and the calls in one of them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"
_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"|(\S+)')


def blocks(language: str) -> list[str]:
    """The texts of its blocks in one language, in order."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"no block in {language} on the page"
    return found


@dataclass
class Call:
    """A call on the page: its words, and the line that shows the reply, as it is written there."""

    words: list[bytes]
    reply: str


def calls(**meant: str) -> Iterator[Call]:
    """The calls on the page; a word that stands for something is replaced by what is meant."""
    (text,) = blocks("redis")
    for part in text.replace("\\\n", " ").removeprefix("> ").split("\n> "):
        command, _, reply = part.partition("\n")
        yield Call([_bytes(meant.get(word, word)) for word in _words(command)], _shown(reply))


def shown(reply: object) -> str:
    """A reply as the page shows it."""
    if isinstance(reply, list):
        return " ".join(map(shown, reply)) or "(empty)"
    if isinstance(reply, bytes):
        return "".join(map(_character, reply))
    return f"(error) {reply}" if isinstance(reply, Exception) else str(reply)


def pattern(reply: str) -> str:
    """What matches a reply like the one on the page."""
    return re.escape(reply).replace("TIME", r"\d{13}").replace("ID", r"\d{13}-\d+")


def _words(text: str) -> list[str]:
    return [quoted if plain == "" else plain for quoted, plain in _WORD.findall(text)]


def _shown(reply: str) -> str:
    return " ".join(_words(reply)).replace('\\"', '"')


def _bytes(word: str) -> bytes:
    return word.encode("ascii").decode("unicode_escape").encode("latin-1")


def _character(byte: int) -> str:
    if byte == ord("\n"):
        return "\\n"
    return chr(byte) if 32 <= byte < 127 else f"\\x{byte:02x}"
