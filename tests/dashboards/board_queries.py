"""The queries of a committed dashboard, with its variables filled in as Grafana would."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "dashboards"
BOARDS = ("fleet", "queue", "worker")


@dataclass(frozen=True)
class Panel:
    """A panel: what it is called, where it lies on a grid of 24 columns, and what it asks."""

    title: str
    kind: str
    unit: str
    place: Mapping[str, int]
    targets: tuple[tuple[str, str], ...]
    """Expression and legend of each query."""
    is_name: bool
    """Its legend is what it shows."""
    is_stacked: bool


def panels(board: str, values: Mapping[str, str]) -> list[Panel]:
    """All panels of a dashboard, rows included, with `values` in the place of its variables."""
    found = json.loads((FOLDER / f"{board}.json").read_text())["panels"]
    return [_panel(panel, values) for panel in found]


def _panel(panel: Mapping[str, Any], values: Mapping[str, str]) -> Panel:
    options, defaults = panel.get("options", {}), panel.get("fieldConfig", {}).get("defaults", {})
    stacking = defaults.get("custom", {}).get("stacking", {}).get("mode", "none")
    unit = options["yAxis"]["unit"] if panel["type"] == "heatmap" else defaults.get("unit", "")
    return Panel(
        title=panel["title"],
        kind=panel["type"],
        unit=unit,
        place=panel["gridPos"],
        targets=tuple(
            (filled(target["expr"], values), target["legendFormat"]) for target in panel.get("targets", ())
        ),
        is_name=options.get("textMode") == "name",
        is_stacked=stacking == "normal",
    )


def filled(expression: str, values: Mapping[str, str]) -> str:
    """An expression with its variables filled in; raises KeyError for one without a value."""
    return re.sub(r"\$(\w+)", lambda name: values[name[1]], expression)


def legend(form: str, labels: Mapping[str, str]) -> str:
    """What Grafana writes beside a series: `{{queue}} p50` with the label's value."""
    return re.sub(r"{{(\w+)}}", lambda name: labels.get(name[1], ""), form).strip()
