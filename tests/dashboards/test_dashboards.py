"""The committed dashboards are what `build.py` makes, are sound, and ask only for metrics that exist."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamfleet_common.depth import Depth
from streamfleet_worker.engine.base import EngineInfo
from streamfleet_worker.metrics import Metrics, QueueDepth

FOLDER = Path(__file__).parents[2] / "dashboards"
DASHBOARDS = sorted(FOLDER.glob("*.json"))


def panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]


def served() -> set[str]:
    """Every sample name that a worker's /metrics shows."""
    info = EngineInfo("m", "r", ("generate",), "cpu", "float32", 8, 64, 10)
    metrics = Metrics("q", "0")
    metrics.built(info)
    metrics.registry.register(QueueDepth("q", lambda: Depth(1, 2, 3, 0)))
    return {sample.name for family in metrics.registry.collect() for sample in family.samples}


def test_committed_json_is_what_the_script_makes() -> None:
    check = subprocess.run(
        [sys.executable, FOLDER / "build.py", "--check"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout + check.stderr


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_structure(path: Path) -> None:
    board = json.loads(path.read_text())
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    for panel in panels(path):
        assert panel["title"]
        assert panel["description"], panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert letters
        assert letters == sorted(set(letters))
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "queue"}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.name)
def test_every_metric_asked_for_is_served(path: Path) -> None:
    asked = {
        name
        for panel in panels(path)
        for target in panel["targets"]
        for name in re.findall(r"streamfleet_\w+", target["expr"])
    }
    assert len(asked) >= 10
    assert asked <= served()
