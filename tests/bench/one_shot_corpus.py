"""Texts with the lengths that people's texts have: what the standard library says about itself.

Every docstring once: from a word to pages, most of them a sentence or two. Another Python has other ones.
"""

from __future__ import annotations

import ast
import random
import statistics
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LIMIT = 256
"""Tokens of the longest text: where sentence-transformers would cut, as it is set for MiniLM."""
WARM_UP = 32
OTHERS = {"site-packages", "dist-packages", "test", "tests", "idlelib"}
DEFINITIONS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings() -> list[str]:
    """All of them, in an order that is always the same."""
    root = Path(sysconfig.get_path("stdlib"))
    found = set()
    for file in root.rglob("*.py"):
        if OTHERS.isdisjoint(file.relative_to(root).parts):
            nodes = ast.walk(ast.parse(file.read_bytes()))
            found |= {ast.get_docstring(node) or "" for node in nodes if isinstance(node, DEFINITIONS)}
    return sorted(found - {""})


class Corpus:
    """So many texts for each round, no text twice: nothing that a side remembers can help it."""

    def __init__(self, tokenizer: Any, rounds: int, texts: int) -> None:
        """Draw them.

        Raises:
            SystemExit: there are not so many.
        """
        drawn = docstrings()
        random.Random(7).shuffle(drawn)
        lengths = [len(ids) for ids in tokenizer(drawn)["input_ids"]]
        fitting = [(text, length) for text, length in zip(drawn, lengths, strict=True) if length <= LIMIT]
        wanted = rounds * texts + WARM_UP
        if len(fitting) < wanted:
            raise SystemExit(f"{wanted} texts are wanted, and there are {len(fitting)}: take fewer rounds")
        self.warm_up = [text for text, _ in fitting[-WARM_UP:]]
        used = fitting[: rounds * texts]
        self.rounds = [[text for text, _ in used[at : at + texts]] for at in range(0, len(used), texts)]
        self._lengths = [length for _, length in used]

    def __str__(self) -> str:
        return f"docstrings of {described(self._lengths)} tokens"


def described(lengths: Sequence[int]) -> str:
    """Mean and percentiles."""
    cuts = statistics.quantiles(lengths, n=100)
    marks = ", ".join(f"p{p} {cuts[p - 1]:.0f}" for p in (10, 50, 90, 99))
    return f"{statistics.mean(lengths):.0f} (mean; {marks})"
