"""What a service pays for importing the client."""

from __future__ import annotations

import subprocess
import sys

import pytest

import streamfleet_producer


@pytest.mark.parametrize("module", ["streamfleet_producer", "streamfleet_producer.blocking"])
def test_importing_it_imports_nothing_heavy(module: str) -> None:
    heavy = "torch transformers numpy typer rich rq starlette streamfleet_worker"
    check = f"import sys, {module}; print(sorted(set({heavy!r}.split()) & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", check], check=True, capture_output=True, text=True)
    assert output.stdout.strip() == "[]"


def test_everything_it_names_is_there() -> None:
    for name in streamfleet_producer.__all__:
        assert getattr(streamfleet_producer, name)
    assert sorted(streamfleet_producer.__all__) == streamfleet_producer.__all__
