"""The make targets and the script that the continuous integration calls."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from pretend_machine import executable

ROOT = Path(__file__).parents[2]
TARGETS = {
    "help", "bootstrap", "demo", "test", "check", "test-all", "chaos", "bench", "format", "lint",
    "types", "layers", "constraints", "clean",
}  # fmt: skip


def output(*command: str | Path, cwd: Path, path: str = "") -> str:
    # A make that runs this test must not hand its flags on.
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS", "PYTHON", "ARGS"))}
    kept["PATH"] = path + kept["PATH"]
    return subprocess.check_output(command, cwd=cwd, env=kept, text=True)


def recipe(target: str) -> list[str]:
    return output("make", "-n", "--no-print-directory", target, cwd=ROOT).splitlines()


@pytest.mark.parametrize("arguments", [[], ["help"]])
def test_help_comes_first_and_lists_every_target(arguments: list[str]) -> None:
    listed = output("make", *arguments, cwd=ROOT).splitlines()

    assert {match[1] for line in listed if (match := re.match(r"  make (\S+) +\S", line))} == TARGETS


def test_check_ends_with_the_very_test_target() -> None:
    tests = [line for line in recipe("test") if "pytest" in line]

    assert tests == ['.venv/bin/python -m pytest -n 4 --dist loadfile -m "not slow" ']
    assert [line for line in recipe("check") if "bootstrap.py" not in line][-1:] == tests


def test_check_runs_each_tool_before_the_tests() -> None:
    tools = [
        tool
        for line in recipe("check")
        for tool in ("ruff format --check", "ruff check", "mypy", "lint-imports", "pytest")
        if tool in line
    ]

    assert tools == ["ruff format --check", "ruff check", "mypy", "lint-imports", "pytest"]


def test_every_target_makes_its_environment_first() -> None:
    for target in TARGETS - {"help", "clean"}:
        assert "python3 .ci/bootstrap.py" in recipe(target)[0]


def test_the_ci_script_calls_make_check_from_any_directory(tmp_path: Path) -> None:
    executable(tmp_path / "make", '#!/bin/sh\necho "$PWD: make $*, stdin: $(cat)"\n')

    said = output(ROOT / ".ci" / "run", cwd=tmp_path, path=f"{tmp_path}:")

    assert said == f"{ROOT}: make check, stdin: \n"
