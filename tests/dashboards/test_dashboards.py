"""The committed dashboards are what `build.py` makes, are sound, and ask only for what there is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from board_queries import BOARDS, filled, panels
from served_series import asked_for, recorded_ones, served

FOLDER = Path(__file__).parents[2] / "dashboards"
VARIABLES = {
    "fleet": {"datasource", "queue"},
    "queue": {"datasource", "queue"},
    "worker": {"datasource", "queue", "instance", "worker"},
}
UNITS = {"none", "short", "s", "bytes", "percentunit", "ops", "reqps"}
VALUES = {"queue": "a|b", "instance": ".+", "worker": ".+", "__rate_interval": "1m"}


def board(name: str) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return plain


def expressions(name: str) -> list[str]:
    return [expression for panel in panels(name, VALUES) for expression, _ in panel.targets]


def test_committed_json_is_what_the_script_makes() -> None:
    check = subprocess.run(
        [sys.executable, FOLDER / "build.py", "--check"], capture_output=True, text=True, check=False
    )
    assert check.returncode == 0, check.stdout + check.stderr


def test_all_dashboards_are_looked_at() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.json")) == sorted(BOARDS)
    assert len({board(name)["uid"] for name in BOARDS}) == len(BOARDS)


@pytest.mark.parametrize("name", BOARDS)
def test_each_panel_says_what_it_shows_and_asks_for_it(name: str) -> None:
    plain = board(name)
    ids = [panel["id"] for panel in plain["panels"]]
    assert len(ids) == len(set(ids))
    for panel in plain["panels"]:
        if panel["type"] == "row":
            continue
        assert panel["title"]
        assert panel["description"], panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS, panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        letters = [target["refId"] for target in panel["targets"]]
        assert letters
        assert letters == sorted(set(letters))
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


@pytest.mark.parametrize("name", BOARDS)
def test_panels_lie_on_the_grid_and_not_on_each_other(name: str) -> None:
    cells = [
        {
            (x, y)
            for x in range(panel.place["x"], panel.place["x"] + panel.place["w"])
            for y in range(panel.place["y"], panel.place["y"] + panel.place["h"])
        }
        for panel in panels(name, VALUES)
    ]

    assert all(cells)
    assert all(0 <= x < 24 for covered in cells for x, _ in covered)
    for one, other in combinations(cells, 2):
        assert not one & other


@pytest.mark.parametrize("name", BOARDS)
def test_variables_are_those_that_are_asked_for(name: str) -> None:
    told = {variable["name"] for variable in board(name)["templating"]["list"]}
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(board(name))))

    assert told == VARIABLES[name]
    assert told == used - {"__rate_interval"}


@pytest.mark.parametrize("name", BOARDS)
def test_everything_asked_for_is_served_or_recorded(name: str) -> None:
    rules = yaml.safe_load((FOLDER / "rules" / "recording.yml").read_text())
    recorded = {rule["record"] for group in rules["groups"] for rule in group["rules"]}
    wanted = {series for expression in expressions(name) for series in asked_for(expression)}

    assert len(wanted) >= 10
    assert wanted <= served()
    assert {series for expression in expressions(name) for series in recorded_ones(expression)} <= recorded


def test_a_variable_without_a_value_is_an_error() -> None:
    with pytest.raises(KeyError):
        filled('up{queue=~"$queue"}', {})
