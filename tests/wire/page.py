"""What docs/protocol.md says in fenced blocks."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "protocol.md"


def blocks(language: str) -> list[str]:
    """The texts of its blocks in one language, in order."""
    found = re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found, f"no block in {language} on the page"
    return found
