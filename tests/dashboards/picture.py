"""A sheet in inches, on which panels are drawn."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch
from PIL import Image

mpl.rcParams.update({"font.family": "DejaVu Sans", "font.size": 8, "axes.linewidth": 0.6})

WIDTH_IN, UNIT_IN, DPI = 15.0, 0.285, 100
"""Of the picture, and of one row of the grid."""
HEAD_IN = 0.5
INK, FAINT, PAPER, GROUND = "#1f2329", "#6b7280", "#ffffff", "#eef0f3"


@dataclass(frozen=True)
class Box:
    """A rectangle of the picture, in inches from its lower left corner."""

    left: float
    bottom: float
    width: float
    height: float

    def within(self, left: float, bottom: float, right: float, top: float) -> Box:
        """What margins leave of it."""
        return Box(
            self.left + left,
            self.bottom + bottom,
            max(self.width - left - right, 0.1),
            max(self.height - bottom - top, 0.1),
        )


class Picture:
    """A figure of the size of a dashboard."""

    def __init__(self, title: str, rows: int, started: float, ended: float, note: str) -> None:
        self.height_in = rows * UNIT_IN + HEAD_IN
        self.figure = Figure(figsize=(WIDTH_IN, self.height_in), dpi=DPI, facecolor=GROUND)
        self.started, self.ended = started, ended
        self.text(Box(0.12, self.height_in - 0.38, 5, 0.3), title, size=13, weight="bold")
        self.text(Box(WIDTH_IN - 6.12, self.height_in - 0.36, 6, 0.3), note, size=8, ink=FAINT, right=True)

    def text(
        self,
        box: Box,
        words: str,
        *,
        size: float,
        weight: str = "normal",
        ink: str = INK,
        right: bool = False,
        middle: bool = False,
    ) -> None:
        """Words at the bottom of a box: from its left, to its right, or about its middle."""
        share = 1.0 if right else 0.5 if middle else 0.0
        self.figure.text(
            (box.left + share * box.width) / WIDTH_IN,
            box.bottom / self.height_in,
            words,
            fontsize=size,
            fontweight=weight,
            color=ink,
            ha="right" if right else "center" if middle else "left",
            va="bottom",
        )

    def axes(self, box: Box) -> Axes:
        """Axes that fill a box."""
        rectangle = (
            box.left / WIDTH_IN,
            box.bottom / self.height_in,
            box.width / WIDTH_IN,
            box.height / self.height_in,
        )
        return self.figure.add_axes(rectangle)

    def card(self, box: Box) -> None:
        """A sheet of paper under a panel."""
        self.figure.patches.append(
            FancyBboxPatch(
                (box.left / WIDTH_IN, box.bottom / self.height_in),
                box.width / WIDTH_IN,
                box.height / self.height_in,
                boxstyle="square,pad=0",
                transform=self.figure.transFigure,
                facecolor=PAPER,
                edgecolor="#d8dce2",
                linewidth=0.6,
                zorder=-1,
            )
        )

    def save(self, path: Path) -> None:
        """Write it as a PNG of 256 colours, which is a third of the size."""
        whole = BytesIO()
        self.figure.savefig(whole, dpi=DPI, facecolor=GROUND)
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.open(whole).convert("RGB").quantize(256).save(path, optimize=True)
