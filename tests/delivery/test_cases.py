"""Every case has its tests, and they are there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from delivery.cases import CASES, WHAT

ROOT = Path(__file__).parents[2]


def names_in(path: str) -> set[str]:
    """The names of the tests in a file."""
    tree = ast.parse((ROOT / path).read_text())
    functions = (node for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return {function.name for function in functions if function.name.startswith("test_")}


def test_each_case_is_known() -> None:
    assert CASES.keys() == WHAT.keys()
    assert {f"A{number:02}" for number in range(1, 20)} <= CASES.keys()


@pytest.mark.parametrize("case", CASES)
def test_the_tests_of_a_case_are_there(case: str) -> None:
    assert CASES[case]
    for name in CASES[case]:
        path, _, test = name.partition("::")
        assert test in names_in(path), name
